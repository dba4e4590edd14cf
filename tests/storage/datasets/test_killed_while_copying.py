"""Test copies that are killed: the destination is complete or absent, and the next call cleans up.

``TALLYROLL_KILLS`` sets the number of kills, 9 by default.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tallyroll.storage import MemmapStorage, content_hash, open_storage, verify
from tallyroll.storage.ext import storage_copy
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

from killed_storages_kit import Told, forked, in_a_process, killed, wait_until

KILLS = int(os.environ.get("TALLYROLL_KILLS", "9"))
ROWS = 400
SUFFIXES = ("", ".h5", ".zarr")


def copy(folder: Path, place: Path, told: Told) -> None:
    told.head = 0
    storage_copy._BLOCK_NBYTES = 5000

    def tell(done: int, total: int) -> None:
        told.head = done

    with open_storage([folder / "a", folder / "b"]) as union:
        union.copy_to(place, sort=True, progress=tell)
    told.head = -1
    while True:
        time.sleep(1)


def kill_at_random(folder: Path, kills: int) -> tuple[int, int]:
    """Kill copies. Return how many left nothing, and how many were complete."""
    for number, name in enumerate("ab"):
        with MemmapStorage(folder / name) as storage:
            storage.extend(trajectory_rows(number * ROWS, ROWS, steps=7))
    with open_storage([folder / "a", folder / "b"]) as union:
        wanted, total = content_hash(union), union.nbytes
        nothing = whole = 0
        for seed in range(kills):
            suffix = SUFFIXES[seed % 3]
            place, pick, told = folder / f"copy-{seed // 9}{suffix}", random.Random(seed), Told()
            until = pick.choice([pick.randrange(total), total])
            told.head = 0
            child = forked(lambda p=place, t=told: copy(folder, p, t))
            if until < total:
                wait_until(lambda t=told, u=until: t.head > u or t.head == -1)
            else:  # near the end, where the copy gets its name
                wait_until(lambda t=told: t.head in (total, -1))
                time.sleep(pick.uniform(0, 0.02))
            killed(child)
            if place.exists():
                whole += 1
                assert content_hash(place) == wanted, f"kill {seed}: half a copy"
                assert verify(place).sound
                place.rename(folder / f"kept-{seed}{suffix}")
            else:
                nothing += 1
        for seed in range(kills):
            place = folder / f"copy-{seed // 9}{SUFFIXES[seed % 3]}"
            if not place.exists():
                union.copy_to(place)  # removes leftovers of the killed copies
                assert content_hash(place) == wanted
    assert not [each for each in folder.iterdir() if each.name.endswith(".written-aside")]
    return nothing, whole


@pytest.mark.timeout(60 + 4 * KILLS)
def test_a_killed_copy_leaves_nothing_or_all(tmp_path: Path) -> None:
    found = in_a_process(kill_at_random, tmp_path, KILLS, seconds=50 + 4 * KILLS)
    assert sum(found) == KILLS
