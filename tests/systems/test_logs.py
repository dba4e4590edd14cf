"""Test logs for TensorBoard and for Weights & Biases with their own readers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from json import loads
from pathlib import Path
from struct import unpack
from typing import Any

import pytest

from tallyroll.collector import ArgumentError, LogWarning, RunLog, SyncCollector

from worker_kit import DISABLED, LANES, factory

RUN: dict[str, Any] = {"frames_per_batch": 10, "seed": 3}


def log(target: Any, total: int, every: int = 25, **more: Any) -> list[dict[str, float]]:
    """Collect with a log, and return the expected rows."""
    rows: list[dict[str, float]] = []
    env = factory(DISABLED, 0, LANES)
    with (
        SyncCollector(env, total_frames=total, **RUN, **more) as collector,
        RunLog(collector, target, every=every) as one,
        RunLog(collector, rows.append, every=every) as other,
    ):
        for number, _ in enumerate(collector):
            one.update(loss=number)
            other.update(loss=number)
    return rows


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = found.Tags()["scalars"]
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in names}


def test_curves_of_tensorboard(tmp_path: Path) -> None:
    rows = log(f"tensorboard:{tmp_path}/curves", 94)
    curves = curves_in(tmp_path / "curves")
    assert {*curves} == {*rows[0]} - {"frames", "seed"}
    for name, points in curves.items():
        if name != "seconds":
            known = [(row["frames"], row[name]) for row in rows if row[name] == row[name]]
            assert dict(points) == pytest.approx(dict(known)), name


def test_curves_go_on_and_are_of_one_run(tmp_path: Path) -> None:
    target, storage = f"tensorboard:{tmp_path}/curves", tmp_path / "rows"
    log(target, 55, storage=storage)
    with pytest.raises(ArgumentError, match="has rows of another run, up to"):
        log(target, 55)
    log(target, 94, storage=storage, resume=True)
    points = curves_in(tmp_path / "curves")["episodes"]
    assert [step for step, _ in points] == [30, 50, 55, 75, 94]
    with (
        SyncCollector(factory(DISABLED, 0, LANES), total_frames=9, **RUN) as collector,
        RunLog(collector, f"tensorboard:{tmp_path}/other"),
        pytest.raises(ArgumentError, match="another run is writing to"),
    ):
        RunLog(collector, f"tensorboard:{tmp_path}/other")


def test_collecting_goes_on_where_no_event_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.utils.tensorboard as module

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "SummaryWriter", refuse)
    with pytest.warns(LogWarning, match="tensorboard:.* cannot be written") as seen:
        assert log(f"tensorboard:{tmp_path}/curves", 94)[-1]["frames"] == 94
    assert len(seen) == 1


SCRIPT = """
import sys
from test_logs import log
from json import dumps
print(dumps(log("wandb:tally", 94)))
"""


def rows_in(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a wandb run. The file is one block in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at = file.read_bytes(), 7
    assert len(content) < 2**15
    while at + 7 <= len(content):
        length, kind = unpack("<HB", content[at + 4 : at + 7])
        assert kind == 1, "a whole record"
        record = Record()
        record.ParseFromString(content[at + 7 : at + 7 + length])
        at += 7 + length
        assert not record.run.host
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {each.key or each.nested_key[0]: loads(each.value_json) for each in items}


def test_rows_of_wandb_offline(tmp_path: Path) -> None:
    """The test runs in its own process, because wandb's process lives as long as its parent."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={
            **os.environ,
            "WANDB_MODE": "offline",
            "PYTHONPATH": os.pathsep.join([*sys.path, str(here)]),
        },
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stderr == ""
    rows = loads(done.stdout)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for row, found in zip(rows, rows_in(file), strict=True):
        known = {name: value for name, value in row.items() if value == value}
        assert {**found, "seconds": 0} == {**found, **known, "seconds": 0}
        assert found["_step"] == row["frames"]
    assert str(here).encode() not in file.read_bytes()
