"""Public statistics of the columns of a storage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.ext.notebook.figures import statistics_figure
from tallyroll.storage.ext.statistics.computation import (
    MOST_EACH,
    add_quantiles,
    can_be_counted,
    count_on,
    none_counted,
)
from tallyroll.storage.ext.statistics.moments import QUANTILES
from tallyroll.storage.ext.statistics.statistics_file import place_of, read_saved, write_saved
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.package.near_names import did_you_mean
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.readers.spaces import spaces_of
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import Key, Keys, as_key, format_key
from tallyroll.storage.rows.pages import Page, PageSource
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.rows.spaces import space_of
from tallyroll.storage.user_code import user_callback

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES: Final = 8
"""Maximum number of lines for one column."""
_QUANTILES: Final = {0.05: "q05", 0.5: "q50", 0.95: "q95"}
"""The quantiles of a table, with their names."""


@dataclass(frozen=True, slots=True)
class ColumnStatistics(PageSource):
    """Statistics of the numbers of a column; NaNs count in `nan` only.

    Arrays have the shape of a row's value. If a value has more than 256 numbers, the shape is []
    and the statistics cover all numbers together.
    """

    count: np.ndarray
    """The number of numbers that are not NaN, int64."""
    mean: np.ndarray
    """The mean, float64; NaN if there are no numbers."""
    std: np.ndarray
    """The population standard deviation, float64; NaN if there are no numbers."""
    min: np.ndarray
    """The minimum, float64; NaN if there are no numbers."""
    max: np.ndarray
    """The maximum, float64; NaN if there are no numbers."""
    nan: np.ndarray
    """The fraction of NaNs, from 0 to 1, float64."""
    quantiles: Mapping[float, np.ndarray]
    """Quantiles by their share.

    The quantile of 0.25 is the smallest number with a quarter of all numbers at or below it.
    Quantiles of one-byte columns are exact. Those of other columns are exact up to 16,384 rows.
    With more rows, they come from a sample of 16,384 rows, one from each stretch of equal length:
    in 999 of 1,000 cases the true share at or below the quantile deviates by at most 0.015. For
    columns with more than 256 numbers per row, the sample is limited to 4 million numbers.
    Statistics of single runs have no quantiles.
    """

    def _show_on_(self, page: Page) -> None:
        show_columns(page, {"value": self})


class Statistics(PageSource, Mapping[str, ColumnStatistics]):
    """Statistics of columns by name, ``"next/reward"`` or ``("next", "reward")``."""

    def __init__(
        self,
        rows: int,
        columns: Mapping[str, ColumnStatistics],
        runs: Sequence[Mapping[str, ColumnStatistics]],
        bounds: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._columns = columns
        self.rows = rows
        """The number of rows that the statistics cover."""
        self.runs = tuple(runs)
        """The statistics of each run's rows, by run number, without quantiles."""
        self.bounds = bounds
        """The lowest and the highest value that the environment declares for a column, by name.

        Columns without declared bounds are missing.
        """

    def __getitem__(self, key: str | Key) -> ColumnStatistics:
        return self._columns[format_key(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows:,} rows: {', '.join(self)})"

    def plot(self) -> Figure:
        """Draw range, 5 % to 95 % quantiles and median of each column's numbers, with Matplotlib.

        Declared bounds are marked. The first 24 columns are drawn.

        Raises:
            MissingLibrary: Matplotlib is not installed.
        """
        return statistics_figure(self)

    def _show_on_(self, page: Page) -> None:
        page.print(f"{self.rows:,} rows")
        show_columns(page, self)


def show_columns(page: Page, columns: Mapping[str, ColumnStatistics], more: str = "") -> None:
    """Write a table to a page, with a line for each number of a column's value.

    A column has at most `_MOST_LINES` lines; ``more`` is a note on where the others are.
    """
    shares = _QUANTILES if all(each.quantiles for each in columns.values()) else {}
    heads = ("column", "count", "mean", "std", "min", *shares.values(), "max", "NaN")
    page.table(heads, _lines(columns, shares, more))


def _lines(
    columns: Mapping[str, ColumnStatistics], shares: Mapping[float, str], more: str
) -> Iterator[tuple[str, ...]]:
    for name, each in columns.items():
        size = each.count.size
        for at, place in enumerate(np.ndindex(each.count.shape)):
            if at == _MOST_LINES < size - 1:
                yield f"{name}: {size - at} more{more}", *[""] * (6 + len(shares))
                break
            label = name if size == 1 else f"{name}[{','.join(map(str, place))}]"
            numbers = [each.mean, each.std, each.min]
            numbers += [*(each.quantiles[share] for share in shares), each.max]
            shown = (f"{values[place]:.4g}" for values in numbers)
            yield label, f"{each.count[place]:,}", *shown, f"{100 * each.nan[place]:.3g} %"


