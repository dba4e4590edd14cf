"""Writers of packed columns, as plain arrays or as states and frames.

The planner inspects samples of rows. It packs a column as states if most of these rows begin with
the next state of the row before, and as frames if most states are the previous state with one new
frame. Rows for which this does not hold take more space, but are stored without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np

from tallyroll.storage.ext.packed.codecs import Codec
from tallyroll.storage.ext.packed.layout import (
    ArrayLayout,
    ColumnLayout,
    Layout,
    StatesLayout,
    pair_of,
)
from tallyroll.storage.ext.packed.shards import ChunkWriter
from tallyroll.storage.ext.packed.stacks import (
    FrameWriter,
    StateWriter,
    by_frame,
    follows,
    frame_shape,
    in_order,
    same_bits,
)
from tallyroll.storage.rows.frame_stacks import FrameStack as FrameStack  # pickles name it here
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Column, Schema

MakeWriter: TypeAlias = Callable[[ArrayLayout], ChunkWriter]
Values: TypeAlias = Callable[[Key], np.ndarray]
"""Function that returns some rows of a column [n, ...]."""
Read: TypeAlias = Callable[[Key, np.ndarray], np.ndarray]
"""Function that returns the rows with numbers [n] of a column [n, ...].

The result is valid until the next call.
"""

_BLOCK_NBYTES: Final = 2**21
"""Size in bytes of the blocks in which a column is read, so that they stay in the CPU cache."""
_LONG, _WIDE_NBYTES = 16, 2**10
"""Minimum number of consecutive rows, and minimum bytes per row, for reading them in place."""

_MOST_FRAMES: Final = 16
_LEAST_FRAME_NBYTES: Final = 16


@dataclass(frozen=True)
class ColumnPlan:
    """Plan for packing a column, together with its column in ``next`` if the two share states."""

    column: Column
    next: Column | None = None
    n: int = 1
    axis: int = 0


def planned(
    schema: Schema,
    looks: Sequence[Values],
    *,
    once: bool,
    stacks: Mapping[Key, tuple[int, int]] | None,
) -> list[ColumnPlan]:
    """Plan how to pack columns.

    Args:
        schema: the columns.
        looks: samples of consecutive rows, in packing order.
        once: True: store the states of a column once if it mostly shares them with its column in
            ``next``.
        stacks: the number of frames and the axis of stacked columns; None: detect them.
    """
    columns = {each.key: each for each in schema.columns}
    taken: set[Key] = set()
    found = []
    for key, column in columns.items():
        if key in taken:
            continue
        after = columns.get(pair_of(key))
        if after is not None and (after.dtype, after.shape) != (column.dtype, column.shape):
            after = None
        if not (once and after is not None and _mostly(_continues(look, key) for look in looks)):
            after = None
        plan = ColumnPlan(column, after)
        if after is not None:
            taken.add(after.key)
        if stacks is None:
            plan = _looked_at(plan, looks)
        elif key in stacks:
            n, axis = stacks[key]
            plan = replace(plan, n=n, axis=axis)
        found.append(plan)
    # Drop the plans of columns in `next` that another plan includes; keep the order of the schema.
    return [plan for plan in found if plan.column.key not in taken]


def _continues(look: Values, key: Key) -> np.ndarray:
    return same_bits(look(key)[1:], look(pair_of(key))[:-1])


def _mostly(found: Any) -> bool:
    every = np.concatenate([np.zeros(0, np.bool_), *found])
    return len(every) > 0 and 2 * int(every.sum()) >= len(every)


def _looked_at(plan: ColumnPlan, looks: Sequence[Values]) -> ColumnPlan:
    """Add the number of frames and the axis to a plan if the values look like stacked frames."""
    shape = plan.column.shape
    for axis in dict.fromkeys((0, len(shape) - 1)) if len(shape) > 1 else ():
        n = shape[axis]
        if not 2 <= n <= _MOST_FRAMES or plan.column.row_nbytes // n < _LEAST_FRAME_NBYTES:
            continue
        pairs = [_pairs(plan, look, n, axis) for look in looks]
        moves = any(not same_bits(before, after).all() for before, after in pairs if len(before))
        if moves and _mostly(follows(before, after) for before, after in pairs):
            return replace(plan, n=n, axis=axis)
    return plan


def _pairs(plan: ColumnPlan, look: Values, n: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    root = by_frame(look(plan.column.key), n, axis)
    if plan.next is None:
        return root[:-1], root[1:]
    return root, by_frame(look(plan.next.key), n, axis)


class PackedWriter:
    """Writer of the columns of a packed storage, one block of rows after the other.

    Args:
        schema: the columns.
        plans: the plan of each column.
        codec: a function that returns the codec of a column.
        make: a factory of array writers.
        first: the number of the first row.
    """

    def __init__(
        self,
        schema: Schema,
        plans: Sequence[ColumnPlan],
        codec: Callable[[Column], Codec],
        make: MakeWriter,
        first: int = 0,
    ) -> None:
        self._schema, self._make, self._first = schema, make, first
        self.writers: list[ChunkWriter] = []
        self._columns: dict[Key, ColumnLayout] = {}
        self._states: list[_States] = []
        self._plain: list[tuple[Key, ChunkWriter]] = []
        for plan in plans:
            self._add(plan, codec(plan.column))
        old_rows = ArrayLayout.of(("tallyroll", "row"), np.int64, (), 0, codec_of_numbers(make))
        self.old_rows = self.array(old_rows)
        self.rows = 0

    def _add(self, plan: ColumnPlan, codec: Codec) -> None:
        column, key = plan.column, plan.column.key
        if plan.next is None and plan.n == 1:
            layout = ArrayLayout.of(key, column.numpy_dtype, column.shape, 0, codec)
            place = self.array(layout)
            self._columns[key] = ColumnLayout(array=place)
            self._plain.append((key, self.writers[place]))
            return
        self._columns[key] = ColumnLayout(states=len(self._states))
        if plan.next is not None:
            self._columns[plan.next.key] = ColumnLayout(states=len(self._states), is_next=True)
        self._states.append(_States(plan, codec, self))

    def array(self, layout: ArrayLayout) -> int:
        """Add an array and return its index."""
        self.writers.append(self._make(layout))
        return len(self.writers) - 1

    def append(self, rows: np.ndarray, read: Read) -> None:
        """Write the next rows, whose numbers in the source are ``rows`` [n]."""
        for key, writer in self._plain:
            for piece in pieces(rows, writer.layout.row_nbytes):
                writer.append(read(key, piece))
        for states in self._states:
            for piece in pieces(rows, states.row_nbytes):
                states.append(partial(_of_rows, read, piece))
        self.writers[self.old_rows].append(rows)
        self.rows += len(rows)

    def finish(self) -> Layout:
        """Write the remaining data, and return the layout."""
        states = tuple(each.finish() for each in self._states)
        for writer in self.writers:
            writer.finish()
        arrays = tuple(each.layout.with_rows(each.rows) for each in self.writers)
        columns = tuple(self._columns[key] for key in self._schema.keys)
        return Layout(self.rows, arrays, states, columns, self.old_rows, self._first)

    def abandon(self) -> None:
        """Close all files."""
        for writer in self.writers:
            writer.abandon()


def _of_rows(read: Read, rows: np.ndarray, key: Key) -> np.ndarray:
    return read(key, rows)


def pieces(rows: np.ndarray, row_nbytes: int) -> Iterator[np.ndarray]:
    """Split row numbers into pieces, so that long runs of consecutive wide rows stay together."""
    most = max(1, _BLOCK_NBYTES // row_nbytes)
    ends = [0, len(rows)]
    if row_nbytes >= _WIDE_NBYTES:
        cuts = np.concatenate([[0], np.flatnonzero(np.diff(rows) != 1) + 1, [len(rows)]])
        long = np.flatnonzero(np.diff(cuts) >= _LONG)
        ends = np.unique(np.concatenate([ends, cuts[long], cuts[long + 1]])).tolist()
    for begin, end in pairwise(ends):
        for start in range(begin, end, most):
            yield rows[start : min(start + most, end)]


def codec_of_numbers(make: MakeWriter) -> Codec:
    """Return the codec of row numbers for the writers that ``make`` creates."""
    return Codec.of("gzip" if getattr(make, "hdf5", False) else "shuffle")


class _States:
    """Writer of the states of a column and of its column in ``next``."""

    def __init__(self, plan: ColumnPlan, codec: Codec, packing: PackedWriter) -> None:
        self._plan, self._packing = plan, packing
        column = plan.column
        self.row_nbytes = column.row_nbytes
        """Bytes per row of the input."""
        shape = frame_shape(column.shape, plan.n, plan.axis) if plan.n > 1 else column.shape
        path = (*column.key, "frames")
        self._frames = packing.array(ArrayLayout.of(path, column.numpy_dtype, shape, 0, codec))
        self._found, self._stacks = StateWriter(), FrameWriter()
        self._breaks: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        self._rows = 0

    def append(self, values: Values) -> None:
        """Write the next rows."""
        plan = self._plan
        root = values(plan.column.key)
        writer = self._packing.writers[self._frames]
        if plan.next is None:
            goes_on = np.ones(len(root), np.bool_)
            frames, starts = self._stacks.add(by_frame(root, plan.n, plan.axis), goes_on)
            self._starts.append(starts)
            writer.append(frames)
        else:
            after = values(plan.next.key)
            own = self._found.breaks(root, after)
            self._breaks.append(self._rows + np.flatnonzero(own))
            if plan.n == 1:
                writer.append(in_order(root, after, own))
            else:
                writer.append(self._new_frames(root, after, own))
        self._rows += len(root)

    def _new_frames(self, root: np.ndarray, after: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Return the frames that the states of these rows add."""
        plan = self._plan
        root, after = (by_frame(each, plan.n, plan.axis) for each in (root, after))
        follow = in_order(np.zeros(len(own), np.bool_), follows(root, after), own)
        at = np.arange(len(own)) + np.cumsum(own)

        def stack(state: int) -> np.ndarray:
            row = int(np.searchsorted(at, state))
            found: np.ndarray = (after if at[row] == state else root)[row]
            return found

        newest = in_order(root[:, -1], after[:, -1], own)
        frames, starts = self._stacks.of(newest, follow, stack)
        self._starts.append(starts)
        return frames

    def finish(self) -> StatesLayout:
        """Write the tables of breaks and starts, and return the layout."""
        plan, packing = self._plan, self._packing
        breaks = starts = None
        if plan.next is not None:
            breaks = self._table("breaks", self._breaks, ())
        if plan.n > 1:
            starts = self._table("starts", self._starts, (4,))
        states = self._found.states if plan.next is not None else packing.rows
        return StatesLayout(self._frames, states, breaks, starts, plan.n, plan.axis)

    def _table(self, name: str, parts: list[np.ndarray], shape: tuple[int, ...]) -> int:
        packing = self._packing
        codec = packing.writers[packing.old_rows].layout.codec
        path = (*self._plan.column.key, name)
        place = packing.array(ArrayLayout.of(path, np.int64, shape, 0, codec))
        for part in parts:
            packing.writers[place].append(part)
        return place
