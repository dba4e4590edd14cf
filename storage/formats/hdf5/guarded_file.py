"""Files for HDF5 whose write errors are hidden from HDF5 and raised afterwards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tallyroll.storage.files.safe_files import closing, open_any, write_all
from tallyroll.storage.formats.optional_libraries import needed


class GuardedFile:
    """File object for h5py in which every write appears to succeed.

    When the disk is full or fails, HDF5 raises errors of any kind, and it terminates the process
    when it closes a file that it cannot write. This object therefore stores the first error for
    `check`. All later writes go to memory, from which HDF5 reads back its own metadata until it
    closes the file.

    Args:
        file: a descriptor that is open for reading and writing. The caller closes it.
    """

    def __init__(self, file: int) -> None:
        self._file, self._at = file, 0
        self._error: BaseException | None = None
        self._end = 0
        """The size of the file from HDF5's point of view, which is used after an error."""
        self._later: list[tuple[int, bytes]] = []
        """The writes after the error, in order."""

    def check(self) -> None:
        """Raise the error of the first write that failed, if any."""
        if self._error is not None:
            raise self._error

    def seek(self, at: int, whence: int = 0) -> int:
        """Move to a position and return it, in bytes from the start."""
        base = self._size() if whence == os.SEEK_END else self._at if whence else 0
        self._at = base + at
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def read(self, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes, or fewer at the end of the file."""
        content = bytearray(min(nbytes, max(0, self._size() - self._at)))
        return bytes(content[: self.readinto(content)])

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, with zeros where nothing was written, and return its length."""
        view = memoryview(buffer).cast("B")
        content = os.pread(self._file, len(view), self._at)
        view[:] = content.ljust(len(view), b"\0")
        for start, later in self._later:
            first, stop = max(start, self._at), min(start + len(later), self._at + len(view))
            if first < stop:
                view[first - self._at : stop - self._at] = later[first - start : stop - start]
        self._at += len(view)
        return len(view)

    def write(self, content: Any) -> int:
        """Write all bytes at the position and return their number."""
        view = memoryview(content).cast("B")
        if self._error is None:
            try:
                write_all(self._file, view, self._at)
            except BaseException as error:  # noqa: BLE001  `check` raises it
                self._fail(error)
        if self._error is not None:
            self._later.append((self._at, bytes(view)))
            self._end = max(self._end, self._at + len(view))
        self._at += len(view)
        return len(view)

    def truncate(self, size: int) -> int:
        """Set the size and return it."""
        if self._error is None:
            try:
                os.ftruncate(self._file, size)
            except BaseException as error:  # noqa: BLE001  `check` raises it
                self._fail(error)
        self._end = size
        return size

    def flush(self) -> None:
        """Do nothing, because writes are not buffered."""

    def _fail(self, error: BaseException) -> None:
        self._error, self._end = error, os.fstat(self._file).st_size

    def _size(self) -> int:
        return os.fstat(self._file).st_size if self._error is None else self._end


@contextlib.contextmanager
def guarded_hdf5(file: int, mode: str, **options: Any) -> Iterator[tuple[Any, GuardedFile]]:
    """Yield an h5py file over a descriptor, and the guard whose `check` raises a write error.

    Callers that write much should call `check` regularly. The end of the context also calls it.

    Raises:
        MissingLibrary: h5py is not installed.
        OSError: a write failed.
    """
    h5py = needed("h5py", "hdf5", "HDF5 storages need")
    guard = GuardedFile(file)
    try:
        with h5py.File(guard, mode, **options) as opened:
            yield opened, guard
    finally:
        guard.check()


@contextlib.contextmanager
def new_hdf5(path: Path, **options: Any) -> Iterator[tuple[Any, GuardedFile]]:
    """Yield a new HDF5 file at a free path, as `guarded_hdf5` does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with (
        closing(open_any(path, flags)) as file,
        guarded_hdf5(file, "w", **options) as opened,
    ):
        yield opened
