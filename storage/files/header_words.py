"""The machine words of a header, and those that show that a file is a copy.

Each word is a count with check bits, so that a reader detects a flipped bit.

Files that are copied one by one while a writer adds rows are of different moments: the header may
count rows that were not there yet when the columns were copied. So the header says that it is open
for writing, and which file it lies in, which a copy of it cannot be. Offsets in bytes::

    192    1 from the moment that a writer opens the storage until it has closed it, else 0
    200    inode of the file
    208    when the file was made, in seconds; 0 if the file system does not say
    216    rows that were committed at the last clean close

Another file may have the same inode number by chance, on another file system or after the original
was deleted; it will not have been made in the same second as well. Both numbers stay the same when
a file is renamed, and when the machine is restarted.
"""

from __future__ import annotations

import binascii
import ctypes
import os

COUNT_BITS = 48
COUNT = (1 << COUNT_BITS) - 1
"""The bits of a word that are its count."""

OPEN, INODE, BORN, CLOSED_AT = 192 // 8, 200 // 8, 208 // 8, 216 // 8

_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_STATX_NBYTES, _BTIME_AT = 256, 80


def word_of(count: int) -> int:
    """Return a count below 2**48 with its check bits: the CRC of the count in the upper 16."""
    return count | binascii.crc_hqx(count.to_bytes(6, "little"), 0) << COUNT_BITS


def count_of(word: int) -> int | None:
    """Return the count in a word; None if its check bits do not fit."""
    count = word & COUNT
    return count if word_of(count) == word else None


def born_at(file: int) -> int:
    """Return when an open file was made, in seconds since 1970; 0 if the system does not say."""
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
    """Return the number of an open file's inode, as a count."""
    inode = os.fstat(file).st_ino
    return (inode ^ inode >> COUNT_BITS) & COUNT


def moved_into(file: int, header: bytes) -> bytes:
    """Return a header's bytes for another ``file`` that takes the place of its own.

    Only the words that name the file change; a header without them stays as it is.
    """
    words = memoryview(bytearray(header)).cast("Q")
    if words[INODE]:
        words[INODE], words[BORN] = word_of(inode_of(file)), word_of(born_at(file))
    return bytes(words)
