"""Options that commands share, and the trajectories that they select."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from tallyroll.storage.storages import DiskStorage

WHERE = (
    'only trajectories that match a condition, such as "return > 5 and run == 1". Fields: id, '
    "run, lane, length, return, end, whole, policy_version, reset_seed, context.NAME"
)
"""Help text for ``--where``."""
_FLAGS = (
    "a file that `tallyroll view --flags` wrote for this storage, for conditions such as "
    "\"flag != ''\""
)


def add_where(
    parser: argparse.ArgumentParser, text: str = WHERE, *, required: bool = False
) -> None:
    """Add ``--where``, with the help ``text``, and ``--flags``."""
    parser.add_argument("--where", metavar="EXPR", required=required, help=text)
    parser.add_argument("--flags", metavar="FILE", help=_FLAGS)


def add_accept_copy(parser: argparse.ArgumentParser) -> None:
    """Add ``--accept-copy``."""
    text = "read a copy that was made while a writer had the storage open"
    parser.add_argument("--accept-copy", action="store_true", help=text)


def add_output(parser: argparse.ArgumentParser, *, quiet: bool = True) -> None:
    """Add ``--json``, ``--traceback``, and ``--quiet`` unless ``quiet`` is False."""
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    if quiet:
        output.add_argument("--quiet", action="store_true", help="print no progress and no report")
    output.add_argument("--traceback", action="store_true", help="print the traceback of an error")


def chosen_rows(storage: "DiskStorage", args: argparse.Namespace) -> "DiskStorage":
    """Return the rows that ``--where`` and ``--flags`` select."""
    if _selects(args):
        with _errors_of_flags(args):
            return storage.trajectories.where(args.where, flags=args.flags)
    return storage


def chosen_trajectories(storage: "DiskStorage", args: argparse.Namespace) -> "np.ndarray | None":
    """Return the table of the trajectories that ``--where`` and ``--flags`` select, if given."""
    if _selects(args):
        with _errors_of_flags(args):
            return storage.trajectories.matching(args.where, flags=args.flags)
    return None


def _selects(args: argparse.Namespace) -> bool:
    if args.where is None and args.flags is not None:
        args.usage_error("--flags: expected --where too, such as --where \"flag != ''\"")
    return args.where is not None


@contextmanager
def _errors_of_flags(args: argparse.Namespace) -> Iterator[None]:
    """Report a file without flags of the storage as a usage error."""
    from tallyroll.storage.errors import InvalidExpression

    try:
        yield
    except InvalidExpression:
        raise
    except ValueError as error:
        if args.flags is None:
            raise
        args.usage_error(f"--flags {error}")
