"""Tests of a system whose package is not installed are left out here."""

from __future__ import annotations

from importlib.util import find_spec

NEEDS = {
    "ale": ["ale_py"],
    "envpool": ["envpool"],
    "procgen": ["gym3", "procgen"],
    "sb3": ["stable_baselines3"],
}
collect_ignore = [
    f"test_{name}.py" for name, modules in NEEDS.items() if not all(map(find_spec, modules))
]
