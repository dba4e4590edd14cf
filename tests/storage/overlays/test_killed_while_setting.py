"""Test an overlay's writer that is killed: each row has its value from before or after."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

from killed_storages_kit import Told, forked, in_a_process, killed, wait_until

KILLS = int(os.environ.get("TALLYROLL_KILLS", "5"))
RING, WIDTH = 24, 2048
SHIFT = 20
"""Number of bits for the number of a write. The bits above it hold the number of the row."""


def steps(seed: int, head: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield, for each write, the number of rows added before it and the rows that it sets."""
    pick = np.random.default_rng(seed)
    while True:
        added = int(pick.integers(1, 5)) if pick.random() < 0.2 else 0
        head += added
        yield added, pick.permutation(np.arange(head - RING + 4, head))[: pick.integers(1, 12)]


def write_for_ever(path: Path, told: Told, seed: int, first: int) -> None:
    """Set values, and report after each write."""
    with MemmapStorage(path, mode="append") as storage:
        overlay = storage.overlay("value")
        told.head = first
        for number, (added, rows) in enumerate(steps(seed, storage.head), start=first + 1):
            if added:
                storage.extend(trajectory_rows(storage.head, added, steps=7), ids="fresh")
            values = np.repeat((rows << SHIFT | number)[:, None], WIDTH, 1)
            overlay.set(rows=rows, values=values)
            told.head = number


def whole(values: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    """Return the write of each row's value, 0 for the fill.

    Check that no value is torn or belongs to another row.
    """
    array = values.numpy()
    assert (array == array[:, :1]).all(), "a value is torn"
    found, writes = array[:, 0] >> SHIFT, array[:, 0] & (2**SHIFT - 1)
    assert ((found == rows) | (array[:, 0] == 0)).all(), "a value is of another row"
    return writes


def kill_at_random(path: Path, kills: int) -> tuple[int, int]:
    """Kill writers. Return the number of writes, and of the kills during one."""
    with MemmapStorage(path, max_size=RING) as storage:
        storage.extend(trajectory_rows(0, 2 * RING - 1, steps=7)[:RING])
        storage.extend(trajectory_rows(RING, RING - 1, steps=7), ids="fresh")
        storage.overlay("value", torch.int64, [WIDTH])
    known: dict[int, int] = {}
    last = met = 0
    with open_storage(path) as reader:
        overlay = reader.overlay("value")
        for seed in range(kills):
            pick, told, head = random.Random(seed), Told(), reader.head
            told.head = -1
            writer = forked(lambda t=told, s=seed, n=last: write_for_ever(path, t, s, n))
            wait_until(lambda t=told, n=last: t.head > n)
            until = time.monotonic() + pick.uniform(0, 0.02)
            while time.monotonic() < until:  # concurrently with the writer
                span = reader.span
                rows = np.arange(span.start + 8, span.stop)
                try:
                    whole(overlay.get(rows=rows), rows)
                except IndexError:
                    assert reader.span.start > rows[0]
            killed(writer)
            for number, (_, rows) in enumerate(steps(seed, head), start=last + 1):
                if number > told.head + 1:
                    break
                under_way = {row: known.get(row, 0) for row in rows.tolist()}
                known |= dict.fromkeys(under_way, number)
            span = reader.span
            rows = np.arange(span.start, span.stop)
            found = dict(zip(rows.tolist(), whole(overlay.get(rows=rows), rows), strict=True))
            for row, write in found.items():
                allowed = {known.get(row, 0), under_way.get(row, known.get(row, 0))}
                assert write in allowed, f"kill {seed}: row {row} has write {write} of {allowed}"
            met += len({found[row] == known[row] for row in under_way if row in found}) == 2
            known = {row: int(write) for row, write in found.items()}  # for existing rows
            last = told.head + 1
    assert not [each for each in verify(path).findings if each.check == "overlays"]
    return last, met


def test_a_killed_writer_leaves_the_old_value_or_the_new(tmp_path: Path) -> None:
    writes, _ = in_a_process(kill_at_random, tmp_path / "rows", KILLS, seconds=10 + KILLS)
    assert writes >= KILLS


def read_beside(path: Path, seconds: float) -> int:
    """Read while one row is rewritten again and again. Return how often its value changed."""
    with MemmapStorage(path) as storage:
        storage.extend(trajectory_rows(0, 4, steps=7))
        storage.overlay("value", torch.int64, [WIDTH])

    def write() -> None:
        with MemmapStorage(path, mode="append") as storage:
            overlay = storage.overlay("value")
            for number in range(2**SHIFT):
                overlay[1] = np.full(WIDTH, 1 << SHIFT | number)

    writer, seen = forked(write), set()
    try:
        with open_storage(path) as reader:
            until = time.monotonic() + seconds
            rows = np.arange(4)
            while time.monotonic() < until or len(seen) < 50:
                values = reader.get(slice(None), ["value"])["value"]
                seen.add(int(whole(values, rows)[1]))
    finally:
        killed(writer)
    return len(seen)


@pytest.mark.timeout(60)
def test_a_reader_beside_sees_whole_values(tmp_path: Path) -> None:
    assert in_a_process(read_beside, tmp_path / "rows", 0.3, seconds=50) >= 50
