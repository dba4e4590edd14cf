"""Slots of a ring, and the rows that are valid. Pure.

Row numbers count all rows ever written: 0, 1, 2, ... In a ring of ``size`` slots, row r is in slot
``r % size``. ``reserve`` counts the rows that may have been written, and ``head`` those that are
committed. The rows ``[reserve - size, head)`` are valid, because the slots of the rows from
``head`` to ``reserve`` may be half overwritten. Without a ring ``size`` is 0, and row r is in slot
r.

A writer empties a ring by storing ``head + size`` as ``reserve``. No row is valid then. Later rows
become valid one by one, until there are ``size`` of them. The row at which the ring was last
emptied is the ``floor``. No row below the floor is valid. Indices are counted from the floor, as in
a new ring: row r has index ``(r - floor) % size``.

Several modules write ``row % ring`` themselves, such as `storage/readers/file_reader.py`,
`storage/rows/indexing.py`, `storage/ext/sampling/priorities.py` and, in C, ``_sum_tree.c``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np

from tallyroll.storage.errors import BatchTooLong, Overrun

Rows = TypeVar("Rows", int, np.ndarray)


def first_valid(reserve: int, size: int) -> int:
    """Return the oldest row that the writer has not begun to overwrite."""
    return max(0, reserve - size) if size else 0


def slots_of(rows: Rows, size: int) -> Rows:
    """Return the slots of rows."""
    return rows % size if size else rows


def require_slots(path: Path, size: int, count: int) -> None:
    """Raise `BatchTooLong` if the ring at ``path`` has fewer than ``count`` slots."""
    if 0 < size < count:
        raise BatchTooLong(
            f"{path}: expected at most {size} rows at once, the size of its ring, got {count}. "
            f"Nothing was written. Write fewer rows at a time, or only the last {size}."
        )


def overrun(path: Path, size: int, what: str) -> Overrun:
    """Return the error for rows that a writer overwrites before they are read."""
    return Overrun(
        f"{path} is a ring of {size} rows, and its writer overwrites rows faster than {what} can "
        "be read. Read fewer rows at a time, or make the ring larger."
    )


def in_use(rows: int, size: int) -> int:
    """Return the number of slots that ``rows`` rows occupy."""
    return min(rows, size) if size else rows


def pieces(start: int, stop: int, size: int) -> list[tuple[int, int, int]]:
    """Split rows ``[start, stop)``, at most ``size`` of them, into one or two runs of slots.

    Each run is a tuple of its first slot, its first row counted from ``start``, and its length.
    """
    count = stop - start
    slot = slots_of(start, size)
    if not size or slot + count <= size:
        return [(slot, 0, count)]
    fitting = size - slot
    return [(slot, 0, fitting), (0, fitting, count - fitting)]


def slots_at(index: np.ndarray, head: int, reserve: int, size: int, floor: int = 0) -> np.ndarray:
    """Return the slots of the valid rows ``index`` [*], which are counted from 0 in slot order.

    Index i is slot i, except that half-overwritten rows are skipped. If ``floor`` is not 0, the
    count begins at the slot of that row.
    """
    if floor:
        return slots_of(slots_at(index, head - floor, reserve - floor, size) + floor, size)
    torn = reserve - head
    if not size or torn <= 0 or reserve <= size:
        return index
    begin = head % size
    end = begin + torn
    if end > size:
        return index + (end - size)
    # Before the ring has wrapped, there are no valid rows after the torn slots.
    return np.where(index < begin, index, index + torn)


def index_at(slots: np.ndarray, head: int, reserve: int, size: int, floor: int = 0) -> np.ndarray:
    """Return the index of each slot [*] of a valid row, the inverse of `slots_at`."""
    if floor:
        return index_at(slots_of(slots - floor, size), head - floor, reserve - floor, size)
    torn = reserve - head
    if not size or torn <= 0 or reserve <= size:
        return slots
    begin = head % size
    end = begin + torn
    if end > size:
        return slots - (end - size)
    return np.where(slots < begin, slots, slots - torn)


def rows_in(slots: np.ndarray, head: int, size: int) -> np.ndarray:
    """Return the newest committed row in each slot."""
    return head - 1 - (head - 1 - slots) % size if size else slots
