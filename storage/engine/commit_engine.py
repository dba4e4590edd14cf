"""Commits of rows to memory maps, common to all formats.

A `Format` defines the place of each slot of each column. The engine makes room for `NewRows`, which
copy themselves to their slots, and commits them. In a ring, slots are reused (see `ring`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Literal, TypeAlias

import numpy as np

from tallyroll.storage.engine.columns import ArrayRows, NewRows, PrivateRows, StepwiseRows
from tallyroll.storage.engine.committed_counts import CommittedCounts
from tallyroll.storage.engine.frame_pools import FramePools
from tallyroll.storage.engine.mapped_space import MappedSpace
from tallyroll.storage.engine.once_columns import OnceColumn, stored_schema
from tallyroll.storage.engine.ring import first_valid, in_use, pieces, slots_of
from tallyroll.storage.engine.row_copies import RowCopies
from tallyroll.storage.engine.writer_check import WritePermission
from tallyroll.storage.errors import StorageError
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.lock import ReaderLock, WriterLock
from tallyroll.storage.files.record_slots import RECORD_LIMIT, Rewind, check_record_size
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.schema import Schema

Durability: TypeAlias = Literal["process", "power"]

_REFRESH_SECONDS = 1.0
_CHUNK_NBYTES = 2**26


class Engine:
    """Engine of an open storage, which appends, commits and rewinds rows.

    Args:
        format: the open files of the storage.
        header: the header of the storage.
        schema: the schema of the storage.
        lock: the writer lock, or None for a reader.
        durability: the failures that a commit survives: the death of any process, or also a power
            cut.
        once: the columns that are stored once.
    """

    def __init__(
        self,
        format: Format,
        header: Header,
        schema: Schema,
        *,
        lock: WriterLock | None,
        durability: Durability = "process",
        once: Sequence[OnceColumn] = (),
    ) -> None:
        self.schema, self.keys, self.ring = schema, schema.keys, header.ring
        self.once = tuple(once)
        stored = stored_schema(schema, once)
        self._format, self._header, self._lock = format, header, lock
        self._power = durability == "power"
        self._private = PrivateRows(format, stored)
        self.counts = CommittedCounts(header, follows=lock is None)
        self.right = WritePermission(lock, format.path)
        self.space = MappedSpace(
            format,
            stored,
            header,
            "read" if lock is None else "write",
            one_call=lock is not None and not self._power and not once,
        )
        self.pools = FramePools(format, schema, once, writable=lock is not None) if once else None
        self.copies = RowCopies(
            format, header, schema, self.counts, self.space, self._private, self.pools
        )
        self._refresh_at = time.monotonic() + _REFRESH_SECONDS
        self.known = header.known
        """The counts that a writer caches.

        Hot path: the engine counts commits here directly, because a method call would be slower."""
        follows_ring = lock is None and self.ring
        self._reader = ReaderLock(format.inside, format.lock_path) if follows_ring else None
        if lock is not None:
            header.forget_uncommitted()
            if header.undone is None:
                header.finish_rewind()  # a writer was killed before the rewind was committed
            if self.ring and header.reserve == header.head + self.ring:
                header.set_floor(header.head)  # a writer was killed before it stored the floor
            lock.call_when_lost(self._follow)
        self._kept = self.space.columns.room if header.rewinds or header.undone else 0
        """The number of slots to keep in the files, because readers may look at rewound rows."""

    def _follow(self) -> None:
        # Called in a forked child, whose parent continues to write.
        for each in (self.counts, self.space, self.copies):
            each.follow()
        if self.pools is not None:
            self.pools.follow()
        self.right.drop()

    # --- commits ----------------------------------------------------------------------------------

    def append(self, rows: NewRows, record: bytes | None = None) -> range:
        """Append ``rows`` and commit them together with ``record``.

        The order of the steps ensures that a kill at any point leaves either all rows or none.
        First ``reserve`` marks the slots that may be overwritten, then the rows are copied and the
        record is written. Storing ``head`` last makes the rows and the record valid.

        Returns:
            The numbers of the rows. If the rows are not `StepwiseRows` and `NewRows.commit`
            returns False, nothing is done and the range is empty.

        Raises:
            WriteError: the append was refused and nothing was changed.
            StorageFull: there is no space for the rows. For the space of frames that are stored
                once, see `FramePools.placed`.
        """
        space, header = self.space, self._header
        if (now := time.monotonic()) >= self.right.look_at:
            self.right.look()
        if record is not None and len(record) > RECORD_LIMIT:
            check_record_size(record)
        with space.mutex:
            start, count, columns = self.known.head, rows.count, space.columns
            stop, slot = start + count, start % self.ring if self.ring else start
            if not count:
                if record is not None:
                    self.put_record(record)
                return range(start, start)
            if self._private.watches:
                rows = rows.without_overlap(self._private)
            in_place = columns.in_place(slot, count)
            if not (in_place and rows.in_one_call and rows.commit(columns, header, slot, record)):
                if not isinstance(rows, StepwiseRows):
                    return range(start, start)
                if self.pools is not None:
                    self._append_placed(self.pools, rows.as_arrays(), start, record)
                else:
                    places = ((slot, rows),) if in_place else self._places(rows, start, stop)
                    self._reserve(start, stop)
                    for slot, piece in places:
                        piece.copy_to(space.columns, slot)
                    self._commit(start, stop, record)
            if stop >= space.warm_at and not space.columns.warm:
                space.columns.mark_warm()
            if now >= self._refresh_at:
                self._refresh(stop)
            return range(start, stop)

    def _append_placed(
        self, pools: FramePools, rows: ArrayRows, start: int, record: bytes | None
    ) -> None:
        """Append rows whose frames go to the pools, with the steps of `append`.

        Frames are written after `reserve` is stored, because they reuse segments that only
        overwritten rows need.
        """
        space, stop = self.space, start + rows.count
        space.make_for(rows.count, stop)
        self._reserve(start, stop)
        oldest = min(start, first_valid(self._header.reserve, self.ring))
        try:
            placed = pools.placed(rows, start, oldest, space.columns.arrays, self.ring)
            for slot, first, count in pieces(start, stop, self.ring):
                placed.part(first, count).copy_to(space.columns, slot)
            self._commit(start, stop, record)
        except BaseException:
            pools.forget()
            raise

    def _sync_rows(self, start: int = 0) -> None:
        """Wait until all rows are on the disk. Rows before ``start`` were synced earlier."""
        self._format.sync(start)
        if self.pools is not None:
            self.pools.sync()

    def _places(
        self, rows: StepwiseRows, start: int, stop: int
    ) -> Sequence[tuple[int, StepwiseRows]]:
        """Make room for many rows; return them in one or two pieces, each with its first slot."""
        arrays, slot = rows.as_arrays(), slots_of(start, self.ring)
        if slot + rows.count <= self.space.columns.room:
            return [(slot, arrays)]
        self.space.make_for(rows.count, stop)
        return [
            (slot, arrays.part(first, count))
            for slot, first, count in pieces(start, stop, self.ring)
        ]

    def _reserve(self, start: int, stop: int) -> None:
        header = self._header
        reserve = header.reserve
        if reserve != start:  # an earlier append was interrupted
            header.forget_uncommitted()
            if self._power:  # otherwise a power cut could revive the record of uncommitted rows
                header.sync()
        if reserve < stop:
            header.set_reserve(stop)
        if self._power and self.ring and stop > self.ring:
            header.sync()

    def _commit(self, start: int, stop: int, record: bytes | None) -> None:
        header = self._header
        if record is not None:
            header.write_record(record, stop)
        if self._power:
            self._sync_rows(in_use(start, self.ring))
            if record is not None:  # otherwise `head` may reach the disk first
                header.sync()
        if time.monotonic() >= self.right.look_at:
            self.right.look()  # the sync took long, and another process may be writing by now
        header.set_head(stop)
        if self._power:
            try:
                header.sync()
            except StorageError:
                header.set_head(
                    start
                )  # the rows are not committed, and the next append starts here
                raise
        self.known.commits += 1

    def _refresh(self, head: int) -> None:
        self._refresh_at = time.monotonic() + _REFRESH_SECONDS
        # The rows are committed even if this fails. In that case other libraries see an outdated
        # but correct state. flush() and close() raise such an error.
        with suppress(StorageError, OSError):
            self._format.publish(in_use(head, self.ring))

    def put_record(self, record: bytes) -> None:
        """Commit a record without rows."""
        self.right.require()
        with self.space.mutex:
            header = self._header
            if header.reserve != header.head:  # otherwise the last good record would be overwritten
                header.forget_uncommitted()
            header.write_record(record, header.head)
            if self._power:
                header.sync()

    def empty(self) -> None:
        """Invalidate every row of the ring. Later rows continue the numbering.

        A single store invalidates the rows, so that a kill leaves either all of them valid or none.
        """
        self.right.require()
        with self.space.mutex:
            header = self._header
            header.forget_uncommitted()
            header.set_reserve(header.head + self.ring)
            if self._power:
                header.sync()
            header.set_floor(header.head)
            if self._power:
                header.sync()
            self.known.commits += 1
            self._forget_frames()

    def _forget_frames(self) -> None:
        if self.pools is not None:
            self.pools.forget()

    def rewind(self, rewind: Rewind, settle: Callable[[], None]) -> None:
        """Remove all rows from ``rewind.rows`` on; call ``settle`` once the rewind is committed.

        A kill at any point leaves either all rows with the present record, or the kept rows with
        the restored record.
        """
        self.right.require()
        header = self._header
        with self.space.mutex:
            header.forget_uncommitted()
            header.begin_rewind(rewind)
            if self._power:
                header.sync()
            # Other libraries must not see rows that will be overwritten.
            self._format.publish(in_use(rewind.rows, self.ring))
            self._kept = max(self._kept, in_use(header.head, self.ring))
            header.set_head(rewind.rows)
            self._forget_frames()
            if self._power:
                header.sync()
            self.finish_rewind(settle)

    def finish_rewind(self, settle: Callable[[], None]) -> None:
        """Complete a rewind that was committed, and allow appends again."""
        with self.space.mutex:
            settle()
            self._header.finish_rewind()
            if self._power:
                self._header.sync()
            self.known.commits += 1

    def set_rewinds(self, count: int) -> None:
        """Store the number of rewinds of the source storage, whose rows are copied to this one."""
        self.right.require()
        with self.space.mutex:
            self._header.set_rewinds(count)

    def replace(
        self,
        read: Callable[[int, int], Sequence[np.ndarray]],
        head: int,
        reserve: int,
        floor: int = 0,
    ) -> None:
        """Copy all slots and the counts of another ring of the same size.

        ``read(start, stop)`` returns the slots ``[start, stop)`` of each column of that ring.
        """
        self.right.require()
        with self.space.mutex:
            header, slots = self._header, in_use(head, self.ring)
            self.space.make_for(slots, slots)
            # No row is valid until all rows are copied.
            header.set_floor(0)
            header.set_reserve(reserve + self.ring)
            if self._power:
                header.sync()
            self._forget_frames()
            arrays, step = self.space.columns.arrays, self._rows_at_once
            for slot, first, count in pieces(head - slots, head, self.ring):
                for start in range(0, count, step):
                    n, at = min(step, count - start), slot + start
                    values = read(at, at + n)
                    if self.pools is not None:
                        row = head - slots + first + start
                        new = ArrayRows(values)
                        placed = self.pools.placed(new, row, head - slots, arrays, self.ring)
                        values = list(map(np.asarray, placed.values))
                    for mine, theirs in zip(arrays, values, strict=True):
                        mine[at : at + n] = theirs
            self._forget_frames()
            if self._power:
                self._sync_rows()
            header.set_head(head)
            header.set_reserve(reserve)
            header.set_floor(floor)
            if self._power:
                header.sync()
            self.known.commits += 1

    @property
    def _rows_at_once(self) -> int:
        return max(1, _CHUNK_NBYTES // self.schema.row_nbytes)

    # --- the files --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until everything is on the disk, including rows of other processes.

        Raises:
            DiskFailed: the system cannot write to the disk.
        """
        with self.space.mutex:
            self._format.settle()
            if self.pools is not None:
                self.pools.sync()
            self._header.sync()

    def flush(self) -> None:
        """Make committed rows visible to other libraries; sync them if durability="power"."""
        if not self.right.may_write:
            self.right.require_there()
            return
        with self.space.mutex:
            if self._power:
                self._sync_rows()
                self._header.sync()
            self._format.publish(in_use(self.counts.head, self.ring))

    def abandon(self) -> None:
        """Close the files unchanged, and keep the lock."""
        self.space.close()
        with ExitStack() as exits:
            exits.callback(self._private.close)
            exits.callback(self._close_pools)
            exits.callback(self._format.close)
            exits.callback(self._header.close)

    def close(self, finish: Callable[[], None] | None = None) -> None:
        """Trim the files to the committed rows and close them; release the lock last.

        ``finish`` is called after the files are closed and before the lock is released.
        """
        self.space.close()
        with ExitStack() as exits:
            if self._lock is not None:
                exits.callback(self._lock.release)
            if finish is not None:
                exits.callback(finish)
            exits.callback(self._format.close)
            exits.callback(self._header.close)
            exits.callback(self._close_pools)
            exits.callback(self._private.close)
            if self._reader is not None:
                exits.callback(self._reader.release)
            if self.right.may_write:
                self._leave()

    def _close_pools(self) -> None:
        if self.pools is not None:
            self.pools.close()

    def _leave(self) -> None:
        with self.space.mutex:
            slots = in_use(self.counts.head, self.ring)
            self._format.trim(slots, self._kept)
            self._format.publish(slots)
            if self._power:
                self._sync_rows()
                self._format.settle()
            self._header.end_writing()
            if self._power:
                self._header.sync()
