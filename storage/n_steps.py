"""n-step returns: rewards and next observations from further along the trajectory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.rows.indexing import resolve
from tallyroll.storage.rows.keys import (
    CUT,
    NEXT,
    NEXT_VALID,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    spell,
)
from tallyroll.storage.trajectories.columns import flags_of

if TYPE_CHECKING:
    from tallyroll.storage.readers.row_reader import RowReader
    from tallyroll.storage.stores.row_store import RowStore


_ORIGINAL: Key = (NEXT, "original_reward")
_STEPS, _GAMMA = "steps_to_next_obs", "gamma"
_FLAGS = (TERMINATED, TRUNCATED)
_PATIENCE_SECONDS = 1.0


def n_step(storage: RowStore, index: Any, n: int, gamma: float) -> TensorDict:
    """Rows whose reward and next observation are those of up to ``n`` steps.

    Each row goes on along its trajectory, wherever those rows lie, until ``n`` rewards are
    summed, the trajectory ends, or no more of it is stored. ``("next", "reward")`` is the sum of
    gamma^k times the k-th reward; everything else under ``"next"``, done, terminated and
    truncated too, is that of the last row used, from which one bootstraps as ever.
    ``"steps_to_next_obs"`` is how many rewards there are and ``"gamma"`` the discount of what
    comes behind them, gamma to that power, both [..., 1]: TorchRL's value estimators and losses
    read the former, as they do after its `MultiStepTransform`. The row's own reward stays as
    ``("next", "original_reward")``.

    The rows are read from the storage: a buffer's transforms are to be applied to what is
    returned, and a slot of a ring that was overwritten since it was sampled gives the row that
    is there now.

    Args:
        storage: where the rows are.
        index: rows as ``storage.get`` takes them, in an array or tensor [...]; or a TensorDict
            [...] that a TensorDictReplayBuffer sampled, with ``"index"``: what else it holds
            beside columns of the storage, such as weights, is handed on.
        n: the most rewards to sum.
        gamma: the discount of one step, from 0 to 1.

    Returns:
        A TensorDict [...].

    Raises:
        ColumnsMissing: the rows do not say which trajectory they belong to.
        IndexOutOfRange: a row that is not there.
        Overrun: a ring is overwritten by another process faster than it is read.
    """
    _check(storage.reader, n, gamma)
    batch = index if isinstance(index, TensorDictBase) else None
    if batch is not None:
        index = batch.get("index", None)
        if index is None:
            raise ValueError(
                'a batch needs "index", where its rows are, as TensorDictReplayBuffer gives it. '
                "Give the index itself, or a batch of such a buffer."
            )
    found = _rows(storage.reader, index, n, gamma)
    return found if batch is None else _put_into(batch, found)


def _check(reader: RowReader, n: int, gamma: float) -> None:
    if type(n) is not int or n < 1:
        raise ValueError(f"n is a whole number of steps above 0, got {n!r}.")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is a discount from 0 to 1, got {gamma!r}.")
    missing = [spell(key) for key in (REWARD, TERMINATED) if key not in reader.keys]
    if missing:
        raise ColumnsMissing(
            f"{reader.path} has no {', no '.join(missing)}, which n-step returns are made of."
        )


def _rows(reader: RowReader, index: Any, n: int, gamma: float) -> TensorDict:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        span = reader.span
        where = resolve(index, len(span))
        if isinstance(where, slice):
            where = np.arange(where.start, where.stop, where.step)
        rows = reader.rows_at(np.asarray(where), span)
        found = _read(reader, rows.reshape(-1), n, gamma)
        if rows.ndim != 1:
            found = found.reshape(*rows.shape, *found.batch_size[1:])
        # Overwritten while they were read: once more, with the rows that are there now.
        if not rows.size or rows.min() >= reader.span.start:
            return found
        if time.monotonic() > deadline:
            raise reader.overrun(f"{n} steps of these {rows.size}")


def _read(reader: RowReader, rows: np.ndarray, n: int, gamma: float) -> TensorDict:
    keys, index = reader.keys, reader.trajectory_index
    with index.lock:
        chain = index.links(reader).onward(rows, n)
    rewards, *flags = reader.copies(chain, [REWARD, *(key for key in _FLAGS if key in keys)])
    reward = torch.from_numpy(rewards)
    if (dtype := reader.schema.columns[keys.index(REWARD)].dtype) is torch.bfloat16:
        reward = reward.view(dtype)
    ended = [flags_of(flag.reshape(chain.size, *flag.shape[2:])) for flag in flags]
    used = _used(chain, np.logical_or.reduce(ended).reshape(chain.shape))
    count = used.sum(axis=0)

    last = chain[count - 1, np.arange(len(rows))]
    places = [last if key[0] == NEXT or key == NEXT_VALID else rows for key in keys]
    found = reader.nest(reader.gather(places), rows.shape)
    found.set(_ORIGINAL, reward[0])
    found.set(REWARD, _discounted(reward, torch.from_numpy(used), gamma))
    steps = torch.from_numpy(count)[:, None]
    found.set(_STEPS, steps)
    found.set(_GAMMA, (gamma ** steps.double()).to(found.get(REWARD).dtype))
    return found


def _used(chain: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Which rows [n, rows] come before the end of the trajectory, and of what is stored of it."""
    used = np.ones(chain.shape, np.bool_)
    used[1:] = (chain[1:] != chain[:-1]) & ~ended[:-1]
    return np.logical_and.accumulate(used)


def _discounted(reward: torch.Tensor, used: torch.Tensor, gamma: float) -> torch.Tensor:
    """The discounted sum of the rewards [n, rows, ...] that are used [n, rows]."""
    shape = (*used.shape, *(1 for _ in reward.shape[2:]))
    weights = gamma ** torch.arange(len(used), dtype=torch.float64)
    weights = weights.reshape(-1, *(1 for _ in shape[1:]))
    total = (reward.double() * weights).masked_fill_(~used.reshape(shape), 0).sum(0)
    return total.to(reward.dtype if reward.is_floating_point() else torch.float32)


def _put_into(batch: TensorDictBase, found: TensorDict) -> TensorDict:
    """The rows found, with what else the batch says of them: its index, its weights, ..."""
    if batch.device is not None:
        found = found.to(batch.device)
    known = set(found.keys(include_nested=True, leaves_only=True))
    for key, leaf in batch.items(include_nested=True, leaves_only=True):
        if key not in known and key != CUT:
            found.set(key, leaf)
    return found
