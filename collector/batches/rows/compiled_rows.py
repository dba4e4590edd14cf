"""Rows that lie in a slab, and that the extension numbers."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.batches.rows.slab_rows import SlabPart, SlabRows
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


def rows_of_slab(slab: Slab, plan: SlabPlan) -> SlabRows:
    """Return the rows of ``slab``, numbered by the extension if it can."""
    kernel = compiled()
    if kernel is None or slab.lane is not None or not plan.few_float_rewards:
        return SlabRows(slab, plan)
    return CompiledRows(slab, plan, kernel)


class CompiledRows(SlabRows):
    """The columns of the rows of a slab, numbered by the extension.

    Args:
        slab: a slab with all columns in ``flat``, and few floats as the rewards of a lane.
        plan: the plan of the slab.
        kernel: the extension.
    """

    def __init__(self, slab: Slab, plan: SlabPlan, kernel: Any) -> None:
        super().__init__(slab, plan)
        self._kernel = kernel
        self._by_extension = {each.key for each in self._computed if each.by_extension}
        self._computed = [each for each in self._computed if not each.by_extension]
        self._state: LaneState | None = None

    def part(self, block: Block, state: LaneState, *, by_lane: bool) -> SlabPart:
        """Number the rows of ``block`` as `SlabRows.part` does."""
        taken = None if block.index.size == block.taken.size else block.taken
        table = self._table if state is self._state else self.numbering(state)
        found = self._kernel.number_slots(table, block.used, taken)
        self._compute(block.used)
        begun, ended = found >> 32, found & 0xFFFF_FFFF
        part = self._part(
            block,
            [self._begun[:begun].copy()] if begun else [],
            self._ended[:ended].copy() if ended else None,
            by_lane=by_lane,
        )
        part.next_id = self._largest.item() + 1
        return part

    def numbering(self, state: LaneState) -> bytes:
        """Return the table of ``state`` that `StepKernel.number_slots` takes."""
        if state is not self._state:
            self._state, self._table = state, self._table_for(state)
        return self._table

    def places(self, keys: Iterable[Key]) -> bytes:
        """Return the address of each column, and the bytes of a row of it, as a table."""
        columns = [self.columns[key] for key in keys]
        words = (
            in_order("MASK", source=_address_of(each), row_nbytes=each.nbytes // len(each))
            for each in columns
        )
        return table_of(chain.from_iterable(words))

    def _table_for(self, state: LaneState) -> bytes:
        """Return the table of the addresses and numbers that the kernel needs."""
        slab, columns = self.slab, self.columns
        size = slab.slots * slab.lanes
        self._begun, self._largest = np.zeros(size, np.intp), np.zeros((), np.int64)
        self._ended = np.empty(size, EPISODE)
        own, (reward,) = state.part(slab.first_lane, slab.lanes), self._rewards
        address = _address_of
        valid = columns[NEXT_VALID] if NEXT_VALID in self._by_extension else None
        words: dict[str, int] = {
            "lanes": slab.lanes,
            "stride": state.lanes,
            "terminated": address(columns[TERMINATED]),
            "truncated": address(columns[TRUNCATED]),
            "done": address(columns[DONE]),
            "next_valid": 0 if valid is None else address(valid),
            "makes_done": self._makes_done,
            "makes_truncated": self._makes_truncated,
            "reward": address(reward),
            "reward_is_double": reward.dtype == np.float64,
            "rewards": reward.shape[2],
            "version": address(columns[POLICY_VERSION]),
            "traj_ids": address(columns[TRAJ_IDS]),
            "step": address(columns[STEP]),
            "lane": address(columns[LANE]),
            "state_id": address(own.traj_id),
            "state_step": address(own.step),
            "state_return": address(own.returns),
            "state_version": address(own.first_version),
            "state_length": address(own.length),
            "begun": address(self._begun),
            "episodes": address(self._ended),
            "largest": address(self._largest),
        }
        return table_of(in_order("NUMBERING", **words))


def _address_of(array: NDArray[Any]) -> int:
    address: int = array.ctypes.data
    return address
