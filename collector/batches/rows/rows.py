"""Gather rows from a filled slab, and number them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tallyroll.collector.batches.rows.computed_columns import ComputedColumn, computed_columns
from tallyroll.collector.counting.episode_log import episodes_of
from tallyroll.collector.counting.numbering import LaneState, number
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.run_plan import POOLED_NBYTES
from tallyroll.collector.slab.slab import SlabColumn
from tallyroll.storage.engine.kernel import compiled, copy_table
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.rows.batch_dims import BatchDims, Shapes, fitting, shapes_of
from tallyroll.storage.rows.keys import (
    DONE,
    LANE,
    NEXT,
    POLICY_VERSION,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
)
from tallyroll.storage.rows.row_refs import LARGE_NBYTES, RowRefs
from tallyroll.storage.rows.tensordict_builder import TensorDictBuilder
from tallyroll.storage.rows.transfers import move_columns

Rows = dict[Key, torch.Tensor]
"""Columns ``[row, ...]`` of equal length."""


@dataclass
class ArrayBatch:
    """Rows of a batch: columns that were copied, and large ones that are still in the slab."""

    rows: Rows
    large: dict[Key, RowRefs]
    begun: Sequence[NDArray[np.intp]] = ()
    """First rows of episodes."""
    episodes: NDArray[np.void] | None = None
    """Log entries of the episodes that ended."""

    def __len__(self) -> int:
        return self.count

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.rows[STEP])

    @property
    def ends(self) -> int:
        """Number of episodes that ended."""
        return int(np.count_nonzero(self.array(DONE)))

    def __contains__(self, key: Key) -> bool:
        return key in self.rows or key in self.large

    def array(self, key: Key) -> NDArray[Any]:
        """Return a small column ``[row, ...]``; read only."""
        return np.asarray(self.rows[key].cpu().numpy())

    def column(self, key: Key) -> NDArray[Any]:
        """Return a column ``[row, ...]``, copied if its rows are still in the slab."""
        return np.asarray(self.large[key]) if key in self.large else self.array(key)

    def at(self, key: Key, where: NDArray[np.intp]) -> NDArray[Any]:
        """Return the entries at rows ``where`` of a column that has one number per row."""
        return self.array(key).reshape(-1).take(where)

    def taker(self, key: Key) -> tuple[Callable[[NDArray[np.intp]], NDArray[Any]], int]:
        """Return a function that takes rows of a column, and the number of bytes in one row."""
        column = self.large[key] if key in self.large else self.rows[key]
        return partial(_take_from, column), column.nbytes // max(1, len(column))

    def first(self, count: int) -> "ArrayBatch":
        """Return the first ``count`` rows of the small columns."""
        return ArrayBatch({key: column[:count] for key, column in self.rows.items()}, {})

    def split(self, count: int) -> "tuple[ArrayBatch, ArrayBatch]":
        """Return the first ``count`` rows, and the rest, which is copied from the slab."""
        some, more = slice(None, count), slice(count, None)
        first, rest = (
            ArrayBatch(
                {key: column[at] for key, column in self.rows.items()},
                {key: refs[at] for key, refs in self.large.items()},
            )
            for at in (some, more)
        )
        rest.settle()
        return first, rest

    def settle(self) -> None:
        """Copy the rows that are still in the slab, before it is overwritten."""
        for key, gathered in self.large.items():
            array = np.asarray(gathered)
            self.large[key] = RowRefs([array], np.arange(len(array)))


@dataclass(frozen=True)
class RowSource:
    """Makes rows from slabs with the columns of ``plan``."""

    plan: SlabPlan

    @cached_property
    def large(self) -> tuple[Key, ...]:
        """Columns with large rows, except rewards and flags, which the run loop reads."""
        flags_and_rewards = {*self.plan.rewards, *self.plan.dones, DONE, TERMINATED, TRUNCATED}
        return tuple(
            key
            for key, column in self.plan.layout.items()
            if key not in flags_and_rewards
            and column.dtype.itemsize * math.prod(column.shape) >= LARGE_NBYTES
        )

    @cached_property
    def unobserved(self) -> tuple[Key, ...]:
        """Columns at the root and under ``"next"`` that look like observations, but are not."""
        return tuple(
            key
            for key, column in self.plan.layout.items()
            if self.plan.layout.get((NEXT, *key)) == column and key not in self.plan.observed
        )

    @cached_property
    def no_rows(self) -> Rows:
        """An empty tensor for each column, in order, with the dtype and shape of the column."""
        columns = dict(self.plan.layout)
        for key in (DONE, TERMINATED, TRUNCATED):
            columns[key] = SlabColumn(torch.bool, (1,))
        columns[TRAJ_IDS] = columns[STEP] = columns[POLICY_VERSION] = SlabColumn(torch.int64, ())
        columns[LANE] = SlabColumn(torch.int32, ())
        for computed in self._computed:
            columns[computed.key] = SlabColumn(computed.dtype, ())
        return {key: torch.zeros((0, *c.shape), dtype=c.dtype) for key, c in columns.items()}

    @cached_property
    def inner_dims(self) -> Shapes:
        """The batch size after the rows of each nested TensorDict that has one."""
        return inner_dims_of(self.no_rows, self.plan.batch_dims)

    @cached_property
    def _computed(self) -> Sequence[ComputedColumn]:
        return computed_columns(self.plan)

    @cached_property
    def _pools(self) -> dict[Key, BufferPool]:
        """One pool per column, because a caller may keep rewards and drop observations."""
        return {}

    def part(self, block: Block, state: LaneState, *, alone: bool = False) -> ArrayBatch:
        """Gather the rows of ``block``, number them, and move ``state`` past them.

        ``alone`` is True if the rows are a whole batch, whose memory is reused after the caller
        drops it.
        """
        slab = block.slab
        large = {
            key: RowRefs([slab.flat[key]], block.index) for key in self.large if key in slab.flat
        }
        get = self._take_pooled if alone else take
        flags_and_rewards = {} if slab.on_host else block.fetched(self.plan.flags_and_rewards)
        # Many functions read or change the flags, so the flags stay on the host. `as_tensordict`
        # copies them to the device of the batch, together with the ids.
        flags = {
            key: each for key, each in flags_and_rewards.items() if key not in self.plan.rewards
        }
        rows = {
            key: flags[key] if key in flags else get(block, key)
            for key in self.plan.layout
            if key not in large
        }
        _complete_flags(rows)
        rewards = self._rewards({**rows, **flags_and_rewards})
        ended = rows[DONE].numpy()[:, 0]
        version = slab.version.reshape(-1).take(block.index)
        numbers = number(state, block.lane, ended, rewards, version)
        rows[TRAJ_IDS] = torch.from_numpy(numbers.traj_ids)
        rows[STEP] = torch.from_numpy(numbers.step)
        rows[POLICY_VERSION] = torch.from_numpy(version)
        rows[LANE] = torch.from_numpy(block.lane)
        for computed in self._computed:
            values = computed.compute(ArrayBatch(rows, large).column)
            rows[computed.key] = torch.from_numpy(values).to(computed.dtype)
        at, returns, lengths, first = numbers.ended
        episodes = episodes_of(
            numbers.traj_ids[at],
            block.lane[at],
            returns,
            lengths,
            rows[TERMINATED].reshape(-1).numpy()[at],
            first,
            version[at],
            block.numbers_of(block.index[at]),
        )
        return ArrayBatch(rows, large, [numbers.begun], episodes)

    def _take_pooled(self, block: Block, key: Key) -> torch.Tensor:
        """Copy rows as :func:`take` does, but reuse memory for large columns."""
        column, index = block.slab.flat.get(key), block.index
        if column is None or len(index) * column[:1].nbytes < POOLED_NBYTES:
            return take(block, key)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = BufferPool([(column.dtype, column.shape[1:])])
        (out,) = pool.arrays((len(index),))
        kernel = compiled()
        if kernel is None:
            # "clip" copies straight to `out`; the indices are always within bounds.
            column.take(index, axis=0, out=out, mode="clip")
        else:
            table = copy_table([out], [column], [column[:1].nbytes])
            kernel.gather_rows(table, 0, index, len(column))
        return torch.from_numpy(out)

    def _rewards(self, rows: Rows) -> NDArray[np.float64]:
        """Return the reward of each row, summed over agents and objectives."""
        total: NDArray[np.float64] | float = 0.0
        for key in self.plan.rewards:
            reward = rows[key]
            flat = reward.to(torch.float64).numpy().reshape(len(reward), -1)
            with np.errstate(all="ignore"):  # infinite rewards of both signs
                total = total + (flat[:, 0] if flat.shape[1] == 1 else flat.sum(axis=1))
        return np.asarray(total, np.float64)


def _complete_flags(rows: Rows) -> None:
    """Add truncated and done if they are missing."""
    terminated = rows[TERMINATED]
    if TRUNCATED not in rows:
        rows[TRUNCATED] = rows[DONE] & ~terminated
    rows[DONE] = rows[DONE] if DONE in rows else terminated | rows[TRUNCATED]


def take(block: Block, key: Key) -> torch.Tensor:
    """Copy the rows of ``block`` from a column of its slab."""
    slab = block.slab
    if key in slab.flat:
        # On rows of uint8, NumPy gathers up to 8 times faster than torch.
        return torch.from_numpy(slab.flat[key].take(block.index, axis=0))
    column = slab.columns[key]
    if block.is_whole:
        lanes_first = column[: block.used].transpose(0, 1)
        return lanes_first.clone(memory_format=torch.contiguous_format).flatten(0, 1)
    return column.flatten(0, 1).index_select(0, block.index_on(column.device))


def _take_from(column: torch.Tensor | RowRefs, rows: NDArray[np.intp]) -> NDArray[Any]:
    if isinstance(column, RowRefs):
        return np.asarray(column[rows])
    if column.device.type == "cpu" and column.dtype is not torch.bfloat16:
        taken: NDArray[Any] = column.numpy().take(rows, axis=0)
        return taken
    some = column.index_select(0, torch.from_numpy(rows).to(column.device)).cpu().contiguous()
    octets: NDArray[Any] = some.reshape(len(rows), -1).view(torch.uint8).numpy()
    return octets


def merge(parts: Sequence[ArrayBatch]) -> ArrayBatch:
    """Join parts that follow one another in time, and order their rows by lane."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    joined = {key: torch.cat([part.rows[key] for part in parts]) for key in first.rows}
    order = np.argsort(joined[LANE].numpy(), kind="stable")
    at = {
        device: torch.from_numpy(order).to(device)
        for device in {column.device for column in joined.values()}
    }
    rows = {key: column.index_select(0, at[column.device]) for key, column in joined.items()}
    large = {key: RowRefs.joined([part.large[key] for part in parts], order) for key in first.large}
    return ArrayBatch(rows, large)


def inner_dims_of(rows: Rows, batch_dims: BatchDims) -> Shapes:
    """Return the batch size after the rows of each nested TensorDict whose columns have one."""
    shapes = {key: tuple(column.shape[1:]) for key, column in rows.items()}
    return shapes_of(fitting(batch_dims, shapes), shapes)


def as_tensordict(
    rows: Mapping[Key, torch.Tensor], device: torch.device | None, inner_dims: Shapes
) -> TensorDict:
    """Return rows as a TensorDict ``[row]`` on ``device``.

    ``inner_dims`` are further batch dimensions of nested TensorDicts, parents first.
    """
    if device is not None:
        rows = move_columns(rows, device)
    columns = list(rows.values())
    nest = TensorDictBuilder([(key, column.dtype) for key, column in rows.items()], inner_dims)
    td = nest.of_tensors(columns, (len(columns[0]) if columns else 0,))
    return td if device is None else td.to(device, non_blocking=True)  # nothing is left to copy
