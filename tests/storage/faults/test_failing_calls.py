"""Test one failing system call while a storage is created or opened: each call, every format."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tallyroll.storage import (
    CorruptStorage,
    H5Storage,
    MemmapStorage,
    Schema,
    StorageError,
    StorageFull,
    ZarrStorage,
)
from tallyroll.storage.engine import columns as private_rows
from tallyroll.storage.errors import DiskFailed, NotWritable, TooManyFiles, UnsupportedPlatform
from tallyroll.storage.files.mapping import Region
from tallyroll.storage.files.paths import failed
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats import memmap
from tallyroll.storage.formats.hdf5 import format as hdf5
from tallyroll.storage.formats.hdf5 import format as hdf5_replace
from tallyroll.storage.formats.hdf5.datasets import FilePlaces
from tallyroll.storage.storages import DiskStorage

from open_files import descriptors
from storage_contract import assert_rows, files_of, rows

CALLS = (
    "open", "mkdir", "listdir", "posix_fallocate", "ftruncate", "pread", "pwrite",
    "fsync", "fdatasync", "replace", "unlink",
)  # fmt: skip
KINDS: dict[str, tuple[type[DiskStorage], dict[str, Any]]] = {
    "memmap": (MemmapStorage, {}),
    "hdf5": (H5Storage, {"capacity": 5}),
    "zarr": (ZarrStorage, {}),
}
REFUSED = StorageError
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE)


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Failing:
    """Counts system calls, and makes the call of one number fail. No call fails for -1."""

    def __init__(self, number: int, code: int) -> None:
        self._number, self._code = number, code
        self.calls: list[str] = []

    def instead_of(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) - 1 == self._number:
                raise OSError(self._code, os.strerror(self._code))
            return real(*args, **options)

        return call


@contextmanager
def failing(number: int = -1, code: int = 0) -> Iterator[Failing]:
    """Let one of the calls of `CALLS`, or a map, fail within the context."""
    found = Failing(number, code)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, found.instead_of(name, getattr(os, name)))
        patch.setattr(mmap, "mmap", found.instead_of("mmap", mmap.mmap))
        yield found


def create(case: str, path: Path) -> DiskStorage:
    """Create a storage without rows. With power durability, it syncs more files."""
    kind, options = KINDS[case]
    storage = kind(path, durability="power", **options)
    storage.initialise(Schema.of(rows(0, 1)))
    return storage


def tried(case: str, number: int, code: int, act: Callable[[], DiskStorage]) -> tuple[Any, str]:
    """Return the storage that ``act`` opened, or None, with the text of the error."""
    try:
        with failing(number, code):
            return act(), ""
    except REFUSED as error:
        return None, f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_a_creation_in_which_a_call_fails_leaves_nothing(case: str, tmp_path: Path) -> None:
    """Alternatively, the failed call did not matter, and the storage is sound."""
    with failing() as seen, create(case, tmp_path / "rows"):
        number_of_calls = len(seen.calls)
    refused = 0
    for number, name in enumerate(seen.calls[:number_of_calls]):
        code = ERRORS[number % len(ERRORS)]
        path, before = tmp_path / str(number) / "rows", descriptors()
        path.parent.mkdir()
        storage, said = tried(case, number, code, partial(create, case, path))
        what = f"call {number}, {name}, {errno.errorcode[code]}: {said}"
        if storage is None:
            refused += 1
            assert descriptors() <= before, what
            # The lock file is an exception. Before it is held, no file may be removed.
            left = [f for f in path.parent.rglob("*") if f.is_file() and "lock" not in f.name]
            assert not left, f"{what}: {left}"
            storage = create(case, path)
        with storage:
            storage.extend(rows(0, 5))
            assert_rows(storage, 5)
        assert descriptors() <= before, what
        shutil.rmtree(path.parent)  # all of them took a gigabyte
    assert refused > number_of_calls // 3


@pytest.mark.parametrize("mode", ["append", "read"])
def test_an_opening_in_which_a_call_fails_changes_nothing(
    case: str, tmp_path: Path, mode: Any
) -> None:
    path, kind = tmp_path / "rows", KINDS[case][0]
    with create(case, path) as storage:
        storage.extend(rows(0, 3))
    with failing() as seen, kind(path, mode=mode):
        number_of_calls = len(seen.calls)
    refused = 0
    for number, name in enumerate(seen.calls[:number_of_calls]):
        code = ERRORS[number % len(ERRORS)]
        before, files = descriptors(), files_of(path)
        storage, said = tried(case, number, code, partial(kind, path, mode=mode))
        what = f"call {number}, {name}, {errno.errorcode[code]}: {said}"
        if storage is None:
            refused += 1
            assert descriptors() <= before, what
            assert files_of(path) == files, what
            storage = kind(path, mode=mode)
        with storage:
            assert_rows(storage, 3)
        assert descriptors() <= before, what
    assert refused > number_of_calls // 3


def opened(mode: Any) -> Callable[[str, Path], None]:
    """Open a storage of three rows in a mode."""
    return lambda case, path: KINDS[case][0](path, mode=mode).close()


def add_a_run(case: str, path: Path) -> None:
    with KINDS[case][0](path, mode="append") as storage, now_failing():
        storage.initialise(storage.schema, {"second": True})


def flush(case: str, path: Path) -> None:
    with KINDS[case][0](path, mode="append") as storage, now_failing():
        storage.flush()


def map_views(case: str, path: Path) -> None:
    with (
        KINDS[case][0](path, mode="read") as storage,
        pytest.MonkeyPatch.context() as patch,
        now_failing(),
    ):
        patch.setattr(private_rows, "_COPIED_NBYTES", 0)
        storage.get(slice(None))


ARMED = [False]
"""Whether calls fail yet. Other code needs some calls first."""


@contextmanager
def now_failing() -> Iterator[None]:
    ARMED[0] = True
    try:
        yield
    finally:
        ARMED[0] = False


def from_now_on(act: Callable[[str, Path], None]) -> Callable[[str, Path], None]:
    def armed(case: str, path: Path) -> None:
        with now_failing():
            act(case, path)

    return armed


def made(case: str, path: Path) -> None:
    create(case, path.with_name("new")).close()


MADE, READ, APPENDED = from_now_on(made), from_now_on(opened("read")), from_now_on(opened("append"))
FAULTS: list[tuple[str, Callable[[str, Path], None], tuple[object, str], int, type[Exception]]] = [
    ("memmap", MADE, (Inside, "make_directory"), errno.ENOSPC, StorageFull),
    ("memmap", MADE, (Inside, "make"), errno.EACCES, NotWritable),
    ("memmap", MADE, (Inside, "write_atomically"), errno.EIO, DiskFailed),
    ("memmap", READ, (memmap, "_map_column"), errno.ENOMEM, UnsupportedPlatform),
    ("memmap", APPENDED, (memmap, "_map_column"), errno.EIO, DiskFailed),
    ("memmap", map_views, (mmap, "mmap"), errno.ENOMEM, UnsupportedPlatform),
    ("memmap", add_a_run, (Inside, "write_atomically"), errno.ENOSPC, StorageFull),
    ("memmap", flush, (Inside, "write_atomically"), errno.EDQUOT, StorageFull),
    ("zarr", MADE, (Inside, "make_directory"), errno.EROFS, NotWritable),
    ("zarr", MADE, (Inside, "write_atomically"), errno.ENOSPC, StorageFull),
    ("zarr", MADE, (Inside, "make"), errno.EIO, DiskFailed),
    ("zarr", READ, (Region, "add"), errno.ENOMEM, UnsupportedPlatform),
    ("zarr", APPENDED, (Region, "add"), errno.EMFILE, TooManyFiles),
    ("zarr", map_views, (Region, "add"), errno.ENOMEM, UnsupportedPlatform),
    ("zarr", add_a_run, (Inside, "write_atomically"), errno.ENOSPC, StorageFull),
    ("zarr", flush, (Inside, "write_atomically"), errno.EIO, DiskFailed),
    ("hdf5", MADE, (Inside, "make"), errno.EACCES, NotWritable),
    ("hdf5", MADE, (hdf5_replace, "make_file"), errno.EIO, DiskFailed),
    ("hdf5", READ, (hdf5, "open_file"), errno.EMFILE, TooManyFiles),
    ("hdf5", APPENDED, (hdf5, "open_file"), errno.ELOOP, CorruptStorage),
    ("hdf5", READ, (hdf5.H5Format, "_mapped"), errno.ENOMEM, UnsupportedPlatform),
    ("hdf5", map_views, (mmap, "mmap"), errno.ENOMEM, UnsupportedPlatform),
    ("hdf5", add_a_run, (hdf5, "put_manifest"), errno.ENOSPC, StorageFull),
    ("hdf5", flush, (FilePlaces, "show_rows"), errno.EIO, DiskFailed),
]


@pytest.mark.parametrize(("case", "act", "call", "code", "error"), FAULTS)
def test_a_storage_that_cannot_be_made_opened_or_shown_is_an_error(
    tmp_path: Path,
    case: str,
    act: Callable[[str, Path], None],
    call: tuple[Any, str],
    code: int,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is Tallyroll's and names the path, and the rows are still there."""
    path = tmp_path / "rows"
    with create(case, path) as storage:
        storage.extend(rows(0, 3))
    owner, name = call
    real = getattr(owner, name)

    def fails(*args: Any, **options: Any) -> Any:
        if ARMED[0]:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(error, match=f"{tmp_path}.*") as caught:
            act(case, path)
    assert isinstance(caught.value.__cause__, OSError)
    assert os.strerror(code) in str(caught.value)
    with KINDS[case][0](path, mode="append") as storage:
        storage.extend(rows(3, 2))
        assert_rows(storage, 5)
    create(case, tmp_path / "new").close()


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_every_error_of_the_system_is_one_of_ours(tmp_path: Path, code: int) -> None:
    found = failed(tmp_path / "rows", OSError(code, os.strerror(code)), 7)
    assert isinstance(found, StorageError)
    assert str(tmp_path) in str(found)
    assert os.strerror(code) in str(found) or code in (errno.ENOENT, errno.ESTALE)
    kinds = {
        errno.ENOSPC: StorageFull, errno.EDQUOT: StorageFull, errno.EFBIG: StorageFull,
        errno.ENOMEM: UnsupportedPlatform, errno.EOPNOTSUPP: UnsupportedPlatform,
        errno.ELOOP: CorruptStorage, errno.EISDIR: CorruptStorage,
        errno.ENAMETOOLONG: NotWritable, errno.EROFS: NotWritable, errno.EPERM: NotWritable,
        errno.ENOENT: DiskFailed, errno.ESTALE: DiskFailed, errno.EIO: DiskFailed,
    }  # fmt: skip
    assert isinstance(found, kinds.get(code, StorageError))
