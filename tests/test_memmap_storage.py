"""The memory-mapped format: the contract, tensordict's view of it, and damaged files."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import traceback
from multiprocessing.connection import Connection
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
from tallyroll.storage.commit import HEADER_NBYTES, word_of
from tallyroll.storage.errors import (
    DirectoryNotEmpty,
    FormatVersionMismatch,
    InvalidSchema,
    NotAStorage,
    NotWritable,
    PathIsFile,
)

from storage_contract import (
    GrowingStorageContract,
    arrays,
    assert_rows,
    files_of,
    process,
    receive,
    rows,
)

HEADER = "tallyroll.header"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def five(path: Path) -> Path:
    with MemmapStorage(path) as storage:
        storage.extend(rows(0, 5), record=b"older")
        storage.put_record(b"newer")
    return path


class TestMemmapStorage(GrowingStorageContract):
    storage_class = MemmapStorage

    def test_bfloat16_is_not_taken_for_uint16(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.extend(TensorDict({"x": torch.ones(2, dtype=torch.bfloat16)}, [2]))
            with pytest.raises(RowsMismatch, match=r"x has torch.uint16, wanted torch.bfloat16"):
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
    monkeypatch.setattr("tallyroll.storage.engine.time.monotonic", lambda: now)

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
            patch.setattr("tallyroll.storage.memmap.write_aside", full)
            patch.setattr("tallyroll.storage.engine.time.monotonic", lambda: 1e12)
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
    monkeypatch.setattr("tallyroll.storage.engine._FIRST_ROOM_NBYTES", 29 * 16)
    monkeypatch.setattr("tallyroll.storage.engine._LARGEST_STEP_NBYTES", 29 * 64)
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
        with pytest.raises(InvalidSchema, match=r"would lie at x\.memmap, where x"):
            storage.extend(
                TensorDict({"x": torch.zeros(1), "x.memmap": {"y": torch.zeros(1)}}, [1])
            )
    assert not path.exists()


# -- a new storage's place


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
        with pytest.raises(PathIsFile, match=r"should be a directory, and .*rows is a file"):
            MemmapStorage(place)
    for mode in ("append", "read"):
        with pytest.raises(NotAStorage, match="is a file"):
            MemmapStorage(path, mode=mode)
        with pytest.raises(NotAStorage, match="is a file"):
            open_storage(path, mode)


def test_a_place_that_cannot_be_written_to_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asked of the system; who runs the tests may be allowed everything.
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(NotWritable, match=r"cannot be created: .* cannot be written to"):
        MemmapStorage(path)
    path.mkdir()
    with pytest.raises(NotWritable, match=r"cannot be written to\. Give a path that can"):
        MemmapStorage(path)


def test_an_unfinished_creation_is_begun_anew(five: Path) -> None:
    (five / "manifest.json").unlink()
    with open(five / "tallyroll.header", "r+b") as header:  # it had committed nothing
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


def damage(file: Path, at: int, content: bytes) -> None:
    with open(file, "r+b") as target:
        target.seek(at)
        target.write(content)


def assert_refused(path: Path, error: type[Exception], wording: str) -> None:
    before = files_of(path)
    for mode in ("append", "read"):
        with pytest.raises(error, match=wording):
            open_storage(path, mode)
    assert files_of(path) == before


def test_a_column_cut_short_is_told(five: Path) -> None:
    os.truncate(five / "wide.memmap", 59)
    assert_refused(five, CorruptStorage, r"wide.memmap should have at least 60 bytes .* has 59")


def test_a_missing_column_is_told(five: Path) -> None:
    (five / "next" / "id.memmap").unlink()
    assert_refused(five, CorruptStorage, "id.memmap is missing, which the manifest says")


def test_a_column_elsewhere_is_refused(five: Path, tmp_path: Path) -> None:
    (five / "wide.memmap").rename(tmp_path / "elsewhere")
    (five / "wide.memmap").symlink_to(tmp_path / "elsewhere")
    assert_refused(five, CorruptStorage, r"not a column, but a link or of another kind")


@pytest.mark.parametrize("key", [["..", "..", "x"], ["/etc/passwd"], [], "wide", [1]], ids=repr)
def test_a_manifest_leads_nowhere_else(five: Path, key: object) -> None:
    manifest = json.loads((five / "manifest.json").read_text())
    manifest["schema"][0]["key"] = key
    (five / "manifest.json").write_text(json.dumps(manifest))
    assert_refused(five, CorruptStorage, r"schema in .* is damaged|made for another schema")


@pytest.mark.parametrize(
    ("change", "error", "wording"),
    [
        (lambda m: m.update(format="zarr"), NotAStorage, "another program wrote it"),
        (lambda m: m.update(format="tallyroll.tape"), NotAStorage, "format tallyroll.tape"),
        (lambda m: m.update(format_version=99), FormatVersionMismatch, "format version 99"),
        (lambda m: m.pop("runs"), CorruptStorage, "lacks runs"),
        (lambda m: m.pop("schema"), CorruptStorage, "schema in .* is damaged"),
        (lambda m: m["schema"].pop(), CorruptStorage, "another schema than the manifest"),
        (lambda m: m["schema"][0].update(dtype="float8"), CorruptStorage, "schema in .* damaged"),
        (lambda m: m["schema"][1].update(shape=[2.5]), CorruptStorage, "schema in .* damaged"),
    ],
)
def test_a_manifest_that_does_not_fit_is_told(
    five: Path, change: object, error: type[Exception], wording: str
) -> None:
    manifest = json.loads((five / "manifest.json").read_text())
    change(manifest)  # type: ignore[operator]
    (five / "manifest.json").write_text(json.dumps(manifest))
    assert_refused(five, error, wording)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_not_json_is_told(five: Path, content: bytes) -> None:
    (five / "manifest.json").write_bytes(content)
    assert_refused(five, CorruptStorage, "not JSON any more")


@pytest.mark.parametrize("content", [b"[]", b"3", b"{}"])
def test_another_programs_manifest_is_told(five: Path, content: bytes) -> None:
    (five / "manifest.json").write_bytes(content)
    assert_refused(five, NotAStorage, "another program wrote it")


def test_another_programs_directory_is_told(path: Path) -> None:
    rows(0, 3).memmap(str(path))
    assert_refused(path, NotAStorage, "no manifest.json")


def test_every_flipped_byte_of_the_headers_identity_is_told(five: Path) -> None:
    content = (five / HEADER).read_bytes()
    for at in range(36):
        damage(five / HEADER, at, bytes([content[at] ^ 0x10]))
        assert_refused(five, CorruptStorage, "first bytes are damaged")
        damage(five / HEADER, at, content[at : at + 1])


@pytest.mark.parametrize(("at", "rows_"), [(128, 6), (64, 4)])
def test_counts_that_cannot_be_are_told(five: Path, at: int, rows_: int) -> None:
    damage(five / HEADER, at, word_of(rows_).to_bytes(8, "little"))
    assert_refused(five, CorruptStorage, "rows committed of .* reserved")


@pytest.mark.parametrize("at", [64, 128])
def test_every_flipped_bit_of_a_count_is_told(five: Path, at: int) -> None:
    content = (five / HEADER).read_bytes()
    for bit in range(64):
        byte = at + bit // 8
        damage(five / HEADER, byte, bytes([content[byte] ^ 1 << bit % 8]))
        assert_refused(five, CorruptStorage, "fails its check.*last record was written with 5")
        damage(five / HEADER, byte, content[byte : byte + 1])


def test_more_rows_than_the_files_hold_are_told(five: Path) -> None:
    for at in (64, 128):
        damage(five / HEADER, at, word_of(2**40).to_bytes(8, "little"))
    assert_refused(five, CorruptStorage, "was cut short")


def test_a_header_cut_short_or_missing_is_told(five: Path) -> None:
    os.truncate(five / HEADER, HEADER_NBYTES - 1)
    assert_refused(five, CorruptStorage, "should have 143360 bytes and has 143359")
    (five / HEADER).unlink()
    assert_refused(five, CorruptStorage, "is missing, and without it nobody knows")


def test_a_torn_record_leaves_the_older(five: Path) -> None:
    content = (five / HEADER).read_bytes()
    for at in range(content.index(b"newer") - 28, content.index(b"newer") + 5):
        damage(five / HEADER, at, bytes([content[at] ^ 0x40]))
        with open_storage(five) as storage:
            assert storage.record == (5, b"older")
            assert_rows(storage, 5)
        damage(five / HEADER, at, content[at : at + 1])
    with open_storage(five) as storage:
        assert storage.record == (5, b"newer")
    for word in (b"older", b"newer"):
        damage(five / HEADER, content.index(word), b"X")
    with open_storage(five, "append") as storage:
        assert storage.record is None
        storage.put_record(b"again")
        assert storage.record == (5, b"again")


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


# -- a full disk


def mount_small_disk(place: Path) -> bool:
    """Mount a file system of one MiB that goes with this process; whether that is allowed."""
    own_mounts = 0x20000  # CLONE_NEWNS
    if ctypes.CDLL(None).unshare(own_mounts):
        return False
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
    ):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
    return True


def on_small_disk(connection: Connection, place: Path) -> None:
    """Run `fill_and_survive` on a small disk and say how it went."""
    if not mount_small_disk(place):
        connection.send("not allowed")
        return
    try:
        fill_and_survive(place / "rows")
        connection.send("survived")
    except BaseException:
        connection.send(traceback.format_exc())
        raise


def test_a_disk_that_fills_up_is_filled_to_the_last_and_survives(tmp_path: Path) -> None:
    with process(on_small_disk, tmp_path) as (_, connection):
        said = receive(connection)
    if said == "not allowed":
        pytest.skip("this user may not mount a tmpfs")
    assert said == "survived", said


def fill_and_survive(place: Path) -> None:
    head = 0
    with MemmapStorage(place) as storage:
        said = ""
        while not said:
            try:
                head = storage.extend(arrays(head, 500), record=str(head).encode()).stop
            except StorageFull as error:
                said = str(error)
        assert re.search(
            r"needs \d+ more bytes, and \d+ are free .*Committed rows are intact", said
        )
        # Four columns in pages of 4096 bytes, and the header.
        assert head * 29 > 2**20 - HEADER_NBYTES - 500 * 29 - 16 * 4096
        assert_rows(storage, head)
    with open_storage(place, "append") as storage:
        assert_rows(storage, head)
        with pytest.raises(StorageFull):
            storage.extend(arrays(head, 50_000))
        assert_rows(storage, head)
    with open_storage(place) as reader:
        np.testing.assert_array_equal(reader.column("id"), np.arange(head))


@pytest.mark.parametrize("mode", ["create", "append", "read"])
def test_a_name_that_no_file_can_have(
    tmp_path: Path, mode: Literal["create", "append", "read"]
) -> None:
    with pytest.raises(NotWritable, match="cannot be the path of a storage: File name too long"):
        MemmapStorage(tmp_path / ("a" * 300), mode=mode)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PathIsFile, match="is a link to nothing"):
        MemmapStorage(tmp_path / "link")


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
    with pytest.raises(CorruptStorage, match=r"has 10 committed rows and no manifest\.json"):
        MemmapStorage(tmp_path / "rows")
    assert files_of(tmp_path / "rows") == before
