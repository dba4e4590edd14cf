"""Read files on a disk with unreadable blocks, and locate the lost bytes."""
# ruff: noqa: D102 - `io.RawIOBase` documents these methods

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.files.safe_files import Inside, data_ranges

BLOCK: Final = 2**12
"""The number of bytes in the smallest unit that a disk reads, or fails to read."""
_STEP: Final = 2**20

Ranges = list[tuple[int, int]]
"""Byte ranges. Each is the offset of its first byte and the offset after its last byte."""


def read_at(file: int, nbytes: int, at: int) -> bytes:
    """Read bytes of a file. Raises OSError if the disk cannot read them."""
    return os.pread(file, nbytes, at)


def unread(error: OSError) -> bool:
    """Return True if an error means that the disk cannot read a block."""
    return error.errno == errno.EIO


def unreadable_in(place: Path) -> dict[Path, Ranges]:
    """Read all files and return the unreadable byte ranges, by path below ``place``.

    The ranges are found in advance, because accessing an unreadable block through a memory map
    kills the process. Links are skipped.
    """
    found = dict[Path, Ranges]()
    for path in files_of(place):
        if ranges := _unreadable(opened_in(place, path)):
            found[path] = ranges
    return found


def _unreadable(file: int) -> Ranges:
    found = Ranges()
    try:
        for begin, stop in data_ranges(file):
            for start in range(begin, stop, _STEP):
                _read(file, min(_STEP, stop - start), start, partial(_join, found))
    finally:
        os.close(file)
    return found


def files_of(place: Path) -> Iterator[Path]:
    """Yield the relative paths of the files below a folder, except links.

    If ``place`` is a file, yield its name.
    """
    if not place.is_dir():
        yield Path(place.name)
        return
    for above, _, files in os.walk(place):
        for each in files:
            if not os.path.islink(path := os.path.join(above, each)):
                yield Path(path).relative_to(place)


def opened_in(place: Path, path: Path) -> int:
    """Open a file that `files_of` yields, and return its descriptor."""
    root = place if place.is_dir() else place.parent
    return Inside(root).open(root / path, os.O_RDONLY)


def _join(ranges: Ranges, start: int, stop: int) -> None:
    if ranges and ranges[-1][1] == start:
        start = ranges.pop()[0]
    ranges.append((start, stop))


def touches(ranges: Ranges, start: int, stop: int) -> bool:
    """Return True if any byte from ``start`` up to ``stop`` is in one of the ranges."""
    return any(begin < stop and start < end for begin, end in ranges)


def require_readable(ranges: Ranges, start: int, stop: int) -> None:
    """Raise EIO if any byte from ``start`` up to ``stop`` is in the unreadable ``ranges``."""
    if touches(ranges, start, stop):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _read(file: int, nbytes: int, at: int, bad: Callable[[int, int], object]) -> bytes:
    """Read bytes of a file, with zeros in place of unreadable blocks."""
    try:
        return read_at(file, nbytes, at)
    except OSError as error:
        if not unread(error):
            raise
    if at // BLOCK == (at + nbytes - 1) // BLOCK:
        bad(at, at + nbytes)
        return bytes(nbytes)
    parts = []
    while nbytes:
        part = min(nbytes, BLOCK - at % BLOCK)
        parts.append(_read(file, part, at, bad))
        at, nbytes = at + part, nbytes - part
    return b"".join(parts)


class ReadOnlyFile(io.RawIOBase):
    """Base class of files that are read by offset; subclasses define `_content`.

    Args:
        size: the size of the file in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = 0) -> int:
        at += {0: 0, 1: self._at, 2: self._size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = max(0, min(len(view), self._size - self._at))
        content = self._content(nbytes, self._at) if nbytes else b""
        view[: len(content)] = content
        self._at += len(content)
        return len(content)

    def _content(self, nbytes: int, at: int) -> bytes:
        raise NotImplementedError


class _Raw(ReadOnlyFile):
    """A file opened for reading. It owns its descriptor."""

    def __init__(self, file: int) -> None:
        super().__init__(os.fstat(file).st_size)
        self._file = file

    def fileno(self) -> int:
        return self._file

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


class _WithoutGaps(_Raw):
    def __init__(self, file: int, bad: Callable[[int, int], object]) -> None:
        super().__init__(file)
        self._bad = bad

    def _content(self, nbytes: int, at: int) -> bytes:
        return _read(self._file, nbytes, at, self._bad)


class WithGaps(_Raw):
    """A file with known unreadable ranges.

    A read stops at the start of such a range. A read that starts within a range raises EIO.
    """

    def __init__(self, file: int, gaps: Ranges) -> None:
        super().__init__(file)
        self.gaps = gaps

    def _content(self, nbytes: int, at: int) -> bytes:
        for start, stop in self.gaps:
            if at < stop and start < at + nbytes:
                if at >= start:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                nbytes = start - at
        return read_at(self._file, nbytes, at)


def filled(file: int, bad: Callable[[int, int], object]) -> io.BufferedReader:
    """Wrap a file so that unreadable bytes read as zeros. ``bad`` is called with their range."""
    return io.BufferedReader(_WithoutGaps(file, bad), 2**17)


def with_gaps(file: int, path: Path, unreadable: Mapping[Path, Ranges]) -> Any:
    """Return a file object. It is a `WithGaps` if ``unreadable`` has ranges for ``path``."""
    gaps = unreadable.get(path)
    return open(file, "rb") if gaps is None else WithGaps(file, gaps)
