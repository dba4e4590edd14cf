"""The learning curves of a report as a figure of Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.ext.report.groups import Group
from tallyroll.collector.ext.report.page import panels_of
from tallyroll.storage.ext.notebook.figures import label_axes, panels
from tallyroll.storage.rows.pages import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report_figure(groups: Sequence[Group]) -> Figure:
    """Draw the curve of each group with its interval, in a panel for each set of environments.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    found = panels_of(groups)
    figure = needs("matplotlib.figure", "plot", "plots").Figure
    made, every = panels([panel.title for panel in found], figure)
    for axes, panel in zip(every, found, strict=True):
        lines, names = [], []
        for group in panel.groups:
            if (curve := group.curve) is None:
                continue
            lines += axes.plot(curve.at, curve.value)
            # Matplotlib leaves out labels that begin with an underscore.
            names.append(visible(group.name).replace("_", " _", group.name.startswith("_")))
            if curve.low is not None:
                axes.fill_between(curve.at, curve.low, curve.high, alpha=0.2)
        label_axes(axes, "transitions", "return")
        for text in axes.legend(lines, names).get_texts() if lines else ():
            text.set_parse_math(False)
    return made
