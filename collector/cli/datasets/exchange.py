"""``tallyroll export`` and ``tallyroll import``: convert datasets of other libraries."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from tallyroll.collector.cli.selection import add_accept_copy, add_output, add_where, chosen_rows

# Lines have at most 78 columns.

_KINDS = """
kinds:
  d4rl     a D4RL HDF5 file                      needs tallyroll[hdf5]
  hf       a folder for the Hugging Face Hub     needs tallyroll[arrow]
  lerobot  a LeRobot folder                      needs tallyroll[lerobot]
  minari   a Minari folder                       needs tallyroll[minari]
  npz      a NumPy archive
  parquet  a Parquet file                        needs tallyroll[arrow]
  rlds     a TensorFlow Datasets folder          needs tallyroll[rlds]
  torchrl  a folder that TensorDict.load_memmap opens
Other packages can add kinds.
"""
_EXPORT_USAGE = "%(prog)s SRC [SRC ...] KIND:DST [options]"
_EXPORT = """\
Write the committed rows of one or more storages in the format of another
library. Data that the format cannot hold is counted and reported. The sources
are not modified, and other processes may keep writing to them. DST is created
atomically: complete, or not at all.

With --follow DST is a folder of versions, and DST/current is a link to the
newest one. That version is always complete, even if the command is killed.
"""
_EXPORT_EXAMPLES = (
    _KINDS
    + """
examples:
  tallyroll export runs/pole parquet:pole.parquet
  select trajectories by a condition, and some of their columns:
    tallyroll export runs/pole npz:good.npz --where 'return > 200' \\
      --columns observation,action,next/reward
  leave out episodes that were cut:
    tallyroll export runs/pole minari:datasets/pole-v0 --cuts drop
  encode images as videos for LeRobot:
    tallyroll export runs/pong lerobot:datasets/pong --video av1 --fps 15
  follow a running collector until it ends, and train on a complete version:
    tallyroll export runs/pole hf:datasets/pole --follow
    python train.py --data "$(realpath datasets/pole/current)"

exit status:
  0  DST is complete
  1  DST was not created, and the message says why; with --follow the last
     version is kept
  2  invalid argument
"""
)
_IMPORT_USAGE = "%(prog)s KIND:SRC DST [options]"
_IMPORT = """\
Convert a dataset of another library to a new storage of any format. The command
unpickles and executes nothing in the dataset, follows no links, and checks
sizes first. If the dataset has no trajectory ids, steps or lanes, they are
derived from its end flags, with lane 0. DST is created atomically: complete, or
not at all. Its manifest records where the rows came from.
"""
_IMPORT_EXAMPLES = (
    _KINDS
    + """
examples:
  tallyroll import minari:datasets/pole-v0 runs/pole
  tallyroll import d4rl:hopper_medium.hdf5 hopper.zarr

exit status:
  0  DST is complete
  1  DST was not created, and the message says why
  2  invalid argument
"""
)
_CUTS = (
    "trajectories that were neither terminated nor truncated. keep: write them unchanged; drop: "
    "leave them out; truncate: mark their last rows as truncated (default: keep)"
)

_FOLLOW = (
    "keep exporting new versions to a folder until the process that writes SRC closes it, or until "
    "Ctrl-C; DST/current links to the newest version, and the previous one is kept"
)


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add commands to ``commands``. ``path`` parses paths; ``complete`` marks them for shtab."""
    out = commands.add_parser(
        "export",
        help="write rows in the format of another library",
        usage=_EXPORT_USAGE,
        description=_EXPORT,
        epilog=_EXPORT_EXAMPLES,
    )
    text = "a storage, or a quoted pattern"
    added = out.add_argument("sources", nargs="+", type=path, metavar="SRC", help=text)
    added.complete = complete
    text = "the format, and the file or folder; must not exist"
    added = out.add_argument("there", type=_there, metavar="KIND:DST", help=text)
    added.complete = complete
    out.add_argument("--columns", type=_keys, metavar="A,B", help="only these, such as next/reward")
    text = "only the trajectories that match, such as: return > 5 and end == 'terminated'"
    add_where(out, text)
    out.add_argument("--cuts", choices=("drop", "truncate", "keep"), default="keep", help=_CUTS)
    out.add_argument("--follow", action="store_true", help=_FOLLOW)
    text = "with --follow: seconds between versions, if rows were added (default: 30)"
    out.add_argument("--every", type=float, metavar="S", help=text)
    of_lerobot = out.add_argument_group("lerobot")
    text = "encode images as video with this codec; the last two are lossless (default: PNG)"
    codecs = ("av1", "h264", "h264-lossless", "ffv1")
    of_lerobot.add_argument("--video", choices=codecs, help=text)
    text = "steps per second (default: 30)"
    of_lerobot.add_argument("--fps", type=int, metavar="N", help=text)
    text = "quality of av1 and h264, 0 (best) to 51 (default: 30)"
    of_lerobot.add_argument("--crf", type=int, metavar="N", help=text)
    of_lerobot.add_argument("--task", metavar="TEXT", help="the task, described in one sentence")
    add_accept_copy(out)
    out.set_defaults(usage_error=out.error)
    add_output(out)
    back = commands.add_parser(
        "import",
        help="write a dataset of another library to a new storage",
        usage=_IMPORT_USAGE,
        description=_IMPORT,
        epilog=_IMPORT_EXAMPLES,
    )
    text = "the format, and the file or folder"
    added = back.add_argument("there", type=_there, metavar="KIND:SRC", help=text)
    added.complete = complete
    text = "the new storage; must not exist"
    added = back.add_argument("destination", type=path, metavar="DST", help=text)
    added.complete = complete
    text = "format of DST (default: by file extension, as in tallyroll copy)"
    back.add_argument("--format", choices=("memmap", "hdf5", "zarr"), help=text)
    back.set_defaults(usage_error=back.error)
    add_output(back)


