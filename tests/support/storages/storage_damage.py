"""The part of the contract about damage and full disks: the messages of every storage."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.storage import CorruptStorage, StorageFull, open_storage, verify
from tallyroll.storage.errors import FormatVersionMismatch, NotAStorage, StorageError
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit
from tallyroll.storage.files.commit_header import word_of
from tallyroll.storage.storages import DiskStorage

from storage_contract import (
    arrays,
    assert_rows,
    files_of,
    process,
    receive,
    rows,
)

SMALL_DISK = 12 * 2**20
FILE_LIMIT = 6 * 2**20


def damage(file: Path, at: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    with open(file, "r+b") as target:
        target.seek(at)
        target.write(content)


def assert_refused(
    path: Path, error: type[Exception] | tuple[type[Exception], ...], wording: str
) -> None:
    """Check that opening raises the error and changes nothing."""
    before = files_of(path)
    for mode in ("append", "read"):
        with pytest.raises(error, match=wording):
            open_storage(path, mode)
    assert files_of(path) == before


def assert_told_or_harmless(path: Path) -> None:
    """Check that opening raises one of our errors, or that all five rows are unchanged."""
    for mode in ("read", "append"):
        try:
            storage = open_storage(path, mode)
        except StorageError:
            continue
        with storage:
            assert_rows(storage, 5)


def make_small_disk(place: Path) -> None:
    """Make ``place`` a small disk for this process, by a real mount if that is allowed."""
    if not mount_small_disk(place):
        play_small_disk(place)


def play_small_disk(place: Path) -> None:
    """Simulate a small disk: limit the space that this process can reserve in ``place``.

    All rows go to reserved space. As on ext4, the part that fits stays reserved when the rest does
    not fit.
    """
    reserve, look = os.posix_fallocate, os.statvfs

    def free() -> int:
        used = sum(512 * file.stat().st_blocks for file in place.rglob("*") if file.is_file())
        return max(0, SMALL_DISK - used)

    def posix_fallocate(file: int, offset: int, length: int) -> None:
        left = 512 * os.fstat(file).st_blocks + free()
        if offset + length > left:
            if left > offset:
                reserve(file, offset, left - offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, offset, length)

    def statvfs(where: Any) -> os.statvfs_result:
        found = list(look(where))
        found[3] = found[4] = free() // found[1]
        return os.statvfs_result(found)

    os.posix_fallocate, os.statvfs = posix_fallocate, statvfs


def mount_small_disk(place: Path) -> bool:
    """Mount a small file system for the life of this process. Return False if not allowed."""
    own_mounts = 0x20000  # CLONE_NEWNS
    if ctypes.CDLL(None).unshare(own_mounts):
        return False
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(place)],
    ):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
    return True


def on_small_disk(
    connection: Connection,
    act: Callable[..., None],
    kind: type[DiskStorage],
    place: Path,
    make: Callable[[Path], None],
) -> None:
    """Run `act(kind, place)` on a small disk and send the outcome."""
    make(place)
    say_how_it_went(connection, act, kind, place)


def with_small_files(
    connection: Connection, act: Callable[..., None], kind: type[DiskStorage], place: Path
) -> None:
    """Run `act(kind, place)` with a limit on file sizes and send the outcome."""
    with file_size_limit(FILE_LIMIT):
        say_how_it_went(connection, act, kind, place)


def say_how_it_went(
    connection: Connection, act: Callable[..., None], kind: type[DiskStorage], place: Path
) -> None:
    try:
        act(kind, place / "rows")
        connection.send("survived")
    except BaseException:
        connection.send(traceback.format_exc())
        raise


def fill_and_survive(kind: type[DiskStorage], place: Path) -> None:
    """Append until the disk is full. Committed rows must survive, and further rows be refused."""
    grows = kind._format_class.grows
    head, said = 0, ""
    with kind(place, capacity=None if grows else 1000) as storage:
        while not said:
            try:
                head = storage.extend(arrays(head, 500), record=str(head).encode()).stop
            except StorageFull as error:
                said = str(error)
        assert "Committed rows are intact" in said
        assert_rows(storage, head)
    if grows:
        limit = r"which exceeds the maximum file size .*ulimit -f\), while \d+ bytes"
        assert re.search(rf"needs \d+ more bytes, (and \d+|{limit}) are free", said), said
    for more in (head + 2000, 2**30):
        try:
            with open_storage(place, "append", capacity=more) as storage:
                assert_rows(storage, head)
                head = storage.extend(arrays(head, 500)).stop
        except StorageFull as error:
            wording = r"Committed rows are intact|Nothing was written"
            assert re.search(wording, str(error)), str(error)  # noqa: PT017 - one may fit
    with open_storage(place, "append") as storage:
        assert_rows(storage, head)
        with pytest.raises(StorageFull):
            storage.extend(arrays(head, 500_000))
        assert_rows(storage, head)
    with open_storage(place) as reader:
        np.testing.assert_array_equal(reader.column("id"), np.arange(head))


class DamageContract:
    """Contract to inherit together with `StorageContract`."""

    storage_class: type[DiskStorage]
    make: Callable[..., DiskStorage]
    fill_files = staticmethod(fill_and_survive)
    """Function that fills files until they exceed `FILE_LIMIT` bytes."""

    def manifest_bytes(self, path: Path) -> bytes:
        return self.storage_class._format_class(path).manifest_path.read_bytes()

    def replace_manifest(self, path: Path, content: bytes) -> None:
        self.storage_class._format_class(path).manifest_path.write_bytes(content)

    def header_of(self, path: Path) -> Path:
        return self.storage_class._format_class(path).header_path

    @pytest.fixture
    def recorded(self, path: Path) -> Path:
        """Write five rows and two records."""
        with self.make(path) as storage:
            storage.extend(rows(0, 5), record=b"older")
            storage.writer.put_record(b"newer")
        return path

    # -- the manifest

    @pytest.mark.parametrize("key", [["..", "..", "x"], ["/etc/passwd"], [], "wide", [1]], ids=repr)
    def test_a_manifest_leads_nowhere_else(self, recorded: Path, key: object) -> None:
        manifest = json.loads(self.manifest_bytes(recorded))
        manifest.pop("crc32", None)
        manifest["schema"][0]["key"] = key
        self.replace_manifest(recorded, json.dumps(manifest).encode())
        wording = r"schema in .* is damaged|made for a different schema"
        assert_refused(recorded, CorruptStorage, wording)

    @pytest.mark.parametrize(
        ("change", "error", "wording"),
        [
            (lambda m: m.update(format="zarr"), NotAStorage, "another program wrote it"),
            (lambda m: m.update(format="tallyroll.tape"), NotAStorage, "format tallyroll.tape"),
            (lambda m: m.update(format=3), NotAStorage, "another program wrote it"),
            (lambda m: m.update(format_version=99), FormatVersionMismatch, "format version 99"),
            (lambda m: m.update(format_version=1), FormatVersionMismatch, "format version 1"),
            (
                lambda m: m.update(format_version="3"),
                CorruptStorage,
                "impossible format version '3'",
            ),
            (
                lambda m: m.update(format_version=None),
                CorruptStorage,
                "impossible format version None",
            ),
            (lambda m: m.update(format_version=-3), CorruptStorage, "impossible format version -3"),
            (
                lambda m: m.update(format_version=True),
                CorruptStorage,
                "impossible format version True",
            ),
            (
                lambda m: m.update(format_version=3.0),
                CorruptStorage,
                "impossible format version 3.0",
            ),
            (
                lambda m: m.update(format_version=10**30),
                CorruptStorage,
                "impossible format version 10+",
            ),
            (lambda m: m.update(format_version=2), CorruptStorage, "but its manifest has version"),
            (lambda m: m.pop("runs"), CorruptStorage, "lacks a valid value for runs"),
            (lambda m: m.update(runs={"0": {}}), CorruptStorage, "lacks a valid value for runs"),
            (
                lambda m: m.update(runs=[3]),
                CorruptStorage,
                "lacks a valid value for the first row of a run",
            ),
            (lambda m: m["runs"][0].pop("first_row"), CorruptStorage, "for the first row of a run"),
            (
                lambda m: m["runs"][0].update(first_row="0"),
                CorruptStorage,
                "for the first row of a run",
            ),
            (
                lambda m: m["runs"][0].update(first_row=10**30),
                CorruptStorage,
                "for the first row of a run",
            ),
            (
                lambda m: m["runs"][0].update(first_row=-1),
                CorruptStorage,
                "for the first row of a run",
            ),
            (
                lambda m: m["runs"][0].update(first_row=True),
                CorruptStorage,
                "for the first row of a run",
            ),
            (
                lambda m: m.update(id=7, created=[]),
                CorruptStorage,
                "lacks a valid value for id, created",
            ),
            (lambda m: m.pop("schema"), CorruptStorage, "schema in .* is damaged"),
            (lambda m: m.update(schema="all"), CorruptStorage, "schema in .* is damaged"),
            (lambda m: m["schema"].pop(), CorruptStorage, "a different schema than its manifest"),
            (lambda m: m["schema"][0].update(dtype="float8"), CorruptStorage, "schema in .* damag"),
            (lambda m: m["schema"][0].update(dtype=["x"]), CorruptStorage, "schema in .* damaged"),
            (lambda m: m["schema"][1].update(shape=[2.5]), CorruptStorage, "schema in .* damaged"),
            (lambda m: m["schema"][1].update(shape=[-3]), CorruptStorage, "schema in .* damaged"),
            (lambda m: m["schema"][1].update(shape=[10**30]), CorruptStorage, "a row would have"),
        ],
    )
    def test_a_manifest_that_does_not_fit_is_told(
        self, recorded: Path, change: Any, error: type[Exception], wording: str
    ) -> None:
        manifest = json.loads(self.manifest_bytes(recorded))
        manifest.pop("crc32", None)
        change(manifest)
        self.replace_manifest(recorded, json.dumps(manifest).encode())
        assert_refused(recorded, error, wording)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
    def test_a_manifest_that_is_not_json_is_told(self, recorded: Path, content: bytes) -> None:
        self.replace_manifest(recorded, content)
        assert_refused(recorded, CorruptStorage, "is not valid JSON")

    @pytest.mark.parametrize("content", [b"[]", b"3", b"{}"])
    def test_another_programs_manifest_is_told(self, recorded: Path, content: bytes) -> None:
        self.replace_manifest(recorded, content)
        assert_refused(recorded, NotAStorage, "another program wrote it")

    # -- the header

    def test_every_flipped_byte_of_the_headers_identity_is_told(self, recorded: Path) -> None:
        header = self.header_of(recorded)
        content = header.read_bytes()
        for at in range(36):
            damage(header, at, bytes([content[at] ^ 0x10]))
            assert_refused(recorded, CorruptStorage, "first bytes are damaged")
            damage(header, at, content[at : at + 1])

    @pytest.mark.parametrize(("at", "count"), [(128, 6), (64, 4)])
    def test_counts_that_cannot_be_are_told(self, recorded: Path, at: int, count: int) -> None:
        damage(self.header_of(recorded), at, word_of(count).to_bytes(8, "little"))
        assert_refused(recorded, CorruptStorage, "rows are committed, but only .* are reserved")

    @pytest.mark.parametrize("at", [64, 128])
    def test_every_flipped_bit_of_a_count_is_told(self, recorded: Path, at: int) -> None:
        header = self.header_of(recorded)
        content = header.read_bytes()
        for bit in range(64):
            byte = at + bit // 8
            damage(header, byte, bytes([content[byte] ^ 1 << bit % 8]))
            wording = "fails its check.*last record was written with 5"
            assert_refused(recorded, CorruptStorage, wording)
            damage(header, byte, content[byte : byte + 1])

    def test_more_rows_than_the_files_hold_are_told(self, recorded: Path) -> None:
        for at in (64, 128):
            damage(self.header_of(recorded), at, word_of(2**40).to_bytes(8, "little"))
        wording = r"was cut short|is missing, so its committed rows|has space for only \d+"
        assert_refused(recorded, CorruptStorage, wording)

    def test_a_torn_record_leaves_the_older(self, recorded: Path) -> None:
        header = self.header_of(recorded)
        content = header.read_bytes()
        for at in range(content.index(b"newer") - 28, content.index(b"newer") + 5):
            damage(header, at, bytes([content[at] ^ 0x40]))
            with open_storage(recorded) as storage:
                assert storage.record == (5, b"older")
                assert_rows(storage, 5)
            damage(header, at, content[at : at + 1])
        with open_storage(recorded) as storage:
            assert storage.record == (5, b"newer")
        for word in (b"older", b"newer"):
            damage(header, content.index(word), b"X")
        with open_storage(recorded, "append") as storage:
            assert storage.record is None
            storage.writer.put_record(b"again")
            assert storage.record == (5, b"again")

    def test_an_older_record_that_is_garbled_is_no_damage(self, recorded: Path) -> None:
        """The newer record remains valid, and the next write reuses the garbled slot."""
        header = self.header_of(recorded)
        content = header.read_bytes()
        start = content.index(b"older") - 28
        for at in range(28 + 5):
            for change in (0x01, 0x40, 0x80):
                garbled = bytearray(content[start : start + 33])
                garbled[at] ^= change
                damage(header, start, garbled)
                # A larger sequence number looks like that of a newer record.
                newer = int.from_bytes(garbled[:8], "little", signed=True) > 2
                with open_storage(recorded) as storage:
                    assert storage.record == (5, b"newer")
                    assert storage.record_damaged == newer, (at, change)
        damage(header, start, content[start : start + 33])
        damage(header, start + 28, b"X")
        assert verify(recorded).sound
        with open_storage(recorded, "append") as storage:
            storage.writer.put_record(b"newest")
            assert storage.record == (5, b"newest")
            damage(header, content.index(b"newer"), b"X")
            assert storage.record == (5, b"newest")
            assert not storage.record_damaged

    # -- a full disk

    @pytest.mark.parametrize("make", [make_small_disk, play_small_disk])
    def test_a_disk_that_fills_up_is_filled_to_the_last_and_survives(
        self, tmp_path: Path, make: Callable[[Path], None]
    ) -> None:
        target = (on_small_disk, fill_and_survive, self.storage_class, tmp_path, make)
        with process(*target) as (_, connection):
            said = receive(connection)
        assert said == "survived", said

    def test_files_that_may_not_be_larger_are_told(self, tmp_path: Path) -> None:
        target = (with_small_files, self.fill_files, self.storage_class, tmp_path)
        with process(*target) as (_, connection):
            said = receive(connection)
        assert said == "survived", said
