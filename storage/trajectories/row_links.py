"""Links from each row to the one before it and the one after it in its trajectory. Pure.

Rows are numbered over all that were ever written. In a ring of ``size`` slots only the
newest ``size`` of them have links; without one ``size`` is 0, and all rows have links.
A new row costs a constant number of operations, and a walk along trajectories costs its
length, however many rows the storage holds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tallyroll.storage.engine.ring import slots_of
from tallyroll.storage.errors import NoSlices
from tallyroll.storage.trajectories.by_lane import NOBODY, RowChunk, extended, grown, lane_order

_FIRST_ROOM = 1024
_ROUNDS = 16
_INT32 = np.iinfo(np.int32).max


class RowLinks:
    """Links between the rows of a storage.

    A row is linked to the row that is stored before it in its trajectory, and to the one
    after it if that is the next step. If it is not, rows in between were never stored:
    slices and walks onward do not cross such a gap.

    Args:
        ring: slots of the ring, or 0.
    """

    def __init__(self, ring: int = 0) -> None:
        self._ring = ring
        self.seen = 0
        """The number of rows that have links."""
        # Distances back and ahead, which fit 32 bits unlike row numbers; 0 without such a row.
        # The depth is the number of rows before a row without a gap.
        self._back: np.ndarray = np.zeros(ring or _FIRST_ROOM, np.int32)
        self._ahead: np.ndarray = np.zeros_like(self._back)
        self._depth: np.ndarray = np.zeros_like(self._back)
        # The last row of each lane: its number, trajectory, step, and that step less its depth.
        self._tail_row = np.empty(0, np.int64)
        self._tail_id, self._tail_step, self._tail_base = (np.empty(0, np.int64) for _ in range(3))
        self._ends: dict[int, _Ends] = {}

    def extend(self, chunk: RowChunk) -> None:
        """Link the rows after those seen; in a ring no more at once than it has slots.

        Rows between ``seen`` and the chunk are taken for overwritten.

        Raises:
            CorruptStorage: a number that no lane can have.
        """
        if len(chunk.ids):
            self._make_room(chunk.stop)
            self._link(chunk)
            for length, ends in self._ends.items():
                ends.add(chunk.start + np.flatnonzero(self._depths(chunk) >= length - 1))
        self.seen = chunk.stop

    def _link(self, chunk: RowChunk) -> None:
        # Commits of few rows are frequent: `take` and `put` cost a fraction of indexing there.
        order = lane_order(chunk.lane, chunk.start)
        at = order.at
        self._know_lanes(int(order.lane[-1]) + 1)
        rows, ids, steps = at + chunk.start, chunk.ids.take(at), chunk.steps.take(at)
        # For each row the one before it in its lane, which may be the last of an earlier chunk.
        before = order.carry(rows, self._tail_row)
        same = order.carry(ids, self._tail_id) == ids
        follows = (order.carry(steps, self._tail_step) + 1 == steps) & same
        # The step at which the rows without a gap began: their number is the difference to it.
        base = order.since(follows, steps, self._tail_base)
        order.keep(base, self._tail_base)

        slots = slots_of(rows, self._ring)
        distance = (rows - before) * same
        self._back.put(slots, distance)
        self._depth.put(slots, steps - base)
        self._ahead.put(slots, 0)
        # In a ring, another row is in that slot already.
        follows &= before >= (chunk.stop - self._ring if self._ring else 0)
        self._ahead.put(slots_of(before[follows], self._ring), distance[follows])

    def _make_room(self, stop: int) -> None:
        if stop > _INT32 and self._back.dtype == np.int32:
            self._back, self._ahead, self._depth = (
                array.astype(np.int64) for array in (self._back, self._ahead, self._depth)
            )
        if not self._ring and stop > len(self._back):
            self._back, self._ahead, self._depth = (
                grown(array, stop) for array in (self._back, self._ahead, self._depth)
            )

    def _know_lanes(self, lanes: int) -> None:
        if lanes > len(self._tail_row):
            self._tail_row = extended(self._tail_row, lanes, -1)
            self._tail_id = extended(self._tail_id, lanes, NOBODY)
            self._tail_step = extended(self._tail_step, lanes, 0)
            self._tail_base = extended(self._tail_base, lanes, 0)

    def _depths(self, rows: RowChunk | range) -> np.ndarray:
        """Number of rows before each row without a gap, [n], rows in the order of numbers."""
        begin, stop = slots_of(rows.start, self._ring), slots_of(rows.stop, self._ring)
        if begin < stop or rows.start == rows.stop:
            return self._depth[begin:stop]
        return np.concatenate([self._depth[begin : self._ring], self._depth[:stop]])

    # --- along a trajectory -----------------------------------------------------------------------

    def back_from(self, row: int, first: int = 0) -> np.ndarray:
        """Return the rows of a trajectory from ``first`` up to ``row``, in time order."""
        found = [row]
        item, ring = self._back.item, self._ring
        while (distance := item(row % ring if ring else row)) and row - distance >= first:
            row -= distance
            found.append(row)
        return np.array(found[::-1])

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return of rows [n] how many come before each without a gap, and whether none follows.

        In a ring, rows that were overwritten are counted, too.
        """
        slots = slots_of(rows, self._ring)
        return self._depth.take(slots), self._ahead.take(slots) == 0

    def back(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the row that is ``steps`` [n] before each of ``rows`` [n] in its trajectory.

        In a ring, numbers below the oldest row that is left mean nothing.
        """
        found, at, done = rows.copy(), np.flatnonzero(steps), 0
        while len(at):
            row, done = found.take(at), done + 1
            found[at] = row - self._back.take(slots_of(row, self._ring))
            at = at[steps.take(at) > done]
        return found

    def windows(self, ends: np.ndarray, length: int) -> np.ndarray:
        """Return the ``length`` rows up to each of ``ends`` [n] in its trajectory, [n, length].

        The first row of a trajectory is repeated in the place of rows before it. In a ring,
        numbers below the oldest row that is left mean nothing.
        """
        rows = np.empty((length, len(ends)), np.int64)
        rows[-1] = ends
        back, ring = self._back, self._ring
        for step in range(length - 1, 0, -1):
            row = rows[step]
            np.subtract(row, back.take(row % ring if ring else row), out=rows[step - 1])
        return np.ascontiguousarray(rows.T)

    def onward(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Return the ``length`` rows from each of ``rows`` [n] on, step by step, [length, n].

        The last row of a trajectory is repeated in the place of rows after it.
        """
        found = np.empty((length, len(rows)), np.int64)
        found[0] = rows
        ahead, ring = self._ahead, self._ring
        for step in range(length - 1):
            row = found[step]
            np.add(row, ahead.take(row % ring if ring else row), out=found[step + 1])
        return found

    # --- slices -----------------------------------------------------------------------------------

    def count_slices(self, length: int, first: int = 0) -> int:
        """Number of slices; in a ring, those that begin below ``first`` included."""
        return len(self._ends_of(length, first).rows)

    def draw(
        self, count: int, length: int, first: int, pick: Callable[[int, int], np.ndarray]
    ) -> np.ndarray:
        """Slices drawn uniformly, with replacement, among all of that length: [count, length].

        Args:
            count: how many.
            length: rows a slice, consecutive steps of one trajectory.
            first: the lowest row that is valid.
            pick: gives ``pick(count, below)`` numbers from 0 to ``below - 1``, uniformly.

        Raises:
            NoSlices: no trajectory is that long.
        """
        ends = self._ends_of(length, first).rows
        found, missing = [np.empty((0, length), np.int64)], count
        for _ in range(_ROUNDS if len(ends) else 0):
            rows = self.windows(ends[pick(missing, len(ends))], length)
            if first:
                rows = rows[rows[:, 0] >= first]  # the others begin in what was overwritten
            found.append(rows)
            missing -= len(rows)
            if not missing:
                return found[1] if len(found) == 2 else np.concatenate(found)
        ends = ends[self._reach_back(ends, length) >= first]
        if not len(ends):
            raise NoSlices(
                f"slices of {length} rows were asked for, and the longest stretch of a trajectory "
                f"here has {self.longest(first)}. Ask for shorter slices, or collect more."
            )
        found.append(self.windows(ends[pick(missing, len(ends))], length))
        return np.concatenate(found)

    def _ends_of(self, length: int, first: int) -> _Ends:
        ends = self._ends.get(length)
        if ends is None:
            ends = self._ends[length] = _Ends()
            oldest = max(first, self.seen - self._ring) if self._ring else 0
            if oldest < self.seen:
                depths = self._depths(range(oldest, self.seen))
                ends.add(oldest + np.flatnonzero(depths >= length - 1))
        ends.forget(first)
        return ends

    def _reach_back(self, ends: np.ndarray, length: int) -> np.ndarray:
        row = ends
        for _ in range(length - 1):
            row = row - self._back[slots_of(row, self._ring)]
        return row

    def longest(self, first: int = 0) -> int:
        """Return the length of a trajectory's longest stretch of steps, from ``first`` on."""
        rows = np.arange(first, self.seen)
        rows = rows[self._ahead.take(slots_of(rows, self._ring)) == 0]
        length = 0
        while len(rows):
            length += 1
            slots = slots_of(rows, self._ring)
            rows = (rows - self._back[slots])[self._depth[slots] > 0]
            rows = rows[rows >= first]
        return length


class _Ends:
    """The rows at which slices of a length end, ascending."""

    def __init__(self) -> None:
        self._room = np.empty(_FIRST_ROOM, np.int64)
        self._begin = self._stop = 0

    @property
    def rows(self) -> np.ndarray:
        return self._room[self._begin : self._stop]

    def add(self, rows: np.ndarray) -> None:
        if self._stop + len(rows) > len(self._room):
            kept = self.rows
            self._room = grown(kept, len(kept) + len(rows))
            self._begin, self._stop = 0, len(kept)
        stop = self._stop + len(rows)
        self._room[self._stop : stop] = rows
        self._stop = stop

    def forget(self, first: int) -> None:
        """Leave out the rows below ``first``."""
        if first:
            self._begin += int(np.searchsorted(self.rows, first))
