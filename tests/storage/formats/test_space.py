"""Test that rows that cannot fit are refused before any file is made, with the numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, Schema, StorageFull, open_storage
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit
from tallyroll.storage.formats import space
from tallyroll.storage.formats.space import Footprint, estimate
from tallyroll.storage.storages import FORMATS, storage_class

ROWS = {("x",): np.zeros((3, 4), np.float32), ("y",): np.zeros(3, np.int64)}
SCHEMA = Schema.of(ROWS)
ROW_NBYTES = 24
SUFFIXES = ("", ".h5", ".zarr")


def format_at(path: Path) -> Any:
    return storage_class(path)._format_class(path)


@pytest.fixture
def small_files() -> Iterator[int]:
    """Limit files to 1 MiB temporarily."""
    with file_size_limit(2**20):
        yield 2**20


@pytest.fixture
def little_space(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate a disk with a thousand free blocks and ten free inodes."""
    disk = SimpleNamespace(f_blocks=10**6, f_bavail=1000, f_frsize=4096, f_files=100, f_favail=10)
    monkeypatch.setattr(space.os, "statvfs", lambda path: disk)
    return disk


# --- estimates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_estimate_is_what_is_made(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    wanted = estimate(format_at(path), SCHEMA, 100_000)
    with storage_class(path)(path, capacity=100_000) as storage:
        storage.extend(ROWS)
        files = [each for each in [path, *path.rglob("*")] if each.is_file()]
        taken = sum(each.stat().st_blocks * 512 for each in files)
        largest = max(each.stat().st_size for each in files)
    assert wanted.needed.nbytes >= 100_000 * ROW_NBYTES
    assert wanted.needed.nbytes == pytest.approx(taken, rel=0.2, abs=2**21)
    assert wanted.needed.largest == pytest.approx(largest, rel=0.2, abs=2**21)
    assert wanted.problems == []


def test_rows_that_are_there_take_nothing_more(tmp_path: Path) -> None:
    format = format_at(tmp_path / "data")
    assert estimate(format, SCHEMA, 1000).nbytes == 24_000
    assert estimate(format, SCHEMA, 1000, there=400).nbytes == 14_400
    assert estimate(format, SCHEMA, 1000, there=2000).nbytes == 0


def test_every_limit_is_named_with_its_numbers() -> None:
    limits = {"free": 99, "free_files": 1, "largest_file": 49, "free_maps": 2}
    made = space.Estimate(Footprint(100, 2, 50, 3), 100, **limits)
    assert made.problems == [
        "they need 100 more bytes, and 99 are free",
        "the largest file would have 50 bytes, and a file may have at most 49 (by the file "
        "system, or ulimit -f)",
        "they need 2 files, and 1 are free",
        "they need 3 memory maps, and a process may have 2 more (sysctl vm.max_map_count)",
    ]
    enough = {"free": 100, "free_files": 2, "largest_file": 50, "free_maps": 3}
    assert space.Estimate(made.needed, 100, **enough).problems == []


def test_errors_of_the_system_are_passed_on() -> None:
    here = Path(__file__)
    assert space._file_system(Path("/proc")) == "proc"
    assert space._file_system(here) != ""
    assert space.free_bytes(here) > 0
    assert space.free_bytes(Path("/proc/nothing")) == 2**63 - 1, "it does not say"
    assert space.free_bytes(here / "not" / "there") == pytest.approx(
        os.statvfs(here).f_bavail * os.statvfs(here).f_frsize, rel=0.1
    )
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert space.maps_left() == pytest.approx(most - maps - 4096, abs=100)  # reserved for others


@pytest.mark.parametrize(("kind", "limit"), [("vfat", 2**32 - 1), ("ext4", 2**44)])
def test_file_systems_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, limit: int
) -> None:
    monkeypatch.setattr(space, "_file_system", lambda place: kind)
    found = estimate(format_at(tmp_path / "data"), SCHEMA, limit // 16 + 1)
    assert found.largest_file == limit
    assert any("the largest file would have" in each for each in found.problems)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_too_many_rows_are_refused_and_nothing_is_made(
    tmp_path: Path, little_space: SimpleNamespace, suffix: str
) -> None:
    path = tmp_path / f"data{suffix}"
    with pytest.raises(StorageFull, match=r"and 4,096,000 are free") as error:
        storage_class(path)(path, capacity=1_000_000).extend(ROWS)
    assert f"{path} has no room for 1,000,000 rows of 24 bytes: they need " in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["", ".zarr"])
