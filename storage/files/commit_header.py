"""The header: how many rows are reserved and committed, and the record of the last commit.

Layout, little-endian, offsets in bytes::

    0      magic, format version, slots of the ring (0: grows), CRC of the schema, CRC of all that
    64     reserve   count: rows that may have been written
    128    head      count: rows that are committed
    192    which file it lies in, and whether a writer has it open (see `header_words`)
    256    floor     count: the row at which a ring was emptied last, see `ring`; 0 if never
    4096   two record slots, each: sequence, head at write, length, CRC, payload

`reserve` and `head` lie in cache lines of their own and are stored as one
machine word each, so that a reader, also one after a kill, sees the old count or
the new one and nothing else. They have check bits (see `header_words`). A writer
uses the two record slots in turn; a torn record fails its CRC, and the older one
is left.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tallyroll.storage.errors import CopyOfOpenStorage, CorruptStorage, RecordTooLarge
from tallyroll.storage.files.counts import counts_of
from tallyroll.storage.files.header_words import (
    BORN,
    CLOSED_AT,
    COUNT,
    COUNT_BITS,
    INODE,
    OPEN,
    born_at,
    count_of,
    inode_of,
    word_of,
)
from tallyroll.storage.files.mapping import map_file
from tallyroll.storage.files.paths import failed, translated
from tallyroll.storage.files.versions import (
    FORMAT_VERSION,
    READABLE,
    is_newer,
    mismatch,
    require_readable,
)

RECORD_LIMIT = 65536
"""The most bytes that a commit record may have."""

_MAGIC = b"TALLYROL"
_IDENTITY = struct.Struct("<8sqqq")
_CHECKSUM = struct.Struct("<I")
_RESERVE, _HEAD, _FLOOR = 64 // 8, 128 // 8, 256 // 8
_MOST_ROWS, _MOST_SLOTS, _MOST_RECORDS = 2 ** (COUNT_BITS - 1), 2 ** (COUNT_BITS - 2), 2**62
"""Limits below the largest count, so that a writer can add rows and records to any storage."""
_SLOT = struct.Struct("<qqqI")
_SEQUENCE, _REST = struct.Struct("<q"), struct.Struct("<qqI")
_SLOT_HEAD_NBYTES, _SEQUENCE_NBYTES = _SLOT.size, _SEQUENCE.size
_CHECKED = struct.Struct("<qqq")
_SLOTS_AT, _SLOT_NBYTES = 4096, 69632
HEADER_NBYTES = _SLOTS_AT + 2 * _SLOT_NBYTES
"""Bytes of the header, a whole number of pages."""

CommitCounts = counts_of("head", "reserve", "floor", "sequence", "commits")
"""Counts of a storage that a writer keeps, so that it need not read them from the file.

