"""The report as text: groups, runs, differences and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tallyroll.collector.ext.report.page import interval, number
from tallyroll.storage.rows.pages import Page

if TYPE_CHECKING:
    from tallyroll.collector.ext.report.report import RunsReport


def show_runs(found: RunsReport, page: Page) -> None:
    """Write a report to a page."""
    page.head(f"Returns: mean of the last {found.window} episodes of each run, 95 % intervals")
    page.table(
        ("group", "runs", "interquartile mean", "interval", "mean", "interval"),
        (
            (
                group.name,
                _of(len(group.scores), len(group.runs)),
                number(group.interquartile_mean),
                interval(group.interquartile_mean),
                number(group.mean),
                interval(group.mean),
            )
            for group in found.groups
        ),
    )
    page.head("Runs")
    names = ("seed", "asked", "stored", "state", "resumed", "discarded", "lost", "episodes")
    page.table(
        ("run", *names, "return"),
        (
            (
                line["run"],
                *("-" if line[name] is None else line[name] for name in names),
                number(line["return"]),
            )
            for line in found.table
        ),
    )
    if found.differences:
        page.head("Differences between the runs")
        for name, values in found.differences.items():
            page.print(f"{name}: {'; '.join(_shares(values))}")
    if found.notes:
        page.head("To know")
        for note in found.notes:
            page.print(str(note))


def _of(some: int, every: int) -> str:
    return str(every) if some == every else f"{some} of {every}"


def _shares(values: dict[str, list[str]]) -> Sequence[str]:
    return [
        f"{value} ({len(paths)} run{'' if len(paths) == 1 else 's'})"
        for value, paths in values.items()
    ]
