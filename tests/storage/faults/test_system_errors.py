"""Test refusals of the system: failing disks, missing files, permissions, a writer that closes.

Any failing call raises a Tallyroll error and leaves committed rows intact. The storage remains
usable or reports that it is closed. `TALLYROLL_DISK_ERRORS` multiplies the number of failing calls.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import itertools
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tallyroll.storage
from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.errors import CollectorError
from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.engine.writer_check import LOOK_SECONDS
from tallyroll.storage.errors import CorruptStorage, DiskFailed, StorageClosed, StorageError
from tallyroll.storage.files.paths import failed
from tallyroll.storage.formats import memmap
from tallyroll.storage.formats.hdf5 import format as hdf5_replace
from tallyroll.storage.storages import DiskStorage

from hostile_kit import KINDS as HOSTILE
from hostile_kit import (
    append,
    collect,
    finalize,
    in_a_child,
    inspect,
    look,
    read,
    resume,
    told_or_done,
)
from open_files import descriptors
from pairs import each_pair

KINDS: dict[str, tuple[type[DiskStorage], dict[str, Any]]] = {
    "memmap": (MemmapStorage, {}),
    "ring": (MemmapStorage, {"max_size": 40}),
    "hdf5": (H5Storage, {"capacity": 60}),
    "zarr": (ZarrStorage, {}),
}
MORE = int(os.environ.get("TALLYROLL_DISK_ERRORS", "1"))
TRIALS = 2
SECONDS = 1.0 * min(MORE, 30)
PLACES = 3
WIDE = 2048  # float64: rows this wide go through the files

OURS = str(Path(tallyroll.storage.__file__).parent)
CALLS = {
    os: (
        *("open", "read", "pread", "write", "pwrite", "fsync", "fdatasync", "ftruncate"),
        *("posix_fallocate", "replace", "unlink", "mkdir", "rmdir", "listdir", "scandir"),
        *("fstat", "stat", "lstat", "statvfs", "close"),
    ),
    mmap: ("mmap",),
}


def rows(first: int, count: int) -> dict[tuple[str, ...], np.ndarray]:
    number = np.arange(first, first + count)
    return {
        ("x",): number,
        ("wide",): np.repeat(number[:, None], WIDE, 1).astype(np.float64),
        ("collector", "traj_ids"): number // 5,
        ("collector", "step"): number % 5,
        ("collector", "lane"): np.zeros(count, np.int32),
        ("next", "reward"): np.ones((count, 1), np.float32),
        ("next", "done"): (number % 5 == 4)[:, None],
        ("next", "terminated"): (number % 5 == 4)[:, None],
        ("next", "truncated"): np.zeros((count, 1), bool),
    }


class FailingDisk:
    """Makes system calls fail that the storage makes during `failing`."""

    def __init__(self, patch: pytest.MonkeyPatch, code: int = errno.EIO) -> None:
        self.made: list[tuple[str, ...]] = []
        """The calls in order: their names, and the places in the storage's code that made them."""
        self._fail_at, self._code, self._on = range(0), code, False
        for module, names in CALLS.items():
            for name in names:
                patch.setattr(module, name, self._wrapped(name, getattr(module, name)))
        for module in (
            *("files.safe_files", "formats.directory"),
            *("formats.hdf5.datasets", "formats.hdf5.user_block"),
        ):
            patch.setattr(f"tallyroll.storage.{module}.open", self._open, raising=False)

    def _call(self, name: str) -> None:
        if not self._on:
            return
        where: list[str] = []
        frame = sys._getframe(1)
        while frame is not None and len(where) < PLACES:
            if frame.f_code.co_filename.startswith(OURS):
                where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        if not where:  # another library made the call
            return
        self.made.append((name, *where))
        if len(self.made) - 1 in self._fail_at:
            raise OSError(self._code, os.strerror(self._code))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            if name == "close":
                call(*args, **options)  # Linux closes the file even if it reports an error
                return self._call(name)
            self._call(name)
            return call(*args, **options)

        return wrapper

    def _open(
        self, file: Any, mode: str, buffering: int = -1, closefd: bool = True
    ) -> io.RawIOBase | io.BufferedIOBase:
        disk = self

        class Raw(io.FileIO):
            def readinto(self, buffer: Any) -> int:
                disk._call("read")
                return super().readinto(buffer)

            def readall(self) -> bytes:
                disk._call("read")
                return super().readall()

            def write(self, content: Any) -> int:
                disk._call("write")
                return super().write(content)

        raw = Raw(file, mode.replace("b", ""), closefd)
        if not buffering:
            return raw
        return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)

    @contextmanager
    def failing(self, at: range) -> Iterator[None]:
        """Let the calls with these numbers fail within the context."""
        self.made, self._fail_at, self._on = [], at, True
        try:
            yield
        finally:
            self._on = False


