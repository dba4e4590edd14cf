"""Copied, packed and merged rows are replayed by the runs that made them, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_kit import KINDS, ROWS, collect
from tensordict import TensorDict

from tallyroll.collector import MultiprocessCollector, SyncCollector, replay
from tallyroll.collector.cli import main
from tallyroll.collector.ext.replay.makers import makers_of
from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.storages import DiskStorage

Stored = Callable[[str], Path]
Make = Callable[[DiskStorage, Path], Any]

CALL: dict[str, Any] = {"environment": {"id": "E"}, "call": {}, "lanes": 2}
LONG = "length >= 20"


def copy_twice(storage: DiskStorage, path: Path) -> None:
    storage.copy_to(path.with_name("between"), sort=True)
    with open_storage(path.with_name("between")) as between:
        between.trajectories.where(LONG).copy_to(path)


def write_again(storage: DiskStorage, path: Path) -> None:
    with MemmapStorage(path) as other:
        for start in range(0, len(storage), 64):
            other.extend(storage.get(slice(start, start + 64)))


WHOLE: dict[str, Make] = {
    "copied": lambda storage, path: storage.copy_to(path),
    "sorted": lambda storage, path: storage.copy_to(path.with_suffix(".zarr"), sort=True),
    "packed": lambda storage, path: storage.pack(path),
    "copied and packed": lambda storage, path: (
        storage.copy_to(path.with_name("between")),
        open_storage(path.with_name("between")).pack(path),
    ),
    "written again": write_again,
}
PARTS: dict[str, Make] = {
    "copied": lambda storage, path: storage.trajectories.where(LONG).copy_to(path),
    "packed": lambda storage, path: storage.trajectories.where(LONG).pack(path),
    "copied twice": copy_twice,
}


def made(make: Make, source: Path | list[Path], folder: Path) -> Path:
    with open_storage(source) as storage:
        make(storage, folder / "made")
    (path,) = folder.glob("made*")
    return path


def change_a_bit(path: Path, row: int = 100) -> None:
    """Change one bit of the next observation of a row."""
    with (path / "next/observation.memmap").open("r+b") as file:
        file.seek(row * 16)
        (octet,) = file.read(1)
        file.seek(row * 16)
        file.write(bytes([octet ^ 1]))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a storage by two runs and returns its path."""
    folder = tmp_path_factory.mktemp("resumed")

    def path_of(kind: str) -> Path:
        if not (path := folder / kind).exists():
            for frames in (100, ROWS):
                collect(path, num_envs=2, total_frames=frames, resume="auto", **KINDS[kind])
        return path

    return path_of


@pytest.mark.parametrize("kind", ["contexts", "plain"])
@pytest.mark.parametrize("way", WHOLE)
def test_all_rows_of_a_run(way: str, kind: str, resumed: Stored, tmp_path: Path) -> None:
    path = made(WHOLE[way], resumed(kind), tmp_path)
    report = replay(path, "all")
    assert (report.same, report.rows) == (True, ROWS), report.not_replayed
    with open_storage(resumed(kind)) as storage:
        assert report.equal == len(storage.trajectories)


@pytest.mark.parametrize("way", PARTS)
def test_chosen_trajectories(way: str, resumed: Stored, tmp_path: Path) -> None:
    """With their own seeds, trajectories are replayed. Otherwise earlier rows are missing."""
    with open_storage(resumed("seeded")) as storage:
        chosen = storage.trajectories.where(LONG)
        ids, rows = {*chosen.trajectories.ids.tolist()}, len(chosen)
        assert 0 < rows < ROWS
    report = replay(made(PARTS[way], resumed("seeded"), tmp_path / "a"), "all")
    assert (report.same, report.rows, report.equal) == (True, rows, len(ids)), report.not_replayed
    path = made(PARTS[way], resumed("plain"), tmp_path / "b")
    report = replay(path, "all")
    assert (report.status, report.replayed) == (2, 0)
    (why,) = report.not_replayed
    assert "does not contain all rows of the run" in why
    assert main(["replay", str(path), "--quiet"]) == 2


