"""Checks of values that need a single row only: NaNs, spaces, rows of zeros. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tallyroll.storage.ext.verification.findings import Findings, NumberedRows, Place
from tallyroll.storage.ext.verification.lane_checks import CheckedRows
from tallyroll.storage.readers.row_reader import ColumnReader
from tallyroll.storage.rows.keys import NEXT, Key, format_key
from tallyroll.storage.rows.row_words import batches, words
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.rows.spaces import NO_SPACE, Space, space_of

_FEW_WORDS = 16
_LONG_RUN = 1024


def holds_numbers(column: Column) -> bool:
    """Return True if the column's values can be NaN."""
    return column.dtype.is_floating_point or column.dtype.is_complex


def zero_rows(rows: np.ndarray) -> np.ndarray:
    """Return which of ``rows`` [n, k], in the form of `words`, are zero; bool [n]."""
    found: np.ndarray = rows[:, 0] == 0
    for width in (_FEW_WORDS, rows.shape[1]):
        if rows.shape[1] > 1 and found.any():
            where = np.flatnonzero(found)
            for part in batches(len(where), rows.strides[0]):
                found[where[part]] = ~rows[where[part], :width].any(axis=1)
    return found


def rows_with(bad: Callable[[slice], np.ndarray], count: int, row_nbytes: int) -> np.ndarray:
    """Return which of ``count`` rows have a bad value, bool [count].

    ``bad`` takes a slice of k rows and returns a mask [k, values] of their bad values.
    """
    found = np.zeros(count, np.bool_)
    for part in batches(count, row_nbytes):
        values = bad(part)
        if values.any():  # sound storages have none, and checking all at once is fastest
            found[part] = values.any(axis=1)
    return found


def not_finite(column: Column, rows: np.ndarray, *, infinity: bool) -> np.ndarray:
    """Return which rows [n, ...] of a column contain NaN or, with ``infinity``, infinity."""
    flat = rows.reshape(len(rows), math.prod(column.shape))

    def bad(part: slice) -> np.ndarray:
        values = flat[part]
        if column.dtype is torch.bfloat16:  # its arrays contain raw bits
            found: np.ndarray = (values & 0x7FFF) > (0x7F7F if infinity else 0x7F80)
        else:
            found = ~np.isfinite(values) if infinity else np.isnan(values)
        return found

    return rows_with(bad, len(rows), column.row_nbytes)


class SpaceChecks:
    """Search for values outside the spaces that run entries record.

    Float actions are exempt: exploration drives them beyond a box, and they are stored unchanged.

    Args:
        columns: the columns by key.
        finals: True if next observations are valid at ends. Lost ones may have any value.
    """

    def __init__(self, columns: Mapping[Key, Column], *, finals: bool) -> None:
        self._columns, self._finals = columns, finals
        self._known: dict[int, list[tuple[Column, Space]]] = {}

    def of(self, first_row: int, said: Mapping[str, Any]) -> list[tuple[Column, Space]]:
        """Return the columns to check for the run that begins at ``first_row``."""
        found = self._known.get(first_row)
        if found is None:
            found = self._known[first_row] = [*self._checked(said)]
        return found

    def _checked(self, said: Mapping[str, Any]) -> Iterator[tuple[Column, Space]]:
        for key, column in self._columns.items():
            after = self._columns.get((NEXT, *key))
            if format_key(key) not in said or column.dtype is torch.bfloat16:
                continue
            try:
                space = space_of(said[format_key(key)])
            except NO_SPACE:
                continue
            if space.differs(column.numpy_dtype, column.shape) or space.takes_all:
                continue
            if after is not None or column.numpy_dtype.kind != "f":
                yield column, space
            if after is not None and self._finals:
                yield after, space

    @staticmethod
    def check(
        column: Column, space: Space, values: np.ndarray, rows: NumberedRows, findings: Findings
    ) -> None:
        """Check the values [n, ...] of a column in ``rows``."""
        lanes = rows.lane if isinstance(rows, CheckedRows) and space.of_lanes else None
        if lanes is not None or not space.holds(values):
            name, wrong = format_key(column.key), space.outside(values)
            if lanes is not None:
                wrong = space.outside_of_lanes(values, lanes)
            message = f"a value of {name} is outside its space"
            rows.report(findings, "spaces", message, wrong, lambda at: "", column=name)


class UnwrittenRows:
    """Search for long runs of rows in which every byte is zero.

    This check is for storages without observations, whose rows contain nothing else to check.

    Args:
        columns: the readers of the columns.
    """

    def __init__(self, columns: Iterable[ColumnReader]) -> None:
        self._columns = list(columns)
        self._began: int | None = None

    def advance(self, part: range, findings: Findings) -> None:
        """Check the rows ``part``."""
        start, zero = part.start, np.ones(len(part), np.bool_)
        for column in self._columns:
            if zero.any():
                zero &= zero_rows(words(column.slice(part.start, part.stop)))
        for edge in np.flatnonzero(np.diff(zero, prepend=self._began is not None)).tolist():
            if zero[edge]:
                self._began = start + edge
            else:
                self.finish(start + edge, findings)

    def finish(self, stop: int, findings: Findings) -> None:
        """End the present run of zeros before ``stop``, and report the run if it is long."""
        began, self._began = self._began, None
        if began is not None and stop - began >= _LONG_RUN:
            findings.add(
                "zeros",
                "all bytes of many rows are zero: were they ever written?",
                Place(row=began, what=f"and up to row {stop - 1:,}"),
                count=stop - began,
            )
