"""File of one overlay: open, enlarge, read concurrently with its writer, write under its lock."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from tallyroll.storage.engine.writer_check import WritePermission
from tallyroll.storage.errors import (
    ColumnsMissing,
    Overrun,
    ReadOnlyStorage,
    StateMismatch,
    StorageClosed,
    StorageFull,
    StorageLocked,
    UnsupportedPlatform,
)
from tallyroll.storage.ext.overlays import entries
from tallyroll.storage.ext.overlays.header import (
    DROPPED,
    HEADER_NBYTES,
    REWINDS,
    ROOM,
    WORDS_AT,
    OverlayColumn,
    OverlayOwner,
    damaged,
    header_bytes,
    read_header,
)
from tallyroll.storage.files.lock import WriterLock, is_held
from tallyroll.storage.files.mapping import Access, map_file
from tallyroll.storage.files.paths import FULL, OTHER_KINDS, failed, translated
from tallyroll.storage.files.rewind_history import least_rows_after_rewinds
from tallyroll.storage.files.safe_files import data_ranges
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import Key, format_key

_BLOCK_NBYTES: Final = 2**20
_FEWEST: Final = 1024
_AT_ONCE: Final = 2**16
_ORDERED: Final = ("x86_64", "AMD64")
"""Processors on which a reader sees stores in the order in which the writer made them."""


def owner_of(reader: FileReader) -> OverlayOwner:
    """Return the identity of a reader's storage, as overlay headers record it."""
    return OverlayOwner(reader.id, reader.ring)


def lock_of(path: Path) -> Path:
    """Return the path of the lock file of an overlay's writer."""
    return path.with_name(path.name + ".lock")


def lock_overlay(reader: FileReader, path: Path, key: Key) -> WriterLock:
    """Acquire the writer lock of an overlay, which has one writer at a time.

    Raises:
        StorageLocked: another writer holds the lock.
        NotWritable: this user may not write the lock file.
    """
    inside, place = reader.format.inside, lock_of(path)
    try:
        with translated(place):
            return WriterLock(inside, place)
    except StorageLocked as error:
        holder = b""
        with contextlib.suppress(OSError):
            holder = inside.read_start(place, 32).strip()
        who = f"process {holder.decode(errors='replace')}" if holder else "another process"
        raise StorageLocked(
            f"overlay {format_key(key)} of {reader.path} can have one writer at a time, and {who} "
            "is writing to it. Close the storage in that process, or write there."
        ) from error


def make_file(reader: FileReader, path: Path, kept: OverlayColumn) -> None:
    """Create the file of a new overlay atomically, without entries."""
    page = header_bytes(kept, owner_of(reader), reader.rewinds)
    with translated(path, len(page)):
        reader.format.inside.write_atomically(path, page, durable=reader.format.durable)


