"""The parts of an assembly, chosen once by the plan of the run."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from tallyroll.collector.batches.batch_output import Delivery
from tallyroll.collector.batches.checks.final_observations import FinalsWatch
from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.fast_collect import OneCall, OneCallOfWorkers
from tallyroll.collector.batches.layouts.laying_out import LayingOut, Processing
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.rows.in_slab import InSlab
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.run_loop import Assembly
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.batches.stored.storing_plan import StoringPlan, traits_of
from tallyroll.collector.counting.ledger import Budget
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.policies.acting import Acting
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.rollout.source import TransitionSource
from tallyroll.storage.rows.keys import next_valid_keys


@runtime_checkable
class KeepsNoRows(Protocol):
    """A source whose workers keep their rows: it has what an `Assembly` has, for counts alone."""

    def assembly_of(self, run: RunState) -> Any:
        """Return what counts, and notes, the transitions of ``run``."""


def assemble(
    run: RunState,
    source: RowSource,
    rollout: TransitionSource,
    ranges: Sequence[Range],
    *,
    count_random: bool,
    draws: bool,
    torchrl: TorchrlLayout | None,
) -> Assembly:
    """Make an assembly, and open the storage of its run.

    Args:
        run: its state.
        source: makes rows of blocks.
        rollout: where blocks come from.
        ranges: the values that are allowed.
        count_random: whether random actions are an exception.
        draws: whether there are some, which are counted.
        torchrl: lays batches out where ``layout="torchrl"``.
    """
    options, writer, slabs = run.options, run.writer, source.plan
    if isinstance(rollout, KeepsNoRows):
        writer.open(source.no_rows, run.provenance, source.behind)
        counting: Assembly = rollout.assembly_of(run)
        return counting
    lanes = options.own_lanes(len(run.lanes.step))
    layout = (options, source, lanes, writer, torchrl)
    laying_out = LayingOut(*layout)
    if options.postproc is not None:
        laying_out = Processing(options.postproc, *layout)
    counts = DeliveredCounts(options, slabs, draws=draws)
    if options.by_agent:
        _count_agents(run, counts)
    at_random = not count_random or draws
    checks = RangeChecks(ranges, options.checks.validate, slabs.masks, at_random=at_random)
    watched = options.checks.finals == "check" and not slabs.lost_finals
    valid = next_valid_keys(slabs.layout)
    finals = FinalsWatch(lanes, slabs.observed if watched else (), valid)
    acting = Acting(options.exploration_type)
    if options.postproc is None:
        writer.open(source.no_rows, run.provenance, source.behind)
    traits = traits_of(options, source, rollout, writer, counts, checks, torchrl)
    plan = StoringPlan.of(traits)
    in_slab = one_call = None
    if plan.rows.way == "slab":
        in_slab = InSlab(source, run, laying_out, batches=plan.batches.way != "gathered")
        if plan.commits.way == "one call":
            assert isinstance(rollout, Rollout)  # others count lane by lane
            kind = OneCallOfWorkers if rollout.driver.in_workers else OneCall
            batch = options.frames_per_batch if plan.batches.way == "one call" else 0
            one_call = kind(run, rollout, in_slab, counts, checks, finals, acting, batch)
    return Assembly(
        run,
        plan,
        slabs,
        rollout,
        checks,
        finals,
        Delivery(run, source, rollout, counts, finals, laying_out, in_slab),
        one_call,
        acting,
        apart=torchrl is not None and torchrl.apart,
    )


def _count_agents(run: RunState, counts: DeliveredCounts) -> None:
    """Let the budget of ``run`` be one of agent transitions.

    Those of a run that goes on are counted in its rows, as far as a storage has all of them: the
    record of its last commit may be older than these.

    Raises:
        EnvironmentRefused: there are no groups of agents.
    """
    if not counts.most_agents:
        raise EnvironmentRefused(
            'budget_unit="agent_transitions": expected an environment with groups of agents, got '
            "one without; leave budget_unit out"
        )
    total, last = run.options.total_frames, run.writer.stored_run.last
    run.budget = Budget(total, agents=counts.most_agents)
    run.ledger.agent_budget = total
    if last is not None:
        reader, first = last
        if reader.span.start <= first and reader.head - first == run.ledger.stored:
            run.ledger.agent_transitions = counts.agents_in(reader, first)
