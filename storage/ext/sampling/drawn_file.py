"""The file by which processes count what they drew from a storage, and what they wrote to it.

It lies beside the rows and can be lost without losing any. It is one block of a fixed size: a
line that names it and its version, the ``id`` of the storage, four counts, and a CRC-32 of all
that. Who changes it holds its lock.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tallyroll.storage.files.paths import translated
from tallyroll.storage.files.safe_files import Inside

_NAME: Final = b"tallyroll drawn "
_BLOCK: Final = struct.Struct("<32s64s4QI")
_MAGIC: Final = _NAME + b"1\n"
MOST: Final = 2**53
"""More rows than are ever drawn or written: sums of a few such counts have a word."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts since the file was made."""

    first_row: int = 0
    """The row from which rows are counted."""
    drawn: int = 0
    """Rows drawn."""
    most_drawn: int = 0
    """The most that were asked for at once."""
    most_written: int = 0
    """The most that were to be written at once."""


def _packed(owner: str, counts: Counts) -> bytes:
    told = (counts.first_row, counts.drawn, counts.most_drawn, counts.most_written)
    block = _BLOCK.pack(_MAGIC, owner.encode(), *told, 0)
    return block[:-4] + zlib.crc32(block[:-4]).to_bytes(4, "little")


def _unpacked(block: bytes, owner: str) -> Counts:
    """Return what a block says; raise ValueError if it is none of this owner."""
    if len(block) != _BLOCK.size:
        raise ValueError(f"it has {len(block)} bytes, and not {_BLOCK.size}")
    name, whose, *told, check = _BLOCK.unpack(block)
    if name.rstrip(b"\0") != _MAGIC:
        raise ValueError("it is of another version, or another file")
    if zlib.crc32(block[:-4]) != check:
        raise ValueError("its checksum does not fit")
    if whose.rstrip(b"\0") != owner.encode():
        raise ValueError("it is of another storage")
    if max(told) >= MOST:
        raise ValueError("its counts cannot be")
    return Counts(*told)


class DrawnFile:
    """The file, opened when it is first changed, and made if it is not there.

    Args:
        inside: the directory of the file.
        path: the file.
        owner: the id of the storage.
        first_row: the row from which this process counts rows. The file keeps the first of all.
    """

    def __init__(self, inside: Inside, path: Path, owner: str, first_row: int) -> None:
        self.path = path
        self._inside, self._owner, self._first_row = inside, owner, first_row
        self._turn = threading.Lock()
        self._file = self._process = -1

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._turn:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def change(self, change: Callable[[Counts], Counts]) -> tuple[Counts, str | None] | None:
        """Replace the counts by what ``change`` makes of them.

        Returns:
            None if another thread or process is changing them just now: ask again. Otherwise the
            new counts, and why the counts begin again, None unless the file could not be used.

        Raises:
            NotWritable, StorageFull: it cannot be written.
        """
        if self._process not in (-1, os.getpid()):  # a thread of the parent may hold it
            self._turn = threading.Lock()
        if not self._turn.acquire(blocking=False):
            return None
        try:
            with translated(self.path, _BLOCK.size):
                return self._change(change)
        finally:
            self._turn.release()

    def _change(self, change: Callable[[Counts], Counts]) -> tuple[Counts, str | None] | None:
        if self._file < 0 or self._process != os.getpid():  # a forked child would share the lock
            self._open()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        try:
            if not os.fstat(self._file).st_nlink:  # removed: another one is made
                os.close(self._file)
                self._file = -1
                return None
            block, why = os.pread(self._file, _BLOCK.size + 1, 0), None
            try:
                was = _unpacked(block, self._owner) if block else Counts(self._first_row)
            except ValueError as error:
                was, why = Counts(self._first_row), str(error)
            was = replace(was, first_row=min(was.first_row, self._first_row))
            now = change(was)
            packed = _packed(self._owner, now)
            if packed != block:
                os.pwrite(self._file, packed, 0)
                os.ftruncate(self._file, len(packed))
            return now, why
        finally:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _open(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = self._inside.open(self.path, os.O_RDWR | os.O_CREAT)
        self._process = os.getpid()
