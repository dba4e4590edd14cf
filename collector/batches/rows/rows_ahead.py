"""Rows that are copied to a batch while the system computes its next step."""

from collections.abc import Mapping

import torch

from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.rows.rows import Rows, RowSource
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.lanes import Lanes, SystemLanes
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.run_plan import POOLED_NBYTES, WIDE_NBYTES, Decision, copying_ahead
from tallyroll.collector.slab.progress import FILLED
from tallyroll.collector.slab.slab import Array, Slab
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.rows.keys import Key


class RowsAhead:
    """Copy slots of a slab to the memory of a batch as they are completed, lane by lane.

    A batch profits if it is ``slots`` slots, all of whose lanes are rows. The rows of any other
    batch are gathered from the slab, and only the time of copying is lost.

    Args:
        slab: its slots are complete when ``board`` says so, and do not change after that.
        board: see :mod:`tallyroll.collector.slab.progress`.
        slots: number of slots of a batch.
        columns: ``[time, lane, ...]``, of the slab.
    """

    def __init__(
        self, slab: Slab, board: memoryview, slots: int, columns: Mapping[Key, Array]
    ) -> None:
        self._slab, self._board, self._slots = slab, board, slots
        self._columns = columns
        self._pools = [BufferPool([(each.dtype, each.shape[2:])]) for each in columns.values()]
        self._targets: list[Array] = []
        """The memory of the batch, ``[lane, time, ...]``; empty: no such batch is under way."""
        self._copied = 0
        self._checks = RangeChecks((), "off")

    def begin(self, rows: int, checks: RangeChecks) -> None:
        """Begin a batch of ``rows`` at the slab's first slot; ``checks`` check its slots early."""
        lanes = self._slab.lanes
        self.end()
        self._checks = checks
        if rows == self._slots * lanes:
            for column, pool in zip(self._columns.values(), self._pools, strict=True):
                (memory,) = pool.arrays((rows,))
                self._targets.append(memory.reshape(lanes, self._slots, *column.shape[2:]))

    def proceed(self) -> None:
        """Copy the slots that were completed since the last call."""
        start, stop = self._copied, self._board[FILLED]
        if self._targets and start < stop <= self._slots:
            for column, target in zip(self._columns.values(), self._targets, strict=True):
                for at in range(start, stop):
                    target[:, at] = column[at]
            self._checks.look(self._slab, self._columns, start, stop)
            self._copied = stop

    def take(self, block: Block) -> Rows:
        """End the batch, and return its copied columns if ``block`` is all of it; else none."""
        rows: Rows = {}
        whole = len(block) == self._slots * self._slab.lanes and block.used == self._slots
        if self._targets and whole and block.slab is self._slab:
            self.proceed()
            flat = (each.reshape(len(block), *each.shape[2:]) for each in self._targets)
            rows = dict(zip(self._columns, map(torch.from_numpy, flat), strict=True))
        self.end()
        return rows

    def end(self) -> None:
        """End the batch under way, and drop its copied rows."""
        self._copied, self._targets = 0, []
        self._checks.forget()


def planned(
    lanes: Lanes, board: memoryview, plan: SlabPlan, options: Options
) -> tuple[Decision, RowsAhead | None]:
    """Choose whether rows of ``lanes`` enter a batch ahead; if so, return what copies them too."""
    slots, rest = divmod(options.frames_per_batch, lanes.slab.lanes)
    columns = _wide(lanes, plan, options)
    decision = copying_ahead(
        waits=isinstance(lanes, SystemLanes) and lanes.stepper.system.waits,
        whole=not rest and not options.by_agent,
        slots=slots,
        most=lanes.slab.slots,
        transitions=lanes.all_are_transitions,
        wide=bool(columns),
    )
    if decision.way != "ahead" or not isinstance(lanes, SystemLanes):
        return decision, None
    ahead = RowsAhead(lanes.slab, board, slots, columns)
    lanes.cursor.while_waiting = ahead.proceed
    return decision, ahead


def _wide(lanes: Lanes, plan: SlabPlan, options: Options) -> dict[Key, Array]:
    """Return the columns that are worth copying ahead."""
    slab, rows = lanes.slab, options.frames_per_batch
    large = RowSource(plan).large  # a batch gets all of these in the same way
    return {
        key: slab.arrays[key]
        for key, flat in slab.flat.items()
        if (options.columns.yield_large if key in large else _pays(rows, flat[:1].nbytes))
    }


def _pays(rows: int, nbytes: int) -> bool:
    return nbytes >= WIDE_NBYTES and rows * nbytes >= POOLED_NBYTES
