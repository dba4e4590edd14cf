"""Copies of rows for readers, whole although a writer may overwrite those of a ring meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tallyroll.storage.engine.columns import Places, PrivateRows
from tallyroll.storage.engine.committed_counts import CommittedCounts, HeaderCounts
from tallyroll.storage.engine.mapped_space import MappedSpace
from tallyroll.storage.engine.pool import BufferPool, Room
from tallyroll.storage.engine.ring import first_valid, in_use, overrun, rows_in, slots_at
from tallyroll.storage.errors import IndexOutOfRange
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.lock import is_held
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.indexing import plain_numbers
from tallyroll.storage.rows.schema import Schema

_PATIENCE_SECONDS = 1.0
_NO_LOCK = nullcontext()


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
        counts: CommittedCounts,
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

    def no_append(self) -> AbstractContextManager[object]:
        """Return the lock that keeps other threads from appending to a ring of this process.

        Hold it while the counts are read and rows are copied. Elsewhere it does nothing: without a
        ring rows do not change, and a writer in another process does not see this lock.
        """
        return self._space.mutex if self._ring and not self._counts.follows else _NO_LOCK

    def private(
        self, slots: slice, only: Places | None = None, head: int | None = None
    ) -> list[np.ndarray]:
        """Return arrays of slots in use, of every column or of some, that the caller may change.

        Changes are seen in these arrays alone. ``head`` is the number of committed rows; None: read
        it.
        """
        space = self._space
        if head is None:
            head = self._header.head
        used = in_use(head, self._ring)
        columns = [column[:used] for column in space.arrays(head)]
        with space.mutex:  # no append of another thread, which looks at them
            return self._lent.rows(columns, slots, only, watched=bool(self._ring))

    def first_shown(self, seen: HeaderCounts) -> int | None:
        """Return the first slot of the valid rows, if they lie side by side in index order.

        Return None if they do not, or may not while they are read.
        """
        if not self._ring:
            return 0
        if self._counts.follows:
            return None
        span = seen.span(self._ring)
        floor = seen.floor % self._ring
        if len(span) == in_use(span.stop, self._ring):  # all slots in use
            return None if floor else 0
        beside = span.start == seen.floor and floor + len(span) <= self._ring
        return floor if beside else None

    def most_rows(self, seen: HeaderCounts) -> int:
        """Return the number of rows, including those that another process is overwriting."""
        ring = self._ring
        return in_use(seen.head, ring) if self._counts.follows else len(seen.span(ring))

    def take(
        self, index: np.ndarray, seen: HeaderCounts, only: Places | None = None
    ) -> list[np.ndarray]:
        """Return arrays [*index.shape, ...], one a column, of the valid rows ``index`` from 0.

        The arrays come from a pool, to which they return when nothing refers to them.

        Args:
            index: int64, below the number of rows that were valid when ``seen`` was read.
            seen: the counts. The caller has held `no_append` since they were read.
            only: the columns that are wanted; None: all.

        Raises:
            IndexOutOfRange: another process, which writes the ring, has overwritten the rows.
        """
        if self._ring and self._counts.follows:
            return self._take_checked(index, seen, only)[0]
        slots = slots_at(index, seen.head, seen.reserve, self._ring, seen.floor)
        return self.gather(slots, only, seen.head)

    def take_into(self, index: Any, room: Room, only: Places | None) -> bool:
        """Copy the valid rows ``index`` [n], from 0, to the arrays [n, ...] of ``room``.

        Return False if they are not copied by one call of the extension: there is none, another
        process writes this ring, its indices are no slots, or ``index`` is not of int64 from 0.
        """
        numbers = plain_numbers(index)
        if numbers is None or len(numbers) != room.count:
            return False
        space = self._space
        if self._ring and self._counts.follows:
            return False
        with self.no_append():
            seen = self._counts.read()
            if seen.floor or seen.head != seen.reserve:
                return False
            space.arrays(seen.head)  # as many are mapped
            rows = in_use(seen.head, self._ring)
            return space.columns.take_compiled(numbers, room, only, rows)

    def take_numbered(
        self, index: np.ndarray, seen: HeaderCounts, only: Places | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Take rows of a ring as `take` does; return their numbers [*index.shape], too."""
        if self._counts.follows:
            return self._take_checked(index, seen, only)
        slots = slots_at(index, seen.head, seen.reserve, self._ring, seen.floor)
        return self.gather(slots, only, seen.head), rows_in(slots, seen.head, self._ring)

    def gather(
        self,
        slots: np.ndarray | Sequence[np.ndarray],
        only: Places | None = None,
        head: int | None = None,
    ) -> list[np.ndarray]:
        """Return arrays [*slots.shape, ...], one a column, of slots in use, from the pool.

        ``slots`` may be one such array for every column; ``only`` as :meth:`take`; ``head`` as
        :meth:`private`.
        """
        columns, pool = self._space.arrays(head), self._pool
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
        self, index: np.ndarray, seen: HeaderCounts, only: Places | None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Copy rows, then read `reserve` again, and copy those again that were overwritten."""
        ring, flat = self._ring, index.reshape(-1)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        seen = self._valid(flat, seen)
        slots = slots_at(flat, seen.head, seen.reserve, ring, seen.floor)
        rows = rows_in(slots, seen.head, ring)
        found = self.gather(slots, only, seen.head)
        while (torn := np.flatnonzero(rows < first_valid(self._header.reserve, ring))).size:
            if time.monotonic() > deadline:
                raise overrun(self._format.path, ring, f"these {len(flat)}")
            seen = self._valid(flat[torn], self._counts.read())
            slots = slots_at(flat[torn], seen.head, seen.reserve, ring, seen.floor)
            rows[torn] = rows_in(slots, seen.head, ring)
            columns = self._space.arrays(seen.head)
            chosen = columns if only is None else [columns[place] for place in only]
            for column, out in zip(chosen, found, strict=True):
                out[torn] = column[slots]
        shaped = [array.reshape(*index.shape, *array.shape[1:]) for array in found]
        return shaped, rows.reshape(index.shape)

    def _valid(self, index: np.ndarray, seen: HeaderCounts) -> HeaderCounts:
        """Return ``seen`` if rows ``index`` are valid by it, else later counts by which they are.

        For a moment, while a writer overwrites the oldest rows, fewer are valid.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while index.size and (last := int(index.max())) >= (count := len(seen.span(self._ring))):
            files = self._format
            if time.monotonic() > deadline or not is_held(files.inside, files.lock_path):
                raise IndexOutOfRange(
                    f"row {last} is not there: {self._format.path} has {count} rows that are whole."
                )
            time.sleep(1e-5)
            seen = self._counts.read()
        return seen
