"""Test storages under attack: killed writers, forks, bit flips, full disks.

No committed row is lost.

``TALLYROLL_KILLS`` sets the number of kills per format at random moments, 16 by default. An eighth
of it is the number of lines of each scenario at which writers are killed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    Schema,
    StorageError,
    StorageFull,
    StorageLocked,
    open_storage,
)
from tallyroll.storage.engine.columns import ArrayRows
from tallyroll.storage.engine.writer_check import LOOK_SECONDS
from tallyroll.storage.errors import TooManyFiles, WriterForked
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.lock import WriterLock, is_held
from tallyroll.storage.files.mapping import Region
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.storages import DiskStorage

from killed_storages_kit import (
    CASES,
    SCENARIOS,
    Case,
    Told,
    assert_whole,
    check,
    check_shown,
    forked,
    in_a_process,
    kill_at_lines,
    kill_at_random,
    killed,
    oracle,
    record_of,
)
from storage_contract import WAIT_SECONDS
from storage_damage import make_small_disk, mount_small_disk

KILLS = int(os.environ.get("TALLYROLL_KILLS", "16"))
LINES = max(1, KILLS // 8)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


# -- kill -9


@pytest.mark.timeout(60 + KILLS)
def test_kill_9_at_random_moments(case: Case, tmp_path: Path) -> None:
    heads = in_a_process(kill_at_random, case, tmp_path / "rows", KILLS, seconds=60 + KILLS)
    assert len(set(heads)) > KILLS // 4, f"too few kills hit a writer at work: {heads}"


@pytest.mark.timeout(60 + 4 * LINES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_kill_9_at_lines_all_over(case: Case, name: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    seconds = 60 + 4 * LINES
    if case.capacity:
        case = replace(case, capacity=2000)  # copied for every kill
    heads = in_a_process(kill_at_lines, case, name, tmp_path, LINES, seed, seconds=seconds)
    assert len(heads) == LINES


def test_a_creation_killed_before_its_lock_was_made(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    case.kind._format_class(path).prepare()
    with case.create(path) as storage:
        storage.extend(oracle(0, 4), record=record_of(4))
        assert check(storage) == 4


# -- several writers and readers


def test_a_reader_before_during_and_after_a_writer(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with case.create(path) as storage:
        storage.extend(oracle(0, 500), record=record_of(500))
    with case.kind(path, mode="read") as reader:
        assert check(reader) == 500
        with case.kind(path, mode="append") as storage:
            storage.extend(oracle(500, 50), record=record_of(550))
            assert check(reader) == 550
            storage.extend(oracle(550, 200), record=record_of(750))
            assert check(reader) == 750
        assert check(reader) == 750
        with case.kind(path, mode="append") as storage:
            storage.extend(oracle(750, 150), record=record_of(900))
            assert check(reader) == 900
            storage.finalize()
        assert check(reader) == 900
    with case.kind(path, mode="read") as again:
        assert check(again) == 900


def forked_readers(case: Case, path: Path) -> None:
    """A fork reads while the writer continues. After the writer's death, another one writes."""
    told = Told()

    def write() -> None:
        storage = case.create(path)
        storage.extend(oracle(0, 600), record=record_of(600))
        storage.get(slice(None))
        told.lines = forked(lambda: read_inherited(storage, told))
        head = 600
        while True:
            count = 200 if case.ring else 1
            try:
                storage.extend(oracle(head, count), record=record_of(head + count))
            except StorageFull:  # HDF5, if the reader is slow
                storage.reserve(head + 2000)
                continue
            head += count
            if not case.ring:
                time.sleep(0.001)

    writer = forked(write)
    deadline = time.monotonic() + WAIT_SECONDS
    while told.head < 300 and time.monotonic() < deadline:
        time.sleep(0.001)
        assert os.waitpid(writer, os.WNOHANG) == (0, 0), "the writer failed"
    killed(writer)
    assert told.head >= 300
    os.kill(told.lines, 0)  # it is alive, and does not hold the lock
    with case.kind(path, mode="append") as storage:
        head = check(storage, acknowledged=600)
        storage.extend(oracle(head, 10), record=record_of(head + 10))
        assert check(storage) == head + 10
    os.kill(told.lines, signal.SIGKILL)


