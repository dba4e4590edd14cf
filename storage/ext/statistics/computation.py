"""Computation of column statistics in one pass over the rows, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tallyroll.storage.ext.statistics.moments import (
    BYTES,
    QUANTILES,
    merged,
    moments_of,
    moments_of_counts,
    nothing,
    quantiles_of,
    quantiles_of_counts,
)
from tallyroll.storage.ext.views.split import hashed
from tallyroll.storage.ext.views.trajectory_columns import run_of
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.dtypes import in_float64
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.trajectories.columns import floats_of

MOST_EACH: Final = 256
"""The most numbers per row that have separate statistics; more numbers are pooled."""
SAMPLE_ROWS: Final = 2**14
"""Maximum number of rows from which quantiles are computed."""
_SAMPLE_NUMBERS: Final = 2**22
_AT_ONCE: Final = 2**20
"""Numbers per chunk."""


@dataclass
class ColumnAccumulator:
    """Accumulated statistics of one column."""

    of_runs: np.ndarray
    """Moments [runs, numbers] of the rows of each run."""
    of_bytes: np.ndarray | None
    """Histogram of byte values, int64 [numbers, 256]; None unless the dtype has one byte."""
    quantiles: np.ndarray | None = None
    """Quantiles [quantiles, numbers]; None if they have not been computed yet."""
    stop: int = 0
    """The end (exclusive) of the rows that have been counted."""

    def total(self) -> np.ndarray:
        """Return the moments of all rows [numbers]."""
        found = nothing(self.of_runs.shape[1])
        for each in self.of_runs:
            found = merged(found, each)
        return found


def numbers_each(column: Column) -> int:
    """Return the number of separate statistics for a row's value."""
    size = math.prod(column.shape)
    return size if size <= MOST_EACH else 1


def can_be_counted(column: Column) -> bool:
    """Return True if the numbers of a column are ordered, so that it can have statistics."""
    return column.numpy_dtype.kind in "biuf"


def is_of_bytes(column: Column) -> bool:
    """Return True if each number of a column is one byte."""
    return column.numpy_dtype.itemsize == 1


def none_counted(column: Column) -> ColumnAccumulator:
    """Return an empty accumulator for a column."""
    each = numbers_each(column)
    counts = np.zeros((each, BYTES), np.int64) if is_of_bytes(column) else None
    return ColumnAccumulator(nothing(0, each), counts)


def count_on(
    reader: RowReader,
    column: Column,
    counted: ColumnAccumulator,
    rows: range,
    progress: Callable[[int], object],
) -> None:
    """Add the rows ``rows`` of a column to an accumulator.

    Args:
        reader: the reader of the rows.
        column: the column.
        counted: the accumulator, which is modified in place.
        rows: the row numbers, which follow those counted so far.
        progress: a callback that receives the number of bytes read since its last call.
    """
    size = math.prod(column.shape)
    for number, part in _by_run(reader, rows):
        if number >= len(counted.of_runs):
            more = nothing(number + 1 - len(counted.of_runs), counted.of_runs.shape[1])
            counted.of_runs = np.concatenate([counted.of_runs, more])
        step = max(1, _AT_ONCE // size)
        for start in range(part.start, part.stop, step):
            values = _values(reader, column, start, min(start + step, part.stop))
            if not len(values):
                continue
            if counted.of_bytes is None:
                found = moments_of(values)
            else:
                counts = _bytes_counted(values)
                found = moments_of_counts(counts, _values_of_bytes(column))
                counted.of_bytes += counts
            counted.of_runs[number] = merged(counted.of_runs[number], found)
            progress(len(values) * numbers_each(column) * column.row_nbytes // size)
    counted.stop = rows.stop


def add_quantiles(
    reader: RowReader, column: Column, counted: ColumnAccumulator, rows: range
) -> None:
    """Compute quantiles: exactly for one-byte columns, for others from a sample; see `sampled`."""
    if counted.of_bytes is not None:
        counted.quantiles = quantiles_of_counts(counted.of_bytes, _values_of_bytes(column))
        return
    counted.quantiles = np.full((len(QUANTILES), counted.of_runs.shape[1]), np.nan)
    if len(rows):
        some = sampled(rows, most_sampled(column))
        values = _as_numbers(column, reader.column(column.key).take(some))
        if reader.ring:
            values = values.reshape(len(some), -1)[some >= reader.span.start]
            values = values.reshape(-1, counted.of_runs.shape[1])
        counted.quantiles = quantiles_of(values)


def most_sampled(column: Column) -> int:
    """Return the maximum number of rows of a column from which quantiles are computed."""
    return max(1, min(SAMPLE_ROWS, _SAMPLE_NUMBERS // math.prod(column.shape)))


def sampled(rows: range, most: int) -> np.ndarray:
    """Return at most ``most`` of the row numbers, in ascending order.

    If there are more rows, they are divided into ``most`` stretches of nearly equal size, and a
    hash selects one row of each. The same rows therefore always give the same sample.
    """
    count = len(rows)
    if count <= most:
        return np.arange(rows.start, rows.stop)
    at = np.arange(most, dtype=np.int64)
    ends = np.arange(most + 1, dtype=np.int64) * count // most
    drawn = hashed(at.astype(np.uint64)) % np.diff(ends).astype(np.uint64)
    return rows.start + ends[:-1] + drawn.astype(np.int64)


def _by_run(reader: RowReader, rows: range) -> Iterator[tuple[int, range]]:
    """Yield run numbers and the consecutive rows that each run wrote, in row order."""
    if not len(rows):
        return
    runs = reader.runs
    within = {each["first_row"] for each in runs if each["first_row"] in rows}
    begins = sorted({rows.start, *within})
    numbers = run_of(runs, np.array(begins)).tolist()
    for number, start, stop in zip(numbers, begins, [*begins[1:], rows.stop], strict=True):
        yield max(0, number), range(start, stop)


def _values(reader: RowReader, column: Column, start: int, stop: int) -> np.ndarray:
    """Return the values [n, numbers] of some rows, without rows that a ring has overwritten."""
    found = reader.column(column.key).slice(start, stop)
    if reader.ring:
        found = found.copy()
        found = found[max(0, reader.span.start - start) :]
    return _as_numbers(column, found)


def _as_numbers(column: Column, values: np.ndarray) -> np.ndarray:
    if column.dtype is torch.bfloat16:
        values = floats_of(values)
    return values.reshape(-1, numbers_each(column))


def _bytes_counted(values: np.ndarray) -> np.ndarray:
    """Return the histogram [numbers, 256] of the bytes in values [n, numbers]."""
    each = values.shape[1]
    places = values.view(np.uint8).astype(np.intp)
    if each > 1:
        places += BYTES * np.arange(each)
    found = np.bincount(places.reshape(-1), minlength=BYTES * each)
    return found.reshape(each, BYTES)


def _values_of_bytes(column: Column) -> np.ndarray:
    """Return the number that each byte value represents, float64 [256]."""
    every = np.arange(BYTES).astype(np.uint8)
    kind = np.uint8 if column.numpy_dtype == np.bool_ else column.numpy_dtype
    return in_float64(every.view(kind))
