"""``tallyroll report``: summarise the runs of many storages as a table and a page."""

import argparse
import json

from tallyroll.collector.cli.output import CommandError, as_json, emit, say
from tallyroll.collector.cli.page import Page
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.collector.ext.report.files import require_report
from tallyroll.collector.ext.report.report import report
from tallyroll.collector.ext.report.text import show_runs


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
        page = Page()
        show_runs(found, page)
        emit(page.text)
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
