"""``tallyroll push`` and ``tallyroll pull``: copy packed datasets to and from object stores."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from tallyroll.collector.cli.selection import add_output

# Lines have at most 78 columns.

_TEXTS = {
    "push": (
        "upload a packed dataset to an object store",
        "%(prog)s SRC s3://BUCKET/KEY [options]",
        """\
Upload a packed dataset to an S3-compatible object store. Once the upload is
complete, open_storage("s3://BUCKET/KEY") and every command that reads can open
it. After a kill or a failure of the store, run the same command again to resume
the push. Needs the extra: pip install "tallyroll[s3]".

Credentials are read from the environment (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN) or from the machine's role. An address
or endpoint that contains credentials is rejected.
""",
        """\
examples:
  tallyroll pack runs/breakout breakout.packed
  tallyroll push breakout.packed s3://datasets/breakout
  push to your own server; other objects in the bucket are not modified:
    tallyroll push breakout.packed s3://datasets/breakout \\
      --endpoint http://10.0.0.5:9000
  read the dataset from any machine:
    AWS_ENDPOINT_URL=http://10.0.0.5:9000 \\
      tallyroll inspect s3://datasets/breakout

exit status:
  0  the push is complete
  1  the push is incomplete, and the message says why; run it again to resume
  2  invalid argument
""",
    ),
    "pull": (
        "download a packed dataset from an object store",
        "%(prog)s s3://BUCKET/KEY DST [options]",
        """\
Download a packed dataset from an S3-compatible object store. The command writes
to a temporary directory next to DST, checks the data, and then renames it. DST
is created atomically: complete, or not at all. Needs the extra: pip install
"tallyroll[s3]".

Credentials are read from the environment (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN) or from the machine's role.
""",
        """\
examples:
  tallyroll pull s3://datasets/breakout breakout.packed
  tallyroll pull s3://datasets/breakout breakout.packed --json | jq .rows

exit status:
  0  DST is complete
  1  DST was not created, and the message says why
  2  invalid argument
""",
    ),
}

NAMES = tuple(_TEXTS)
"""The commands of this module."""


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add commands to ``commands``. ``path`` parses paths; ``complete`` marks them for shtab."""
    for name, (about, usage, description, examples) in _TEXTS.items():
        parser = commands.add_parser(
            name, help=about, usage=usage, description=description, epilog=examples
        )
        address = ("address", "s3://BUCKET/KEY", "the address in the store")
        if name == "push":
            places = [("path", "SRC", "a packed dataset, a directory"), address]
        else:
            places = [address, ("path", "DST", "the new dataset; must not exist")]
        for dest, metavar, text in places:
            added = parser.add_argument(dest, type=path, metavar=metavar, help=text)
            if dest == "path":
                added.complete = complete
        if name == "push":
            text = "replace a different dataset at this address"
            parser.add_argument("--replace", action="store_true", help=text)
        text = "server to use (default: AWS_ENDPOINT_URL, or the store of the region)"
        parser.add_argument("--endpoint", metavar="URL", help=text)
        parser.add_argument(
            "--region", metavar="NAME", help="region to use (default: AWS_REGION, or us-east-1)"
        )
        parser.add_argument(
            "--patience",
            type=_seconds,
            default=60.0,
            metavar="S",
            help="stop retrying a failed request after S seconds (default: 60)",
        )
        add_output(parser)


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
    from tallyroll.collector.cli.output import emit
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage import S3Options, pull, push

    began = time.monotonic()
    options = S3Options(endpoint=args.endpoint, region=args.region, patience=args.patience)
    report: Any
    with shown_progress("pushed" if args.command == "push" else "pulled", args.quiet) as progress:
        if args.command == "push":
            report = push(
                args.path, args.address, options=options, replace=args.replace, progress=progress
            )
        else:
            report = pull(args.address, args.path, options=options, progress=progress)
    if args.json:
        emit(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    elif not args.quiet:
        emit(f"{report}, {time.monotonic() - began:.1f} s\n")
    return 0
