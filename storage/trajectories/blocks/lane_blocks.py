"""Index of the rows of each lane and of their stretches, in blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tallyroll.storage.engine.kernel import in_order, table_of
from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.trajectories.blocks.encodings import LaneEncoding, kind_of
from tallyroll.storage.trajectories.blocks.extension import compiled_lanes
from tallyroll.storage.trajectories.blocks.growable import GrowableArray
from tallyroll.storage.trajectories.blocks.state import BlockState, key_of, merged
from tallyroll.storage.trajectories.blocks.tail import Tail
from tallyroll.storage.trajectories.lane_stretches import (
    MOST_LANES,
    NOBODY,
    RowChunk,
    extended,
    lane_order,
)

_FEW_LOST = 8
_FEW, _MANY = 64, 2**16
_NARROW = 2**16


class Spots(NamedTuple):
    """The positions of rows in their lanes, [n] each."""

    lane: np.ndarray
    """The number of the lane in this index."""
    position: np.ndarray
    """The number of earlier rows in the lane."""
    start: np.ndarray
    """The position at which the row's stretch began."""


class Segments(NamedTuple):
    """Parts of stretches within a block, [n] each: positions from ``begin`` to below ``stop``."""

    lane: np.ndarray
    begin: np.ndarray
    stop: np.ndarray
    start: np.ndarray
    """The position at which the stretch began, possibly in an earlier block."""


