"""Tests that examples in docstrings print the output that they show, and leave no files on disk."""

from __future__ import annotations

import doctest
import io
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def examples() -> Iterator[doctest.DocTest]:
    """Yield the examples of each docstring in the installed package."""
    for wing in ("collector", "storage"):
        for file in sorted((ROOT / wing).rglob("*.py")):
            if re.search(r"^\s+>>> ", file.read_text("utf-8"), re.MULTILINE):
                name = ".".join(("tallyroll", *file.relative_to(ROOT).with_suffix("").parts))
                found = doctest.DocTestFinder().find(import_module(name), globs={})
                yield from (each for each in found if each.examples)


EXAMPLES = {each.name.removeprefix("tallyroll."): each for each in examples()}


def test_what_users_meet_first_has_examples() -> None:
    assert sorted(name.rpartition(".")[2] for name in EXAMPLES) == [
        "Columns",
        "DeviceStorage",
        "EpisodeBatches",
        "Ledger",
        "MemmapStorage",
        "OnePolicy",
        "Overlay",
        "Recorder",
        "Resets",
        "RunLog",
        "S3Options",
        "Shard",
        "SyncCollector",
        "System",
        "Trajectories",
        "collect",
        "env_call",
        "manual",
        "recover_env",
        "replay",
        "uniform",
        "where",
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(EXAMPLES[name], out=report.write)
    assert report.getvalue() == ""
    assert list(tmp_path.iterdir()) == []