def read_inherited(storage: DiskStorage, told: Told) -> None:
    """Read in a fork of the writer, as in any other process."""
    chance, newest = np.random.default_rng(0), 0
    with pytest.raises(WriterForked):
        storage.extend(oracle(storage.head, 1))
    while told.head < 300 or newest <= 600:
        got = assert_whole(storage.get(chance.integers(0, len(storage), 200)))
        newest = max(newest, int(got.max()))
        assert_whole(storage.get(slice(0, 50)))
        told.head += 1
    signal.pause()


def test_a_forked_child_of_the_writer_reads_and_holds_no_lock(case: Case, tmp_path: Path) -> None:
    in_a_process(forked_readers, case, tmp_path / "rows")


def test_a_removed_lock_file_stops_its_writer(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with case.create(path) as first:
        first.extend(oracle(0, 300), record=record_of(300))
        first.writer.files.lock_path.unlink()
        with case.kind(path, mode="append") as second:
            second.extend(oracle(300, 100), record=record_of(400))
            for act in (lambda: first.extend(oracle(300, 9)), lambda: first.writer.put_record(b"")):
                with pytest.raises(
                    StorageLocked, match="was removed while this process was writing"
                ):
                    act()
            first.flush()
            second.extend(oracle(400, 100), record=record_of(500))
        first.close()
        with case.kind(path, mode="read") as reader:
            assert check(reader) == 500
            check_shown(path, reader, all_of_them=True)


def test_a_lock_file_removed_in_the_middle_of_a_long_append(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "rows", ArrayRows.copy_to
    with case.create(path) as first:
        first.extend(oracle(0, 300), record=record_of(300))

        def long(self: ArrayRows, *args: Any) -> None:
            copy(self, *args)
            first.writer.files.lock_path.unlink(missing_ok=True)
            time.sleep(2 * LOOK_SECONDS)

        with monkeypatch.context() as patch:
            patch.setattr(ArrayRows, "copy_to", long)
            with pytest.raises(StorageLocked, match="was removed while this process was writing"):
                first.extend(oracle(300, 100))
    with case.kind(path, mode="append") as second:
        assert check(second) == 300
        second.extend(oracle(300, 20), record=record_of(320))
        assert check(second) == 320


def test_a_lock_on_a_removed_file_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed creation removes its lock file, which another process may have just opened."""
    path, opened = tmp_path / "lock", os.open

    def open_and_lose(*args: Any, **options: Any) -> int:
        file = opened(*args, **options)
        if args[0] != path.name:
            return file  # the directory that it lies in
        monkeypatch.undo()
        path.unlink()
        return file

    monkeypatch.setattr(os, "open", open_and_lose)
    first = WriterLock(Inside(path.parent), path)
    assert first.is_in_place
    with pytest.raises(StorageLocked):
        WriterLock(Inside(path.parent), path)
    first.release()


def test_whether_a_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing lock file is not held. If the system cannot tell, the lock may be held."""
    inside, path, other = Inside(tmp_path), tmp_path / "rows.lock", tmp_path / "other.lock"
    assert not is_held(inside, path)
    lock = WriterLock(inside, other)
    assert is_held(inside, other)
    for make in (os.mkfifo, os.mkdir, lambda place: os.symlink(other, place)):
        make(path)
        assert not is_held(inside, path)
        os.rmdir(path) if path.is_dir() else path.unlink()
    for code in (errno.EACCES, errno.EIO, errno.EMFILE):
        with monkeypatch.context() as patch:
            patch.setattr(Inside, "open", Refusing(code))
            assert is_held(inside, path)
    lock.release()
    assert not is_held(inside, other)


class Refusing:
    """Replace a system call with one that is refused."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __call__(self, *_: object) -> NoReturn:
        raise OSError(self._code, os.strerror(self._code))


def test_the_last_good_record_is_never_written_over(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append is interrupted first, and a kill comes in the middle of a record."""
    path = tmp_path / "rows"
    with case.create(path) as storage:
        storage.extend(oracle(0, 3), record=record_of(3))
        with monkeypatch.context() as patch:
            patch.setattr(Header, "set_head", interrupt)
            with pytest.raises(KeyboardInterrupt):
                storage.extend(oracle(3, 3), record=b"never committed")
        with monkeypatch.context() as patch:
            patch.setattr("tallyroll.storage.files.record_slots._SEQUENCE", Interrupting)
            with pytest.raises(KeyboardInterrupt):
                storage.writer.put_record(b"torn")
        assert storage.record == (3, record_of(3))
        assert not storage.record_damaged
        storage.writer.put_record(b"whole")
        assert storage.record == (3, b"whole")


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class Interrupting:
    """Replace the write of a record's sequence number, which is the last write."""

    size, pack_into = 8, staticmethod(interrupt)


def test_metadata_for_others_fails_no_commit(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with case.create(path) as storage:
        storage.extend(oracle(0, 3), record=record_of(3))
        with monkeypatch.context() as patch:
            patch.setattr("tallyroll.storage.engine.commit_engine._REFRESH_SECONDS", 0.0)
            patch.setattr(case.kind._format_class, "publish", refuse)
            assert storage.reader.engine is not None
            storage.reader.engine._refresh_at = 0.0
            for _ in range(2):
                head = storage.head
                storage.extend(oracle(head, 5), record=record_of(head + 5))
            with pytest.raises(TooManyFiles, match="Too many open files"):
                storage.flush()
        assert check(storage) == 13


# -- durability


def test_power_durability_syncs_in_order(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reserve is synced before rows are overwritten, and rows before the head.

    The head is synced before the call returns.
    """
    with case.create(tmp_path / "rows", durability="power") as storage:
        storage.extend(oracle(0, 500), record=record_of(500))
        engine = storage.reader.engine
        assert engine is not None
        header, names = engine._header, {}
        header_file = os.fstat(header._file).st_ino
        done: list[tuple[str, int, int]] = []

        def note(what: str) -> None:
            done.append((what, header.reserve, header.head))

        def synced(file: int) -> None:
            inode = os.fstat(file).st_ino
            note("header" if inode == header_file else names.setdefault(inode, "rows"))

        copy, flush = ArrayRows.copy_to, Region.sync
        monkeypatch.setattr(os, "fdatasync", synced)
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(
            ArrayRows, "copy_to", lambda self, *args: (note("copy"), copy(self, *args))
        )
        monkeypatch.setattr(Region, "sync", lambda self, start: (note("rows"), flush(self, start)))
        storage.extend(oracle(500, 200), record=record_of(700))
        monkeypatch.undo()
        steps = [step for step, _ in itertools.groupby(done)]
        data = "header" if case.kind is H5Storage else "rows"  # one file
        wanted = [("copy", 700, 500), (data, 700, 500), ("header", 700, 700)]
        if data != "header":  # the record is synced before the head
            wanted.insert(2, ("header", 700, 500))
        if case.ring:
            wanted.insert(0, ("header", 700, 500))
        assert steps == wanted
        assert check(storage) == 700


# -- full disks


def fill_up(case: Case, path: Path, make_room: Callable[[], None]) -> int:
    """Write until the disk is full, read the rows, and continue once there is space."""
    storage, head = case.create(path), 0
    full = 0
    while full < 3:
        try:
            storage.extend(oracle(head, 100), record=record_of(head + 100))
            head += 100
        except StorageFull:
            full += 1
            assert check(storage) == head, "committed rows changed"
            if case.kind is H5Storage:
                with contextlib.suppress(StorageFull):
                    storage.reserve(2 * head)
                    full -= 1
    storage.writer.put_record(record_of(head))
    with case.kind(path, mode="read") as reader:
        assert check(reader) == head
    with contextlib.suppress(StorageFull):
        storage.close()
    storage = case.kind(path, mode="append")
    assert check(storage) == head
    # A frame pool may have taken the last bytes, so that there is no space for the episode table.
    with contextlib.suppress(*[StorageFull] * case.once):
        storage.close()
    make_room()
    with case.kind(path, mode="append", capacity=head + 300) as storage:
        storage.extend(oracle(head, 300), record=record_of(head + 300))
    with case.kind(path, mode="read") as reader:
        assert check(reader) == head + 300
        check_shown(path, reader, all_of_them=True)
    return head


def fill_up_small_disk(case: Case, disk: Path) -> int:
    """Fill a small disk. Return the number of rows that fit."""
    disk.mkdir()
    make_small_disk(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(4 * 2**20))
    return fill_up(case, disk / "rows", ballast.unlink)


def test_a_disk_that_is_full_in_the_middle_and_has_room_again(case: Case, tmp_path: Path) -> None:
    if case.ring:
        case = replace(case, ring=5000)
    elif case.kind is not MemmapStorage:
        case = replace(case, capacity=600)  # Zarr: with small chunks
    head = in_a_process(fill_up_small_disk, case, tmp_path / "disk")
    assert head >= 200


def close_on_full_disk(case: Case, disk: Path) -> bool:
    """Close a storage on a full disk, and close it again. Return False if mounting is denied."""
    disk.mkdir()
    if not mount_small_disk(disk):
        return False
    path, ballast = disk / "rows", disk / "ballast"
    storage = case.create(path)
    storage.extend(oracle(0, 400), record=record_of(400))
    with open(ballast, "wb", buffering=0) as file:
        for nbytes in (2**20, 2**12):
            with contextlib.suppress(OSError):
                while file.write(bytes(nbytes)):
                    pass
    with pytest.raises(StorageFull):
        storage.close()
    assert storage.closed
    storage.close()
    with case.kind(path, mode="read") as reader:
        assert check(reader) == 400
    ballast.unlink()
    with case.kind(path, mode="append", capacity=700) as storage:
        assert check(storage) == 400
        storage.extend(oracle(400, 300), record=record_of(700))
    with case.kind(path, mode="read") as reader:
        assert check(reader) == 700
        check_shown(path, reader, all_of_them=True)
    return True


def test_a_close_on_a_full_disk_keeps_the_rows(case: Case, tmp_path: Path) -> None:
    if case.kind is not MemmapStorage:
        case = replace(case, capacity=600)
    if not in_a_process(close_on_full_disk, case, tmp_path / "disk"):
        pytest.skip("this system denies mounts")


# -- flipped bits


def flipped(case: Case, folder: Path, seed: int) -> dict[str, int]:
    """Flip bits of headers, records and manifests, one at a time. Return the outcomes."""
    small = replace(case, ring=5 if case.ring else 0, capacity=50 if case.capacity else None)
    path, chance = folder / "rows", random.Random(seed)
    with small.create(path) as storage:
        storage.initialise(Schema.of(oracle(0, 1)), {"seed": 17, "env": "CartPole-v1"})
        for head in (2, 4, 7):
            storage.extend(oracle(storage.head, head - storage.head), record=record_of(head))
        storage.finalize()
    files = case.kind._format_class(path)
    with case.kind(path, mode="read") as storage:
        manifest = storage.manifest
    came = {"refused": 0, "harmless": 0, "older record": 0}
    for at in places_of(files.header_path, chance):
        flip(files.header_path, at)
        came[what_came_of_it(case, path, manifest)] += 1
        flip(files.header_path, at)
    if files.manifest_path != files.header_path:
        for at in range(8 * files.manifest_path.stat().st_size):
            if at % 8 == chance.randrange(8):
                flip(files.manifest_path, at)
                came[what_came_of_it(case, path, manifest)] += 1
                flip(files.manifest_path, at)
    return came


def places_of(header: Path, chance: random.Random) -> list[int]:
    """Return bit numbers: all of the first ones, and some nonzero ones in the first 2**20."""
    written = [i for i, byte in enumerate(header.read_bytes()[: 2**20]) if byte and i >= 136]
    # Another sequence number may look like an unfinished record, and is then harmless.
    written = [i for i in written if (i - 4096) % 69632 >= 8]
    some = [8 * byte + chance.randrange(8) for byte in written]
    return [*range(8 * 136), *chance.sample(some, min(len(some), 1500))]


def flip(file: Path, bit: int) -> None:
    with open(file, "r+b") as target:
        target.seek(bit // 8)
        byte = target.read(1)[0] ^ 1 << bit % 8
        target.seek(bit // 8)
        target.write(bytes([byte]))


def what_came_of_it(case: Case, path: Path, manifest: dict[str, Any]) -> str:
    try:
        storage = open_storage(path)
    except StorageError:
        return "refused"
    with storage:
        try:
            assert storage.span == range(2 if case.ring else 0, 7)
            numbers = np.arange(storage.span.start, 7)
            got = storage.get(storage.slots_of(numbers))
            assert assert_whole(got).tolist() == numbers.tolist()
            record = storage.record
        except StorageError:
            return "refused"
        same = {k: v for k, v in storage.manifest.items() if k in manifest} == manifest
        assert same, "a manifest changed silently"
        if record == (7, record_of(7)):
            return "harmless"
        assert storage.record_damaged, "an older record, and no word"
        assert record in (None, (4, record_of(4)))
        return "older record"


@pytest.mark.slow
def test_flipped_bits_are_told_or_harmless(case: Case, tmp_path: Path) -> None:
    came = in_a_process(flipped, case, tmp_path, random.randrange(2**32))
    assert came["refused"] > 100
    assert came["older record"] > 10
