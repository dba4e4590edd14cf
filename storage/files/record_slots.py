"""The two slots of a header in which records are written in turn.

A slot has: sequence, head at write, length, CRC, payload. A torn record fails its CRC, and the
older one is left.

The record of a rewind has ``-1 - rows`` in the place of the head, where ``rows`` are those that are
to stay, and its payload begins with the rewind's number and the rows that the record was written
with. It counts only once no more rows are committed: so one store, of the head, replaces rows and
record together.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from tallyroll.storage.errors import RecordTooLarge

RECORD_LIMIT = 65536
"""The most bytes that a commit record may have."""
RECORDS_AT, _SLOT_NBYTES = 4096, 69632
RECORDS_NBYTES = 2 * _SLOT_NBYTES
"""Bytes of both slots, a whole number of pages."""

_SLOT, _CHECKED, _SEQUENCE = struct.Struct("<qqqI"), struct.Struct("<qqq"), struct.Struct("<q")
_REWIND = struct.Struct("<qq")
_SLOT_HEAD_NBYTES, _SEQUENCE_NBYTES = _SLOT.size, _SEQUENCE.size
STARTS = RECORDS_AT, RECORDS_AT + _SLOT_NBYTES
"""Where the slots begin."""

Record = tuple[int, int, bytes]
"""The sequence of a record, the rows that are committed with it, and its payload."""


class Rewind(NamedTuple):
    """A rewind that was begun, and not finished."""

    number: int
    """How often rows were taken back, this time included."""
    rows: int
    """The rows that are to stay."""
    at: int
    """The rows that the record was written with; -1: there is to be none."""
    payload: bytes
    """The record."""


class RecordSlots:
    """Both slots of a mapped header.

    Args:
        memory: the map of the header.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @property
    def intact(self) -> list[Record]:
        """The records that pass their check, the newest first; not that of a rewind."""
        return [each for each in self._all if each[1] >= 0]

    @property
    def _all(self) -> list[Record]:
        return sorted(filter(None, map(self.read, (0, 1))), reverse=True)

    @property
    def rewind(self) -> Rewind | None:
        """The rewind whose record is the newest; None: a record of rows is."""
        return _rewind_of(self._all)

    def with_rows(self, head: int) -> tuple[int, bytes] | None:
        """Return the record that counts where ``head`` rows are committed, with its own rows."""
        every = self._all
        rewind = _rewind_of(every)
        if rewind is not None and head <= rewind.rows:
            return (rewind.at, rewind.payload) if rewind.at >= 0 else None
        return next(((rows, found) for _, rows, found in every if 0 <= rows <= head), None)

    def write_rewind(self, sequence: int, rewind: Rewind) -> None:
        """Write the record of a rewind into the slot whose turn it is."""
        payload = _REWIND.pack(rewind.number, rewind.at) + rewind.payload
        self.write(sequence, -1 - rewind.rows, payload)

    @property
    def damaged(self) -> bool:
        """True if a record newer than the newest intact one fails its check.

        A kill while a record is written does not count: it leaves an older sequence in the slot.
        """
        begun = [_SLOT.unpack_from(self._memory, start)[0] for start in STARTS]
        return bool(max(begun) > self.newest)

    @property
    def newest(self) -> int:
        """The sequence of the newest intact record, 0 if there is none."""
        return max((sequence for sequence, _, _ in self._all), default=0)

    def read(self, index: int) -> Record | None:
        """Return the record of a slot; None if it fails its check, or there is none."""
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
        """Return the bytes of a slot before the payload."""
        length = len(payload)
        crc = zlib.crc32(payload, zlib.crc32(_CHECKED.pack(sequence, head, length)))
        return _SLOT.pack(sequence, head, length, crc)

    def write(self, sequence: int, head: int, payload: bytes) -> None:
        """Write a record into the slot whose turn it is."""
        seal, start = self.seal(sequence, head, payload), STARTS[sequence % 2]
        body = start + _SLOT_HEAD_NBYTES
        self._memory[body : body + len(payload)] = payload
        # The sequence last: a kill before it leaves an older one, and no sign of damage.
        self._memory[start + _SEQUENCE_NBYTES : body] = seal[_SEQUENCE_NBYTES:]
        _SEQUENCE.pack_into(self._memory, start, sequence)

    def forget_after(self, head: int) -> None:
        """Wipe the records of more than ``head`` rows."""
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
    """Return the rewind whose record is the first of some; None: there is none."""
    for _, head, payload in records[:1]:
        if head < 0 and len(payload) >= _REWIND.size:
            number, at = _REWIND.unpack_from(payload)
            return Rewind(number, -1 - head, at, payload[_REWIND.size :])
    return None


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
