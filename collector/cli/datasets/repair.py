"""``tallyroll repair``: write the readable part of a damaged dataset to a new storage."""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

from tallyroll.collector.cli.selection import add_output

_USAGE = "%(prog)s [KIND:]SRC DST [options]"
_ABOUT = """\
Recover the readable rows of a damaged or unfinished dataset into a new storage:
a LeRobot, HDF5 or TFRecord recording that was killed, or a storage after a disk
fault. Lost data is listed with its location. Only complete rows are recovered,
and rows after a gap become a separate trajectory. SRC is not modified; the
command executes and unpickles nothing in it, and follows no links. DST is
created atomically: complete, or not at all.

KIND is d4rl, lerobot, minari, rlds or tallyroll (a storage). It can be omitted
if the files identify it.
"""
_EXAMPLES = """\
examples:
  tallyroll repair recordings/killed runs/saved
  tallyroll repair d4rl:hopper.hdf5 hopper.zarr
  tallyroll repair runs/pole runs/pole-repaired --json | jq .lost

exit status:
  0  nothing was lost
  1  some data was lost and is listed; the rest is in DST
  2  nothing was written, and the message says why; or an invalid argument
"""


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add the command to ``commands``. ``path`` parses paths; ``complete`` marks them for shtab."""
    added = commands.add_parser(
        "repair",
        help="recover the readable rows of a damaged dataset",
        usage=_USAGE,
        description=_ABOUT,
        epilog=_EXAMPLES,
    )
    text = "the damaged dataset or storage"
    source = added.add_argument("source", type=path, metavar="SRC", help=text)
    text = "the new storage; must not exist"
    there = added.add_argument("destination", type=path, metavar="DST", help=text)
    source.complete = there.complete = complete
    text = "format of DST (default: by file extension, as in tallyroll copy)"
    added.add_argument("--format", choices=("memmap", "hdf5", "zarr"), help=text)
    added.set_defaults(usage_error=added.error)
    add_output(added)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from tallyroll.collector.cli.output import emit
    from tallyroll.collector.cli.page import Page
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage import repair
    from tallyroll.storage.ext.repair.repair import kinds, show_repair

    kind, colon, rest = args.source.partition(":")
    named = bool(colon) and kind in kinds() and not os.path.lexists(args.source)
    source = rest if named else args.source
    with shown_progress("repaired", args.quiet) as progress:
        report = repair(
            source,
            args.destination,
            kind if named else None,
            format=args.format,
            progress=progress,
        )
    if args.json:
        emit(json.dumps(_as_json(report), indent=2) + "\n")
    elif not args.quiet:
        page = Page()
        show_repair(report, page, source, ": --json has all")
        emit(page.text)
    return 0 if report.whole else 1


def _as_json(report: Any) -> dict[str, object]:
    """Return the report as JSON values, without empty fields of places."""
    value = dataclasses.asdict(report) | {"whole": report.whole, "lost_rows": report.lost_rows}
    for each in value["lost"]:
        place = each["place"]
        each["place"] = {name: part for name, part in place.items() if part not in (None, "")}
    return value
