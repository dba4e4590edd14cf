"""The superblock of an HDF5 file: whether a writer has closed it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"
_FIRST: Final = 512
_OPEN: Final = 0b101
"""Flags of a writer, and of one that writes while others read."""


@dataclass(frozen=True)
class Superblock:
    """The place of the superblock, and what it says of writers."""

    at: int
    version: int
    flags: int

    @property
    def open(self) -> bool:
        """Return whether a writer has the file open, or was killed before it closed it."""
        return bool(self.flags & _OPEN)


def superblock_of(file: Any) -> Superblock | None:
    """Return the superblock of an open file; None if there is none."""
    file.seek(0, 2)
    size, at = file.tell(), 0
    while at + 12 <= size:
        file.seek(at)
        head = file.read(12)
        if head[:8] == _SIGNATURE:
            # Versions 0 and 1 say nothing of writers.
            return Superblock(at, head[8], head[11] if head[8] >= 2 else 0)
        at = max(_FIRST, 2 * at)
    return None


def end_said(file: Any) -> int | None:
    """Return the end of the file that the superblock of an open file names; None without one."""
    block = superblock_of(file)
    if block is None:
        return None
    at = {0: 40, 1: 44}.get(block.version, 28)
    file.seek(block.at + (9 if block.version >= 2 else 13))
    width = file.read(1)
    if width != b"\x08":
        return None  # addresses of another width, which no writer of today makes
    file.seek(block.at + at)
    end = int.from_bytes(file.read(8), "little")
    return block.at + end if end < 2**62 else None
