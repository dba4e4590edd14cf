"""Which test files run here: see environments.toml."""

from __future__ import annotations

import os
import tomllib
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = tomllib.loads((HERE / "environments.toml").read_text())

if name := os.environ.get("TALLYROLL_TEST_ENVIRONMENT"):
    # Of what has its place here nothing is left out: what is not installed fails.
    here = {*ENVIRONMENTS[name]["tests"]}
else:
    here = {
        test
        for environment in ENVIRONMENTS.values()
        for test, modules in environment["tests"].items()
        if all(map(find_spec, modules))
    }
collect_ignore = [
    str(file.relative_to(HERE)) for file in HERE.rglob("test_*.py") if file.stem[5:] not in here
]
