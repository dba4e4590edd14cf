"""Checks of the values in arrays: finite numbers, flags, and runs of zeros. Pure."""

from __future__ import annotations

import math

import numpy as np

from tallyroll.storage.ext.dataset_checks.checker import CheckResults, Where

LONG_RUN = 16
"""The minimum length of a run of zero rows that is reported as possibly never written."""


def flat_rows(values: np.ndarray) -> np.ndarray:
    """Reshape rows [n, ...] to [n, k]. Empty arrays are allowed."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def check_finite(
    found: CheckResults,
    values: np.ndarray,
    where: Where,
    column: str,
    *,
    infinity: bool = True,
    valid: np.ndarray | None = None,
) -> None:
    """Report rows [n, ...] that hold NaN or, with ``infinity``, infinite values.

    Args:
        found: the object that collects the findings.
        values: the values of the rows.
        where: the place of the first row.
        column: the name of the column.
        infinity: True to report infinite values too.
        valid: a mask [n] or longer. False marks a row whose values are known to be lost; such rows
            are not reported. None marks no row.
    """
    if values.dtype.kind not in "fc" or not values.size:
        return
    flat = flat_rows(values)
    wrong = ~np.isfinite(flat).all(1) if infinity else np.isnan(flat).any(1)
    if valid is not None and valid.size >= len(wrong):
        wrong &= valid.reshape(-1)[: len(wrong)].astype(bool)
    message = "values are NaN or infinite" if infinity else "values are NaN"
    found.add_rows("nan", message, wrong, where, column)


def observations_valid(next_valid: np.ndarray | None) -> np.ndarray | None:
    """Return a mask of an episode's valid observations, from the ``next_valid`` of its steps.

    An episode of n steps has n + 1 observations. Each one after the first is the next observation
    of the previous step.
    """
    if next_valid is None:
        return None
    return np.concatenate([[True], next_valid.reshape(-1).astype(bool)])


def as_flags(
    found: CheckResults, values: np.ndarray, where: Where, column: str
) -> np.ndarray | None:
    """Return flags [n]. If the values are not flags, add a finding and return None."""
    if values.dtype.kind not in "biuf" or values.size != len(values):
        found.add(
            "columns",
            "a column of flags does not hold one flag per row",
            where,
            f"{values.dtype}",
            column,
        )
        return None
    flat = np.ascontiguousarray(values).reshape(-1)
    # Compare a bool as its byte, which may be neither 0 nor 1.
    plain = flat.view(np.uint8) if flat.dtype.kind == "b" else flat
    wrong = (plain != 0) & (plain != 1)
    message = "a flag is neither true nor false"
    found.add_rows("ends", message, wrong, where, column, lambda row: f"it is {plain[row]}")
    flags: np.ndarray = plain != 0
    return flags


def check_zeros(found: CheckResults, parts: list[np.ndarray], where: Where) -> None:
    """Report long runs of rows within an episode that are zero in all given columns [n, ...]."""
    runs = ZeroRuns(found)
    runs.advance(zero_rows(parts), where)
    runs.finish()


def zero_rows(parts: list[np.ndarray]) -> np.ndarray:
    """Return a mask of the rows [n] that are zero in all given columns [n, ...]."""
    zero = np.ones(len(parts[0]), bool)
    for each in parts:
        if zero.any():
            zero &= ~(flat_rows(each) != 0).any(1)  # NumPy's `any` warns of signalling NaNs
    return zero


class ZeroRuns:
    """Finds long runs of rows whose observations, actions and rewards are zero."""

    def __init__(self, found: CheckResults) -> None:
        self._found = found
        self._began: Where | None = None
        self._count = 0

    def advance(self, zero: np.ndarray, where: Where) -> None:
        """Process the next rows. ``zero`` [n] is True for zero rows."""
        edges = np.flatnonzero(np.diff(zero, prepend=self._began is not None)).tolist()
        at = 0
        for edge in edges:
            if self._began is None:
                self._began = Where(where.file, where.episode, where.start + edge)
            else:
                self._count += edge - at
                self.finish()
            at = edge
        if self._began is not None:
            self._count += len(zero) - at

    def finish(self) -> None:
        """End the current run, and report it if it is long."""
        began, count, self._began, self._count = self._began, self._count, None, 0
        if began is not None and count >= LONG_RUN:
            message = (
                "observations, actions and rewards of many rows are zero, perhaps because they "
                "were never written"
            )
            place = began.place(0, f"and {count - 1:,} rows after it")
            self._found.findings.add("zeros", message, place, count=count)
