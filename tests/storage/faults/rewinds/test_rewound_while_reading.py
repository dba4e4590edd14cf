"""Test that a reader gets complete rows while another process rewinds at any line of the reader.

That process may be killed before it has counted its rewind. ``TALLYROLL_REWINDS`` sets the number
of lines for each way to read.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import tallyroll.storage
from tallyroll.storage import IndexOutOfRange, PrioritizedSampler, n_step, open_storage, verify
from tallyroll.storage.engine.commit_engine import Engine
from tallyroll.storage.errors import StorageLocked
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to

from killed_storages_kit import CASES, MOST, STEPS, Key, assert_whole, forked, in_a_process, oracle

LINES = int(os.environ.get("TALLYROLL_REWINDS", "12"))
KEPT, ALL, LATER = 20 * STEPS + 5, 30 * STEPS, 3000 * STEPS
ENDED = set(range(KEPT // STEPS))
"""Trajectories that keep all of their rows."""
INSIDE = str(Path(tallyroll.storage.__file__).parent)


def items(storage: DiskStorage) -> None:
    found = set()
    for id, rows in storage.trajectories.items():
        assert_whole(rows)
        assert set(rows["collector", "traj_ids"].tolist()) == {id}
        found.add(id)
    assert found >= ENDED


def by_id(storage: DiskStorage) -> None:
    rows = storage.trajectories[KEPT // STEPS - 1]
    assert len(assert_whole(rows)) == STEPS
    with suppress(KeyError):  # rewound
        assert_whole(storage.trajectories[KEPT // STEPS + 2])


def table(storage: DiskStorage) -> None:
    found = storage.trajectories.table
    assert found["length"].sum() in (ALL, KEPT, KEPT + STEPS)
    assert set(found["id"].tolist()) >= ENDED


def slices(storage: DiskStorage) -> None:
    found = storage.trajectories.sample_slices(40, 3, short="pad", burn_in=2)
    mask = found["collector", "mask"]
    assert_numbers(found["id"][mask].numpy())
    assert mask.any(dim=1).all()


def steps(storage: DiskStorage) -> None:
    with suppress(IndexOutOfRange):
        assert_numbers(n_step(storage, np.arange(0, ALL, 7), n=3, gamma=0.9)["id"].numpy())
    assert_numbers(n_step(storage, np.arange(0, KEPT), n=3, gamma=0.9)["id"].numpy())


def priorities(storage: DiskStorage) -> None:
    sampler = PrioritizedSampler(storage)
    for _ in range(3):
        rows = sampler.sample(30)
        assert_numbers(rows["id"].numpy())
        sampler.update_priority(rows["collector", "row"], np.ones(30))


def get(storage: DiskStorage) -> None:
    assert assert_whole(storage.get(slice(0, KEPT))).tolist() == list(range(KEPT))
    with suppress(IndexOutOfRange):
        assert_whole(storage.get(np.arange(KEPT - 3, ALL)))
    assert len(assert_whole(storage.in_order())) in (ALL, KEPT, KEPT + STEPS)


def assert_numbers(numbers: np.ndarray) -> None:
    """Check that rows are from before the rewind, or from after it."""
    old, new = numbers < ALL, (numbers >= LATER) & (numbers < LATER + STEPS)
    assert (old | new).all()
    assert not (new.any() and (old & (numbers >= KEPT)).any())


READS = [items, by_id, table, slices, steps, priorities, get]


def rows_from(start: int, count: int) -> dict[Key, np.ndarray]:
    """Return the kit's rows, with rewards."""
    numbers = np.arange(start, start + count, dtype=np.float32)[:, None]
    return {**oracle(start, count), ("next", "reward"): numbers}


def rewind(path: Path, killed: bool) -> None:
    """Rewind in another process, and write other rows or be killed before that."""

    def act() -> None:
        if killed:
            Engine.finish_rewind = lambda *_: os._exit(0)  # type: ignore[method-assign]
        with suppress(StorageLocked), open_storage(path, "append") as storage:  # a reader probes
            rewind_to(storage.writer, KEPT, None)
            storage.extend(rows_from(LATER, STEPS))

    _, status = os.waitpid(forked(act), 0)
    assert status == 0, os.waitstatus_to_exitcode(status)


@contextmanager
def at_line(number: int, act: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Call ``act`` at the ``number``-th line that the storage's modules run here; 0 for never."""
    lines = itertools.count(1)
    seen = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(INSIDE):
            return None
        if event == "line":
            seen[0] = next(lines)
            if seen[0] == number:
                sys.settrace(None)
                act()
                sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        yield lambda: seen[0]
    finally:
        sys.settrace(None)


def read_at_lines(name: str, folder: Path, seed: int) -> int:
    """Read many times, with a rewind at another line each time. Return the number of rewinds."""
    pick, path = random.Random(seed), folder / "rows"
    with CASES["memmap"].create(folder / "base") as storage:
        storage.extend(rows_from(0, ALL))
    read = next(each for each in READS if each.__name__ == name)
    done = 0
    for warm, killed in itertools.product((False, True), repeat=2):
        total = 0
        for part in range(1 + LINES // 4):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(folder / "base", path)
            line = pick.randrange(
                1 + (part - 1) * total * 4 // LINES, 2 + part * total * 4 // LINES
            )
            with open_storage(path) as reader:
                if warm:
                    read(reader)
                with at_line(line if part else 0, partial(rewind, path, killed)) as lines:
                    try:
                        read(reader)
                    except BaseException as error:
                        error.add_note(f"{name}: {line=} of {total}, {warm=}, {killed=}, {seed=}")
                        raise
                total = total or lines()
                done += reader.head < ALL
    return done


@pytest.mark.timeout(60 + LINES)
@pytest.mark.parametrize("name", [each.__name__ for each in READS])
def test_rows_are_taken_back_at_any_line_of_a_reader(name: str, tmp_path: Path) -> None:
    seed, seconds = random.randrange(2**32), 50 + LINES
    assert in_a_process(read_at_lines, name, tmp_path, seed, seconds=seconds) >= LINES * 3 // 4


@pytest.mark.parametrize("name", CASES)
def test_readers_see_the_rows_that_come_later(name: str, tmp_path: Path) -> None:
    """Files are neither truncated nor replaced while a reader has mapped rewound rows."""
    path, case = tmp_path / "rows", CASES[name]
    with case.create(path, **({"capacity": ALL} if case.capacity is None else {})) as storage:
        storage.extend(rows_from(0, ALL))
    with open_storage(path) as reader:
        assert_whole(reader.get(slice(0, ALL)))
        views = reader.reader.column(("wide",)).slice(0, ALL)
        with open_storage(path, "append") as storage:
            rewind_to(storage.writer, KEPT, None)
        assert views.shape == (ALL, views.shape[1])
        views.sum()  # the values are undefined, but readable
        for start in (LATER, LATER + MOST):
            with open_storage(path, "append") as storage:
                storage.extend(rows_from(start, MOST))
            expected = [*range(KEPT), *range(LATER, start + MOST)][-storage.ring :]
            assert assert_whole(reader.in_order()).tolist() == expected
    assert not verify(path, skip=["observations"]).findings