def test_first_rows_that_have_no_room_make_no_files(
    tmp_path: Path, little_space: SimpleNamespace, suffix: str
) -> None:
    path, little_space.f_favail = tmp_path / f"data{suffix}", 1000
    with storage_class(path)(path) as storage:
        with pytest.raises(StorageFull, match="no room for 9 rows of 524,288 bytes"):
            storage.extend({("x",): np.broadcast_to(np.zeros(1), (9, 2**16))})
        assert list(tmp_path.iterdir()) == []
        storage.extend(ROWS)
        assert len(storage) == 3


def test_more_first_rows_than_the_capacity_make_no_file(tmp_path: Path) -> None:
    path = tmp_path / "data.h5"
    with storage_class(path)(path, capacity=2) as storage:
        with pytest.raises(
            StorageFull, match=r"created for 2 rows, but 3 are needed.* reserve\(3\)"
        ):
            storage.extend(ROWS)
        assert list(tmp_path.iterdir()) == []
        storage.reserve(3)
        storage.extend(ROWS)
        assert len(storage) == 3


def test_a_ring_takes_its_slots_and_no_more(tmp_path: Path, little_space: SimpleNamespace) -> None:
    with MemmapStorage(tmp_path / "data", max_size=1000, capacity=10**9) as storage:
        storage.extend(ROWS)
        assert storage.ring == 1000


def test_space_asked_for_later_is_refused_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemmapStorage(tmp_path / "data") as storage:
        storage.extend(ROWS)
        disk = SimpleNamespace(f_blocks=10**6, f_bavail=10, f_frsize=4096, f_files=0, f_favail=0)
        monkeypatch.setattr(space.os, "statvfs", lambda path: disk)
        with pytest.raises(StorageFull, match=r"no room for 10,000,000 rows"):
            storage.reserve(10_000_000)
        monkeypatch.undo()
        storage.extend(ROWS)
        assert len(storage) == 6


@pytest.mark.parametrize("suffix", ["", ".h5"])
def test_a_limit_on_file_sizes_is_told_beforehand(
    tmp_path: Path, small_files: int, suffix: str
) -> None:
    path = tmp_path / f"data{suffix}"
    with pytest.raises(StorageFull, match=r"a file may have at most 1,048,576"):
        storage_class(path)(path, capacity=100_000).extend(ROWS)
    assert list(tmp_path.iterdir()) == []


def test_files_and_maps_are_counted(
    tmp_path: Path, little_space: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_space.f_bavail, little_space.f_favail = 10**12, 1
    monkeypatch.setattr(space, "maps_left", lambda: 0)
    path = tmp_path / "data.zarr"
    with pytest.raises(StorageFull, match=r"files, and 1 are free; they need .* memory maps"):
        storage_class(path)(path, capacity=10_000).extend(ROWS)
    little_space.f_files = 0  # as on btrfs, which has no limit
    with pytest.raises(StorageFull) as error:
        storage_class(path)(path, capacity=10_000).extend(ROWS)
    assert "files, and" not in str(error.value)


# --- before a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_collector_asks_before_it_begins(
    tmp_path: Path, little_space: SimpleNamespace, name: str
) -> None:
    path = tmp_path / {"memmap": "data", "hdf5": "data.h5", "zarr": "data.zarr"}[name]
    with pytest.raises(StorageFull, match=r"no room for 1,000,000 rows of 75 bytes"):
        SyncCollector("CartPole-v1", frames_per_batch=10, total_frames=1_000_000, storage=path)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_asks_for_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"frames_per_batch": 100, "num_envs": 2, "storage": tmp_path / "data"}
    with SyncCollector("CartPole-v1", total_frames=1000, seed=0, **made) as collector:
        next(iter(collector))
    disk = SimpleNamespace(f_blocks=10**6, f_bavail=899 * 75, f_frsize=1, f_files=0, f_favail=0)
    monkeypatch.setattr(space.os, "statvfs", lambda path: disk)
    with pytest.raises(StorageFull, match=r"rows of 75 bytes: they need 67,500 more bytes, and"):
        SyncCollector("CartPole-v1", total_frames=1000, resume=True, **made)
    disk.f_bavail += 75
    with SyncCollector("CartPole-v1", total_frames=1000, resume=True, **made) as collector:
        assert sum(len(batch) for batch in collector) == 900
    with open_storage(tmp_path / "data") as storage:
        assert len(storage) == 1000


def test_the_command_says_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["collect", "CartPole-v1", "--frames", "1_000", "--out", "data"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("tallyroll: 1,000 rows of 75 bytes: 75.0 kB; ")
    assert first.endswith(" are free in data, besides the space already reserved for these rows")
    assert main(["collect", "CartPole-v1", "--frames", "1e12", "--out", "more"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no room for 1,000,000,000,000 rows of 75 bytes: they need 75,000,000,000,000 mo" in said
    assert not (tmp_path / "more").exists()
