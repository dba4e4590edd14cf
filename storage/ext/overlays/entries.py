"""Entries of an overlay: two copies of a value and a word that selects the valid copy.

The word holds the number of the row plus one, above a 24-bit counter of writes to the entry. The
lowest bit of the counter selects the valid copy. A writer fills the other copy and then stores the
word, eight bytes at once, so a writer that is killed leaves either the old value or the new one.
A reader checks the words again after it has copied the values, and repeats the copy of each entry
whose word changed.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from tallyroll.storage.rows.schema import Column

WORD_NBYTES: Final = 8
_COUNT_BITS: Final = 24
_COUNT: Final = 2**_COUNT_BITS - 1
MOST_ROWS: Final = 2**38
"""Maximum number of rows that a word can name."""
_PATIENCE_SECONDS: Final = 1.0


class Torn(Exception):
    """A writer kept changing values while they were read."""


def entry_dtype(column: Column) -> np.dtype[Any]:
    """Return the dtype of an entry. Its size is a multiple of the size of a word."""
    nbytes = entry_nbytes(column)
    return np.dtype(
        {
            "names": ["word", "copies"],
            "formats": ["<i8", (column.numpy_dtype, (2, *column.shape))],
            "offsets": [0, WORD_NBYTES],
            "itemsize": nbytes,
        }
    )


def entry_nbytes(column: Column) -> int:
    """Return the size of an entry in bytes."""
    nbytes = WORD_NBYTES + 2 * column.row_nbytes
    return -(-nbytes // WORD_NBYTES) * WORD_NBYTES


def take(entries: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copy the values in ``slots`` [n].

    Returns:
        The copies [n, ...], and a bool array [n] that is True where an entry belongs to ``rows``.

    Raises:
        Torn: a writer is faster than this reader.
    """
    words, copies = entries["word"], entries["copies"]
    seen = words[slots]
    found = copies[slots, seen & 1]
    changed = np.flatnonzero(words[slots] != seen)
    deadline = time.monotonic() + _PATIENCE_SECONDS if len(changed) else 0.0
    while len(changed):
        at = slots[changed]
        seen[changed] = now = words[at]
        found[changed] = copies[at, now & 1]
        changed = changed[words[at] != now]
        if len(changed) and time.monotonic() > deadline:
            raise Torn
    return found, (seen >> _COUNT_BITS) == rows + 1


def put(entries: np.ndarray, slots: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """Write values [n, ...] of ``rows`` [n] to their slots [n]; the last value of a row wins."""
    words = entries["word"]
    count = (words[slots] + 1) & _COUNT
    entries["copies"][slots, count & 1] = values
    words[slots] = ((rows + 1) << _COUNT_BITS) | count


def clear(entries: np.ndarray, first: int) -> None:
    """Release the entries of the rows from number ``first`` on, so that they belong to no row."""
    words = entries["word"]
    gone = np.flatnonzero((words >> _COUNT_BITS) > first)
    words[gone] = (words[gone] + 1) & _COUNT


def rows_in(entries: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the numbers of the rows in the entries ``[start, stop)``; -1 for none."""
    found: np.ndarray = (entries["word"][start:stop] >> _COUNT_BITS) - 1
    return found
