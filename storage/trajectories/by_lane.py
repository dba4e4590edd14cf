"""Rows that follow one another in a storage, put in the order of their lanes. Pure.

Within a storage each lane's rows are in time order, whatever lies between them, and one
trajectory of a lane follows the other. So a row continues the row before it in its lane,
or it begins a trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tallyroll.storage.errors import CorruptStorage

__all__ = ["MOST_LANES", "NOBODY", "LaneOrder", "RowChunk", "extended", "grown", "lane_order"]

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


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """A chunk's rows by lane, and in time within it."""

    at: np.ndarray
    """Indices into the chunk, [n]."""
    lane: np.ndarray
    """[n], ascending."""
    first: np.ndarray
    """Where each lane that has rows begins, [lanes]."""

    @property
    def own(self) -> np.ndarray:
        """The lanes that have rows, [lanes]."""
        return self.lane.take(self.first)

    @property
    def _one_each(self) -> bool:
        return len(self.first) == len(self.at)

    @property
    def last(self) -> np.ndarray:
        """The last entry of each lane that has rows, [lanes]."""
        last: np.ndarray = np.append(self.first[1:], len(self.at))[: len(self.first)] - 1
        return last

    def ends(self, values: np.ndarray) -> np.ndarray:
        """The values [n] of the last row of each lane that has rows, [lanes]."""
        return values if self._one_each else values.take(self.last)

    def before(self, values: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """The value of the row before each row in its lane, [n].

        Args:
            values: of the rows in this order, [n].
            tails: of the last row before the chunk in every lane, [lanes].
        """
        if self._one_each:
            return tails.take(self.lane)
        shifted = np.empty_like(values)
        shifted[1:] = values[:-1]
        shifted.put(self.first, tails.take(self.own))
        return shifted

    def since(self, follows: np.ndarray, values: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """For each row the value of the one from which on rows follow one another, [n].

        Args:
            follows: a row follows the one before it in its lane, bool [n].
            values: of the rows in this order, [n].
            tails: of every lane's last row before the chunk, the value found for it, [lanes].
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


def lane_order(lane: np.ndarray, start: int = 0) -> LaneOrder:
    """The order of rows by their lanes [n], n above 0.

    Args:
        lane: a whole number a row.
        start: the first row's number, for messages.

    Raises:
        CorruptStorage: a lane that cannot be.
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
    begins = np.empty(len(at), np.bool_)
    begins[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    return LaneOrder(at, ordered, begins.nonzero()[0])


def extended(array: np.ndarray, length: int, fill: Any) -> np.ndarray:
    """The array itself if it has that many entries, else a longer copy that goes on with ``fill``.

    Twice as long at least, so that entries are moved once on average.
    """
    if len(array) >= length:
        return array
    longer = grown(array, length)
    longer[len(array) :] = fill
    return longer


def grown(array: np.ndarray, length: int) -> np.ndarray:
    """As `extended`, with whatever values behind."""
    if len(array) >= length:
        return array
    longer = np.empty((max(length, 2 * len(array)), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
