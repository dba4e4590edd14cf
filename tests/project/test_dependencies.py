"""Tests of the required dependencies: every other dependency belongs to an extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {"cloudpickle", "gymnasium", "numpy", "rich", "tensordict", "torch", "torchrl"}
TESTING = {"hypothesis", "pytest"}
PLACES = (
    ("testing", "storage/ext/testing"),
    ("testing", "collector/ext/testing/transports"),
    ("ray", "collector/ext/ray"),
    ("pettingzoo", "collector/ext/recorder/parallel_recorder.py"),
    ("sb3", "collector/ext/recorder/sb3_recorder.py"),
)
"""Extras, and the modules that may import their packages."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", each)[0] for each in requirements}


def imported(file: Path) -> Iterator[str]:
    """Yield the packages that a module imports at its top level, but not within functions."""
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def test_what_everybody_needs_is_pinned() -> None:
    assert names(PROJECT["dependencies"]) == NEEDED


@pytest.mark.parametrize("wing", ["collector", "storage"])
def test_modules_import_with_themselves_only_what_everybody_has(wing: str) -> None:
    found: dict[str, set[str]] = {}
    for file in (ROOT / wing).rglob("*.py"):
        place = next((each for each, at in PLACES if file.is_relative_to(ROOT / at)), "rest")
        found.setdefault(place, set()).update(imported(file))
    ours = {"tallyroll", *sys.stdlib_module_names}
    assert found["rest"] - ours <= NEEDED
    assert found.get("ray", set()) - ours <= NEEDED | {"ray"}  # imported within functions
    assert found.get("sb3", set()) - ours <= NEEDED | {"stable_baselines3"}
    assert found.get("testing", set()) - ours <= NEEDED | TESTING
    assert names(PROJECT["optional-dependencies"]["testing"]) == TESTING


# Extras that `all` leaves out: users do not need those in OURS, and those in APART stay separate.
OURS = {"bench", "docs", "release", "test", "testing"}
APART = {"mo-gymnasium", "playground", "procgen", "ray", "vmas"}


def test_the_classifiers_and_the_table_name_the_same_versions_of_python() -> None:
    given = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    table = (ROOT / "docs/guarantees.md").read_text().partition("## Versions")[2]
    tried = re.findall(r"^\| (3\.\d+)\.\d+ ", table, re.MULTILINE)
    assert given == sorted({*tried}, key=lambda each: int(each[2:]))
    assert PROJECT["requires-python"] == f">={given[0]}"
    readme = (ROOT / "README.md").read_text()
    assert f"**Linux, Python {given[0]} to {given[-1]}.**" in readme


def test_all_are_the_extras_that_can_be_installed_together() -> None:
    extras = PROJECT["optional-dependencies"]
    listed = [re.fullmatch(r"tallyroll\[([\w,-]+)\]", each) for each in extras["all"]]
    found = [name for each in listed if each for name in each[1].split(",")]
    assert len(found) == len({*found})
    assert {*found} == {*extras} - OURS - APART - {"all"}
    # In the tests, extras that need an old gym, pygame or other pins have their own environments.
    environments = tomllib.loads((ROOT / "tests/systems/environments.toml").read_text())
    together = {*environments["systems"]["extras"].split(",")}
    together |= {*environments["core"]["extras"].split(",")}
    assert {*found} <= together
    assert not APART & together


def test_each_of_them_has_a_version_that_tests_ran_with() -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert NEEDED | {"h5py", "shtab", "tensorboard", "wandb"} <= {*pinned}
    assert len(pinned) == len({*pinned})
