"""Rows in the memory of a slab that the extension numbers."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.batches.rows.slab_rows import SlabBatch, SlabTable
from tallyroll.collector.counting.episode_ring import EPISODE
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.native.kernel import compiled, in_order
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.rows.keys import (
    DONE,
    LANE,
    NEXT_VALID,
    POLICY_VERSION,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
)


def rows_of_slab(slab: Slab, plan: SlabPlan) -> SlabTable:
    """Return the rows of ``slab``, numbered by the extension if it can."""
    kernel = compiled()
    if kernel is None or slab.lane is not None or not plan.few_float_rewards:
        return SlabTable(slab, plan)
    return CompiledSlabTable(slab, plan, kernel)


class CompiledSlabTable(SlabTable):
    """The row columns of a slab, numbered by the extension.

    Args:
        slab: a slab with all columns in ``flat``, and only a few float rewards per lane.
        plan: the plan of the slab.
        kernel: the step kernel of the extension.
    """

    def __init__(self, slab: Slab, plan: SlabPlan, kernel: Any) -> None:
        super().__init__(slab, plan)
        self._kernel = kernel
        self._by_extension = {each.key for each in self._computed if each.by_extension}
        self._computed = [each for each in self._computed if not each.by_extension]
        self._state: LaneState | None = None

    def part(self, block: Block, state: LaneState, *, by_lane: bool) -> SlabBatch:
        """Number the rows of ``block`` as `SlabTable.part` does."""
        taken = None if block.index.size == block.taken.size else block.taken
        table = self._table if state is self._state else self.numbering(state)
        found = self._kernel.number_slots(table, block.used, taken)
        self._compute(block.used)
        begun, ended = found >> 32, found & 0xFFFF_FFFF
        return self._part(
            block,
            [self._begun[:begun].copy()] if begun else [],
            self._ended[:ended].copy() if ended else None,
            by_lane=by_lane,
            next_id=self._largest.item() + 1,
        )

    def numbering(self, state: LaneState) -> bytes:
        """Return the table for `StepKernel.number_slots` that numbers rows after ``state``."""
        if state is not self._state:
            self._state, self._table = state, self._table_for(state)
        return self._table

    def amounts(self, of_row: NDArray[np.int64], masks: Iterable[Key]) -> bytes:
        """Return a table of the ledger amounts of one row, followed by the masks of agents."""
        columns = [self.columns[key] for key in masks]
        words: Iterable[list[Any]] = (
            in_order("MASK", source=each, row_nbytes=each.nbytes // len(each)) for each in columns
        )
        return table_of([*of_row.tolist(), *chain.from_iterable(words)])

    def _table_for(self, state: LaneState) -> bytes:
        """Return the table of the addresses and numbers that the kernel needs."""
        slab, columns = self.slab, self.columns
        size = slab.slots * slab.lanes
        self._begun, self._largest = np.zeros(size, np.intp), np.zeros((), np.int64)
        self._ended = np.empty(size, EPISODE)
        own, (reward,) = state.part(slab.first_lane, slab.lanes), self._rewards
        valid = columns[NEXT_VALID] if NEXT_VALID in self._by_extension else None
        words: dict[str, Any] = {
            "lanes": slab.lanes,
            "stride": state.lanes,
            "terminated": columns[TERMINATED],
            "truncated": columns[TRUNCATED],
            "done": columns[DONE],
            "next_valid": 0 if valid is None else valid,
            "makes_done": self._makes_done,
            "makes_truncated": self._makes_truncated,
            "reward": reward,
            "reward_is_double": reward.dtype == np.float64,
            "rewards": reward.shape[2],
            "version": columns[POLICY_VERSION],
            "traj_ids": columns[TRAJ_IDS],
            "step": columns[STEP],
            "lane": columns[LANE],
            "state_id": own.traj_id,
            "state_step": own.step,
            "state_return": own.returns,
            "state_version": own.first_version,
            "state_length": own.length,
            "begun": self._begun,
            "episodes": self._ended,
            "largest": self._largest,
        }
        return table_of(in_order("NUMBERING", **words))
