"""Rows in and out of memory maps, the same for every format.

A `Format` says where the rows of each column lie, slot by slot; the engine checks,
copies and commits. In a ring the slots are used again (see `ring`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from tensordict import TensorDictBase

from tallyroll.storage import ways
from tallyroll.storage.engine.columns import Columns, Places
from tallyroll.storage.engine.fixed_rows import FixedRows, RowIndex
from tallyroll.storage.engine.kernel import compiled
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.engine.private_rows import PrivateRows
from tallyroll.storage.engine.ring import first_valid, pieces, rows_in, slots_at, slots_of
from tallyroll.storage.engine.slot_rows import SlotRows
from tallyroll.storage.errors import (
    BatchTooLong,
    DiskFailed,
    IndexOutOfRange,
    Overrun,
    ReadOnlyStorage,
    StorageError,
    StorageFull,
    StorageLocked,
    WriterForked,
)
from tallyroll.storage.files.commit_header import RECORD_LIMIT, Header, check_record_size
from tallyroll.storage.files.lock import ReaderLock, WriterLock, is_held
from tallyroll.storage.files.mapping import Access
from tallyroll.storage.formats.base import Format
from tallyroll.storage.formats.space import require_room
from tallyroll.storage.rows.batch_check import BatchCheck
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Schema

if TYPE_CHECKING:
    from tallyroll.storage.trajectories.id_checks import IdChecks


Durability: TypeAlias = Literal["process", "power"]

_FIRST_ROOM_NBYTES = 2**20
_LARGEST_STEP_NBYTES = 2**28
_REFRESH_SECONDS = 1.0
LOOK_SECONDS = 0.05
"""Seconds between two looks of a writer whether its lock file is still there."""
_PATIENCE_SECONDS = 1.0
_LOOKS = 100


class Engine:
    """An open storage.

    Args:
        format: its files, open.
        header: its header.
        schema: its columns.
        lock: the right to write, None for a reader.
        durability: what a commit survives: the death of any process, or of the power too.
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
        self.schema = schema
        self._format, self._header, self._lock = format, header, lock
        self._kernel, self._by_address = compiled(), ways.is_on("address")
        self._power = durability == "power"
        self._access: Access = "read" if lock is None else "write"
        self.ring = header.ring
        """Slots of the ring; 0 for a storage that grows."""
        self._follows = lock is None
        """True if another process may write, so that counts and a ring's rows may change."""
        self._mutex = threading.RLock()
        self.keys = schema.keys
        """The columns' keys, in order."""
        self._batch_check = BatchCheck(schema, format.path)
        self._private = PrivateRows(format, schema)
        self._pool = BufferPool([(c.numpy_dtype, c.shape) for c in schema.columns])
        self._pools: dict[Places, BufferPool] = {}
        """The pools for reads of some of the columns, by these columns."""
        self._refresh_at = time.monotonic() + _REFRESH_SECONDS
        self._look_at = 0.0
        self.known = header.known
        """Counts that a writer keeps."""
        follows_ring = lock is None and self.ring
        self._reader = ReaderLock(format.inside, format.lock_path) if follows_ring else None
        self._opened_at = header.head
        self._remap(self._slots(header.head), warm=False)
        if lock is not None:
            header.forget_uncommitted()
            if self.ring and header.reserve == header.head + self.ring:
                header.set_floor(header.head)  # a writer was killed before it did
            lock.when_lost = self._follow

    def _follow(self) -> None:
        # In a forked child: its parent goes on writing, and threads of the parent, which do
        # not exist here, may have held the locks.
        self._follows, self._access = True, "read"
        self._mutex = threading.RLock()
        self._pool = BufferPool([(c.numpy_dtype, c.shape) for c in self.schema.columns])
        self._pools = {}
        self._header.follow()

    @property
    def owns_lock(self) -> bool:
        """True if this process may write."""
        return self._lock is not None and not self._lock.lost and self._lock.stands

    @property
    def head(self) -> int:
        """The number of rows committed so far, by any process."""
        return self._header.head

    @property
    def span(self) -> range:
        """The numbers of the valid rows, counted over all rows ever written."""
        if not self.ring:
            return range(self._header.head)
        head, reserve = self._counts()
        return range(min(head, first_valid(reserve, self.ring)), head)

    @property
    def floor(self) -> int:
        """The row at which the ring was emptied last, from which indices are counted."""
        return self._header.floor

    def _counts(self) -> tuple[int, int]:
        """Return ``head`` and ``reserve`` of one moment, or an older head, which hides rows."""
        header = self._header
        counts = header.counts
        if counts is not None:
            return counts
        head, reserve = header.head, header.reserve
        for _ in range(_LOOKS if self._follows else 0):
            if header.head == head:
                break
            head, reserve = header.head, header.reserve
        return head, reserve

    @property
    def room(self) -> int:
        """The number of slots that there is space for."""
        return self._columns.room

    def _slots(self, rows: int) -> int:
        """Return the number of slots that ``rows`` rows take."""
        return min(rows, self.ring) if self.ring else rows

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest record, with the rows committed when it was written."""
        header = self._header
        if not self._follows:
            return header.record
        # Records are written in turn: one that comes meanwhile may hide the newest.
        for _ in range(_LOOKS):
            head, record = header.head, header.record
            if record is not None and header.head == head:
                break
        return record

    @property
    def record_damaged(self) -> bool:
        """True if the newest record fails its check."""
        return self._header.record_damaged

    @property
    def left_open(self) -> bool:
        """True if a writer has the storage open, or did not close it."""
        return self._header.open

    def append(
        self,
        rows: Mapping[Key, np.ndarray],
        record: bytes | None = None,
        watch: IdChecks | None = None,
    ) -> range:
        """Copy ``rows`` after the last row and commit them, ``record`` with them.

        ``watch`` may refuse their ids. Return the rows' numbers. Raise a `WriteError` with
        nothing changed.
        """
        self._admit(record)
        with self._mutex:
            arrays = self._batch_check.arrays(rows)
            if watch is not None:
                watch.admit(arrays)
            return self._append(arrays, record)

    def check(self, rows: Mapping[Key, np.ndarray], watch: IdChecks | None) -> None:
        """Refuse what `append` would refuse, however many rows there are."""
        self._admit(None)
        with self._mutex:
            arrays = self._batch_check.arrays(rows)
            if watch is not None:
                watch.admit(arrays)

    def append_tensors(
        self,
        rows: TensorDictBase,
        record: bytes | None = None,
        without: Key | None = None,
        watch: IdChecks | None = None,
    ) -> range | None:
        """Append plain tensors as `append` does; return None, with nothing done, for others.

        ``without`` is a column that ``rows`` may have and that is left out.
        """
        self._admit(record)
        with self._mutex:
            leaves = self._batch_check.leaves(rows, without)
            if leaves is None:
                return None
            addresses = self._batch_check.seen.addresses(leaves) if self._by_address else None
            count = self._batch_check.count
            start = self._header.head
            slot = slots_of(start, self.ring)
            if (
                addresses is not None
                and self._columns.in_place(slot, count)
                and not (self._private.watches and self._private.hold(addresses).any())
            ):
                if watch is not None:
                    watch.admit(leaves)
                self._reserve(start, start + count)
                self._columns.copy_memory(slot, count, addresses)
                return self._commit(start, start + count, record)
            arrays = self._batch_check.tensors(leaves)
            if arrays is None:
                return None
            if watch is not None:
                watch.admit(arrays)
            return self._append(arrays, record)

    def append_fixed(self, rows: FixedRows, index: RowIndex, record: bytes | None) -> range:
        """Append rows ``index`` of memory that was checked before, as `append` does."""
        now = self._admit(record)
        with self._mutex:
            start, count, columns = self._header.head, len(index), self._columns
            slot = start % self.ring if self.ring else start
            if not count or not columns.in_place(slot, count):
                return self._append(rows.taken(index), record)  # type: ignore[arg-type]
            kernel = self._kernel
            if kernel is not None and record and type(index) is range and not self._power:
                one = self._header.commit_in_one(count, record)
                if one is not None:
                    table = columns.table_of(rows)
                    kernel.commit_rows(table, slot, index.start, count, *one, record)
                    self._header.committed(count)
                    return self._committed(start, start + count, now)
            self._reserve(start, start + count)
            columns.copy_fixed(slot, rows, index)
            return self._commit(start, start + count, record)

    def append_slot(self, slot: SlotRows, version: int, *, watched: bool) -> int:
        """Number, count and append a slot of a slab at once; see `Kernel.store_slot`.

        Return how many episodes ended; -1, with nothing done, if the caller must append it row
        by row.
        """
        lock, now, kernel = self._lock, time.monotonic(), self._kernel
        if kernel is None or now >= self._refresh_at or lock is None or self._power:
            return -1
        if now >= self._look_at:
            if not lock.stands:
                return -1
            self._look_at = now + LOOK_SECONDS
        with self._mutex:
            columns = self._columns
            if slot.columns is not columns:
                self._plan(slot, columns)
            if lock.lost or lock.released or not (slot.is_small or columns.warm):
                return -1
            # No handler of a signal, which might close the storage, runs before this.
            ended = kernel.store_slot(slot.plan, columns.room, version, watched)
            if not columns.warm:
                self._warm_up(self._header.head)
            return ended

    def _plan(self, slot: SlotRows, columns: Columns) -> None:
        header = self._header
        slot.make_plan(columns.table_of(slot.rows), header.addresses, header.known, self.ring)
        slot.columns, slot.is_small = columns, columns.are_few(slot.count)

    def _warm_up(self, head: int) -> None:
        if self.ring and head - self._opened_at >= self.ring:
            self._columns.warm = True

    def _append(self, arrays: list[np.ndarray], record: bytes | None) -> range:
        start, count = self._header.head, len(arrays[0])
        stop = start + count
        if not count:
            if record is not None:
                self.put_record(record)
            return range(start, stop)
        if self._private.watches:
            arrays = self._private.copied(arrays)
        slot = slots_of(start, self.ring)
        if slot + count <= self._columns.room:
            self._reserve(start, stop)
            self._columns.copy(slot, arrays, 0, count)
        else:
            self._make_room_for(count, stop)
            self._reserve(start, stop)
            for slot, at, length in pieces(start, stop, self.ring):
                self._columns.copy(slot, arrays, at, length)
        return self._commit(start, stop, record)

    def _reserve(self, start: int, stop: int) -> None:
        header = self._header
        reserve = header.reserve
        if reserve != start:  # an earlier append was interrupted
            header.forget_uncommitted()
            if self._power:  # before `head` passes the record of rows that are not there
                header.sync()
        if reserve < stop:
            header.reserve = stop
        if self._power and self.ring and stop > self.ring:
            header.sync()

    def put_record(self, record: bytes) -> None:
        """Commit a record without rows."""
        self.require_writer()
        with self._mutex:
            header = self._header
            if header.reserve != header.head:  # or the last good record would be written over
                header.forget_uncommitted()
            header.write_record(record, header.head)
            if self._power:
                header.sync()

    def _commit(self, start: int, head: int, record: bytes | None) -> range:
        if record is not None:
            self._header.write_record(record, head)
        if self._power:
            self._format.sync(self._slots(self._header.head))
            if record is not None:  # or `head` may be on the disk before it
                self._header.sync()
        if (now := time.monotonic()) >= self._look_at:  # it took long: another may write by now
            self.require_writer()
            self._look_at = now + LOOK_SECONDS
        self._header.head = head
        if self._power:
            self._sync_head(start)
        return self._committed(start, head, now)

    def _committed(self, start: int, head: int, now: float) -> range:
        self.known.commits += 1
        self._warm_up(head)
        if now >= self._refresh_at:
            self._refresh(head)
        return range(start, head)

    def _sync_head(self, before: int) -> None:
        try:
            self._header.sync()
        except StorageError:
            self._header.head = before  # nothing was promised, and the next append comes here
            raise

    def _refresh(self, head: int) -> None:
        self._refresh_at = time.monotonic() + _REFRESH_SECONDS
        # The rows are committed, whatever happens here; what other libraries see stays as
        # it was, which is true too. flush() and close() do raise.
        with suppress(StorageError, OSError):
            self._format.publish(self._slots(head))

    def _admit(self, record: bytes | None) -> float:
        """Refuse a process that may not write, and a record that is too large; return the time."""
        # Before the mutex: a thread that held it may not exist in a forked child. And a look at
        # the lock file costs as much as copying five columns: not with every commit.
        if (now := time.monotonic()) >= self._look_at or self._lock is None or self._lock.lost:
            self.require_writer()
            self._look_at = now + LOOK_SECONDS
        if record is not None and len(record) > RECORD_LIMIT:
            check_record_size(record)
        return now

    def require_writer(self) -> None:
        """Raise a `WriteError` unless this process may write."""
        if self._lock is None:
            raise ReadOnlyStorage(
                f'{self._format.path} was opened with mode="read". Open it with mode="append" to '
                "write."
            )
        if self._lock.lost:
            raise WriterForked(
                f"{self._format.path} is written by the process that opened it, and this is a "
                "forked child of it. Write from the parent, or open the storage in the child with "
                'mode="read".'
            )

        if not self._lock.stands:
            self._require_there()
            raise StorageLocked(
                f"the lock file of {self._format.path} was removed while this process writes, so "
                "that another one may be writing too. Committed rows are intact, and nothing more "
                "is written from here; open the storage again, and never remove that file."
            )

    def _require_there(self) -> None:
        if not os.path.lexists(self._format.path):
            raise DiskFailed(
                f"{self._format.path} is gone: it was deleted or moved while this process writes. "
                "What was committed is where it was moved to; nothing more is written from here."
            )

    def _make_room_for(self, count: int, stop: int) -> None:
        if self.ring and count > self.ring:
            raise BatchTooLong(
                f"{self._format.path} is a ring of {self.ring} rows and got {count} at once, so "
                "that the first of them would be lost. Nothing was written; write fewer at a time, "
                f"or the last {self.ring} of them."
            )
        if self._slots(stop) > self.room:
            self._make_room(self._slots(stop))

    def _make_room(self, rows: int) -> None:
        row_nbytes = self.schema.row_nbytes
        largest = max(1, _LARGEST_STEP_NBYTES // row_nbytes)
        step = min(max(self.room, _FIRST_ROOM_NBYTES // row_nbytes), largest)
        comfortable = self._slots(max(rows, self.room + step))
        try:
            self._format.grow(comfortable)
        except StorageFull:
            if comfortable == rows:
                raise
            self._format.grow(rows)
        self._remap(rows, warm=self._columns.warm)

    def reserve_rows(self, rows: int) -> None:
        """Reserve space for ``rows`` rows in all, in a ring for no more than its slots.

        Raises:
            StorageFull: there is none.
        """
        rows = self._slots(rows)
        with self._mutex:
            if rows > self.room:
                require_room(self._format, self.schema, rows, there=self.room)
                self._format.grow(rows)
                self._remap(rows, warm=self._columns.warm)

    def _remap(self, rows: int, *, warm: bool) -> None:
        arrays = self._format.arrays(rows, self._access)
        self._columns = Columns(self._format, self.schema, arrays, warm=warm)

    def columns(self) -> list[np.ndarray]:
        """Return one array [room, ...] a column, slot by slot; room holds all committed rows."""
        slots = self._slots(self._header.head)
        if slots > self.room:
            with self._mutex:  # one thread at a time
                if slots > self.room:
                    self._remap(slots, warm=self._columns.warm)
        return self._columns.arrays

    def committed(self) -> list[np.ndarray]:
        """Return one read-only array [slots, ...] a column, uncopied, of all slots in use."""
        slots = self._slots(self.head)
        columns = self.columns()
        arrays = [column[:slots] for column in columns]
        for array in arrays:
            array.flags.writeable = False
        return arrays

    def private(self, slots: slice, only: Places | None = None) -> list[np.ndarray]:
        """Return arrays of slots in use, of every column or of some, that the caller may change.

        Changes are seen in these arrays alone.
        """
        columns = [column[: self._slots(self.head)] for column in self.columns()]
        with self._mutex:  # no append of another thread, which looks at them
            return self._private.rows(columns, slots, only, watched=bool(self.ring))

    def first_shown(self, span: range) -> int | None:
        """Return the first slot of the valid rows, if they lie side by side in index order.

        Return None if they do not, or may not while they are read.
        """
        if not self.ring:
            return 0
        if self._follows:
            return None
        floor = self._header.floor % self.ring
        if len(span) == self._slots(span.stop):  # all slots in use
            return None if floor else 0
        beside = span.start == self._header.floor and floor + len(span) <= self.ring
        return floor if beside else None

    def most_rows(self, span: range) -> int:
        """Return the number of rows, those that a writer is overwriting included."""
        return self._slots(span.stop) if self._follows else len(span)

    def take(self, index: np.ndarray, only: Places | None = None) -> list[np.ndarray]:
        """Return arrays [*index.shape, ...], one a column, of the valid rows ``index`` from 0.

        ``only`` are the columns that are wanted; None: all.

        The arrays come from a pool, to which they return when nothing refers to them.

        Raises:
            IndexOutOfRange: another process, which writes the ring, has overwritten the rows.
        """
        if not self.ring:
            return self.gather(index, only)
        if self._follows:
            return self._take_checked(index, only)[0]
        with self._mutex:  # no append of another thread
            slots = slots_at(index, *self._counts(), self.ring, self._header.floor)
            return self.gather(slots, only)

    def take_numbered(
        self, index: np.ndarray, only: Places | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Take rows of a ring as `take` does; return their numbers [*index.shape], too."""
        if self._follows:
            return self._take_checked(index, only)
        with self._mutex:
            head, reserve = self._counts()
            slots = slots_at(index, head, reserve, self.ring, self._header.floor)
            return self.gather(slots, only), rows_in(slots, head, self.ring)

    def gather(
        self, slots: np.ndarray | Sequence[np.ndarray], only: Places | None = None
    ) -> list[np.ndarray]:
        """Return arrays [*slots.shape, ...], one a column, of slots in use, from the pool.

        ``slots`` may be one such array for every column; ``only`` as :meth:`take`.
        """
        columns, pool = self.columns(), self._pool
        if only is not None:
            columns, pool = [columns[place] for place in only], self._pool_of(only)
        places = [slots] * len(columns) if isinstance(slots, np.ndarray) else slots
        found, room = pool.room(places[0].shape)
        if isinstance(slots, np.ndarray) and self._columns.take_compiled(slots, room, only):
            return found
        for column, where, out in zip(columns, places, found, strict=True):
            # Indices were checked: "clip" is the mode in which NumPy writes to out directly.
            column.take(where, axis=0, out=out, mode="clip")
        return found

    def _pool_of(self, only: Places) -> BufferPool:
        pool = self._pools.get(only)
        if pool is None:
            columns = [self.schema.columns[place] for place in only]
            pool = self._pools[only] = BufferPool([(c.numpy_dtype, c.shape) for c in columns])
        return pool

    def _take_checked(
        self, index: np.ndarray, only: Places | None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Copy rows, look again, and copy those again that the writer overwrote meanwhile."""
        flat = index.reshape(-1)
        slots = self._slots_in_time(flat)
        rows = rows_in(slots, self._header.head, self.ring)
        found = self.gather(slots, only)
        every = self._columns.arrays
        columns = every if only is None else [every[place] for place in only]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (torn := np.flatnonzero(rows < first_valid(self._header.reserve, self.ring))).size:
            if time.monotonic() > deadline:
                raise Overrun(
                    f"{self._format.path} is a ring of {self.ring} rows, and its writer overwrites "
                    f"them faster than these {len(flat)} can be read. Read fewer at a time, or "
                    "make the ring larger."
                )
            slots[torn] = self._slots_in_time(flat[torn])
            rows[torn] = rows_in(slots[torn], self._header.head, self.ring)
            for column, out in zip(columns, found, strict=True):
                out[torn] = column[slots[torn]]
        shaped = [array.reshape(*index.shape, *array.shape[1:]) for array in found]
        return shaped, rows.reshape(index.shape)

    def _slots_in_time(self, index: np.ndarray) -> np.ndarray:
        """Return the slots of valid rows ``index``, waiting while a writer overwrites the oldest.

        For a moment fewer rows are valid then.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            floor = self._header.floor  # first, for then it is below what is valid by the counts
            head, reserve = self._counts()
            count = head - min(head, first_valid(reserve, self.ring))
            if not index.size or (last := int(index.max())) < count:
                return slots_at(index, head, reserve, self.ring, floor).copy()
            files = self._format
            if time.monotonic() > deadline or not is_held(files.inside, files.lock_path):
                raise IndexOutOfRange(
                    f"row {last} is not there: {self._format.path} has {count} rows that are whole."
                )
            time.sleep(1e-5)

    def empty(self) -> None:
        """Make every row of the ring invalid; the numbers of later rows go on from these.

        Storing one word does it: before it all rows are there, and after it none.
        """
        self.require_writer()
        with self._mutex:
            header = self._header
            header.forget_uncommitted()
            header.reserve = header.head + self.ring
            if self._power:
                header.sync()
            header.set_floor(header.head)
            if self._power:
                header.sync()
            self.known.commits += 1

    def replace(
        self, columns: Sequence[np.ndarray], head: int, reserve: int, floor: int = 0
    ) -> None:
        """Take over all slots [slots, ...] and counts of another ring of the same size."""
        self.require_writer()
        with self._mutex:
            self._make_room(len(columns[0]))
            # No row is valid before all are copied.
            self._header.set_floor(0)
            self._header.reserve = reserve + self.ring
            if self._power:
                self._header.sync()
            for mine, theirs in zip(self._columns.arrays, columns, strict=True):
                mine[: len(theirs)] = theirs
            if self._power:
                self._format.sync()
            self._header.head = head
            self._header.reserve = reserve
            self._header.set_floor(floor)
            if self._power:
                self._header.sync()
            self.known.commits += 1

    def settle(self) -> None:
        """Return when everything is on the disk, the rows of other processes too.

        Raises:
            DiskFailed: the system cannot write it.
        """
        with self._mutex:
            self._format.settle()
            self._header.sync()

    def flush(self) -> None:
        """Show all committed rows to other libraries; with durability="power", sync them too."""
        if not self.owns_lock:
            if self._lock is not None and not self._lock.lost:
                self._require_there()
            return
        with self._mutex:
            if self._power:
                self._format.sync()
                self._header.sync()
            self._format.publish(self._slots(self.head))

    def abandon(self) -> None:
        """Close the files as they are, and keep the lock."""
        with ExitStack() as exits:
            exits.callback(self._private.close)
            exits.callback(self._format.close)
            exits.callback(self._header.close)

    def close(self, finish: Callable[[], None] | None = None) -> None:
        """Trim the files to the committed rows and close them; release the lock last.

        A writer calls ``finish`` when it holds nothing but the lock.
        """
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
            if self.owns_lock:
                self._leave()

    def _leave(self) -> None:
        with self._mutex:
            self._format.trim(self._slots(self.head))
            self._format.publish(self._slots(self.head))
            if self._power:
                self._format.settle()
            self._header.end_writing()
            if self._power:
                self._header.sync()