@user_callback("statistics")
def statistics_of(
    reader: RowReader, keys: Keys | None, progress: Progress | None, *, keep: bool = True
) -> Statistics:
    """Return statistics of the rows of a reader; see `DiskStorage.statistics`."""
    columns = _chosen(reader, keys)
    return read_consistently(reader, lambda: _statistics(reader, columns, progress, keep))


def _chosen(reader: RowReader, keys: Keys | None) -> list[Column]:
    columns = {column.key: column for column in reader.schema.columns}
    if keys is None:
        return [column for column in columns.values() if can_be_counted(column)]
    wanted = dict.fromkeys(as_key(key) for key in ((keys,) if isinstance(keys, str) else keys))
    found = []
    for key in wanted:
        name = format_key(key)
        # Accept a name as displayed, such as next/reward.
        key = key if key in columns else tuple(name.split("/"))
        if key not in columns:
            known = [*map(format_key, columns)]
            near = did_you_mean(name, known)
            raise ColumnsMissing(
                f"statistics: expected some of {', '.join(known)}, got {name}{near or '.'}"
                f"{excluded_note(reader.runs, [key])}"
            )
        if not can_be_counted(columns[key]):
            raise ValueError(
                f"statistics: expected a column of ordered numbers, got {name} of dtype "
                f"{columns[key].dtype_name}. Leave this column out."
            )
        found.append(columns[key])
    return found


def _statistics(
    reader: RowReader, columns: Sequence[Column], progress: Progress | None, keep: bool
) -> Statistics:
    rows = reader.span
    place = place_of(reader) if keep else None
    known = {} if place is None else read_saved(reader, place)
    found = {c.key: known.get(c.key) or none_counted(c) for c in columns}
    missing = {c.key: range(max(rows.start, found[c.key].stop), rows.stop) for c in columns}
    total, done = sum(len(missing[c.key]) * c.row_nbytes for c in columns), 0

    def on_progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    for column in columns:
        counted = found[column.key]
        if len(missing[column.key]) or counted.quantiles is None:
            count_on(reader, column, counted, missing[column.key], on_progress)
            add_quantiles(reader, column, counted, rows)
    if total and place is not None:
        write_saved(reader, place, {**known, **found})
    return Statistics(
        len(rows),
        {
            format_key(c.key): as_shown(c, found[c.key].total(), found[c.key].quantiles)
            for c in columns
        },
        [
            {format_key(c.key): as_shown(c, found[c.key].of_runs[number]) for c in columns}
            for number in range(max((len(each.of_runs) for each in found.values()), default=0))
        ],
        _bounds_of(reader, columns),
    )


def _bounds_of(
    reader: RowReader, columns: Sequence[Column]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    spaces, found = spaces_of(reader.runs, reader.schema), {}
    for column in columns:
        space = space_of(spaces[column.key]) if column.key in spaces else None
        if space is not None and space.low is not None and space.high is not None:
            shape = () if math.prod(column.shape) > MOST_EACH else column.shape
            low, high = (space.low, space.high) if shape else (space.low.min(), space.high.max())
            found[format_key(column.key)] = (
                np.broadcast_to(low, shape).astype(np.float64),
                np.broadcast_to(high, shape).astype(np.float64),
            )
    return found


def as_shown(
    column: Column, moments: np.ndarray, quantiles: np.ndarray | None = None
) -> ColumnStatistics:
    """Convert moments [numbers] to statistics in the shape of a row's value."""
    shape = column.shape if math.prod(column.shape) == len(moments) else ()
    count, none = moments["count"], moments["count"] == 0

    def shaped(values: Any) -> np.ndarray:
        return np.asarray(values).reshape(shape)

    def where_some(values: np.ndarray) -> np.ndarray:
        return shaped(np.where(none, np.nan, values))

    every = np.maximum(count, 1)
    return ColumnStatistics(
        count=shaped(count),
        mean=where_some(moments["mean"]),
        std=where_some(np.sqrt(moments["squares"] / every)),
        min=where_some(moments["least"]),
        max=where_some(moments["most"]),
        nan=shaped(moments["nans"] / np.maximum(count + moments["nans"], 1)),
        quantiles={}
        if quantiles is None
        else {share: shaped(each) for share, each in zip(QUANTILES, quantiles, strict=True)},
    )
