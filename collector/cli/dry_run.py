"""``tallyroll plan``: print the execution plan and the disk space of a run, without collecting."""

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gymnasium
from rich.filesize import decimal

from tallyroll.collector.cli.collect import CollectRun, Signals, default_batch, require_usage
from tallyroll.collector.cli.output import CommandError, as_json, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.cli.plan import Plan, open_output
from tallyroll.collector.cli.row_space import RowSpace
from tallyroll.collector.options.sharding import Shard
from tallyroll.storage.files.paths import free_bytes


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll plan`` and return the exit status."""
    require_usage(args)
    place = Path(args.out or ".")
    frames = args.frames
    with tempfile.TemporaryDirectory(prefix="tallyroll-plan-") as folder:
        args.out = os.path.join(folder, f"plan{place.suffix}")
        # An HDF5 file reserves space for the whole budget, so use the budget of one batch.
        args.frames = _frames_of_a_batch(Plan.of(args))
        with _named(args.out, place), open_output(args) as storage:
            made = CollectRun(args, storage, Signals())
            with made.make_collector(*made.load()) as collector:
                plan = collector.plan
                whole = replace(made.plan, frames=frames)
                rows = None if whole.by_agent else whole.own_frames
                space = RowSpace.of(storage, rows)
    hints = [hint for hint in (_ale_hint(made.plan.env), space.hint) if hint]
    free = free_bytes(place)
    if args.json:
        facts = {"plan": plan.as_json(), **space.as_json(), "free_bytes": free}
        facts["hint"] = ". ".join(hints) or None
        emit(json.dumps(as_json(facts), indent=2, allow_nan=False) + "\n")
        return 0
    page = Page()
    for line in str(plan).splitlines():
        page.print(line)
    page.print()
    page.print(f"{space.takes}; {decimal(free)} are free in {place}")
    for hint in hints:
        page.print(hint)
    emit(page.text)
    return 0


def _ale_hint(env: str | None) -> str:
    """Name the system of vectorised games for a Gymnasium id of ALE; "" for other ids."""
    spec = gymnasium.registry.get((env or "").rpartition(":")[2])
    if spec is None or spec.namespace != "ALE" or spec.kwargs.get("obs_type", "rgb") == "ram":
        return ""
    if (game := spec.kwargs.get("game")) is None:
        return ""
    return (
        f"ale:{game} makes the game of {env} as DQN sees it, in one vector: stacks of 4 grey "
        "images of 84 x 84 pixels, rewards clipped to -1, 0 and 1, 0 to 30 no-ops at the start, "
        "and no sticky actions"
    )


@contextlib.contextmanager
def _named(temporary: str, place: Path) -> Iterator[None]:
    """Let errors name the path that the user gave."""
    try:
        yield
    except CommandError as error:
        raise CommandError(str(error).replace(temporary, str(place))) from error


def _frames_of_a_batch(plan: Plan) -> int | None:
    """Return a budget of one batch that leads to the same plan; None with an episode budget."""
    if plan.frames is None:
        return None
    parts = 1 if plan.shard is None else Shard.parsed(plan.shard).of
    batch = plan.frames_per_batch or default_batch(plan, plan.max_size or 0)
    return min(plan.frames, batch * parts)