def _there(text: str) -> tuple[str, str]:
    kind, colon, path = text.partition(":")
    if not kind or not colon or not path:
        raise argparse.ArgumentTypeError(
            f"expected KIND:PATH, such as parquet:rows.parquet, got {text!r}"
        )
    return kind, path


def _keys(text: str) -> list[tuple[str, ...]]:
    keys = [tuple(name.strip().split("/")) for name in text.split(",")]
    if not all(part for key in keys for part in key):
        raise argparse.ArgumentTypeError(
            f"expected columns, such as next/reward,action, got {text!r}"
        )
    return keys


def run(args: argparse.Namespace) -> int:
    """Run one of the commands and return the exit status."""
    from tallyroll.collector.cli.output import emit, say
    from tallyroll.collector.cli.page import Page
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage.errors import InvalidExpression
    from tallyroll.storage.ext.exchange.dataset_import import show_import

    out = args.command == "export"
    try:
        with shown_progress("exported" if out else "imported", args.quiet) as progress:
            report = _exported(args, progress) if out else _imported(args, progress)
    except InvalidExpression as error:
        say(f"tallyroll: error: --where: {error}", lines=True)
        return 2
    except ValueError as error:
        args.usage_error(str(error))
    if args.json:
        emit(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    elif not args.quiet:
        page = Page()
        if out:
            report._show_on_(page)
        else:
            show_import(report, page, args.there[1])
        emit(page.text)
    return 0


def _exported(args: argparse.Namespace, progress: Any) -> Any:
    from tallyroll.storage import open_storage
    from tallyroll.storage.ext.joined.members import expand_paths

    kind, place = args.there
    paths = expand_paths(args.sources)
    source: Any = paths[0] if len(paths) == 1 else paths
    reports: list[Any] = []
    options = {"columns": args.columns, "cuts": args.cuts, "follow": _follow(args, reports.append)}
    options["options"] = _of_lerobot(args)
    with open_storage(source, accept_copy=args.accept_copy) as storage:
        rows = chosen_rows(storage, args)
        try:
            return rows.export(place, kind, progress=progress, **options)
        except KeyboardInterrupt:
            if not reports:
                raise
            return reports[-1]  # report of the last complete version


def _follow(args: argparse.Namespace, keep: Callable[[Any], object]) -> Any:
    """Return the options of --follow; None without --follow."""
    from tallyroll.storage import Follow

    if not args.follow:
        if args.every is not None:
            raise ValueError("--every needs --follow.")
        return None
    return Follow(on_version=keep, **({} if args.every is None else {"every": args.every}))


def _of_lerobot(args: argparse.Namespace) -> Any:
    """Return the LeRobot options from the command line; None if there are none."""
    from tallyroll.storage import LeRobotOptions

    names = ("video", "fps", "crf", "task")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return LeRobotOptions(**given) if given else None


def _imported(args: argparse.Namespace, progress: Any) -> Any:
    from tallyroll.storage import import_dataset

    kind, place = args.there
    return import_dataset(place, args.destination, kind, format=args.format, progress=progress)
