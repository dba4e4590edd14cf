"""n-step returns: rewards and next observations from further along the trajectory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from .errors import ColumnsMissing, Overrun
from .indexing import resolve
from .keys import CUT, NEXT, NEXT_VALID, REWARD, TERMINATED, TRUNCATED
from .ring import rows_in, slots_at
from .rows import Key, spell

if TYPE_CHECKING:
    from .engine import Engine
    from .store import RowStore

__all__ = ["n_step"]

_ORIGINAL: Key = (NEXT, "original_reward")
_STEPS, _GAMMA = "steps_to_next_obs", "gamma"
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
    _check(storage, n, gamma)
    batch = index if isinstance(index, TensorDictBase) else None
    if batch is not None:
        index = batch.get("index", None)
        if index is None:
            raise ValueError(
                'a batch needs "index", where its rows are, as TensorDictReplayBuffer gives it. '
                "Give the index itself, or a batch of such a buffer."
            )
    found = _rows(storage, index, n, gamma)
    return found if batch is None else _put_into(batch, found)


def _check(storage: RowStore, n: int, gamma: float) -> None:
    if type(n) is not int or n < 1:
        raise ValueError(f"n is a whole number of steps above 0, got {n!r}.")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is a discount from 0 to 1, got {gamma!r}.")
    missing = [spell(key) for key in (REWARD, TERMINATED) if key not in storage.schema]
    if missing:
        raise ColumnsMissing(
            f"{storage.path} has no {', no '.join(missing)}, which n-step returns are made of."
        )


def _rows(storage: RowStore, index: Any, n: int, gamma: float) -> TensorDict:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        span = storage.span
        where = resolve(index, len(span))
        if isinstance(where, slice):
            where = np.arange(where.start, where.stop, where.step)
        rows = _numbers(storage, span, np.asarray(where))
        found = _read(storage, rows.reshape(-1), n, gamma).reshape(rows.shape)
        # Overwritten while they were read: once more, with the rows that are there now.
        if not rows.size or rows.min() >= storage.span.start:
            return found
        if time.monotonic() > deadline:
            raise Overrun(
                f"{storage.path} is a ring of {storage.ring} rows, and its writer overwrites them "
                f"faster than {n} steps of these {rows.size} can be read. Read fewer at a time, or "
                "make the ring larger."
            )


def _numbers(storage: RowStore, span: range, index: np.ndarray) -> np.ndarray:
    """The numbers of rows that are counted from the first slot on."""
    ring, head = storage.ring, span.stop
    if not ring:
        return index
    reserve = span.start + ring if span.start else head
    return rows_in(slots_at(index, head, reserve, ring), head, ring)


@dataclass(frozen=True, slots=True)
class _Steps:
    last: np.ndarray
    """The number of the last row used, [n]."""
    count: np.ndarray
    """How many were used, [n]."""
    reward: torch.Tensor
    """Their discounted sum, [n, ...]."""


def _read(storage: RowStore, rows: np.ndarray, n: int, gamma: float) -> TensorDict:
    engine = storage._running()
    steps = _go_on(storage, engine, rows, n, gamma)
    here, there = storage.slots_of(rows), storage.slots_of(steps.last)
    later = [key[0] == NEXT or key == NEXT_VALID for key in engine.schema.keys]
    arrays = engine.gather([there if is_later else here for is_later in later])
    found = storage._nest(arrays, rows.shape)
    found.set(_ORIGINAL, _tensor(engine, REWARD, here))
    found.set(REWARD, steps.reward)
    count = torch.from_numpy(steps.count)[:, None]
    found.set(_STEPS, count)
    found.set(_GAMMA, (gamma ** count.double()).to(steps.reward.dtype))
    return found


def _go_on(storage: RowStore, engine: Engine, rows: np.ndarray, n: int, gamma: float) -> _Steps:
    index = storage._index
    reward = _tensor(engine, REWARD, storage.slots_of(rows))
    total = reward.double()
    last, count = rows.copy(), np.ones(len(rows), np.int64)
    going = np.arange(len(rows))
    for step in range(1, n):
        going = going[~_ended(engine, storage.slots_of(last[going]))]
        with index.lock:
            ahead = index.links(storage).next_of(last[going])
        going, ahead = going[ahead >= 0], ahead[ahead >= 0]
        if not len(going):
            break
        last[going] = ahead
        count[going] += 1
        total[going] += gamma**step * _tensor(engine, REWARD, storage.slots_of(ahead)).double()
    dtype = reward.dtype if reward.is_floating_point() else torch.float32
    return _Steps(last, count, total.to(dtype))


def _ended(engine: Engine, slots: np.ndarray) -> np.ndarray:
    keys = [key for key in (TERMINATED, TRUNCATED) if key in engine.schema]
    flags = [_tensor(engine, key, slots)[:, None].flatten(1).any(1) for key in keys]
    return torch.stack(flags).any(0).numpy()


def _tensor(engine: Engine, key: Key, slots: np.ndarray) -> torch.Tensor:
    place = engine.schema.keys.index(key)
    found = torch.from_numpy(engine.columns()[place].take(slots, axis=0))
    dtype = engine.schema.columns[place].dtype
    return found.view(dtype) if dtype is torch.bfloat16 else found


def _put_into(batch: TensorDictBase, found: TensorDict) -> TensorDict:
    """The rows found, with what else the batch says of them: its index, its weights, ..."""
    if batch.device is not None:
        found = found.to(batch.device)
    known = set(found.keys(include_nested=True, leaves_only=True))
    for key, leaf in batch.items(include_nested=True, leaves_only=True):
        if key not in known and key != CUT:
            found.set(key, leaf)
    return found
