"""Detect a header in a copy of the file that its writer had open.

Files that are copied one by one while a writer adds rows are of different moments: the header may
count rows that were not there yet when the columns were copied. So the header says that it is open
for writing, and in which file it lies, which a copy cannot be. Four machine words, each a count
with check bits, offsets in bytes::

    192    1 from the moment that a writer opens the storage until it has closed it, else 0
    200    inode of the file
    208    when the file was made, in seconds; 0 where the file system does not say
    216    rows that were committed at the last clean close

An inode number alone may be the same by chance on another file system, or after the original was
deleted; that the file was made in the same second as well may not. Both stay as they are when a
file is renamed, and when the machine starts again.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from tallyroll.storage.errors import CopyOfOpenStorage, CorruptStorage
from tallyroll.storage.files.checked_counts import COUNT_BITS, count_of, word_of

__all__ = ["Origin", "born_at", "moved_into"]

_OPEN, _INODE, _BORN, _CLOSED_AT = 192 // 8, 200 // 8, 208 // 8, 216 // 8
_COUNT = (1 << COUNT_BITS) - 1

_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_STATX_NBYTES, _BTIME_AT = 256, 80


def born_at(file: int) -> int:
    """When an open file was made, in seconds since 1970; 0 where nothing says."""
    try:
        statx = ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return 0
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx(file, b"", _AT_EMPTY_PATH, _STATX_BTIME, found):
        return 0
    if not int.from_bytes(found.raw[:4], "little") & _STATX_BTIME:
        return 0
    return int.from_bytes(found.raw[_BTIME_AT : _BTIME_AT + 8], "little") & _COUNT


def _inode_of(file: int) -> int:
    inode = os.fstat(file).st_ino
    return (inode ^ inode >> COUNT_BITS) & _COUNT


def moved_into(file: int, header: bytes) -> bytes:
    """A header's bytes for another file that takes the place of its own; all else stays.

    Of a header that says nothing of its file nothing changes.
    """
    words = memoryview(bytearray(header)).cast("Q")
    if words[_INODE]:
        words[_INODE], words[_BORN] = word_of(_inode_of(file)), word_of(born_at(file))
    return bytes(words)


class Origin:
    """The words of a header of version 3 that identify its file.

    Args:
        words: the header, as machine words.
        file: the file that it was mapped from, open.
        path: of the file, for messages.
    """

    def __init__(self, words: memoryview[int], file: int, path: Path) -> None:
        self._words, self._file, self._path = words, file, path

    def _at(self, place: int) -> int:
        count = count_of(int(self._words[place]))
        if count is None:
            raise CorruptStorage(
                f"what {self._path} says of its file fails its check, at byte {8 * place}: it is "
                "damaged. Restore it from a copy."
            )
        return count

    @property
    def open(self) -> bool:
        """Whether a writer has the storage open, or was killed while it had."""
        return self._at(_OPEN) != 0

    @property
    def closed_at(self) -> int:
        """Rows that were committed at the last clean close."""
        return self._at(_CLOSED_AT)

    @property
    def own(self) -> bool:
        """Whether this is the file that the last writer wrote to."""
        born, now = self._at(_BORN), born_at(self._file)
        same_age = born == now or not born or not now
        return same_age and self._at(_INODE) == _inode_of(self._file)

    def require(self, *, accept_copy: bool) -> None:
        """Refuse a copy that was made while the storage was open for writing.

        Raises:
            CopyOfOpenStorage: it is one, and ``accept_copy`` is False.
            CorruptStorage: what the header says of its file is damaged.
        """
        closed_at = self.closed_at
        # The mark first: a writer takes a storage that is closed for its own before it sets it.
        if not self.open or self.own or accept_copy:
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

    def take(self) -> None:
        """Set the mark: a writer has the storage open, in this file."""
        # Not yet marked, it may be opened anywhere; marked, only here.
        self._words[_INODE] = word_of(_inode_of(self._file))
        self._words[_BORN] = word_of(born_at(self._file))
        self._words[_OPEN] = word_of(1)

    def leave(self, rows: int) -> None:
        """Clear the mark: all of ``rows`` committed rows are in the files, and no writer is."""
        self._words[_CLOSED_AT] = word_of(rows)
        self._words[_OPEN] = word_of(0)