def stored(storage: DiskStorage) -> list[int]:
    return [int(n) for n in storage.get(np.arange(len(storage)))["x"]]


# Jobs during which calls fail: each acts on a storage at a path and yields its number of rows.


def creating(kind: type[DiskStorage], path: Path, options: dict[str, Any]) -> Iterator[int]:
    with kind(path, **options) as storage:
        storage.extend(rows(0, 5))
        yield 5


def appending(kind: type[DiskStorage], path: Path, options: dict[str, Any]) -> Iterator[int]:
    with kind(path, mode="append", durability="power") as storage:
        for first in (10, 15, 20):
            storage.extend(rows(first, 5), record=b"r")
            yield first + 5
        storage.flush()


def reserving(kind: type[DiskStorage], path: Path, options: dict[str, Any]) -> Iterator[int]:
    with kind(path, mode="append") as storage:
        storage.reserve(300)
        yield 10
        storage.writer.put_record(b"r")
        storage.initialise(storage.schema, {"a": 1})
        storage.extend(rows(10, 20))
        yield 30


def finalizing(kind: type[DiskStorage], path: Path, options: dict[str, Any]) -> Iterator[int]:
    with kind(path, mode="append") as storage:
        storage.extend(rows(10, 5))
        yield 15
        storage.finalize()


def reading(kind: type[DiskStorage], path: Path, options: dict[str, Any]) -> Iterator[int]:
    with open_storage(path) as storage:
        assert stored(storage) == list(range(10))
        assert len(storage.trajectories) == 2
        assert storage.manifest["runs"]
        storage.get(slice(None))
    verify(path)
    yield 10


JOBS = {each.__name__: each for each in (creating, appending, reserving, finalizing, reading)}


def do(job: Callable[..., Iterator[int]], *args: Any) -> tuple[int, Exception | None]:
    """Return the number of rows that are certainly committed, and the error that ended the job."""
    found = [-1]
    try:
        found.extend(job(*args))
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return found[-1], error
    return found[-1], None


def sites(calls: list[tuple[str, ...]], seed: str) -> list[int]:
    """Return the numbers of calls in random order, one for each place that makes calls."""
    draw = random.Random(seed)
    by_place: dict[tuple[str, ...], list[int]] = {}
    for number, call in enumerate(calls):
        by_place.setdefault(call, []).append(number)
    found = [draw.choice(numbers) for numbers in by_place.values()]
    draw.shuffle(found)
    return found


def opened_since(before: set[str]) -> set[str]:
    if left := descriptors() - before:
        gc.collect()  # errors hold frames, and frames hold these files
        left = descriptors() - before
    return {name for name in left if "rows.h5" in name}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("name", KINDS)
