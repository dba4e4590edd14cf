"""Consistent copies of rows for readers, even if a writer overwrites a ring meanwhile."""

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
    """Copier of the rows of a storage to pooled arrays, and lender of them as private memory.

    Args:
        format: the files of the storage.
        header: the header of the storage.
        schema: the schema of the storage.
        counts: the counts of the valid rows.
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
        """Create new pools, since a thread of a forked child's parent may hold the old locks."""
        self._pool = BufferPool([(c.numpy_dtype, c.shape) for c in self._schema.columns])
        self._pools: dict[Places, BufferPool] = {}
        """The pools for reads of some columns, by these columns."""

    def no_append(self) -> AbstractContextManager[object]:
        """Return the lock that prevents other threads of this process from appending to a ring.

        Hold it while the counts are read and rows are copied. In other cases it does nothing:
        without a ring rows do not change, and a writer in another process does not use this lock.
        """
        return self._space.mutex if self._ring and not self._counts.follows else _NO_LOCK

    def private(
        self, slots: slice, only: Places | None = None, head: int | None = None
    ) -> list[np.ndarray]:
        """Return arrays of slots in use, of all columns or of ``only`` some, that the caller may
        change.

        Changes are visible only in these arrays. ``head`` is the number of committed rows; None:
        read it from the header.
        """
        space = self._space
        if head is None:
            head = self._header.head
        used = in_use(head, self._ring)
        columns = [column[:used] for column in space.arrays(head)]
        with space.mutex:  # prevents appends of other threads, which read the leases
            return self._lent.rows(columns, slots, only, watched=bool(self._ring))

    def first_shown(self, seen: HeaderCounts) -> int | None:
        """Return the first slot of the valid rows, if they are contiguous and in index order.

        Return None if they are not, or may change while they are read.
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
        """Return arrays [*index.shape, ...], one per column, of the valid rows ``index`` from 0.

        The arrays come from a pool, to which they return when nothing refers to them.

        Args:
            index: int64, below the number of rows that were valid when ``seen`` was read.
            seen: the counts. The caller has held `no_append` since they were read.
            only: the positions of the columns; None: all.

        Raises:
            IndexOutOfRange: another process, which writes the ring, has overwritten the rows.
        """
        if self._ring and self._counts.follows:
            return self._take_checked(index, seen, only)[0]
        slots = slots_at(index, seen.head, seen.reserve, self._ring, seen.floor)
        return self.gather(slots, only, seen.head)

    def take_into(self, index: Any, room: Room, only: Places | None) -> bool:
        """Copy the valid rows ``index`` [n], from 0, to the arrays [n, ...] of ``room``.

        Return False if one call of the extension cannot copy them: there is no extension, another
        process writes this ring, its indices are not slots, or ``index`` is not int64 from 0.
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
            space.arrays(seen.head)  # ensures that all of the rows are mapped
            rows = in_use(seen.head, self._ring)
            return space.columns.take_compiled(numbers, room, only, rows)

    def take_numbered(
        self, index: np.ndarray, seen: HeaderCounts, only: Places | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Copy rows of a ring as `take` does, and also return their numbers [*index.shape]."""
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
        """Return pooled arrays [*slots.shape, ...], one per column, of slots in use.

        ``slots`` may be a sequence with one array for each column. For ``only`` see :meth:`take`,
        and for ``head`` see :meth:`private`.
        """
        columns, pool = self._space.arrays(head), self._pool
        if only is not None:
            columns, pool = [columns[place] for place in only], self._pool_of(only)
        places = [slots] * len(columns) if isinstance(slots, np.ndarray) else slots
        found, room = pool.room(places[0].shape)
        if isinstance(slots, np.ndarray) and self._space.columns.take_compiled(slots, room, only):
            return found
        for column, where, out in zip(columns, places, found, strict=True):
            # The indices were checked. With mode "clip", NumPy writes directly to out.
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
        """Copy rows, then read `reserve` again and repeat the copy of overwritten rows."""
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
        """Return ``seen`` if rows ``index`` are valid by it, else later counts that include them.

        While a writer overwrites the oldest rows, fewer rows are valid for a moment.
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
