"""``tallyroll copy`` and its short forms: copy rows of storages to a new one."""

import argparse
import dataclasses
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tallyroll.collector.cli.selection import add_accept_copy, add_output, add_where, chosen_rows

if TYPE_CHECKING:
    from pathlib import Path


# Lines have at most 78 columns.


class _Texts(NamedTuple):
    about: str
    usage: str
    description: str
    examples: str


_END = """
exit status:
  0  success
  1  DST was not created, and the message says why
  2  invalid argument
"""

_TEXTS = {
    "copy": _Texts(
        "copy rows of one or more storages to a new one",
        "%(prog)s SRC [SRC ...] DST [options]",
        """\
Copy the committed rows of one or more storages to a new storage of any format.
By default, all rows and columns are copied in their order; options select
trajectories and columns, and sort rows by trajectory. The sources are not
modified, and other processes may keep writing to them. DST is created
atomically: complete, or not at all. Its manifest records where the rows came
from.
""",
        """\
examples:
  copy to an HDF5 file; combine several storages, with a quoted pattern:
    tallyroll copy runs/pole pole.h5
    tallyroll copy 'runs/shard-*' runs/all
  print what would be done, and how much space it would take:
    tallyroll copy runs/a runs/b runs/both --dry-run
  leave out pixels, and sort rows by trajectory:
    tallyroll copy runs/pong runs/small --drop pixels,next/pixels --sort
  copy the trajectories that match a condition:
    tallyroll copy runs/pole runs/good --where 'return > 200'
  follow a running collector until it ends, or until Ctrl-C:
    tallyroll copy runs/pole backup/pole --follow
"""
        + _END,
    ),
    "merge": _Texts(
        "copy several storages into one",
        "%(prog)s DST SRC [SRC ...] [options]",
        """\
Copy the rows of several storages to a new one, one storage after the other, as
`tallyroll copy SRC ... DST` does. By default, trajectory ids that occur in two
storages are renumbered.

With --shards N the sources are the shards of one run (`tallyroll collect
--shard I/N`). They are merged only if all shards exist, are complete, and
together hold exactly the requested transitions. With --wait the command waits
for shards that other jobs are still collecting.
""",
        """\
examples:
  tallyroll merge runs/all runs/a runs/b runs/c
  tallyroll merge all.zarr 'runs/shard-*' --ids keep
  in the last job of an array: wait at most a day, then name missing shards:
    tallyroll merge runs/all 'runs/part-*' --shards 8 --wait --timeout 86400
"""
        + _END,
    ),
    "select": _Texts(
        "copy the trajectories that match a condition",
        "%(prog)s SRC DST --where EXPR [options]",
        """\
Copy selected trajectories to a new storage, as `tallyroll copy SRC DST --where
EXPR` does. EXPR compares fields of a trajectory, such as return, length, end,
lane, run, id, policy_version and reset_seed.
""",
        """\
examples:
  tallyroll select runs/pole runs/good --where 'return > 200'
  tallyroll select 'runs/*' best.zarr \\
    --where "return > 5 and end == 'terminated' and policy_version >= 3"
"""
        + _END,
    ),
    "drop": _Texts(
        "copy a storage without some columns",
        "%(prog)s SRC DST COLUMN [COLUMN ...] [options]",
        """\
Copy a storage without some of its columns, as `tallyroll copy SRC DST --drop
COLUMN` does.
""",
        """\
example:
  tallyroll drop runs/pong runs/small pixels next/pixels
"""
        + _END,
    ),
    "sort": _Texts(
        "copy a storage with rows grouped by trajectory",
        "%(prog)s SRC DST [options]",
        """\
Copy a storage with its rows grouped by trajectory, as `tallyroll copy SRC DST
--sort` does. Trajectories are in the order of their first rows.
""",
        """\
example:
  tallyroll sort runs/pole runs/sorted.zarr
"""
        + _END,
    ),
    "upgrade": _Texts(
        "copy an older storage to the current format version",
        "%(prog)s SRC DST [options]",
        """\
Copy a storage that an older Tallyroll wrote to a new one, with the same kind of
files and the format version that this Tallyroll writes. Tallyroll itself reads
and appends to older versions directly; upgrade a storage for other programs. If
the storage already has the current version, nothing is written.
""",
        """\
example:
  tallyroll upgrade runs/old runs/new
"""
        + _END,
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
        parser.set_defaults(
            usage_error=parser.error,
            where=None,
            flags=None,
            drop=[],
            sort=name == "sort",
            follow=False,
        )
        parser.set_defaults(upgrade=name == "upgrade")
        several = name in ("copy", "merge")
        places = [("sources", "SRC", "a storage, or a quoted pattern", several)]
        places.append(("destination", "DST", "the new storage; must not exist", False))
        for dest, metavar, text, many in reversed(places) if name == "merge" else places:
            more = {"nargs": "+"} if many else {}
            added = parser.add_argument(dest, type=path, metavar=metavar, help=text, **more)
            added.complete = complete
        if name == "drop":
            parser.add_argument(
                "drop",
                nargs="+",
                type=_key,
                metavar="COLUMN",
                help="such as next/pixels",
            )
        if name == "merge":
            _add_waiting(parser)
        _add_options(parser, name)


def _add_waiting(parser: Any) -> None:
    parser.set_defaults(shards=None, wait=False)
    waiting = parser.add_argument_group("shards of one run")
    waiting.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="the sources are the N shards of one run: merge them in shard order, and only if all "
        "are complete; SRC may match nothing yet",
    )
    waiting.add_argument(
        "--wait", action="store_true", help="wait until all shards are complete; needs --shards"
    )
    waiting.add_argument(
        "--timeout",
        type=float,
        default=86400.0,
        metavar="S",
        help="maximum seconds to wait; then an error names the missing shards (default: 86400, "
        "a day)",
    )


def _add_options(parser: Any, name: str) -> None:
    if name not in ("drop", "upgrade"):
        parser.add_argument(
            "--columns",
            type=_keys,
            metavar="A,B",
            help="only these columns, such as next/reward",
        )
    else:
        parser.set_defaults(columns=None)
    if name in ("copy", "select"):
        text = (
            "copy only the trajectories that match, such as: return > 5 and end == 'terminated' "
            "and policy_version >= 3"
        )
        add_where(parser, text, required=name == "select")
    if name == "copy":
        parser.add_argument("--drop", type=_keys, metavar="A,B", help="all columns except these")
        parser.add_argument(
            "--sort",
            action="store_true",
            help="group rows by trajectory, in the order of their first rows",
        )
        parser.add_argument(
            "--follow",
            action="store_true",
            help="keep copying rows that another process appends, until it closes the storage, or "
            "until Ctrl-C or SIGTERM; DST then holds complete batches",
        )
    if name == "upgrade":
        parser.set_defaults(format=None)
    else:
        parser.add_argument(
            "--format",
            choices=("memmap", "hdf5", "zarr"),
            help="format of DST (default: by file extension: .h5 and .hdf5 mean hdf5, .zarr means "
            "zarr, others memmap)",
        )
    if name in ("copy", "merge"):
        parser.add_argument(
            "--ids",
            choices=("offset", "keep"),
            default="offset",
            help="trajectory ids that occur in two storages. offset: renumber those of the later "
            "storage above all earlier ids; keep: raise an error (default: offset)",
        )
    else:
        parser.set_defaults(ids="offset")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be done and write nothing"
    )
    add_accept_copy(parser)
    add_output(parser)


