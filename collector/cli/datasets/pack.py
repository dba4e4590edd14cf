"""``tallyroll pack``: compress the rows of a storage into a new one."""

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Any

from tallyroll.collector.cli.selection import add_accept_copy, add_output

# Lines have at most 78 columns.

_ABOUT = "compress the rows of a storage into a new one"
_USAGE = "%(prog)s SRC DST [options]"
_DESCRIPTION = """\
Compress the committed rows of a storage into a new one. Rows are grouped by
trajectory, and each observation and each frame of a frame stack is stored once.
Compression is lossless. `tallyroll` and open_storage read DST like any storage,
under new row numbers, but cannot append to it. zarr-python, TensorStore, xarray
and h5py can read it too. SRC is not modified, and other processes may keep
writing to it. DST is created atomically: complete, or not at all.
"""
_EXAMPLES = """\
examples:
  tallyroll pack runs/breakout breakout.packed
  tallyroll pack runs/breakout breakout.h5 --format hdf5
  compress more, but slower; shuffle the bytes of observations:
    tallyroll pack runs/ant ant.packed --codec zstd:9
    tallyroll pack runs/ant ant.packed --codec observation=shuffle:9
  pack stacks of eight RGB frames along the last axis:
    tallyroll pack runs/doom doom.packed --stack pixels:8:-1
  store every column as an array with one entry per row, for other programs:
    tallyroll pack runs/ant ant.zarr --rows-as-they-are

exit status:
  0  DST is complete
  1  DST was not created, and the message says why
  2  invalid argument
"""
_CODECS = (
    "compression of all columns, or of COLUMN; may be given several times. zstd:1 to zstd:22; "
    "shuffle:1 to shuffle:9, which is zstd after shuffling the bytes of numbers; none; with "
    "--format hdf5 gzip:1 to gzip:9 (default: zstd:3 for bytes, shuffle:5 for numbers; gzip:4 "
    "for hdf5)"
)
_STACKS = (
    "COLUMN holds stacks of N frames, oldest first, along AXIS of its values (default: the first "
    "axis, and all of it); may be given several times. Without --stack, frame stacks are detected"
)


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add the command to ``commands``. ``path`` parses paths; ``complete`` marks them for shtab."""
    parser = commands.add_parser(
        "pack", help=_ABOUT, usage=_USAGE, description=_DESCRIPTION, epilog=_EXAMPLES
    )
    for name, metavar, text in (
        ("path", "SRC", "a storage, of any format"),
        ("destination", "DST", "the new storage; must not exist"),
    ):
        added = parser.add_argument(name, type=path, metavar=metavar, help=text)
        added.complete = complete
    formats = ("zarr", "hdf5")
    text = "zarr: a directory; hdf5: a file (default: hdf5 if DST ends in .h5 or .hdf5, else zarr)"
    parser.add_argument("--format", choices=formats, help=text)
    parser.add_argument(
        "--codec", action="append", default=[], metavar="[COLUMN=]CODEC", type=_codec, help=_CODECS
    )
    parser.add_argument(
        "--stack", action="append", metavar="COLUMN[:N[:AXIS]]", type=_stack, help=_STACKS
    )
    text = "do not deduplicate observations and frames"
    parser.add_argument("--rows-as-they-are", action="store_true", help=text)
    add_accept_copy(parser)
    add_output(parser)


def _codec(text: str) -> tuple[str, str]:
    """Split ``[COLUMN=]CODEC``; the column is empty if the codec applies to all columns."""
    column, _, codec = text.rpartition("=")
    if not codec:
        raise argparse.ArgumentTypeError(f"expected CODEC, or COLUMN=CODEC, got {text!r}")
    return column, codec


def _stack(text: str) -> tuple[str, int | None, int]:
    found = re.fullmatch(r"([^:]+)(?::([0-9]{1,4})(?::(-?[0-9]{1,2}))?)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected COLUMN, COLUMN:N or COLUMN:N:AXIS, such as pixels:4:-1, got {text!r}"
        )
    column, n, axis = found.groups()
    return column, None if n is None else int(n), int(axis or 0)


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll pack`` and return the exit status."""
    from tallyroll.collector.cli.output import CommandError, emit
    from tallyroll.collector.cli.page import Page
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage import open_storage
    from tallyroll.storage.ext.packed.pack import show_pack
    from tallyroll.storage.rows.frame_stacks import FrameStack

    if args.rows_as_they_are and args.stack:
        raise CommandError(
            "--stack stores each frame once, but --rows-as-they-are stores no frame once. Leave "
            "one of them out."
        )
    began = time.monotonic()
    every = [codec for column, codec in args.codec if not column]
    chosen = {tuple(column.split("/")): codec for column, codec in args.codec if column}
    if len(every) > 1 or (every and chosen):
        raise CommandError(
            "--codec: expected one codec for all columns, or a codec for each of some columns, got "
            "several codecs for all columns, or both kinds."
        )
    codecs: Any = every[0] if every else chosen
    with (
        open_storage(args.path, accept_copy=args.accept_copy) as storage,
        shown_progress("packed", args.quiet, "{:,} rows".format) as progress,
    ):
        try:
            report = storage.pack(
                args.destination,
                format=args.format,
                codecs=codecs,
                once=not args.rows_as_they_are,
                stacks=args.stack
                and [FrameStack(tuple(key.split("/")), n, axis) for key, n, axis in args.stack],
                progress=progress,
            )
        except ValueError as error:
            raise CommandError(str(error)) from error
    if args.json:
        emit(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    elif not args.quiet:
        page = Page()
        show_pack(report, page, time.monotonic() - began)
        emit(page.text)
    return 0
