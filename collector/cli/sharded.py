"""``tallyroll collect --sharded``: workers keep their rows, and the command notes which count."""

import argparse
from collections.abc import Iterator

from tallyroll.collector.batches.run_loop import Collector
from tallyroll.collector.cli.plan import Plan

_BATCHES = 8
"""Batches between two looks at the progress: workers wait for the last one of these."""
_OTHERS = ("append", "format", "durability", "max_size", "finalize", "accept_copy", "checkpoint")
"""Options that are for a storage which has the rows itself."""


def wrong_sharded(plan: Plan, args: argparse.Namespace) -> str | None:
    """The fault of --sharded; None if there is none."""
    if not plan.sharded:
        return None
    if not plan.workers:
        return "--sharded is for workers, each of which has a shard; give --workers"
    if plan.mode == "sync":
        return "--sharded: rows of several shards have no order; leave --mode sync out"
    if plan.frames is None or plan.by_agent or plan.shard is not None:
        return (
            "--sharded: expected --frames, a number of transitions of the whole run, without "
            "--episodes, --budget-unit agent_transitions and --shard"
        )
    if plan.policy_placement == "central":
        return "--policy-placement central does not go with --sharded; leave it out"
    for name in _OTHERS:
        if getattr(args, name):
            option = "--" + name.replace("_", "-")
            return f"{option} does not go with --sharded; leave it out"
    return None


def steps_of(collector: Collector, plan: Plan) -> Iterator[object]:
    """Collect, and yield now and then, until the budget is met or the run was stopped."""
    if plan.sharded:
        while collected := collector.collect(_BATCHES * collector.frames_per_batch):
            yield collected
    else:
        yield from collector
