"""A report for a paper: a table in LaTeX, the points of the curves as CSV, and the figure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import numpy as np

from tallyroll.collector.ext.report.figure import report_figure
from tallyroll.collector.ext.report.files import CURVES_BEGINNING, FIGURE_MARK, LATEX_BEGINNING
from tallyroll.collector.ext.report.groups import Group
from tallyroll.collector.ext.report.page import number, visible
from tallyroll.collector.ext.report.statistics import CONFIDENCE, IntervalEstimate

_DPI: Final = 200
_LATEX: Final = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{each: f"\\{each}" for each in "&%$#_{}"},
}


def latex_table(groups: Sequence[Group], window: int) -> str:
    r"""Return a ``tabular`` with a line per group, for the package booktabs.

    The columns are the fields of the groups, the number of runs, and the interquartile mean and the
    mean with their intervals.
    """
    percent = round(100 * CONFIDENCE)
    fields = [*(groups[0].fields if groups else ())]
    heads = [*(_text(each) for each in fields), "runs"]
    for name in ("interquartile mean", "mean"):
        heads += [name, rf"{percent}\,\% interval"]
    lines = [
        f"{LATEX_BEGINNING} Needs \\usepackage{{booktabs}}.",
        f"% Returns: mean of the last {window} episodes of each run; intervals: {percent} %,",
        "% stratified bootstrap over the runs.",
        rf"\begin{{tabular}}{{{'l' * len(fields)}rrlrl}}",
        r"\toprule",
        _row(heads),
        r"\midrule",
    ]
    for group in groups:
        cells = [*(_text(group.fields[each]) for each in fields), str(len(group.scores))]
        for found in (group.interquartile_mean, group.mean):
            cells += [_number(None if found is None else found.value), _interval(found)]
        lines.append(_row(cells))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _text(value: str) -> str:
    return "".join(_LATEX.get(each, each) for each in visible(value))


def _number(value: float | None) -> str:
    return "--" if value is None else f"${number(value).replace(',', '{,}')}$"


def _interval(found: IntervalEstimate | None) -> str:
    if found is None or found.low is None:
        return "--"
    return f"[{_number(found.low)}, {_number(found.high)}]"


def curve_points(groups: Iterable[Group]) -> str:
    """Return the known points of all learning curves as CSV; cells of unknown bounds are empty.

    A curve has no value before each of its runs has an episode, nor after the shortest of them.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CURVES_BEGINNING.split(","))
    for group in groups:
        if (curve := group.curve) is None:
            continue
        for at in np.flatnonzero(~np.isnan(curve.value)).tolist():
            values = [
                None if each is None else float(each[at])
                for each in (curve.value, curve.low, curve.high)
            ]
            cells: list[Any] = [None if v is None or math.isnan(v) else v for v in values]
            writer.writerow([group.name, len(group.scores), int(curve.at[at]), *cells])
    return text.getvalue()


def figure_file(groups: Sequence[Group], kind: Literal["png", "pdf"]) -> bytes:
    """Draw the figure of the curves as the contents of a file, equal for equal reports.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    file, figure = io.BytesIO(), report_figure(groups)
    if kind == "png":
        figure.savefig(file, format=kind, dpi=_DPI, metadata={"Software": FIGURE_MARK})
    else:
        figure.savefig(file, format=kind, metadata={"Creator": FIGURE_MARK, "CreationDate": None})
    return file.getvalue()
