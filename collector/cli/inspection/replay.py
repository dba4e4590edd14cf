"""``tallyroll replay``: step stored trajectories again, and compare them bit for bit."""

import argparse
from functools import partial
from operator import attrgetter
from typing import Any

from tallyroll.collector.cli.output import CommandError, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.cli.plan import imported
from tallyroll.collector.cli.progress import shown_progress
from tallyroll.collector.ext.replay.replay import replay
from tallyroll.collector.ext.replay.report import ReplayReport
from tallyroll.collector.ext.replay.video import write_picture

_SHOWN = 10


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll replay`` and return the exit status."""
    create = args.env if args.env_factory is None else _factory(args.env_factory)
    wanted: Any = "all" if args.all else args.trajectory
    with shown_progress("rows replayed", args.quiet, "{:,}".format) as progress:
        found = replay(
            args.path[0] if len(args.path) == 1 else args.path,
            wanted,
            sample=args.sample or 20,
            create_env_fn=create,
            env_kwargs=args.env_kwargs,
            atol=args.tolerance or 0.0,
            video=args.render,
            progress=partial(progress, details=list),
            accept_copy=args.accept_copy,
        )
    first = found.first_difference
    if args.picture and first is not None and first.is_image:
        write_picture(first, args.picture)
    if args.json:
        emit(found.to_json() + "\n")
    elif not args.quiet:
        emit(_as_text(found, args))
    return found.status


def _factory(spec: str) -> Any:
    """Return the function that ``module:function`` names.

    Raises:
        CommandError: the function does not exist, or is not callable.
    """
    name, _, path = spec.rpartition(":")
    if not name or not path:
        raise CommandError(f"--env-factory: expected module:function, got {spec!r}")
    module = imported(name, f"--env-factory {spec}")
    try:
        found = attrgetter(path)(module)
    except AttributeError as error:
        raise CommandError(f"--env-factory {spec}: {error}") from error
    if not callable(found):
        raise CommandError(
            f"--env-factory {spec}: expected a function that makes the environment, got "
            f"{type(found).__name__}"
        )
    return found


def _as_text(found: ReplayReport, args: argparse.Namespace) -> str:
    page = Page()
    within = f" within {found.atol:g}" if found.atol else ""
    if found.replayed:
        page.print(
            f"{'equal' if not found.differences else 'different'}{within}: {found.equal:,} of "
            f"{found.replayed:,} trajectories are equal, {found.rows:,} rows compared, "
            f"{found.seconds:.1f} s"
        )
    else:
        page.print("nothing was replayed")
    if found.differences:
        page.head("First differences")
        for each in found.differences[:_SHOWN]:
            page.print(f"  {each}")
        if more := len(found.differences) - _SHOWN:
            page.print(f"  and of {more:,} more trajectories" if more > 0 else "")
        page.head("Columns that differ (rows, largest difference)")
        for name, count in found.differing.items():
            page.print(f"  {name}: {count:,}, {found.largest[name]:g}")
    elif found.atol and found.largest:
        page.print(f"largest difference: {max(found.largest.values()):g}")
    for why, ids in found.not_replayed.items():
        page.print(f"not replayed: {_named(ids)}: {why}")
    for why, count in found.left_out.items():
        page.print(f"not chosen, for they cannot be replayed: {count:,} trajectories: {why}")
    if found.versions:
        said = ", ".join(
            f"{name} {run}, here {here}" for name, (run, here) in found.versions.items()
        )
        page.print(f"made with other versions: {said}")
    if found.not_compared and found.replayed:
        page.print(
            f"not compared, for the environment does not make them: {', '.join(found.not_compared)}"
        )
    for note in found.notes:
        page.print(f"note: {note}")
    if found.frames:
        page.print(f"{args.render}: {found.frames:,} frames")
    return page.text


def _named(ids: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ids[:_SHOWN]))
    more = len(ids) - _SHOWN
    noun = "trajectory" if len(ids) == 1 else f"{len(ids):,} trajectories:"
    return f"{noun} {shown}" + (f" and {more:,} more" if more > 0 else "")
