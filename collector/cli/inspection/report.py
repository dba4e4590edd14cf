"""``tallyroll report``: summarise the runs of many storages as a table and a page."""

import argparse
import json
from collections.abc import Sequence

from tallyroll.collector.cli.output import CommandError, as_json, emit, say
from tallyroll.collector.cli.page import Page
from tallyroll.collector.cli.progress import shown_progress
from tallyroll.collector.ext.report.files import require_report
from tallyroll.collector.ext.report.page import interval, number
from tallyroll.collector.ext.report.report import RunsReport, report


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll report`` and return the exit status."""
    scale = dict(args.scale or ())
    try:
        if args.html:  # before all rows are read
            require_report(args.html, force=args.force)
    except OSError as error:
        raise _unwritten(args.html, error) from error
    with shown_progress("rows counted", args.quiet or args.json, "{:,}".format) as progress:
        found = report(
            args.paths,
            group_by=args.group_by,
            window=args.window,
            scale=scale,
            progress=progress,
            accept_copy=args.accept_copy,
        )
    if args.json:
        emit(json.dumps(as_json(found.to_dict()), indent=2, allow_nan=False) + "\n")
    elif args.csv:
        emit(found.as_csv())
    elif found.runs:
        emit(as_text(found))
    for each in found.problems:
        say(f"tallyroll: not in the numbers: {each}")
    if args.html and found.runs:
        try:
            found.to_html(args.html, force=args.force)
        except OSError as error:
            raise _unwritten(args.html, error) from error
    if not found.runs:
        raise CommandError("there is no run to report: expected paths of storages with rows")
    return 1 if found.problems else 0


def _unwritten(path: str, error: OSError) -> CommandError:
    return CommandError(f"--html {path} cannot be written: {error.strerror}")


def as_text(found: RunsReport) -> str:
    """Format the report as text."""
    page = Page()
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
        page.head("What differs between the runs")
        for name, values in found.differences.items():
            page.print(f"{name}: {'; '.join(_shares(values))}")
    if found.notes:
        page.head("To know")
        for note in found.notes:
            page.print(str(note))
    return page.text


def _of(some: int, every: int) -> str:
    return str(every) if some == every else f"{some} of {every}"


def _shares(values: dict[str, list[str]]) -> Sequence[str]:
    return [
        f"{value} ({len(paths)} run{'' if len(paths) == 1 else 's'})"
        for value, paths in values.items()
    ]
