"""Pool of buffers for batches, which are reused once no array or tensor refers to them."""

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
# The reference count of an otherwise unused list element while it is counted.
_HELD_BY_THE_POOL = max(map(sys.getrefcount, [np.empty(0)]))


class ColumnMemory:
    """Memory for one array per column, whose addresses do not change."""

    __slots__ = ("arrays", "of", "table", "words")

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays
        self.words: Any = None
        """The addresses of the arrays, int64 in a buffer, set on first use."""
        self.table: bytes | None = None
        """The kernel table for copies to these arrays from the columns in the attribute `of`."""
        self.of: object = None

    def keep_words(self, words: Any) -> None:
        """Keep the addresses of the arrays."""
        self.words = words

    def keep_table(self, table: bytes, of: object) -> None:
        """Keep the kernel table for copies from the columns ``of``."""
        self.table, self.of = table, of

    @property
    def count(self) -> int:
        """The first dimension of the arrays."""
        return len(self.arrays[0])

    @property
    def addresses(self) -> list[int]:
        """The address of each array. Each access takes a microsecond."""
        return [array.ctypes.data for array in self.arrays]


class BufferPool:
    """Pool of sets of arrays, with one array per column in each set.

    Allocating new memory takes five times as long as reusing memory. A tensor from
    `torch.from_numpy` keeps its array alive as long as its memory is in use. An array that only the
    pool refers to is therefore free.

    Args:
        columns: the dtype and the shape of one row, for each column.
    """

    def __init__(self, columns: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
        self._columns = columns
        self._row_nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns)
        self._sets: dict[tuple[int, ...], list[ColumnMemory]] = {}
        self._mutex = threading.Lock()

    def arrays(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        """Return one uninitialized array [*shape, ...] per column."""
        return self.room(shape)[0]

    def room(self, shape: tuple[int, ...]) -> tuple[list[np.ndarray], ColumnMemory]:
        """Return the arrays of :meth:`arrays`, and the `ColumnMemory` that holds their memory."""
        with self._mutex:
            sets = self._sets.get(shape)
            if sets is None:
                sets = self._new_sets(shape)
            for room in sets:
                if max(map(sys.getrefcount, room.arrays)) <= _HELD_BY_THE_POOL:
                    return room.arrays.copy(), room
            room = ColumnMemory([np.empty((*shape, *rest), dtype) for dtype, rest in self._columns])
            nbytes = self._row_nbytes * math.prod(shape)
            if len(sets) < _MOST_SETS and nbytes * (len(sets) + 1) <= _LARGEST_NBYTES:
                sets.append(room)
            return room.arrays.copy(), room

    def _new_sets(self, shape: tuple[int, ...]) -> list[ColumnMemory]:
        if len(self._sets) >= _MOST_SHAPES:
            del self._sets[next(iter(self._sets))]
        sets = self._sets[shape] = []
        return sets
