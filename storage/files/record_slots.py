"""The two slots of a header, to which records are written in turn.

A slot consists of the sequence number of the record, the head when it was written, the length and
CRC, and the payload. A torn record fails its CRC, and the older one remains.

The record of a rewind stores ``-1 - rows`` in place of the head, where ``rows`` is the number of
rows to keep. Its payload begins with the number of the rewind and the number of rows of the
restored record. The record is valid only while at most ``rows`` rows are committed. A single store,
to the head, therefore replaces the rows and the record together.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from tallyroll.storage.errors import RecordTooLarge

RECORD_LIMIT = 65536
"""Maximum size of a commit record in bytes."""
RECORDS_AT, _SLOT_NBYTES = 4096, 69632
RECORDS_NBYTES = 2 * _SLOT_NBYTES
"""Size of both slots in bytes, a whole number of pages."""

_SLOT, _CHECKED, _SEQUENCE = struct.Struct("<qqqI"), struct.Struct("<qqq"), struct.Struct("<q")
_REWIND = struct.Struct("<qq")
_SLOT_HEAD_NBYTES, _SEQUENCE_NBYTES = _SLOT.size, _SEQUENCE.size
STARTS = RECORDS_AT, RECORDS_AT + _SLOT_NBYTES
"""The offsets of the slots."""

Record = tuple[int, int, bytes]
"""The sequence number of a record, the number of rows committed with it, and its payload."""


class Rewind(NamedTuple):
    """A rewind that has begun and is not finished."""

    number: int
    """The number of rewinds, including this one."""
    rows: int
    """The number of rows to keep."""
    at: int
    """The number of rows at which the restored record was written, or -1 for no record."""
    payload: bytes
    """The payload of the restored record."""


class RecordSlots:
    """The two record slots of a mapped header.

    Args:
        memory: the map of the header.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @property
    def intact(self) -> list[Record]:
        """The records that pass their check, newest first, except those of rewinds."""
        return [each for each in self._all if each[1] >= 0]

    @property
    def _all(self) -> list[Record]:
        return sorted(filter(None, map(self.read, (0, 1))), reverse=True)

    @property
    def rewind(self) -> Rewind | None:
        """The rewind, if its record is the newest, else None."""
        return _rewind_of(self._all)

    def with_rows(self, head: int) -> tuple[int, bytes] | None:
        """Return the record that is valid for ``head`` committed rows, or None.

        The result is the number of rows that were committed with the record, and its payload.
        """
        every = self._all
        rewind = _rewind_of(every)
        if rewind is not None and head <= rewind.rows:
            return (rewind.at, rewind.payload) if rewind.at >= 0 else None
        return next(((rows, found) for _, rows, found in every if 0 <= rows <= head), None)

    def write_rewind(self, sequence: int, rewind: Rewind) -> None:
        """Write the record of a rewind to the slot for its sequence number."""
        payload = _REWIND.pack(rewind.number, rewind.at) + rewind.payload
        self.write(sequence, -1 - rewind.rows, payload)

    @property
    def damaged(self) -> bool:
        """True if a record newer than the newest intact one fails its check.

        A record whose write was interrupted by a kill does not count, because the slot still has
        the older sequence number.
        """
        begun = [_SLOT.unpack_from(self._memory, start)[0] for start in STARTS]
        return bool(max(begun) > self.newest)

    @property
    def newest(self) -> int:
        """The sequence number of the newest intact record, or 0."""
        return max((sequence for sequence, _, _ in self._all), default=0)

    def read(self, index: int) -> Record | None:
        """Return the record of a slot, or None if it is empty or fails its check."""
        start = STARTS[index]
        sequence, head, length, _ = _SLOT.unpack_from(self._memory, start)
        if sequence < 1 or not 0 <= length <= RECORD_LIMIT + _REWIND.size:
            return None
        body = start + _SLOT_HEAD_NBYTES
        payload = self._memory[body : body + length]
        if self.seal(sequence, head, payload) != self._memory[start:body]:
            return None
        return sequence, head, payload

    def seal(self, sequence: int, head: int, payload: bytes) -> bytes:
        """Return the bytes of a slot that precede the payload; `commit` in ``_rows.h`` does too."""
        length = len(payload)
        crc = zlib.crc32(payload, zlib.crc32(_CHECKED.pack(sequence, head, length)))
        return _SLOT.pack(sequence, head, length, crc)

    def write(self, sequence: int, head: int, payload: bytes) -> None:
        """Write a record to the slot for its sequence number."""
        seal, start = self.seal(sequence, head, payload), STARTS[sequence % 2]
        body = start + _SLOT_HEAD_NBYTES
        self._memory[body : body + len(payload)] = payload
        # Write the sequence number last. A kill before leaves the older one, and the record does
        # not count as damaged.
        self._memory[start + _SEQUENCE_NBYTES : body] = seal[_SEQUENCE_NBYTES:]
        _SEQUENCE.pack_into(self._memory, start, sequence)

    def forget_after(self, head: int) -> None:
        """Wipe the records that were written for more than ``head`` rows."""
        self._wipe(lambda record: record is not None and record[1] > head)

    def forget(self) -> None:
        """Wipe both records."""
        self._wipe(lambda record: True)

    def forget_rewind(self) -> None:
        """Wipe the records of rewinds."""
        self._wipe(lambda record: record is not None and record[1] < 0)

    def forget_torn(self) -> None:
        """Wipe the records that fail their check."""
        self._wipe(lambda record: record is None)

    def _wipe(self, doomed: Callable[[Record | None], bool]) -> None:
        for index, start in enumerate(STARTS):
            if doomed(self.read(index)):
                _SLOT.pack_into(self._memory, start, 0, 0, 0, 0)


def _rewind_of(records: list[Record]) -> Rewind | None:
    """Return the rewind, if its record is the first of ``records``, else None."""
    for _, head, payload in records[:1]:
        if head < 0 and len(payload) >= _REWIND.size:
            number, at = _REWIND.unpack_from(payload)
            return Rewind(number, -1 - head, at, payload[_REWIND.size :])
    return None


def check_record_size(payload: bytes) -> None:
    """Raise if a payload does not fit into a record slot.

    Raises:
        RecordTooLarge: the payload has more than `RECORD_LIMIT` bytes.
    """
    if len(payload) > RECORD_LIMIT:
        raise RecordTooLarge(
            f"a commit record may have {RECORD_LIMIT} bytes and this one has {len(payload)}. Store "
            "larger data in a separate file, and the name of that file in the record."
        )
