"""Rows in the memory of a slab, which a storage copies without gathering them first.

The columns that a collector adds (ids, steps, …) have the same slots as the columns of the slab. So
one index finds a row in all columns, and a storage copies rows by address.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.batches.rows.computed_columns import computed_columns
from tallyroll.collector.counting.episode_log import episodes_of
from tallyroll.collector.counting.episode_ring import EPISODE
from tallyroll.collector.counting.numbering import EndedEpisodes, LaneState, number, number_slot
from tallyroll.collector.native.kernel import compiled, in_order
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.run_plan import FEW_SLOTS
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.columns import FixedRows, RowIndex
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.rows.dtypes import in_float64
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
from tallyroll.storage.rows.schema import Schema

Array = NDArray[Any]
Numbered = tuple[list[NDArray[np.intp]], list[EndedEpisodes]]
"""The first rows of episodes, and the ended episodes, with rows as indices into the columns."""


class SlabTable:
    """The row columns of a slab ``[slots * lanes, ...]``, numbered by NumPy.

    Args:
        slab: a slab with all columns in ``flat``.
        plan: the plan of the slab.
    """

    def __init__(self, slab: Slab, plan: SlabPlan) -> None:
        self.slab = slab
        self.columns: dict[Key, Array] = {key: slab.flat[key] for key in plan.layout}
        self._excluded = plan.excluded
        self._slots: dict[Key, Array] = {}
        """Columns ``[slot, lane]`` that this object fills."""
        shape = slab.slots, slab.lanes
        for key, dtype in ((TRAJ_IDS, np.int64), (STEP, np.int64), (LANE, np.int32)):
            self._slots[key] = np.zeros(shape, dtype)
            self.columns[key] = self._slots[key].reshape(-1)
        if slab.lane is None:
            self._slots[LANE][:] = slab.first_lane + np.arange(slab.lanes)
        self.columns[POLICY_VERSION] = slab.version.reshape(-1)
        for key in (DONE, TRUNCATED):
            if key not in self.columns:
                self.columns[key] = np.zeros((slab.slots * slab.lanes, 1), np.bool_)
            self._slots[key] = self.columns[key].reshape(shape)
        self._terminated = self.columns[TERMINATED].reshape(shape)
        self._makes_done = DONE not in plan.layout
        self._makes_truncated = TRUNCATED not in plan.layout
        self._computed = computed_columns(plan)
        """The columns that :meth:`_compute` fills."""
        for computed in self._computed:
            zeros = torch.zeros(slab.slots * slab.lanes, dtype=computed.dtype)
            self.columns[computed.key] = zeros.numpy()
        self._rewards = [self.columns[key].reshape(*shape, -1) for key in plan.rewards]
        one = len(self._rewards) == 1 and self._rewards[0].shape[2] == 1
        self._payoff = self._rewards[0][..., 0] if one else None
        self.as_stored: FixedRows | None = None
        """The columns in the form that a storage takes; None before :meth:`fixed` is called."""

    def fixed(self, schema: Schema) -> FixedRows:
        """Return the columns in the form that a storage of ``schema`` takes."""
        if self.as_stored is None:
            stored = {k: each for k, each in self.columns.items() if k not in self._excluded}
            self.as_stored = FixedRows(schema, stored)
        return self.as_stored

    def part(self, block: Block, state: LaneState, *, by_lane: bool) -> "SlabBatch":
        """Number the rows of ``block``, and move ``state`` past them.

        ``by_lane`` is True if rows are ordered by lane, False if they are ordered by slot.
        """
        used, slab = block.used, self.slab
        terminated, over = self._terminated[:used], self._slots[DONE][:used]
        if self._makes_truncated:
            np.greater(over, terminated, out=self._slots[TRUNCATED][:used])
        if self._makes_done:
            np.logical_or(terminated, self._slots[TRUNCATED][:used], out=over)
        few = slab.lane is None and used <= FEW_SLOTS
        number = self._number_slots if few else self._number_block
        begun, ended = number(block, state)
        self._compute(used)
        part = self._part(block, begun, self._episodes(block, ended), by_lane=by_lane)
        part.find_next_id()
        return part

    def _part(
        self,
        block: Block,
        begun: list[NDArray[np.intp]],
        episodes: NDArray[np.void] | None,
        *,
        by_lane: bool,
        next_id: int = 0,
    ) -> "SlabBatch":
        used = block.used
        index: RowIndex = block.index
        in_order = used == 1 and self.slab.lane is None
        if len(index) == block.taken.size and (in_order or not by_lane):
            index = range(len(index))
        elif used > 1 and not by_lane:
            index = block.taken.reshape(-1).nonzero()[0]
        if by_lane and not in_order and episodes is not None:
            episodes = episodes[np.argsort(episodes["lane"], kind="stable")]
        ends = 0 if episodes is None else len(episodes)
        return SlabBatch(self, index, len(index), begun, episodes, ends, next_id)

    def _compute(self, used: int) -> None:
        """Fill the computed columns of the first ``used`` slots."""
        rows = used * self.slab.lanes
        for each in self._computed:
            self.columns[each.key][:rows] = each.compute(lambda key: self.columns[key][:rows])

    # --- numbers ----------------------------------------------------------------------------------

    def _episodes(self, block: Block, ended: list[EndedEpisodes]) -> NDArray[np.void] | None:
        """Return the log entries of ``ended`` episodes of ``block``; None if there are none."""
        if not ended:
            return None
        every = ended[0] if len(ended) == 1 else map(np.concatenate, zip(*ended, strict=True))
        at, returns, lengths, first = every
        ids, lane, over, last = (
            self.columns[key].reshape(-1).take(at)
            for key in (TRAJ_IDS, LANE, TERMINATED, POLICY_VERSION)
        )
        numbers = block.numbers_of(at)
        return episodes_of(ids, lane, returns, lengths, over, first, last, numbers)

    def _number_slots(self, block: Block, state: LaneState) -> Numbered:
        lanes, whole = self.slab.lanes, len(block) == block.taken.size
        state = state.part(self.slab.first_lane, lanes)
        ids, step, over = self._slots[TRAJ_IDS], self._slots[STEP], self._slots[DONE]
        reward, version = self._reward(block.used), self.slab.version
        begun, ended = [], []
        for at in range(block.used):
            begins, over_here = number_slot(
                state,
                None if whole else block.taken[at],
                over[at],
                reward[at],
                version[at],
                ids[at],
                step[at],
            )
            if begins is not None:
                begun.append(begins.nonzero()[0] + at * lanes)
            if over_here is not None:
                ended.append(over_here._replace(at=over_here.at + at * lanes))
        return begun, ended

    def _number_block(self, block: Block, state: LaneState) -> Numbered:
        index, over = block.index, self.columns[DONE].reshape(-1)
        reward = in_float64(self._reward(block.used).reshape(-1).take(index))
        version = self.columns[POLICY_VERSION].take(index)
        numbers = number(state, block.lane, over.take(index), reward, version)
        self.columns[TRAJ_IDS][index] = numbers.traj_ids
        self.columns[STEP][index] = numbers.step
        if self.slab.lane is not None:
            self.columns[LANE][index] = block.lane
        at, returns, lengths, first = numbers.ended
        at = index[at]
        order = np.argsort(at)
        ended = EndedEpisodes(at[order], returns[order], lengths[order], first[order])
        return [index[numbers.begun]], [ended]

    def _reward(self, used: int) -> Array:
        """Return the rewards ``[used, lane]``, summed over agents and objectives."""
        if self._payoff is not None:
            return self._payoff[:used]
        total = np.zeros((used, self.slab.lanes))
        for reward in self._rewards:
            with np.errstate(all="ignore"):  # infinite rewards of both signs
                total += in_float64(reward[:used]).sum(axis=2)
        return total


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

    def part(self, block: Block, state: LaneState, *, by_lane: bool) -> "SlabBatch":
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


def rows_of_slab(slab: Slab, plan: SlabPlan) -> SlabTable:
    """Return the rows of ``slab``, numbered by the extension if it can."""
    kernel = compiled()
    if kernel is None or slab.lane is not None or not plan.few_float_rewards:
        return SlabTable(slab, plan)
    return CompiledSlabTable(slab, plan, kernel)


@dataclass
class SlabBatch:
    """Numbered rows of a slab, gathered when a caller reads them."""

    table: SlabTable
    index: RowIndex
    count: int
    """Number of rows."""
    begun: list[NDArray[np.intp]]
    """First rows of episodes, as indices into the columns of ``table``."""
    episodes: NDArray[np.void] | None
    """Log entries of the episodes that ended; None if none did."""
    ends: int
    """Number of episodes that ended."""
    next_id: int = 0
    """One more than the largest id of trajectories that begin in these rows; 0 if none does."""

    def __len__(self) -> int:
        return self.count

    def __contains__(self, key: Key) -> bool:
        return key in self.table.columns

    def find_next_id(self) -> None:
        """Set ``next_id`` from the ids of the trajectories that begin in these rows."""
        begins = self.array(STEP) == 0
        if begins.any():
            self.next_id = int(self.array(TRAJ_IDS)[begins].max()) + 1

    def array(self, key: Key) -> Array:
        """Return the rows of a column ``[row, ...]``; read only."""
        column, index = self.table.columns[key], self.index
        if isinstance(index, range):
            return column[index.start : index.stop]
        return column.take(index, axis=0)

    def at(self, key: Key, where: NDArray[np.intp]) -> Array:
        """Return entries of a column that has one number per row, at indices such as ``begun``."""
        return self.table.columns[key].reshape(-1).take(where)

    def taker(self, key: Key) -> tuple[Callable[[NDArray[np.intp]], Array], int]:
        """Return a function that takes rows of a column, and the number of bytes in one row."""
        column, index = self.table.columns[key], np.asarray(self.index)
        nbytes = column.itemsize * int(np.prod(column.shape[1:]))
        return (lambda rows: column.take(index[rows], axis=0)), nbytes
