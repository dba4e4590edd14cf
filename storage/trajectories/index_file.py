"""The file of the trajectory index alongside the rows, which readers map.

The file can be lost without losing rows. Its first line contains its name and version. Its second
line contains the length and the CRC-32 of the third line, both in hexadecimal. The third line is
JSON: the ``id`` of the storage, the slots of its ``ring``, the number of ``rows`` that the index
covers, the number of ``rewinds`` at that time, the numbers of ``blocks``, ``lanes`` and ``cells``,
and an entry of ``shelves`` for each shelf: the key of `ShelfState` and the lengths of its arrays.

The arrays of `BlockState` follow in their order, little-endian. The first array is aligned to 64
bytes, and each other array to 8 bytes. The file ends with a mark of 4 bytes and the CRC-32 of
everything before it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.files.mapping import Region, map_file
from tallyroll.storage.files.safe_files import Inside, closing
from tallyroll.storage.trajectories.blocks.growable import StoredArray
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks
from tallyroll.storage.trajectories.blocks.state import (
    BY_BLOCK,
    BY_CELL,
    BY_LANE,
    BlockState,
    ShelfState,
    empty_shelf,
)

_NAME: Final = b"tallyroll trajectories "
_VERSION: Final = 1
_MAGIC: Final = _NAME + b"%d\n" % _VERSION
_LENGTHS: Final = b"%08x %08x\n"
_BEGIN: Final = len(_MAGIC) + len(_LENGTHS % (0, 0))
_MOST_HEAD: Final = 2**20
_STEP, _HEAD_STEP = 8, 64
_MARK: Final = b"done"
_END: Final = len(_MARK) + 4
_INT64: Final = np.dtype("<i8")
_PIECE: Final = 2**24
_MOST_EACH: Final = 2**7
"""Upper bound of the length of a shelf's array, per row and cell."""
CHECKED: Final = 2**24
"""The size in bytes above which a file is mapped without the slow comparison of its checksum.
`verify` always compares the checksum."""


class UnusableIndex(Exception):
    """The file is damaged or belongs to other rows. The message states the reason."""


@dataclass(frozen=True, slots=True)
class IndexOwner:
    """Identity of the rows that an index describes."""

    id: str | None
    ring: int
    rewinds: int


def _padding(nbytes: int, step: int) -> bytes:
    return b"\0" * (-nbytes % step)


def write_index(
    inside: Inside, path: Path, owner: IndexOwner, state: BlockState, *, synced: bool
) -> None:
    """Write the file atomically: write a temporary file and rename it to ``path``.

    With ``synced``, ``path`` is complete even after a power cut. An index with very many shelves is
    not written.

    Raises:
        OSError: the system refuses the write; an older file stays.
    """
    shelves = [
        [list(shelf.key), [sum(map(len, parts)) for parts in shelf.arrays]]
        for shelf in state.shelves
    ]
    says = {
        "id": owner.id,
        "ring": owner.ring,
        "rows": state.rows,
        "rewinds": owner.rewinds,
        "blocks": state.by_block.shape[1],
        "lanes": state.by_lane.shape[1],
        "cells": len(state.by_cell[0]),
        "shelves": shelves,
    }
    line = json.dumps(says).encode() + b"\n"
    if _BEGIN + len(line) <= _MOST_HEAD:
        inside.write_atomically(path, _content(line, state), synced=synced)


def _content(line: bytes, state: BlockState) -> Iterator[Any]:
    """Yield the bytes of a file in pieces."""
    head = _MAGIC + _LENGTHS % (len(line), zlib.crc32(line)) + line
    head += _padding(len(head), _HEAD_STEP)
    told = zlib.crc32(head)
    yield head
    arrays = [(state.by_block,), (state.by_lane,), *((each,) for each in state.by_cell)]
    for parts in (*arrays, *(parts for shelf in state.shelves for parts in shelf.arrays)):
        nbytes = 0
        for part in parts:
            little = part.astype(part.dtype.newbyteorder("<"), copy=False)
            octets = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
            told, nbytes = zlib.crc32(octets.data, told), nbytes + len(octets)
            yield octets.data
        told = zlib.crc32(padding := _padding(nbytes, _STEP), told)
        yield padding
    yield _MARK + zlib.crc32(_MARK, told).to_bytes(4, "little")


def read_index(
    inside: Inside, path: Path, owner: IndexOwner, head: Callable[[], int], *, whole: bool = False
) -> SavedBlocks | None:
    """Map a file and return its blocks; return None if it is missing or predates a rewind.

    Args:
        inside: the directory of the file.
        path: the file.
        owner: the expected owner.
        head: returns the number of rows ever committed, which other processes may increase.
        whole: compare the checksum regardless of the size of the file.

    Raises:
        UnusableIndex: the file cannot be used.
    """
    try:
        file = inside.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableIndex(f"{path} cannot be read ({error.strerror}).") from error
    try:
        with closing(file):
            says, begin = _head(file)
            if says.rewinds != owner.rewinds and says.id == owner.id:
                return None
            if (says.id, says.ring) != (owner.id, owner.ring):
                raise ValueError("it belongs to another storage")
            if says.rows > (rows := head()):
                raise ValueError(f"it covers {says.rows} rows, but the storage has {rows}")
            says.require_possible()
            size = os.fstat(file).st_size
            if (needed := says.nbytes(begin)) != size:
                raise ValueError(f"it has {size} bytes, expected {needed}")
            region = map_file(file, size, "read")
        if whole or size <= CHECKED:
            _compare(region)
        return SavedBlocks(owner.ring, says.state(region, begin), path)
    except (ValueError, IndexError) as error:
        raise UnusableIndex(f"{path} cannot be used: {error}.") from error
    except OSError as error:
        raise UnusableIndex(f"{path} cannot be mapped ({error.strerror}).") from error


