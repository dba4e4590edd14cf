"""Copies of rows for readers, whole although a writer may overwrite those of a ring meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tallyroll.storage.engine.columns import Places, PrivateRows
from tallyroll.storage.engine.mapped_space import MappedSpace
from tallyroll.storage.engine.pool import BufferPool, Room
from tallyroll.storage.engine.ring import first_valid, in_use, overrun, rows_in, slots_at
from tallyroll.storage.engine.seen_counts import SeenCounts
from tallyroll.storage.errors import IndexOutOfRange
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.lock import is_held
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.indexing import plain_numbers
from tallyroll.storage.rows.schema import Schema

_PATIENCE_SECONDS = 1.0


class RowCopies:
    """Copies the rows of a storage to arrays from pools, or lends them as private memory.

    Args:
        format: its files.
        header: its header.
        schema: its columns.
        counts: which rows there are.
        space: the columns.
        lent: the lender of private memory.
    """

    def __init__(
        self,
        format: Format,
        header: Header,
        schema: Schema,
        counts: SeenCounts,
        space: MappedSpace,
        lent: PrivateRows,
    ) -> None:
        self._format, self._header, self._schema, self._lent = format, header, schema, lent
        self._counts, self._space, self._ring = counts, space, space.ring
        self.follow()

    def follow(self) -> None:
        """Begin with new pools: threads of a parent, which are not here, may have held theirs."""
        self._pool = BufferPool([(c.numpy_dtype, c.shape) for c in self._schema.columns])
        self._pools: dict[Places, BufferPool] = {}
        """The pools for reads of some of the columns, by these columns."""

    def private(self, slots: slice, only: Places | None = None) -> list[np.ndarray]:
        """Return arrays of slots in use, of every column or of some, that the caller may change.

        Changes are seen in these arrays alone.
        """
        space = self._space
        used = in_use(self._header.head, self._ring)
        columns = [column[:used] for column in space.arrays()]
        with space.mutex:  # no append of another thread, which looks at them
            return self._lent.rows(columns, slots, only, watched=bool(self._ring))

    def first_shown(self, span: range) -> int | None:
        """Return the first slot of the valid rows, if they lie side by side in index order.

        Return None if they do not, or may not while they are read.
        """
        if not self._ring:
            return 0
        if self._counts.follows:
            return None
        lowest = self._header.floor
        floor = lowest % self._ring
        if len(span) == in_use(span.stop, self._ring):  # all slots in use
            return None if floor else 0
        beside = span.start == lowest and floor + len(span) <= self._ring
        return floor if beside else None

    def most_rows(self, span: range) -> int:
        """Return the number of rows, those that a writer is overwriting included."""
        return in_use(span.stop, self._ring) if self._counts.follows else len(span)

    def take(self, index: np.ndarray, only: Places | None = None) -> list[np.ndarray]:
        """Return arrays [*index.shape, ...], one a column, of the valid rows ``index`` from 0.

        ``only`` are the columns that are wanted; None: all.

        The arrays come from a pool, to which they return when nothing refers to them.

        Raises:
            IndexOutOfRange: another process, which writes the ring, has overwritten the rows.
        """
        if not self._ring:
            return self.gather(index, only)
        counts = self._counts
        if counts.follows:
            return self._take_checked(index, only)[0]
        with self._space.mutex:  # no append of another thread
            return self.gather(slots_at(index, *counts.now(), self._ring, self._header.floor), only)

    def take_into(self, index: Any, room: Room, only: Places | None) -> bool:
        """Copy the valid rows ``index`` [n], from 0, to the arrays [n, ...] of ``room``.

        Return False if they are not copied by one call of the extension: there is none, another
        process writes this ring, its indices are no slots, or ``index`` is not of int64 from 0.
        """
        numbers = plain_numbers(index)
        if numbers is None or len(numbers) != room.count:
            return False
        counts, space = self._counts, self._space
        if not self._ring:
            rows = counts.head
            space.arrays()  # as many are mapped
            return space.columns.take_compiled(numbers, room, only, rows)
        if counts.follows or counts.floor:
            return False
        with space.mutex:  # no append of another thread
            head, reserve = counts.now()
            whole = head == reserve
            return whole and space.columns.take_compiled(
                numbers, room, only, in_use(head, self._ring)
            )

    def take_numbered(
        self, index: np.ndarray, only: Places | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Take rows of a ring as `take` does; return their numbers [*index.shape], too."""
        counts = self._counts
        if counts.follows:
            return self._take_checked(index, only)
        with self._space.mutex:
            head, reserve = counts.now()
            slots = slots_at(index, head, reserve, self._ring, self._header.floor)
            return self.gather(slots, only), rows_in(slots, head, self._ring)

    def gather(
        self, slots: np.ndarray | Sequence[np.ndarray], only: Places | None = None
    ) -> list[np.ndarray]:
        """Return arrays [*slots.shape, ...], one a column, of slots in use, from the pool.

        ``slots`` may be one such array for every column; ``only`` as :meth:`take`.
        """
        columns, pool = self._space.arrays(), self._pool
        if only is not None:
            columns, pool = [columns[place] for place in only], self._pool_of(only)
        places = [slots] * len(columns) if isinstance(slots, np.ndarray) else slots
        found, room = pool.room(places[0].shape)
        if isinstance(slots, np.ndarray) and self._space.columns.take_compiled(slots, room, only):
            return found
        for column, where, out in zip(columns, places, found, strict=True):
            # Indices were checked: "clip" is the mode in which NumPy writes to out directly.
            column.take(where, axis=0, out=out, mode="clip")
        return found

    def _pool_of(self, only: Places) -> BufferPool:
        pool = self._pools.get(only)
        if pool is None:
            columns = [self._schema.columns[place] for place in only]
            pool = self._pools[only] = BufferPool([(c.numpy_dtype, c.shape) for c in columns])
        return pool

    def _take_checked(
        self, index: np.ndarray, only: Places | None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Copy rows, look again, and copy those again that the writer overwrote meanwhile."""
        ring, header = self._ring, self._header
        flat = index.reshape(-1)
        slots = self._slots_in_time(flat)
        rows = rows_in(slots, header.head, ring)
        found = self.gather(slots, only)
        every = self._space.columns.arrays
        columns = every if only is None else [every[place] for place in only]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (torn := np.flatnonzero(rows < first_valid(header.reserve, ring))).size:
            if time.monotonic() > deadline:
                raise overrun(self._format.path, ring, f"these {len(flat)}")
            slots[torn] = self._slots_in_time(flat[torn])
            rows[torn] = rows_in(slots[torn], header.head, ring)
            for column, out in zip(columns, found, strict=True):
                out[torn] = column[slots[torn]]
        shaped = [array.reshape(*index.shape, *array.shape[1:]) for array in found]
        return shaped, rows.reshape(index.shape)

    def _slots_in_time(self, index: np.ndarray) -> np.ndarray:
        """Return the slots of valid rows ``index``, waiting while a writer overwrites the oldest.

        For a moment fewer rows are valid then.
        """
        counts, header = self._counts, self._header
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            floor = header.floor  # first, for then it is below what is valid by the counts
            head, reserve = counts.now()
            count = head - min(head, first_valid(reserve, self._ring))
            if not index.size or (last := int(index.max())) < count:
                return slots_at(index, head, reserve, self._ring, floor).copy()
            files = self._format
            if time.monotonic() > deadline or not is_held(files.inside, files.lock_path):
                raise IndexOutOfRange(
                    f"row {last} is not there: {self._format.path} has {count} rows that are whole."
                )
            time.sleep(1e-5)