Head, reserve and floor are -1 where another process writes, so that they must be read. ``sequence``
is that of the last record, and ``commits`` those of rows through this header.
"""
OneCommit = tuple[bytes, int, bytes]
"""The addresses that a commit writes to, the word of its count, and the head of its record."""


def header_bytes(schema_crc: int, *, ring: int = 0) -> bytes:
    """Return a new header without rows or record: of ``ring`` slots, 0 for one that grows."""
    identity = _IDENTITY.pack(_MAGIC, FORMAT_VERSION, ring, schema_crc)
    return (identity + _CHECKSUM.pack(zlib.crc32(identity))).ljust(HEADER_NBYTES, b"\0")


def refuse_newer(header: bytes, path: Path) -> None:
    """Raise `FormatVersionMismatch` for the first bytes of a later version's header.

    A later header may be laid out differently. In one of ours whose version is damaged, the
    checksum fits a known version.
    """
    content = header[: _IDENTITY.size + _CHECKSUM.size].ljust(_IDENTITY.size + _CHECKSUM.size)
    magic, version, *rest = _IDENTITY.unpack_from(content)
    if magic != _MAGIC or not is_newer(version):
        return
    (checksum,) = _CHECKSUM.unpack_from(content, _IDENTITY.size)
    ours = (_IDENTITY.pack(magic, known, *rest) for known in READABLE)
    if checksum not in map(zlib.crc32, ours):
        raise mismatch(version, path)


class Header:
    """A header mapped from the start of a file.

    Args:
        open_file: opens the file with the flags that it is given.
        path: its path, for messages.
        schema_crc: CRC-32 of the schema that the manifest declares.
        writable: map it for writing.
        version: the version that the manifest declares.
        accept_copy: open a copy that was made while a writer had the storage open.

    Raises:
        CorruptStorage: the file is missing, cut short or damaged.
        FormatVersionMismatch: written by another version.
        CopyOfOpenStorage: it is such a copy, and ``accept_copy`` is False.
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
        self._path = path
        try:
            self._file = open_file(os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError as error:
            raise CorruptStorage(
                f"{path} is missing, and without it no reader knows which rows are committed. "
                "Restore it from a copy."
            ) from error
        except OSError as error:
            raise failed(path, error, 0) from error
        self.known = CommitCounts()
        self.follow()
        self._spelt = (0, word_of(0))
        """The count that was stored last as reserve, and its word, mostly stored as head next."""
        try:
            self._map = self._mapped(writable)
            self.ring = self._check(schema_crc, version)
            self._words = memoryview(self._map)[:_SLOTS_AT].cast("Q")
            self._knows_file = version >= 3
            if self._knows_file:
                self._refuse_copy(accept_copy=accept_copy)
            self._check_counts()
            self.known.sequence = self._checked_sequence()
            self._left_open = self.open
            self._places = [self._places_of(index) for index in (0, 1)] if writable else []
        except BaseException:
            self.close()
            raise
        if writable:
            self._know()
        else:
            self.close()  # the map is all that it takes

    def follow(self) -> None:
        """Read the counts from the file every time: another process writes now."""
        self.known.head = self.known.reserve = self.known.floor = -1

    def _know(self) -> None:
        """Read the counts, which only this writer changes from here on."""
        known = self.known
        known.reserve, known.head, known.floor = self.reserve, self.head, self.floor

    def _mapped(self, writable: bool) -> mmap.mmap:
        size = os.fstat(self._file).st_size
        refuse_newer(os.pread(self._file, _SLOTS_AT, 0), self._path)
        if size < HEADER_NBYTES:
            raise CorruptStorage(
                f"{self._path} should have {HEADER_NBYTES} bytes and has {size}: it was cut "
                "short. Restore it from a copy."
            )
        try:
            return map_file(self._file, HEADER_NBYTES, "write" if writable else "read").memory
        except ValueError as error:
            raise CorruptStorage(
                f"{self._path} was cut short while it was opened ({error}). Restore it from a copy."
            ) from error

    def _refuse_copy(self, *, accept_copy: bool) -> None:
        closed_at = self._count(CLOSED_AT)
        # The mark first: a writer stores which file is its own before it sets the mark.
        if not self.open or self._is_own or accept_copy:
            return
        raise CopyOfOpenStorage(
            f"{self._path} is a copy of a storage that was open for writing when it was copied, or "
            "whose writer was killed before. Files that are copied one by one are of different "
            "moments, so that committed rows may be missing here: only the first "
            f"{closed_at}, which were committed when the original was last closed, are sure to be "
            "whole. Close the original (if its writer was killed, open it for appending and close "
            "it) and copy it again. To open this copy as it is, give accept_copy=True "
            "(--accept-copy on the command line); so too if it is no copy, and its file system "
            "gives files new inode numbers."
        )

    @property
    def _is_own(self) -> bool:
        """True if this is the file that the last writer wrote to."""
        born, now = self._count(BORN), born_at(self._file)
        same_age = born == now or not born or not now
        return same_age and self._count(INODE) == inode_of(self._file)

    def _check_counts(self) -> None:
        # A reader may look while they change: in this order, each is never too large.
        floor = self.floor
        head = self.head
        if head > (reserve := self.reserve):
            raise CorruptStorage(
                f"{self._path} says {head} rows committed of {reserve} reserved, which cannot be. "
                "Restore it from a copy."
            )
        if reserve > _MOST_ROWS:
            raise CorruptStorage(
                f"{self._path} says {head} rows committed of {reserve} reserved, and no storage "
                f"has more than {_MOST_ROWS}. Restore it from a copy."
            )
        if floor and floor + self.ring > reserve:
            raise CorruptStorage(
                f"{self._path} says that its ring of {self.ring} rows was emptied at row {floor}, "
                f"with {reserve} rows reserved, which cannot be. Restore it from a copy."
            )

    def _checked_sequence(self) -> int:
        sequence = self._newest_sequence()
        if sequence > _MOST_RECORDS:
            raise CorruptStorage(
                f"{self._path} says that its last record is number {sequence}, and no storage has "
                f"more than {_MOST_RECORDS}. Restore it from a copy."
            )
        return sequence

    def _check(self, schema_crc: int, wanted: int) -> int:
        """Check the first bytes; return the slots of the ring."""
        identity = self._map[: _IDENTITY.size]
        magic, version, ring, crc = _IDENTITY.unpack(identity)
        (checksum,) = _CHECKSUM.unpack_from(self._map, _IDENTITY.size)
        if magic != _MAGIC or checksum != zlib.crc32(identity):
            raise CorruptStorage(
                f"{self._path} does not begin as a header does: its first bytes are damaged. "
                "Restore it from a copy."
            )
        if not 0 <= ring <= _MOST_SLOTS:
            raise CorruptStorage(
                f"{self._path} says that it is of a ring of {ring} rows, which cannot be. Restore "
                "it from a copy."
            )
        if require_readable(version, self._path) != wanted:
            raise CorruptStorage(
                f"{self._path} is of format version {version}, and the manifest beside it of "
                f"{wanted}. Restore both from one copy."
            )
        if crc != schema_crc:
            raise CorruptStorage(
                f"{self._path} was made for another schema than the manifest beside it declares. "
                "Restore both from one copy."
            )
        return int(ring)

    def _count(self, at: int) -> int:
        count = count_of(int(self._words[at]))
        if count is None:
            raise CorruptStorage(
                f"a count in {self._path} fails its check, at byte {8 * at}: it is damaged, and "
                f"no reader knows which rows are committed{self._hint()}. Restore it from a copy."
            )
        return count

    def _hint(self) -> str:
        slots = self._intact
        return f" (the last record was written with {slots[0][1]})" if slots else ""

    @property
    def reserve(self) -> int:
        """The number of rows that may have been written, committed or not."""
        reserve = self.known.reserve
        return reserve if reserve >= 0 else self._count(_RESERVE)

    @reserve.setter
    def reserve(self, rows: int) -> None:
        word = word_of(rows)
        self._words[_RESERVE] = word
        self.known.reserve, self._spelt = rows, (rows, word)

    @property
    def head(self) -> int:
        """The number of rows that are committed."""
        head = self.known.head
        return head if head >= 0 else self._count(_HEAD)

    @head.setter
    def head(self, rows: int) -> None:
        count, word = self._spelt
        self._words[_HEAD] = word if count == rows else word_of(rows)
        self.known.head = rows

    @property
    def counts(self) -> tuple[int, int] | None:
        """Head and reserve of a writer; None if another process may change them."""
        head, reserve = self.known.head, self.known.reserve
        return None if head < 0 or reserve < 0 else (head, reserve)

    @property
    def floor(self) -> int:
        """The row at which the ring was emptied last, 0 if it never was."""
        floor = self.known.floor
        return floor if floor >= 0 else self._count(_FLOOR)

    def set_floor(self, row: int) -> None:
        """Store ``row`` as the floor, once no row below it is valid."""
        self._words[_FLOOR] = word_of(row)
        self.known.floor = row

    @property
    def open(self) -> bool:
        """True if a writer has the storage open, or did not close it; False of version 2."""
        return self._knows_file and self._count(OPEN) != 0

    def begin_writing(self) -> None:
        """Mark the storage as open for writing, in this file.

        If the last writer did not close the storage, a record that it did not finish is wiped.
        """
        if self._left_open:
            self._forget_torn()
        if self._knows_file:
            # Without the mark any file may be opened; with it only the file named here.
            self._words[INODE] = word_of(inode_of(self._file))
            self._words[BORN] = word_of(born_at(self._file))
            self._words[OPEN] = word_of(1)

    def end_writing(self) -> None:
        """Take the mark away: the files hold all committed rows, and nothing else."""
        if self._knows_file:
            self._words[CLOSED_AT] = word_of(self.head)
            self._words[OPEN] = word_of(0)

    def sync(self) -> None:
        """Return when the header is on the disk."""
        with translated(self._path):
            os.fdatasync(self._file)

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest intact record, with the number of rows that were committed with it."""
        head = self.head
        return next(((rows, payload) for _, rows, payload in self._intact if rows <= head), None)

    @property
    def record_damaged(self) -> bool:
        """True if a record newer than the newest intact one fails its check.

        A kill while a record is written does not count: it leaves an older sequence in the slot.
        """
        begun = [_SLOT.unpack_from(self._map, self._slot_start(index))[0] for index in (0, 1)]
        return bool(max(begun) > self._newest_sequence())

    def write_record(self, payload: bytes, head: int) -> None:
        """Write ``payload``, which becomes valid when ``head`` rows are committed.

        Raises:
            RecordTooLarge: more than `RECORD_LIMIT` bytes.
        """
        length = len(payload)
        if length > RECORD_LIMIT:
            check_record_size(payload)
        sequence = self.known.sequence + 1
        start = self._slot_start(sequence % 2)
        body = start + _SLOT_HEAD_NBYTES
        self._map[body : body + length] = payload
        crc = _slot_crc(sequence, head, payload)
        # The sequence last: a kill before it leaves an older one, and no sign of damage.
        _REST.pack_into(self._map, start + _SEQUENCE_NBYTES, head, length, crc)
        _SEQUENCE.pack_into(self._map, start, sequence)
        self.known.sequence = sequence

    def commit_in_one(self, rows: int, payload: bytes) -> OneCommit | None:
        """Return addresses, word and seal with which the kernel commits ``rows`` more rows.

        The caller must call :meth:`committed` then. Return None if an earlier commit was
        interrupted, or if another process writes.
        """
        known = self.known
        if known.head < 0 or known.reserve != known.head:
            return None
        head, sequence = known.head + rows, known.sequence + 1
        seal = _SLOT.pack(sequence, head, len(payload), _slot_crc(sequence, head, payload))
        return self._places[sequence % 2], word_of(head), seal

    def committed(self, rows: int) -> None:
        """Record that the kernel made the commit of ``rows`` rows from `commit_in_one`."""
        known = self.known
        known.reserve = known.head = known.head + rows
        known.sequence += 1

    @property
    def addresses(self) -> bytes:
        """Addresses of `reserve`, of `head` and of both record slots, for a writer.

        The map of this header owns the memory.
        """
        return self._places[0] + self._places[1][-_SEQUENCE_NBYTES:]

    def _places_of(self, index: int) -> bytes:
        """Return addresses of `reserve`, `head` and a record slot, for `Kernel.commit_rows`."""
        base = np.frombuffer(self._map, np.uint8).ctypes.data
        places = (8 * _RESERVE, 8 * _HEAD, self._slot_start(index))
        return struct.pack("=3q", *(base + place for place in places))

    def forget_uncommitted(self) -> None:
        """Wipe records of rows that were never committed: later rows will take their place."""
        head = self.head
        for index in (0, 1):
            slot = self._read_slot(index)
            if slot and slot[1] > head:
                _SLOT.pack_into(self._map, self._slot_start(index), 0, 0, 0, 0)
        self.known.sequence = self._newest_sequence()

    def _forget_torn(self) -> None:
        for index in (0, 1):
            if self._read_slot(index) is None:
                _SLOT.pack_into(self._map, self._slot_start(index), 0, 0, 0, 0)

    def _newest_sequence(self) -> int:
        return max((sequence for sequence, _, _ in self._intact), default=0)

    @property
    def _intact(self) -> list[tuple[int, int, bytes]]:
        """The records that pass their check, as `_read_slot` returns them, the newest first."""
        return sorted(filter(None, map(self._read_slot, (0, 1))), reverse=True)

    def _slot_start(self, index: int) -> int:
        return _SLOTS_AT + index * _SLOT_NBYTES

    def _read_slot(self, index: int) -> tuple[int, int, bytes] | None:
        start = self._slot_start(index)
        sequence, head, length, crc = _SLOT.unpack_from(self._map, start)
        if sequence < 1 or not 0 <= length <= RECORD_LIMIT:
            return None
        payload = self._map[start + _SLOT.size : start + _SLOT.size + length]
        if _slot_crc(sequence, head, payload) != crc:
            return None
        return sequence, head, payload

    def close(self) -> None:
        """Close the file. The map is unmapped when nothing refers to it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def committed_counts(header: bytes) -> tuple[int, int]:
    """Return ``reserve`` and ``head`` from the bytes of a header; 0 for bytes that are missing."""
    words = np.frombuffer(header[: 8 * (_HEAD + 1)].ljust(8 * (_HEAD + 1), b"\0"), np.uint64)
    return int(words[_RESERVE]) & COUNT, int(words[_HEAD]) & COUNT


def check_record_size(payload: bytes) -> None:
    """Refuse a payload that does not fit into a record slot.

    Raises:
        RecordTooLarge: more than `RECORD_LIMIT` bytes.
    """
    if len(payload) > RECORD_LIMIT:
        raise RecordTooLarge(
            f"a commit record may have {RECORD_LIMIT} bytes and this one has {len(payload)}. "
            "Keep what is larger in a file of its own and its name in the record."
        )


def _slot_crc(sequence: int, head: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_CHECKED.pack(sequence, head, len(payload))))
