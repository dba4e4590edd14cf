"""Batches put together: from the blocks of a source to rows that are stored and yielded."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs.utils import set_exploration_type

from tallyroll.collector.batches.cuts import own_flags, with_cuts, without_cuts
from tallyroll.collector.batches.final_observations import FinalsWatch
from tallyroll.collector.batches.layouts import by_lane, split_trajectories
from tallyroll.collector.batches.rows import (
    Part,
    Rows,
    RowSource,
    as_tensordict,
    behind_rows,
    merge,
)
from tallyroll.collector.batches.value_checks import Range, RangeChecks
from tallyroll.collector.batches.writer import BatchWriter, Columns
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import Budget, Ledger, LedgerEntry, post
from tallyroll.collector.counting.numbering import LaneState, Numbers
from tallyroll.collector.errors import ArgumentError, LedgerError, SilentReset
from tallyroll.collector.options import Options, Postproc
from tallyroll.collector.rollout.os_signals import admitted
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block, TransitionSource
from tallyroll.collector.slab.names import new_name, split
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.rows.batch_dims import batch_dims_of
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import (
    CUT,
    DONE,
    LANE,
    NEXT,
    POLICY_VERSION,
    RANDOM_VERSION,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    Key,
    as_key,
    spell,
)

EPISODES_KEPT = 50_000
"""With a budget of frames, ``collector.episodes`` keeps at least that many of the last ones."""


class Assembly:
    """Takes blocks of transitions from a source; numbers, checks, counts, stores and lays them out.

    Args:
        options: of the run.
        writer: where rows are stored before they are yielded.
        source: makes rows of blocks.
        rollout: where blocks come from.
        ledger: counted up with every batch.
        state: where the lanes stand.
        ranges: what values are allowed.
        provenance: written with the schema.
        count_random: whether random actions are an exception that is counted.
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
    ) -> None:
        self._options, self._writer, self._source = options, writer, source
        self._rollout, self._ledger, self.state = rollout, ledger, state
        self.provenance, self._count_random = provenance, count_random
        self._everywhere = np.ones(len(state.step), np.bool_)
        self._budget = Budget(options.total_frames)
        self._ticks = _ticks(options, source.plan)
        self._checks = RangeChecks(ranges, options.validate)
        self.episodes = EpisodeLog(None if options.total_episodes is not None else EPISODES_KEPT)
        watched = options.finals == "check" and not source.plan.lost_finals
        self._finals = FinalsWatch(len(state.step), source.plan.observed if watched else ())
        large = [source.plan.layout[key] for key in source.large] if options.yield_large else []
        # What NumPy has no dtype for was copied as small columns are.
        self._pool = BufferPool(
            [(NUMPY[c.dtype], c.shape) for c in large if c.dtype is not torch.bfloat16]
        )
        self._parts: list[Part] = []
        """Of the batch under way."""
        self._kept: list[Block] = []
        """Those whose large rows lie where they are until the batch is delivered."""
        self._in_hand = 0
        """Transitions that were taken from the source and are in no batch yet."""
        self._batches = 0
        self.over = False
        if options.postproc is None:
            writer.open(source.no_rows, provenance, source.behind)

    # --- from blocks to rows ----------------------------------------------------------------------

    def batch(self) -> TensorDictBase | None:
        """The next batch; None where the run ended without one. The last one ends it."""
        self._writer.require_open()
        size = self._budget.batch(self._ledger.stored, self._options.frames_per_batch)
        rollout = self._rollout
        if self._options.reset_at_each_iter and self._batches:
            # What was carried belongs to the trajectories that the reset cuts: it comes first.
            self._take(min(size, rollout.held), size)
            if not rollout.held:
                self.restart_lanes()
        with torch.no_grad(), set_exploration_type(self._options.exploration_type):
            while self._in_hand < size and not rollout.dry:
                self._take(size - self._in_hand, size)
        batch = self._deliver() if self._parts else None
        if self._options.surplus == "discard":
            self.discard()
        if self._budget.remaining(self._ledger.stored) == 0 or rollout.dry:
            self.finish()
            self._finals.warn_at_end(self._committed)
        return batch

    def _take(self, want: int, size: int) -> None:
        """Add at most ``want`` rows to a batch that is to have ``size`` of them.

        After an error, what is complete and sound is stored before it is raised.
        """
        try:
            block = self._fill(want)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._rescue(error)
            raise
        self._add(block, self._in_hand + len(block) < size)

    def _fill(self, want: int) -> Block:
        """Take a block whose values are as declared."""
        try:
            block = self._rollout.block(want)
        except Exception as error:
            refused = self._rollout.refused()
            culprit = refused and self._checks.bad_action(*refused, self.state)
            if culprit is not None:
                raise culprit from error
            raise
        post(self._ledger, block.entry)
        bad = self._checks.first_violation(block.slab, block.used, self.state)
        if bad is not None:
            raise bad.error
        return block

    def _add(self, block: Block, more: bool) -> None:
        """Number the rows of ``block``, and add them to the batch; cuts come behind them.

        Large ones stay in the slab until they are delivered, if they can. ``more``: another block
        will be asked for before.
        """
        with block:
            if len(block):
                part, numbers = self._source.rows(block, self.state)
                self._finals.look(part)
                self._log(part.rows, numbers, block)
                if part.large and block.keep(more):
                    self._kept.append(block)
                else:
                    part.settle()
                self._parts.append(part)
        self._in_hand += len(block)
        if block.cuts is not None:
            self._begin_anew(block.cuts)
            self._finals.forget(block.cuts)

    def _log(self, rows: Rows, numbers: Numbers, block: Block) -> None:
        if isinstance(self._ticks, tuple):
            before = rows[self._ticks].reshape(-1)
            ticks = int(before[torch.from_numpy(numbers.start_row)].sum())
            post(self._ledger, LedgerEntry(reset_ticks=ticks))
        at = numbers.end_row
        if len(at):
            version = rows[POLICY_VERSION].numpy()
            self.episodes.extend(
                numbers.traj_ids[at],
                block.lane[at],
                numbers.returns,
                numbers.lengths,
                rows[TERMINATED].reshape(-1).cpu().numpy()[at],
                (numbers.first_versions, version[at]),
            )

    # --- from rows to a batch ---------------------------------------------------------------------

    def _deliver(self) -> TensorDictBase:
        """Store what is in hand, and lay it out.

        Where storing fails, only rows that were committed before it did are counted.

        Raises:
            LedgerError: before anything is stored: transitions were lost or doubled on their way.
        """
        self._finals.require_true(self._committed)
        rows, large = self._parted(merge(self._parts))
        count, open_lanes = len(rows[STEP]), int(self.state.open.sum())
        before, head = self._ledger.counts(), self._writer.head
        try:
            post(self._ledger, self._entry_of(rows))
            self._ledger.balance(self._rollout.held)
            if self._options.postproc is None:
                self._writer.write(rows, count, self._ledger, open_lanes, large)
                batch: TensorDictBase = self._as_batch(rows)
            else:
                batch = self._postprocessed(rows, self._options.postproc, open_lanes)
        except BaseException:
            committed = self._writer.head - head
            if committed < count:  # else it was raised behind the commit
                self._ledger.load(before)
                stored = {key: column[:committed] for key, column in rows.items()}
                post(self._ledger, self._entry_of(stored))
            raise
        finally:
            self._in_hand -= self._ledger.stored - before["stored"]
        self._parts = []
        self._batches += 1
        kept, self._kept = self._kept, []
        for block in kept:
            block.release()
        if self._options.layout == "lanes":
            return by_lane(batch, len(self._everywhere))
        return split_trajectories(batch) if self._options.layout == "trajectories" else batch

    def _committed(self) -> str:
        """Which rows of this run are stored, and how many ends are in them, as a sentence."""
        return f"{self._writer.committed}, with {self._ledger.episodes_complete:,} ends of episodes"

    def _parted(self, part: Part) -> tuple[Rows, Columns]:
        """The rows that are yielded, and the large columns that are only stored."""
        if not self._source.large:
            return part.rows, {}
        rows = dict(part.rows)
        if not self._options.yield_large:
            copied = {key: rows.pop(key) for key in self._source.large if key in rows}
            return rows, {**part.large, **copied}
        if part.large:
            # Memory that was used before costs a fifth of new memory.
            arrays = self._pool.arrays((len(part),))
            for (key, gathered), array in zip(part.large.items(), arrays, strict=True):
                gathered.copy_to(array)
                rows[key] = torch.from_numpy(array)
            rows = {key: rows[key] for key in self._source.no_rows}
        return rows, {}

    def _as_batch(self, rows: Rows) -> TensorDictBase:
        device = self._options.storing_device
        return as_tensordict(with_cuts(rows, self._source.plan.dones), device, self._source.behind)

    def _postprocessed(self, rows: Rows, postproc: Postproc, open_lanes: int) -> TensorDictBase:
        own = own_flags(rows, self._source.plan.dones) if self._writer.stores else None
        with admitted():
            batch = postproc(self._as_batch(rows))
        count = len(rows[STEP])
        if not isinstance(batch, TensorDictBase) or batch.batch_size != torch.Size([count]):
            got = list(getattr(batch, "batch_size", [])) or type(batch).__name__
            raise ArgumentError(
                f"postproc: expected a TensorDict of batch size [{count}], got {got}"
            )
        missing = [spell(k) for k in (CUT, DONE, LANE, TRAJ_IDS) if batch.get(k, None) is None]
        if missing:
            raise ArgumentError(f"postproc: expected the columns {missing} kept, they are gone")
        stored = without_cuts({as_key(key): leaf for key, leaf in batch.items(True, True)}, own)
        if not self._writer.ready:
            behind = behind_rows(stored, batch_dims_of(batch))
            self._writer.open(stored, self.provenance, behind)
        self._writer.write(stored, count, self._ledger, open_lanes, {})
        return batch

    def _entry_of(self, rows: Rows) -> LedgerEntry:
        """What it means that ``rows`` are delivered."""
        count, drawn = len(rows[STEP]), 0
        if self._count_random:
            drawn = int((rows[POLICY_VERSION] == RANDOM_VERSION).sum())
        if isinstance(self._ticks, int):
            ticks = count * self._ticks
        else:
            before, after = rows[self._ticks], rows[(NEXT, *self._ticks)]
            ticks = int((after - before).sum())
        ends = int(rows[DONE].sum())
        return LedgerEntry(stored=count, random=drawn, ticks=ticks, episodes_complete=ends)

    # --- ends, cuts and errors --------------------------------------------------------------------

    def _begin_anew(self, lanes: NDArray[np.bool_]) -> None:
        """Open trajectories of ``lanes`` stay unfinished, and their environments start others."""
        post(self._ledger, LedgerEntry(episodes_cut=self.state.cut(lanes)))
        self.state.restart(lanes)

    def restart_lanes(self) -> None:
        """Every lane begins a new trajectory; nothing may be held then."""
        self._begin_anew(self._everywhere)
        post(self._ledger, self._rollout.discard(()).entry)  # what workers do ahead
        self._rollout.restart_lanes(self._ledger)

    def discard(self) -> None:
        """Throw the surplus away; the trajectories that lose a row there are cut."""
        if not self._rollout.held:
            return
        entry, lanes, reward, ended = self._rollout.discard(self._source.plan.rewards)
        post(self._ledger, entry)
        self._ledger.balance(self._rollout.held)
        post(self._ledger, LedgerEntry(episodes_cut=self.state.cut(lanes)))
        self.state.returns[lanes] += reward[lanes]
        self.state.length[lanes] += 1
        self.state.restart(lanes & ended)
        self._finals.forget(lanes)

    def _rescue(self, error: BaseException) -> None:
        """Store what was taken before ``error``, and what is complete and sound behind it.

        Where it is not true, the ledger does not balance, or the storage was closed, nothing is,
        and that is a note: ``error`` is raised.
        """
        try:
            if self._writer.stores:  # else nobody would get it
                remaining = self._budget.remaining(self._ledger.stored)
                most = sys.maxsize if remaining is None else remaining - self._in_hand
                for block in self._rollout.salvage(self._sound, most):
                    post(self._ledger, block.entry)
                    self._add(block, more=True)
                if self._parts:
                    self._deliver()
            self.finish()
        except (LedgerError, SilentReset, StorageClosed) as again:
            error.add_note(f"tallyroll: complete transitions were not stored: {again}")

    def _sound(self, slab: Slab, used: int) -> int:
        """Number of slots, of the first ``used``, whose values are as declared."""
        bad = self._checks.first_violation(slab, used, self.state)
        return used if bad is None else bad.slot

    def finish(self) -> None:
        """The run is over: nothing is carried any more, open trajectories are cut."""
        self.over = True
        ledger = self._ledger
        before = ledger.discarded
        self._rollout.stop()
        post(ledger, self._rollout.discard(()).entry)
        post(
            ledger,
            LedgerEntry(discarded=self._in_hand, episodes_cut=self.state.cut(self._everywhere)),
        )
        self._in_hand, self._parts, self._kept = 0, [], []
        ledger.balance(self._rollout.held)
        self._writer.finish(ledger, ledger.discarded - before)


def _ticks(options: Options, plan: SlabPlan) -> int | Key:
    """Ticks a transition, or the column that counts them.

    Raises:
        ArgumentError: there is no such column.
    """
    if isinstance(options.frame_skip, int):
        return options.frame_skip
    key = new_name(split(options.frame_skip), options.rename, plan.layout)
    if key not in plan.layout:
        raise ArgumentError(
            f"frame_skip: expected a number, or the info key that counts ticks, got "
            f"{options.frame_skip!r}; there is no such column"
        )
    return key
