"""Commits of rows to memory maps, common to all formats.

A `Format` defines where the rows of each column are, slot by slot. `NewRows` copy themselves there.
The engine makes room for them and commits. In a ring, slots are reused (see `ring`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Literal, TypeAlias

import numpy as np

from tallyroll.storage.engine.columns import CopiedInSteps, NewRows, PrivateRows
from tallyroll.storage.engine.committed_counts import CommittedCounts
from tallyroll.storage.engine.mapped_space import MappedSpace
from tallyroll.storage.engine.ring import in_use, pieces, slots_of
from tallyroll.storage.engine.row_copies import RowCopies
from tallyroll.storage.engine.writer_check import RightToWrite
from tallyroll.storage.errors import StorageError
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.lock import ReaderLock, WriterLock
from tallyroll.storage.files.record_slots import RECORD_LIMIT, Rewind, check_record_size
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.schema import Schema

Durability: TypeAlias = Literal["process", "power"]

_REFRESH_SECONDS = 1.0


class Engine:
    """Engine of an open storage, which appends, commits and rewinds rows.

    Args:
        format: the open files of the storage.
        header: the header of the storage.
        schema: the schema of the storage.
        lock: the writer lock, or None for a reader.
        durability: the failures that a commit survives: the death of any process, or also a power
            cut.
    """

    def __init__(
        self,
        format: Format,
        header: Header,
        schema: Schema,
        *,
        lock: WriterLock | None,
        durability: Durability = "process",
    ) -> None:
        self.schema, self.keys, self.ring = schema, schema.keys, header.ring
        self._format, self._header, self._lock = format, header, lock
        self._power = durability == "power"
        self._private = PrivateRows(format, schema)
        self.counts = CommittedCounts(header, follows=lock is None)
        self.right = RightToWrite(lock, format.path)
        self.space = MappedSpace(
            format,
            schema,
            header,
            "read" if lock is None else "write",
            one_call=lock is not None and not self._power,
        )
        self.copies = RowCopies(format, header, schema, self.counts, self.space, self._private)
        self._refresh_at = time.monotonic() + _REFRESH_SECONDS
        self.known = header.known
        """Counts that a writer caches."""
        follows_ring = lock is None and self.ring
        self._reader = ReaderLock(format.inside, format.lock_path) if follows_ring else None
        if lock is not None:
            header.forget_uncommitted()
            if header.undone is None:
                header.finish_rewind()  # a writer was killed before the rewind was committed
            if self.ring and header.reserve == header.head + self.ring:
                header.set_floor(header.head)  # a writer was killed before it stored the floor
            lock.when_lost = self._follow
        self._kept = self.space.columns.room if header.rewinds or header.undone else 0
        """The number of slots to keep in the files, since readers may look at rewound rows."""

    def _follow(self) -> None:
        # In a forked child, whose parent continues to write.
        for each in (self.counts, self.space, self.copies):
            each.follow()
        self.right.look_at = 0.0

    # --- commits ----------------------------------------------------------------------------------

    def append(self, rows: NewRows, record: bytes | None = None) -> range:
        """Append ``rows`` and commit them together with ``record``.

        Every kind of rows is stored in this order, so that a kill at any point leaves either all of
        them or none: ``reserve`` marks the slots that may be overwritten, the rows are copied, and
        the record becomes valid with ``head``, which is stored last.

        Returns:
            The numbers of the rows. The range is empty, with nothing done, if the rows are not
            `CopiedInSteps` and `NewRows.commit` refuses them.

        Raises:
            WriteError: the append was refused and nothing was changed.
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
                rows = rows.apart_from(self._private)
            in_place = columns.in_place(slot, count)
            if not (in_place and rows.in_one_call and rows.commit(columns, header, slot, record)):
                if not isinstance(rows, CopiedInSteps):
                    return range(start, start)
                places = ((slot, rows),) if in_place else self._places(rows, start, stop)
                self._reserve(start, stop)
                for slot, piece in places:
                    piece.copy_to(space.columns, slot)
                self._commit(start, stop, record)
            if stop >= space.warm_at:
                space.columns.warm = True
            if now >= self._refresh_at:
                self._refresh(stop)
            return range(start, stop)

    def _places(
        self, rows: CopiedInSteps, start: int, stop: int
    ) -> Sequence[tuple[int, CopiedInSteps]]:
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
            if self._power:  # before `head` passes the record of rows that do not exist
                header.sync()
        if reserve < stop:
            header.reserve = stop
        if self._power and self.ring and stop > self.ring:
            header.sync()

    def _commit(self, start: int, stop: int, record: bytes | None) -> None:
        header = self._header
        if record is not None:
            header.write_record(record, stop)
        if self._power:
            self._format.sync(in_use(start, self.ring))
            if record is not None:  # otherwise `head` may reach the disk first
                header.sync()
        if time.monotonic() >= self.right.look_at:
            self.right.look()  # the sync took long, and another process may be writing by now
        header.head = stop
        if self._power:
            try:
                header.sync()
            except StorageError:
                header.head = start  # the rows are not committed, and the next append starts here
                raise
        self.known.commits += 1

    def _refresh(self, head: int) -> None:
        self._refresh_at = time.monotonic() + _REFRESH_SECONDS
        # The rows are committed even if this fails. Then the view of other libraries stays
        # outdated but correct. flush() and close() do raise.
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

        A single store does it: before it all rows are valid, and after it none.
        """
        self.right.require()
        with self.space.mutex:
            header = self._header
            header.forget_uncommitted()
            header.reserve = header.head + self.ring
            if self._power:
                header.sync()
            header.set_floor(header.head)
            if self._power:
                header.sync()
            self.known.commits += 1

    def rewind(self, rewind: Rewind, settle: Callable[[], None]) -> None:
        """Remove all rows from ``rewind.rows`` on; call ``settle`` once that is committed.

        A kill at any point leaves either all rows with their record, or the kept rows with theirs.
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
            header.head = rewind.rows
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
        """Store the number of rewinds of the storage whose rows are copied here."""
        self.right.require()
        with self.space.mutex:
            self._header.set_rewinds(count)

    def replace(
        self, columns: Sequence[np.ndarray], head: int, reserve: int, floor: int = 0
    ) -> None:
        """Copy all slots [slots, ...] and counts from another ring of the same size."""
        self.right.require()
        with self.space.mutex:
            header, slots = self._header, len(columns[0])
            self.space.make_for(slots, slots)
            # No row is valid until all rows are copied.
            header.set_floor(0)
            header.reserve = reserve + self.ring
            if self._power:
                header.sync()
            for mine, theirs in zip(self.space.columns.arrays, columns, strict=True):
                mine[: len(theirs)] = theirs
            if self._power:
                self._format.sync()
            header.head = head
            header.reserve = reserve
            header.set_floor(floor)
            if self._power:
                header.sync()
            self.known.commits += 1

    # --- the files --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until everything is on the disk, including rows of other processes.

        Raises:
            DiskFailed: the system cannot write it.
        """
        with self.space.mutex:
            self._format.settle()
            self._header.sync()

    def flush(self) -> None:
        """Make committed rows visible to other libraries; sync them if durability="power"."""
        if not self.right.held:
            self.right.require_there()
            return
        with self.space.mutex:
            if self._power:
                self._format.sync()
                self._header.sync()
            self._format.publish(in_use(self.counts.head, self.ring))

    def abandon(self) -> None:
        """Close the files unchanged, and keep the lock."""
        self.space.close()
        with ExitStack() as exits:
            exits.callback(self._private.close)
            exits.callback(self._format.close)
            exits.callback(self._header.close)

    def close(self, finish: Callable[[], None] | None = None) -> None:
        """Trim the files to the committed rows and close them; release the lock last.

        A writer calls ``finish`` once it holds only the lock.
        """
        self.space.close()
        with ExitStack() as exits:
            if self._lock is not None:
                exits.callback(self._lock.release)
            if finish is not None:
                exits.callback(finish)
            exits.callback(self._format.close)
            exits.callback(self._header.close)
            exits.callback(self._private.close)
            if self._reader is not None:
                exits.callback(self._reader.release)
            if self.right.held:
                self._leave()

    def _leave(self) -> None:
        with self.space.mutex:
            slots = in_use(self.counts.head, self.ring)
            self._format.trim(slots, self._kept)
            self._format.publish(slots)
            if self._power:
                self._format.settle()
            self._header.end_writing()
            if self._power:
                self._header.sync()
