"""Test kills of a process that updates and saves priorities: a restart has the last saved ones.

``TALLYROLL_KILLS`` sets the number of kills, 3 by default.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from tallyroll.storage import MemmapStorage, PrioritizedSampler, open_storage
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

from killed_storages_kit import Told, forked, in_a_process, killed, wait_until

KILLS = int(os.environ.get("TALLYROLL_KILLS", "3"))
MEMORY = Path("/dev/shm")
"""In memory, because each save waits for the disk."""
ROWS, ADDED = 5000, 3
SHIFT = 2**10
"""A priority holds the number of its row below this factor, and the number of its save above it."""


def sampler_of(storage: MemmapStorage) -> PrioritizedSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # after a kill: there are newer rows
        return PrioritizedSampler(storage, alpha=1.0, eps=0.0)


def priorities(head: int, save: int) -> np.ndarray:
    return (save * SHIFT + np.arange(head) % SHIFT).astype(np.float32)


def update_for_ever(path: Path, told: Told, save: int) -> None:
    """Add rows, update and save all priorities, and report after each save."""
    with MemmapStorage(path, mode="append") as storage:
        sampler, random = sampler_of(storage), np.random.default_rng(save)
        told.head = save
        while True:
            save += 1
            storage.extend(trajectory_rows(storage.head, ADDED, steps=7), ids="fresh")
            given, order = priorities(storage.head, save), random.permutation(storage.head)
            for part in np.array_split(order, 8):
                sampler.update_rows(part, given[part])
            sampler.save()
            told.head = save


def kill_at_random(path: Path, kills: int) -> int:
    """Kill writers. Return the number of saves."""
    with MemmapStorage(path) as storage:
        storage.extend(trajectory_rows(0, ROWS, steps=7), ids="fresh")
        sampler = sampler_of(storage)
        sampler.update_rows(np.arange(ROWS), priorities(ROWS, 1))
    head, save = ROWS, 1
    for seed in range(kills):
        told = Told()
        told.head = -1
        writer = forked(lambda t=told, s=save: update_for_ever(path, t, s))
        wait_until(lambda t=told, s=save: t.head > s)
        time.sleep(random.Random(seed).uniform(0, 0.02))
        killed(writer)
        with open_storage(path, "append") as storage:
            sampler = sampler_of(storage)
            found = sampler._priorities.leaves()
            assert len(found) == storage.head
            allowed = []
            for last in (told.head, told.head + 1):
                known = min(head + ADDED * (last - save), storage.head)
                kept = priorities(known, last)
                allowed.append(np.append(kept, np.full(storage.head - known, kept.max())))
            assert any(np.array_equal(found, each) for each in allowed), f"kill {seed}"
            assert sampler._priorities.total == found.sum(dtype=np.float64)
            head, save = storage.head, told.head + 1
            sampler.update_rows(np.arange(head), priorities(head, save))
        with open_storage(path) as storage:  # closed in order: without a warning
            kept = PrioritizedSampler(storage, alpha=1.0, eps=0.0)._priorities.leaves()
            assert np.array_equal(kept, priorities(head, save))
    return save


def test_a_restart_after_a_kill_has_the_last_save() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        saves = in_a_process(kill_at_random, Path(folder) / "rows", KILLS, seconds=60 + KILLS)
    assert saves > KILLS
