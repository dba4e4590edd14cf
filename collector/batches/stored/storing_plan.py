"""Plan of the rows after the slab: where they are, how they are stored and laid out."""

from dataclasses import dataclass
from math import ceil
from typing import Self

from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.rows.computed_columns import computed_columns
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.stored.sinks import stores_slots
from tallyroll.collector.batches.stored.writer import BatchWriter
from tallyroll.collector.native.kernel import is_built
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.rollout.source import TransitionSource
from tallyroll.collector.run_plan import (
    Decision,
    StoringTraits,
    batching,
    committing,
    extension_used,
    placing,
)


@dataclass(frozen=True)
class StoringPlan:
    """The decisions of a `RunPlan` that are made when rows are about to be stored."""

    rows: Decision
    batches: Decision
    commits: Decision
    extension: Decision

    @classmethod
    def of(cls, traits: StoringTraits) -> Self:
        """Decide for a run with ``traits``."""
        rows = placing(traits)
        commits = committing(traits, rows)
        extension = extension_used(built=traits.extension)
        return cls(rows, batching(traits, rows, commits), commits, extension)


def traits_of(
    options: Options,
    source: RowSource,
    rollout: TransitionSource,
    writer: BatchWriter,
    counts: DeliveredCounts,
    checks: RangeChecks,
    torchrl: TorchrlLayout | None,
) -> StoringTraits:
    """Look at a run for its plan."""
    plan, storage, slab = source.plan, writer.target, rollout.slabs[0]
    writes = None if storage is None else storage.writer
    files = writes if writes is not None and stores_slots(writes) else None
    return StoringTraits(
        postproc=options.postproc is not None,
        replay_buffer=writer.replay_buffer is not None,
        storage="" if storage is None else type(storage).__name__,
        has_engine=files is not None,
        waits_for_disk=files is not None and files.durability == "power",
        elsewhere=[key for key in plan.layout if key not in slab.flat],
        by_lane=rollout.counts.because if rollout.counts.way == "by lane" else "",
        arrivals=slab.lane is not None,
        extension=is_built(),
        few_float_rewards=plan.few_float_rewards,
        surplus=_surplus(options, rollout),
        counts_agents=options.by_agent,
        counts_ticks=counts.column is not None,
        follows_flags=torchrl is not None and torchrl.follows,
        resets_batches=options.reset_at_each_iter,
        computed=[each.key for each in computed_columns(plan) if not each.by_extension],
        wide_bounds=checks.table(slab) is None,
        slots_of_batch=ceil(options.largest_batch / slab.lanes),
        yields_large=bool(source.large) and options.columns.yield_large,
        arranged=_arranged(options, rollout),
    )


def _arranged(options: Options, rollout: TransitionSource) -> str:
    """Say what keeps a batch from being laid out as its rows are stored."""
    if isinstance(rollout, Rollout) and rollout.driver.in_workers:
        return "workers fill the slots"
    if options.layout.name != "rows":
        return f'layout="{options.layout.name}" puts rows in another order'
    return "" if options.storing_device is None else "storing_device= moves batches"


def _surplus(options: Options, rollout: TransitionSource) -> str:
    """Say what happens to a surplus that one call of the extension cannot leave for the next."""
    if options.surplus == "carry" or _has_whole_slots(rollout):
        return ""
    return f'slots have other numbers of transitions than lanes, and surplus="{options.surplus}"'


def _has_whole_slots(rollout: TransitionSource) -> bool:
    """Return whether each slot is a transition of every lane, and no lane is ever cut."""
    if not isinstance(rollout, Rollout) or rollout.counts.way == "by lane":
        return False
    return rollout.driver.all_are_transitions and not rollout.driver.in_workers
