"""``tallyroll split``: divide the trajectories of a storage among new storages."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from tallyroll.collector.cli.selection import add_accept_copy, add_output, add_where, chosen_rows

# Lines have at most 78 columns.

_ABOUT = "split the trajectories of a storage into several storages"
_USAGE = "%(prog)s SRC DST --train SHARE [--val SHARE] [--test SHARE] [options]"
_DESCRIPTION = """\
Split the trajectories of a storage at random, and write each part as a
storage in a new folder: DST/train, DST/val. Each part holds its share of the
trajectories, and trajectories are never divided. No trajectory is in two
parts; if the shares sum to 1, every trajectory is in one. The parts depend
only on the trajectory ids and the seed. With --by run, whole runs are
divided: each part has its share of the runs, and no run is in two parts. DST
is created atomically: complete, or not at all. SRC is not modified. In
Python, storage.split(...) splits without copying.
"""
_EXAMPLES = """\
examples:
  tallyroll split runs/pole parts --train 0.9 --val 0.1
  tallyroll split runs/pole parts --train 0.8 --val 0.1 --test 0.1 --seed 7
  keep each run of a merged dataset in one part:
    tallyroll split merged parts --train 0.8 --test 0.2 --by run
  split only good trajectories, into a part with another name:
    tallyroll split runs/pole parts --where "return > 100" --part held_out=0.2

exit status:
  0  success
  1  DST was not created, and the message says why
  2  invalid argument
"""
_NAMES = ("train", "val", "test")


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add the command to ``commands``. ``path`` parses paths; ``complete`` marks them for shtab."""
    parser = commands.add_parser(
        "split", help=_ABOUT, usage=_USAGE, description=_DESCRIPTION, epilog=_EXAMPLES
    )
    parser.set_defaults(usage_error=parser.error)
    for name, metavar, text in (
        ("path", "SRC", "a storage, of any format"),
        ("destination", "DST", "the new folder; must not exist"),
    ):
        parser.add_argument(name, type=path, metavar=metavar, help=text).complete = complete
    for name in _NAMES:
        text = f"the share of trajectories in DST/{name}, such as {0.8 if name == 'train' else 0.1}"
        parser.add_argument(f"--{name}", type=_share, metavar="SHARE", help=text)
    text = "a part with another name; may be given several times"
    parser.add_argument(
        "--part", action="append", default=[], type=_part, metavar="NAME=SHARE", help=text
    )
    text = "divide whole trajectories or whole runs (default: trajectory)"
    parser.add_argument("--by", choices=("trajectory", "run"), default="trajectory", help=text)
    text = "random seed; the same seed gives the same parts (default: 0)"
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help=text)
    add_where(parser)
    text = "format of the parts (default: memmap)"
    parser.add_argument("--format", choices=("memmap", "hdf5", "zarr"), default="memmap", help=text)
    text = "print what would be done and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    add_accept_copy(parser)
    add_output(parser)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(
            f"expected a share above 0 and at most 1, such as 0.9, got {text!r}"
        )
    return share


def _part(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    if not name or not equals or "/" in name or name in (".", ".."):
        raise argparse.ArgumentTypeError(f"expected NAME=SHARE, such as held_out=0.2, got {text!r}")
    return name, _share(share)


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**64, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll split`` and return the exit status."""
    from tallyroll.collector.cli.output import CommandError, emit
    from tallyroll.collector.cli.page import Page
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage import open_storage
    from tallyroll.storage.ext.views.split import write_parts

    named = [(name, getattr(args, name)) for name in _NAMES]
    given = [(name, share) for name, share in named if share is not None] + args.part
    shares = dict(given)
    if not shares:
        args.usage_error("expected a share, such as --train 0.9 --val 0.1")
    if len(shares) < len(given):
        args.usage_error("expected parts of different names")
    if (total := math.fsum(shares.values())) > 1 + 1e-9:
        args.usage_error(f"expected shares of at most 1 together, got {total:g}")
    with (
        open_storage(args.path, accept_copy=args.accept_copy) as storage,
        shown_progress("copied", args.quiet or args.json or args.dry_run) as progress,
    ):
        chosen = chosen_rows(storage, args)
        try:
            views = chosen.split(seed=args.seed, by=args.by, **shares)
        except ValueError as error:
            raise CommandError(str(error)) from error
        readers = {name: view.reader for name, view in views.items()}
        reports = write_parts(
            readers, args.destination, args.format, dry_run=args.dry_run, progress=progress
        )
        counts = {name: len(view.trajectories) for name, view in views.items()}
    if args.json:
        told = {
            name: {
                "path": each.path,
                "share": shares[name],
                "trajectories": counts[name],
                "rows": each.rows,
                "bytes": each.nbytes,
            }
            for name, each in reports.items()
        }
        said = {"source": str(args.path), "seed": args.seed, "by": args.by, "parts": told}
        said |= {"dry_run": args.dry_run}
        emit(json.dumps(said, indent=2) + "\n")
    elif not args.quiet:
        page = Page()
        lines = (
            (each.path, f"{shares[name]:g}", f"{counts[name]:,}", f"{each.rows:,}")
            for name, each in reports.items()
        )
        page.table(("part", "share", "trajectories", "rows"), lines)
        emit(page.text)
    return 0
