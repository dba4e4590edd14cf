"""``tallyroll push`` and ``tallyroll pull``: copy packed datasets to and from object stores."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

# Lines have at most 78 columns.

_TEXTS = {
    "push": (
        "put a packed dataset in an object store",
        "%(prog)s SRC s3://BUCKET/KEY [options]",
        """\
Write a packed dataset to a store that speaks S3. It opens there when all of it
is there, by open_storage("s3://BUCKET/KEY") and every command that reads. After
a kill, or where the store failed, the same command goes on with what is there.
Needs the extra: pip install 'tallyroll[s3]'.

Credentials are those of the environment (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN) or of the machine's role. An address
or endpoint with credentials in it is refused.
""",
        """\
examples:
  tallyroll pack runs/breakout breakout.packed
  tallyroll push breakout.packed s3://datasets/breakout
  a server of your own; what is in another place of the bucket stays:
    tallyroll push breakout.packed s3://datasets/breakout \\
      --endpoint http://10.0.0.5:9000
  read it from any machine:
    AWS_ENDPOINT_URL=http://10.0.0.5:9000 \\
      tallyroll inspect s3://datasets/breakout

exit status:
  0  all of it is there
  1  not all of it: the message says why, and the same command goes on
  2  a wrong argument
""",
    ),
    "pull": (
        "copy a dataset from an object store",
        "%(prog)s s3://BUCKET/KEY DST [options]",
        """\
Copy a packed dataset from a store that speaks S3. It is written beside DST and
checked, and then gets its name: DST is there whole, or not at all. Needs the
extra: pip install 'tallyroll[s3]'.

Credentials are those of the environment (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN) or of the machine's role.
""",
        """\
examples:
  tallyroll pull s3://datasets/breakout breakout.packed
  tallyroll pull s3://datasets/breakout breakout.packed --json | jq .rows

exit status:
  0  copied, whole
  1  not copied, and nothing is at DST: the message says why
  2  a wrong argument
""",
    ),
}

NAMES = tuple(_TEXTS)
"""The commands of this module."""


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add the commands to a parser; ``path`` parses paths, and ``complete`` is for shtab."""
    for name, (about, usage, description, examples) in _TEXTS.items():
        parser = commands.add_parser(
            name, help=about, usage=usage, description=description, epilog=examples
        )
        address = ("address", "s3://BUCKET/KEY", "the place in the store")
        if name == "push":
            places = [("path", "SRC", "a packed dataset, a directory"), address]
        else:
            places = [address, ("path", "DST", "the new dataset; nothing may be there")]
        for dest, metavar, text in places:
            added = parser.add_argument(dest, type=path, metavar=metavar, help=text)
            if dest == "path":
                added.complete = complete
        if name == "push":
            text = "remove a different dataset that is there, and put this one in its place"
            parser.add_argument("--replace", action="store_true", help=text)
        text = "the server (default: AWS_ENDPOINT_URL, or the store of the region)"
        parser.add_argument("--endpoint", metavar="URL", help=text)
        parser.add_argument(
            "--region", metavar="NAME", help="the region (default: AWS_REGION, or us-east-1)"
        )
        parser.add_argument(
            "--patience",
            type=_seconds,
            default=60.0,
            metavar="S",
            help="seconds after which a request that failed is not tried again (default: 60)",
        )
        output = parser.add_argument_group("output")
        text = "print one JSON object instead of text"
        output.add_argument("--json", action="store_true", help=text)
        output.add_argument("--quiet", action="store_true", help="no progress, no report")
        text = "print the traceback of an error"
        output.add_argument("--traceback", action="store_true", help=text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return found


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from rich.filesize import decimal

    from tallyroll.collector.cli.output import emit, visible
    from tallyroll.collector.cli.progress import shown_progress
    from tallyroll.storage import S3Options, pull, push

    began = time.monotonic()
    options = S3Options(endpoint=args.endpoint, region=args.region, patience=args.patience)
    report: Any
    with shown_progress("pushed" if args.command == "push" else "pulled", args.quiet) as progress:
        if args.command == "push":
            report = push(
                args.path, args.address, options=options, replace=args.replace, progress=progress
            )
            told = f"{report.address}: {report.rows:,} rows, {decimal(report.nbytes)} in "
            told += f"{report.objects:,} objects, {report.sent:,} of them sent"
        else:
            report = pull(args.address, args.path, options=options, progress=progress)
            told = f"{report.path}: {report.rows:,} rows, {decimal(report.nbytes)} in "
            told += f"{report.objects:,} files, checked by {report.checked_by}"
    if args.json:
        emit(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    elif not args.quiet:
        emit(visible(f"{told}, {time.monotonic() - began:.1f} s") + "\n")
    return 0
