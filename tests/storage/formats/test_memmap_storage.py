"""Test the memory-mapped format: the contract, tensordict's view of it, and damaged files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import (
    CorruptStorage,
    MemmapStorage,
    RowsMismatch,
    StorageFull,
    StorageLocked,
    open_storage,
)
from tallyroll.storage.errors import (
    DirectoryNotEmpty,
    InvalidSchema,
    NotAStorage,
    NotWritable,
    PathIsFile,
    UnsupportedPlatform,
)
from tallyroll.storage.files.commit_header import HEADER_NBYTES

from storage_contract import (
    GrowingStorageContract,
    arrays,
    assert_rows,
    files_of,
    rows,
)
from storage_damage import DamageContract, assert_refused

HEADER = "tallyroll.header"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def five(path: Path) -> Path:
    with MemmapStorage(path) as storage:
        storage.extend(rows(0, 5), record=b"older")
        storage.writer.put_record(b"newer")
    return path


class TestMemmapStorage(GrowingStorageContract, DamageContract):
    storage_class = MemmapStorage

    def test_bfloat16_is_not_taken_for_uint16(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.extend(TensorDict({"x": torch.ones(2, dtype=torch.bfloat16)}, [2]))
            with pytest.raises(RowsMismatch, match=r"x has torch.uint16, expected torch.bfloat16"):
                storage.extend(TensorDict({"x": torch.ones(2, dtype=torch.uint16)}, [2]))
            storage.extend({("x",): np.array([0x3F80], np.uint16)})
            assert storage.get(slice(None))["x"].tolist() == [1, 1, 1]


# -- tensordict's view


def test_load_memmap_sees_the_rows_of_the_last_refresh(path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(rows(0, 5))
        storage.flush()
        storage.extend(rows(5, 5))
        assert (TensorDict.load_memmap(path) == rows(0, 5)).all()
    assert (TensorDict.load_memmap(path) == rows(0, 10)).all()


def test_load_memmap_reads_odd_names_and_dtypes(path: Path) -> None:
    data = TensorDict({"a b%é*": {"c:d": torch.ones(3, 2, dtype=torch.bfloat16)}}, [3])
    with MemmapStorage(path) as storage:
        storage.extend(data)
    assert (TensorDict.load_memmap(path) == data).all()


def test_load_memmap_reads_a_storage_without_rows(path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(rows(0, 0))
        assert TensorDict.load_memmap(path).batch_size == (0,)
    assert TensorDict.load_memmap(path).batch_size == (0,)


def test_metadata_is_refreshed_at_most_once_a_second(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("tallyroll.storage.engine.commit_engine.time.monotonic", lambda: now)

    def shown() -> int:
        shape: list[int] = json.loads((path / "next" / "meta.json").read_text())["shape"]
        return shape[0]

    with MemmapStorage(path) as storage:
        storage.extend(rows(0, 1))
        assert shown() == 0
        now += 1.01
        storage.extend(rows(1, 1))
        storage.extend(rows(2, 1))
        assert shown() == 2


def test_a_refresh_without_disk_space_does_not_fail_the_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(rows(0, 1))

        def full(*args: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("tallyroll.storage.files.safe_files.Inside.write_atomically", full)
            patch.setattr("tallyroll.storage.engine.commit_engine.time.monotonic", lambda: 1e12)
            storage.extend(rows(1, 1))
            with pytest.raises(StorageFull, match="more bytes"):
                storage.flush()
        assert_rows(storage, 2)


# -- files


def test_closing_trims_the_files_to_the_rows(path: Path) -> None:
    with MemmapStorage(path, capacity=1000) as storage:
        storage.extend(rows(0, 5))
        assert (path / "wide.memmap").stat().st_size == 12_000
        assert storage.nbytes == 5 * (8 + 12 + 8 + 1)
    assert (path / "wide.memmap").stat().st_size == 60
    with MemmapStorage(path, mode="append", capacity=10) as storage:
        assert (path / "wide.memmap").stat().st_size == 120
        assert_rows(storage, 5)


def test_space_grows_by_doubling_up_to_a_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tallyroll.storage.engine.mapped_space._FIRST_ROOM_NBYTES", 29 * 16)
    monkeypatch.setattr("tallyroll.storage.engine.mapped_space._LARGEST_STEP_NBYTES", 29 * 64)
    rooms = []
    with MemmapStorage(path) as storage:
        for row in range(300):
            storage.extend(arrays(row, 1))
            rooms.append((path / "wide.memmap").stat().st_size // 12)
        assert sorted(set(rooms)) == [16, 32, 64, 128, 192, 256, 320]
        storage.extend(arrays(300, 1000))
        assert_rows(storage, 1300)


@pytest.mark.parametrize(
    "name", ["shape", "device", "_type", "manifest.json", "meta.json", "tallyroll.lock", "a" * 252]
)
def test_names_of_the_format_are_refused(path: Path, name: str) -> None:
    with MemmapStorage(path) as storage:
        with pytest.raises(InvalidSchema, match=r"Rename it|too long for a file name"):
            storage.extend(TensorDict({name: {"x": torch.zeros(1)}}, [1]))
        with pytest.raises(
            InvalidSchema, match=r"would be stored at x\.memmap, which is the path of x"
        ):
            storage.extend(
                TensorDict({"x": torch.zeros(1), "x.memmap": {"y": torch.zeros(1)}}, [1])
            )
    assert not path.exists()


# -- the place of a new storage


def test_an_empty_directory_is_accepted(path: Path) -> None:
    path.mkdir()
    with MemmapStorage(path) as storage:
        storage.extend(rows(0, 5))
    with open_storage(path) as reader:
        assert_rows(reader, 5)


def test_a_directory_with_something_in_it_is_refused(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("")
    with pytest.raises(DirectoryNotEmpty, match=r"holds thesis.tex.*directory of its own"):
        MemmapStorage(path)
    (path / "thesis.tex").rename(path / "data.memmap")
    with pytest.raises(DirectoryNotEmpty, match=r"holds data.memmap"):
        MemmapStorage(path)
    assert os.listdir(path) == ["data.memmap"]


def test_a_file_in_the_way_is_refused(path: Path) -> None:
    path.write_text("")
    for place in (path, path / "below"):
        with pytest.raises(PathIsFile, match=r"should be a directory, but .*rows is a file"):
            MemmapStorage(place)
    for mode in ("append", "read"):
        with pytest.raises(NotAStorage, match="is a file"):
            MemmapStorage(path, mode=mode)
        with pytest.raises(NotAStorage, match="is an empty file"):
            open_storage(path, mode)


def test_a_place_that_cannot_be_written_to_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Patch `os.access`, since the user who runs the tests may be allowed to write anywhere.
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(NotWritable, match=r"cannot be created: .* cannot be written to"):
        MemmapStorage(path)
    path.mkdir()
    with pytest.raises(NotWritable, match=r"cannot be written to\. Give a writable path"):
        MemmapStorage(path)


def test_an_unfinished_creation_is_begun_anew(five: Path) -> None:
    (five / "manifest.json").unlink()
    with open(five / "tallyroll.header", "r+b") as header:  # nothing was committed
        header.seek(64)
        header.write(bytes(72))
    (five / "old").mkdir()
    (five / "old" / "column.memmap").write_text("")
    for mode in ("append", "read"):
        with pytest.raises(NotAStorage, match="creation was interrupted, create it again"):
            MemmapStorage(five, mode=mode)
    with MemmapStorage(five) as storage:
        storage.extend(rows(0, 3))
        assert storage.record is None
    with open_storage(five) as reader:
        assert_rows(reader, 3)
    assert not (five / "old").exists()


def test_a_creation_that_fails_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with MemmapStorage(path) as storage:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageFull, match="more bytes"):
                storage.extend(rows(0, 1))
            assert not path.exists()
        storage.extend(rows(0, 1))
    with (
        MemmapStorage(path.with_name("huge"), capacity=2**55) as storage,
        pytest.raises(StorageFull, match=r"has no room for .* rows of 29 bytes"),
    ):
        storage.extend(rows(0, 1))
    assert not path.with_name("huge").exists()


# -- damage


def test_a_column_cut_short_is_told(five: Path) -> None:
    os.truncate(five / "wide.memmap", 59)
    assert_refused(five, CorruptStorage, r"wide.memmap should have at least 60 bytes .* has 59")


def test_a_missing_column_is_told(five: Path) -> None:
    (five / "next" / "id.memmap").unlink()
    assert_refused(five, CorruptStorage, "id.memmap, a column in the manifest, is missing")


def test_a_column_elsewhere_is_refused(five: Path, tmp_path: Path) -> None:
    (five / "wide.memmap").rename(tmp_path / "elsewhere")
    (five / "wide.memmap").symlink_to(tmp_path / "elsewhere")
    assert_refused(five, CorruptStorage, "wide.memmap is a link .* neither reads through links")
    wording = "was replaced by a link or another kind of file"
    for make in (os.mkdir, os.mkfifo):
        (five / "wide.memmap").unlink()
        make(five / "wide.memmap")
        assert_refused(five, CorruptStorage, wording)
        if make is os.mkdir:
            (five / "wide.memmap").rename(tmp_path / "directory")
            (five / "wide.memmap").touch()


def test_another_programs_directory_is_told(path: Path) -> None:
    rows(0, 3).memmap(str(path))
    assert_refused(path, NotAStorage, "no manifest.json")


def test_a_header_cut_short_or_missing_is_told(five: Path) -> None:
    os.truncate(five / HEADER, HEADER_NBYTES - 1)
    assert_refused(five, CorruptStorage, "should have 143360 bytes and has 143359")
    (five / HEADER).unlink()
    assert_refused(five, CorruptStorage, "is missing, so the number of committed rows")


def test_rows_beyond_the_head_are_overwritten(five: Path) -> None:
    for file in five.rglob("*.memmap"):
        with open(file, "ab") as target:
            target.write(b"\xff" * 1001)
    with open_storage(five) as reader:
        assert_rows(reader, 5)
    with open_storage(five, "append") as storage:
        storage.extend(rows(5, 3))
        assert_rows(storage, 8)
    assert (five / "wide.memmap").stat().st_size == 96


@pytest.mark.parametrize("mode", ["create", "append", "read"])
def test_a_name_that_no_file_can_have(
    tmp_path: Path, mode: Literal["create", "append", "read"]
) -> None:
    with pytest.raises(NotWritable, match="cannot be the path of a storage: File name too long"):
        MemmapStorage(tmp_path / ("a" * 300), mode=mode)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PathIsFile, match="is a broken link"):
        MemmapStorage(tmp_path / "link")


def test_a_path_behind_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for path in (tmp_path / "link" / "rows", tmp_path / "link" / "in" / "rows"):
        with pytest.raises(PathIsFile, match=r"should be a directory, but .*link is a broken link"):
            MemmapStorage(path)
    assert sorted(os.listdir(tmp_path)) == ["link"]


def test_a_file_system_without_locks_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fails)
    storage = MemmapStorage(path)
    for _ in range(2):
        with pytest.raises(UnsupportedPlatform, match=r"cannot lock files \(No locks available\)"):
            storage.extend(rows(0, 1))
    monkeypatch.undo()
    with storage:
        storage.extend(rows(0, 1))
    with MemmapStorage(path, mode="append") as storage:
        assert_rows(storage, 1)


def test_a_removed_lock_file_ends_the_writing_and_harms_nothing(tmp_path: Path) -> None:
    batch = arrays(0, 10)
    first = MemmapStorage(tmp_path / "rows")
    first.extend(batch)
    (tmp_path / "rows" / "tallyroll.lock").unlink()
    with MemmapStorage(tmp_path / "rows", mode="append") as second:
        second.extend(batch)
        with pytest.raises(StorageLocked, match=r"the lock file of .*rows was removed while"):
            first.extend(batch)
        first.close()
        second.extend(batch)
    with open_storage(tmp_path / "rows") as storage:
        assert storage.head == 30


def test_rows_whose_manifest_is_lost_are_not_overwritten(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(arrays(0, 10))
    (tmp_path / "rows" / "manifest.json").unlink()
    before = files_of(tmp_path / "rows")
    with pytest.raises(CorruptStorage, match=r"has 10 committed rows, but manifest\.json, which"):
        MemmapStorage(tmp_path / "rows")
    assert files_of(tmp_path / "rows") == before
