"""Test repairs of packed rows and of unreadable disks, and repairs that are killed or concurrent.

``TALLYROLL_REPAIRS`` sets the number of kills, 4 by default.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import h5py
import minari_faults
import numpy as np
import pytest
import torch
from damage_kit import Disk
from fault_kit import LENGTHS, ROWS, rewrite, walk
from repair_kit import repair

from tallyroll.storage import (
    FrameStack,
    H5Storage,
    InvalidDataset,
    MemmapStorage,
    StorageLocked,
    ZarrStorage,
    content_hash,
    open_storage,
)
from tallyroll.storage import repair as repair_alone
from tallyroll.storage.ext.exchange import dataset_import
from tallyroll.storage.ext.packed.layout import ArrayLayout
from tallyroll.storage.ext.repair import hdf5, ours
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

from killed_storages_kit import Told, forked, in_a_process, killed, wait_until

KILLS = int(os.environ.get("TALLYROLL_REPAIRS", "4"))


def shown(path: Path, *key: str) -> np.ndarray:
    with open_storage(path) as storage:
        return storage.reader.shown(key)


# --- packed rows ----------------------------------------------------------------------------------


ROWS_PACKED = 5000


def packed(folder: Path, name: str, **options: Any) -> Path:
    """Pack rows in trajectories of 20, with frames stacked by four."""
    rows = trajectory_rows(0, ROWS_PACKED, steps=20)
    # No frame is all zeros or equal to another.
    frames = np.random.default_rng(0).integers(1, 256, (ROWS_PACKED + 5, 9), np.uint8)
    for key, first in (("pixels", 0), (("next", "pixels"), 1)):
        stacks = [frames[first + n : first + n + ROWS_PACKED] for n in range(4)]
        rows[key] = torch.from_numpy(np.stack(stacks, 1))
    rows["action"] = torch.from_numpy(walk(3, ROWS_PACKED, 2))
    with MemmapStorage(folder / "plain") as storage:
        storage.extend(rows)
        storage.pack(folder / name, **options)
    return folder / name


def source_of(place: Path, *key: str) -> ArrayLayout:
    """Return the array from which a column is built."""
    with open_storage(place) as storage:
        return storage.reader.column(key).source.layout


def shard_of(place: Path, array: ArrayLayout) -> Path:
    (file,) = place.joinpath(*array.path).glob("c.0*")
    return file


def damage_chunk(place: Path, array: ArrayLayout, chunk: int) -> None:
    """Overwrite the middle of a chunk, which the index at the end of the shard locates."""
    file, lines = shard_of(place, array), array.shard_rows // array.chunk_rows
    index = np.frombuffer(file.read_bytes()[-4 - 16 * lines : -4], "<u8").reshape(-1, 2)
    begin, nbytes = index[chunk].tolist()
    rewrite(file, begin + nbytes // 2, b"\x55\xaa" * min(8, nbytes // 4))


def test_rows_of_a_chunk_that_is_damaged_are_lost_and_no_others(tmp_path: Path) -> None:
    place = packed(tmp_path, "rows")
    array = source_of(place, "action")
    size = array.chunk_rows
    damage_chunk(place, array, 1)
    report = repair(place, tmp_path / "out")
    assert (report.kind, report.rows, report.lost_rows) == (
        "tallyroll",
        ROWS_PACKED - size,
        size,
    )
    (lost,) = report.lost
    assert (lost.place.row, lost.place.column, lost.rows) == (size, "action", size)
    kept = [*range(size), *range(2 * size, ROWS_PACKED)]
    for key in (("action",), ("pixels",), ("next", "pixels"), ("next", "reward")):
        wanted = shown(tmp_path / "plain", *key)[kept]
        assert shown(tmp_path / "out", *key).tobytes() == wanted.tobytes(), key


def test_what_is_made_of_frames_that_are_damaged(tmp_path: Path) -> None:
    """Exactly the rows whose stack has a frame of the chunk are lost."""
    place = packed(tmp_path, "rows", stacks=[FrameStack("pixels")])
    array = source_of(place, "pixels")
    assert array.shape == (1, 9)
    # A row has four frames, three of them from the previous row. The next observation adds one.
    frame, size = np.arange(ROWS_PACKED), array.chunk_rows
    wrong = np.any([(frame + more) // size == 2 for more in range(5)], 0)
    damage_chunk(place, array, 2)
    report = repair(place, tmp_path / "out")
    assert (report.rows, report.lost_rows) == (ROWS_PACKED - wrong.sum(), wrong.sum())
    wanted = shown(tmp_path / "plain", "pixels")[~wrong]
    assert shown(tmp_path / "out", "pixels").tobytes() == wanted.tobytes()


def test_shards_that_are_missing_or_cut(tmp_path: Path) -> None:
    place = packed(tmp_path, "rows")
    array = source_of(place, "collector", "traj_ids")
    damage_chunk(place, array, 0)
    report = repair(place, tmp_path / "out")
    first = array.chunk_rows
    assert (report.rows, report.lost_rows) == (ROWS_PACKED - first, first)
    wanted = shown(tmp_path / "plain", "action")[first:]
    assert shown(tmp_path / "out", "action").tobytes() == wanted.tobytes()
    # The first remaining row belongs to a trajectory that lost its start.
    assert shown(tmp_path / "out", "collector", "step")[0] == 0
    shard = shard_of(place, source_of(place, "action"))
    os.truncate(shard, 2)
    with pytest.raises(InvalidDataset, match="no row can be read"):
        repair(place, tmp_path / "other")
    shard.unlink()
    with pytest.raises(InvalidDataset, match="no row can be read"):
        repair(place, tmp_path / "other")


def test_packed_as_hdf5(tmp_path: Path) -> None:
    place = packed(tmp_path, "rows.h5", format="hdf5")
    with h5py.File(place, locking=False) as file:
        found = file["action"].id.get_chunk_info(1)
        size = file["action"].chunks[0]
    rewrite(place, found.byte_offset + found.size // 2, b"\x55\xaa" * 8)
    report = repair(place, tmp_path / "out")
    assert (report.rows, report.lost_rows) == (ROWS_PACKED - size, size)
    assert {each.place.row for each in report.lost} == {size}


def test_packed_hdf5_that_was_cut(tmp_path: Path) -> None:
    """Exactly the rows whose chunks all lie before the cut are kept."""
    place = packed(tmp_path, "rows.h5", format="hdf5")
    with open_storage(place) as storage:
        late = ("breaks", "starts", "row")  # in the front, or not needed
        arrays = [each for each in storage.reader.layout.arrays if each.path[-1] not in late]
    with h5py.File(place, locking=False) as file:
        chunks = [file["/".join(each.path)].id for each in arrays]
        found = [[d.get_chunk_info(n) for n in range(d.get_num_chunks())] for d in chunks]
    ends = [[each.byte_offset + each.size for each in of_array] for of_array in found]
    cut = max(each[0] for each in ends) + 5
    most = min(
        array.chunk_rows * sum(end <= cut for end in each)
        for array, each in zip(arrays, ends, strict=True)
    )
    content = place.read_bytes()
    place.write_bytes(content[:-1])
    assert repair(place, tmp_path / "all").whole
    assert content_hash(tmp_path / "all") == content_hash(tmp_path / "plain")
    place.write_bytes(content[:cut])
    report = repair(place, tmp_path / "out")
    assert 0 < report.rows <= most < ROWS_PACKED
    assert report.rows + (report.lost_rows or 0) == ROWS_PACKED
    wanted = shown(tmp_path / "plain", "action")[: report.rows]
    assert shown(tmp_path / "out", "action").tobytes() == wanted.tobytes()
    # HDF5's own superblock follows the front.
    front = content.index(b"\x89HDF")
    place.write_bytes(content[:front] + bytes(96) + content[front + 96 :])
    assert repair(place, tmp_path / "more").whole
    place.write_bytes(bytes(64) + content[64:])  # the front, which HDF5 does not need
    assert repair(place, tmp_path / "front", "tallyroll").whole


@pytest.mark.parametrize("codec", ["zstd", "shuffle", "none"])
def test_a_shard_without_its_index(codec: str, tmp_path: Path) -> None:
    place = packed(tmp_path, "rows", codecs=codec)
    array = source_of(place, "action")
    shard = shard_of(place, array)
    content = shard.read_bytes()
    shard.write_bytes(content[:-3])
    assert repair(place, tmp_path / "all").whole
    lines, kept = array.shard_rows // array.chunk_rows, 2 * array.chunk_rows
    index = np.frombuffer(content[-4 - 16 * lines : -4], "<u8").reshape(-1, 2)
    shard.write_bytes(content[: int(index[1].sum()) + 1])
    report = repair(place, tmp_path / "out")
    assert (report.rows, report.lost_rows) == (kept, ROWS_PACKED - kept)


# --- unreadable disks -----------------------------------------------------------------------------


class WatchedDisk(Disk):
    """Disk on which no storage with unreadable parts may be mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        opened = ours.open_storage

        def open_storage_there(path: Any, **options: Any) -> Any:
            below = [each for each in self.bad if each.startswith(f"{path}")]
            assert not below, f"{path} is mapped, and parts of it cannot be read"
            return opened(path, **options)

        monkeypatch.setattr(ours, "open_storage", open_storage_there)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return WatchedDisk(monkeypatch)