def _key(text: str) -> tuple[str, ...]:
    parts = tuple(text.split("/"))
    if not all(parts):
        raise argparse.ArgumentTypeError(f"expected a column, such as next/reward, got {text!r}")
    return parts


def _keys(text: str) -> list[tuple[str, ...]]:
    return [_key(name.strip()) for name in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from tallyroll.collector.cli.output import emit, say
    from tallyroll.collector.cli.page import Page
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage.errors import InvalidExpression
    from tallyroll.storage.ext.joined.members import expand_paths
    from tallyroll.storage.ext.storage_copy import show_copy

    if getattr(args, "shards", None) is None:
        if getattr(args, "wait", False):
            args.usage_error("--wait needs --shards, the number of shards to wait for")
        paths = expand_paths(args.sources)
    else:
        paths = _complete_shards(args)
    if args.follow and (len(paths) > 1 or args.sort or args.where is not None):
        args.usage_error("--follow: expected one storage, without --sort and --where")
    with (
        _opened(paths, args) as storage,
        _until_a_signal(wanted=args.follow) as stop,
        shown_progress("copied", args.quiet or args.dry_run) as progress,
    ):
        if args.upgrade and (newest := _newest(storage)) is not None:
            if args.json:
                emit(json.dumps({"upgraded": False, "format_version": newest}) + "\n")
            elif not args.quiet:
                emit(f"{storage.path} is of format version {newest}, the newest: nothing to do\n")
            return 0
        try:
            rows = chosen_rows(storage, args)
            report = rows.copy_to(
                args.destination,
                columns=args.columns,
                drop=args.drop or [],
                sort=args.sort,
                format=_kind(storage) if args.upgrade else args.format,
                follow=args.follow,
                stop=stop,
                dry_run=args.dry_run,
                progress=progress,
            )
        except InvalidExpression as error:
            say(f"tallyroll: error: --where: {error}", lines=True)  # a caret is on its own line
            return 2
        except ValueError as error:
            args.usage_error(str(error))
    if args.json:
        emit(json.dumps(dataclasses.asdict(report) | {"dry_run": args.dry_run}, indent=2) + "\n")
    elif not args.quiet:
        page = Page()
        show_copy(report, page, dry=args.dry_run)
        emit(page.text)
    return 0


def _complete_shards(args: argparse.Namespace) -> "list[Path]":
    """Return the storages of all shards. Wait for them with --wait; raise if some are missing."""
    from tallyroll.collector.cli.datasets.shard_states import ShardStates, waited_for
    from tallyroll.collector.cli.output import CommandError, emit
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage.ext.atomic_create import require_free
    from tallyroll.storage.files.paths import user_path

    if args.shards < 1 or not 0 < args.timeout < float("inf"):
        args.usage_error("--shards and --timeout: expected numbers above 0")
    require_free(user_path(args.destination))  # before the wait, which may take a day
    quiet = args.quiet or not args.wait
    with shown_progress("collected", quiet, "{:,} rows".format) as progress:

        def show(found: ShardStates) -> None:
            rows = sum(each.rows for each in found.shards.values())
            done = len(found.shards) - len(found.unfinished)
            progress(rows, found.asked or rows, lambda: [f"{done} of {args.shards} shards"])

        found = waited_for(args.sources, args.shards, args.timeout if args.wait else 0.0, show)
    if not found.missing and not found.unfinished:
        return found.paths
    if args.json:
        emit(json.dumps(found.as_json(), indent=2) + "\n")
    after = f" after {args.timeout:g} s" if args.wait else ""
    raise CommandError(
        f"not all of {args.shards} shards are complete{after}: {found.in_words()}. Nothing was "
        "written. Run the same command again to continue"
        + ("." if args.wait else ", with --wait to wait for the shards.")
    )


def _newest(storage: Any) -> int | None:
    """Return the format version of a storage if it is current; None if it is older."""
    from tallyroll.storage.files.format_versions import FORMAT_VERSION

    version: int = storage.reader.manifest.get("format_version", FORMAT_VERSION)
    return version if version >= FORMAT_VERSION else None


def _kind(storage: Any) -> str:
    """Return the name of a storage's format, as in ``--format``."""
    from tallyroll.storage.storages import FORMATS

    return next(name for name, kind in FORMATS.items() if isinstance(storage, kind))


def _opened(paths: "Sequence[Path]", args: argparse.Namespace) -> Any:
    """Open the sources as one storage, with the columns that all of them share.

    These may include unwanted columns, because a condition on trajectories may need them.
    """
    from tallyroll.storage import open_storage

    options: dict[str, Any] = {"accept_copy": args.accept_copy}
    if len(paths) == 1:
        return open_storage(paths[0], **options)
    columns = None
    if args.drop or args.columns:
        every: dict[Any, list[Any]] = {}
        beside = set()
        for each in paths:
            with open_storage(each, **options) as storage:
                beside |= {(key,) if isinstance(key, str) else key for key in storage.overlays}
                for column in storage.schema.columns:
                    every.setdefault(column.key, []).append(column)
        alike = [k for k, own in every.items() if len(own) == len(paths) and len({*own}) == 1]
        wanted = [*(args.columns or every)]
        wanted = [key for key in wanted if key not in (args.drop or ()) and key not in beside]
        columns = alike if {*wanted} <= {*alike} else wanted  # opening them reports the difference
        args.drop = [key for key in args.drop or () if key in alike or key not in every]
    return open_storage(paths, ids=args.ids, columns=columns, **options)


@contextmanager
def _until_a_signal(*, wanted: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once a signal has asked to stop following."""
    came: list[int] = []
    if not wanted:
        yield lambda: False
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in numbers}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
