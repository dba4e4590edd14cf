"""Checks of values that need no row but their own: NaN, infinity, rows of zeros. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tallyroll.storage.rows.keys import Key, spell
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.verification.findings import Findings, Place

__all__ = [
    "BATCH_NBYTES",
    "UnwrittenRows",
    "batches",
    "check_finite",
    "holds_numbers",
    "words",
    "zero_rows",
]

BATCH_NBYTES = 2**22
"""Rows are looked at in batches that stay in the processor's cache."""
_FEW_WORDS = 16
_LONG_RUN = 1024


def holds_numbers(column: Column) -> bool:
    """Whether the column's values can be NaN."""
    return column.dtype.is_floating_point or column.dtype.is_complex


def batches(rows: int, row_nbytes: int) -> Iterator[slice]:
    """Slices of ``rows`` rows, each small enough for the cache."""
    step = max(1, BATCH_NBYTES // row_nbytes)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def words(rows: np.ndarray) -> np.ndarray:
    """C-contiguous ``rows`` [n, ...] as unsigned integers [n, k], as wide as they can be."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    octets = flat.view(np.uint8)
    width = next(each for each in (8, 4, 2, 1) if octets.shape[1] % each == 0)
    return octets.view(f"u{width}")


def zero_rows(rows: np.ndarray) -> np.ndarray:
    """Which rows of ``words`` [n, k] are zero."""
    found: np.ndarray = rows[:, 0] == 0
    for width in (_FEW_WORDS, rows.shape[1]):
        if rows.shape[1] > 1 and found.any():
            where = np.flatnonzero(found)
            for part in batches(len(where), rows.strides[0]):
                found[where[part]] = ~rows[where[part], :width].any(axis=1)
    return found


def check_finite(
    column: Column,
    rows: np.ndarray,
    findings: Findings,
    place_of: Callable[[int, str, str | None], Place],
    *,
    infinity: bool,
    exempt: np.ndarray | None = None,
) -> None:
    """Find rows [n, ...] of a column that hold NaN, or infinity too.

    Args:
        column: the column.
        rows: its values.
        findings: gathers what is wrong.
        place_of: where a row is, by index into ``rows``, what is wrong there, and the column.
        infinity: infinity is wrong, too.
        exempt: rows [n] that may hold anything.
    """
    test, name = _test_of(column, infinity), spell(column.key)
    message = f"{'NaN or infinity' if infinity else 'NaN'} in {name}"
    for part in batches(len(rows), column.row_nbytes):
        bad = test(rows[part].reshape(part.stop - part.start, -1))
        if not bad.any():
            continue
        wrong = bad.any(axis=1)
        if exempt is not None:
            wrong &= ~exempt[part]
        where = part.start + np.flatnonzero(wrong)

        def place(i: int, where: np.ndarray = where) -> Place:
            return place_of(int(where[i]), "", name)

        findings.add_rows("nan", message, where, place)


def _test_of(column: Column, infinity: bool) -> Callable[[np.ndarray], np.ndarray]:
    if column.dtype is torch.bfloat16:  # arrays of it are bits
        return partial(_bits_above, limit=0x7F7F if infinity else 0x7F80)
    return _not_finite if infinity else np.isnan


def _not_finite(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = ~np.isfinite(values)
    return found


def _bits_above(values: np.ndarray, limit: int) -> np.ndarray:
    found: np.ndarray = (values & 0x7FFF) > limit
    return found


@dataclass
class UnwrittenRows:
    """Long runs of rows in which every byte is zero, among others in which some are not.

    For storages without observations, whose rows say nothing else.
    """

    columns: Mapping[Key, np.ndarray]
    """`words` [slots, k] by key."""
    rows: int = 0
    zeros: int = 0
    _began: int | None = None

    def advance(self, start: int, slots: slice, findings: Findings) -> None:
        """Look at the rows from number ``start`` on, which lie in ``slots``."""
        count = slots.stop - slots.start
        zero = np.ones(count, np.bool_)
        for column in self.columns.values():
            if zero.any():
                zero &= zero_rows(column[slots])
        self.rows += count
        self.zeros += int(zero.sum())
        edges = np.flatnonzero(np.diff(zero, prepend=self._began is not None))
        for edge in edges:
            self._turn(start + int(edge), bool(zero[edge]), findings)

    def _turn(self, row: int, zero: bool, findings: Findings) -> None:
        if zero:
            self._began = row
            return
        self._end(row, findings)

    def _end(self, stop: int, findings: Findings) -> None:
        began, self._began = self._began, None
        if began is not None and stop - began >= _LONG_RUN:
            findings.add(
                "zeros",
                "all bytes of many rows are zero: were they ever written?",
                Place(row=began, what=f"and up to row {stop - 1:,}"),
                count=stop - began,
            )

    def finish(self, stop: int, findings: Findings) -> None:
        """The rows end before ``stop``."""
        self._end(stop, findings)
