"""The header: the counts of reserved and committed rows, and the record of the last commit.

Layout, little-endian, offsets in bytes::

    0      magic, format version, slots of the ring (0: grows), CRC of the schema, CRC of the above
    64     reserve   count: rows that may have been written
    128    head      count: rows that are committed
    192    identity of the file, and whether a writer has it open (see `header_words`)
    256    floor     count: the row at which a ring was last emptied, see `ring`; 0 if never
    264    rewinds   count: number of rewinds, which assign row numbers to other rows
    4096   two record slots, which a writer uses in turn (see `record_slots`)

`reserve` and `head` are in separate cache lines, and each is stored as one machine word. A reader
therefore sees either the old or the new count, even after a kill. Both have check bits (see
`header_words`).

No recovery is needed. After a kill, the rows below `head` are the committed ones
(`CommittedCounts.span`), and `Engine.__init__` of the next writer drops the rest. After a power cut
this holds with ``durability="power"``, because of the order in `Engine._commit`; otherwise no row
is guaranteed. In a sharded storage the lines of ``acknowledged_rows.py`` decide instead.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tallyroll.storage.errors import CopyOfOpenStorage, CorruptStorage
from tallyroll.storage.files.counts import counts_of
from tallyroll.storage.files.format_versions import FORMAT_VERSION
from tallyroll.storage.files.header_identity import identity_bytes, refuse_newer, ring_of
from tallyroll.storage.files.header_words import (
    BORN,
    CLOSED_AT,
    COUNT,
    COUNT_BITS,
    INODE,
    OPEN,
    count_of,
    creation_time,
    inode_of,
    word_of,
)
from tallyroll.storage.files.mapping import map_file
from tallyroll.storage.files.paths import failed, translated
from tallyroll.storage.files.record_slots import (
    RECORD_LIMIT,
    RECORDS_AT,
    RECORDS_NBYTES,
    STARTS,
    RecordSlots,
    Rewind,
    check_record_size,
)

_RESERVE, _HEAD, _FLOOR, _REWINDS = 64 // 8, 128 // 8, 256 // 8, 264 // 8
_MOST_ROWS, _MOST_RECORDS = 2 ** (COUNT_BITS - 1), 2**62
"""Limits below the largest count, so that rows and records can be added to any storage."""
HEADER_NBYTES = RECORDS_AT + RECORDS_NBYTES
"""Size of the header in bytes, a whole number of pages."""

CommitCounts = counts_of("head", "reserve", "floor", "sequence", "commits")
"""Counts of a storage that a writer caches, so that it need not read them from the file.

Head, reserve and floor are -1 if another process writes, in which case they must be read from the
file. ``sequence`` is the sequence number of the last record, and ``commits`` is the number of row
commits through this header.
"""


ADDRESSES = ("reserve", "head", "even_record", "odd_record")
"""The words of `Header.addresses`. The slot of a record depends on its sequence number's parity."""


def header_bytes(schema_crc: int, *, ring: int = 0, version: int = FORMAT_VERSION) -> bytes:
    """Return a new header without rows or record, for a ring of ``ring`` slots (0: no ring)."""
    return identity_bytes(schema_crc, ring, version).ljust(HEADER_NBYTES, b"\0")


