"""Count the statistics of columns: one pass over the rows, a few at a time."""

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
"""Numbers of a row's value of which each has statistics of its own; those of more have one."""
SAMPLE_ROWS: Final = 2**14
"""Rows from which quantiles are taken, where there are more."""
_SAMPLE_NUMBERS: Final = 2**22
_AT_ONCE: Final = 2**20
"""Numbers that are read at a time."""


@dataclass
class ColumnAccumulator:
    """The numbers that are counted of one column."""

    of_runs: np.ndarray
    """Moments [runs, numbers] of the rows of each run."""
    of_bytes: np.ndarray | None
    """How often each byte comes, int64 [numbers, 256], where numbers are bytes."""
    quantiles: np.ndarray | None = None
    """[quantiles, numbers]; None: they are still to be counted."""
    stop: int = 0
    """One more than the number of the last row that is counted."""

    def total(self) -> np.ndarray:
        """Return the moments of all rows [numbers]."""
        found = nothing(self.of_runs.shape[1])
        for each in self.of_runs:
            found = merged(found, each)
        return found


def numbers_each(column: Column) -> int:
    """Return how many numbers of a column have statistics of their own."""
    size = math.prod(column.shape)
    return size if size <= MOST_EACH else 1


def can_be_counted(column: Column) -> bool:
    """Return whether a column has numbers that are in an order."""
    return column.numpy_dtype.kind in "biuf"


def is_of_bytes(column: Column) -> bool:
    """Return whether each number of a column is one byte."""
    return column.numpy_dtype.itemsize == 1


def none_counted(column: Column) -> ColumnAccumulator:
    """Return what is counted of a column before its first row."""
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
    """Count the rows ``rows`` of a column, after those that are counted.

    Args:
        reader: of the rows.
        column: which column.
        counted: what is counted so far, which is changed.
        rows: their numbers.
        progress: called with the bytes that were read since its last call.
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
    """Take quantiles: of all bytes, or of a sample of rows; see `sampled`."""
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
    """Return how many rows of a column quantiles are taken from, at most."""
    return max(1, min(SAMPLE_ROWS, _SAMPLE_NUMBERS // math.prod(column.shape)))


def sampled(rows: range, most: int) -> np.ndarray:
    """Return numbers of ``most`` of the rows, ascending: all if there are no more, else one of each
    of as many stretches, drawn by a hash, so that the same rows give the same ones.
    """
    count = len(rows)
    if count <= most:
        return np.arange(rows.start, rows.stop)
    at = np.arange(most, dtype=np.int64)
    ends = np.arange(most + 1, dtype=np.int64) * count // most
    drawn = hashed(at.astype(np.uint64)) % np.diff(ends).astype(np.uint64)
    return rows.start + ends[:-1] + drawn.astype(np.int64)


def _by_run(reader: RowReader, rows: range) -> Iterator[tuple[int, range]]:
    """Yield the number of a run, and those of the rows that it wrote, in their order."""
    if not len(rows):
        return
    runs = reader.runs
    within = {each["first_row"] for each in runs if each["first_row"] in rows}
    begins = sorted({rows.start, *within})
    numbers = run_of(runs, np.array(begins)).tolist()
    for number, start, stop in zip(numbers, begins, [*begins[1:], rows.stop], strict=True):
        yield max(0, number), range(start, stop)


def _values(reader: RowReader, column: Column, start: int, stop: int) -> np.ndarray:
    """Return the numbers [n, numbers] of some rows, without those that a ring overwrote."""
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
    """Return how often each byte comes in each column of bytes [n, numbers], [numbers, 256]."""
    each = values.shape[1]
    places = values.view(np.uint8).astype(np.intp)
    if each > 1:
        places += BYTES * np.arange(each)
    found = np.bincount(places.reshape(-1), minlength=BYTES * each)
    return found.reshape(each, BYTES)


def _values_of_bytes(column: Column) -> np.ndarray:
    """Return the number that each byte is, float64 [256]."""
    every = np.arange(BYTES).astype(np.uint8)
    kind = np.uint8 if column.numpy_dtype == np.bool_ else column.numpy_dtype
    return in_float64(every.view(kind))
