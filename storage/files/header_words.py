"""The machine words of a header, including words that reveal that a file is a copy.

Each word is a count with check bits, so that a reader detects a flipped bit.

Files that are copied one by one while a writer adds rows are inconsistent: the header may count
rows that did not exist when the columns were copied. The header therefore records that it is open
for writing, and the identity of its file, which differs for a copy. Offsets in bytes::

    192    1 while a writer has the storage open, else 0
    200    inode of the file
    208    creation time of the file, in seconds; 0 if the file system does not provide it
    216    number of committed rows at the last clean close

Another file may have the same inode number by chance, on another file system or after the original
was deleted. It is very unlikely to have been created in the same second as well. Renaming the file
or restarting the machine changes neither number.
"""

from __future__ import annotations

import binascii
import ctypes
import os

COUNT_BITS = 48
COUNT = (1 << COUNT_BITS) - 1
"""The bits of a word that hold its count."""

OPEN, INODE, BORN, CLOSED_AT = 192 // 8, 200 // 8, 208 // 8, 216 // 8

_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_STATX_NBYTES, _BTIME_AT = 256, 80


def word_of(count: int) -> int:
    """Return a count below 2**48 with its CRC in the upper 16 bits."""
    return count | binascii.crc_hqx(count.to_bytes(6, "little"), 0) << COUNT_BITS


def count_of(word: int) -> int | None:
    """Return the count in a word, or None if its check bits do not match."""
    count = word & COUNT
    return count if word_of(count) == word else None


def creation_time(file: int) -> int:
    """Return the creation time of an open file, in seconds since 1970, or 0 if unknown."""
    try:
        statx = ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return 0
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx(file, b"", _AT_EMPTY_PATH, _STATX_BTIME, found):
        return 0
    if not int.from_bytes(found.raw[:4], "little") & _STATX_BTIME:
        return 0
    return int.from_bytes(found.raw[_BTIME_AT : _BTIME_AT + 8], "little") & COUNT


def inode_of(file: int) -> int:
    """Return the inode number of an open file, folded to the bits of a count."""
    inode = os.fstat(file).st_ino
    return (inode ^ inode >> COUNT_BITS) & COUNT


def with_identity_of(file: int, header: bytes) -> bytes:
    """Return ``header`` with the identity of ``file``, which will replace the header's file.

    Only the words that identify the file change. A header without them is returned unchanged.
    """
    words = memoryview(bytearray(header)).cast("Q")
    if words[INODE]:
        words[INODE], words[BORN] = word_of(inode_of(file)), word_of(creation_time(file))
    return bytes(words)
