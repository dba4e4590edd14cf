"""Test exports and imports that are killed: the destination is complete or absent.

The next call removes leftovers. ``TALLYROLL_KILLS`` sets the number of kills, 4 by default.
"""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

import pytest

from tallyroll.storage import MemmapStorage, content_hash, import_dataset, open_storage
from tallyroll.storage.ext.exchange import dataset_import, export_rows
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

from killed_storages_kit import Told, forked, in_a_process, killed, wait_until

KILLS = int(os.environ.get("TALLYROLL_KILLS", "4"))
ROWS = 4000
HAS_RLDS = all(map(importlib.util.find_spec, ("google", "google_crc32c")))
KINDS = ("npz", "torchrl", "d4rl", "rlds" if HAS_RLDS else "torchrl")


def exchange(folder: Path, place: Path, back: Path, kind: str, told: Told) -> None:
    """Export and import in small blocks, and report the progress."""
    export_rows.BLOCK_NBYTES = dataset_import.BLOCK_NBYTES = 4000  # type: ignore[misc]

    def tell(done: int, total: int) -> None:
        told.head += 1

    with open_storage(folder / "source") as storage:
        storage.export(place, kind, progress=tell)
    import_dataset(place, back, kind, progress=tell)
    told.head = -1
    while True:
        pass


def kill_at_random(folder: Path, kills: int) -> list[int]:
    """Kill exchanges at random moments.

    Return how many left nothing, how many left an export, and how many left an import as well.
    """
    rows = trajectory_rows(0, ROWS, steps=7)
    rows["action"] = rows["observation"]
    with MemmapStorage(folder / "source") as storage:
        storage.extend(rows)
    wanted, found = content_hash(folder / "source"), [0, 0, 0]
    for seed in range(kills):
        kind, told = KINDS[seed % len(KINDS)], Told()
        place, back = folder / f"out{seed}", folder / f"back{seed}"
        until = random.Random(seed).randrange(1, 120)
        told.head = 0
        child = forked(lambda p=place, b=back, k=kind, t=told: exchange(folder, p, b, k, t))
        wait_until(lambda t=told, u=until: t.head >= u or t.head == -1)
        killed(child)
        found[place.exists() + back.exists()] += 1
        if not place.exists():
            with open_storage(folder / "source") as storage:
                storage.export(place, kind)
        if not back.exists():
            import_dataset(place, back, kind)
        assert content_hash(back) == wanted, seed
    assert not [each for each in folder.iterdir() if each.name.endswith(".written-aside")]
    return found


@pytest.mark.timeout(60 + 10 * KILLS)
def test_killed_exchanges_leave_nothing_or_all(tmp_path: Path) -> None:
    found = in_a_process(kill_at_random, tmp_path, KILLS, seconds=50 + 10 * KILLS)
    assert sum(found) == KILLS
    assert sum(found[:2]), "no kill came in the middle"
