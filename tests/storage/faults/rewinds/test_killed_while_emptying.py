"""Test a writer that is killed while a buffer empties its ring: all rows remain, or none."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tallyroll.storage import MemmapStorage, open_storage, verify

from killed_storages_kit import (
    Case,
    Told,
    assert_whole,
    check_shown,
    forked,
    in_a_process,
    lines_of,
    oracle,
    tensors,
)

KILLS = int(os.environ.get("TALLYROLL_KILLS", "50"))
RING = 600
BEGUN = 500
SPANS = [
    range(BEGUN),
    range(500, 500),
    range(500, 620),
    range(620, 620),
    range(620, 1100),
    range(620, 1120),
    range(1120, 1120),
    range(1120, 1123),
]
"""Valid rows after each step. A step empties the ring if the start of the span moves."""


def run(path: Path, told: Told, durability: str) -> None:
    """Step through the spans, and report each one reached."""
    with MemmapStorage(path, mode="append", durability=durability) as storage:  # type: ignore[arg-type]
        # A replay buffer calls this method. A buffer here would have semaphores that outlive a
        # kill.
        for number, (before, span) in enumerate(itertools.pairwise(SPANS), start=1):
            if span.start > before.start:
                storage._empty()
            else:
                storage.extend(tensors(before.stop, span.stop - before.stop))
            told.head = number


def kill_at_lines(folder: Path, durability: str, points: int, seed: int) -> list[int]:
    """Kill writers at lines throughout the code, and check each result. Return the spans found."""
    base, work = folder / "base", folder / "work"
    with MemmapStorage(base, max_size=RING) as storage:
        storage.extend(oracle(0, BEGUN))

    def one(line: int) -> Told:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        told = Told()

        def act() -> None:
            told.lines = lines_of(lambda: run(work, told, durability), line)

        _, status = os.waitpid(forked(act), 0)
        assert status == 0 or (line and os.WIFSIGNALED(status)), status
        return told

    told = one(0)
    total, found = told.lines, []
    assert told.head == len(SPANS) - 1
    pick = random.Random(seed)
    for number in range(points):  # one in each part of the run, to spread them
        line = pick.randrange(1 + number * total // points, 1 + (number + 1) * total // points)
        found.append(_survived(work, one(line).head, line))
    return found


def _survived(path: Path, reached: int, line: int) -> int:
    allowed = SPANS[reached : reached + 2]
    with open_storage(path) as reader:
        assert reader.span in allowed, f"killed at line {line}"
        span = reader.span
        assert assert_whole(reader.get(slice(None))).tolist() == list(span)
        check_shown(path, reader)
    found = verify(path, skip=["observations"]).findings  # observations are not consecutive
    assert not found, f"killed at line {line}"
    with MemmapStorage(path, mode="append") as storage:
        assert storage.span == span
        at = storage._last_cursor_index
        assert (at is None) == (not span)
        index = np.arange(40) + (0 if at is None else at + 1)
        storage.set(index % RING, tensors(span.stop, 40))
        assert (storage.get(index % RING) == tensors(span.stop, 40)).all()
        assert storage.span.stop == span.stop + 40
        storage.trajectories.table  # noqa: B018 - it can be counted
    assert Case(MemmapStorage, ring=RING).there(path)
    return SPANS.index(span)


@pytest.mark.timeout(60 + 4 * KILLS)
@pytest.mark.parametrize("durability", ["process", "power"])
def test_kill_9_while_a_ring_is_emptied(durability: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    found = in_a_process(
        kill_at_lines, tmp_path, durability, KILLS // 8, seed, seconds=60 + 4 * KILLS
    )
    assert len(found) == KILLS // 8
    assert len(set(found)) > 2, f"too few kills hit a writer at work: {found}"
