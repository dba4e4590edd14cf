"""The loop of a run: take blocks of transitions, count and commit them, and make batches."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.batches.batch_output import BatchOutput
from tallyroll.collector.batches.checks.checked_blocks import CheckedBlocks
from tallyroll.collector.batches.checks.final_observation_checks import FinalsWatch
from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.fast_collect import FastCollect, FastCollectOfWorkers
from tallyroll.collector.batches.layouts.batch_layout import BatchLayout, PostprocLayout
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.rows.slab_output import SlabOutput
from tallyroll.collector.batches.state.run_state import Phase, RunState
from tallyroll.collector.batches.stored.storing_plan import StoringPlan, traits_of
from tallyroll.collector.counting.ledger import Budget, LedgerEntry, post
from tallyroll.collector.errors import EnvironmentRefused, LedgerError, SilentReset
from tallyroll.collector.interrupts import call_waiting, signal_waits
from tallyroll.collector.policies.action_context import ActionContext
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block, TransitionSource
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.rows.keys import next_valid_keys


class RunLoop:
    """Takes blocks of transitions from a source, and makes batches of them.

    Each batch is filled, counted, validated, committed and laid out, in this order. `make_run_loop`
    chooses the parts of the loop according to the plan of the run.

    Args:
        run: the state of the run: its counts, and the trajectory and step of every lane.
        plan: the decisions about how rows are stored.
        slabs: the columns of the rows.
        rollout: the source of blocks.
        checks: the checks of values.
        finals: watches final observations.
        output: numbers rows, stores them and lays them out.
        fast_collect: the fast path for few slots; None if the plan has none.
        acting: the context in which steps are made.
        apart: True if each batch has the rows of one worker.
    """

    def __init__(
        self,
        run: RunState,
        plan: StoringPlan,
        slabs: SlabPlan,
        rollout: TransitionSource,
        checks: RangeChecks,
        finals: FinalsWatch,
        output: BatchOutput,
        fast_collect: FastCollect | None,
        acting: ActionContext,
        *,
        apart: bool,
    ) -> None:
        self._run, self.plan, self._rewards = run, plan, slabs.rewards
        self._rollout, self._checks, self._finals = rollout, checks, finals
        self._output, self.fast_collect, self._acting = output, fast_collect, acting
        self._apart = apart
        self._blocks = CheckedBlocks(
            run, rollout, checks, slabs.rewards, slabs.flags_and_rewards, in_place=slabs.in_place
        )
        self._everywhere = np.ones(len(run.lanes.step), np.bool_)
        self._at_once = plan.rows.way == "slab"
        """True if :meth:`collect` stores each block on arrival."""
        self._most = run.writer.most if self._at_once else run.options.frames_per_batch
        """The maximum number of rows that :meth:`collect` stores in one commit."""
        self._few = run.options.total_episodes is not None
        """True if the run ends with its last episode, which only the source knows."""
        self._yields = True
        """True if rows are yielded, False if they are only stored."""
        self._iterations = 0
        self._under_way = False
        """True during a batch or a call of `collect`, and after an exception has interrupted it."""
        self._committed: Callable[[], object] | None = None
        """Callback after each commit of :meth:`collect`."""

    # --- batches ----------------------------------------------------------------------------------

    def batch(self, size: int | None = None) -> TensorDictBase | None:
        """Return the next batch; None if the run ended without one. The last batch ends the run.

        The batch has ``size`` rows (default: ``frames_per_batch``), or fewer if the budget ends
        first.
        """
        run, output = self._run, self._output
        self._yields = True
        run.expect_batch()
        most = sys.maxsize if self._apart else size or run.options.frames_per_batch
        size = run.budget.batch(run.counted, most)
        self._raise_pending(size)
        self._begin(size)
        with self._acting:
            self._gather(size)
        short = output.count < size
        batch = output.deliver(size, yields=True) if output.count else None
        self._end(short=short)
        if self.fast_collect is not None and self.fast_collect.batch and not run.over:
            self.fast_collect.prepare()
        return batch

    def call_after_commits(self, committed: Callable[[], object]) -> None:
        """Call ``committed`` after each commit of :meth:`collect`."""
        self._committed = committed

    def collect(self, want: int) -> None:
        """Store ``want`` more transitions, or fewer if the run ends first."""
        ledger = self._run.ledger
        self._yields = False
        self._raise_pending(want)
        goal = ledger.stored + self._run.budget.batch(self._run.counted, want)
        self._begin(min(self._most, goal - ledger.stored))
        if self._at_once:
            with self._acting:
                self._store_blocks(goal)
        self._store_gathered(goal)
        self._end(short=ledger.stored < goal)
        if self.fast_collect is not None and not self._run.over:
            self.fast_collect.prepare()

    def _store_blocks(self, goal: int) -> None:
        """Store each block on arrival, until the run has ``goal`` rows or no more will come."""
        ledger, output = self._run.ledger, self._output
        while ledger.stored < goal and (output.count or output.left(goal)):
            if not output.count:
                self._take(min(self._most, output.left(goal)), 0)
            if output.count:
                output.deliver(goal - ledger.stored, yields=False)
                if self._committed is not None:
                    self._committed()
            if output.left(goal):
                if not output.count and self._rollout.dry:
                    break
                self._handle_signals()

    def _store_gathered(self, goal: int) -> None:
        """Join blocks as a batch does, and store them, until the run has ``goal`` rows."""
        ledger, output, most = self._run.ledger, self._output, self._most
        while ledger.stored < goal:
            if not output.count and (self._rollout.dry or not output.left(goal)):
                break
            with self._acting:
                self._gather(min(most, goal - ledger.stored))
            if output.count:
                output.deliver(min(most, goal - ledger.stored), yields=False)
                if self._committed is not None:
                    self._committed()

    def _raise_pending(self, want: int) -> None:
        """Raise the pending error of the fast path before this call saves the gradient mode."""
        if self.fast_collect is not None and self.fast_collect.has_raised:
            self._take(want, 0)

    def leave(self) -> None:
        """Restore gradient mode and exploration type after an exception."""
        self._acting.__exit__()

    def _begin(self, size: int) -> None:
        """Begin an iteration whose first batch has ``size`` rows, unless one is in progress."""
        self._run.writer.stored_run.require_open()
        if self._run.moved:
            each = self._run.options.reset_at_each_iter and self._iterations > 0
            self._run.refuse_moved(resets=each and not self._under_way)
        if self._under_way:
            return
        if not self._run.writer.stored_run.begun:
            self._begin_run()
        self._under_way = True
        rollout = self._rollout
        if self._run.options.reset_at_each_iter and self._iterations:
            # Carried transitions belong to trajectories that the reset cuts: store them first.
            self._take(min(size, rollout.carried), size)
            if not rollout.carried:
                self.restart_lanes()
        self._iterations += 1

    def _begin_run(self) -> None:
        """Claim the storage and the trajectory ids for this run before its first row."""
        self._run.reach_safe_point()  # if the storage refuses now, the run may begin later
        first_id = self._run.writer.stored_run.begin(self._run.provenance)
        self._run.leave_safe_point()
        if first_id is not None:
            self._run.lanes.begin_at(first_id)

    def _gather(self, size: int) -> None:
        """Take blocks until there are ``size`` rows; one block if each batch is of one worker."""
        output = self._output
        while output.count < size:
            want = output.within(size - output.count)
            if not want:
                break
            self._take(want, 0 if self._apart else size)
            if self._apart and output.count:
                break
            if output.count < size:
                if self._rollout.dry:
                    break
                self._handle_signals()

    def _handle_signals(self) -> None:
        """Call the signal handlers that wait. Between two blocks, no work is half done."""
        rollout, run = self._rollout, self._run
        if rollout.paused:
            rollout.go_on()
            if run.stopped:
                rollout.stop()
        if signal_waits():
            run.ledger.balance(rollout.carried + self._output.count)
            run.ledger.publish()
            run.reach_safe_point()
            call_waiting()
            run.leave_safe_point()

    def _end(self, *, short: bool) -> None:
        """End an iteration; end the run too if no more rows will come.

        ``short`` is True if fewer rows came than were requested.
        """
        self._under_way = False
        if self._run.options.surplus == "discard":
            self.discard()
        run = self._run
        over = run.budget.total is not None and run.met
        if not over and (short or self._few or run.stopped):
            over = self._rollout.dry
        if over:
            self.finish()
            self._finals.warn_at_end(run.committed)

    def _take(self, want: int, size: int) -> None:
        """Validate a block of at most ``want`` rows, and add it to a batch of ``size`` rows.

        After an error, the complete and valid rows are stored before it is raised.
        """
        fast_collect = self.fast_collect
        try:
            raised = None if fast_collect is None else fast_collect.take_raised()
            block = self._blocks.take(want, raised)
            self._blocks.check(block)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._store_before(error)
            raise
        count = block.index.size
        self._add(block, count, more=self._output.count + count < size)

    def _add(self, block: Block, count: int, *, more: bool) -> None:
        """Add the rows of ``block`` to the batch; cuts take effect after them."""
        self._output.add(block, count, more=more, yields=self._yields)
        if block.cuts is not None:
            self.cut(block.cuts)

    # --- ends, cuts and errors --------------------------------------------------------------------

    def cut(self, lanes: NDArray[np.bool_]) -> None:
        """Cut the open trajectories of ``lanes``, because the lanes were reset."""
        self._cut_trajectories(lanes)
        self._finals.forget(lanes)

    def _cut_trajectories(self, lanes: NDArray[np.bool_]) -> None:
        """Cut the open trajectories of ``lanes``, whose environments start new ones."""
        post(self._run.ledger, LedgerEntry(episodes_cut=self._run.lanes.interrupt(lanes)))
        self._run.lanes.restart(lanes)

    def restart_lanes(self) -> None:
        """Begin a new trajectory in every lane; no transition may wait for a batch."""
        self._cut_trajectories(self._everywhere)
        self._run.skip_foreseen(self._everywhere)
        post(self._run.ledger, self._rollout.discard(()).entry)  # workers may have stepped ahead
        self._rollout.restart_lanes(self._run.ledger)

    def discard(self) -> None:
        """Discard the surplus, and cut the trajectories that lose a row."""
        if not self._rollout.carried:
            return
        entry, lanes, reward, ended = self._rollout.discard(self._rewards)
        post(self._run.ledger, entry)
        self._run.ledger.balance(self._rollout.carried + self._output.count)
        post(self._run.ledger, LedgerEntry(episodes_cut=self._run.lanes.interrupt(lanes)))
        self._run.skip_foreseen(lanes)
        with np.errstate(all="ignore"):  # infinite rewards of both signs
            self._run.lanes.returns[lanes] += reward[lanes]
        self._run.lanes.length[lanes] += 1
        self._run.lanes.restart(lanes & ended)
        self._finals.forget(lanes)

    def _store_before(self, error: BaseException) -> None:
        """Store the rows taken before ``error``, and the complete and valid rows after them.

        If a final observation is false, the ledger does not balance or the storage was closed,
        nothing is stored, and ``error`` gets a note about this. The caller raises ``error``.
        """
        try:
            self._store_complete()
            self.finish()
        except (LedgerError, SilentReset, StorageClosed) as again:
            error.add_note(f"tallyroll: complete transitions were not stored: {again}")

    def _store_complete(self) -> None:
        """Store the complete and valid rows, if the run has a storage or a replay buffer."""
        self._yields = False
        self._run.stop()
        if self._run.writer.stores:  # otherwise no reader would see the rows
            most = self._output.most
            for block in self._rollout.recover(self._blocks.valid_slots, most):
                post(self._run.ledger, block.entry)
                self._add(block, len(block), more=True)
            if self._output.count:
                self._output.deliver(self._output.count, yields=False)

    def end(self) -> None:
        """End the run on request; store the rows of an interrupted batch first."""
        try:
            if self._under_way and self._run.phase is Phase.IDLE and not self._run.lost:
                self._store_complete()
        finally:
            self.finish()

    def finish(self) -> None:
        """End the run: discard carried transitions, and cut the open trajectories."""
        self._run.end()
        if self.fast_collect is not None:
            self.fast_collect.settle()
        ledger, lanes = self._run.ledger, self._run.lanes
        before = ledger.discarded
        self._rollout.stop()
        post(ledger, self._rollout.discard(()).entry)
        cut = lanes.cut(self._everywhere)
        post(ledger, LedgerEntry(discarded=self._output.count, episodes_cut=cut))
        self._output.drop()
        self._run.episodes.forget_after(ledger.stored)
        ledger.balance(self._rollout.carried)
        ledger.publish()
        self._run.writer.finish(ledger, ledger.discarded - before)
        self._output.warn()


@runtime_checkable
class ShardingSource(Protocol):
    """A source whose workers store their own rows, so that the run loop only counts them."""

    def run_loop_of(self, run: RunState) -> Any:
        """Return the loop that counts the transitions of ``run``."""


def make_run_loop(
    run: RunState,
    source: RowSource,
    rollout: TransitionSource,
    ranges: Sequence[Range],
    *,
    count_random: bool,
    draws: bool,
    torchrl: TorchrlLayout | None,
) -> RunLoop:
    """Make the run loop that the plan of ``run`` selects, and open the storage of the run.

    Args:
        run: the state of the run.
        source: converts blocks to rows.
        rollout: provides the blocks.
        ranges: the allowed values of each column.
        count_random: True if a policy acts, and random actions are counted.
        draws: True if some actions are random.
        torchrl: lays out batches for ``layout="torchrl"``; None for other layouts.
    """
    options, writer, slabs = run.options, run.writer, source.plan
    if isinstance(rollout, ShardingSource):
        writer.open(source.no_rows, run.provenance, source.inner_dims, slabs.excluded)
        counting: RunLoop = rollout.run_loop_of(run)
        return counting
    lanes = options.own_lanes(len(run.lanes.step))
    layout = (options, source, lanes, writer, torchrl)
    laying_out = BatchLayout(*layout)
    if options.postproc is not None:
        laying_out = PostprocLayout(options.postproc, *layout)
    counts = DeliveredCounts(options, slabs, draws=draws)
    if options.by_agent:
        _count_agents(run, counts)
    at_random = not count_random or draws
    checks = RangeChecks(ranges, options.checks.validate, slabs.masks, at_random=at_random)
    watched = options.checks.finals == "check" and not slabs.lost_finals
    valid = next_valid_keys(slabs.layout)
    finals = FinalsWatch(lanes, slabs.observed if watched else (), valid)
    acting = ActionContext(options.exploration_type)
    if options.postproc is None:
        writer.open(source.no_rows, run.provenance, source.inner_dims, slabs.excluded)
    traits = traits_of(options, source, rollout, writer, counts, checks, torchrl)
    plan = StoringPlan.of(traits)
    in_slab = fast_collect = None
    if plan.rows.way == "slab":
        in_slab = SlabOutput(source, run, laying_out, batches=plan.batches.way != "gathered")
        if plan.commits.way == "one call":
            assert isinstance(rollout, Rollout)  # others count lane by lane
            kind = FastCollectOfWorkers if rollout.driver.in_workers else FastCollect
            batch = options.frames_per_batch if plan.batches.way == "one call" else 0
            fast_collect = kind(run, rollout, in_slab, counts, checks, finals, acting, batch)
    return RunLoop(
        run,
        plan,
        slabs,
        rollout,
        checks,
        finals,
        BatchOutput(run, source, rollout, counts, finals, laying_out, in_slab),
        fast_collect,
        acting,
        apart=torchrl is not None and torchrl.apart,
    )


def _count_agents(run: RunState, counts: DeliveredCounts) -> None:
    """Count the budget of ``run`` in agent transitions.

    For a resumed run, count them in its stored rows if the storage still has all of them, because
    the record of the last commit may be older than the rows.

    Raises:
        EnvironmentRefused: there are no groups of agents.
    """
    if not counts.most_agents:
        raise EnvironmentRefused(
            'budget_unit="agent_transitions": expected an environment with groups of agents, got '
            "one without. Leave budget_unit out."
        )
    last, counted = run.writer.stored_run.last, None
    if last is not None:
        reader, first = last
        if reader.span.start <= first and reader.head - first == run.ledger.stored:
            counted = counts.agents_in(reader, first)
    run.count_agents(Budget(run.options.total_frames, agents=counts.most_agents), counted)
