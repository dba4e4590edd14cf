"""The loop of a run: takes blocks of transitions, counts and commits them, and makes batches."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.batches.batch_output import BatchOutput
from tallyroll.collector.batches.checks.checked_blocks import CheckedBlocks
from tallyroll.collector.batches.checks.final_observations import FinalsWatch
from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.fast_collect import FastCollect, FastCollectOfWorkers
from tallyroll.collector.batches.layouts.laying_out import LayingOut, Processing
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.rows.in_slab import InSlab
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.state.run_state import Phase, RunState
from tallyroll.collector.batches.stored.storing_plan import StoringPlan, traits_of
from tallyroll.collector.counting.ledger import Budget, LedgerEntry, post
from tallyroll.collector.errors import EnvironmentRefused, LedgerError, SilentReset
from tallyroll.collector.policies.acting import Acting
from tallyroll.collector.rollout.os_signals import call_waiting, waits
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block, TransitionSource
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.rows.keys import next_valid_keys


class RunLoop:
    """Take blocks of transitions from a source, and make batches of them; see `assembling`.

    Args:
        run: its counts, and the trajectory and step of every lane.
        plan: how its rows are stored.
        slabs: what its rows are like.
        rollout: where blocks come from.
        checks: of values.
        finals: watches final observations.
        hand: numbers rows, stores them and lays them out.
        fast_collect: stores the rows of few slots at once; None: nothing does.
        acting: the context of steps.
        apart: whether a batch is of one worker.
    """

    def __init__(
        self,
        run: RunState,
        plan: StoringPlan,
        slabs: SlabPlan,
        rollout: TransitionSource,
        checks: RangeChecks,
        finals: FinalsWatch,
        hand: BatchOutput,
        fast_collect: FastCollect | None,
        acting: Acting,
        *,
        apart: bool,
    ) -> None:
        self._run, self.plan, self._rewards = run, plan, slabs.rewards
        self._rollout, self._checks, self._finals = rollout, checks, finals
        self._hand, self.fast_collect, self._acting = hand, fast_collect, acting
        self._apart = apart
        self._blocks = CheckedBlocks(run, rollout, checks, slabs.rewards, in_place=slabs.in_place)
        self._everywhere = np.ones(len(run.lanes.step), np.bool_)
        self._at_once = plan.rows.way == "slab"
        """True if `collect` stores each block when it comes."""
        self._most = run.writer.most if self._at_once else run.options.frames_per_batch
        """Rows that `collect` stores at once."""
        self._few = run.options.total_episodes is not None
        """True if the source may end the run by itself, when the last episode is complete."""
        self._iterations = 0
        self._under_way = False
        """True during a batch or a call of `collect`, and after an exception interrupted it."""

    # --- batches ----------------------------------------------------------------------------------

    def batch(self, size: int | None = None) -> TensorDictBase | None:
        """Return the next batch; None if the run ended without one. The last batch ends the run.

        It has ``size`` rows (default: ``frames_per_batch``), fewer if the budget ends before.
        """
        run, hand = self._run, self._hand
        hand.lays_out = True
        run.note_ready(yields=True)
        most = sys.maxsize if self._apart else size or run.options.frames_per_batch
        size = run.budget.batch(run.counted, most)
        self._raise_again(size)
        self._begin(size)
        with self._acting:
            self._gather(size)
        short = hand.count < size
        batch = hand.deliver(size) if hand.count else None
        self._end(short=short)
        if self.fast_collect is not None and self.fast_collect.batch and not run.over:
            self.fast_collect.prepare()
        return batch

    def collect(self, want: int) -> None:
        """Store ``want`` more transitions, fewer if the run ends before."""
        ledger, hand, most = self._run.ledger, self._hand, self._most
        hand.lays_out = False
        self._raise_again(want)
        goal = ledger.stored + self._run.budget.batch(self._run.counted, want)
        self._begin(min(most, goal - ledger.stored))
        if self._at_once:
            with self._acting:
                while ledger.stored < goal and (hand.count or hand.left(goal)):
                    if not hand.count:
                        self._take(min(most, hand.left(goal)), 0)
                    if hand.count:
                        hand.deliver(goal - ledger.stored)
                    if hand.left(goal):
                        if not hand.count and self._rollout.dry:
                            break
                        self._admit()
        while ledger.stored < goal and (hand.count or (hand.left(goal) and not self._rollout.dry)):
            with self._acting:
                self._gather(min(most, goal - ledger.stored))
            if hand.count:
                hand.deliver(min(most, goal - ledger.stored))
        self._end(short=ledger.stored < goal)
        if self.fast_collect is not None and not self._run.over:
            self.fast_collect.prepare()

    def _raise_again(self, want: int) -> None:
        """Raise what ended a call of few slots, before gradients are looked at: it left them."""
        if self.fast_collect is not None and self.fast_collect.raised is not None:
            self._take(want, 0)

    def leave(self) -> None:
        """Let gradients and exploration be as they were, if an exception left them."""
        self._acting.__exit__()

    def _begin(self, size: int) -> None:
        """Begin an iteration whose first batch has ``size`` rows, unless one goes on."""
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
            # Carried transitions belong to the trajectories that the reset cuts: they come first.
            self._take(min(size, rollout.held), size)
            if not rollout.held:
                self.restart_lanes()
        self._iterations += 1

    def _begin_run(self) -> None:
        """Claim the storage and the ids for this run, before its first row."""
        self._run.reach_safe_point()  # after a refusal the run may begin later
        first_id = self._run.writer.stored_run.begin(self._run.provenance)
        self._run.leave_safe_point()
        if first_id is not None:
            self._run.lanes.begin_at(first_id)

    def _gather(self, size: int) -> None:
        """Take blocks until ``size`` rows are in hand; one block if a batch is of one worker."""
        hand = self._hand
        while hand.count < size:
            want = hand.within(size - hand.count)
            if not want:
                break
            self._take(want, 0 if self._apart else size)
            if self._apart and hand.count:
                break
            if hand.count < size:
                if self._rollout.dry:
                    break
                self._admit()

    def _admit(self) -> None:
        """Call waiting signal handlers while rows are missing: nothing is half done here."""
        rollout, run = self._rollout, self._run
        if rollout.paused:
            rollout.go_on()
            if run.stopped:
                rollout.stop()
        if waits():
            run.ledger.balance(rollout.held + self._hand.count)
            run.ledger.publish()
            run.reach_safe_point()
            call_waiting()
            run.leave_safe_point()

    def _end(self, *, short: bool) -> None:
        """End an iteration, and the run too if no more rows will come.

        ``short``: fewer came than were wanted.
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
        """Add at most ``want`` rows to a batch that is to have ``size`` of them.

        After an error, complete and sound rows are stored before it is raised.
        """
        fast_collect = self.fast_collect
        try:
            if fast_collect is None:
                block = self._blocks.take(want)
            else:
                raised = None if fast_collect.raised is None else fast_collect.take_raised()
                block = self._blocks.take(want, raised)
            self._blocks.check(block)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._rescue(error)
            raise
        count = block.index.size
        self._add(block, count, more=self._hand.count + count < size)

    def _add(self, block: Block, count: int, *, more: bool) -> None:
        """Add the rows of ``block`` to the batch; cuts take effect after them."""
        self._hand.add(block, count, more=more)
        if block.cuts is not None:
            self._begin_anew(block.cuts)
            self._finals.forget(block.cuts)

    # --- ends, cuts and errors --------------------------------------------------------------------

    def _begin_anew(self, lanes: NDArray[np.bool_]) -> None:
        """Cut the open trajectories of ``lanes``: their environments start new ones."""
        post(self._run.ledger, LedgerEntry(episodes_cut=self._run.lanes.interrupt(lanes)))
        self._run.lanes.restart(lanes)

    def restart_lanes(self) -> None:
        """Begin a new trajectory in every lane; no transition may be held then."""
        self._begin_anew(self._everywhere)
        self._run.skip_foreseen(self._everywhere)
        post(self._run.ledger, self._rollout.discard(()).entry)  # the steps that workers made ahead
        self._rollout.restart_lanes(self._run.ledger)

    def discard(self) -> None:
        """Discard the surplus; the trajectories that lose a row are cut."""
        if not self._rollout.held:
            return
        entry, lanes, reward, ended = self._rollout.discard(self._rewards)
        post(self._run.ledger, entry)
        self._run.ledger.balance(self._rollout.held + self._hand.count)
        post(self._run.ledger, LedgerEntry(episodes_cut=self._run.lanes.interrupt(lanes)))
        self._run.skip_foreseen(lanes)
        with np.errstate(all="ignore"):  # infinite rewards of both signs
            self._run.lanes.returns[lanes] += reward[lanes]
        self._run.lanes.length[lanes] += 1
        self._run.lanes.restart(lanes & ended)
        self._finals.forget(lanes)

    def _rescue(self, error: BaseException) -> None:
        """Store the rows taken before ``error``, and the complete and sound ones after them.

        If a final observation is false, the ledger does not balance or the storage was closed,
        nothing is stored, and ``error`` gets a note that says so. The caller raises ``error``.
        """
        try:
            self._store_complete()
            self.finish()
        except (LedgerError, SilentReset, StorageClosed) as again:
            error.add_note(f"tallyroll: complete transitions were not stored: {again}")

    def _store_complete(self) -> None:
        """Store the complete and sound rows, if the run has a storage or a replay buffer."""
        self._hand.lays_out = False
        self._run.stop()
        if self._run.writer.stores:  # else the rows would reach no reader
            most = self._hand.most
            for block in self._rollout.salvage(self._blocks.sound, most):
                post(self._run.ledger, block.entry)
                self._add(block, len(block), more=True)
            if self._hand.count:
                self._hand.deliver(self._hand.count)

    def end(self) -> None:
        """End the run at the caller's wish; the rows of an interrupted batch are stored before."""
        try:
            if self._under_way and self._run.phase is not Phase.COLLECTING:
                self._store_complete()
        finally:
            self.finish()

    def end_by(self, error: BaseException) -> None:
        """End the run because ``error`` was raised within it."""
        try:
            if not self._run.over:
                self.finish()
        finally:
            self._run.ended_by(error)

    def finish(self) -> None:
        """End the run: discard what is carried, and cut the open trajectories."""
        self._run.end()
        if self.fast_collect is not None:
            self.fast_collect.settle()
        ledger, lanes = self._run.ledger, self._run.lanes
        before = ledger.discarded
        self._rollout.stop()
        post(ledger, self._rollout.discard(()).entry)
        cut = lanes.cut(self._everywhere)
        post(ledger, LedgerEntry(discarded=self._hand.count, episodes_cut=cut))
        self._hand.drop()
        self._run.episodes.forget_after(ledger.stored)
        ledger.balance(self._rollout.held)
        ledger.publish()
        self._run.writer.finish(ledger, ledger.discarded - before)
        self._hand.warn()


@runtime_checkable
class KeepsNoRows(Protocol):
    """A source whose workers keep their rows: it has what an `RunLoop` has, for counts alone."""

    def run_loop_of(self, run: RunState) -> Any:
        """Return what counts, and notes, the transitions of ``run``."""


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
    """Make an loop, and open the storage of its run.

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
        counting: RunLoop = rollout.run_loop_of(run)
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
    in_slab = fast_collect = None
    if plan.rows.way == "slab":
        in_slab = InSlab(source, run, laying_out, batches=plan.batches.way != "gathered")
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
