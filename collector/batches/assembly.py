"""The loop of a run: blocks of transitions are taken, counted, committed, cut and ended."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.batches.blame import culprit_of
from tallyroll.collector.batches.cut_items import CutItems
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.final_observations import FinalsWatch
from tallyroll.collector.batches.in_slab import InSlab
from tallyroll.collector.batches.laying_out import LayingOut, Processing
from tallyroll.collector.batches.one_call import OneCall
from tallyroll.collector.batches.rows import Part, RowSource, merge
from tallyroll.collector.batches.rows_ahead import RowsAhead
from tallyroll.collector.batches.run_status import RunStatus
from tallyroll.collector.batches.slab_rows import SlabPart
from tallyroll.collector.batches.storing_plan import StoringPlan, traits_of
from tallyroll.collector.batches.torchrl_layout import NO_FLAGS, Flags, TorchrlLayout
from tallyroll.collector.batches.value_checks import Range, RangeChecks
from tallyroll.collector.batches.writer import BatchWriter
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import NOTHING, Budget, Ledger, LedgerEntry, post
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.errors import ItemsDiffer, LedgerError, SilentReset
from tallyroll.collector.options import Options
from tallyroll.collector.policies.acting import Acting
from tallyroll.collector.rollout.os_signals import call_waiting, waits
from tallyroll.collector.rollout.source import Block, TransitionSource
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.errors import StorageClosed

EPISODES_KEPT = 50_000
"""Least number of last episodes that ``collector.episodes`` keeps without total_episodes."""


class Assembly:
    """Take blocks of transitions from a source; check, count, number, store and lay them out.

    Args:
        options: of the run.
        writer: where rows are stored before they are yielded.
        source: makes rows of blocks.
        rollout: where blocks come from.
        ledger: counted up with every batch.
        state: the trajectory and step of every lane.
        ranges: the values that are allowed.
        provenance: written with the schema.
        count_random: whether random actions are an exception that is counted.
        torchrl: lays batches out where ``layout="torchrl"``.
        ahead: copies wide rows of a batch while its slots are filled, if that saves time.
    """

    def __init__(
        self,
        options: Options,
        writer: BatchWriter,
        source: RowSource,
        rollout: TransitionSource,
        ledger: Ledger,
        state: LaneState,
        ranges: Sequence[Range],
        provenance: Mapping[str, Any],
        *,
        count_random: bool,
        torchrl: TorchrlLayout | None = None,
        ahead: RowsAhead | None = None,
    ) -> None:
        self._options, self._writer, self._source = options, writer, source
        self._rollout, self._ledger, self._ahead = rollout, ledger, ahead
        self.state, self.provenance = state, provenance
        self.status = RunStatus(ledger)
        lanes, plan = len(state.step), source.plan
        layout = (options, source, lanes, writer, torchrl)
        self._laying_out = LayingOut(*layout)
        if options.postproc is not None:
            self._laying_out = Processing(options.postproc, *layout)
        self._budget, self._acting = Budget(options.total_frames), Acting(options.exploration_type)
        self._everywhere = np.ones(lanes, np.bool_)
        draws = count_random and options.init_random_frames > 0
        self._counts = DeliveredCounts(options, plan, draws=draws)
        at_random = not count_random or draws
        self._checks = RangeChecks(ranges, options.validate, plan.masks, at_random=at_random)
        self.episodes = EpisodeLog(None if options.total_episodes is not None else EPISODES_KEPT)
        watched = options.finals == "check" and not plan.lost_finals
        self._finals = FinalsWatch(lanes, plan.observed if watched else ())
        self._few = options.total_episodes is not None
        """True if the source may end the run by itself, when the last episode is complete."""
        self._apart = torchrl is not None and torchrl.apart
        """True if a batch is of one worker."""
        self._lays_out = True
        """True while batches are yielded, and not only stored."""
        self._parts: list[Part | SlabPart] = []
        """The parts of the batch under way."""
        self._kept: list[Block] = []
        """Blocks whose large rows stay in their slab until the batch is delivered."""
        self._in_hand = 0
        """Transitions that were taken from the source and are in no batch yet."""
        self._cut_items = CutItems()
        self._iterations = 0
        self._under_way = False
        """True during a batch or a call of `collect`, and after an exception interrupted it."""
        if options.postproc is None:
            writer.open(source.no_rows, provenance, source.behind)
        traits = traits_of(options, source, rollout, writer, self._counts, self._checks, torchrl)
        self.plan = StoringPlan.of(traits)
        self._most = options.frames_per_batch if self.plan.rows.way != "slab" else writer.most
        """Rows that `collect` stores at once."""
        self._in_slab: InSlab | None = None
        """Rows that go to the storage directly from a slab; None: they are gathered first."""
        self.one_call: OneCall | None = None
        if self.plan.rows.way == "slab":
            self._in_slab = InSlab(
                source,
                writer,
                self._laying_out,
                options.storing_device,
                batches=self.plan.batches.way == "slab",
            )
            if self.plan.commits.way == "one call":
                self.one_call = OneCall(
                    self.status,
                    ledger,
                    self._budget,
                    self._in_slab,
                    writer,
                    self._counts,
                    self._checks,
                    self._finals,
                    self.episodes,
                    self._acting,
                )

    # --- from blocks to rows ----------------------------------------------------------------------

    def batch(self, size: int | None = None) -> TensorDictBase | None:
        """Return the next batch; None if the run ended without one. The last batch ends the run.

        It has ``size`` rows (default: ``frames_per_batch``), fewer if the budget ends before.
        """
        self._lays_out = self.status.yields = True
        most = sys.maxsize if self._apart else size or self._options.frames_per_batch
        size = self._budget.batch(self._ledger.stored, most)
        if self._begin(size) and self._ahead is not None and not self._rollout.held:
            self._ahead.begin(size, self._checks)
        with self._acting:
            self._gather(size)
        short = self._in_hand < size
        batch = self._deliver(size) if self._in_hand else None
        self._end(short=short)
        return batch

    def collect(self, want: int) -> int:
        """Store ``want`` more transitions, fewer if the run ends before; return how many."""
        ledger, self._lays_out = self._ledger, False
        if self.one_call is not None and self.one_call.raised is not None:
            self._take(want, 0)
        before = ledger.stored
        in_slab, most = self._in_slab is not None, self._most
        goal = before + self._budget.batch(before, want)
        self._begin(min(most, goal - before))
        if in_slab:
            with self._acting:
                while ledger.stored < goal:
                    if not self._in_hand:
                        self._take(min(most, goal - ledger.stored), 0)
                    if self._in_hand:
                        self._deliver(goal - ledger.stored)
                    if ledger.stored < goal:
                        if not self._in_hand and self._rollout.dry:
                            break
                        self._admit()
        while ledger.stored < goal and (self._in_hand or not self._rollout.dry):
            with self._acting:
                self._gather(min(most, goal - ledger.stored))
            if self._in_hand:
                self._deliver(min(most, goal - ledger.stored))
        self._end(short=ledger.stored < goal)
        return ledger.stored - before

    def leave(self) -> None:
        """Let gradients and exploration be as they were, if an exception left them."""
        self._acting.__exit__()

    def _begin(self, size: int) -> bool:
        """Begin an iteration whose first batch has ``size`` rows; return False if one goes on."""
        self._writer.require_open()
        if self._under_way:
            return False
        if not self._writer.begun:
            self._begin_run()
        self._under_way = True
        rollout = self._rollout
        if self._options.reset_at_each_iter and self._iterations:
            # Carried transitions belong to the trajectories that the reset cuts: they come first.
            self._take(min(size, rollout.held), size)
            if not rollout.held:
                self.restart_lanes()
        self._iterations += 1
        return True

    def _begin_run(self) -> None:
        """Claim the storage and the ids for this run, before its first row."""
        self.status.intact = True  # after a refusal the run may begin later
        first_id = self._writer.begin(self.provenance)
        self.status.intact = False
        if first_id is not None:
            self.state.begin_at(first_id)

    def _gather(self, size: int) -> None:
        """Take blocks until ``size`` rows are in hand; one block if a batch is of one worker."""
        while self._in_hand < size:
            self._take(size - self._in_hand, 0 if self._apart else size)
            if self._apart and self._in_hand:
                break
            if self._in_hand < size:
                if self._rollout.dry:
                    break
                self._admit()

    def _admit(self) -> None:
        """Call waiting signal handlers while rows are missing: nothing is half done here."""
        rollout, status = self._rollout, self.status
        if rollout.paused:
            rollout.go_on()
            if status.stopped:
                rollout.stop()
        if waits():
            self._ledger.balance(rollout.held + self._in_hand)
            status.intact = True
            call_waiting()
            status.intact = False

    def _end(self, *, short: bool) -> None:
        """End an iteration, and the run too if no more rows will come.

        ``short``: fewer came than were wanted.
        """
        self._under_way = False
        if self._options.surplus == "discard":
            self.discard()
        total = self._budget.total
        over = total is not None and self._ledger.stored >= total
        if not over and (short or self._few or self.status.stopped):
            over = self._rollout.dry
        if over:
            self.finish()
            self._finals.warn_at_end(self._committed)

    def _take(self, want: int, size: int) -> None:
        """Add at most ``want`` rows to a batch that is to have ``size`` of them.

        After an error, complete and sound rows are stored before it is raised.
        """
        one_call = self.one_call
        try:
            if one_call is None:
                block = self._filled(want)
            else:
                one_call.ready = None
                raised = None if one_call.raised is None else one_call.take_raised()
                block = self._filled(want, raised)
                if block.again and size == 0 and one_call.store(block, self.state):
                    return
            post(self._ledger, block.entry)
            bad = self._checks.first_violation(block.slab, block.used, self.state)
            if bad is not None:
                raise bad.error
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._rescue(error)
            raise
        count = block.index.size
        self._add(block, count, self._in_hand + count < size)

    def _filled(self, want: int, raised: BaseException | None = None) -> Block:
        """Return the next block; ``raised`` is what a fill raised before, and is raised here.

        The fault of an action is raised in the place of what its step raised.
        """
        try:
            if raised is not None:
                raise raised
            return self._rollout.block(want)
        except Exception as error:
            in_place = self._source.plan.in_place
            culprit = culprit_of(error, self._rollout, self._checks, self.state, in_place=in_place)
            if culprit is not None:
                raise culprit from error
            raise

    def _add(self, block: Block, count: int, more: bool) -> None:
        """Number the rows of ``block``, and add them to the batch; cuts take effect after them.

        Large rows stay in the slab until delivery, if they can; all rows do if the batch is this
        block alone. ``more``: another block will be asked for before delivery.
        """
        copied = None if self._ahead is None else self._ahead.take(block)
        if count:
            alone, table = not (more or self._parts), None
            if alone and self._in_slab is not None:
                table = self._in_slab.table_of(block, yields=self._lays_out)
            part: Part | SlabPart
            if table is not None and block.keep(more):
                part = table.part(block, self.state, by_lane=self._lays_out)
            else:
                part = self._source.part(block, self.state, copied, alone=alone)
                if not (part.large and block.keep(more)):
                    part.settle()
            if self._finals.looks:
                self._finals.look(part)
            if self._counts.column is not None:
                post(self._ledger, self._counts.of_resets(part))
            if part.episodes is not None and len(part.episodes):
                self.episodes.extend(part.episodes)
            if block.kept:
                self._kept.append(block)
            self._parts.append(part)
        if block.giver is not None:
            block.giver.given(block)
        self._in_hand += count
        if block.cuts is not None:
            self._begin_anew(block.cuts)
            self._finals.forget(block.cuts)

    # --- from rows to a batch ---------------------------------------------------------------------

    def _deliver(self, most: int) -> TensorDictBase | None:
        """Store at most ``most`` of the rows in hand, and lay them out if they are to be yielded.

        If storing fails, only the rows that were committed before are counted. If the run ends
        within an item of a TorchRL buffer, the rows of that item are discarded.

        Raises:
            LedgerError: transitions were lost or doubled on their way; nothing is stored.
        """
        if self._finals.looks:
            self._finals.require_true(self._committed)
        part, rest = self._parts[0], None
        if len(self._parts) > 1:
            part = merge(self._parts)  # type: ignore[arg-type]  # one of another kind is alone
        count, ledger = part.count, self._ledger
        if count > most and isinstance(part, Part):  # a larger batch was parted
            part, rest = part.split(most)
            count = most
        entry, batch = self._counts.of(part, count), None
        torchrl, before = self._laying_out.torchrl, ledger.stored
        flags = NO_FLAGS if torchrl is None else torchrl.root_flags(part)
        try:
            post(ledger, entry)
            ledger.balance(self._rollout.held + (0 if rest is None else len(rest)))
            open_lanes = int(np.count_nonzero(self.state.step))
            if isinstance(part, SlabPart):
                assert self._in_slab is not None
                self._in_slab.store(part, ledger, open_lanes)
                batch = self._in_slab.batch(part) if self._lays_out else None
            else:
                batch = self._store(part, ledger, open_lanes, flags)
        except ItemsDiffer as error:
            last = self._is_rest(count)
            post(ledger, entry.undone())
            entry = NOTHING
            if not last:
                raise
            self._rollout.stop()  # the budget can no longer be met
            post(ledger, self._cut_items.discard(part, self.state, error))
            self._in_hand -= count
        except BaseException:
            committed = self._writer.committed_after(before)
            if committed < count:  # else it was raised after the commit
                if ledger.stored != before:  # else it was raised before that was counted
                    post(ledger, entry.undone())
                entry = NOTHING
                if committed and isinstance(part, Part):
                    entry = self._counts.of(part.first(committed), committed)
                post(ledger, entry)
            raise
        finally:
            self._in_hand -= entry.stored
        self._parts = [] if rest is None else [rest]
        while self._kept:
            self._kept.pop().release()
        if batch is None or not self._laying_out.arranges:
            return batch
        return self._laying_out.arranged(batch, flags)

    def _store(
        self, part: Part, ledger: Ledger, open_lanes: int, flags: Flags
    ) -> TensorDictBase | None:
        """Commit gathered rows with the ledger; return those of a batch, if one is wanted.

        They come one after the other, to be arranged.
        """
        writer = self._writer
        rows = self._laying_out.of(part, flags, yields=self._lays_out)
        if not writer.ready:
            writer.open(rows.rows, self.provenance, rows.behind)
        last = rows.shaped is not None and self._is_rest(len(part))
        writer.write(rows.rows, len(part), ledger, open_lanes, rows.large, rows.shaped, last=last)
        return rows.batch

    def _is_rest(self, count: int) -> bool:
        """Return whether the ``count`` rows in hand are the rest of a batch when the run ended."""
        ends = self.status.stopped or self._rollout.dry
        ends = ends or self._budget.remaining(self._ledger.stored) == 0
        return ends and count != self._options.largest_batch

    def _committed(self) -> str:
        """Say in a sentence which rows of this run are stored, with how many ends of episodes."""
        return f"{self._writer.committed}, with {self._ledger.episodes_complete:,} ends of episodes"

    # --- ends, cuts and errors --------------------------------------------------------------------

    def _begin_anew(self, lanes: NDArray[np.bool_]) -> None:
        """Cut the open trajectories of ``lanes``: their environments start new ones."""
        post(self._ledger, LedgerEntry(episodes_cut=self.state.cut(lanes)))
        self.state.restart(lanes)

    def restart_lanes(self) -> None:
        """Begin a new trajectory in every lane; no transition may be held then."""
        self._begin_anew(self._everywhere)
        post(self._ledger, self._rollout.discard(()).entry)  # the steps that workers made ahead
        self._rollout.restart_lanes(self._ledger)

    def discard(self) -> None:
        """Discard the surplus; the trajectories that lose a row are cut."""
        if not self._rollout.held:
            return
        entry, lanes, reward, ended = self._rollout.discard(self._source.plan.rewards)
        post(self._ledger, entry)
        self._ledger.balance(self._rollout.held + self._in_hand)
        post(self._ledger, LedgerEntry(episodes_cut=self.state.cut(lanes)))
        self.state.returns[lanes] += reward[lanes]
        self.state.length[lanes] += 1
        self.state.restart(lanes & ended)
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
        self._lays_out, self.status.stopped = False, True
        if self._writer.stores:  # else the rows would reach no reader
            remaining = self._budget.remaining(self._ledger.stored)
            most = sys.maxsize if remaining is None else remaining - self._in_hand
            for block in self._rollout.salvage(self._sound, most):
                post(self._ledger, block.entry)
                self._add(block, len(block), more=True)
            if self._parts:
                self._deliver(self._in_hand)

    def _sound(self, slab: Slab, used: int) -> int:
        """Return how many of the first ``used`` slots have values as declared."""
        bad = self._checks.first_violation(slab, used, self.state)
        return used if bad is None else bad.slot

    def end(self) -> None:
        """End the run at the caller's wish; the rows of an interrupted batch are stored before."""
        try:
            if self._under_way and not self.status.busy:
                self._store_complete()
        finally:
            self.finish()

    def end_by(self, error: BaseException) -> None:
        """End the run because ``error`` was raised within it."""
        try:
            if not self.status.over:
                self.finish()
        finally:
            left = self._budget.remaining(self._ledger.stored)
            self.status.ended_by(error, left, self._writer)

    def finish(self) -> None:
        """End the run: discard what is carried, and cut the open trajectories."""
        self.status.over = True
        if self.one_call is not None:
            self.one_call.settle()
        ledger = self._ledger
        before = ledger.discarded
        self._rollout.stop()
        post(ledger, self._rollout.discard(()).entry)
        cut = self.state.cut(self._everywhere)
        post(ledger, LedgerEntry(discarded=self._in_hand, episodes_cut=cut))
        self._in_hand, self._parts, self._kept = 0, [], []
        if self._ahead is not None:
            self._ahead.end()
        ledger.balance(self._rollout.held)
        self._writer.finish(ledger, ledger.discarded - before)
        self._cut_items.warn()
