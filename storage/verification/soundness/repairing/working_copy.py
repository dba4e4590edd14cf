"""A copy of a damaged storage to work on, and the blocks of its files that a disk cannot read."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tallyroll.storage.files.safe_files import Inside

_BLOCK: Final = 2**12
"""Bytes that a disk reads, or cannot read, at once."""
_STEP: Final = 2**20

Ranges = list[tuple[int, int]]
"""Ranges of bytes, each by its first one and one more than its last."""


def read_at(file: int, nbytes: int, at: int) -> bytes:
    """Return bytes of a file; raise the system's error where the disk cannot read them."""
    return os.pread(file, nbytes, at)


def unreadable_in(place: Path) -> dict[Path, Ranges]:
    """Return the ranges of files that cannot be read, by their paths below ``place``; read all.

    What is mapped into memory would end the process there. Links are passed over.
    """
    found = dict[Path, Ranges]()
    for path in _files_of(place):
        if ranges := _unreadable(_opened(place, path)):
            found[path] = ranges
    return found


def _files_of(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        yield Path(place.name)
        return
    for above, _, files in os.walk(place):
        for each in files:
            if not os.path.islink(path := os.path.join(above, each)):
                yield Path(path).relative_to(place)


def _opened(place: Path, path: Path) -> int:
    root = place if place.is_dir() else place.parent
    return Inside(root).open(root / path, os.O_RDONLY)


def _unreadable(file: int) -> Ranges:
    found = Ranges()
    try:
        size = os.fstat(file).st_size
        for start in range(0, size, _STEP):
            stop = min(start + _STEP, size)
            if _fails(file, start, stop):
                for at in range(start, stop, _BLOCK):
                    end = min(at + _BLOCK, stop)
                    if not _fails(file, at, end):
                        continue
                    if found and found[-1][1] == at:
                        at = found.pop()[0]
                    found.append((at, end))
    finally:
        os.close(file)
    return found


def _fails(file: int, start: int, stop: int) -> bool:
    try:
        read_at(file, stop - start, start)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return True
    return False


def working_copy(
    place: Path,
    target: Path,
    unreadable: Mapping[Path, Ranges],
    *,
    filled: bytes = b"\0",
    lengths: Mapping[Path, int] | None = None,
) -> None:
    """Make ``target`` have the files of ``place``; those that stay alike are links to their bytes.

    Args:
        place: a folder, or a file.
        target: where nothing is.
        unreadable: ranges of files that get the byte ``filled``.
        filled: one byte.
        lengths: bytes that files are to have, with zeros at their ends.

    Raises:
        OSError: the disk is full.
    """
    lengths = lengths or {}
    for path in _files_of(place):
        copy = target / path if place.is_dir() else target
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open(_opened(place, path), "rb", buffering=0) as source:
            size = os.fstat(source.fileno()).st_size
            alike = path not in unreadable and lengths.get(path, 0) <= size
            if alike and _linked(place / path if place.is_dir() else place, copy):
                continue
            with copy.open("xb") as out:
                at = 0
                for start, stop in (*unreadable.get(path, []), (size, size)):
                    for begin in range(at, start, _STEP):
                        out.write(read_at(source.fileno(), min(_STEP, start - begin), begin))
                    out.write(filled * (stop - start))
                    at = stop
                out.truncate(max(size, lengths.get(path, 0)))
            shutil.copystat(place / path if place.is_dir() else place, copy)


def _linked(source: Path, copy: Path) -> bool:
    """Give a file another name; return False where the file system cannot."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True
