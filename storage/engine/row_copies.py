"""Consistent copies of rows for readers, even if a writer overwrites a ring meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tallyroll.storage.engine.columns import Places, PrivateRows
from tallyroll.storage.engine.committed_counts import CommittedCounts, HeaderCounts
from tallyroll.storage.engine.frame_pools import FramePools, PoolFile
from tallyroll.storage.engine.mapped_space import MappedSpace
from tallyroll.storage.engine.pool import BufferPool, ColumnMemory
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
    """Copies rows of a storage to pooled arrays, and lends the rows as private memory.

    Args:
        format: the files of the storage.
        header: the header of the storage.
        schema: the schema of the storage.
        counts: the counts of the valid rows.
        space: the columns.
        lent: the lender of private memory.
        pools: the frame pools; None if no column is stored once.
    """

    def __init__(
        self,
        format: Format,
        header: Header,
        schema: Schema,
        counts: CommittedCounts,
        space: MappedSpace,
        lent: PrivateRows,
        pools: FramePools | None = None,
    ) -> None:
        self._format, self._header, self._schema, self._lent = format, header, schema, lent
        self._counts, self._space, self._ring, self._frames = counts, space, space.ring, pools
        self.follow()

    def follow(self) -> None:
        """Create new pools: in a forked child, a thread of the parent may hold the old locks."""
        self._pool = BufferPool([(c.numpy_dtype, c.shape) for c in self._schema.columns])
        self._pools: dict[Places, BufferPool] = {}
        """The pools for reads of a selection of columns, by selection."""

    def append_lock(self) -> AbstractContextManager[object]:
        """Return the lock that prevents other threads of this process from appending to a ring.

        Hold the lock while the counts are read and rows are copied. In other cases the result does
        nothing: without a ring, rows do not change, and a writer in another process does not use
        this lock.
        """
        return self._space.mutex if self._ring and not self._counts.follows else _NO_LOCK

    def private(
        self,
        slots: slice,
        only: Places | None = None,
        head: int | None = None,
        *,
        defers: bool = False,
    ) -> list[Any]:
        """Return slots in use as arrays that the caller may change.

        Changes are visible only in these arrays. ``only`` selects some of the columns. ``head`` is
        the number of committed rows; if it is None, it is read from the header. If ``defers`` is
        True, large columns that are stored once are returned as tensors that are decoded on first
        use.
        """
        space = self._space
        if head is None:
            head = self._header.head
        used = in_use(head, self._ring)
        columns = [column[:used] for column in space.arrays(head)]
        with space.mutex:  # prevents appends of other threads, which read the leases
            pools = self._frames
            if pools is None:
                return self._lent.rows(columns, slots, only, watched=bool(self._ring))
            places = tuple(range(len(columns))) if only is None else only
            plain = tuple(place for place in places if place not in pools.of_place)
            found: dict[int, Any] = {}
            if plain:
                lent = self._lent.rows(columns, slots, plain, watched=bool(self._ring))
                found = dict(zip(plain, lent, strict=True))
            once = [place for place in places if place in pools.of_place]
            if defers:
                deferred = pools.deferred(columns, slots, once)
                found |= deferred
                once = [place for place in once if place not in deferred]
            found |= pools.decoded(columns, slots, once)
            return [found[place] for place in places]

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
        self,
        index: np.ndarray,
        seen: HeaderCounts,
        only: Places | None = None,
        room: ColumnMemory | None = None,
    ) -> list[np.ndarray]:
        """Return valid rows as arrays [*index.shape, ...], one per column.

        The arrays are those of ``room``, or come from a pool, to which they return when nothing
        refers to them.

        Args:
            index: the indices of the rows among the valid rows, int64 from 0 to below the number of
                rows that were valid when ``seen`` was read.
            seen: the counts. The caller has held `append_lock` since they were read.
            only: the positions of the columns; None: all.
            room: arrays [n, ...] to copy to, for an ``index`` [n]; None: pooled arrays.

        Raises:
            IndexOutOfRange: another process, which writes the ring, has overwritten the rows.
        """
        if self._ring and self._counts.follows:
            return self._take_checked(index, seen, only, room)[0]
        slots = slots_at(index, seen.head, seen.reserve, self._ring, seen.floor)
        return self.gather(slots, only, seen.head, room)

    def take_into(self, index: Any, room: ColumnMemory, only: Places | None) -> bool:
        """Copy the valid rows ``index`` [n], counted from 0, to the arrays [n, ...] of ``room``.

        Return False if one call of the extension cannot copy the rows: there is no extension,
        frames are stored once, another process writes this ring, indices of the ring differ from
        slots, or ``index`` is not an int64 array of indices from 0 on.
        """
        numbers = plain_numbers(index)
        if numbers is None or len(numbers) != room.count or self._frames is not None:
            return False
        space = self._space
        if self._ring and self._counts.follows:
            return False
        with self.append_lock():
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
        room: ColumnMemory | None = None,
    ) -> list[np.ndarray]:
        """Return arrays [*slots.shape, ...], one per column, of slots in use.

        ``slots`` may be a sequence with one array for each column. For ``only`` and ``room`` see
        :meth:`take`, and for ``head`` see :meth:`private`.
        """
        columns = self._space.arrays(head)
        if only is not None:
            columns = [columns[place] for place in only]
        places = [slots] * len(columns) if isinstance(slots, np.ndarray) else slots
        if room is not None:
            found = room.arrays
        else:
            found, room = self._pool_of(only).room(places[0].shape)
        if self._frames is not None:
            self._copy_to(found, columns, places, only)
            return found
        if isinstance(slots, np.ndarray) and self._space.columns.take_compiled(slots, room, only):
            return found
        for column, where, out in zip(columns, places, found, strict=True):
            # The indices were checked. With mode "clip", NumPy writes directly to out.
            column.take(where, axis=0, out=out, mode="clip")
        return found

    def _copy_to(
        self,
        found: Sequence[np.ndarray],
        columns: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        only: Places | None,
    ) -> None:
        """Copy rows in slots to the arrays ``found``, and decode columns that are stored once."""
        assert self._frames is not None
        of_place = self._frames.of_place
        places = range(len(columns)) if only is None else only
        of_pools: dict[PoolFile, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        for place, column, where, out in zip(places, columns, slots, found, strict=True):
            if place in of_place:
                positions, outs = of_pools.setdefault(of_place[place], ([], []))
                positions.append(column.take(where, axis=0, mode="clip"))
                outs.append(out)
            else:
                column.take(where, axis=0, out=out, mode="clip")
        for pool, (positions, outs) in of_pools.items():  # an observation with its next one
            pool.read(np.concatenate(positions, axis=-1), *outs)

    def _pool_of(self, only: Places | None) -> BufferPool:
        if only is None:
            return self._pool
        pool = self._pools.get(only)
        if pool is None:
            columns = [self._schema.columns[place] for place in only]
            pool = self._pools[only] = BufferPool([(c.numpy_dtype, c.shape) for c in columns])
        return pool

    def _take_checked(
        self,
        index: np.ndarray,
        seen: HeaderCounts,
        only: Places | None,
        room: ColumnMemory | None = None,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Copy rows, and repeat the copy of those that were overwritten meanwhile.

        The count `reserve`, read after a copy, shows which rows of the copy are complete. After a
        copy with overwritten rows, half as many rows are copied at a time, so that a fast writer
        cannot overwrite a row of every copy.
        """
        ring, flat = self._ring, index.reshape(-1)
        seen = self._valid(flat, seen)
        slots = slots_at(flat, seen.head, seen.reserve, ring, seen.floor)
        rows = rows_in(slots, seen.head, ring)
        found = self.gather(slots, only, seen.head, room)
        left = np.flatnonzero(rows < first_valid(self._header.reserve, ring))
        count, deadline = len(left), time.monotonic() + _PATIENCE_SECONDS
        while left.size:
            some, left = left[:count], left[count:]
            seen = self._valid(flat[some], self._counts.read())
            slots = slots_at(flat[some], seen.head, seen.reserve, ring, seen.floor)
            rows[some] = rows_in(slots, seen.head, ring)
            for again, out in zip(self.gather(slots, only, seen.head), found, strict=True):
                out[some] = again
            torn = rows[some] < first_valid(self._header.reserve, ring)
            if not torn.all():
                deadline = time.monotonic() + _PATIENCE_SECONDS
            elif time.monotonic() > deadline:
                raise overrun(self._format.path, ring, f"these {len(flat)} rows")
            if torn.any():
                left = np.concatenate([some[torn], left])
                count = max(1, len(some) // 2)
        shaped = [array.reshape(*index.shape, *array.shape[1:]) for array in found]
        return shaped, rows.reshape(index.shape)

    def _valid(self, index: np.ndarray, seen: HeaderCounts) -> HeaderCounts:
        """Return ``seen`` if it includes the valid rows ``index``, or else later counts that do.

        While a writer overwrites the oldest rows, fewer rows are valid for a moment.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while index.size and (last := int(index.max())) >= (count := len(seen.span(self._ring))):
            files = self._format
            if time.monotonic() > deadline or not is_held(files.inside, files.lock_path):
                raise IndexOutOfRange(
                    f"row {last} is out of range: {self._format.path} has {count} complete rows."
                )
            time.sleep(1e-5)
            seen = self._counts.read()
        return seen
