"""``tallyroll card``: write a dataset card for a hub, with the contents and their origin."""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tallyroll.collector.cli.selection import add_accept_copy, add_output

# Lines have at most 78 columns.

_USAGE = "%(prog)s PATH [options]"
_ABOUT = """\
Write a dataset card for a storage or an export: a Markdown page with the front
matter that the Hugging Face Hub reads. The card lists the columns, counts, how
to load the data, the licence, the runs that made it with their seeds, policies
and versions, saved statistics, and a hash. The hash of a storage covers its
content, so all rows are read; the hash of an export covers its files. An
existing file is not replaced without --force.
"""
_EXAMPLES = """\
examples:
  tallyroll card runs/pole
  tallyroll card runs/pole --licence apache-2.0 --out README.md
  for an export, with its kind as in `tallyroll import`:
    tallyroll card parquet:pole.parquet --json

exit status:
  0  written
  1  not written; the message says why
  2  invalid argument
"""


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add the command to ``commands``. ``path`` parses paths; ``complete`` marks them for shtab."""
    parser = commands.add_parser(
        "card",
        help="write a dataset card for a hub",
        usage=_USAGE,
        description=_ABOUT,
        epilog=_EXAMPLES,
    )
    text = "a storage, or KIND:PATH for an export, such as parquet:rows.parquet"
    parser.add_argument("path", type=path, metavar="PATH", help=text).complete = complete
    text = "licence as the hub spells it, such as apache-2.0 (default: unknown)"
    parser.add_argument("--licence", "--license", metavar="NAME", help=text)
    text = "write the page to FILE, which must not exist"
    parser.add_argument("--out", type=path, metavar="FILE", help=text).complete = complete
    parser.add_argument("--force", action="store_true", help="let --out replace an existing file")
    add_accept_copy(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll card`` and return the exit status."""
    from tallyroll.collector.cli.output import as_json, emit, visible

    if args.out is not None and not args.force:
        _require_free(args.out)  # before all rows are read
    card = _card_of(args)
    if args.out is not None:
        _write(args.out, str(card), force=args.force)
    if args.json:
        emit(json.dumps(as_json(dataclasses.asdict(card)), indent=2, allow_nan=False) + "\n")
    elif args.out is None:
        emit(str(card))
    elif not args.quiet:
        emit(f"{visible(args.out)}: a card of {card.rows:,} rows written\n")
    return 0


def _card_of(args: argparse.Namespace) -> Any:
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage import export_card, open_storage
    from tallyroll.storage.ext.exchange.registry import kinds

    kind, colon, place = args.path.partition(":")
    if colon and kind in kinds() and not os.path.lexists(args.path):
        return export_card(place, kind, licence=args.licence)
    with (
        open_storage(args.path, accept_copy=args.accept_copy) as storage,
        shown_progress("read", args.quiet) as progress,
    ):
        return storage.card(licence=args.licence, progress=progress)


def _require_free(place: str) -> None:
    from tallyroll.collector.cli.output import CommandError

    if os.path.lexists(place):
        raise CommandError(
            f"--out {place} already exists, and is not replaced. Give another path, or --force."
        )


def _write(place: str, text: str, *, force: bool) -> None:
    """Write a file atomically."""
    from tallyroll.collector.cli.output import CommandError
    from tallyroll.storage.files.safe_files import Inside

    path = Path(place)
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    inside = Inside(path.parent)
    try:
        try:
            inside.write_atomically(aside, text.encode(), durable=True)
            if force:
                os.replace(aside, path)
            else:
                os.link(aside, path)
        finally:
            inside.remove(aside)
    except FileExistsError:
        _require_free(place)
        raise
    except OSError as error:
        raise CommandError(f"--out {place} cannot be written: {error.strerror}") from error
