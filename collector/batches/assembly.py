"""Batches made from the blocks of a source: rows are checked, numbered, stored and yielded."""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.batches.cuts import own_flags, with_beginnings, with_cuts, without_cuts
from tallyroll.collector.batches.final_observations import FinalsWatch
from tallyroll.collector.batches.layouts import by_lane, split_trajectories
from tallyroll.collector.batches.plain_slots import PlainSlots
from tallyroll.collector.batches.rows import (
    Part,
    Rows,
    RowSource,
    as_tensordict,
    behind_rows,
    merge,
)
from tallyroll.collector.batches.rows_ahead import RowsAhead
from tallyroll.collector.batches.slab_rows import SlabPart, SlabRows
from tallyroll.collector.batches.small_batches import SmallBatches
from tallyroll.collector.batches.torchrl_layout import Flags, TorchrlLayout
from tallyroll.collector.batches.value_checks import Range, RangeChecks
from tallyroll.collector.batches.writer import BatchWriter, Columns, warn_of_cut_item
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import NOTHING, Budget, Ledger, LedgerEntry, amounts, post
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.errors import (
    ArgumentError,
    ItemsDiffer,
    LedgerError,
    SilentReset,
    StateError,
    ValueRefused,
)
from tallyroll.collector.options import Options, Postproc
from tallyroll.collector.policies.acting import Acting
from tallyroll.collector.rollout.driver import raised_by_policy
from tallyroll.collector.rollout.os_signals import call_waiting, later, pausable, waits
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block, TransitionSource
from tallyroll.collector.run_plan import (
    FEW_SLOTS,
    StoringTraits,
    batching,
    committing,
    extension_used,
    placing,
)
from tallyroll.collector.slab.names import new_name, split
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.kernel import is_built
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.readers.file_reader import FileReader
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
    TRAJ_IDS,
    Key,
    as_key,
    spell,
)
from tallyroll.storage.storages import DiskStorage

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
        self._torchrl, self._ahead = torchrl, ahead
        self._shapes = torchrl is not None and writer.shapes
        """True if a TorchRL buffer gets batches as they are laid out."""
        if torchrl is not None and self._shapes:
            items = options.postproc is None and writer.makes_items(torchrl.dims)
            torchrl.require_rectangles(items)
        self._options, self._writer, self._source = options, writer, source
        self._rollout, self._ledger, self.state = rollout, ledger, state
        self.provenance = provenance
        self._draws = count_random and options.init_random_frames > 0
        self._acting = Acting(options.exploration_type)
        self._everywhere = np.ones(len(state.step), np.bool_)
        self._budget = Budget(options.total_frames)
        self._ticks = _ticks(options, source.plan)
        self._masks, self._agents = _agents(options, source.plan)
        self._checks = RangeChecks(
            ranges,
            options.validate,
            source.plan.masks,
            at_random=not count_random or self._draws,
        )
        self.episodes = EpisodeLog(None if options.total_episodes is not None else EPISODES_KEPT)
        watched = options.finals == "check" and not source.plan.lost_finals
        self._finals = FinalsWatch(len(state.step), source.plan.observed if watched else ())
        large = [source.plan.layout[key] for key in source.large] if options.yield_large else []
        # A column of a dtype that NumPy lacks was copied with the small columns.
        self._pool = BufferPool(
            [(NUMPY[c.dtype], c.shape) for c in large if c.dtype is not torch.bfloat16]
        )
        self._tables: dict[Slab, SlabRows] = {}
        """The row table of each slab."""
        hidden = () if options.yield_large else source.large
        self._plain: dict[Slab, PlainSlots] = {}
        self.plain: PlainSlots | None = None
        """The plain slot that the last call stored, if the next call may store one at once."""
        self._left: PlainSlots | None = None
        """The plain slot that was filled and may not be stored yet."""
        self._raised: BaseException | None = None
        """The exception raised while it was filled or stored."""
        self._raised_by_store = False
        """True if that exception came after all lanes were stepped."""
        self._small: dict[SlabRows, SmallBatches] = {}
        self._laid_out = [key for key in source.no_rows if key not in hidden]
        self._lays_out = True
        """True while batches are yielded, and not only stored."""
        self._yields = True
        """True if the call under way is to yield the rows that it stores."""
        self._parts: list[Part | SlabPart] = []
        """The parts of the batch under way."""
        self._kept: list[Block] = []
        """Blocks whose large rows stay in their slab until the batch is delivered."""
        self.stopped = False
        """True if the run is to end, or an error ended it: only its last rows still come."""
        self._no_items = 0
        """Transitions that made no item of a replay buffer when the run ended."""
        self._why_none: ItemsDiffer | None = None
        self._in_hand = 0
        """Transitions that were taken from the source and are in no batch yet."""
        self._given = ledger.stored
        """Transitions of the run that were stored before the call under way."""
        self._ended_by = ""
        """The exception that ended the run, what it left, and how to go on."""
        self._iterations = 0
        self._under_way = False
        """True during a batch or a call of `collect`, and after an exception interrupted it."""
        self.intact = False
        """True while an exception would leave nothing half done."""
        self.busy = self.over = False
        self.lost = False
        """True if another collector drives the environment; this one then stays ``busy``."""
        if options.postproc is None:
            writer.open(source.no_rows, provenance, source.behind)
        traits = self._traits()
        self.rows, self.extension = placing(traits), extension_used(built=is_built())
        self.batches = batching(traits, self.rows)
        self.commits = committing(traits, self.rows)
        self._straight = self.rows.way == "slab"
        """True if rows go to the storage directly from a slab."""
        self._lays_out_slots = self.batches.way == "slab"
        """True if small batches are laid out directly from a slab too."""
        self._in_one_call = self.commits.way == "one call"

    def _traits(self) -> StoringTraits:
        """Return the traits of the run that its plan depends on."""
        options, plan, rollout = self._options, self._source.plan, self._rollout
        storage, torchrl, slab = self._writer.target, self._torchrl, rollout.slabs[0]
        return StoringTraits(
            postproc=options.postproc is not None,
            replay_buffer=self._writer.replay_buffer is not None,
            storage="" if storage is None else type(storage).__name__,
            has_engine=storage is not None and isinstance(storage.reader, FileReader),
            waits_for_disk=storage is not None and storage.writer.durability == "power",
            elsewhere=[key for key in plan.layout if key not in slab.flat],
            by_lane="" if rollout.counts.way == "whole" else rollout.counts.because,
            arrivals=slab.lane is not None,
            extension=is_built(),
            one_float_reward=_is_one_float(plan),
            draws=self._draws,
            masked_agents=bool(self._masks),
            counts_ticks=not isinstance(self._ticks, int),
            follows_flags=torchrl is not None and torchrl.follows,
            resets_batches=options.reset_at_each_iter,
            wide_bounds=self._checks.table(slab) is None,
            slots_of_batch=ceil(options.largest_batch / slab.lanes),
            yields_large=bool(self._source.large) and options.yield_large,
        )

    # --- from blocks to rows ----------------------------------------------------------------------

    def batch(self, size: int | None = None) -> TensorDictBase | None:
        """Return the next batch; None if the run ended without one. The last batch ends the run.

        It has ``size`` rows (default: ``frames_per_batch``), fewer if the budget ends before.
        """
        self._lays_out = self._yields = True
        most = sys.maxsize if self._apart else size or self._options.frames_per_batch
        size = self._budget.batch(self._ledger.stored, most)
        if self._begin(size) and self._ahead is not None and not self._rollout.held:
            self._ahead.begin(size, self._checks)
        with self._acting:
            self._gather(size)
        batch = self._deliver(size) if self._in_hand else None
        self._end()
        return batch

    def collect(self, want: int) -> int:
        """Store ``want`` more transitions, fewer if the run ends before; return how many."""
        ledger, self._lays_out, self._yields = self._ledger, False, False
        if self._raised is not None:
            self._take(want, 0)
        before = ledger.stored
        most = self._writer.most if self._straight else self._options.frames_per_batch
        goal = before + self._budget.batch(before, want)
        self._begin(min(most, goal - before))
        if self._straight:
            with self._acting:
                while ledger.stored < goal and (self._in_hand or not self._rollout.dry):
                    if not self._in_hand:
                        self._take(min(most, goal - ledger.stored), 0)
                    if self._in_hand:
                        self._deliver(goal - ledger.stored)
                    self._admit(goal - ledger.stored)
        while ledger.stored < goal and (self._in_hand or not self._rollout.dry):
            with self._acting:
                self._gather(min(most, goal - ledger.stored))
            if self._in_hand:
                self._deliver(min(most, goal - ledger.stored))
        self._end()
        return ledger.stored - before

    def collect_plain(self, want: int) -> bool:
        """Collect one plain slot after another one; return False if :meth:`collect` has to do it.

        A signal's handler may raise anywhere here: before the one call that stores the slot,
        :meth:`settle` keeps the slot for the next block; after that call everything is done.
        """
        plain, total = self.plain, self._budget.total
        if plain is None or want != plain.slot.count or self.busy:
            return False
        if total is not None and self._ledger.stored + want >= total:
            return False
        if self.stopped or plain.reader.engine is None:
            return False
        try:
            self.busy, self._raised_by_store = True, False
            plain.fill()
            self._raised_by_store = True
            if plain.store(self._finals):
                return not self.stopped
        except BaseException as error:  # noqa: BLE001  raised by `collect`
            self._raised = error
        finally:
            self.busy = False
        self._left, self.plain = plain, None
        return False

    def settle(self) -> None:
        """Count the slot that :meth:`collect_plain` left unstored; it is the next block."""
        self.plain = None
        left, self._left = self._left, None
        if left is not None:
            left.again.put_back()
            left.log()

    def _begin(self, size: int) -> bool:
        """Begin an iteration whose first batch has ``size`` rows; return False if one goes on."""
        self._given = self._ledger.stored
        self._writer.require_open()
        if self._under_way:
            return False
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
        if self._writer.begun:
            return
        self.intact = True  # after a refusal the run may begin later
        first_id = self._writer.begin(self.provenance)
        self.intact = False
        if first_id is not None:
            self.state.begin_at(first_id)

    def _gather(self, size: int) -> None:
        """Take blocks until ``size`` rows are in hand; one block if a batch is of one worker."""
        while self._in_hand < size and not self._rollout.dry:
            self._take(size - self._in_hand, 0 if self._apart else size)
            if self._apart and self._in_hand:
                break
            self._admit(size - self._in_hand)

    def _admit(self, missing: int) -> None:
        """Call waiting signal handlers if rows are still missing: nothing is half done here."""
        if missing <= 0:
            return
        rollout = self._rollout
        if rollout.paused:
            rollout.go_on()
            if self.stopped:
                rollout.stop()
        if waits():
            self._ledger.balance(rollout.held + self._in_hand)
            self.intact = True
            call_waiting()
            self.intact = False

    @property
    def _apart(self) -> bool:
        return self._torchrl is not None and self._torchrl.apart

    def _end(self) -> None:
        """End an iteration, and the run too if no more rows will come."""
        self._under_way = False
        if self._options.surplus == "discard":
            self.discard()
        if self._budget.remaining(self._ledger.stored) == 0 or self._rollout.dry:
            self.finish()
            self._finals.warn_at_end(self._committed)

    def _take(self, want: int, size: int) -> None:
        """Add at most ``want`` rows to a batch that is to have ``size`` of them.

        After an error, complete and sound rows are stored before it is raised.
        """
        self.plain = None
        try:
            block = self._filled(want)
            if self._in_one_call and block.again and size == 0 and self._store_plain(block):
                return
            self._check(block)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._rescue(error)
            raise
        self._add(block, self._in_hand + len(block) < size)

    def _filled(self, want: int) -> Block:
        error, self._raised = self._raised, None
        if error is not None and self._raised_by_store:
            raise error
        try:
            if error is not None:
                raise error
            return self._rollout.block(want)
        except Exception as error:
            refused = self._rollout.refused()
            if refused and isinstance(error, ValueRefused):
                self._checks.place(error, *refused[:2], self.state)
            acted = not raised_by_policy(error)
            if not acted and not self._source.plan.in_place:
                raise  # what the policy saw is not in the slab
            culprit = refused and self._checks.bad_action(*refused, self.state, acted=acted)
            if culprit is not None:
                raise culprit from error
            raise

    def _check(self, block: Block) -> None:
        """Count the events of ``block``, and raise if its values are not as declared."""
        post(self._ledger, block.entry)
        bad = self._checks.first_violation(block.slab, block.used, self.state)
        if bad is not None:
            raise bad.error

    def _add(self, block: Block, more: bool) -> None:
        """Number the rows of ``block``, and add them to the batch; cuts take effect after them.

        Large rows stay in the slab until delivery, if they can; all rows do if the batch is this
        block alone. ``more``: another block will be asked for before delivery.
        """
        copied = None if self._ahead is None else self._ahead.take(block)
        with block:
            if len(block):
                table = None if more or self._parts else self._table_of(block)
                part: Part | SlabPart
                if table is not None and block.keep(more):
                    part = table.part(block, self.state, by_lane=self._lays_out)
                else:
                    alone = not (more or self._parts)
                    part = self._source.part(block, self.state, copied, alone=alone)
                self._finals.look(part)
                self._log(part)
                if isinstance(part, SlabPart) or (part.large and block.keep(more)):
                    self._kept.append(block)
                else:
                    part.settle()
                self._parts.append(part)
        self._in_hand += len(block)
        if block.cuts is not None:
            self._begin_anew(block.cuts)
            self._finals.forget(block.cuts)

    def _store_plain(self, block: Block) -> bool:
        """Store one slot of all lanes at once, as `_check`, `_add` and `_deliver` would.

        Return False, with nothing done, if those three have more to do.
        """
        plain = self._plain_of(block)
        if plain is None or self._finals.curious or not plain.store(self._finals):
            return False
        if block.giver is not None:
            block.giver.given(block)
        self.plain = plain
        return True

    def _plain_of(self, block: Block) -> PlainSlots | None:
        """Return what all plain blocks of a slab share; None if its slots are not plain."""
        plain, checks, seed = self._plain.get(block.slab), self._checks, self._ledger.seed
        if plain is not None and plain.was_made_for(block.entry, self.state, checks.eased, seed):
            return plain
        table, ticks, storage = self._table_of(block), self._ticks, self._writer.direct
        count, bounds = len(block), checks.table(block.slab)
        if table is None or bounds is None or block.again is None:
            return None
        assert isinstance(ticks, int)  # as the plan says
        assert isinstance(storage, DiskStorage)
        assert isinstance(storage.reader, FileReader)
        if block.entry != LedgerEntry(slots=count, executed=count):
            return None
        delivered = _delivered(count, 0, count * ticks, 0, count * self._agents)
        slot = self._writer.slot(
            table.fixed(storage.schema),
            count,
            self._ledger,
            numbering=table.numbering(self.state),
            checks=bounds,
            carry=block.again.carry,
            amounts=amounts(block.entry.plus(delivered)).tobytes(),
        )
        self._plain[block.slab] = plain = PlainSlots(
            table,
            slot,
            block.again,
            storage,
            storage.reader,
            self.episodes,
            self._acting,
            block.entry,
            self.state,
            checks.eased,
            seed,
            checks.masks_of(block.slab, 1),
        )
        return plain

    def _table_of(self, block: Block) -> SlabRows | None:
        """Return the row table of the block's slab; None if its rows are gathered first."""
        if not self._straight:
            return None
        if self._lays_out and not (self._lays_out_slots and block.used <= FEW_SLOTS):
            return None
        table = self._tables.get(block.slab)
        if table is None:
            table = self._tables[block.slab] = SlabRows(block.slab, self._source.plan)
        return table

    def _log(self, part: Part | SlabPart) -> None:
        if isinstance(self._ticks, tuple):
            ticks = sum(int(part.at(self._ticks, begun).sum()) for begun in part.begun)
            post(self._ledger, LedgerEntry(reset_ticks=ticks))
        if part.episodes is not None and len(part.episodes):
            self.episodes.extend(part.episodes)

    # --- from rows to a batch ---------------------------------------------------------------------

    def _deliver(self, most: int) -> TensorDictBase | None:
        """Store at most ``most`` of the rows in hand, and lay them out if they are to be yielded.

        If storing fails, only the rows that were committed before are counted. If the run ends
        within an item of a TorchRL buffer, the rows of that item are discarded.

        Raises:
            LedgerError: transitions were lost or doubled on their way; nothing is stored.
        """
        self._finals.require_true(self._committed)
        part: Part | SlabPart = merge(self._parts)  # type: ignore[arg-type]  # alone, of any kind
        rest = None
        if len(part) > most and isinstance(part, Part):  # a larger batch was parted
            part, rest = part.split(most)
        count, open_lanes = len(part), int(np.count_nonzero(self.state.step))
        entry, head, batch = self._entry_of(part), self._writer.head, None
        flags = {} if self._torchrl is None else self._torchrl.root_flags(part)
        before = self._ledger.stored
        try:
            post(self._ledger, entry)
            self._ledger.balance(self._rollout.held + (0 if rest is None else len(rest)))
            if isinstance(part, SlabPart):
                self._store_slots(part, open_lanes)
                if self._lays_out:
                    batch = self._as_small_batch(part)
            else:
                batch = self._store_rows(part, open_lanes, flags)
        except ItemsDiffer as error:
            last = self._is_rest(count)
            post(self._ledger, entry.undone())
            entry = NOTHING
            if not last:
                raise
            self._discard_item(part, error)
        except BaseException:
            committed = self._writer.head - head
            if committed < count:  # else it was raised after the commit
                if self._ledger.stored != before:  # else it was raised before that was counted
                    post(self._ledger, entry.undone())
                entry = NOTHING
                if committed and isinstance(part, Part):
                    entry = self._entry_of(part.first(committed))
                post(self._ledger, entry)
            raise
        finally:
            self._in_hand -= entry.stored
        self._parts = [] if rest is None else [rest]
        while self._kept:
            self._kept.pop().release()
        return None if batch is None else self._arranged(batch, flags)

    def _is_rest(self, count: int) -> bool:
        """Return whether the ``count`` rows in hand are the rest of a batch when the run ended."""
        ends = self.stopped or self._rollout.dry
        ends = ends or self._budget.remaining(self._ledger.stored) == 0
        return ends and count != self._options.largest_batch

    def _discard_item(self, part: Part | SlabPart, error: ItemsDiffer) -> None:
        """Discard the last rows of the run, which make no item of a replay buffer."""
        self._rollout.stop()  # the budget can no longer be met
        ids = part.array(TRAJ_IDS)
        begun, ended = ids[part.array(STEP) == 0], ids[part.array(DONE).reshape(-1)]
        cut = len(np.setdiff1d(ended, begun))  # the open ones are cut at the end,
        self.state.cut(np.isin(self.state.traj_id, begun))  # but for these, which have no rows
        post(self._ledger, LedgerEntry(discarded=len(part), episodes_cut=cut))
        self._in_hand -= len(part)
        self._no_items, self._why_none = self._no_items + len(part), error

    def _store_slots(self, part: SlabPart, open_lanes: int) -> None:
        if (schema := self._writer.schema) is not None:
            rows = part.table.fixed(schema)
            self._writer.write_fixed(rows, part.index, part.next_id, self._ledger, open_lanes)

    def _store_rows(self, part: Part, open_lanes: int, flags: Flags) -> TensorDictBase | None:
        rows, large = self._parted(part)
        if self._options.postproc is not None:
            return self._postprocessed(rows, self._options.postproc, open_lanes, flags)
        shaped = None
        if self._torchrl is not None and self._shapes:
            shaped = self._torchrl.for_buffer(self._as_batch(rows), flags)
        last = shaped is not None and self._is_rest(len(part))
        self._writer.write(rows, len(part), self._ledger, open_lanes, large, shaped, last=last)
        return self._as_batch(rows) if self._lays_out else None

    def _arranged(self, batch: TensorDictBase, flags: Flags) -> TensorDictBase:
        if self._torchrl is not None:
            done_before = self._options.postproc is not None
            return batch if done_before else self._torchrl(batch, flags)
        if self._options.layout == "lanes":
            return by_lane(batch, len(self._everywhere))
        return split_trajectories(batch) if self._options.layout == "trajectories" else batch

    def _committed(self) -> str:
        """Say in a sentence which rows of this run are stored, with how many ends of episodes."""
        return f"{self._writer.committed}, with {self._ledger.episodes_complete:,} ends of episodes"

    def _parted(self, part: Part) -> tuple[Rows, Columns]:
        """Return the rows that are yielded, and the large columns that are only stored."""
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

    @property
    def _inits(self) -> tuple[Key, ...]:
        """Keys that mark a trajectory's first row; none in TorchRL's layout."""
        return self._source.plan.inits if self._torchrl is None else ()

    def _as_batch(self, rows: Rows) -> TensorDictBase:
        device = self._options.storing_device
        marked = with_cuts(rows, self._source.plan.dones, marks=self._torchrl is None)
        marked = with_beginnings(marked, self._inits)
        return as_tensordict(marked, device, self._source.behind)

    def _as_small_batch(self, part: SlabPart) -> TensorDictBase:
        batches = self._small.get(part.table)
        if batches is None:
            source = self._source
            batches = SmallBatches(
                part.table,
                self._laid_out,
                source.plan.dones,
                source.behind,
                marks=self._torchrl is None,
                inits=self._inits,
            )
            self._small[part.table] = batches
        batch, device = batches.batch(part), self._options.storing_device
        return batch if device is None else batch.to(device)

    def _postprocessed(
        self, rows: Rows, postproc: Postproc, open_lanes: int, flags: Flags
    ) -> TensorDictBase:
        torchrl = self._torchrl
        marked = self._source.plan.dones if torchrl is None else torchrl.marked
        own = own_flags(rows, marked, self._inits) if self._writer.stores else []
        batch = self._as_batch(rows)
        if torchrl is not None:
            batch = torchrl(batch, flags)
        with pausable(later):
            batch = postproc(batch)
        count, shaped = len(rows[STEP]), None
        if torchrl is not None:
            if not isinstance(batch, TensorDictBase):
                raise ArgumentError(
                    f"postproc: expected a TensorDict back, got {type(batch).__name__}"
                )
            if self._shapes:
                shaped = torchrl.processed_for_buffer(batch)
            if self._writer.storage is None:  # the rows as they were before postproc
                if not self._writer.ready:
                    self._writer.open(rows, self.provenance, self._source.behind)
                self._writer.write(
                    rows, count, self._ledger, open_lanes, {}, shaped, last=self._is_rest(count)
                )
                return batch
        stored = batch if torchrl is None else torchrl.rows_of(batch)
        if not isinstance(stored, TensorDictBase) or stored.batch_size != torch.Size([count]):
            got = list(getattr(stored, "batch_size", [])) or type(stored).__name__
            raise ArgumentError(
                f"postproc: expected a TensorDict of batch size [{count}], got {got}"
            )
        missing = [spell(k) for k in (CUT, DONE, LANE, TRAJ_IDS) if stored.get(k, None) is None]
        if missing:
            raise ArgumentError(f"postproc: expected the columns {missing} kept, they are gone")
        kept = without_cuts({as_key(key): leaf for key, leaf in stored.items(True, True)}, own)
        if not self._writer.ready:
            behind = behind_rows(kept, batch_dims_of(stored))
            self._writer.open(kept, self.provenance, behind)
        self._writer.write(
            kept, count, self._ledger, open_lanes, {}, shaped, last=self._is_rest(count)
        )
        return batch

    def _entry_of(self, part: Part | SlabPart) -> LedgerEntry:
        """Return the changes of the ledger's counts by the delivery of ``part``."""
        count, drawn = len(part), 0
        if self._draws:
            version = part.array(POLICY_VERSION)
            drawn = int(np.count_nonzero(version == RANDOM_VERSION))
        if isinstance(self._ticks, int):
            ticks = count * self._ticks
        else:
            before, after = part.array(self._ticks), part.array((NEXT, *self._ticks))
            ticks = int((after - before).sum())
        agents = count * self._agents
        for mask in self._masks:
            agents += int(np.count_nonzero(part.array(mask)))
        return _delivered(count, drawn, ticks, part.ends, agents)

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
        self._lays_out, self.stopped = False, True
        if self._writer.stores:  # else the rows would reach no reader
            remaining = self._budget.remaining(self._ledger.stored)
            most = sys.maxsize if remaining is None else remaining - self._in_hand
            for block in self._rollout.salvage(self._sound, most):
                post(self._ledger, block.entry)
                self._add(block, more=True)
            if self._parts:
                self._deliver(self._in_hand)

    def end(self) -> None:
        """End the run at the caller's wish; the rows of an interrupted batch are stored before."""
        try:
            if self._under_way and not self.busy:
                self._store_complete()
        finally:
            self.finish()

    def _sound(self, slab: Slab, used: int) -> int:
        """Return how many of the first ``used`` slots have values as declared."""
        bad = self._checks.first_violation(slab, used, self.state)
        return used if bad is None else bad.slot

    def end_by(self, error: BaseException) -> None:
        """End the run because ``error`` was raised within it."""
        try:
            if not self.over:
                self.finish()
        finally:
            if not self._ended_by:
                self._ended_by = self._said(error)

    def _said(self, error: BaseException) -> str:
        stored, writer = self._ledger.stored, self._writer
        said = f"the run ended when {type(error).__name__} was raised within it"
        text = str(error).partition("\n")[0]
        said += f" ({text[:200]}). " if text else ". "
        rows = writer.rows_of(self._given, stored)
        said += f"{writer.committed}. "
        if rows and self._yields:
            said += f"Rows {rows.start:,} to {rows.stop - 1:,} of these were not yielded. "
        elif stored > self._given and self._yields:
            said += f"The last {stored - self._given:,} of these were not yielded. "
        if writer.storage is not None:
            return said + (
                "To go on behind them, shut this collector down and give the storage to another "
                "one, with resume=True"
            )
        left = self._budget.remaining(stored)
        frames = "" if left is None else f" for the {left:,} transitions that are left"
        return said + (
            f"To go on, make another collector{frames}; given this one's state_dict() by "
            "load_state_dict(), it goes on with its counts, ids, seeds and policy"
        )

    def refuse_ended(self) -> None:
        """Raise `StateError` if an exception ended the run."""
        if self._ended_by:
            raise StateError(self._ended_by)

    def finish(self) -> None:
        """End the run: discard what is carried, and cut the open trajectories."""
        self.over = True
        self.settle()
        ledger = self._ledger
        before = ledger.discarded
        self._rollout.stop()
        post(ledger, self._rollout.discard(()).entry)
        post(
            ledger,
            LedgerEntry(discarded=self._in_hand, episodes_cut=self.state.cut(self._everywhere)),
        )
        self._in_hand, self._parts, self._kept = 0, [], []
        if self._ahead is not None:
            self._ahead.end()
        ledger.balance(self._rollout.held)
        self._writer.finish(ledger, ledger.discarded - before)
        if self._why_none is not None:
            why, self._why_none = self._why_none, None
            warn_of_cut_item(
                self._no_items, "which make no item of the replay buffer, are discarded", why
            )


@lru_cache(maxsize=256)
def _delivered(count: int, drawn: int, ticks: int, ends: int, agents: int) -> LedgerEntry:
    return LedgerEntry(
        stored=count, random=drawn, ticks=ticks, episodes_complete=ends, agent_transitions=agents
    )


def _is_one_float(plan: SlabPlan) -> bool:
    """Return whether a lane's reward is one float32 or float64."""
    if len(plan.rewards) != 1:
        return False
    reward = plan.layout[plan.rewards[0]]
    return prod(reward.shape) == 1 and reward.dtype in (torch.float32, torch.float64)


def _agents(options: Options, plan: SlabPlan) -> tuple[list[Key], int]:
    """Return the masks of groups of agents, and the number of agents in groups without one."""
    masks, others = [], 0
    for key in plan.dones:
        mask = new_name((*key[1:-1], "mask"), options.rename, plan.layout)
        if mask in plan.layout and plan.layout[mask].dtype is torch.bool:
            masks.append(mask)
        else:
            others += int(np.prod(plan.layout[key].shape))
    return masks, others


def _ticks(options: Options, plan: SlabPlan) -> int | Key:
    """Return the ticks of a transition, or the column that counts them.

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
