"""``tallyroll diff``: compare two storages row by row."""

import argparse
import dataclasses
import json
import time

from tallyroll.collector.cli.output import as_json, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.storage import diff
from tallyroll.storage.ext.verification.differences import show_differences


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll diff`` and return the exit status."""
    began = time.monotonic()
    with shown_progress("compared", args.quiet) as progress:
        found = diff(
            args.path, args.other, ids=args.ids, progress=progress, accept_copy=args.accept_copy
        )
    if args.json:
        facts = dataclasses.asdict(found) | {"same": found.same}
        emit(json.dumps(as_json(facts), indent=2, allow_nan=False) + "\n")
    elif not args.quiet:
        page = Page()
        show_differences(found, page, time.monotonic() - began)
        emit(page.text)
    return 0 if found.same else 1
