"""Test a writer that is killed during a rewind: all rows remain, or only those to keep.

A reader that was opened before sees nothing else, either. ``TALLYROLL_KILLS`` sets the number of
kills.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tallyroll.storage import open_storage, verify
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to

from killed_storages_kit import (
    CASES,
    STEPS,
    Case,
    Told,
    assert_are,
    assert_whole,
    at,
    forked,
    in_a_process,
    lines_of,
    oracle,
    record_of,
    shown,
)

KILLS = int(os.environ.get("TALLYROLL_KILLS", "50"))
KEPT, BEFORE, BEGUN, LATER, MORE = 444, 600, 660, 36_000, 120
"""Numbers of rows for the rewind.

They are: rows that stay, rows when the second run began, rows before the rewind, the number in the
first row written after it, and the number of rows written after it.
"""
STATES = [
    np.arange(BEGUN),
    np.arange(KEPT),
    np.concatenate([np.arange(KEPT), np.arange(LATER, LATER + MORE)]),
]
"""Rows in each state, by the numbers that their values encode."""
RECORDS = [record_of(BEGUN), record_of(KEPT), record_of(LATER)]
RUNS = [["first", "second"], ["first"], ["first"]]


def numbers_of(storage: DiskStorage) -> list[int]:
    """Return the numbers of the rows in a storage. Each row must be complete."""
    return assert_whole(storage.in_order()).tolist()


def state_of(storage: DiskStorage) -> int:
    """Return the state of the storage, judged by its rows."""
    ring, found = storage.ring, numbers_of(storage)
    for state, numbers in enumerate(STATES):
        # In a ring, the rows that the rewound rows had overwritten are gone.
        least = max(0, BEGUN - ring, len(numbers) - ring) if ring else 0
        if found == numbers[least:].tolist():
            return state
    raise AssertionError(f"{len(found)} rows, from {found[:3]} to {found[-3:]}")


def make(case: Case, path: Path) -> None:
    with case.create(path) as storage:
        storage.writer.runs.provenance = {"name": "first"}
        storage.extend(oracle(0, KEPT), record=record_of(KEPT))
        storage.extend(oracle(KEPT, BEFORE - KEPT), record=record_of(BEFORE))
        storage.writer.runs.provenance = {}
        storage.writer.runs.begin(storage.schema, {"name": "second"})
        storage.extend(oracle(BEFORE, BEGUN - BEFORE), record=record_of(BEGUN))


def rewind(case: Case, path: Path, told: Told, durability: str) -> None:
    """Rewind, write other rows in their place, and report after each step."""
    with case.kind(path, mode="append", durability=durability) as storage:  # type: ignore[arg-type]
        rewind_to(storage.writer, KEPT, (KEPT, record_of(KEPT)))
        told.head = 1
        storage.extend(oracle(LATER, MORE), record=record_of(LATER))
        told.head = 2


def kill_at_lines(name: str, folder: Path, durability: str, points: int, seed: int) -> list[int]:
    """Kill writers at lines throughout the code, and check each result. Return the states found."""
    case, base, work = CASES[name], folder / "base", folder / "work"
    make(case, base)

    def one(line: int) -> tuple[Told, DiskStorage]:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        (shutil.copytree if base.is_dir() else shutil.copy)(base, work / "rows")
        beside, told = open_storage(work / "rows"), Told()
        assert state_of(beside) == 0

        def act() -> None:
            told.lines = lines_of(lambda: rewind(case, work / "rows", told, durability), line)

        _, status = os.waitpid(forked(act), 0)
        assert status == 0 or (line and os.WIFSIGNALED(status)), status
        return told, beside

    told, beside = one(0)
    assert state_of(beside) == told.head == 2
    beside.close()
    total, found = told.lines, []
    pick = random.Random(seed)
    for number in range(points):  # one in each part of the run, to spread them
        line = pick.randrange(1 + number * total // points, 1 + (number + 1) * total // points)
        told, beside = one(line)
        with beside:
            found.append(_survived(case, work / "rows", beside, told.head, line))
    return found


def _survived(case: Case, path: Path, beside: DiskStorage, reached: int, line: int) -> int:
    with open_storage(path) as reader:
        state = state_of(reader)
        assert state in (reached, reached + 1), f"killed at line {line}"
        assert state_of(beside) == state, f"killed at line {line}"
        assert reader.record == beside.record == (reader.head, RECORDS[state])
        ids = reader.trajectories.ids
        assert beside.trajectories.ids.tolist() == ids.tolist()
        _check_shown(path, reader)
    found = verify(path, skip=["observations"]).findings  # observations are not consecutive
    assert not found, f"killed at line {line}: {found}"
    with case.kind(path, mode="append") as storage:
        assert state_of(storage) == state
        assert [run.get("name") for run in storage.runs] == RUNS[state]
        assert storage.reader.rewinds == min(state, 1)
        assert storage.manifest.get("rewinds", []) == [KEPT][: min(state, 1)]
        storage.extend(oracle(72_000, 40), record=record_of(5))
        assert numbers_of(storage)[-40:] == list(range(72_000, 72_040))
        assert numbers_of(beside)[-40:] == list(range(72_000, 72_040))
        table = storage.trajectories.table
    with case.kind(path, mode="append") as storage:  # with the table that the last writer saved
        assert storage.trajectories.table["id"].tolist() == table["id"].tolist()
        assert storage.trajectories.table["length"].tolist() == table["length"].tolist()
    assert not verify(path, skip=["observations"]).findings
    return state


def _check_shown(path: Path, reader: DiskStorage) -> None:
    """Check that other libraries see committed rows and no others."""
    try:
        columns = shown(path, type(reader))
    except RuntimeError as error:
        if "incompatible with the batch-size" in str(error):
            return  # tensordict's metadata are several files
        raise
    count = len(columns["id",])
    assert count <= reader.head
    if not reader.ring:
        assert_are(columns, np.asarray(numbers_of(reader))[:count])


@pytest.mark.timeout(60 + 4 * KILLS)
@pytest.mark.parametrize(
    ("name", "durability"),
    [
        ("memmap", "process"),
        ("memmap", "power"),
        ("ring", "process"),
        ("ring", "power"),
        ("hdf5", "process"),
        ("zarr", "process"),
    ],
)
def test_kill_9_while_rows_are_taken_back(name: str, durability: str, tmp_path: Path) -> None:
    seed, points = random.randrange(2**32), max(6, KILLS // 6)
    found = in_a_process(
        kill_at_lines, name, tmp_path, durability, points, seed, seconds=60 + 4 * KILLS
    )
    assert len(found) == points
    # An eighth of the lines lies between the rewind and the next commit, so few kills may miss it.
    wanted = {0, 1, 2} if points > 16 else {0, 2}
    assert {*found} >= wanted, f"the kills met only {found}"


def rewind_for_ever(path: Path, told: Told) -> None:
    """Rewind and write other rows in their place, again and again."""
    with CASES["memmap"].kind(path, mode="append") as storage:
        while True:
            rewind_to(storage.writer, KEPT, (KEPT, record_of(KEPT)))
            start = LATER + 100 * STEPS * told.head
            storage.extend(oracle(start, MORE))
            storage.extend(oracle(start + MORE, MORE))
            told.head += 1


def read_beside(path: Path, seconds: float) -> int:
    """Read in every way during rewinds. Return the number of rewinds."""
    make(CASES["memmap"], path)
    told = Told()
    writer = forked(lambda: rewind_for_ever(path, told))
    try:
        with open_storage(path) as reader:
            until = time.monotonic() + seconds
            while time.monotonic() < until or told.head < 20:
                for _ in range(50):
                    assert_whole(reader.get(slice(KEPT - 4, KEPT + 4)))
                    with suppress(IndexError):  # rewound rows
                        assert_whole(reader.get(np.arange(KEPT - 10, len(reader))))
                numbers = assert_whole(reader.get(slice(0, 30)))
                assert numbers.tolist() == list(range(30))
                slices = reader.trajectories.sample_slices(4, 5)
                steps = slices["collector", "step"]
                assert bool((steps[:, 1:] == steps[:, :-1] + 1).all())
                flat = slices.reshape(-1)
                assert (flat["wide"].numpy() == at(flat["id"].numpy())["wide",]).all()
                lengths = reader.trajectories.table["length"]
                assert lengths.sum() in (BEGUN, KEPT, KEPT + MORE, KEPT + 2 * MORE)
                for id, rows in reader.trajectories.items():
                    assert set(rows["collector", "traj_ids"].tolist()) == {id}
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    return told.head


@pytest.mark.timeout(60)
def test_a_reader_beside_sees_whole_rows(tmp_path: Path) -> None:
    assert in_a_process(read_beside, tmp_path / "rows", 1.0, seconds=50) >= 20