def test_the_end_of_a_run_has_not_its_beginning(resumed: Stored, tmp_path: Path) -> None:
    """The rows are complete and in order, but the first rows of their lanes are missing."""
    with open_storage(resumed("plain")) as storage, MemmapStorage(tmp_path / "made") as other:
        other.extend(storage.get(slice(50, ROWS)))
    report = replay(tmp_path / "made", "all")
    assert not report.differences
    assert report.rows == ROWS - 100  # all rows of the second process are there
    assert any(why.startswith("the lane has no rows left") for why in report.not_replayed)


@pytest.mark.parametrize("kind", ["seeded", "plain"])
def test_one_bit_of_a_copy_is_found(kind: str, resumed: Stored, tmp_path: Path) -> None:
    copy = made(WHOLE["copied"], resumed(kind), tmp_path / "a")
    with open_storage(copy) as storage:
        line = storage.trajectories.table[-3]  # made by the second process
        row = int(storage.trajectories.rows_of(int(line["id"]))[1])
        assert row >= 100
    change_a_bit(copy, row)
    packed = made(WHOLE["packed"], copy, tmp_path / "b")
    for path in (copy, packed):
        report = replay(path, "all")
        first = report.first_difference
        assert first is not None
        assert (report.status, report.differing) == (1, {"next/observation": 1})
        assert (first.trajectory, first.step) == (line["id"], 1)


@pytest.mark.parametrize("kind", ["seeded", "plain"])
def test_several_storages(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        collect(tmp_path / f"s-{seed}", seed=seed, total_frames=60 + seed, **KINDS[kind])
        for seed in range(3)
    ]
    total = 60 + 61 + 62
    for given in (paths, str(tmp_path / "s-*")):
        report = replay(given, "all")
        assert (report.same, report.rows) == (True, total), report.not_replayed
    assert main(["replay", *map(str, paths), "--all"]) == 0
    assert f"trajectories and {total:,} rows compared" in capsys.readouterr().out
    copy = made(WHOLE["sorted"], paths, tmp_path / "a")
    assert replay(copy, "all").same
    report = replay(made(WHOLE["packed"], paths, tmp_path / "b"), "all")
    assert report.same == (kind == "seeded")
    assert report.status == (0 if kind == "seeded" else 2)


def test_runs_that_were_made_differently(tmp_path: Path) -> None:
    """A part of both runs does not identify the run of a row; all rows of both do."""
    paths = [
        collect(
            tmp_path / f"s-{way}",
            env_kwargs={"sutton_barto_reward": way},
            seed=int(way),
            **KINDS["seeded"],
        )
        for way in (False, True)
    ]
    both = made(WHOLE["copied"], paths, tmp_path / "both")
    whole = made(WHOLE["copied"], both, tmp_path / "whole")
    assert replay(whole, "all").same
    report = replay(made(PARTS["copied"], both, tmp_path / "part"), "all")
    (why,) = report.not_replayed
    assert "several runs with different settings" in why


def test_calls_of_a_copy_and_of_several(tmp_path: Path) -> None:
    """A copy does not record where environments were called.

    Several storages do, although ids move.
    """
    for name in "ab":
        with SyncCollector(
            "CartPole-v1",
            # each call leaves a surplus transition, so that the event names the next trajectory and
            # step
            num_envs=3,
            frames_per_batch=40,
            total_frames=120,
            seed=1 if name == "a" else 2,
            storage=tmp_path / name,
            **KINDS["seeded"],
        ) as collector:
            for number, _ in enumerate(collector):
                collector.env_set("gravity", 9.8 + number)
    report = replay(str(tmp_path / "[ab]"), "all")
    assert (report.same, report.rows) == (True, 240), report
    copy = made(WHOLE["copied"], tmp_path / "a", tmp_path / "copy")
    report = replay(copy, "all")
    (why,) = report.not_replayed
    assert "does not contain all calls of the environment" in why
    assert (report.status, report.replayed) == (2, 0)