class Header:
    """Header that is mapped from the start of a file.

    Args:
        open_file: a function that opens the file with given flags and returns a descriptor.
        path: the path of the file, for messages.
        schema_crc: the CRC-32 of the schema that the manifest declares.
        writable: map the header for writing.
        version: the version that the manifest declares.
        accept_copy: open a copy that was made while a writer had the storage open.

    Raises:
        CorruptStorage: the file is missing, truncated or damaged.
        FormatVersionMismatch: the file was written by another version.
        CopyOfOpenStorage: the file is such a copy, and ``accept_copy`` is False.
    """

    def __init__(
        self,
        open_file: Callable[[int], int],
        path: Path,
        *,
        schema_crc: int,
        writable: bool,
        version: int = FORMAT_VERSION,
        accept_copy: bool = False,
    ) -> None:
        self._path, self._file = path, _opened(open_file, path, writable=writable)
        self.known = CommitCounts()
        self.follow()
        self._spelt = (0, word_of(0))
        """The last ``reserve`` and its word, which usually becomes the word of ``head`` next."""
        try:
            self._map = _mapped(self._file, path, writable=writable)
            self.ring = ring_of(
                self._map[:RECORDS_AT], path, schema_crc=schema_crc, version=version
            )
            self._words = memoryview(self._map)[:RECORDS_AT].cast("Q")
            self.records = RecordSlots(self._map)
            self._knows_file = version >= 3
            self._left_open = self.open
            if self._knows_file:
                self._require_original(accept_copy=accept_copy)
            self._require_possible()
        except BaseException:
            self.close()
            raise
        if not writable:
            self.close()  # a reader needs only the map
            return
        known = self.known  # from here on, only this writer changes the counts
        known.reserve, known.head, known.floor = self.reserve, self.head, self.floor
        self._rewinds = self.rewinds
        base = np.frombuffer(self._map, np.uint8).ctypes.data
        even, odd = STARTS
        places = {
            "reserve": 8 * _RESERVE,
            "head": 8 * _HEAD,
            "even_record": even,
            "odd_record": odd,
        }
        self.addresses = struct.pack("=4q", *(base + places[name] for name in ADDRESSES))
        """The addresses of the words in `ADDRESSES`, in order. The map owns the memory."""

    def _require_original(self, *, accept_copy: bool) -> None:
        closed_at = self._count(CLOSED_AT)
        # Read the mark first: a writer stores the identity of its file before it sets the mark.
        if not self.open or accept_copy:
            return
        born, now = self._count(BORN), creation_time(self._file)
        same_age = born == now or not born or not now
        if same_age and self._count(INODE) == inode_of(self._file):
            return
        raise CopyOfOpenStorage(
            f"{self._path} is a copy of a storage that was open for writing, or whose writer had "
            "been killed. Its files may have been copied at different moments, so committed rows "
            f"may be missing: only the first {closed_at}, which were committed when the original "
            "was last closed, are known to be complete. Close the original (if its writer was "
            "killed, open it for appending and close it) and copy it again. To open this copy as "
            "it is, pass accept_copy=True (--accept-copy on the command line). Do the same if this "
            "storage is not a copy and its file system assigns new inode numbers to files."
        )

    def _require_possible(self) -> None:
        wrong = self._impossible()
        if wrong and self._impossible() == wrong:  # recheck, in case a rewind was in progress
            raise CorruptStorage(
                f"{self._path} has impossible counts: {wrong}. Restore it from a copy."
            )

    def _impossible(self) -> str:
        # The counts may change during these reads. If they are read in this order, none appears too
        # large, except during a rewind.
        floor = self.floor
        head = self.head
        reserve = self.reserve
        self.known.sequence = sequence = self.records.newest
        wrong = ""
        if head > reserve:
            wrong = f"{head} rows are committed, but only {reserve} are reserved"
        elif reserve > _MOST_ROWS:
            wrong = (
                f"{reserve} rows are reserved ({head} committed), but a storage has at most "
                f"{_MOST_ROWS}"
            )
        elif floor and floor + self.ring > reserve:
            wrong = (
                f"its ring of {self.ring} rows was emptied at row {floor}, but only {reserve} rows "
                "are reserved"
            )
        elif sequence > _MOST_RECORDS:
            wrong = (
                f"its last record is number {sequence}, but a storage has at most {_MOST_RECORDS}"
            )
        return wrong

    def _count(self, at: int) -> int:
        count = count_of(int(self._words[at]))
        if count is None:
            last = [
                f" (the last record was written with {rows})" for _, rows, _ in self.records.intact
            ]
            raise CorruptStorage(
                f"a count in {self._path} fails its check, at byte {8 * at}. The file is damaged, "
                f"and the number of committed rows is unknown{''.join(last[:1])}. Restore it from "
                "a copy."
            )
        return count

    def follow(self) -> None:
        """Read the counts from the file from now on, because another process writes."""
        self.known.head = self.known.reserve = self.known.floor = self._rewinds = -1

    @property
    def reserve(self) -> int:
        """The number of rows that may have been written, committed or not."""
        reserve = self.known.reserve
        return reserve if reserve >= 0 else self._count(_RESERVE)

    def set_reserve(self, rows: int) -> None:
        """Store that ``rows`` rows may have been written."""
        word = word_of(rows)
        self._words[_RESERVE] = word
        self.known.reserve, self._spelt = rows, (rows, word)

    @property
    def head(self) -> int:
        """The number of committed rows."""
        head = self.known.head
        return head if head >= 0 else self._count(_HEAD)

    def set_head(self, rows: int) -> None:
        """Store that ``rows`` rows are committed."""
        count, word = self._spelt
        self._words[_HEAD] = word if count == rows else word_of(rows)
        self.known.head = rows

    @property
    def counts(self) -> tuple[int, int] | None:
        """Head and reserve of a writer, or None if another process may change them."""
        head, reserve = self.known.head, self.known.reserve
        return None if head < 0 or reserve < 0 else (head, reserve)

    @property
    def floor(self) -> int:
        """The row at which the ring was last emptied, or 0."""
        floor = self.known.floor
        return floor if floor >= 0 else self._count(_FLOOR)

    def set_floor(self, row: int) -> None:
        """Store ``row`` as the floor. No row below it may be valid any more."""
        self._words[_FLOOR] = word_of(row)
        self.known.floor = row

    @property
    def rewinds(self) -> int:
        """The number of rewinds."""
        return self._rewinds if self._rewinds >= 0 else self._count(_REWINDS)

    def set_rewinds(self, count: int) -> None:
        """Store the number of rewinds."""
        self._words[_REWINDS] = word_of(count)
        self._rewinds = count

    @property
    def open(self) -> bool:
        """True if a writer has the storage open or did not close it. Always False in version 2."""
        return self._knows_file and self._count(OPEN) != 0

    def begin_writing(self) -> None:
        """Mark the storage as open for writing, and store the identity of this file.

        If the last writer did not close the storage, wipe the records that it left unfinished.
        """
        if self._left_open:
            self.records.forget_torn()
        if self._knows_file:
            # Without the mark, any copy of the file may be opened. With the mark, only the file
            # whose identity is stored here may be opened.
            self._words[INODE] = word_of(inode_of(self._file))
            self._words[BORN] = word_of(creation_time(self._file))
            self._words[OPEN] = word_of(1)

    def end_writing(self) -> None:
        """Remove the mark of `begin_writing`. The files must contain exactly the committed rows."""
        if self._knows_file:
            self._words[CLOSED_AT] = word_of(self.head)
            self._words[OPEN] = word_of(0)

    def sync(self) -> None:
        """Wait until the header is on the disk."""
        with translated(self._path):
            os.fdatasync(self._file)

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest intact record, or None: the number of rows at its commit, and its payload."""
        return self.records.with_rows(self.head)

    def write_record(self, payload: bytes, head: int) -> None:
        """Write ``payload``, which becomes valid when ``head`` rows are committed.

        Raises:
            RecordTooLarge: the payload has more than `RECORD_LIMIT` bytes.
        """
        if len(payload) > RECORD_LIMIT:
            check_record_size(payload)
        sequence = self.known.sequence + 1
        self.records.write(sequence, head, payload)
        self.known.sequence = sequence

    def forget_uncommitted(self) -> None:
        """Wipe records of uncommitted rows, because later rows will have the same numbers."""
        self.records.forget_after(self.head)
        self.known.sequence = self.records.newest

    # --- rewinds ----------------------------------------------------------------------------------

    def begin_rewind(self, rewind: Rewind) -> None:
        """Write the record of a rewind, which is committed by storing `Rewind.rows` as ``head``."""
        check_record_size(rewind.payload)
        self.known.sequence += 1
        self.records.write_rewind(self.known.sequence, rewind)

    @property
    def undone(self) -> Rewind | None:
        """The rewind that is committed and not yet finished, or None."""
        rewind = self.records.rewind
        return rewind if rewind is not None and self.head <= rewind.rows else None

    def finish_rewind(self) -> None:
        """Allow appends after a rewind, or discard a rewind that was never committed.

        In a ring, the slots of rewound rows stay reserved, because the rows that they had replaced
        are lost. If no row remains valid, the ring continues as an empty one.
        """
        rewind, head, ring = self.undone, self.head, self.ring
        if rewind is None:
            self.records.forget_rewind()
            self.known.sequence = self.records.newest
            return
        if not ring:
            self.set_reserve(head)
        elif self.reserve >= head + ring or self.floor > head:
            self.set_floor(head)  # first, so that a reader never finds the floor above the rows
            self.set_reserve(head + ring)
        elif self.reserve > ring:  # count indices from the oldest row, as a writer does
            self.set_floor(self.reserve - ring)
        self.set_rewinds(rewind.number)
        if rewind.at >= 0:
            self.write_record(rewind.payload, rewind.at)
        else:
            self.records.forget()
        self.forget_uncommitted()

    def close(self) -> None:
        """Close the file. The map is unmapped once nothing refers to it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _opened(open_file: Callable[[int], int], path: Path, *, writable: bool) -> int:
    try:
        return open_file(os.O_RDWR if writable else os.O_RDONLY)
    except FileNotFoundError as error:
        raise CorruptStorage(
            f"{path} is missing, so the number of committed rows is unknown. Restore it from a "
            "copy."
        ) from error
    except OSError as error:
        raise failed(path, error, 0) from error


def _mapped(file: int, path: Path, *, writable: bool) -> mmap.mmap:
    size = os.fstat(file).st_size
    refuse_newer(os.pread(file, RECORDS_AT, 0), path)
    if size < HEADER_NBYTES:
        raise CorruptStorage(
            f"{path} should have {HEADER_NBYTES} bytes and has {size}: it was cut short. Restore "
            "it from a copy."
        )
    try:
        return map_file(file, HEADER_NBYTES, "write" if writable else "read").memory
    except ValueError as error:
        raise CorruptStorage(
            f"{path} was cut short while it was opened ({error}). Restore it from a copy."
        ) from error


def committed_counts(header: bytes) -> tuple[int, int]:
    """Return ``reserve`` and ``head`` from the bytes of a header. Missing bytes count as 0."""
    words = np.frombuffer(header[: 8 * (_HEAD + 1)].ljust(8 * (_HEAD + 1), b"\0"), np.uint64)
    return int(words[_RESERVE]) & COUNT, int(words[_HEAD]) & COUNT
