"""Traversal of consecutive rows lane by lane, in chunks. Pure.

In a storage, and in the output of a collector, the rows of each lane are in time order, whatever
rows lie between them, and the trajectories of a lane follow one another. A row therefore continues
the previous row of its lane, or begins a trajectory. The previous row may be in an earlier chunk:
the required values of each lane's last row are kept in tails, arrays with one entry per lane.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from tallyroll.storage.errors import CorruptStorage

MOST_LANES = 2**20
"""Upper bound of lane numbers, which start from 0. A larger number is treated as damage."""
NOBODY = np.iinfo(np.int64).min
"""Placeholder id of a lane without an earlier row."""

_FEW = 2048


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Consecutive rows of a storage. Arrays are [n]."""

    start: int
    """The number of the first row."""
    ids: np.ndarray
    steps: np.ndarray
    lane: np.ndarray

    @property
    def stop(self) -> int:
        """One more than the number of the last row."""
        return self.start + len(self.ids)

    def part(self, begin: int, stop: int | None = None) -> Self:
        """Return a range of these rows, by their index."""
        arrays = (getattr(self, each.name)[begin:stop] for each in fields(self)[1:])
        return type(self)(self.start + begin, *arrays)


class LaneOrder:
    """Rows ordered by lane, and by time within a lane.

    Args:
        at: indices into the chunk, [n].
        lane: the lane of each row, [n], ascending.
        first: the position at which each lane with rows begins, [lanes].
    """

    __slots__ = ("_one_each", "at", "first", "lane", "last", "own")

    def __init__(self, at: np.ndarray, lane: np.ndarray, first: np.ndarray) -> None:
        self.at, self.lane, self.first = at, lane, first
        # Vectorized environments give one row per lane at a time, which is the fast path.
        self._one_each = len(first) == len(at)
        self.own = lane if self._one_each else lane.take(first)
        """The lanes that have rows in the chunk, [lanes]."""
        self.last = first if self._one_each else _lasts(first, len(at))
        """The position of the last row of each lane, [lanes]."""

    @classmethod
    def of(cls, at: np.ndarray, lane: np.ndarray) -> LaneOrder:
        """Return the order of rows ``at`` of a chunk, which are already sorted by lane."""
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
        """Write the value of each lane's last row to ``tails``."""
        tails.put(self.own, values if self._one_each else values.take(self.last))

    def carry(self, values: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Return the result of `before`, and `keep` the new values for the next chunk."""
        before = self.before(values, tails)
        self.keep(values, tails)
        return before

    def since(self, follows: np.ndarray, values: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Return for each row the value of the first row of its unbroken run, [n].

        Args:
            follows: True if a row follows the previous one in its lane, bool [n].
            values: the values of the rows in this order, [n].
            tails: the result of this method for every lane's last earlier row, [lanes].
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
        """Split each lane's rows into stretches; ``begins``, bool [n], marks their first rows."""
        begins = begins.copy()
        begins.put(self.first, True)
        start = begins.nonzero()[0]
        first = start.searchsorted(self.first)
        return LaneStretches(start, self.lane.take(start), first, _lasts(start, len(begins)))


class LaneStretches(LaneOrder):
    """Stretches of the rows of a `LaneOrder`, ordered by lane.

    ``at`` contains their first rows, as indices into that order.
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
    """Return the last entry of each part of ``count`` entries, given the first entries."""
    last = np.empty_like(first)
    np.subtract(first[1:], 1, out=last[:-1])
    last[-1:] = count - 1
    return last


def lane_order(lane: np.ndarray, start: int = 0) -> LaneOrder:
    """Return the order of rows by their lanes [n], where n is above 0.

    Args:
        lane: the lane of each row, an integer.
        start: the number of the first row, for messages.

    Raises:
        CorruptStorage: a lane number is out of range.
    """
    key = lane
    if len(lane) > _FEW and lane.max() < 2**16 and lane.min() >= 0:
        key = lane.astype(np.uint16)  # NumPy sorts 16-bit numbers in one pass
    at = key.argsort(kind="stable")
    ordered = lane.take(at)
    for end in (0, -1):
        if not 0 <= ordered[end] < MOST_LANES:
            raise CorruptStorage(
                f"row {start + at[end]} has lane {ordered[end]}, but lanes are numbered from 0 to "
                f"{MOST_LANES - 1}. Restore the storage from a copy."
            )
    return LaneOrder.of(at, ordered)


def extended(array: np.ndarray, length: int, fill: Any) -> np.ndarray:
    """Return the array if it has ``length`` entries, else a longer copy padded with ``fill``.

    The copy is at least twice as long, so that entries are moved once on average.
    """
    if len(array) >= length:
        return array
    longer = grown(array, length)
    longer[len(array) :] = fill
    return longer


def grown(array: np.ndarray, length: int) -> np.ndarray:
    """Return the array as `extended` does, but with undefined values at the end."""
    if len(array) >= length:
        return array
    longer = np.empty((max(length, 2 * len(array)), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
