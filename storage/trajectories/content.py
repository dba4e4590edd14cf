"""The content of a storage: its rows in a canonical order.

Rows are ordered by trajectory and step, so that the order does not depend on the order of commits,
on the format or on the files.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.rows.keys import CUT, STEP, TRAJ_IDS, Key, format_key
from tallyroll.storage.rows.readable_rows import ReadableRows
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.trajectories.columns import missing, numbers_of

Numbering: TypeAlias = Literal["kept", "relative"]
NAMING: Final = (TRAJ_IDS, STEP)
"""The columns that identify a row."""


def compared_columns(schema: Schema) -> list[Column]:
    """Return the columns that are part of the content, ordered by name."""
    return sorted(
        (column for column in schema.columns if column.key != CUT),
        key=lambda column: format_key(column.key),
    )


class Content:
    """The current rows of a reader, ordered by trajectory and step.

    The rows are represented as runs. A run consists of rows of one trajectory that are consecutive
    both in the storage and in this order.

    Args:
        reader: the reader.
        numbering: ``"relative"`` numbers trajectories 0, 1, 2 ... in the order of their ids.
        steps_apart: a run ends before each step that is a multiple of ``2 ** steps_apart``.

    Raises:
        ColumnsMissing: the rows lack trajectory ids or steps.
        Overrun: the writer of a ring overwrites rows while they are read.
        ValueError: ``numbering`` is invalid.
    """

    def __init__(
        self, reader: ReadableRows, numbering: Numbering = "kept", steps_apart: int = 63
    ) -> None:
        if numbering not in ("kept", "relative"):
            raise ValueError(f"ids: expected 'kept' or 'relative', got {numbering!r}")
        if lacking := missing(reader.schema, NAMING):
            raise ColumnsMissing(
                f"{reader.path} has no {', no '.join(lacking)} (whole numbers, one per row). These "
                "columns identify a row. Tallyroll's collectors write them."
            )
        self._reader, self.span = reader, reader.span
        """The rows that were valid when the object was made."""
        ids, steps = (self._numbers(key) for key in NAMING)
        self.check()
        begins = np.ones(len(ids), np.bool_)
        begins[1:] = ids[1:] != ids[:-1]
        begins[1:] |= steps[1:] - steps[:-1] != 1
        begins[1:] |= (steps[1:] ^ steps[:-1]) >> steps_apart != 0
        if reader.ring:  # the rows of a run are also contiguous in memory
            begins[-self.span.start % reader.ring :: reader.ring] = True
        first = np.flatnonzero(begins)
        counts = np.diff(first, append=len(ids))
        order = _ordered(ids[first])
        first, counts = first[order], counts[order]
        if _overlap(ids[first], steps[first], counts):  # foreign rows, not in time order
            first, counts = np.lexsort((np.arange(len(ids)), steps, ids)), np.ones_like(ids)
        numbers = ids[first]
        self.relative = numbering == "relative"
        if self.relative:
            numbers = np.cumsum(np.diff(numbers, prepend=numbers[:1]) != 0)
        self.run_rows: np.ndarray = first + self.span.start
        """The number of the first row of each run, int64 [runs]."""
        self.run_counts: np.ndarray = counts
        """The number of rows of each run, int64 [runs]."""
        self.run_ids: np.ndarray = numbers
        """The trajectory of each run, int64 [runs]."""
        self.run_steps: np.ndarray = steps[first]
        """The step of the first row of each run, int64 [runs]."""

    def _numbers(self, key: Key) -> np.ndarray:
        found = numbers_of(self._reader.column(key).slice(self.span.start, self.span.stop))
        return found.copy() if self._reader.ring else found

    def check(self) -> None:
        """Raise `Overrun` if rows of the span have been overwritten."""
        if self._reader.span.start > self.span.start:
            raise self._reader.overrun(f"{len(self.span):,} rows")

    # --- row by row -------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> np.ndarray:
        """The numbers of the rows in this order, int64 [rows]."""
        return expanded(self.run_rows, self.run_counts)

    @cached_property
    def steps(self) -> np.ndarray:
        """The steps of the rows, int64 [rows]."""
        return expanded(self.run_steps, self.run_counts)

    @cached_property
    def ids(self) -> np.ndarray:
        """The trajectories of the rows, int64 [rows]."""
        return np.repeat(self.run_ids, self.run_counts)

    def bytes_at(self, column: Column, at: np.ndarray) -> np.ndarray:
        """Return a column's bytes at positions [n] of the order, uint8 [n, bytes of a row]."""
        if self.relative and column.key == TRAJ_IDS:
            values: Any = self.ids[at].astype(column.numpy_dtype)
        else:
            values = self._reader.column(column.key).take(self.rows[at])
            self.check()
        found: np.ndarray = np.ascontiguousarray(values).reshape(len(at), -1).view(np.uint8)
        return found


def expanded(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the concatenation of ranges that start at ``first`` and have ``counts`` entries."""
    before = np.cumsum(counts) - counts
    found: np.ndarray = np.repeat(first - before, counts)
    found += np.arange(len(found))
    return found


def _overlap(ids: np.ndarray, steps: np.ndarray, counts: np.ndarray) -> bool:
    """Return True if a run begins before the preceding run of the same trajectory ends."""
    before = ids[1:] == ids[:-1]
    before &= steps[1:] < steps[:-1] + counts[:-1] - 1
    return bool(before.any())


def _ordered(ids: np.ndarray) -> np.ndarray:
    """Return the indices that sort ids [n], int64 [n]. The sort is stable."""
    order, shift = np.arange(len(ids)), 0
    if not len(ids):
        return order
    low, high = int(ids.min()), int(ids.max())
    rest = (ids - low).view(np.uint64)
    # A radix sort by 16 bits, lowest first: NumPy sorts 16-bit numbers in a tenth of the time.
    while high - low >> shift:
        digits = (rest >> np.uint64(shift)).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
        shift += 16
    return order
