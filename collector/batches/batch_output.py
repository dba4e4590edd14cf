"""Turn blocks into batches: number rows, count and store them, and lay them out."""

import sys

import numpy as np
from tensordict import TensorDictBase

from tallyroll.collector.batches.checks.final_observation_checks import FinalsWatch
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.layouts.batch_layout import BatchLayout
from tallyroll.collector.batches.layouts.torchrl_layout import NO_FLAGS, Flags
from tallyroll.collector.batches.rows.rows import ArrayBatch, RowSource, merge
from tallyroll.collector.batches.rows.slab_output import SlabOutput
from tallyroll.collector.batches.rows.slab_rows import SlabBatch
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.batches.stored.buffer_items import CutItems
from tallyroll.collector.counting.ledger import NOTHING, post
from tallyroll.collector.errors import ItemsDiffer
from tallyroll.collector.rollout.source import Block, TransitionSource


class BatchOutput:
    """Holds rows that were taken from a source until they are stored and laid out as a batch.

    Args:
        run: the state of the run, whose ledger counts rows when they are stored.
        source: gathers the rows of blocks.
        rollout: the source of blocks.
        counts: computes what the ledger adds when rows are stored.
        finals: watches final observations.
        laying_out: lays rows out as they are yielded.
        in_slab: stores rows directly from a slab; None if they are gathered first.
    """

    def __init__(
        self,
        run: RunState,
        source: RowSource,
        rollout: TransitionSource,
        counts: DeliveredCounts,
        finals: FinalsWatch,
        laying_out: BatchLayout,
        in_slab: SlabOutput | None,
    ) -> None:
        self._run, self._source, self._rollout = run, source, rollout
        self._counts, self._finals = counts, finals
        self._laying_out, self._in_slab = laying_out, in_slab
        self.count = 0
        """Number of transitions that were taken from the source and are in no batch yet."""
        self.agents = 0
        """Number of agent transitions in these transitions, if the budget counts agents."""
        self._by_agent = run.options.by_agent
        self._parts: list[ArrayBatch | SlabBatch] = []
        """The parts of the next batch."""
        self._kept: list[Block] = []
        """Blocks whose large rows stay in their slab until the batch is delivered."""
        self._cut_items = CutItems()

    def add(self, block: Block, count: int, *, more: bool, yields: bool) -> None:
        """Number the ``count`` rows of ``block``, and add them to the batch.

        Large rows stay in the slab until they are stored, if possible. All rows stay there if the
        batch has no other block. ``more`` is True if the batch needs another block. ``yields`` is
        True if rows are yielded, and not only stored.
        """
        if count:
            alone, in_slab = not (more or self._parts), self._in_slab
            stays = alone and in_slab is not None and in_slab.takes(block, yields=yields)
            part: ArrayBatch | SlabBatch
            if in_slab is not None and stays and block.keep(more):
                table = in_slab.table_of(block.slab)
                part = table.part(block, self._run.lanes, by_lane=yields)
            else:
                part = self._source.part(block, self._run.lanes, alone=alone)
                if not (part.large and block.keep(more)):
                    part.settle()
            if self._finals.looks:
                self._finals.look(part)
            if self._counts.column is not None:
                post(self._run.ledger, self._counts.of_resets(part))
            if part.episodes is not None and len(part.episodes):
                counted = self._run.ledger.stored + self.count
                self._run.episodes.extend(part.episodes, counted)
            if self._by_agent:
                self.agents += self._counts.agents_of(part, count)
            if block.kept:
                self._kept.append(block)
            self._parts.append(part)
        if block.owner is not None:
            block.owner.hand_over(block)
        self.count += count

    def deliver(self, most: int, *, yields: bool) -> TensorDictBase | None:
        """Store at most ``most`` rows, and lay them out if ``yields`` is True.

        If storing fails, only committed rows are counted. If the run ends within an item of a
        TorchRL buffer, the rows of that item are discarded.

        Raises:
            LedgerError: transitions were lost or duplicated; nothing is stored.
        """
        if self._finals.looks:
            self._finals.require_true(self._run.committed)
        part: ArrayBatch | SlabBatch = merge(self._parts)  # type: ignore[arg-type]  # alone, of any kind
        rest = None
        if part.count > most and isinstance(part, ArrayBatch):  # only of a batch larger than `most`
            part, rest = part.split(most)
        count, ledger, torchrl = part.count, self._run.ledger, self._laying_out.torchrl
        entry, batch, before = self._counts.of(part, count), None, ledger.stored
        head = self._run.writer.stored_run.head
        flags = NO_FLAGS if torchrl is None else torchrl.root_flags(part)
        try:
            post(ledger, entry)
            ledger.balance(self._rollout.carried + (0 if rest is None else rest.count))
            batch = self._stored(part, flags, yields)
            ledger.publish()
        except ItemsDiffer as error:
            last = self._is_rest(count)
            post(ledger, entry.undone())
            entry = NOTHING
            if not last:
                raise
            self._discard(part, error)
        except BaseException:
            committed = self._run.writer.stored_run.head - head
            if committed < count:  # otherwise it was raised after the commit
                if ledger.stored != before:  # otherwise it was raised before the count
                    post(ledger, entry.undone())
                entry = NOTHING
                if committed and isinstance(part, ArrayBatch):
                    entry = self._counts.of(part.first(committed), committed)
                post(ledger, entry)
            raise
        finally:
            self.count -= entry.stored
            if self._by_agent:
                self.agents -= entry.agent_transitions
        self._parts = [] if rest is None else [rest]
        while self._kept:
            self._kept.pop().release()
        if batch is None or not self._laying_out.arranges:
            return batch
        return self._laying_out.arranged(batch, flags)

    def left(self, goal: int) -> int:
        """Return how many rows are still needed for ``goal`` stored rows, limited by the budget."""
        return self.within(goal - self._run.ledger.stored)

    def within(self, rows: int) -> int:
        """Limit ``rows`` so that the budget of agent transitions cannot be exceeded.

        Transitions that wait in this object count as stored.
        """
        if not self._by_agent:
            return rows
        remaining = self._run.budget.remaining(self._run.counted + self.agents)
        return rows if remaining is None else min(rows, remaining)

    @property
    def most(self) -> int:
        """Maximum number of rows to store after the waiting rows if an error ends the run."""
        run = self._run
        if self._by_agent or run.budget.total is None:
            return self.within(sys.maxsize)
        return run.budget.total - run.ledger.stored - self.count

    def drop(self) -> None:
        """Drop the rows that wait to be stored."""
        self.count, self._parts, self._kept = 0, [], []
        self.agents = 0

    def warn(self) -> None:
        """Warn once about discarded rows."""
        self._cut_items.warn()

    def _stored(
        self, part: ArrayBatch | SlabBatch, flags: Flags, yields: bool
    ) -> TensorDictBase | None:
        """Commit rows with the ledger, and return them in order if they are yielded."""
        run, writer, ledger = self._run, self._run.writer, self._run.ledger
        open_lanes = int(np.count_nonzero(run.lanes.step))
        if isinstance(part, SlabBatch):
            assert self._in_slab is not None
            self._in_slab.store(part, ledger, open_lanes)
            return self._in_slab.batch(part) if yields else None
        rows, count = self._laying_out.of(part, flags, yields=yields), part.count
        if not writer.stored_run.ready:
            excluded = self._source.plan.excluded
            writer.open(rows.rows, run.provenance, rows.inner_dims, excluded, declared=False)
        last = rows.shaped is not None and self._is_rest(count)
        writer.write(rows.rows, count, ledger, open_lanes, rows.large, rows.shaped, last=last)
        return rows.batch

    def _is_rest(self, count: int) -> bool:
        """Return True if ``count`` rows are the incomplete last batch of a run that ends."""
        ends = self._run.stopped or self._rollout.dry or self._run.met
        return ends and count != self._run.options.largest_batch

    def _discard(self, part: ArrayBatch | SlabBatch, error: ItemsDiffer) -> None:
        """Discard the last rows of the run, which do not fill an item of a replay buffer."""
        self._rollout.stop()  # the budget can no longer be met
        post(self._run.ledger, self._cut_items.discard(part, self._run.lanes, error))
        self.count -= part.count
        if self._by_agent:
            self.agents -= self._counts.agents_of(part, part.count)