def test_any_call_may_fail(
    name: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call fails once, or all calls fail from then on.

    When the disk works again, all rows exist and no file is left open.
    """
    kind, options = KINDS[name]
    disk = FailingDisk(monkeypatch)
    numbers = itertools.count()
    base, before = tmp_path / "base", 0
    base.mkdir()
    if job != "creating":
        before = 10
        with kind(base / "rows.h5", **options) as storage:
            storage.extend(rows(0, before))

    def fresh() -> Path:
        place = tmp_path / str(next(numbers))
        shutil.copytree(base, place)
        return place / "rows.h5"

    with disk.failing(range(0)):
        _, error = do(JOBS[job], kind, fresh(), options)
    assert error is None
    calls = disk.made
    bad = []
    opened = descriptors()
    for at in sites(calls, f"{name} {job}")[: TRIALS * MORE]:
        for last in (at, 10**9):
            path = fresh()
            with disk.failing(range(at, last + 1)):
                committed, error = do(JOBS[job], kind, path, options)
            try:
                assert error is None or isinstance(error, StorageError), error
                there(kind, path, options, max(before, committed))
            except Exception as after:  # noqa: BLE001 - all are listed
                if error is not None:
                    after.add_note("after:\n" + "".join(traceback.format_exception(error)))
                after.add_note(f"call {at}: {disk.made[at] if at < len(disk.made) else calls[at]}")
                bad.append("".join(traceback.format_exception(after)))
            error = None  # it holds frames, and the files that they opened
            if left := opened_since(opened):
                bad.append(f"call {at}: {calls[at]}: these are left open: {sorted(left)}")
                opened |= left
            shutil.rmtree(path.parent)
    assert not bad, f"{len(bad)} of {len(calls)}\n" + "\n\n".join(dict.fromkeys(bad))


def there(kind: type[DiskStorage], path: Path, options: dict[str, Any], least: int) -> None:
    """Check that the storage has at least this many rows and accepts more."""
    if not kind._format_class(path).exists():
        assert not least
        with kind(path, **options) as storage:
            storage.extend(rows(0, 5))
    with open_storage(path, "append", capacity=60) as storage:
        found = stored(storage)
        assert len(found) >= least
        assert found == list(range(len(found)))
        storage.extend(rows(len(found), 5))
    report = verify(path)
    assert report.sound, report.findings


# --- the storage continues, or reports that it is closed ------------------------------------------


def extend(storage: DiskStorage) -> None:
    storage.extend(rows(storage.head, 25))


def reserve_more(storage: DiskStorage) -> None:
    storage.reserve(500)


def flush(storage: DiskStorage) -> None:
    storage.flush()


def another_run(storage: DiskStorage) -> None:
    storage.initialise(storage.schema, {"a": 1})


def finish(storage: DiskStorage) -> None:
    storage.finalize()


def close(storage: DiskStorage) -> None:
    storage.close()


def get(storage: DiskStorage) -> None:
    storage.get(np.arange(5))
    storage.get(slice(None))
    len(storage.trajectories)


STEPS = (extend, reserve_more, flush, another_run, finish, close, get)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", KINDS)
def test_after_an_error(
    name: str, step: Callable[[DiskStorage], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage remains usable without lost or repeated rows.

    Otherwise, it is closed and can be opened again.
    """
    kind, options = KINDS[name]
    disk = FailingDisk(monkeypatch)

    def opened(path: Path) -> DiskStorage:
        storage = kind(path, durability="power", **options)
        storage.extend(rows(0, 10))
        return storage

    with opened(tmp_path / "rows.h5") as storage, disk.failing(range(0)):
        step(storage)
    calls = disk.made
    for at in sites(calls, f"{name} {step.__name__}")[: TRIALS * MORE]:
        path = tmp_path / f"{at}.h5"
        storage = opened(path)
        said = None
        with disk.failing(range(at, at + 1)):
            try:
                step(storage)
            except StorageError as error:
                said = error
        try:
            head = storage.head
            assert head in ((10,) if said or step is not extend else (10, 35)), calls[at]
            storage.extend(rows(head, 5))
            assert stored(storage) == list(range(head + 5))[-len(storage) :]
            storage.close()
        except StorageClosed:
            assert said or step in (finish, close), calls[at]
            head = 5
        with open_storage(path, "append", capacity=60) as storage:
            assert storage.head >= head + 5
            assert stored(storage) == list(range(storage.head))[-len(storage) :]
            storage.extend(rows(storage.head, 5))


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_a_sync_did_not_bring_to_the_disk_are_not_committed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = KINDS[name]
    with kind(tmp_path / "rows.h5", durability="power", **options) as storage:
        storage.extend(rows(0, 10), record=b"ten")
        before, fdatasync = storage.head, os.fdatasync

        def fails_behind_the_head(file: int) -> None:
            if storage.head > before:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fdatasync(file)

        monkeypatch.setattr(os, "fdatasync", fails_behind_the_head)
        with pytest.raises(DiskFailed):
            storage.extend(rows(90, 7), record=b"ninety-seven")
        monkeypatch.undo()
        assert (storage.head, storage.record) == (10, (10, b"ten"))
        storage.extend(rows(10, 5))
        storage.extend(rows(15, 5))
        assert stored(storage) == list(range(20))
        assert storage.record == (10, b"ten")


@pytest.mark.parametrize("name", [7, b"/x/rows", "/x/rows", None])
@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOENT])
def test_an_error_may_name_a_descriptor_or_bytes(number: int, name: Any) -> None:
    found = failed(Path("/x/storage"), OSError(number, os.strerror(number), name), 0)
    place = "/x/storage" if name in (7, None) else "/x/rows"
    kind, fault = {
        errno.EISDIR: (CorruptStorage, "was replaced by a link or another kind of file"),
        errno.ENOENT: (DiskFailed, "is "),
    }[number]
    assert isinstance(found, kind)
    assert str(found).startswith(f"{place} {fault}")


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """A pipe may replace the file after its format was detected."""
    path, files = tmp_path / "rows.h5", len(os.listdir("/proc/self/fd"))
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is not a file"):
        hdf5_replace.open_file(path, os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_file_that_cannot_be_looked_at_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.h5"
    path.touch()
    files = len(os.listdir("/proc/self/fd"))

    def fails(file: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hdf5_replace.os, "fstat", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        hdf5_replace.open_file(path, os.O_RDONLY)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_disk_that_fails_for_good_while_hdf5_is_made_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage is closed if the file cannot be reopened, and the error reports all of it."""
    disk = FailingDisk(monkeypatch)

    def opened(number: int) -> DiskStorage:
        storage = H5Storage(tmp_path / f"{number}.h5", capacity=20)
        storage.extend(rows(0, 10))
        return storage

    with opened(0) as storage, disk.failing(range(0)):
        storage.reserve(40)
    closed = 0
    for number in (0, *sites(disk.made, "for good")[: 2 * TRIALS * MORE]):
        storage = opened(number + 1)
        with disk.failing(range(number, 10**9)), pytest.raises(StorageError):
            storage.reserve(40)
        try:
            storage.extend(rows(10, 5))
            storage.close()
        except StorageClosed:
            closed += 1
        with open_storage(storage.path, "append", capacity=40) as storage:
            assert stored(storage) == list(range(storage.head))
            assert storage.head >= 10
    assert closed > 0


# --- readers with a concurrent writer -------------------------------------------------------------


def test_a_writer_that_closes_while_a_reader_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files shrink after the reader gets their sizes and before it maps them."""
    path, map_column = tmp_path / "rows", memmap._map_column
    writer = MemmapStorage(path)
    writer.extend(rows(0, 10))
    writer.reserve(10_000)

    def at_that_moment(*args: Any) -> np.ndarray:
        monkeypatch.setattr(memmap, "_map_column", map_column)
        writer.close()
        return map_column(*args)

    monkeypatch.setattr(memmap, "_map_column", at_that_moment)
    with open_storage(path) as reader:
        assert stored(reader) == list(range(10))


def test_files_that_always_become_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path) as writer:
        writer.extend(rows(0, 10))

    def shorter(*args: Any) -> np.ndarray:
        raise ValueError("mmap length is greater than file size")

    monkeypatch.setattr(memmap, "_map_column", shorter)
    with pytest.raises(CorruptStorage, match="another program made the files of"):
        open_storage(path)


@pytest.mark.parametrize("name", ["memmap", "hdf5", "zarr"])
def test_readers_open_while_a_writer_opens_grows_and_closes(name: str, tmp_path: Path) -> None:
    """A child process writes for a second or two, while the test reads its rows."""
    kind, _ = KINDS[name]
    path = tmp_path / "rows.h5"
    with kind(path, capacity=2000) as storage:
        storage.extend(rows(0, 5))

    def write() -> int:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            with kind(path, mode="append") as storage:
                if name == "hdf5" and storage.head < 500:
                    storage.reserve(2000)
                elif name != "hdf5":
                    storage.reserve(storage.head + 1000)
                storage.extend(rows(storage.head, 5))
                if name == "hdf5":
                    storage.finalize()
        return 0

    child = threading.Thread(target=in_a_child, args=(write,))
    child.start()
    seen = looks = 0
    while child.is_alive():
        with open_storage(path) as reader:
            head = len(reader)
            assert head >= seen
            seen, looks = head, looks + 1
            found = reader.get(np.arange(max(0, head - 5), head))["x"]
            assert found.tolist() == list(range(max(0, head - 5), head))
    child.join()
    assert looks > 3
    assert verify(path).sound


# --- permissions ----------------------------------------------------------------------------------


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Directory that other users may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="tallyroll-") as place:
        os.chmod(place, 0o755)
        yield Path(place)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