class LaneBlocks:
    """Index that maps a row to its lane and position, and a position of a lane to its row.

    A *stretch* consists of consecutive steps of a trajectory, wherever they are stored. Lanes are
    numbered in order of appearance, so that a few lanes with high numbers cost little.

    Args:
        ring: the number of slots of the ring, in which older rows are dropped, or 0.
    """

    def __init__(self, ring: int = 0) -> None:
        self._ring = ring
        self._known = np.empty(0, np.int64)  # the number of each lane in this index, or -1
        self._tail_id, self._tail_step = np.empty(0, np.int64), np.empty(0, np.int64)
        self._kernel, self._table = compiled_lanes(), b""
        self._begin(0)

    def _begin(self, first: int) -> None:
        """Start again with row ``first``, because earlier rows were overwritten."""
        self.tail = Tail(first)
        self.lanes = 0
        self._known[:], self._tail_id[:] = -1, NOBODY
        self._shelves: list[LaneEncoding] = []
        self._of_kind: dict[tuple[Any, ...], int] = {}
        # For each block: its first row, its shelf, its number on the shelf, and the index of its
        # first lane in the arrays below.
        self.first, self._shelf = GrowableArray(np.int64), GrowableArray(np.int64)
        self._slot, self._of_lanes = GrowableArray(np.int64), GrowableArray(np.int64)
        # For each block and lane: the number of rows before the block, the start and the trajectory
        # of the last stretch before the block, and the position at which the lane begins in the
        # block's order of lanes.
        self._base, self._carried = GrowableArray(np.int64), GrowableArray(np.int64)
        self._carried_id = GrowableArray(np.int64)
        self._lane_first = GrowableArray(np.uint32)
        self._lost = 0

    # --- adding and dropping rows -----------------------------------------------------------------

    @property
    def seen(self) -> int:
        """One more than the number of the last row."""
        return self.tail.stop

    @property
    def oldest(self) -> int:
        """The number of the first row that is available."""
        first = self.first.all
        return int(first[self._lost]) if len(first) > self._lost else self.tail.first

    def extend(self, chunk: RowChunk) -> None:
        """Add the next rows. Rows in between are assumed to be overwritten.

        Raises:
            CorruptStorage: a lane number is out of range.
        """
        if chunk.start != self.seen:
            self._begin(chunk.start)
        dense, begin = self._dense(chunk), 0
        while begin < len(dense):
            stop = min(len(dense), begin + self.tail.room())
            if stop > begin:
                self._add(dense[begin:stop], chunk.ids[begin:stop], chunk.steps[begin:stop])
            begin = stop
            if not self.tail.room():
                self._close_block()
        if self._ring:
            self._forget(self.seen - self._ring)

    def _dense(self, chunk: RowChunk) -> np.ndarray:
        """Return the number in this index of each row's lane, [n]."""
        lane = chunk.lane
        if not len(lane):
            return lane
        least, most = int(lane.min()), int(lane.max())
        if least < 0 or most >= MOST_LANES:
            at = int(lane.argmin() if least < 0 else lane.argmax())
            raise CorruptStorage(
                f"row {chunk.start + at} has lane {lane[at]}, but lanes are numbered from 0 to "
                f"{MOST_LANES - 1}. Restore the storage from a copy."
            )
        self._known = extended(self._known, most + 1, -1)
        dense = self._known.take(lane)
        if dense.min() < 0:
            new = np.unique(lane[dense < 0])
            self._known[new] = np.arange(self.lanes, self.lanes + len(new))
            self.lanes += len(new)
            self._tail_id = extended(self._tail_id, self.lanes, NOBODY)
            self._tail_step = extended(self._tail_step, self.lanes, 0)
            self.tail.know(self.lanes)
            dense = self._known.take(lane)
        return dense

    def _add(self, lane: np.ndarray, ids: np.ndarray, steps: np.ndarray) -> None:
        order = lane_order(lane)
        ids, steps = ids.take(order.at), steps.take(order.at)
        follows = order.carry(ids, self._tail_id) == ids
        follows &= order.carry(steps, self._tail_step) + 1 == steps
        self.tail.add(order, ids, follows)

    def _close_block(self) -> None:
        """Make a block of the rows in the tail."""
        tail = self.tail
        block, starts, ids = tail.as_block()
        dtype = np.dtype(np.uint16 if block.rows < _NARROW else np.uint32)
        kind, *sizes = kind_of(block, dtype.itemsize)
        key = (kind, dtype, *sizes)
        if key not in self._of_kind:
            self._of_kind[key] = len(self._shelves)
            self._shelves.append(kind(dtype, *sizes))
        number = self._of_kind[key]
        self.first.add(np.array([tail.first]))
        self._shelf.add(np.array([number]))
        self._slot.add(np.array([self._shelves[number].add(block, starts, ids)]))
        self._of_lanes.add(np.array([self._base.add(tail.base[: tail.lanes])]))
        self._carried.add(tail.carried[: tail.lanes])
        self._carried_id.add(tail.carried_id[: tail.lanes])
        self._lane_first.add(block.lane_first)
        tail.begin(self._tail_id[: tail.lanes], self._tail_step[: tail.lanes])

    def _forget(self, first: int) -> None:
        """Drop blocks whose rows are all below ``first``.

        Until there are many such blocks, they are only counted.
        """
        if not self.first.count or self._lost == self.first.count:
            return
        stops = np.append(self.first.all[1:], self.tail.first)
        if (lost := int(stops.searchsorted(first, side="right"))) != self._lost:
            self._lost = lost
            self.tail.mark_moved()
        if self._lost < max(_FEW_LOST, self.first.count / 2):
            return
        for number, shelf in enumerate(self._shelves):
            gone = int((self._shelf.all[: self._lost] == number).sum())
            if (gone := min(gone, shelf.count - 1)) > 0:  # a shelf keeps at least one block
                shelf.cut(gone)
                self._slot.all[self._shelf.all == number] -= gone
        self._cut(self._lost)
        self._lost = 0
        self.tail.mark_moved()

    def _cut(self, blocks: int) -> None:
        of = self._of_lanes.all
        lanes = int(of[blocks]) if blocks < len(of) else self._base.count
        for pile in (self.first, self._shelf, self._slot, self._of_lanes):
            pile.cut(blocks)
        self._of_lanes.all[:] -= lanes
        for pile in (self._base, self._carried, self._carried_id, self._lane_first):
            pile.cut(lanes)

    def state(self, first: int = 0) -> BlockState:
        """Return the remaining blocks that have no row below ``first``."""
        lost = max(self._lost, int(self.first.all.searchsorted(first)))
        numbers = self._shelf.all[lost:]
        of_key: dict[tuple[int, ...], list[int]] = {}
        for number in dict.fromkeys(numbers.tolist()):
            of_key.setdefault(key_of(self._shelves[number]), []).append(number)
        renamed, shelves = np.zeros(len(self._shelves), np.int64), []
        for at, same in enumerate(of_key.values()):
            renamed[same] = at
            shelves.append(merged([self._rest(each, lost) for each in same]))
        of, cells = self._of_lanes.all[lost:], (self._base, self._carried, self._carried_id)
        begin = int(of[0]) if len(of) else self._base.count
        lanes = np.arange(self.lanes)
        return BlockState(
            self.tail.first,
            np.stack([self.first.all[lost:], renamed.take(numbers), of - begin]),
            np.stack([self.number_of(lanes), *self.tail.state]),
            [pile.all[begin:] for pile in (*cells, self._lane_first)],
            shelves,
        )

    def _rest(self, number: int, lost: int) -> LaneEncoding:
        """Return a shelf without the blocks before ``lost``; some blocks must remain."""
        shelf = self._shelves[number]
        if gone := shelf.count - int((self._shelf.all[lost:] == number).sum()):
            shelf = shelf.clone()
            shelf.cut(gone)
        return shelf

    # --- finding rows -----------------------------------------------------------------------------

    def spots(self, rows: np.ndarray) -> Spots:
        """Return the lanes and positions of rows, none of which is below `oldest`."""
        tail = self.tail
        if self._kernel is not None:
            rows = np.ascontiguousarray(rows, np.int64)
            into = np.empty((3, len(rows)), np.int64)
            self._kernel.spots_of(self._words(), tail.count, rows, into)
            return Spots(*into)
        at = rows - tail.first
        inside = at >= 0
        if inside.all():
            return Spots(tail.lane.take(at), tail.position.take(at), tail.start.take(at))
        if not inside.any():
            return self._spots(rows)
        found = Spots(*(np.empty(len(rows), np.int64) for _ in range(3)))
        at, outside = at[inside], ~inside
        newer = tail.lane.take(at), tail.position.take(at), tail.start.take(at)
        for into, new, old in zip(found, newer, self._spots(rows[outside]), strict=True):
            into[inside], into[outside] = new, old
        return found

    def _spots(self, rows: np.ndarray) -> Spots:
        block = self.first.all.searchsorted(rows, side="right") - 1
        offset = rows - self.first.all.take(block)
        lane, rank = np.empty_like(rows), np.empty_like(rows)
        shelf, slot = self._shelf.all.take(block), self._slot.all.take(block)
        for number, part in _parts(shelf):
            lane[part], rank[part] = self._shelves[number].spots(slot[part], offset[part])
        at = self._of_lanes.all.take(block) + lane
        base = self._base.all.take(at)
        begun, index = self._begun(shelf, slot, at, rank)
        start = np.where(index < 0, self._carried.all.take(at), base + begun)
        return Spots(lane, base + rank, start)

    def _begun(
        self, shelf: np.ndarray, slot: np.ndarray, at: np.ndarray, rank: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the last start of a stretch up to the ``rank``-th row of a lane in a block.

        Returns:
            The rank of the start, and its index on the shelf, or -1 if the block has none.
        """
        first = self._lane_first.all.take(at).astype(np.int64)
        begun, index = np.empty_like(rank), np.empty_like(rank)
        for number, part in _parts(shelf):
            starts = self._shelves[number].starts
            mine = slot[part]
            found = starts.up_to(mine, (first + rank)[part]) - 1
            none = found < starts.of_rungs.all.take(mine)
            place = starts.rungs.all.take(found, mode="clip") if starts.rungs.count else found
            place = place - first[part]
            none |= place < 0
            begun[part], index[part] = place, np.where(none, -1, found)
        return begun, index

    def floor(self, lane: np.ndarray) -> np.ndarray:
        """Return the lowest available position of lanes [n]."""
        if self._lost == self.first.count:
            return self.tail.base.take(lane)
        begin, stop = self._lanes_of(self._lost)
        return extended(self._base.all[begin:stop], self.lanes, 0).take(lane)

    def windows(self, ends: np.ndarray, length: int, first: int, most: int) -> np.ndarray:
        """Return slices that end with rows [n], at most ``most`` of them, [*, length].

        No row of ``ends`` is below `oldest`. Rows whose stretch does not reach back far enough end
        no slice, and slices with a row below ``first`` are left out.
        """
        if self._kernel is not None:
            found = np.empty((min(most, len(ends)), length), np.int64)
            count = self._kernel.windows_of(
                self._words(), self.tail.count, np.ascontiguousarray(ends), length, first, found
            )
            return found[:count]
        lane, position, start = self.spots(ends)
        fits = position - length + 1 >= np.maximum(start, self.floor(lane))
        lane, position, start = lane[fits], position[fits], start[fits]
        windows = self.up_to(lane, position, start, length, ends[fits])
        return (windows[windows[:, 0] >= first] if first else windows)[:most]

    def up_to(
        self,
        lane: np.ndarray,
        position: np.ndarray,
        least: np.ndarray,
        length: int,
        near: np.ndarray,
    ) -> np.ndarray:
        """Return the rows [n, length] that end at these positions [n] of lanes; see `rows`.

        The row at ``least`` takes the place of rows at earlier positions.
        """
        if self._kernel is not None:
            found = np.empty((len(lane), length), np.int64)
            spots, near = np.stack([lane, position, least]), np.ascontiguousarray(near)
            self._kernel.rows_at(self._words(), self.tail.count, spots, near, length, found)
            return found
        wanted = np.maximum(position[:, None] + np.arange(1 - length, 1), least[:, None])
        rows = self.rows(lane.repeat(length), wanted.reshape(-1), near.repeat(length))
        return rows.reshape(-1, length)

    def onward(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Return the rows that follow ``rows``; see `RowIndex.onward`.

        None of ``rows`` is below `oldest`.
        """
        found = np.empty((length, len(rows)), np.int64)
        if self._kernel is not None:
            rows = np.ascontiguousarray(rows, np.int64)
            self._kernel.walk_onward(self._words(), self.tail.count, rows, length, found)
            return found
        found[:] = rows
        if length == 1 or not len(rows):
            return found
        lane, position, _ = self.spots(rows)
        last = self.tail.total.take(lane) - 1
        wanted = np.minimum(position + np.arange(1, length)[:, None], last).reshape(-1)
        after = self.rows(np.tile(lane, length - 1), wanted, np.tile(rows, length - 1))
        goes_on = self.spots(after).start.reshape(length - 1, -1) <= position
        steps = np.minimum(goes_on.sum(axis=0), last - position)
        found[1:] = after.reshape(length - 1, -1)
        at = np.minimum(np.arange(length)[:, None], steps)
        walked: np.ndarray = np.take_along_axis(found, at, axis=0)
        return walked

    def _words(self) -> bytes:
        """Return the table of all arrays; see ``Blocks`` in ``_lane_blocks.c``."""
        tail = self.tail
        if tail.moved:
            words: dict[str, tuple[Any, ...]] = {
                "lost": (self._lost,),
                "tail_first": (tail.first,),
                "width": (tail.width,),
                "shelves": (len(self._shelves),),
                "first": self.first.words,
                "shelf": self._shelf.words,
                "slot": self._slot.words,
                "of_lanes": self._of_lanes.words,
                "base": self._base.words,
                "carried": self._carried.words,
                "carried_id": self._carried_id.words,
                "lane_first": self._lane_first.words,
                **tail.words,
            }
            shelves = (shelf.words for shelf in self._shelves)
            self._table = table_of(chain(*in_order("INDEX", **words), *shelves))
            tail.mark_known()
        return self._table

    def rows(self, lane: np.ndarray, position: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Return the rows at positions of lanes [n], which must be available.

        Args:
            lane: the numbers of the lanes in this index.
            position: the positions in the lanes.
            near: a row near each of those to find, where the search starts.
        """
        if self._kernel is not None:
            return self.up_to(lane, position, position, 1, near).reshape(-1)
        tail = self.tail
        inside = position >= tail.base.take(lane)
        if inside.all():
            return tail.first + tail.places(lane, position)
        if not inside.any():
            return self._rows(lane, position, near)
        found = np.empty_like(position)
        outside = ~inside
        found[inside] = tail.first + tail.places(lane[inside], position[inside])
        found[outside] = self._rows(lane[outside], position[outside], near[outside])
        return found

    def _rows(self, lane: np.ndarray, position: np.ndarray, near: np.ndarray) -> np.ndarray:
        block = self._block_of(lane, position, near)
        rank = position - self._base.all.take(self._of_lanes.all.take(block) + lane)
        shelf, slot = self._shelf.all.take(block), self._slot.all.take(block)
        offset = np.empty_like(position)
        for number, part in _parts(shelf):
            offset[part] = self._shelves[number].offsets(slot[part], lane[part], rank[part])
        found: np.ndarray = self.first.all.take(block) + offset
        return found

    def _block_of(self, lane: np.ndarray, position: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Return the block, before the tail, that contains a position of a lane."""
        last = self.first.count - 1
        low = np.clip(self.first.all.searchsorted(near, side="right") - 1, self._lost, last)
        high, step = low, 1
        while (late := (self._base_of(low, lane) > position) & (low > self._lost)).any():
            high = np.where(late, low, high)
            low = np.where(late, np.maximum(low - step, self._lost), low)
            step *= 2
        step = 1
        while (early := (self._base_of(high + 1, lane) <= position) & (high < last)).any():
            low = np.where(early, high, low)
            high = np.where(early, np.minimum(high + step, last), high)
            step *= 2
        while (low < high).any():
            middle = (low + high + 1) >> 1
            passed = self._base_of(middle, lane) <= position
            low, high = np.where(passed, middle, low), np.where(passed, high, middle - 1)
        return low

    def _base_of(self, block: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Return the row counts of lanes before blocks. The block after the last is the tail."""
        of = self._of_lanes.all
        begin = np.append(of, self._base.count)
        at = begin.take(block, mode="clip") + lane
        known = at < begin.take(block + 1, mode="clip")
        base = np.where(known, self._base.all.take(at, mode="clip"), 0)
        return np.where(block == len(of), self.tail.base.take(lane), base)

    # --- trajectories -----------------------------------------------------------------------------

    def newest(self, id: int) -> tuple[int, int] | None:
        """Return the lane and position of a row of a trajectory, in the stretch that began last.

        Return None if the trajectory has no row from `oldest` on.
        """
        tail = self.tail
        if len(found := np.flatnonzero(tail.begun_ids.all == id)):
            place = int(tail.begun.all[found].max())
            return int(tail.lane[place]), int(tail.position[place])
        lanes, positions = [], []
        for number, shelf in enumerate(self._shelves):
            slots, indices = shelf.of_id(id)
            if not len(slots):
                continue
            block = np.full(shelf.count, -1)  # a shelf may keep a block that was dropped
            mine = self._shelf.all == number
            block[self._slot.all[mine]] = np.flatnonzero(mine)
            block = block.take(slots)
            for at, index in zip(block.tolist(), indices.tolist(), strict=True):
                if at >= self._lost:
                    lane, position = self._start_at(at, int(shelf.starts.rungs.all[index]))
                    lanes.append(lane)
                    positions.append(position)
        if len(lanes) == 1:
            return lanes[0], positions[0]
        if lanes:
            several = np.array(lanes), np.array(positions)
            last = self.rows(*several, np.full(len(lanes), self.seen)).argmax()
            return lanes[last], positions[last]
        return self._carried_in(id)

    def _carried_in(self, id: int) -> tuple[int, int] | None:
        """Return the first available row of a trajectory whose stretch began before `oldest`."""
        if self._lost < self.first.count:
            begin, stop = self._lanes_of(self._lost)
            base, ids = self._base.all[begin:stop], self._carried_id.all[begin:stop]
        else:
            base, ids = self.tail.base, self.tail.carried_id
        for lane in np.flatnonzero(ids == id).tolist():
            if base[lane] < self.until(lane) and self.ids(lane, base[lane : lane + 1])[0] == id:
                return lane, int(base[lane])
        return None

    def _start_at(self, block: int, place: int) -> tuple[int, int]:
        """Return the lane and position of the row at ``place`` in a block's order of lanes."""
        begin, stop = self._lanes_of(block)
        first = self._lane_first.all[begin:stop]
        lane = int(first.searchsorted(place, side="right")) - 1
        return lane, int(self._base.all[begin + lane]) + place - int(first[lane])

    def _lanes_of(self, block: int) -> tuple[int, int]:
        of = self._of_lanes.all
        stop = int(of[block + 1]) if block + 1 < len(of) else self._base.count
        return int(of[block]), stop

    def segments(self, block: int) -> Segments:
        """Return the stretches in a remaining block, ordered by lane and position."""
        tail = self.tail
        if block == self.first.count:
            taken, starts, _ = tail.as_block()
            lane_first, rows, base, carried = taken.lane_first, taken.rows, tail.base, tail.carried
        else:
            shelf, slot = self._shelves[int(self._shelf.all[block])], int(self._slot.all[block])
            begin, end = shelf.starts.bounds(slot)
            starts = shelf.starts.rungs.all[begin:end].astype(np.int64)
            begin, end = self._lanes_of(block)
            lane_first = self._lane_first.all[begin:end].astype(np.int64)
            base, carried = self._base.all[begin:end], self._carried.all[begin:end]
            rows = self.block_stop(block) - int(self.first.all[block])
        held = np.diff(lane_first, append=rows) > 0
        heads = lane_first[held]
        place = np.union1d(heads, starts)
        if not len(place):
            return Segments(*(place for _ in range(4)))
        lane = np.flatnonzero(held)[heads.searchsorted(place, side="right") - 1]
        shift = base[lane] - lane_first[lane]
        own = np.zeros(len(place), np.bool_)
        own[place.searchsorted(starts)] = True
        first = place + shift
        stop = np.append(place[1:], rows) + shift
        return Segments(lane, first, stop, np.where(own, first, carried[lane]))

    def block_stop(self, block: int) -> int:
        """Return one more than the last row of a block."""
        first = self.first.all
        return int(first[block + 1]) if block + 1 < len(first) else self.tail.first

    def rows_before(self, row: int) -> np.ndarray:
        """Return the number of rows of each lane before ``row``, [lanes].

        ``row`` is not below `oldest`.
        """
        tail, lanes = self.tail, np.arange(self.lanes)
        if row >= tail.first:
            newer = tail.lane[: row - tail.first]
            return tail.base[lanes] + np.bincount(newer, minlength=self.lanes)
        block = int(self.first.all.searchsorted(row, side="right")) - 1
        before = np.arange(self.first.all[block], row)
        found = self._base_of(np.full(self.lanes, block), lanes)
        return found + (
            np.bincount(self._spots(before).lane, minlength=self.lanes) if len(before) else 0
        )

    @property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        piles = (self._base, self._carried, self._carried_id, self._lane_first)
        return sum(pile.nbytes for pile in piles) + sum(shelf.nbytes for shelf in self._shelves)

    @property
    def blocks(self) -> range:
        """The remaining blocks, with the tail as the last."""
        return range(self._lost, self.first.count + 1)

    def number_of(self, lane: np.ndarray) -> np.ndarray:
        """Return the lane numbers in the storage for lanes [n] of this index."""
        told = np.empty(self.lanes, np.int64)
        known = np.flatnonzero(self._known >= 0)
        told[self._known[known]] = known
        return told.take(lane)

    def until(self, lane: int) -> int:
        """Return the number of rows of a lane, which is one more than its last position."""
        return int(self.tail.total[lane])

    def bounds(self, lane: int, position: int) -> tuple[int, int]:
        """Return the first position, and one more than the last, of the trajectory of a row.

        Positions that are no longer available are left out.
        """
        floor = int(self.floor(np.array([lane]))[0])
        if self._kernel is not None:
            count = self.tail.count
            return self._kernel.bounds_of(self._words(), count, lane, position, floor)
        id = self.ids(lane, np.array([position]))[0]
        begin, step = position, 1
        while begin > floor:
            before = max(floor, begin - step)
            other = np.flatnonzero(self.ids(lane, np.arange(before, begin)) != id)
            if len(other):
                begin = before + int(other[-1]) + 1
                break
            begin, step = before, min(2 * max(step, _FEW), _MANY)
        stop = self.stop(lane, position)
        while stop < self.tail.total[lane] and self.ids(lane, np.array([stop]))[0] == id:
            stop = self.stop(lane, stop)
        return begin, stop

    def ids(self, lane: int, position: np.ndarray) -> np.ndarray:
        """Return the trajectories of the rows at available positions [n] of one lane."""
        tail, lanes = self.tail, np.full(len(position), lane)
        inside = position >= tail.base[lane]
        found = np.empty(len(position), np.int64)
        if inside.any():
            found[inside] = tail.ids.take(tail.places(lanes[inside], position[inside]))
        if inside.all():
            return found
        lanes, position = lanes[~inside], position[~inside]
        block = self._block_of(lanes, position, np.full(len(position), self.seen))
        at = self._of_lanes.all.take(block) + lane
        shelf, slot = self._shelf.all.take(block), self._slot.all.take(block)
        _, index = self._begun(shelf, slot, at, position - self._base.all.take(at))
        ids = self._carried_id.all.take(at)
        for number, part in _parts(shelf):
            known = index[part] >= 0
            mine = self._shelves[number].ids.all.take(index[part][known])
            ids[np.arange(len(ids))[part][known]] = mine
        found[~inside] = ids
        return found

    def stop(self, lane: int, start: int) -> int:
        """Return one more than the last position of the stretch that began at ``start``.

        Raises:
            IndexError: the blocks are damaged.
        """
        found = self._stop(lane, start)
        if not start < found <= self.until(lane):
            raise IndexError(f"lane {lane} has no row {start} in the index")
        return found

    def _stop(self, lane: int, start: int) -> int:
        tail = self.tail
        first = max(start + 1, int(tail.base[lane]))
        if tail.carried[lane] <= start or start >= tail.base[lane]:
            position = np.arange(first, self.until(lane))
            begun = tail.start.take(tail.places(np.full(len(position), lane), position))
            return first + int(begun.searchsorted(start, side="right"))
        low, high = self._lost, self.first.count
        while high - low > 1:  # find the last block that this or an earlier stretch reaches
            middle = (low + high) // 2
            begin, stop = self._lanes_of(middle)
            if begin + lane >= stop or self._carried.all[begin + lane] <= start:
                low = middle
            else:
                high = middle
        at = self._lanes_of(low)[0] + lane
        base, first = int(self._base.all[at]), int(self._lane_first.all[at])
        starts = self._shelves[int(self._shelf.all[low])].starts
        place = max(first + start - base, first - 1)
        ladder = self._slot.all[low : low + 1]
        index = int(
            starts.up_to(ladder, np.array([place]))[0]
            if place >= 0
            else starts.of_rungs.all[ladder[0]]
        )
        return base + int(starts.rungs.all[index]) - first


def _parts(shelf: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yield each shelf number in ``shelf`` [n], with the index of the entries that have it."""
    if (shelf == shelf[0]).all():
        yield int(shelf[0]), slice(None)
        return
    for number in np.unique(shelf).tolist():
        yield number, np.flatnonzero(shelf == number)
