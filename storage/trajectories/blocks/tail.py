"""The newest rows, which do not fill a block yet. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from tallyroll.storage.trajectories.blocks.encodings import LaneBlock
from tallyroll.storage.trajectories.blocks.growable import GrowableArray, numbers_at
from tallyroll.storage.trajectories.lane_stretches import NOBODY, LaneOrder, extended, grown

_SLOTS = 512
_FEWEST, _MOST = 2**14, 2**16 - 64
_MOST_CELLS = 2**22
_FIRST_ROOM = 64


def least_block() -> int:
    """Return the minimum number of rows of a block."""
    return _FEWEST


class Tail:
    """Rows after the last block, with the state of every lane.

    Arrays are [rows] or [lanes]. The *position* of a row is the number of earlier rows of its lane,
    counted over all rows that were ever added to this index. ``start`` is the position at which its
    stretch began.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        """The number of the first row in the tail."""
        self.count = 0
        self.lane, self.ids, self.position, self.start = (np.empty(0, np.int64) for _ in range(4))
        self.begun, self.begun_ids = GrowableArray(np.int64), GrowableArray(np.int64)
        """The rows that begin a stretch, by their index in the tail, and their ids."""
        self.lanes = 0
        self.moved = True
        """True if an array was replaced since :meth:`mark_known`."""
        # For each lane: the number of rows before the tail, and the start, the id and the last step
        # of the last stretch before the tail.
        self.base, self.carried = np.empty(0, np.int64), np.empty(0, np.int64)
        self.carried_id, self.carried_step = np.empty(0, np.int64), np.empty(0, np.int64)
        # For each lane: the number of all rows, and the start of the last row's stretch.
        self.total, self.last_start = np.empty(0, np.int64), np.empty(0, np.int64)
        self._places = np.empty((0, _FIRST_ROOM), np.int32)

    @property
    def width(self) -> int:
        """The number of rows per lane that fit without a reallocation."""
        return self._places.shape[1]

    @property
    def words(self) -> dict[str, tuple[Any, ...]]:
        """The arrays that `LaneKernel` reads, by their names in its table."""
        arrays: dict[str, np.ndarray] = {
            "tail_lane": self.lane,
            "tail_position": self.position,
            "tail_start": self.start,
            "tail_ids": self.ids,
            "tail_base": self.base[: self.lanes],
            "tail_total": self.total[: self.lanes],
            "tail_places": self._places,
        }
        return {name: numbers_at(array) for name, array in arrays.items()}

    @property
    def stop(self) -> int:
        """One more than the number of the last row."""
        return self.first + self.count

    @property
    def size(self) -> int:
        """The number of rows that make a block, for the current number of lanes."""
        return min(max(_FEWEST, _SLOTS * self.lanes), _MOST)

    def mark_moved(self) -> None:
        """Note that the owner's arrays were replaced, so that its table is out of date."""
        self.moved = True

    def mark_known(self) -> None:
        """Note that the owner's table has the current arrays."""
        self.moved = False

    def know(self, lanes: int) -> None:
        """Make room for ``lanes`` lanes."""
        if lanes > self.lanes:
            self.base, self.carried, self.total, self.last_start, self.carried_step = (
                extended(each[: self.lanes], lanes, 0)
                for each in (
                    *(self.base, self.carried, self.total, self.last_start),
                    self.carried_step,
                )
            )
            self.carried_id = extended(self.carried_id[: self.lanes], lanes, NOBODY)
            self._places = extended(self._places, lanes, 0)
            self.lanes, self.moved = lanes, True

    def room(self) -> int:
        """Return the number of rows that fit before the tail must become a block."""
        cells = max(_FIRST_ROOM, _MOST_CELLS // max(1, self.lanes))
        most = int((self.total - self.base)[: self.lanes].max(initial=0)) if cells < _MOST else 0
        return max(0, min(self.size - self.count, cells - most))

    def add(self, order: LaneOrder, ids: np.ndarray, follows: np.ndarray) -> None:
        """Add rows in the order of lanes, at most `room` rows.

        Call `know` first, to make room for the lanes.

        Args:
            order: the order of the rows.
            ids: the ids of their trajectories, in that order, [n].
            follows: True if a row is the next step of the previous row in its lane, [n].
        """
        lane, count = order.lane, len(ids)
        position = self.total.take(lane)
        if len(order.first) < count:
            number = np.arange(count)
            position += number - number.take(order.first).repeat(np.diff(order.first, append=count))
        start = order.since(follows, position, self.last_start)
        order.keep(start, self.last_start)
        self.total.put(order.own, position.take(order.last) + 1)
        if self.count + count > len(self.lane):
            self.moved = True
            self.lane, self.ids, self.position, self.start = (
                grown(each, self.count + count)
                for each in (self.lane, self.ids, self.position, self.start)
            )
        at = order.at + self.count
        begins = position == start
        self.begun.add(at[begins])
        self.begun_ids.add(ids[begins])
        self.lane.put(at, lane)
        self.ids.put(at, ids)
        self.position.put(at, position)
        self.start.put(at, start)
        place = position - self.base.take(lane)
        if (most := int(place.max()) + 1) > (room := self._places.shape[1]):
            wider = np.empty((len(self._places), max(most, 2 * room)), np.int32)
            wider[:, :room] = self._places
            self._places, self.moved = wider, True
        self._places.reshape(-1).put(lane * self._places.shape[1] + place, at)
        self.count += count

    def places(self, lane: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the indices of the rows at these positions, which must be in the tail, [n]."""
        width = self._places.shape[1]
        at = lane * width + (position - self.base.take(lane))
        return self._places.reshape(-1).take(at).astype(np.int64)

    def as_block(self) -> tuple[LaneBlock, np.ndarray, np.ndarray]:
        """Return the rows as a block, and the first position and the id of each stretch."""
        lane = self.lane[: self.count]
        key = lane.astype(np.uint16) if self.lanes <= 2**16 else lane
        order = key.argsort(kind="stable")
        held = self.total[: self.lanes] - self.base[: self.lanes]
        starts = np.flatnonzero((self.position == self.start)[order])
        block = LaneBlock(lane, order, held.cumsum() - held)
        return block, starts, self.ids[: self.count][order[starts]]

    def resume(self, state: np.ndarray) -> None:
        """Continue after existing blocks, with an empty tail and an earlier `state`, [4, lanes]."""
        self.know(state.shape[1])
        self.total, self.last_start = state[0].copy(), state[1].copy()
        self.begin(state[2], state[3])

    @property
    def state(self) -> np.ndarray:
        """`base`, `carried`, `carried_id` and `carried_step` of each lane, [4, lanes]."""
        arrays = self.base, self.carried, self.carried_id, self.carried_step
        return np.stack([each[: self.lanes] for each in arrays])

    def begin(self, ids: np.ndarray, steps: np.ndarray) -> None:
        """Empty the tail; ``ids`` and ``steps`` have the values of the last row of each lane."""
        self.first, self.count, self.moved = self.stop, 0, True
        self.begun.clear()
        self.begun_ids.clear()
        self.base, self.carried = self.total.copy(), self.last_start.copy()
        self.carried_id, self.carried_step = ids.copy(), steps.copy()