@pytest.mark.parametrize("kind", [MemmapStorage, ZarrStorage, H5Storage])
@pytest.mark.parametrize("finalize", [True, False])
def test_blocks_that_cannot_be_read(kind: Any, finalize: bool, tmp_path: Path, disk: Disk) -> None:
    """Exactly the rows of two blocks of a column are lost, with checksums or without."""
    place = tmp_path / f"rows{'.h5' if kind is H5Storage else ''}"
    rows = trajectory_rows(0, 6000, steps=20)
    rows["action"] = torch.arange(1, 18001, dtype=torch.float64).reshape(6000, 3)
    with kind(place, **({"capacity": 6000} if kind is H5Storage else {})) as storage:
        storage.extend(rows)
        if finalize:
            storage.finalize()
    wanted = rows["action"].numpy()
    # Find the 1,000th row in any format. No block is a multiple of its 24 bytes.
    bytes_there = wanted[1000].tobytes()
    path, at = next(
        (each, found)
        for each in (place.rglob("*") if place.is_dir() else [place])
        if each.is_file() and (found := each.read_bytes().find(bytes_there)) >= 0
    )
    begin = at // 4096 * 4096
    disk.bad = {str(path): range(begin, begin + 8192)}
    first, stop = 1000 + (begin - at) // 24, 1000 - (at - begin - 8192) // 24
    lost = stop - first
    report = repair_alone(place, tmp_path / "out")
    assert disk.failed
    assert (report.kind, report.rows, report.lost_rows) == ("tallyroll", 6000 - lost, lost)
    (loss,) = report.lost
    assert (loss.place.column, loss.place.row) == ("action", first)
    kept = np.ones(6000, bool)
    kept[first:stop] = False
    assert shown(tmp_path / "out", "action").tobytes() == wanted[kept].tobytes()
    ended = shown(tmp_path / "out", "next", "terminated")
    assert ended.tobytes() == rows["next", "terminated"].numpy()[kept].tobytes()
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {place.name, "out"} | {n for n in names if n.startswith(f"{place.name}.")}