@dataclass(frozen=True, slots=True)
class _Head:
    """The header of a file, whose numbers determine the lengths of its arrays."""

    id: str | None
    ring: int
    rows: int
    rewinds: int
    blocks: int
    lanes: int
    cells: int
    shelves: Sequence[tuple[tuple[int, ...], Sequence[int]]]

    def arrays(self) -> Iterator[tuple[np.dtype[Any], tuple[int, ...], bool]]:
        """Yield the dtype and the shape of each array, and whether it is a short array."""
        yield _INT64, (BY_BLOCK, self.blocks), True
        yield _INT64, (BY_LANE, self.lanes), True
        for dtype in BY_CELL:
            yield dtype, (self.cells,), False
        for key, lengths in self.shelves:
            for length, stored in zip(lengths, _stored(key), strict=True):
                pile = stored.pile
                yield pile.dtype.newbyteorder("<"), (length, *pile.shape), stored.each

    def require_possible(self) -> None:
        """Raise ValueError if the arrays are longer than the rows allow.

        Some of the arrays are copied, and a sparse file may have any length.
        """
        possible = max(self.blocks, self.lanes) <= self.rows
        possible &= self.cells <= self.blocks * self.lanes
        for key, lengths in self.shelves:
            for length, stored in zip(lengths, _stored(key), strict=True):
                most = self.blocks if stored.each else _MOST_EACH * (self.rows + self.cells)
                possible &= length <= most
        if not possible:
            raise ValueError(f"its arrays are longer than {self.rows} rows allow")

    def nbytes(self, begin: int) -> int:
        """Return the size of a file whose arrays begin at ``begin``."""
        for dtype, shape, _ in self.arrays():
            nbytes = dtype.itemsize
            for length in shape:
                nbytes *= length
            begin += nbytes + -nbytes % _STEP
        return begin + _END

    def state(self, region: Region, begin: int) -> BlockState:
        """Return the arrays of a file. Short arrays are copied."""
        found = []
        for dtype, shape, few in self.arrays():
            array = region.array(dtype, shape, begin)
            begin += array.nbytes + -array.nbytes % _STEP
            found.append(array.copy() if few else array)
        by_block, by_lane, *rest = found
        by_cell, rest = rest[: len(BY_CELL)], rest[len(BY_CELL) :]
        shelves = []
        for key, lengths in self.shelves:
            shelves.append(ShelfState(key, [[each] for each in rest[: len(lengths)]]))
            rest = rest[len(lengths) :]
        return BlockState(self.rows, by_block, by_lane, by_cell, shelves)


def _stored(key: Sequence[int]) -> tuple[StoredArray, ...]:
    return empty_shelf(key).stored


def _head(file: int) -> tuple[_Head, int]:
    """Return the header of a file and the offset of its arrays."""
    start = os.pread(file, _BEGIN, 0)
    if not start.startswith(_MAGIC):
        if start.startswith(_NAME):
            version = start[len(_NAME) :].partition(b"\n")[0].decode("latin1")
            raise ValueError(f"it has version {version}, but this Tallyroll reads {_VERSION}")
        raise ValueError("it is not an index of trajectories")
    length, told = (int(each, 16) for each in start[len(_MAGIC) :].split())
    if not 0 < length <= _MOST_HEAD:
        raise ValueError(f"its header has an impossible length of {length} bytes")
    line = os.pread(file, length, _BEGIN)
    if len(line) != length or zlib.crc32(line) != told:
        raise ValueError("the checksum of its header does not match")
    try:
        says = json.loads(line)
        head = _Head(
            **{**says, "shelves": [(tuple(key), tuple(each)) for key, each in says["shelves"]]}
        )
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"its header is incomplete ({error})") from error
    numbers = [head.ring, head.rows, head.rewinds, head.blocks, head.lanes, head.cells]
    for key, lengths in head.shelves:
        numbers += [*key, *lengths]
    if any(type(each) is not int or not 0 <= each < 2**48 for each in numbers):
        raise ValueError("its header has impossible numbers")
    if any(not key for key, _ in head.shelves):
        raise ValueError("a shelf has no kind")
    begin = _BEGIN + length
    return head, begin + -begin % _HEAD_STEP


def _compare(region: Region) -> None:
    """Raise ValueError unless the checksum matches."""
    octets = region.array(np.dtype(np.uint8), (region.nbytes,))
    told = 0
    for at in range(0, len(octets) - 4, _PIECE):
        told = zlib.crc32(octets[at : min(at + _PIECE, len(octets) - 4)].data, told)
    if octets[-_END:].tobytes() != _MARK + told.to_bytes(4, "little"):
        raise ValueError("its checksum does not match")