@pytest.mark.parametrize("name", ["rows", "rows.h5", "rows.zarr"])
def test_files_that_may_not_be_read(name: str, mode: int, open_place: Path) -> None:
    """The unreadable object is the storage, its parent directory, or each of its files in turn."""
    path = open_place / "above" / name
    path.parent.mkdir(mode=0o755)
    collect(path)
    everything = [path.parent, path, *sorted(path.rglob("*"))]
    everything += [each for each in path.parent.iterdir() if each != path]
    for each in everything:
        os.chmod(each, 0o755 if each.is_dir() else 0o644)

    def uses() -> list[str]:
        ways = (read, look, inspect, append, resume, finalize)
        return [wrong for way in ways if (wrong := told_or_done(way, path))]

    def refused() -> None:
        with pytest.raises(StorageError, match=r"[Pp]ermission denied"):
            open_storage(path)

    # Root can read every file.
    user = 0 if os.getuid() else 65534
    files = everything[2:]
    random.Random(f"{name} {mode}").shuffle(files)
    for each in [*everything[:2], *(files if MORE > 1 else files[:2])]:
        before = each.stat().st_mode
        os.chmod(each, mode)
        try:
            assert in_a_child(uses, user=user) == []
            if each in everything[:2] and mode == 0:
                in_a_child(refused, user=user)
        finally:
            os.chmod(each, before)
    assert verify(path).sound


