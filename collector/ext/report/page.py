"""Render a report as one HTML file that loads no other resources.

The template escapes all text that comes from storages. The content security policy of the page
forbids all scripts except its own two, and all external resources.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.ext.report.files import MARK
from tallyroll.collector.ext.report.groups import Group
from tallyroll.collector.ext.report.statistics import CONFIDENCE, IntervalEstimate
from tallyroll.storage.package.versions import versions

if TYPE_CHECKING:
    from tallyroll.collector.ext.report.report import RunsReport

_FOLDER = Path(__file__).parent
_COLOURS = 8


@dataclass(frozen=True)
class _Panel:
    """Groups shown together, because they have the same environments."""

    title: str
    groups: tuple[Group, ...]
    low: float
    high: float

    def place(self, value: float) -> float:
        """Return the position of a return between the lowest and the highest, in percent."""
        return round(100 * (value - self.low) / ((self.high - self.low) or 1), 2)


def render(report: RunsReport) -> str:
    """Render the page as text."""
    jinja2 = needs("jinja2", "report", "reports")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = common_folder([run.place for run in report.runs])
    environment.filters |= {
        "number": number,
        "interval": interval,
        "short": short_name,
        "local": lambda path: path.removeprefix(folder),
    }
    scripts = [_file("uplot/uPlot.iife.min.js"), _file("charts.js")]
    panels = panels_of(report.groups)
    markup = needs("markupsafe", "report", "reports").Markup
    text: str = environment.from_string(_file("page.html")).render(
        report=report,
        folder=folder,
        panels=panels,
        curves=[_curves_of(panel) for panel in panels],
        mark=markup(MARK),
        style=markup(_file("uplot/uPlot.min.css") + _file("page.css")),
        scripts=[markup(each) for each in scripts],
        hashes=" ".join(f"'sha256-{_hash(each)}'" for each in scripts),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=versions()["tallyroll"],
        percent=round(100 * CONFIDENCE),
        colours=_COLOURS,
    )
    return text


def panels_of(groups: Sequence[Group]) -> list[_Panel]:
    """Collect groups with the same environments into panels."""
    found: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        found.setdefault(group.environments, []).append(group)
    panels = []
    for environments, some in found.items():
        title = ", ".join(environments)
        scaled = len(environments) > 1
        numbers = [*_numbers(some)] or [0.0]
        title = f"{title} (returns scaled to 0 and 1)" if scaled else title
        panels.append(_Panel(title, tuple(some), min(numbers), max(numbers)))
    return panels


def _numbers(groups: Iterable[Group]) -> Iterable[float]:
    for group in groups:
        yield from group.scores.values()
        for each in (group.mean, group.interquartile_mean):
            if each is not None:
                yield from (v for v in (each.low, each.value, each.high) if v is not None)


def common_folder(paths: Sequence[str]) -> str:
    """Return the common parent folder of all paths with a trailing slash; "" without one."""
    try:
        folder = os.path.commonpath([os.path.dirname(each) for each in paths])
    except ValueError:  # no paths, or a mix of absolute and relative ones
        return ""
    return os.path.join(folder, "") if folder else ""


def short_name(group: Group) -> str:
    """Return the name of a group without its environment, which the panel's title shows."""
    names = [value for field, value in group.fields.items() if field != "environment"]
    return " · ".join(names) or group.name


def _curves_of(panel: _Panel) -> dict[str, Any]:
    """Return the curves of a panel for `charts.js`, with names that are safe to display."""
    curves = [(number, each) for number, each in enumerate(panel.groups) if each.curve is not None]
    at: list[int] = next((each.curve.at.tolist() for _, each in curves if each.curve), [])
    return {
        "at": at,
        "groups": [
            {
                "name": visible(short_name(group)),
                "colour": number % _COLOURS,
                **{
                    name: [None if v != v else v for v in values.tolist()]
                    for name, values in _lines(group).items()
                    if values is not None
                },
            }
            for number, group in curves
        ],
    }


def _lines(group: Group) -> Mapping[str, Any]:
    assert group.curve is not None
    return {"value": group.curve.value, "low": group.curve.low, "high": group.curve.high}


def number(value: float | IntervalEstimate | None) -> str:
    """Format a number with four digits, or with all digits of its integer part."""
    value = value.value if isinstance(value, IntervalEstimate) else value
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.4g}".removesuffix(".")


def interval(found: IntervalEstimate | None) -> str:
    """Format the bounds of an interval; "-" without an interval."""
    if found is None or found.low is None:
        return "-"
    return f"{number(found.low)} to {number(found.high)}"


def visible(text: str) -> str:
    """Escape characters that are not printable, such as those that change the text direction."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _file(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(sha256(script.encode()).digest()).decode()
