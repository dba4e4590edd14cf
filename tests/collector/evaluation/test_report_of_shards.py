"""A report shows the shards of one run as one run, next to a run collected as a whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tallyroll.collector import SyncCollector, report
from tallyroll.collector.cli import main

FRAMES = 1501


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a whole run, and with its three shards in ``parts``."""
    path = tmp_path_factory.mktemp("runs")
    for name, shard in (("whole", None), *((f"parts/{n}", f"{n}/3") for n in range(3))):
        with SyncCollector(
            "CartPole-v1",
            num_envs=8,
            frames_per_batch=40,
            total_frames=FRAMES,
            seed=0,
            shard=shard,
            storage=path / name,
        ) as collector:
            for _ in collector:
                pass
    return path


def test_all_shards_are_the_one_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = report(folder / "whole").runs
    found = report(folder / "parts")
    (run,) = found.runs
    assert (found.problems, found.notes) == ((), ())
    assert run.path == f"{folder / 'parts' / '0'} (3 of 3 shards)"
    assert (run.asked, run.stored, run.state, run.seed) == (FRAMES, FRAMES, "complete", 0)
    assert run.episodes == whole.episodes > 50
    assert sorted(run.returns) == sorted(whole.returns)
    # Rows within a batch are ordered by lane, and each storage has its own batches.
    assert (np.diff(run.ended_at) >= 0).all()
    assert np.abs(run.ended_at - whole.ended_at).max() <= 160
    assert run.ended_at.max() > FRAMES - 160
    assert run.counts is not None
    assert whole.counts is not None
    for name in ("executed", "discarded", "episodes_complete"):
        parts = [each.counts for n in range(3) for each in report(folder / "parts" / str(n)).runs]
        assert run.counts[name] == sum((each or {})[name] for each in parts)
    assert run.counts["episodes_complete"] == whole.counts["episodes_complete"]
    assert not found.differences
    assert main(["report", str(folder / "parts"), "--csv"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(f"{run.path},")
    assert f",{FRAMES},complete," in line


def test_what_is_missing_and_what_is_there_twice_is_said(folder: Path, tmp_path: Path) -> None:
    found = report([folder / "parts" / "0", folder / "parts" / "2", folder / "whole"])
    run, whole = found.runs
    assert run.path.endswith("0 (2 of 3 shards)")
    assert (run.state, run.asked, whole.state) == ("stopped", FRAMES, "complete")
    assert 0 < run.stored < FRAMES
    said = [str(each) for each in found.notes]
    assert said[0] == f"{run.path}: shards 1 of 3 are missing"
    with SyncCollector(
        "CartPole-v1",
        num_envs=8,
        frames_per_batch=40,
        total_frames=FRAMES,
        seed=0,
        shard="1/3",
        storage=tmp_path / "again",
    ) as collector:
        for _ in collector:
            pass
    shutil.copytree(folder / "parts" / "0", tmp_path / "copied")
    found = report([folder / "parts", tmp_path])
    (run,) = found.runs
    assert run.stored == FRAMES
    said = [str(each) for each in found.problems]
    assert any("again: shard 1 of 3 is also in " in each for each in said)
    assert any("copied: the run is a copy of the run in" in each for each in said)
    assert len(said) == 2