# --- missing files --------------------------------------------------------------------------------


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        for each in path.parent.glob(path.name + "*"):
            each.unlink()


def move(path: Path) -> None:
    away = path.parent / "away"
    away.mkdir()
    for each in list(path.parent.glob(path.name + "*")):
        each.rename(away / each.name)


@each_pair(
    durability=["process", "power"], name=["rows", "rows.h5", "rows.zarr"], happens=[delete, move]
)
def test_a_storage_that_goes_while_it_is_open(
    name: str, happens: Callable[[Path], None], durability: Any, tmp_path: Path
) -> None:
    path = tmp_path / "place" / name
    path.parent.mkdir()
    kind = HOSTILE[name]
    writer = kind(path, capacity=60, durability=durability)
    writer.extend(rows(0, 10))
    reader = open_storage(path)
    happens(path)
    until = time.monotonic() + 5

    def write_on() -> None:
        while time.monotonic() < until:  # the writer checks from time to time
            if writer.head < 30:
                writer.extend(rows(writer.head, 1))
            writer.flush()

    with pytest.raises(StorageError, match=r"was deleted|was removed"):
        write_on()
    time.sleep(2 * LOOK_SECONDS)
    for use in (extend, reserve_more, another_run, finish):
        with pytest.raises(StorageError):
            use(writer)
    with contextlib.suppress(StorageError):
        writer.flush()
    writer.close()
    with contextlib.suppress(StorageError):
        assert stored(reader)[:10] == list(range(10))
    for act in (lambda: reader.manifest, lambda: len(reader.trajectories), lambda: verify(path)):
        with contextlib.suppress(StorageError):
            act()
    reader.close()
    with pytest.raises(StorageError):
        open_storage(path)
    if happens is move:
        with open_storage(tmp_path / "place" / "away" / name) as storage:
            assert stored(storage)[:10] == list(range(10))


