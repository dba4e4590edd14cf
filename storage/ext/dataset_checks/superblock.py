"""Read the superblock of an HDF5 file, which records whether a writer closed the file. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"
_FIRST: Final = 512
_OPEN: Final = 0b101
"""The flags for an open writer and for a writer in SWMR mode."""


@dataclass(frozen=True)
class Superblock:
    """The offset, version and flags of a superblock."""

    at: int
    version: int
    flags: int

    @property
    def open(self) -> bool:
        """True if a writer has the file open, or was killed before it closed the file."""
        return bool(self.flags & _OPEN)


def superblock_of(file: Any) -> Superblock | None:
    """Return the superblock of an open file, or None if there is none."""
    file.seek(0, 2)
    size, at = file.tell(), 0
    while at + 12 <= size:
        file.seek(at)
        head = file.read(12)
        if head[:8] == _SIGNATURE:
            # Versions 0 and 1 have no flags for writers.
            return Superblock(at, head[8], head[11] if head[8] >= 2 else 0)
        at = max(_FIRST, 2 * at)
    return None


def declared_end(file: Any) -> int | None:
    """Return the end of an open file according to its superblock, or None if unknown."""
    block = superblock_of(file)
    if block is None:
        return None
    at = {0: 40, 1: 44}.get(block.version, 28)
    file.seek(block.at + (9 if block.version >= 2 else 13))
    width = file.read(1)
    if width != b"\x08":
        return None  # addresses of another width, which current writers do not use
    file.seek(block.at + at)
    end = int.from_bytes(file.read(8), "little")
    return block.at + end if end < 2**62 else None