def test_a_manifest_that_cannot_be_read(tmp_path: Path, disk: Disk) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(trajectory_rows(0, 60, steps=20))
    disk.bad = {str(tmp_path / "rows" / "manifest.json"): range(4096)}
    with pytest.raises(InvalidDataset, match="cannot be repaired"):
        repair(tmp_path / "rows", tmp_path / "out", "tallyroll")
    assert {each.name for each in tmp_path.iterdir()} == {"rows"}


def test_blocks_of_minari_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "rows"
    minari_faults.sound(place)
    with h5py.File(place / "data" / "main_data.hdf5") as file:
        found = file["episode_2/actions"].id.get_chunk_info(0)
    read = hdf5.PaddedFile.readinto

    def fails(self: Any, buffer: Any) -> int:
        if (
            self.tell() < found.byte_offset + found.size
            and self.tell() + len(memoryview(buffer).cast("B")) > found.byte_offset
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, buffer)

    monkeypatch.setattr(hdf5.PaddedFile, "readinto", fails)
    report = repair(place, tmp_path / "out")
    assert report.lost
    assert {each.place.episode for each in report.lost} == {2}
    kept = [number for number in range(len(LENGTHS)) if number != 2]
    assert report.rows >= sum(LENGTHS[number] for number in kept)


# --- infos of Minari ------------------------------------------------------------------------------


def energy(number: int) -> np.ndarray:
    return walk(number + 70, LENGTHS[number] + 1, 1)[1:, 0]


