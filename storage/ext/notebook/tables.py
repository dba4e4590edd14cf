"""HTML tables of storages and their trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tallyroll.storage.files.manifest import environment_of
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.pages import MOST_ROWS, HtmlPage, counted
from tallyroll.storage.trajectories.episodes import END_NAMES

if TYPE_CHECKING:
    from tallyroll.storage.trajectories.mapping import Trajectories


def storage_as_html(storage: Any) -> str:
    """Return the columns, overlays and runs of a storage. No row is read."""
    page = HtmlPage()
    page.print(repr(storage))
    if storage.closed or not storage.reader.initialised:
        return page.html
    page.table(
        ("column", "dtype", "shape", "bytes a row"),
        (
            (format_key(each.key), each.dtype_name, [*each.shape], each.row_nbytes)
            for each in storage.schema.columns
        ),
    )
    if overlays := storage.overlays:
        page.print(f"overlays: {', '.join(map(format_key, overlays))}")
    if runs := storage.reader.runs:
        page.table(
            ("run", "environment", "seed", "lanes", "first row"),
            (
                (number, environment_of(run), *(run.get(name, "?") for name in names))
                for number, run in enumerate(runs)
                for names in [("seed", "lanes", "first_row")]
            ),
        )
    return page.html


def trajectories_as_html(trajectories: Trajectories) -> str:
    """Return counts of trajectories by end, and the first trajectories."""
    page, table = HtmlPage(), trajectories.table
    counts = np.bincount(table["end"], minlength=len(END_NAMES)).tolist()
    ends = ", ".join(f"{n:,} {name}" for n, name in zip(counts, END_NAMES, strict=True) if n)
    page.print(counted(len(table), "trajectory") + (f": {ends}" if ends else ""))
    names = ("id", "lane", "length", "return", "end")
    columns = [table[name][:MOST_ROWS].tolist() for name in names]
    page.table(
        names,
        (
            (*numbers, f"{total:.6g}" if isinstance(total, float) else total, END_NAMES[end])
            for *numbers, total, end in zip(*columns, strict=True)
        ),
    )
    if (more := len(table) - MOST_ROWS) > 0:
        page.print(f"and {more:,} more")
    return page.html
