"""A batch is delivered: merged, counted, stored, and given the layout in which it is yielded."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from tallyroll.collector.batches.cuts import own_flags, with_cuts, without_cuts
from tallyroll.collector.batches.layouts import by_lane, split_trajectories
from tallyroll.collector.batches.rows import (
    Part,
    Rows,
    RowSource,
    as_tensordict,
    behind_rows,
    merge,
)
from tallyroll.collector.batches.writer import BatchWriter, Columns
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options import Options, Postproc
from tallyroll.collector.rollout.os_signals import admitted
from tallyroll.collector.rollout.rollout import Source
from tallyroll.collector.slab.slab import SlabColumn
from tallyroll.storage.engine.pool import BufferPool
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


class BatchOutput:
    """Takes the parts of a batch and returns what is yielded.

    Args:
        options: of the run.
        writer: where rows are stored before they are yielded.
        source: gives the schema of rows.
        lanes: of the run.
        rollout: where transitions wait for the next batch.
        ledger: counted up with every batch.
        provenance: written with the schema.
        ticks: simulator ticks a transition, or the column that counts them.
        count_random: whether random actions are an exception that is counted.
    """

    def __init__(
        self,
        options: Options,
        writer: BatchWriter,
        source: RowSource,
        lanes: int,
        rollout: Source,
        ledger: Ledger,
        provenance: Mapping[str, Any],
        *,
        ticks: int | Key,
        count_random: bool,
    ) -> None:
        self._options, self._writer, self._lanes = options, writer, lanes
        self._rollout, self._ledger, self.provenance = rollout, ledger, provenance
        self._ticks, self._count_random = ticks, count_random
        self._dones, self._behind = source.plan.dones, source.behind
        self._keys = tuple(source.schema())
        self._large = source.large
        large = [source.plan.layout[key] for key in self._large] if options.yield_large else []
        # What NumPy has no dtype for was copied as small columns are.
        self._pool = BufferPool(
            [(NUMPY[c.dtype], c.shape) for c in large if c.dtype is not torch.bfloat16]
        )
        self.batches = 0
        if options.postproc is None:
            writer.open(source.schema(), provenance, source.behind)

    def deliver(self, parts: Sequence[Part], open_lanes: int) -> TensorDictBase:
        """Store the rows of ``parts``, which follow one another in time, as one batch.

        ``open_lanes`` trajectories go on behind it. Where storing fails, only rows that were
        committed before it did are counted.

        Raises:
            LedgerError: before anything is stored: transitions were lost or doubled on their way.
        """
        part = merge(parts)
        rows, large = self._parted(part)
        before, head = self._ledger.counts(), self._writer.head
        try:
            self._count(rows)
            self._ledger.balance(self._rollout.held)
            if self._options.postproc is None:
                self._writer.write(rows, len(rows[STEP]), self._ledger, open_lanes, large)
                batch: TensorDictBase = self._as_batch(rows)
            else:
                batch = self._postprocessed(rows, self._options.postproc, open_lanes)
        except BaseException:
            committed = self._writer.head - head
            if committed < len(rows[STEP]):  # else it was raised behind the commit
                self._ledger.load(before)
                self._count({key: column[:committed] for key, column in rows.items()})
            raise
        self.batches += 1
        if self._options.layout == "lanes":
            return by_lane(batch, self._lanes)
        if self._options.layout == "trajectories":
            return split_trajectories(batch)
        return batch

    def _parted(self, part: Part) -> tuple[Rows, Columns]:
        """The rows that are yielded, and the large columns that are only stored."""
        if not self._large:
            return part.rows, {}
        rows = dict(part.rows)
        if not self._options.yield_large:
            copied = {key: rows.pop(key) for key in self._large if key in rows}
            return rows, {**part.large, **copied}
        if part.large:
            # Memory that was used before costs a fifth of new memory.
            arrays = self._pool.arrays((len(part),))
            for (key, gathered), array in zip(part.large.items(), arrays, strict=True):
                gathered.copy_to(array)
                rows[key] = torch.from_numpy(array)
            rows = {key: rows[key] for key in self._keys}
        return rows, {}

    def _as_batch(self, rows: Rows) -> TensorDictBase:
        device = self._options.storing_device
        return as_tensordict(with_cuts(rows, self._dones), device, self._behind)

    def _postprocessed(self, rows: Rows, postproc: Postproc, open_lanes: int) -> TensorDictBase:
        own = own_flags(rows, self._dones) if self._writer.stores else None
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
            schema = {
                key: SlabColumn(leaf.dtype, tuple(leaf.shape[1:])) for key, leaf in stored.items()
            }
            self._writer.open(schema, self.provenance, behind_rows(schema, batch_dims_of(batch)))
        self._writer.write(stored, count, self._ledger, open_lanes, {})
        return batch

    def _count(self, rows: Rows) -> None:
        ledger, count = self._ledger, len(rows[STEP])
        ledger.stored += count
        ledger.episodes_complete += int(rows[DONE].sum())
        if self._count_random:
            ledger.random += int((rows[POLICY_VERSION] == RANDOM_VERSION).sum())
        if isinstance(self._ticks, int):
            ledger.ticks += count * self._ticks
        else:
            before, after = rows[self._ticks], rows[(NEXT, *self._ticks)]
            ledger.ticks += int((after - before).sum())
