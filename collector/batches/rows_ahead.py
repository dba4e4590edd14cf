"""Rows that enter a batch while the system computes its next step, where that leaves time."""

from collections.abc import Mapping

import torch

from tallyroll.collector.batches.rows import POOLED_NBYTES, Rows, RowSource
from tallyroll.collector.batches.slab_rows import FEW_SLOTS
from tallyroll.collector.batches.value_checks import RangeChecks
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.lanes import Lanes, SystemLanes
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.slab.progress import FILLED
from tallyroll.collector.slab.slab import Array, Slab
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.rows.keys import Key

WIDE_NBYTES = 2**9
"""Rows that are narrower take less time to gather at once than slot by slot."""


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
        self._checks = RangeChecks((), "off")

    @classmethod
    def of(
        cls, lanes: Lanes, board: memoryview, plan: SlabPlan, options: Options
    ) -> "RowsAhead | None":
        """None where the system does not wait, or where batches are other ones, or small."""
        if not (isinstance(lanes, SystemLanes) and lanes.env.system.waits):
            return None
        slab, rows = lanes.slab, options.frames_per_batch
        slots, rest = divmod(rows, slab.lanes)
        if rest or not FEW_SLOTS < slots <= slab.slots or not lanes.all_are_transitions:
            return None
        large = RowSource(plan).large  # all of which a batch is given in the same way
        columns = {
            key: slab.arrays[key]
            for key, flat in slab.flat.items()
            if (options.yield_large if key in large else _pays(rows, flat[:1].nbytes))
        }
        if not columns:
            return None
        ahead = cls(slab, board, slots, columns)
        lanes.cursor.while_waiting = ahead.proceed
        return ahead

    def begin(self, rows: int, checks: RangeChecks) -> None:
        """A batch of ``rows`` begins with the slab's first slot; ``checks`` look at it early."""
        lanes = self._slab.lanes
        self.end()
        self._checks = checks
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
            self._checks.look(self._slab, self._columns, start, stop)
            self._copied = stop

    def take(self, block: Block) -> Rows:
        """The columns of ``block`` where it is all of the batch; else none. It ends the batch."""
        rows: Rows = {}
        whole = len(block) == self._slots * self._slab.lanes and block.used == self._slots
        if self._targets and whole and block.slab is self._slab:
            self.proceed()
            flat = (each.reshape(len(block), *each.shape[2:]) for each in self._targets)
            rows = dict(zip(self._columns, map(torch.from_numpy, flat), strict=True))
        self.end()
        return rows

    def end(self) -> None:
        """No batch is under way, and what was copied of it is not needed."""
        self._copied, self._targets = 0, []
        self._checks.forget()


def _pays(rows: int, nbytes: int) -> bool:
    return nbytes >= WIDE_NBYTES and rows * nbytes >= POOLED_NBYTES
