"""Comparison of stored statistics with statistics that are recomputed from the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tallyroll.storage.ext.statistics.computation import (
    ColumnAccumulator,
    add_quantiles,
    count_on,
    none_counted,
)
from tallyroll.storage.ext.statistics.moments import nothing
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.schema import Column

_ROUNDED = 1e-12
"""Tolerance of means relative to the largest number.

The order in which batches of rows are merged changes the rounding.
"""


def differences(
    reader: RowReader, column: Column, kept: ColumnAccumulator, tell: Callable[[int], object]
) -> Iterator[str]:
    """Recompute the statistics of a column, and yield a phrase for each stored one that differs.

    Args:
        reader: the reader of the rows.
        column: the column.
        kept: the stored statistics of the column.
        tell: a callback that receives the number of bytes read since its last call.
    """
    found, rows = none_counted(column), range(kept.stop)
    count_on(reader, column, found, rows, tell)
    add_quantiles(reader, column, found, rows)
    runs = max(len(kept.of_runs), len(found.of_runs))
    pair = [_of_runs(each, runs) for each in (kept, found)]
    for number, (mine, theirs) in enumerate(zip(*pair, strict=True)):
        for name in ("count", "nans", "least", "most"):
            if (mine[name] != theirs[name]).any():
                yield f"{name} of run {number}"
        if not _are_near(mine, theirs):
            yield f"mean or deviation of run {number}"
    for name in ("of_bytes", "quantiles"):
        one, other = getattr(kept, name), getattr(found, name)
        if one is not None and not np.array_equal(one, other, equal_nan=name == "quantiles"):
            yield "counts of bytes" if name == "of_bytes" else "quantiles"


def _of_runs(counted: ColumnAccumulator, runs: int) -> np.ndarray:
    """Return moments [runs, numbers], padded with empty moments for runs without rows."""
    more = nothing(runs - len(counted.of_runs), counted.of_runs.shape[1])
    return np.concatenate([counted.of_runs, more])


def _are_near(mine: np.ndarray, theirs: np.ndarray) -> bool:
    """Return True if means and squared differences [numbers] agree except for rounding."""
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(theirs["least"]), np.abs(theirs["most"]))
        size = np.where(theirs["count"] > 0, size, 0)
        off, squares = _ROUNDED * size, theirs["squares"]
        near = np.abs(mine["mean"] - theirs["mean"]) <= off
        std = np.sqrt(squares / np.maximum(theirs["count"], 1))
        allowed = 1e-9 * squares + theirs["count"] * off * (off + 2 * std)
        near &= np.abs(mine["squares"] - squares) <= allowed
        endless = ~np.isfinite(theirs["mean"]) | ~np.isfinite(theirs["squares"])
        same = np.isfinite(mine["squares"]) == np.isfinite(theirs["squares"])
    return bool(np.where(endless, same, near).all())
