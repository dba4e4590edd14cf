"""Files of TFRecord: one record after the other, each with its length and two checksums."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

from tallyroll.storage.datasets.exchange.formats.rlds.examples import descriptors
from tallyroll.storage.datasets.exchange.outgoing import BLOCK_NBYTES
from tallyroll.storage.engine.memory_left import require_memory
from tallyroll.storage.formats.optional_libraries import needed

_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_MASK: Final = 0xA282EAD8
FRAME_NBYTES: Final = _LENGTH.size + 2 * _CRC.size
"""Bytes of a record's length and of its checksums."""
_COPIES: Final = 10
"""Times that a record may be in memory when it is parsed: a number of one byte takes eight."""


@dataclass(frozen=True)
class Damage:
    """A record that cannot be read."""

    why: str
    at: int
    """The byte of the file at which it begins."""


def crc_module() -> Any:
    """Return the library of checksums."""
    return needed("google_crc32c", "rlds", "RLDS needs")


def require_libraries() -> None:
    """Raise MissingLibrary unless records and their messages can be read and written."""
    descriptors()
    crc_module()


def _masked(crc32c: Any, content: bytes) -> int:
    """Return the checksum of TFRecord: CRC32C, turned by 15 bits, and moved by a constant."""
    crc = crc32c.value(content)
    return int(((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def write_record(file: IO[bytes], content: bytes) -> int:
    """Write a record; return how many bytes it takes."""
    crc32c = crc_module()
    length = _LENGTH.pack(len(content))
    file.write(length + _CRC.pack(_masked(crc32c, length)))
    file.write(content)
    file.write(_CRC.pack(_masked(crc32c, content)))
    return len(content) + FRAME_NBYTES


def records(file: IO[bytes]) -> Iterator[bytes | Damage]:
    """Yield the records of a file; in the place of one that cannot be read, why.

    Nothing follows one whose length is damaged: where the next one begins is not known.

    Raises:
        NotEnoughMemory: a record does not fit into it.
    """
    crc32c = crc_module()
    at, size = 0, os.fstat(file.fileno()).st_size
    while at < size:
        head = file.read(_LENGTH.size + _CRC.size)
        if len(head) < _LENGTH.size + _CRC.size:
            yield Damage("the file ends within a record", at)
            return
        if _CRC.unpack_from(head, _LENGTH.size)[0] != _masked(crc32c, head[: _LENGTH.size]):
            yield Damage("the checksum of a record's length differs", at)
            return
        (length,) = _LENGTH.unpack_from(head)
        if length > size - at - FRAME_NBYTES:
            yield Damage("the file ends within a record", at)
            return
        if _COPIES * length > BLOCK_NBYTES:  # to ask takes longer than to read a little
            require_memory(
                _COPIES * length, f"a record of {length:,} bytes", "Use another machine."
            )
        content, foot = file.read(length), file.read(_CRC.size)
        if len(content) + len(foot) < length + _CRC.size:
            yield Damage("the file ends within a record", at)
            return
        if _CRC.unpack(foot)[0] == _masked(crc32c, content):
            yield content
        else:
            yield Damage("the checksum of a record differs", at)
        at += length + FRAME_NBYTES
