"""Buffers for batches that are read, used again when no array or tensor refers to them."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

_MOST_SHAPES = 4
_MOST_SETS = 8
_LARGEST_NBYTES = 2**30
# A list's element while its references are counted.
_HELD_BY_THE_POOL = max(map(sys.getrefcount, [np.empty(0)]))


class Room:
    """Memory for one array a column, which stays where it is."""

    __slots__ = ("arrays", "of", "table", "words")

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays
        self.words: Any = None
        """The addresses of the arrays, int64 in a buffer, once they were asked for."""
        self.table: bytes | None = None
        """The kernel's table that copies from the columns ``of`` a storage to these arrays."""
        self.of: object = None

    @property
    def count(self) -> int:
        """The first size of the arrays."""
        return len(self.arrays[0])

    @property
    def addresses(self) -> list[int]:
        """The address of each array; asking for it takes a microsecond."""
        return [array.ctypes.data for array in self.arrays]


class BufferPool:
    """Sets of arrays, one a column. New memory costs five times as much as used memory.

    A tensor made by `torch.from_numpy` holds its array for as long as its memory
    is in use, so an array that only the pool refers to is free.

    Args:
        columns: dtype and shape of one row, for each column.
    """

    def __init__(self, columns: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
        self._columns = columns
        self._row_nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns)
        self._sets: dict[tuple[int, ...], list[Room]] = {}
        self._mutex = threading.Lock()

    def arrays(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        """Return one array [*shape, ...] a column, with any values."""
        return self.room(shape)[0]

    def room(self, shape: tuple[int, ...]) -> tuple[list[np.ndarray], Room]:
        """Return the arrays of :meth:`arrays`, and the `Room` that holds their memory."""
        with self._mutex:
            sets = self._sets.get(shape)
            if sets is None:
                sets = self._new_sets(shape)
            for room in sets:
                if max(map(sys.getrefcount, room.arrays)) <= _HELD_BY_THE_POOL:
                    return room.arrays.copy(), room
            room = Room([np.empty((*shape, *rest), dtype) for dtype, rest in self._columns])
            nbytes = self._row_nbytes * math.prod(shape)
            if len(sets) < _MOST_SETS and nbytes * (len(sets) + 1) <= _LARGEST_NBYTES:
                sets.append(room)
            return room.arrays.copy(), room

    def _new_sets(self, shape: tuple[int, ...]) -> list[Room]:
        if len(self._sets) >= _MOST_SHAPES:
            del self._sets[next(iter(self._sets))]
        sets = self._sets[shape] = []
        return sets
