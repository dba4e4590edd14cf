"""``tallyroll replay``: step stored trajectories again, and compare them bit for bit."""

import argparse
from functools import partial
from operator import attrgetter
from typing import Any

from tallyroll.collector.cli.output import CommandError, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.cli.plan import import_named
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.collector.ext.replay.replay import replay
from tallyroll.collector.ext.replay.report import show_replay
from tallyroll.collector.ext.replay.video import write_picture


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll replay`` and return the exit status."""
    create = args.env if args.env_factory is None else factory(args.env_factory)
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
        page = Page()
        show_replay(found, page, args.render)
        emit(page.text)
    return found.status


def factory(spec: str) -> Any:
    """Return the function that ``module:function`` names.

    Raises:
        CommandError: the function does not exist, or is not callable.
    """
    name, _, path = spec.rpartition(":")
    if not name or not path:
        raise CommandError(f"--env-factory: expected module:function, got {spec!r}")
    module = import_named(name, f"--env-factory {spec}")
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
