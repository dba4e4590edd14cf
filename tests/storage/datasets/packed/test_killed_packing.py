"""Test kill -9 of a packing process at any moment: the destination is complete or absent.

``TALLYROLL_KILLS`` sets the number of kills, 4 by default.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from tallyroll.storage import MemmapStorage, content_hash, open_storage, verify
from tallyroll.storage.ext.testing.reader_contract import collected

from killed_storages_kit import forked, in_a_process, killed

KILLS = int(os.environ.get("TALLYROLL_KILLS", "4"))


def pack_and_wait(folder: Path, format: str) -> None:
    pack(folder, format)
    time.sleep(100)  # to be killed


def pack(folder: Path, format: str) -> None:
    with open_storage(folder / "rows") as storage:
        storage.pack(folder / "packed", format=format)


def kill_at_random(folder: Path, kills: int) -> list[bool]:
    """Kill packers. Return which of them had finished."""
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(collected())
        wanted = content_hash(storage)
    began = time.monotonic()
    pack(folder, "zarr")
    seconds, found = time.monotonic() - began, []
    open_storage(folder / "packed").close()
    (folder / "packed").rename(folder / "first")
    for seed in range(kills):
        pick = random.Random(seed)
        format = pick.choice(["zarr", "zarr", "hdf5"])
        packer = forked(lambda format=format: pack_and_wait(folder, format))
        time.sleep(pick.uniform(0, 1.5 * seconds))
        killed(packer)
        place = folder / "packed"
        found.append(place.exists())
        if found[-1]:
            with open_storage(place) as packed:
                assert content_hash(packed) == wanted, f"kill {seed}"
            assert verify(place).sound, f"kill {seed}"
            place.rename(folder / f"packed.{seed}")
    pack(folder, "zarr")  # leftovers do not matter
    left = {each.name for each in folder.iterdir() if each.name.startswith(".")}
    assert not left
    with open_storage(folder / "rows") as storage:
        assert content_hash(storage) == wanted
    return found


def test_a_killed_packer_leaves_nothing_or_the_whole(tmp_path: Path) -> None:
    found = in_a_process(kill_at_random, tmp_path, KILLS, seconds=20 + 2 * KILLS)
    assert len(found) == KILLS
    if KILLS >= 50:
        assert {*found} == {False, True}
