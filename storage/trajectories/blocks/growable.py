"""Flat arrays that grow at the end, and ladders: ascending numbers, a list for each block."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tallyroll.storage.engine.kernel import in_order
from tallyroll.storage.trajectories.lane_stretches import grown

_EVERY = 64


class GrowableArray:
    """An array [count, ...] that grows at its end; `all` is the array of its values."""

    __slots__ = ("_room", "count")

    def __init__(self, dtype: Any, *shape: int) -> None:
        self._room = np.empty((0, *shape), dtype)
        self.count = 0

    @property
    def all(self) -> np.ndarray:
        """The values, as a view that is valid until more are added."""
        return self._room[: self.count]

    @property
    def words(self) -> tuple[Any, ...]:
        """The table words that describe the values to the extension."""
        return numbers_at(self.all)

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes."""
        return self.count * self._room.itemsize * int(np.prod(self._room.shape[1:]))

    def add(self, values: np.ndarray) -> int:
        """Add values [n, ...]; return the index of the first."""
        begin = self.count
        self.count = begin + len(values)
        self._room = grown(self._room, self.count)
        self._room[begin : self.count] = values
        return begin

    def clear(self) -> None:
        """Remove all values, and keep their memory."""
        self.count = 0

    def hold(self, values: np.ndarray) -> None:
        """Adopt an array as the values, such as one of a mapped file, without writing to it."""
        self._room, self.count = values, len(values)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers."""
        found: np.dtype[Any] = self._room.dtype
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return tuple(self._room.shape[1:])

    def cut(self, first: int) -> None:
        """Drop the values before ``first``."""
        self._room = self.all[first:].copy()
        self.count -= first


class StoredArray(NamedTuple):
    """An array of a shelf in the index file."""

    pile: GrowableArray
    each: bool = False
    """True if it has one number per block; otherwise its length depends on the rows."""
    into: GrowableArray | None = None
    """The array that the numbers refer to: each is the position at which a block begins there. None
    if the numbers are not positions."""


def numbers_at(array: np.ndarray) -> tuple[Any, ...]:
    """Return the words that describe a contiguous array to `LaneKernel`."""
    words: list[Any] = in_order("NUMBERS", address=array, itemsize=array.itemsize, count=array.size)
    return tuple(words)


class Ladders:
    """Ascending numbers below the row count of a block, one ladder per block.

    The number of rungs up to x is found in a few operations, however many there are, because marks
    store that number for every 64th x.
    """

    __slots__ = ("marks", "of_marks", "of_rungs", "rungs")

    def __init__(self, dtype: Any) -> None:
        self.rungs, self.marks = GrowableArray(dtype), GrowableArray(dtype)
        self.of_rungs, self.of_marks = GrowableArray(np.int64), GrowableArray(np.int64)

    def add(self, rungs: np.ndarray, below: int) -> None:
        """Add a ladder of ascending numbers from 0 to ``below - 1``."""
        edges = np.arange(0, below + _EVERY, _EVERY)
        self.of_rungs.add(np.array([self.rungs.add(rungs)]))
        self.of_marks.add(np.array([self.marks.add(rungs.searchsorted(edges))]))

    def up_to(self, ladder: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the index in `rungs` after the last rung of ``ladder`` up to ``x``, [n]."""
        first: np.ndarray = self.of_rungs.all.take(ladder)
        if not self.rungs.count:
            return first
        mark = self.of_marks.all.take(ladder) + x // _EVERY
        low: np.ndarray = first + self.marks.all.take(mark)
        high = first + self.marks.all.take(mark + 1)
        rungs = self.rungs.all
        while (open := low < high).any():
            middle = (low + high) >> 1
            passed = rungs.take(middle, mode="clip") <= x
            low = np.where(open & passed, middle + 1, low)
            high = np.where(open & ~passed, middle, high)
        return low

    def bounds(self, ladder: int) -> tuple[int, int]:
        """Return the begin and end of one ladder in `rungs`."""
        of = self.of_rungs.all
        return int(of[ladder]), int(of[ladder + 1]) if ladder + 1 < len(of) else self.rungs.count

    def cut(self, ladders: int) -> None:
        """Drop the first ladders; at least one must remain."""
        for values, of in ((self.rungs, self.of_rungs), (self.marks, self.of_marks)):
            begin = int(of.all[ladders])
            of.cut(ladders)
            of.all[:] -= begin
            values.cut(begin)

    @property
    def stored(self) -> tuple[StoredArray, ...]:
        """All arrays, in the order of the index file."""
        return (
            *(StoredArray(self.rungs), StoredArray(self.marks)),
            *(
                StoredArray(self.of_rungs, True, self.rungs),
                StoredArray(self.of_marks, True, self.marks),
            ),
        )

    @property
    def words(self) -> tuple[Any, ...]:
        """The table words that describe all arrays to the extension."""
        words = in_order(
            "LADDER",
            rungs=self.rungs.words,
            marks=self.marks.words,
            of_rungs=self.of_rungs.words,
            of_marks=self.of_marks.words,
        )
        return tuple(chain.from_iterable(words))

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum(each.nbytes for each in (self.rungs, self.marks, self.of_rungs, self.of_marks))
