"""Read and write TFRecord files. Each record stores its length and two checksums."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.rlds.examples import descriptors
from tallyroll.storage.files.safe_files import data_ranges
from tallyroll.storage.formats.optional_libraries import needed

_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_MASK: Final = 0xA282EAD8
_SEARCHED: Final = 2**20
_BLOCK: Final = 2**12
"""The number of bytes in the smallest unit that a disk reads, or fails to read."""
FRAME_NBYTES: Final = _LENGTH.size + 2 * _CRC.size
"""The size in bytes of a record's length and its two checksums."""
_COPIES: Final = 10
"""The memory that parsing a record takes, as a multiple of its size.

A number of one byte in the record takes eight bytes in memory.
"""


@dataclass(frozen=True)
class Damage:
    """A record that cannot be read."""

    why: str
    at: int
    """The offset of the record in the file, in bytes."""


def crc_module() -> Any:
    """Return the module that computes checksums."""
    return needed("google_crc32c", "rlds", "RLDS needs")


def require_libraries() -> None:
    """Raise `MissingLibrary` unless the libraries for records and their messages are installed."""
    descriptors()
    crc_module()


def _masked(crc32c: Any, content: bytes) -> int:
    """Return TFRecord's checksum: CRC32C, rotated by 15 bits, plus a constant."""
    crc = crc32c.value(content)
    return int(((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def write_record(file: IO[bytes], content: bytes) -> int:
    """Write a record and return its size in bytes, including length and checksums."""
    crc32c = crc_module()
    length = _LENGTH.pack(len(content))
    file.write(length + _CRC.pack(_masked(crc32c, length)))
    file.write(content)
    file.write(_CRC.pack(_masked(crc32c, content)))
    return len(content) + FRAME_NBYTES


def records(file: IO[bytes]) -> Iterator[bytes | Damage]:
    """Yield the records of a file. A `Damage` takes the place of records that cannot be read.

    If the length of a record is damaged, the function searches for the next position at which a
    length is followed by its checksum.

    Raises:
        NotEnoughMemory: a record does not fit into memory.
    """
    crc32c = crc_module()
    at, size = 0, os.fstat(file.fileno()).st_size
    while at < size:
        head = _read(file, _LENGTH.size + _CRC.size)
        if size - at < _LENGTH.size + _CRC.size:
            yield Damage("the file ends within a record", at)
            return
        if why := _damage(crc32c, head, size - at):
            yield Damage(why, at)
            at = next_record(file, at + 1, size)
            file.seek(at)
            continue
        (length,) = _LENGTH.unpack_from(head)
        if _COPIES * length > BLOCK_NBYTES:  # the check takes longer than a small read
            require_memory(
                _COPIES * length,
                f"a record of {length:,} bytes",
                "Use a machine with more memory.",
            )
        content = _read(file, length + _CRC.size)
        at += length + FRAME_NBYTES
        if len(content) < length + _CRC.size:
            yield Damage("the disk cannot read a part of a record", at - length - FRAME_NBYTES)
            file.seek(at)
        elif _CRC.unpack_from(content, length)[0] == _masked(crc32c, content[:length]):
            yield content[:length]
        else:
            yield Damage("the checksum of a record does not match", at - length - FRAME_NBYTES)


def _damage(crc32c: Any, head: bytes, left: int) -> str:
    """Return why ``head`` is not a valid record length, or an empty string if it is valid."""
    if len(head) < _LENGTH.size + _CRC.size:
        return "the disk cannot read a record's length"
    if _CRC.unpack_from(head, _LENGTH.size)[0] != _masked(crc32c, head[: _LENGTH.size]):
        return "the checksum of a record's length does not match"
    over = _LENGTH.unpack_from(head)[0] > left - FRAME_NBYTES
    return "the file ends within a record" if over else ""


def _read(file: IO[bytes], nbytes: int) -> bytes:
    """Read bytes. The result is shorter if the disk cannot read some of them."""
    try:
        return file.read(nbytes)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def next_record(file: IO[bytes], at: int, size: int) -> int:
    """Return the offset of the first record at or after ``at``, or ``size`` if there is none."""
    more = _LENGTH.size + _CRC.size - 1
    while at < size:
        begin, _ = next(data_ranges(file.fileno(), at), (size, size))
        at = max(at, begin - more)  # a length may start with zeros in a hole
        file.seek(at)
        content = _read(file, min(_SEARCHED, size - at))
        for found in _heads(content).tolist():
            (length,) = _LENGTH.unpack_from(content, found)
            if length <= size - at - found - FRAME_NBYTES:
                return at + int(found)
        # Skip the searched bytes, except the last ones: a length and its checksum may begin there.
        at += max(1, len(content) - more) if content else _BLOCK - at % _BLOCK
    return size


def _heads(content: bytes) -> np.ndarray:
    """Return the offsets at which a length is followed by its checksum."""
    octets = np.frombuffer(content, np.uint8)
    count = len(octets) - _LENGTH.size - _CRC.size + 1
    if count < 1:
        return np.zeros(0, np.int64)
    crc = np.full(count, 0xFFFFFFFF, np.uint32)
    for at in range(_LENGTH.size):
        byte = octets[at : at + count]
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15) | (crc << 17)) + np.uint32(_MASK)
    said = sum(
        octets[_LENGTH.size + at : _LENGTH.size + at + count].astype(np.uint32) << (8 * at)
        for at in range(_CRC.size)
    )
    return np.flatnonzero(masked == said)


def _table() -> np.ndarray:
    """Return the CRC32C lookup table, one entry per byte value."""
    found = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        found = np.where(found & 1, found >> 1 ^ np.uint32(0x82F63B78), found >> 1)
    return found.astype(np.uint32)


_TABLE: Final = _table()
