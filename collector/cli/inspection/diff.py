"""``tallyroll diff``: compare two storages row by row."""

import argparse
import dataclasses
import json
import time
from typing import Any

from tallyroll.collector.cli.output import as_json, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.cli.progress import shown_progress
from tallyroll.storage import Differences, diff


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
        emit(_as_text(found, time.monotonic() - began))
    return 0 if found.same else 1


def _as_text(found: Differences, seconds: float) -> str:
    page = Page()
    both = found.equal + found.changed
    said = "the same" if found.same else "different"
    page.print(f"{said}: {found.equal:,} of {both:,} common rows are equal, {seconds:.1f} s")
    for count, which in zip(found.only, ("first", "second"), strict=True):
        if count:
            page.print(f"{count:,} rows are only in the {which}")
    _list(page, "Columns that are not compared (first, second)", found.schema)
    changed = [f"{name}: {count:,} rows" for name, count in found.columns.items()]
    _list(page, "Columns with changed rows", changed)
    _list(page, "First differences (value in the first, in the second)", found.places)
    _list(page, "Made otherwise (first, second)", found.provenance)
    return page.text


def _list(page: Page, head: str, lines: Any) -> None:
    if lines:
        page.head(head)
        for line in lines:
            page.print(f"  {line}")
