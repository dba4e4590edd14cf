"""Index that continues from saved blocks, and validation of saved blocks. Pure.

The few numbers per block are checked when the blocks are loaded. All other numbers may be in a
mapped file and are checked when they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.trajectories.blocks.encodings import check_places
from tallyroll.storage.trajectories.blocks.growable import GrowableArray
from tallyroll.storage.trajectories.blocks.lane_blocks import LaneBlocks, Segments
from tallyroll.storage.trajectories.blocks.state import BlockState, empty_shelf, whole
from tallyroll.storage.trajectories.blocks.tail import Tail
from tallyroll.storage.trajectories.lane_stretches import MOST_LANES, NOBODY, RowChunk, extended

_Args = ParamSpec("_Args")
Found = TypeVar("Found")


def _raises_corrupt(method: Callable[Concatenate[Any, _Args], Found]) -> Any:
    """Raise `CorruptStorage` if the method finds that the saved blocks are damaged."""

    @functools.wraps(method)
    def call(self: SavedBlocks, *args: _Args.args, **keywords: _Args.kwargs) -> Found:
        try:
            return method(self, *args, **keywords)
        except IndexError as error:
            self.damaged = True
            raise CorruptStorage(
                f"{self.place} is damaged ({error}). Delete the file, so that no other process "
                "reads it. This process rebuilds the index from the rows when it next needs it."
            ) from error

    return call


class SavedBlocks(LaneBlocks):
    """Saved blocks to which rows are added.

    Args:
        ring: see `LaneBlocks`.
        state: the saved blocks. Its arrays of numbers per block are private to this process.
        place: the path of the saved blocks, for messages.

    Raises:
        ValueError: the blocks are damaged.
    """

    def __init__(self, ring: int, state: BlockState, place: object) -> None:
        super().__init__(ring)
        self.place, self.damaged = place, False
        _check(state)
        number, *lanes = state.by_lane
        self.lanes = len(number)
        self._known = np.full(int(number.max()) + 1, -1)
        self._known[number] = np.arange(self.lanes)
        self.tail = Tail(state.rows)
        self.tail.resume(np.stack(lanes))
        self._tail_id, self._tail_step = lanes[2].copy(), lanes[3].copy()
        first, shelf, of_lanes = state.by_block
        slot = np.empty_like(shelf)
        for at, each in enumerate(state.shelves):
            made = empty_shelf(each.key)
            made.hold([parts[0] for parts in each.arrays])
            mine = np.flatnonzero(shelf == at)
            lanes_of = np.diff(of_lanes, append=len(state.by_cell[0]))[mine]
            if len(mine) != made.count or (made.sizes and (lanes_of != made.sizes[0]).any()):
                raise ValueError("a shelf does not have the blocks that the index lists")
            slot[mine] = np.arange(len(mine))
            self._shelves.append(made)
        piles: tuple[GrowableArray, ...] = (self.first, self._shelf, self._slot, self._of_lanes)
        for pile, values in zip(piles, (first, shelf, slot, of_lanes), strict=True):
            pile.hold(values)
        piles = (self._base, self._carried, self._carried_id, self._lane_first)
        for pile, values in zip(piles, state.by_cell, strict=True):
            pile.hold(values)

    spots = _raises_corrupt(LaneBlocks.spots)
    floor = _raises_corrupt(LaneBlocks.floor)
    up_to = _raises_corrupt(LaneBlocks.up_to)
    onward = _raises_corrupt(LaneBlocks.onward)
    rows = _raises_corrupt(LaneBlocks.rows)
    newest = _raises_corrupt(LaneBlocks.newest)
    rows_before = _raises_corrupt(LaneBlocks.rows_before)

    @_raises_corrupt
    def bounds(self, lane: int, position: int) -> tuple[int, int]:
        """Return the result of `LaneBlocks.bounds`, after checking it."""
        begin, stop = super().bounds(lane, position)
        if not 0 <= begin <= position < stop <= self.until(lane):
            raise IndexError(f"lane {lane} has no row {position} in the index")
        return begin, stop

    @_raises_corrupt
    def segments(self, block: int) -> Segments:
        """Return the result of `LaneBlocks.segments`, after checking it."""
        found = super().segments(block)
        lane, begin, stop, start = found
        total = self.tail.total.take(lane)
        if not ((start >= 0) & (start <= begin) & (begin <= stop) & (stop <= total)).all():
            raise IndexError(f"block {block} has impossible stretches")
        return found

    def _rows(self, lane: np.ndarray, position: np.ndarray, near: np.ndarray) -> np.ndarray:
        found = super()._rows(lane, position, near)
        if len(found) and not 0 <= found.min() <= found.max() < self.tail.first:
            raise IndexError("a block refers to rows that do not exist")
        return found


def _check(state: BlockState) -> None:
    """Raise ValueError unless the numbers of blocks and lanes are consistent."""
    first, shelf, of_lanes = state.by_block
    number, base, carried, _, _ = state.by_lane
    cells = len(state.by_cell[0])
    if not len(first) or not len(number) or any(len(each) != cells for each in state.by_cell):
        raise ValueError("it has no blocks")
    if first[0] < 0 or first[-1] >= state.rows or (first[1:] <= first[:-1]).any():
        raise ValueError("its blocks are not in the order of their rows")
    if shelf.min() < 0 or shelf.max() >= len(state.shelves):
        raise ValueError("a block refers to a shelf that does not exist")
    check_places(of_lanes, cells)
    lanes = np.diff(of_lanes, append=cells)
    if lanes.min() < 1 or lanes.max() > len(number):
        raise ValueError("a block has more lanes than the index")
    if number.min() < 0 or number.max() >= MOST_LANES or len(np.unique(number)) != len(number):
        raise ValueError("lanes have invalid numbers")
    if base.min() < 0 or base.max() > state.rows or base.sum() > state.rows:
        raise ValueError("lanes have more rows than the index")
    if not first[0] and base.sum() < state.rows:
        raise ValueError("lanes have fewer rows than the index")
    if (carried < 0).any() or (carried > base).any():
        raise ValueError("stretches begin at rows that do not exist")


class RebuiltBlocks(LaneBlocks):
    """Blocks that are rebuilt from the rows, to compare them with saved ones.

    In a ring, facts about overwritten rows are taken from the saved blocks.

    Args:
        ring: see `LaneBlocks`.
        says: the saved blocks, all of whose rows still exist.
    """

    def __init__(self, ring: int, says: BlockState) -> None:
        super().__init__(ring)
        self._says = says
        first, _, of_lanes = says.by_block
        number, cells = says.by_lane[0], len(says.by_cell[0])
        self.lanes = len(number)
        self._known = np.full(int(number.max(initial=0)) + 1, -1)
        self._known[number] = np.arange(self.lanes)
        self._stops = np.append(first[1:], says.rows)
        self._lanes_at = np.append(of_lanes, cells)
        self._tail_id = np.full(self.lanes, NOBODY)
        self._tail_step = np.zeros(self.lanes, np.int64)
        self._unseen = np.full(self.lanes, bool(first[0]))
        self.tail = Tail(int(first[0]))
        if first[0]:
            lanes = int(self._lanes_at[1])
            begun = [np.array(each[:lanes], np.int64) for each in says.by_cell[:3]]
            self.tail.resume(np.stack([*begun, np.zeros(lanes, np.int64)]))
            self._tail_id[:lanes] = begun[2]

    def is_made_of(self, chunk_of: Callable[[int, int], RowChunk]) -> bool | None:
        """Return True if the rows that ``chunk_of`` returns give the same blocks.

        Return None if the first rows were overwritten meanwhile, in which case ``chunk_of`` returns
        fewer rows.
        """
        for block, (first, stop) in enumerate(
            zip(self._says.by_block[0].tolist(), self._stops.tolist(), strict=True)
        ):
            chunk = chunk_of(first, stop)
            if len(chunk.ids) != stop - first:
                return None
            if not self._made(block, chunk):
                return False
        tail, number = self.tail, self._says.by_lane[0]
        tail.know(self.lanes)
        tail.carried_step[: self.lanes][self._unseen] = self._says.by_lane[4][self._unseen]
        self._tail_id = extended(self._tail_id, self.lanes, NOBODY)
        return bool((self.number_of(np.arange(self.lanes)) == number).all()) and self.state().is_as(
            self._says
        )

    def _made(self, block: int, chunk: RowChunk) -> bool:
        lanes = int(self._lanes_at[block + 1] - self._lanes_at[block])
        if lanes < self.tail.lanes or lanes > self.lanes:
            return False
        self.tail.know(lanes)
        lane = chunk.lane
        if lane.min() < 0 or lane.max() >= len(self._known):
            return False
        dense = self._known.take(lane)
        if dense.min() < 0 or dense.max() >= lanes:
            return False
        if self._unseen.any():
            self._suppose(block, dense, chunk.steps)
        self._add(dense, chunk.ids, chunk.steps)
        self._close_block()
        return True

    def _suppose(self, block: int, dense: np.ndarray, steps: np.ndarray) -> None:
        """Assume from the saved blocks which rows continue overwritten rows."""
        says, at = self._says, self._says.by_block[1, block]
        shelf = says.shelves[at]
        slot = int((says.by_block[1, :block] == at).sum())
        rungs, of_rungs = whole(shelf.arrays[0]), whole(shelf.arrays[2])
        starts = rungs[int(of_rungs[slot]) :][: len(dense)]
        if slot + 1 < len(of_rungs):
            starts = starts[: int(of_rungs[slot + 1] - of_rungs[slot])]
        lane, first = np.unique(dense, return_index=True)
        new = self._unseen[lane]
        lane, first = lane[new], first[new]
        place = says.by_cell[3][int(self._lanes_at[block]) + lane]
        begins = np.isin(place, starts)
        self._tail_step[lane] = steps[first] - ~begins
        self._unseen[lane] = False