def test_infos_are_saved(tmp_path: Path) -> None:
    minari_faults.sound(tmp_path / "rows")
    report = repair(tmp_path / "rows", tmp_path / "out")
    assert (report.rows, report.lost) == (ROWS, ())
    wanted = np.concatenate([energy(number) for number in range(len(LENGTHS))])
    assert shown(tmp_path / "out", "next", "infos", "energy").tobytes() == wanted.tobytes()


def test_an_info_costs_no_step(tmp_path: Path) -> None:
    """An info without entries for saved steps is dropped. It may lack entries for lost steps."""
    place = tmp_path / "rows"
    minari_faults.sound(place)
    with minari_faults.opened(place) as file:
        short = file["episode_1/actions"]
        short.resize(5, axis=0)
        file["episode_1/infos/energy"].resize(6, axis=0)
        for number, count in enumerate(LENGTHS):
            infos = file[f"episode_{number}/infos"]
            infos["heat"] = np.arange(count + 1.0)
            infos["one a step"] = np.arange(count)
        del file["episode_3/infos/heat"]
    report = repair(place, tmp_path / "out")
    assert (report.rows, report.lost_rows) == (ROWS - LENGTHS[1] + 5, LENGTHS[1] - 5)
    whole = np.concatenate([energy(0), energy(1)[:5], energy(2), energy(3)])
    assert shown(tmp_path / "out", "next", "infos", "energy").tobytes() == whole.tobytes()
    left = {each.place.column for each in report.lost if "info" in each.message}
    assert left == {"infos/heat", "infos/one a step"}
    with open_storage(tmp_path / "out") as storage:
        assert ("next", "infos", "heat") not in storage.reader.keys


# --- kills and concurrent repairs -----------------------------------------------------------------


def repaired(folder: Path, out: Path, told: Told) -> None:
    """Repair in small blocks, and report the progress."""
    dataset_import.BLOCK_NBYTES = ours.BLOCK_NBYTES = 10_000  # type: ignore[misc]

    def tell(done: int, total: int) -> None:
        told.head += 1

    repair_alone(folder / "rows", out, progress=tell)
    told.head = -1
    while True:
        pass


def short_column(folder: Path) -> None:
    """Store rows with a column that is too short, so that a repair first makes links and a copy."""
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(trajectory_rows(0, 4000, steps=20))
    with (folder / "rows" / "next" / "reward.memmap").open("r+b") as file:
        file.truncate(3000 * 4)


def kill_at_random(folder: Path, kills: int) -> list[int]:
    """Kill repairs. Return how many left nothing, and how many left a complete storage."""
    short_column(folder)
    repair_alone(folder / "rows", folder / "whole")
    wanted, found = content_hash(folder / "whole"), [0, 0]
    for seed in range(kills):
        told, out = Told(), folder / f"out{seed}"
        until = 0 if seed == 0 else random.Random(seed).randrange(1, 14)
        told.head = 0
        child = forked(lambda o=out, t=told: repaired(folder, o, t))
        wait_until(lambda t=told, u=until: t.head >= u or t.head == -1)
        killed(child)
        found[out.exists()] += 1
        aside = folder / f".{out.name}.repaired-aside"
        if not out.exists():
            repair_alone(folder / "rows", out)
            assert not aside.exists(), seed
        # A kill may come when the storage is complete and only temporary files are left to remove.
        shutil.rmtree(aside, ignore_errors=True)
        assert content_hash(out) == wanted, seed
    left = {each.name for each in folder.iterdir() if not each.name.startswith("out")}
    assert left == {"rows", "whole"}, left
    return found


@pytest.mark.timeout(60 + 10 * KILLS)
def test_killed_repairs_leave_nothing_or_all(tmp_path: Path) -> None:
    found = in_a_process(kill_at_random, tmp_path, KILLS, seconds=50 + 10 * KILLS)
    assert sum(found) == KILLS
    assert found[0], "no kill came in the middle"


def test_two_repairs_of_one_place(tmp_path: Path) -> None:
    """The second repair is refused while the first runs, and the first one completes."""
    short_column(tmp_path)
    refused = list[str]()

    def meet(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(StorageLocked) as caught:
                repair_alone(tmp_path / "rows", tmp_path / "out")
            refused.append(str(caught.value))

    report = repair_alone(tmp_path / "rows", tmp_path / "out", progress=meet)
    assert "is being written by another process" in refused[0]
    assert report.rows == 3000
    assert {each.name for each in tmp_path.iterdir()} == {"rows", "out"}
