"""Rows that follow one another, walked lane by lane, chunk after chunk. Pure.

Within a storage, and within what a collector makes, each lane's rows are in time order, whatever
lies between them, and one trajectory of a lane follows the other. So a row continues the row
before it in its lane, or it begins a trajectory. The row before may be in an earlier chunk: what
is needed of each lane's last row is kept in tails, arrays of one entry for every lane.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from tallyroll.storage.errors import CorruptStorage

MOST_LANES = 2**20
"""Lanes are numbered from 0; a number beyond that is taken for damage."""
NOBODY = np.iinfo(np.int64).min
"""The id where no row came before."""

_FEW = 2048


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows that follow one another in a storage. Arrays are [n]."""

    start: int
    """The first row's number."""
    ids: np.ndarray
    steps: np.ndarray
    lane: np.ndarray

    @property
    def stop(self) -> int:
        """One more than the last row's number."""
        return self.start + len(self.ids)

    def part(self, begin: int, stop: int | None = None) -> Self:
        """Return some of these rows, by their index."""
        arrays = (getattr(self, each.name)[begin:stop] for each in fields(self)[1:])
        return type(self)(self.start + begin, *arrays)


class LaneOrder:
    """Rows by lane, and in time within it.

    Args:
        at: indices into the chunk, [n].
        lane: of each, [n], ascending.
        first: where each lane that has rows begins, [lanes].
    """

    __slots__ = ("_one_each", "at", "first", "lane", "last", "own")

    def __init__(self, at: np.ndarray, lane: np.ndarray, first: np.ndarray) -> None:
        self.at, self.lane, self.first = at, lane, first
        # Vectors of environments give one row a lane at a time: that case is quick.
        self._one_each = len(first) == len(at)
        self.own = lane if self._one_each else lane.take(first)
        """The lanes that have rows in the chunk, [lanes]."""
        self.last = first if self._one_each else _lasts(first, len(at))
        """The last row of each, [lanes]."""

    @classmethod
    def of(cls, at: np.ndarray, lane: np.ndarray) -> LaneOrder:
        """Return the order of rows ``at`` of a chunk, which are sorted by lane already."""
        begins = np.empty(len(lane), np.bool_)
        begins[:1] = True
        np.not_equal(lane[1:], lane[:-1], out=begins[1:])
        return cls(at, lane, begins.nonzero()[0])

    def before(self, values: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Return the value of the row before each row in its lane, [n].

        Args:
            values: the values of the rows in this order, [n].
            tails: the value of the last row before the chunk in every lane, [lanes].
        """
        if self._one_each:
            return tails.take(self.lane)
        shifted = np.empty_like(values)
        shifted[1:] = values[:-1]
        shifted.put(self.first, tails.take(self.own))
        return shifted

    def keep(self, values: np.ndarray, tails: np.ndarray) -> None:
        """Write the value of each lane's last row into ``tails``."""
        tails.put(self.own, values if self._one_each else values.take(self.last))

    def carry(self, values: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Return the values of `before`, and `keep` these for the next chunk."""
        before = self.before(values, tails)
        self.keep(values, tails)
        return before

    def since(self, follows: np.ndarray, values: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Return for each row the value of the first row of its unbroken run, [n].

        Args:
            follows: True if a row follows the one before it in its lane, bool [n].
            values: the values of the rows in this order, [n].
            tails: the value that this method found for every lane's last earlier row, [lanes].
        """
        if self._one_each:
            return np.where(follows, tails.take(self.lane), values)
        first = self.first
        begins = ~follows
        begins[first] = True
        values = values.copy()
        values[first] = np.where(follows[first], tails.take(self.own), values[first])
        begun = np.maximum.accumulate(np.where(begins, np.arange(len(values)), 0))
        return values.take(begun)

    def stretches(self, begins: np.ndarray) -> LaneStretches:
        """Split each lane's rows into stretches at the rows that begin one, bool [n]."""
        begins = begins.copy()
        begins.put(self.first, True)
        start = begins.nonzero()[0]
        first = start.searchsorted(self.first)
        return LaneStretches(start, self.lane.take(start), first, _lasts(start, len(begins)))


class LaneStretches(LaneOrder):
    """Stretches of rows of an order, themselves in the order of their lanes.

    ``at`` are their first rows, as indices into that order.
    """

    __slots__ = ("length", "until")

    def __init__(
        self, at: np.ndarray, lane: np.ndarray, first: np.ndarray, until: np.ndarray
    ) -> None:
        super().__init__(at, lane, first)
        self.until = until
        """The last row of each stretch, [n]."""
        self.length = until - at + 1
        """The number of rows of each stretch, [n]."""


def _lasts(first: np.ndarray, count: int) -> np.ndarray:
    """Return the last entry of each part of ``count`` entries; ``first`` are the first ones."""
    last = np.empty_like(first)
    np.subtract(first[1:], 1, out=last[:-1])
    last[-1:] = count - 1
    return last


def lane_order(lane: np.ndarray, start: int = 0) -> LaneOrder:
    """Return the order of rows by their lanes [n], n above 0.

    Args:
        lane: the lane of each row, a whole number.
        start: the first row's number, for messages.

    Raises:
        CorruptStorage: a number that no lane can have.
    """
    key = lane
    if len(lane) > _FEW and lane.max() < 2**16 and lane.min() >= 0:
        key = lane.astype(np.uint16)  # sixteen bits are sorted in one pass
    at = key.argsort(kind="stable")
    ordered = lane.take(at)
    for end in (0, -1):
        if not 0 <= ordered[end] < MOST_LANES:
            raise CorruptStorage(
                f"row {start + at[end]} says that it is of lane {ordered[end]}, and lanes are "
                f"numbered from 0 to {MOST_LANES - 1}. Restore it from a copy."
            )
    return LaneOrder.of(at, ordered)


def extended(array: np.ndarray, length: int, fill: Any) -> np.ndarray:
    """Return the array if it has ``length`` entries, else a longer copy that ends with ``fill``.

    The copy is at least twice as long, so that entries are moved once on average.
    """
    if len(array) >= length:
        return array
    longer = grown(array, length)
    longer[len(array) :] = fill
    return longer


def grown(array: np.ndarray, length: int) -> np.ndarray:
    """Return the array as `extended` does, with any values at the end."""
    if len(array) >= length:
        return array
    longer = np.empty((max(length, 2 * len(array)), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
