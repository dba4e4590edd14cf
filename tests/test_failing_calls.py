"""One system call fails while a storage is made or opened: each in turn, in every format."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tallyroll.storage import H5Storage, MemmapStorage, Schema, ZarrStorage
from tallyroll.storage.base import DiskStorage
from tallyroll.storage.errors import StorageError

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
REFUSED = (StorageError, OSError)
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE)


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Failing:
    """Counts system calls, and lets one fail, by its number among them; -1: none."""

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
    """Within it one of the calls of `CALLS`, or of a map, fails."""
    found = Failing(number, code)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, found.instead_of(name, getattr(os, name)))
        patch.setattr(mmap, "mmap", found.instead_of("mmap", mmap.mmap))
        yield found


def descriptors() -> set[str]:
    """Files that this process has open, with what they are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:  # that of the listing
            continue
    return found


def create(case: str, path: Path) -> DiskStorage:
    """A new storage without rows. More is synced where it is to survive a power cut."""
    kind, options = KINDS[case]
    storage = kind(path, durability="power", **options)
    storage.initialise(Schema.of(rows(0, 1)))
    return storage


def tried(case: str, number: int, code: int, act: Callable[[], DiskStorage]) -> tuple[Any, str]:
    """The storage that ``act`` opened, or None, and the error's text, without the error itself."""
    try:
        with failing(number, code):
            return act(), ""
    except REFUSED as error:
        return None, f"{type(error).__name__}: {error}"


def test_a_creation_in_which_a_call_fails_leaves_nothing(case: str, tmp_path: Path) -> None:
    """Or the call was of no account, and all is well."""
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
            # But for the lock file: until it is held nothing is ours to be removed.
            left = [f for f in path.parent.rglob("*") if f.is_file() and "lock" not in f.name]
            assert not left, f"{what}: {left}"
            storage = create(case, path)
        with storage:
            storage.extend(rows(0, 5))
            assert_rows(storage, 5)
        assert descriptors() <= before, what
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
