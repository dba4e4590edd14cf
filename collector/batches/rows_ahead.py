"""Rows that enter a batch while the system computes its next step, where that leaves time."""

from collections.abc import Mapping

import torch

from tallyroll.collector.batches.rows import POOLED_NBYTES, Rows, RowSource
from tallyroll.collector.batches.value_checks import RangeChecks
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.lanes import Lanes, SystemLanes
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.slab.progress import FILLED
from tallyroll.collector.slab.slab import Array, Slab
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.rows.keys import Key


class RowsAhead:
    """Copies slots of a slab to the memory of a batch as they are completed, lane by lane.

    That is for a batch which is ``slots`` slots, all of whose lanes are rows. Where it comes out
    otherwise nothing is lost but time: its rows are gathered from the slab.

    Args:
        slab: whose slots are complete when ``board`` says so, and stay as they are then.
        board: see :mod:`tallyroll.collector.slab.progress`.
        slots: of a batch.
        columns: ``[time, lane, ...]``, of the slab.
    """

    def __init__(
        self, slab: Slab, board: memoryview, slots: int, columns: Mapping[Key, Array]
    ) -> None:
        self._slab, self._board, self._slots = slab, board, slots
        self._columns = columns
        self._pools = [BufferPool([(each.dtype, each.shape[2:])]) for each in columns.values()]
        self._targets: list[Array] = []
        """Where rows go, ``[lane, time, ...]``; empty: no such batch is under way."""
        self._copied = 0
        self.checks: RangeChecks | None = None
        """What looks at the values of these columns."""

    @classmethod
    def of(
        cls, lanes: Lanes, board: memoryview, plan: SlabPlan, options: Options
    ) -> "RowsAhead | None":
        """None where the system does not wait, or where batches are other ones, or small."""
        if not (isinstance(lanes, SystemLanes) and lanes.env.system.waits):
            return None
        slab, rows = lanes.slab, options.frames_per_batch
        slots, rest = divmod(rows, slab.lanes)
        if rest or slots > slab.slots or not lanes.all_are_transitions:
            return None
        hidden = () if options.yield_large else RowSource(plan).large
        columns = {
            key: slab.arrays[key]
            for key, flat in slab.flat.items()
            if key not in hidden and rows * flat[:1].nbytes >= POOLED_NBYTES
        }
        if not columns:
            return None
        ahead = cls(slab, board, slots, columns)
        lanes.cursor.while_waiting = ahead.proceed
        return ahead

    def begin(self, rows: int) -> None:
        """A batch of ``rows`` begins with the slab's first slot."""
        lanes = self._slab.lanes
        self._forget()
        if rows == self._slots * lanes:
            for column, pool in zip(self._columns.values(), self._pools, strict=True):
                (memory,) = pool.arrays((rows,))
                self._targets.append(memory.reshape(lanes, self._slots, *column.shape[2:]))

    def proceed(self) -> None:
        """Copy the slots that were completed since."""
        start, stop = self._copied, self._board[FILLED]
        if self._targets and start < stop <= self._slots:
            for column, target in zip(self._columns.values(), self._targets, strict=True):
                for at in range(start, stop):
                    target[:, at] = column[at]
            if self.checks is not None:
                self.checks.look(self._slab, self._columns, start, stop)
            self._copied = stop

    def take(self, block: Block) -> Rows:
        """The columns of ``block`` where it is all of the batch; else none."""
        rows: Rows = {}
        if block.slab is self._slab and len(block) == self._slots * self._slab.lanes:
            self.proceed()
            if self._copied == self._slots == block.used:
                flat = (each.reshape(len(block), *each.shape[2:]) for each in self._targets)
                rows = dict(zip(self._columns, map(torch.from_numpy, flat), strict=True))
        self._forget()
        return rows

    def _forget(self) -> None:
        self._copied, self._targets = 0, []
        if self.checks is not None:
            self.checks.forget()
