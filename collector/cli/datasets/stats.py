"""``tallyroll stats``: show mean, deviation, extremes and quantiles of columns."""

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tallyroll.collector.cli.selection import add_accept_copy, add_output, add_where, chosen_rows

if TYPE_CHECKING:
    from tallyroll.storage.ext.statistics.statistics import ColumnStatistics, Statistics
    from tallyroll.storage.storages import DiskStorage

# Lines have at most 78 columns.

_ABOUT = "show mean, deviation, extremes and quantiles of columns"
_USAGE = "%(prog)s PATH [options]"
_DESCRIPTION = """\
Compute statistics of columns: mean, standard deviation, extremes, quantiles and
the share of NaN. They are computed for each element of a value, or for all
elements together if a value has more than 256. The results are cached next to
the rows, and the next call reads only new rows. Quantiles are exact for
one-byte columns and for up to 16,384 rows; for more rows they are estimated
from a sample of 16,384. Another process may write to the storage at the same
time.
"""
_EXAMPLES = """\
examples:
  tallyroll stats runs/pole
  tallyroll stats runs/pole --column observation --column next/reward --by-run
  tallyroll stats runs/pole --where "return > 100 and end == 'terminated'"
  tallyroll stats runs/pole --json | jq '.columns.observation.mean'

exit status:
  0  statistics are shown
  1  no result: no storage, or no such column
  2  invalid argument, or invalid --where condition
"""


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add the command to ``commands``. ``path`` parses paths; ``complete`` marks them for shtab."""
    parser = commands.add_parser(
        "stats", help=_ABOUT, usage=_USAGE, description=_DESCRIPTION, epilog=_EXAMPLES
    )
    text = "the storage, of any format"
    parser.add_argument("path", type=path, metavar="PATH", help=text).complete = complete
    text = "only this column, such as next/reward; may be given several times"
    parser.add_argument("--column", action="append", metavar="K", help=text)
    add_where(parser)
    parser.add_argument("--by-run", action="store_true", help="also show statistics for each run")
    add_accept_copy(parser)
    add_output(parser, quiet=False)
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll stats`` and return the exit status."""
    from tallyroll.collector.cli.output import emit
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage import open_storage

    with open_storage(args.path, accept_copy=args.accept_copy) as storage:
        chosen = chosen_rows(storage, args)
        with shown_progress("counted", args.json) as progress:
            found = chosen.statistics(args.column, progress=progress)
        if args.json:
            emit(json.dumps(_as_object(storage, found, args), indent=2, allow_nan=False) + "\n")
        else:
            emit(_as_text(storage, found, args))
    return 0


def _as_object(
    storage: "DiskStorage", found: "Statistics", args: argparse.Namespace
) -> dict[str, Any]:
    told: dict[str, Any] = {"path": str(storage.path), "rows": found.rows}
    told |= {"where": args.where} if args.where is not None else {}
    told["columns"] = {name: _column(each) for name, each in found.items()}
    if args.by_run:
        told["runs"] = [
            {name: _column(each) for name, each in columns.items()} for columns in found.runs
        ]
    return told


def _column(each: "ColumnStatistics") -> dict[str, Any]:
    from tallyroll.collector.cli.output import as_json

    names = ("count", "mean", "std", "min", "max", "nan")
    found = {name: as_json(getattr(each, name).tolist()) for name in names}
    if each.quantiles:
        quantiles = {str(share): as_json(v.tolist()) for share, v in each.quantiles.items()}
        found["quantiles"] = quantiles
    return found


def _as_text(storage: "DiskStorage", found: "Statistics", args: argparse.Namespace) -> str:
    from tallyroll.collector.cli.page import Page
    from tallyroll.storage.ext.statistics.statistics import show_columns

    page, more = Page(), " with --json"
    where = f" where {args.where}" if args.where is not None else ""
    page.print(f"{storage.path}: {found.rows:,} rows{where}")
    page.head("Columns")
    show_columns(page, found, more)
    for number, columns in enumerate(found.runs if args.by_run else ()):
        page.head(f"Run {number}")
        show_columns(page, columns, more)
    return page.text
