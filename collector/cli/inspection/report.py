"""``tallyroll report``: summarise the runs of many storages as a table and a page."""

import argparse
import contextlib
import json
import os
from collections.abc import Iterator

from tallyroll.collector.cli.output import CommandError, as_json, emit, say
from tallyroll.collector.cli.page import Page
from tallyroll.collector.envs.extras import needs
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.collector.ext.report.files import require_report
from tallyroll.collector.ext.report.report import report
from tallyroll.collector.ext.report.text import show_runs

_FILES = ("html", "latex", "curves", "png", "pdf")
"""Options that name a file. Each has a method of the report, such as `RunsReport.to_html`."""


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll report`` and return the exit status."""
    scale = dict(args.scale or ())
    files = {name: path for name in _FILES if (path := getattr(args, name))}
    if {"png", "pdf"} & {*files}:
        needs("matplotlib.figure", "plot", "plots")
    places = [os.path.realpath(path) for path in files.values()]
    if len({*places}) < len(places):
        args.usage_error("expected a file of its own for each option, got one for two of them")
    for name, path in files.items():  # before all rows are read
        with _named(name, path):
            require_report(path, force=args.force)
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
    elif found.runs and not args.quiet:
        page = Page()
        show_runs(found, page)
        emit(page.text)
    for each in found.problems:
        say(f"tallyroll: not in the numbers: {each}")
    for name, path in files.items() if found.runs else ():
        with _named(name, path):
            getattr(found, f"to_{name}")(path, force=args.force)
    if not found.runs:
        raise CommandError("there is no run to report: expected paths of storages with rows")
    return 1 if found.problems else 0


@contextlib.contextmanager
def _named(option: str, path: str) -> Iterator[None]:
    """Convert an error of the system within the context to one that names the option."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"--{option} {path} cannot be written: {error.strerror}") from error
