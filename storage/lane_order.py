"""Rows that follow one another in a storage, put in the order of their lanes. Pure.

Within a storage each lane's rows are in time order, whatever lies between them, and one
trajectory of a lane follows the other. So a row continues the row before it in its lane,
or it begins a trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import CorruptStorage

__all__ = ["MOST_LANES", "NOBODY", "Chunk", "LaneOrder", "extended", "grown", "lane_order"]

MOST_LANES = 2**20
"""Lanes are numbered from 0; a number beyond that is taken for damage."""
NOBODY = np.iinfo(np.int64).min
"""The id where no row came before."""


@dataclass(frozen=True, slots=True)
class Chunk:
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
        own: np.ndarray = self.lane[self.first]
        return own

    @property
    def last(self) -> np.ndarray:
        """Where each lane that has rows ends, [lanes]."""
        return np.append(self.first[1:], len(self.at)) - 1

    def before(self, values: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """The value of the row before each row in its lane, [n].

        Args:
            values: of the rows in this order, [n].
            tails: of the last row before the chunk in every lane, [lanes].
        """
        shifted = np.empty_like(values)
        shifted[1:] = values[:-1]
        shifted[self.first] = tails[self.own]
        return shifted


def lane_order(lane: np.ndarray, start: int = 0) -> LaneOrder:
    """The order of rows by their lanes [n], n above 0.

    Args:
        lane: a whole number a row.
        start: the first row's number, for messages.

    Raises:
        CorruptStorage: a lane that cannot be.
    """
    # As unsigned numbers negative ones are large: one look tells both.
    largest = int(lane.astype(np.uint64).max())
    if largest >= MOST_LANES:
        wrong = int(lane.astype(np.uint64).argmax())
        raise CorruptStorage(
            f"row {start + wrong} says that it is of lane {int(lane[wrong])}, and lanes are "
            f"numbered from 0 to {MOST_LANES - 1}. Restore it from a copy."
        )
    # Sixteen bits are sorted in one pass.
    key = lane.astype(np.uint16) if largest < 2**16 else lane
    at: np.ndarray = np.argsort(key, kind="stable")
    ordered: np.ndarray = lane[at]
    begins = np.empty(len(at), np.bool_)
    begins[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    return LaneOrder(at, ordered, np.flatnonzero(begins))


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
