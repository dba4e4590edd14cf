"""Tests that environments.toml provides an environment for every test of an environment system."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PYPROJECT["optional-dependencies"]
ENVIRONMENTS: dict[str, dict[str, Any]] = tomllib.loads(
    (ROOT / "tests/systems/environments.toml").read_text()
)
FILES = {path.stem.removeprefix("test_") for path in (ROOT / "tests/systems").rglob("test_*.py")}
LISTED = {test for each in ENVIRONMENTS.values() for test in each["tests"]}


def test_every_system_has_a_test_file() -> None:
    assert sorted({*PYPROJECT["entry-points"]["tallyroll.envs"]} - FILES) == []


def test_every_test_file_has_an_environment() -> None:
    assert sorted(FILES - LISTED) == [], "these run nowhere"
    assert sorted(LISTED - FILES) == [], "there are no such files"


def test_every_environment_is_run() -> None:
    assert {name: each["run"] for name, each in ENVIRONMENTS.items() if each["run"] != "all"} == {
        "core": "always",
        "newest": "newest",
        "procgen": "apart",
        "lerobot": "apart",
        "rlds": "apart",
        "playground": "apart",
        "carl": "apart",
    }
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "bash check.sh --all --once"


def test_no_long_test_begins_after_the_time_of_the_gate() -> None:
    place = "tests/project/test_readme.py::test_each_benchmark_runs[memory]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", "-rs", "-p", "no:cacheprovider", place],
        cwd=ROOT,
        env={**os.environ, "TALLYROLL_CHECK_UNTIL": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "no time is left for long tests" in done.stdout, done.stdout + done.stderr


def test_every_extra_is_installed_somewhere() -> None:
    """The exceptions are `all`, the extras of benchmarks and releases, and a subset of `test`."""
    installed = {extra for each in ENVIRONMENTS.values() for extra in each["extras"].split(",")}
    assert installed ^ {*EXTRAS} == {
        "all",
        "bench",
        "release",
        "testing",
    }
    assert {*EXTRAS["testing"]} <= {*EXTRAS["test"]}
