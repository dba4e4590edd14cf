"""Index of the rows of trajectories, for walks along a trajectory and draws of slices. Pure.

Row numbers count all rows ever written. In a ring of ``size`` slots, only the newest ``size`` rows
are known. Otherwise ``size`` is 0, and all rows are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from tallyroll.storage.errors import NoSlices
from tallyroll.storage.trajectories.blocks.lane_blocks import LaneBlocks, Segments
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks
from tallyroll.storage.trajectories.blocks.state import BlockState
from tallyroll.storage.trajectories.lane_stretches import RowChunk

_ROUNDS, _MOST_TRIED = 8, 2**14


class RowIndex:
    """Index of the rows of each trajectory of a storage.

    Stretches, slices and walks onward do not cross a gap, which is a place where rows of a
    trajectory were never stored.

    Args:
        ring: the number of slots of the ring, or 0.
        kept: saved blocks to continue from.
    """

    def __init__(self, ring: int = 0, kept: SavedBlocks | None = None) -> None:
        self._blocks: LaneBlocks = kept or LaneBlocks(ring)
        # For each length: the first row of each block, and the number of slices that end in the
        # block.
        self._counts: dict[int, deque[tuple[int, int]]] = {}

    @property
    def seen(self) -> int:
        """The number of rows that the index covers, counted over all rows ever written."""
        return self._blocks.seen

    @property
    def damaged(self) -> bool:
        """True if the saved blocks turned out to be damaged."""
        return isinstance(self._blocks, SavedBlocks) and self._blocks.damaged

    @property
    def in_blocks(self) -> int:
        """The number of rows up to the end of the last block, at most `seen`; 0 without a block."""
        return self._blocks.tail.first if len(self._blocks.blocks) > 1 else 0

    def state(self, first: int = 0) -> BlockState:
        """Return the state of the blocks that have no row below ``first``."""
        return self._blocks.state(first)

    @property
    def nbytes(self) -> int:
        """The size of the blocks in bytes. The newest rows, which are not in blocks, take more."""
        return self._blocks.nbytes

    def extend(self, chunk: RowChunk) -> None:
        """Add the next rows; for a ring, at most as many as the ring has slots.

        Rows between ``seen`` and the chunk are assumed to be overwritten.

        Raises:
            CorruptStorage: a lane number is out of range.
        """
        self._blocks.extend(chunk)

    # --- along a trajectory -----------------------------------------------------------------------

    def back_from(self, row: int, first: int = 0) -> np.ndarray:
        """Return the rows of a trajectory from ``first`` up to ``row``, in time order."""
        lane, position, _ = (int(each[0]) for each in self._blocks.spots(np.array([row])))
        begin, _ = self._blocks.bounds(lane, position)
        return self._between(lane, begin, position + 1, first)

    def rows_of(self, id: int, first: int = 0) -> np.ndarray:
        """Return the rows of a trajectory from ``first`` on, in time order.

        The result is empty if the id is unknown. If the id was used several times, the result is
        the trajectory that began last.
        """
        if (found := self._blocks.newest(id)) is None:
            return np.empty(0, np.int64)
        return self._between(found[0], *self._blocks.bounds(*found), first)

    def _between(self, lane: int, begin: int, stop: int, first: int) -> np.ndarray:
        """Return the rows at a range of positions of a lane, without rows below ``first``."""
        where = np.array([lane]), np.array([stop - 1]), np.array([begin])
        rows: np.ndarray = self._blocks.up_to(*where, stop - begin, np.array([self.seen]))[0]
        return rows[rows >= first] if first else rows

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of rows before each row [n] in its stretch, and a mask of last rows.

        In a ring, overwritten rows are counted too.
        """
        rows = self._there(rows)
        _, position, start = self._blocks.spots(rows)
        return position - start, self._blocks.onward(rows, 2)[1] == rows

    def back(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the row that is ``steps`` [n] before each of ``rows`` [n] in its stretch.

        In a ring, the result is -1 for rows that the index has dropped.
        """
        rows = self._there(rows)
        lane, position, _ = self._blocks.spots(rows)
        position = position - steps
        floor = self._blocks.floor(lane)
        found = self._blocks.rows(lane, np.maximum(position, floor), rows)
        found[position < floor] = -1
        return found

    def windows(self, ends: np.ndarray, length: int) -> np.ndarray:
        """Return the ``length`` consecutive rows that end at each of ``ends`` [n]: [n, length].

        The first row of a stretch is repeated for rows before it. In a ring, the first row that the
        index has not dropped is repeated.
        """
        ends = self._there(ends)
        lane, position, start = self._blocks.spots(ends)
        least = np.maximum(start, self._blocks.floor(lane))
        return self._blocks.up_to(lane, position, least, length, ends)

    def onward(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Return the ``length`` consecutive rows that begin at each of ``rows`` [n]: [length, n].

        The last row of a stretch is repeated for rows after it. In a ring, the result is undefined
        for rows below the oldest one that is left.
        """
        found = self._blocks.onward(self._there(rows), length)
        found[0] = rows
        return found

    def _there(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows, with dropped rows replaced by the oldest row."""
        oldest = self._blocks.oldest
        return np.maximum(rows, oldest) if oldest else rows

    # --- slices -----------------------------------------------------------------------------------

    def count_slices(self, length: int, first: int = 0) -> int:
        """Return the number of slices; in a ring, including those that begin below ``first``."""
        blocks, known = self._blocks, self._counts.setdefault(length, deque())
        oldest = blocks.oldest
        while known and known[0][0] < oldest:
            known.popleft()
        *older, tail = blocks.blocks
        for block in older[len(known) :]:
            ends = _ends(blocks.segments(block), length)
            known.append((int(blocks.first.all[block]), int(ends.sum())))
        ends = _ends(self._left(blocks.segments(tail), first), length)
        return sum(count for _, count in known) + int(ends.sum())

    def draw(
        self, count: int, length: int, first: int, pick: Callable[[int, int], np.ndarray]
    ) -> np.ndarray:
        """Draw slices uniformly, with replacement, from all slices of that length: [count, length].

        Args:
            count: the number of slices.
            length: the number of rows of a slice, consecutive steps of one trajectory.
            first: the lowest valid row.
            pick: ``pick(count, below)`` draws ``count`` integers from 0 to ``below - 1`` uniformly.

        Raises:
            NoSlices: no trajectory is long enough.
        """
        # Draw rows. A row is the last of a slice if its stretch reaches back far enough.
        oldest = max(first, self._blocks.oldest)
        found: list[np.ndarray] = []
        missing, tried, had = count, 0, 0
        for _ in range(_ROUNDS if self.seen > oldest else 0):
            share = max(had, 0.5) / tried if tried else 1.0
            asked = max(missing, min(int(missing / share * 1.25) + 8, _MOST_TRIED))
            ends = oldest + pick(asked, self.seen - oldest)
            windows = self._blocks.windows(ends, length, oldest, missing)
            tried, had = tried + asked, had + len(windows)
            found.append(windows)
            missing -= len(windows)
            if not missing:
                return found[0] if len(found) == 1 else np.concatenate(found)
        found.append(self._draw_of_all(missing, length, oldest, pick))
        return np.concatenate(found)

    def _draw_of_all(
        self, count: int, length: int, first: int, pick: Callable[[int, int], np.ndarray]
    ) -> np.ndarray:
        """Draw from the list of all slices, if slices are too rare to be found by drawing rows."""
        blocks = self._blocks
        lane, begin, stop, start = self._segments(first)
        begin = np.maximum(begin, start + length - 1)
        some = begin < stop
        lane, begin, stop = lane[some], begin[some], stop[some]
        if not len(lane):
            raise NoSlices(
                f"slices of {length} rows were requested, but the longest stretch of a trajectory "
                f"here has {self.longest(first)}. Request shorter slices, or collect more."
            )
        # Sort, so that the order does not depend on the blocks.
        order = np.lexsort((begin, blocks.number_of(lane)))
        lane, begin, stop = lane[order], begin[order], stop[order]
        sums = (stop - begin).cumsum()
        number = pick(count, int(sums[-1]))
        at = sums.searchsorted(number, side="right")
        position = stop[at] - (sums[at] - number)
        least = position - length + 1
        return blocks.up_to(lane[at], position, least, length, np.full(count, self.seen))

    def pieces(self, length: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Cut all stretches into pieces of ``length`` rows, from the first remaining row on.

        Returns:
            The last row of each piece and its number of rows, which is smaller at the end of a
            stretch.
        """
        found = self._segments(max(first, self._blocks.oldest))
        order = np.lexsort((found.begin, found.start, found.lane))
        lane, begin, stop, start = (each[order] for each in found)
        if not len(lane):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        new = np.ones(len(lane), np.bool_)
        new[1:] = (lane[1:] != lane[:-1]) | (start[1:] != start[:-1])
        at = np.flatnonzero(new)
        lane, begin = lane[at], begin[at]
        stop = np.maximum.reduceat(stop, at)
        many = -(-(stop - begin) // length)
        of = np.arange(len(lane)).repeat(many)
        number = np.arange(len(of)) - (many.cumsum() - many).repeat(many)
        piece = begin[of] + number * length
        until = np.minimum(piece + length, stop[of])
        near = np.full(len(of), self.seen)
        rows = self._blocks.up_to(lane[of], until - 1, until - 1, 1, near)
        return rows[:, 0], until - piece

    def longest(self, first: int = 0) -> int:
        """Return the length of the longest stretch of consecutive steps, from ``first`` on."""
        segments = self._segments(max(first, self._blocks.oldest))
        return int((segments.stop - segments.start).max(initial=0))

    def _segments(self, first: int) -> Segments:
        """Return all stretches by block, without the rows below ``first``."""
        blocks = self._blocks
        if self.seen <= first:
            return Segments(*(np.empty(0, np.int64) for _ in range(4)))
        parts = [blocks.segments(block) for block in blocks.blocks]
        return self._left(Segments(*map(np.concatenate, zip(*parts, strict=True))), first)

    def _left(self, found: Segments, first: int) -> Segments:
        """Clip stretches to the rows from ``first`` on."""
        if first <= self._blocks.oldest:
            before = self._blocks.floor(found.lane)
        else:
            before = self._blocks.rows_before(min(first, self.seen)).take(found.lane)
        left = found.stop > before
        lane, begin, stop, start = (each[left] for each in found)
        before = before[left]
        return Segments(lane, np.maximum(begin, before), stop, np.maximum(start, before))


def _ends(found: Segments, length: int) -> np.ndarray:
    """Return the number of slices that end in each segment."""
    begin = np.maximum(found.begin, found.start + length - 1)
    ends: np.ndarray = np.maximum(found.stop - begin, 0)
    return ends