class OverlayFile:
    """Memory-mapped file of an overlay.

    Args:
        reader: the reader of the rows that the overlay belongs to.
        path: the file.
        key: the overlay's key.
        writable: open the file for writing, too. The first write acquires the lock.

    Raises:
        ColumnsMissing: the file does not exist.
        DamagedOverlay: the file cannot be used.
        FormatVersionMismatch: a later version of Tallyroll created the file.
    """

    def __init__(self, reader: FileReader, path: Path, key: Key, *, writable: bool) -> None:
        self.path, self.key, self.writable = path, key, writable
        self._reader = reader
        self._turn = threading.RLock()
        inside = reader.format.inside
        try:
            file = inside.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError as error:
            raise _missing(reader, key) from error
        except OSError as error:
            if error.errno in OTHER_KINDS:
                raise damaged(
                    path, f"it is a link, or not a regular file ({error.strerror})"
                ) from error
            raise failed(path, error, 0) from error
        self._file, self._right = file, WritePermission(None, path)
        self._held: list[WriterLock] = []
        self._closed = weakref.finalize(self, _release, file, self._held)
        try:
            with translated(path):
                page = os.pread(file, HEADER_NBYTES, 0)
                self.header = read_header(page, path, key, owner_of(reader))
                access: Access = "write" if writable else "read"
                head = map_file(file, HEADER_NBYTES, access)
            self._access, self._words = access, head.array(np.dtype("<i8"), (3,), WORDS_AT)
            self._dtype = entries.entry_dtype(self.header.column)
            self._entries: np.ndarray = np.empty(0, self._dtype)
            self._block = max(_BLOCK_NBYTES, self._dtype.itemsize)
            self._reserved = np.zeros(0, np.bool_)
            self._limit_of: tuple[tuple[int, int], int] = (-1, -1), 0
            self._require_ordered()
            self._mapped()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file and release its writer lock."""
        self._closed()

    @property
    def is_open(self) -> bool:
        """True until the file is closed."""
        return self._closed.alive

    @property
    def is_current(self) -> bool:
        """True while the file is open and the overlay has not been dropped."""
        return self._closed.alive and not self._words[DROPPED]

    @property
    def is_locked(self) -> bool:
        """True while this process holds the writer lock."""
        return self._closed.alive and bool(self._held)

    def _require_ordered(self) -> None:
        inside, place = self._reader.format.inside, lock_of(self.path)
        if platform.machine() not in _ORDERED and not self.writable and is_held(inside, place):
            raise UnsupportedPlatform(
                f"{self.path} is being written, and on {platform.machine()} a reader may see "
                "half-written values. Read the overlay after its writer has closed the storage."
            )

    def _mapped(self) -> np.ndarray:
        """Return all entries that the file has room for, and map the file again if it has grown."""
        if not self._closed.alive:
            raise StorageClosed(
                f"{self.path} was closed. Open the overlay again with storage.overlay(name)."
            )
        room = int(self._words[ROOM])
        if room == len(self._entries):
            return self._entries
        with self._turn:
            if self._words[DROPPED]:
                raise _missing(self._reader, self.key, " any more: it was dropped")
            most = self._reader.ring or entries.MOST_ROWS
            if not 0 <= room <= most:
                raise damaged(self.path, f"its header records an impossible size of {room} rows")
            nbytes = HEADER_NBYTES + room * self._dtype.itemsize
            with translated(self.path):
                if (size := os.fstat(self._file).st_size) < nbytes:
                    raise damaged(
                        self.path, f"it has {size} bytes instead of {nbytes}, so it was truncated"
                    )
                region = map_file(self._file, nbytes, self._access)
            self._entries = region.array(self._dtype, (room,), HEADER_NBYTES)
        return self._entries

    # --- reading ----------------------------------------------------------------------------------

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return copies of the values of ``rows`` [*], in any order, [*rows.shape, *value shape].

        Rows without a value get the fill.

        Raises:
            Overrun: a writer changes the values faster than they are read.
        """
        found, _ = self.values_of(rows.reshape(-1))
        found = found.reshape((*rows.shape, *self.header.column.shape))
        if out is None:
            return found
        out[...] = found
        return out

    def values_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of ``rows`` [n] as `take` does, and a mask [n] of rows with a value."""
        return read_consistently(self._reader, lambda: self._take(rows))

    def _take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mapped, column = self._mapped(), self.header.column
        if self._words[DROPPED]:
            raise _missing(self._reader, self.key, " any more: it was dropped")
        limit = self._limit()
        if not len(mapped):
            fill = np.full((len(rows), *column.shape), self.header.fill_array)
            return fill, np.zeros(len(rows), np.bool_)
        slots = self._slots(rows)
        try:
            found, own = entries.take(mapped, np.minimum(slots, len(mapped) - 1), rows)
        except entries.Torn as error:
            raise Overrun(
                f"a writer kept changing {self.path} while {len(rows)} rows were read. Read fewer "
                "rows at a time."
            ) from error
        if limit is not None:
            own &= rows < limit
        if not own.all():
            found[~own] = self.header.fill_array
        return found, own

    def _slots(self, rows: np.ndarray) -> np.ndarray:
        return rows % self._reader.ring if self._reader.ring else rows

    def _limit(self) -> int | None:
        """Return the row number below which entries are valid; None: all entries are valid.

        Rows that were rewound after the last write to this file, and the rows that replaced them,
        have no value.
        """
        reader = self._reader
        pair = known, now = int(self._words[REWINDS]), reader.rewinds
        if known == now:
            return None
        if known > now:
            return 0
        if self._limit_of[0] != pair:
            undone = reader.running().counts.undone
            if undone is not None and undone.number == now:  # not in the manifest yet
                before = least_rows_after_rewinds(reader.manifest, known, now - 1)
                limit = undone.rows if before is None else min(before, undone.rows)
            else:
                limit = least_rows_after_rewinds(reader.manifest, known, now) or 0
            self._limit_of = pair, limit
        return self._limit_of[1]

    @property
    def most_rows(self) -> int:
        """Upper bound (exclusive) of the row numbers that entries may name."""
        reader = self._reader
        known = int(self._words[REWINDS]) == reader.rewinds
        return reader.head if known else entries.MOST_ROWS

    def rows_in(self, start: int, stop: int) -> np.ndarray:
        """Return the row numbers of the entries ``[start, stop)``; -1 for an unused entry."""
        return entries.rows_in(self._mapped(), start, stop)

    def stretches(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of at most ``most`` entries that together cover all rows.

        Holes in the file contain no entries and are skipped, because a damaged file may be sparse
        and as long as the file system allows.
        """
        room, size, done = len(self._mapped()), self._dtype.itemsize, 0
        with translated(self.path):
            for begin, stop in data_ranges(self._file, HEADER_NBYTES):
                start = max(done, (begin - HEADER_NBYTES) // size)
                done = min(room, -(-(stop - HEADER_NBYTES) // size))
                for first in range(start, done, most):
                    yield first, min(first + most, done)

    # --- writing ----------------------------------------------------------------------------------

    def require_right(self) -> None:
        """Acquire the lock on the first write; raise a `WriteError` if writing is not allowed."""
        if not self.writable:
            raise ReadOnlyStorage(
                f"overlay {format_key(self.key)} of {self._reader.path} was opened read-only. "
                "Open the overlay with storage.overlay(..., writable=True), in one process at a "
                "time."
            )
        if not self._closed.alive:
            raise StorageClosed(
                f"{self.path} was closed. Open the overlay again with storage.overlay(name)."
            )
        if not self._held:
            with self._turn:
                if not self._held:
                    lock = lock_overlay(self._reader, self.path, self.key)
                    self._right = WritePermission(lock, self.path)
                    self._held.append(lock)
        if self._held[0].lost:  # in a forked child; the periodic check below would miss it
            self._right.require()
        self._right.look()

    def put(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Write values [n, ...] of ``rows`` [n], which are in the reader's span."""
        self.require_right()  # before `_turn`, which a forked child may never acquire
        with self._turn:
            self._mapped()
            if self._words[DROPPED]:
                raise _missing(self._reader, self.key, " any more: it was dropped")
            self._forget_rewound()
            if len(rows):
                slots = self._slots(rows)
                entries.put(self._with_room(slots), slots, rows, values)

    def _forget_rewound(self) -> None:
        now = self._reader.rewinds
        if (limit := self._limit()) is not None:
            mapped = self._mapped()
            for start, stop in self.stretches(_AT_ONCE):
                entries.clear(mapped[start:stop], limit)
            self._words[REWINDS] = now

    def _with_room(self, slots: np.ndarray) -> np.ndarray:
        """Return the entries, and allocate disk space for slots [n].

        A write to a mapped sparse file kills the process if the disk is full.
        """
        mapped, size = self._mapped(), self._dtype.itemsize
        if (needed := int(slots.max()) + 1) > len(mapped):
            ring = self._reader.ring
            room = ring or max(needed, len(mapped) + len(mapped) // 2, _FEWEST)
            if room > entries.MOST_ROWS:
                raise StateMismatch(
                    f"{self.path}: expected at most {entries.MOST_ROWS} rows, got {room}."
                )
            with translated(self.path, HEADER_NBYTES + room * size):
                os.ftruncate(self._file, HEADER_NBYTES + room * size)
            self._words[ROOM] = room
            mapped = self._mapped()
            blocks = (HEADER_NBYTES + room * size) // self._block + 1
            self._reserved = np.append(
                self._reserved, np.zeros(blocks - len(self._reserved), np.bool_)
            )
        if not len(self._reserved):
            blocks = (HEADER_NBYTES + len(mapped) * size) // self._block + 1
            self._reserved = np.zeros(blocks, np.bool_)
        first = HEADER_NBYTES + slots * size
        block, last = first // self._block, (first + size - 1) // self._block
        if not (self._reserved[block].all() and self._reserved[last].all()):
            self._reserve(np.unique(np.concatenate([block, last])))
        return mapped

    def _reserve(self, blocks: np.ndarray) -> None:
        end = HEADER_NBYTES + len(self._entries) * self._dtype.itemsize
        for block in blocks[~self._reserved[blocks]].tolist():
            start = block * self._block
            nbytes = min(self._block, end - start)
            try:
                os.posix_fallocate(self._file, start, nbytes)
            except OSError as error:
                found = failed(self.path, error, nbytes)
                if error.errno in FULL:
                    found = StorageFull(
                        f"{self.path} needs {nbytes} more bytes ({error.strerror}). No value was "
                        "changed. Free disk space."
                    )
                raise found from error
            self._reserved[block] = True

    def flush(self) -> None:
        """Flush all values to the disk."""
        with translated(self.path):
            os.fdatasync(self._file)

    def mark_dropped(self) -> None:
        """Notify processes that have the file open that the overlay has been dropped."""
        self._words[DROPPED] = 1


def _missing(reader: FileReader, key: Key, why: str = "") -> ColumnsMissing:
    return ColumnsMissing(
        f"{reader.path} has no overlay {format_key(key)}{why}. Create the overlay with "
        "storage.overlay(name, dtype, shape, fill)."
    )


def _release(file: int, held: list[WriterLock]) -> None:
    for lock in held:
        lock.release()
    os.close(file)