def test_what_a_run_lost_is_known_of_several(tmp_path: Path) -> None:
    """Lost transitions may cause a difference after the first trajectory of a lane."""
    paths = [collect(tmp_path / name, num_envs=2) for name in "ab"]
    change_a_bit(paths[0])
    assert replay(paths, "all").status == 1
    with MemmapStorage(paths[0], mode="append") as storage:
        assert storage.record is not None
        record = json.loads(storage.record[1])
        record["ledger"]["lost"] += 1
        storage.writer.put_record(json.dumps(record).encode())
    report = replay(paths, "all")
    assert (report.status, report.differences) == (2, ())
    assert any("the run lost or discarded" in why for why in report.not_replayed)


def test_what_a_run_of_workers_lost_is_not_known_of_a_copy(tmp_path: Path) -> None:
    with MultiprocessCollector(
        "CartPole-v1",
        num_envs=2,
        num_workers=2,
        transport="thread",
        frames_per_batch=50,
        total_frames=ROWS,
        seed=1,
        storage=tmp_path / "a",
    ) as collector:
        for _ in collector:
            pass
    copy = made(WHOLE["copied"], tmp_path / "a", tmp_path / "copy")
    assert replay(copy, "all").same
    for path in (copy, tmp_path / "a"):
        change_a_bit(path)
    assert replay(tmp_path / "a", "all").status == 1
    report = replay(copy, "all")
    assert (report.status, report.differences) == (2, ())
    assert any(
        "a copy does not record the transitions that a run lost" in why
        for why in report.not_replayed
    )


def entries(*runs: dict[str, Any], rows: list[int | None], **more: Any) -> list[dict[str, Any]]:
    copied = {"copied_from": {"id": "a", "rows": rows}, "runs": [*runs], **more}
    return [{"first_row": 7, **copied}]


def test_runs_of_a_stretch() -> None:
    first = {**CALL, "first_row": 0, "first_row_of_run": 0, "seed": 1}
    second = {**CALL, "first_row": 30, "first_row_of_run": 0, "seed": 2}
    found = makers_of(entries(first, second, rows=[10, 49]), 47)
    assert [(each.first_row, each.entry["seed"]) for each in found] == [(7, 1), (27, 2)]
    assert "no rows left from the beginning of the run" in found[0].own_seeds_only
    assert not found[1].own_seeds_only
    # One row is missing, and it is unknown which; the same holds if the last row is unknown.
    for stop, last in ((46, 49), (47, None)):
        (one,) = makers_of(entries(first, second, rows=[10, last]), stop)
        assert (one.first_row, one.refused) == (7, "")
        assert "does not contain all rows of the run" in one.own_seeds_only


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [{"environment": {}, "call": {}}],
        [{"first_row": "x"}],
        [{**CALL, "first_row": 30}, {**CALL, "first_row": 2}],
    ],
)
@pytest.mark.parametrize("stop", [17, 16])
def test_a_copy_that_says_no_runs(runs: list[dict[str, Any]], stop: int) -> None:
    (one,) = makers_of(entries(*runs, rows=[0, 9]), stop)
    assert "does not record which runs made them" in one.refused


def test_runs_that_had_no_room() -> None:
    last = {**CALL, "first_row": 5, "first_row_of_run": 5}
    found = makers_of(entries(last, rows=[0, 9], runs_left_out=1), 17)
    assert [each.first_row for each in found] == [7, 12]
    assert "does not record which runs" in found[0].refused
    assert not found[1].refused
    (one,) = makers_of(entries(last, rows=[0, 9], runs_left_out=1), 16)
    assert "does not record which runs" in one.refused
    (one,) = makers_of([{"first_row": 0, "copies_left_out": True}], 9)
    assert "does not record which runs" in one.refused


def test_rows_of_no_run_among_copied_ones(tmp_path: Path) -> None:
    plain = {"first_row": 0}
    for stop in (17, 16):
        (one,) = makers_of(entries(plain, rows=[0, 9]), stop)
        assert "no run of a collector made the rows" in one.refused
    with MemmapStorage(tmp_path / "a") as storage:
        storage.extend(TensorDict({"x": np.zeros(3)}, [3]))
        assert storage.runs[0].keys() == {"first_row"}