@pytest.mark.parametrize("happens", [delete, move])
@pytest.mark.parametrize("name", ["rows", "rows.h5", "rows.zarr"])
def test_a_storage_that_goes_while_a_collector_writes_to_it(
    name: str, happens: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "place" / name
    path.parent.mkdir()
    frames = itertools.count()
    collector = SyncCollector(
        "CartPole-v1", num_envs=2, frames_per_batch=10, total_frames=100_000, seed=0, storage=path
    )

    def run() -> None:
        with collector:
            for _ in collector:
                if next(frames) == 5:
                    happens(path)

    with pytest.raises((StorageError, CollectorError), match=r"was deleted|was removed"):
        run()


@pytest.mark.parametrize("happens", [delete, move])
@pytest.mark.parametrize("name", ["rows", "rows.h5", "rows.zarr"])
def test_a_storage_that_goes_while_the_command_collects(
    name: str, happens: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "place" / name
    path.parent.mkdir()
    watched = threading.Event()

    def watch() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not watched.is_set():
            if HOSTILE[name]._format_class(path).exists():
                with contextlib.suppress(StorageError), open_storage(path) as storage:
                    if len(storage) > 50:
                        happens(path)
                        return
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    command = ["collect", "CartPole-v1", "--frames", "300000", "--out", str(path), "--quiet"]
    try:
        status = main(command)
    finally:
        watched.set()
        thread.join()
    told = capsys.readouterr().err
    assert status == 1, told
    assert "Traceback" not in told
    assert told.count("\n") == 1, told
    assert "was deleted" in told or "was removed" in told


@pytest.mark.parametrize("name", KINDS)
def test_the_command_line_says_it_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` exits with 1.

    `verify` exits with 2 if it could not check a storage, and with 1 if the storage is unsound.
    """
    kind, options = KINDS[name]
    disk = FailingDisk(monkeypatch)
    with kind(tmp_path / "rows.h5", **options) as storage:
        storage.extend(rows(0, 10))
    for command, wanted in (("inspect", (1,)), ("verify", (1, 2))):
        with disk.failing(range(0)):
            assert main([command, str(tmp_path / "rows.h5")]) == 0
        capsys.readouterr()
        before = descriptors()
        for at in sites(disk.made, f"{name} {command}")[: 2 * TRIALS * MORE]:
            with disk.failing(range(at, 10**9)):
                status = main([command, str(tmp_path / "rows.h5")])
            told = capsys.readouterr().err
            assert status in (0, *wanted), (at, told)
            assert "Traceback" not in told, told
            assert told.count("\n") == (status == 2 or (command == "inspect" and status)), told
            assert not opened_since(before), (at, disk.made[at])
