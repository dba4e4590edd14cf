"""Figures of trajectories and of column statistics, drawn with Matplotlib but without pyplot.

Figures that are made without pyplot leave its global state and its backend alone. Matplotlib's
notebook backends do not display such figures, so each gets a method that notebooks call.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.rows.pages import visible
from tallyroll.storage.trajectories.episodes import END_NAMES, END_TERMINATED, END_TRUNCATED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tallyroll.storage.ext.statistics.statistics import ColumnStatistics, Statistics

_WIDTH, _HEIGHT, _ACROSS = 4.0, 3.0, 3
"""Size of a panel in inches, and the number of panels in a row."""
_MOST_PANELS: Final = 24
_MOST_LINES: Final = 8
_MOST_TICKS: Final = 3
"""Intervals between numbers such as 90,000,000 that fit below a panel without touching."""
_SHARES: Final = {0.05: "q05", 0.5: "median", 0.95: "q95"}


def panels(titles: Sequence[str], figure: Any = None) -> tuple[Figure, list[Any]]:
    """Return a figure with a panel for each of ``titles``, and the axes.

    ``figure`` is Matplotlib's class; None imports it.

    Raises:
        MissingLibrary: Matplotlib is not installed.
    """
    figure = figure or needed("matplotlib.figure", "plot", "a plot needs").Figure
    across = max(1, min(_ACROSS, len(titles)))
    down = max(1, math.ceil(len(titles) / across))
    made = figure(figsize=(_WIDTH * across, _HEIGHT * down), layout="constrained")
    made._repr_png_ = partial(_as_png, made)
    axes = [made.add_subplot(down, across, at + 1) for at in range(len(titles))]
    for each, title in zip(axes, titles, strict=True):
        # Names are not formulas, even with dollars in them.
        each.set_title(visible(title), parse_math=False, fontsize="medium")
    return made, axes


def _as_png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def trajectories_figure(table: np.ndarray, first_row: int, window: int) -> Figure:
    """Draw returns and lengths of whole episodes over transitions, and the counts of all ends.

    Args:
        table: lines of an episode table.
        first_row: the oldest row of the storage.
        window: the number of episodes in a mean.
    """
    if type(window) is not int or window < 1:
        raise ValueError(f"window: expected a number of episodes above 0, got {window!r}.")
    made, (returns, lengths, ends) = panels(["returns", "lengths", "ends"])
    ended = np.isin(table["end"], (END_TERMINATED, END_TRUNCATED))
    whole = table[ended & (table["first_step"] == 0) & (table["first_row"] >= first_row)]
    whole = whole[np.argsort(whole["last_row"], kind="stable")]
    at = whole["last_row"] + 1
    for axes, name, unit in ((returns, "return", "return"), (lengths, "length", "transitions")):
        for values in whole[name].astype(np.float64).reshape(len(whole), -1).T[:_MOST_LINES]:
            (dots,) = axes.plot(at, values, ".", markersize=2, alpha=0.4, label="episodes")
            label = f"mean of the last {window}"
            axes.plot(at, mean_of_last(values, window), color=dots.get_color(), label=label)
        label_axes(axes, "transitions", unit)
    ends.set_ylabel("trajectories")
    ends.bar(END_NAMES, np.bincount(table["end"], minlength=len(END_NAMES)))
    return made


def label_axes(axes: Any, x: str, y: str, ticks: int = _MOST_TICKS) -> None:
    """Name the axes of a panel; ``x`` has a few whole numbers, with thousands separators."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.locator_params(axis="x", nbins=ticks, integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def mean_of_last(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of each value and the up to ``window - 1`` values before it, [n]."""
    with np.errstate(all="ignore"):  # returns may be infinite
        head = values[: window - 1]
        found = [np.cumsum(head) / np.arange(1, len(head) + 1)]
        if len(values) >= window:
            found.append(sliding_window_view(values, window).mean(axis=-1))
    return np.concatenate(found)


def statistics_figure(statistics: Statistics) -> Figure:
    """Draw range, quantiles and declared bounds of the numbers of each column."""
    names = [*statistics][:_MOST_PANELS]
    left = len(statistics) - len(names)
    made, axes = panels([*names, *[f"{left} more columns"] * (left > 0)])
    for each, name in zip(axes, names, strict=False):
        _draw_ranges(each, statistics[name], statistics.bounds.get(name))
    marks = {
        label: mark
        for each in axes
        for mark, label in zip(*each.get_legend_handles_labels(), strict=True)
    }
    if marks:
        where = "outside lower center"
        made.legend(marks.values(), marks, loc=where, ncols=len(marks), fontsize="small")
    return made


def _draw_ranges(
    axes: Any, column: ColumnStatistics, bounds: tuple[np.ndarray, np.ndarray] | None
) -> None:
    x = np.arange(column.count.size)
    low, high = _finite(column.min), _finite(column.max)
    axes.vlines(x, low, high, linewidth=1, color="C0")
    axes.plot(x, low, "v", markersize=3, color="C0", label="min")
    axes.plot(x, high, "^", markersize=3, color="C0", label="max")
    quantiles = {_SHARES[s]: _finite(v) for s, v in column.quantiles.items() if s in _SHARES}
    if quantiles:
        axes.vlines(x, quantiles["q05"], quantiles["q95"], linewidth=4, color="C0", alpha=0.5)
        for name, values in quantiles.items():
            marker = "o" if name == "median" else "_"
            axes.plot(x, values, marker, markersize=4, color="C0", label=name)
    for name, values in zip(("declared low", "declared high"), bounds or (), strict=False):
        axes.plot(x, _finite(values), "_", markersize=12, color="C3", label=name)
    label_axes(axes, "element", "value", 2 * _MOST_TICKS)
    if x.size == 1:
        axes.set_xlabel("")
        axes.set_xticks([])


def _finite(values: np.ndarray) -> np.ndarray:
    flat = values.astype(np.float64).reshape(-1)
    return np.where(np.isfinite(flat), flat, np.nan)
