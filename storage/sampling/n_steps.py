"""n-step returns: sums of rewards and later next observations along a trajectory."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.errors import ColumnsMissing, SumTooLarge
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.readers.row_reader import RowReader, numbers_of
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.keys import (
    CUT,
    DONE,
    MASK,
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    as_key,
    format_key,
    next_valid_keys,
)
from tallyroll.storage.trajectories.columns import flags_of, floats_of

if TYPE_CHECKING:
    from tallyroll.storage.rows.keys import Keys
    from tallyroll.storage.rows.schema import Column, Schema


_STEPS, _GAMMA, _ORIGINAL = "steps_to_next_obs", "gamma", "original_"
_FLAGS = (TERMINATED, TRUNCATED)
_ENDS = frozenset({DONE[-1], TERMINATED[-1], TRUNCATED[-1]})
_PATIENCE_SECONDS = 1.0


class ReadableStorage(Protocol):
    """Part of a storage that `n_step` reads."""

    @property
    def reader(self) -> RowReader:
        """The reader of the rows."""

    def reader_with(self, keys: Keys) -> RowReader:
        """Return a reader that has the columns ``keys``, which may be overlays."""


def n_step(
    storage: ReadableStorage,
    index: Any,
    n: int,
    gamma: float | torch.Tensor,
    *,
    reward_key: str | Key | Sequence[str | Key] | None = None,
    dtype: torch.dtype | None = None,
) -> TensorDict:
    """Return rows whose reward and next observation cover up to ``n`` steps.

    Each row is followed along its trajectory, wherever the rows of the trajectory are stored, until
    ``n`` rewards are summed, the trajectory ends, or no later row is stored. ``("next", "reward")``
    is the sum of gamma^k times the k-th reward. Everything else under ``"next"``, including done,
    terminated and truncated, comes from the last row used, from which bootstrapping proceeds as
    usual. ``"steps_to_next_obs"`` is the number k of summed rewards, and ``"gamma"`` is gamma^k,
    the discount of the bootstrapped value; both are [..., 1]. TorchRL's value estimators and losses
    read ``"steps_to_next_obs"``, as they do after its `MultiStepTransform`. The row's own reward is
    kept as ``("next", "original_reward")``.

    The reward of a group of agents, ``("next", "agents", "reward")``, is summed for each agent
    until the done, terminated or truncated flag of the group ends that agent. The group's entries
    under ``"next"`` come from the last row that the agent used. ``("agents", "steps_to_next_obs")``
    is the number of rewards of each agent, and ``("agents", "gamma")`` is the discount.

    Sums are computed in float64 and returned in the dtype of the column, or in float32 for integer
    rewards.

    The rows are read from the storage. Apply a buffer's transforms to the result. If a slot of a
    ring was overwritten after it was sampled, the result has the row that is in the slot now.

    Args:
        storage: the storage of the rows.
        index: rows as ``storage.get`` accepts them, in an array or tensor [...]; or a TensorDict
            [...] that a TensorDictReplayBuffer sampled, with ``"index"``. Entries of the TensorDict
            that are not columns of the storage, such as weights, are copied to the result. Where
            its ``("collector", "mask")`` is False, all values are zero.
        n: the maximum number of rewards to sum.
        gamma: the discount of one step, from 0 to 1. A tensor that broadcasts to a row's reward
            gives each objective or agent its own discount.
        reward_key: the rewards to sum, such as ``"reward"`` or ``("agents", "reward")``, or a list
            of such keys, which may be overlays. None: every column below ``"next"`` named
            ``"reward"``.
        dtype: the floating-point dtype of the sums; None: the dtype of the column.

    Returns:
        A TensorDict [...].

    Raises:
        ColumnsMissing: a reward does not exist, or the rows have no trajectory columns.
        IndexOutOfRange: a row does not exist.
        SumTooLarge: the dtype cannot hold a sum: the sum of finite rewards is infinite, or a sum of
            integers would be rounded.
        Overrun: another process overwrites a ring faster than it is read.
    """
    named = _named(reward_key)
    reader = storage.reader
    if named is not None:
        reader = storage.reader_with([*reader.keys, *named])
    _check(reader, n, dtype)
    returns = _Returns(n, _discount(gamma), _rewards(reader, named), dtype)
    batch = index if isinstance(index, TensorDictBase) else None
    if batch is not None:
        index = batch.get("index", None)
        if index is None:
            raise ValueError(
                'index: expected a batch with "index", as a TensorDictReplayBuffer returns it, '
                "got one without. Give the index itself, or a batch of such a buffer."
            )
    found = _rows(reader, index, returns)
    return found if batch is None else _put_into(batch, found)


def _check(reader: RowReader, n: int, dtype: torch.dtype | None) -> None:
    if type(n) is not int or n < 1:
        raise ValueError(f"n: expected a whole number of steps above 0, got {n!r}.")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"dtype: expected a floating-point dtype, such as torch.float64, got {dtype}."
        )
    _require(reader, [TERMINATED])


def _require(reader: RowReader, keys: Sequence[Key]) -> None:
    missing = [format_key(key) for key in keys if key not in reader.keys]
    if missing:
        raise ColumnsMissing(
            f"{reader.path} has no {', no '.join(missing)}. n-step returns need these columns."
            f"{excluded_note(reader.runs, keys)}"
        )


def _discount(gamma: float | torch.Tensor) -> float | np.ndarray:
    """Return the discount in float64, as an array if the tensor has several elements."""
    several = isinstance(gamma, torch.Tensor) and gamma.numel() != 1
    found = torch.as_tensor(gamma).detach().double().numpy(force=True) if several else float(gamma)
    if not np.all((found >= 0) & (found <= 1)):
        raise ValueError(f"gamma: expected a discount from 0 to 1, got {gamma!r}.")
    return found


def _named(wanted: str | Key | Sequence[str | Key] | None) -> list[Key] | None:
    """Return the keys of the rewards that the caller names, or None for all rewards."""
    if wanted is None:
        return None
    if isinstance(wanted, str) or (isinstance(wanted, tuple) and isinstance(wanted[-1], str)):
        keys = [as_key(wanted)]
    else:
        keys = [as_key(key) for key in wanted]
    return [key if key[0] == NEXT else (NEXT, *key) for key in keys]


def _rewards(reader: RowReader, keys: list[Key] | None) -> list[_Reward]:
    """Return the rewards to sum."""
    if keys is None:
        keys = [key for key in reader.keys if key[0] == NEXT and key[-1] == REWARD[-1]]
    keys = keys or [REWARD]
    _require(reader, keys)
    schema = reader.schema
    found = [_reward_of(schema, column) for column in schema.columns if column.key in keys]
    return sorted(found, key=lambda reward: len(reward.flagged))  # nested groups come last


@dataclass(frozen=True, slots=True)
class _Reward:
    """A column of rewards and the flags that end each reward's sum."""

    column: Column
    flags: tuple[Key, ...]
    """The keys of the flags of the column's group of agents; empty if only the root has flags."""
    flag_shape: tuple[int, ...] = ()
    """The shape of the flags in one row, with as many dimensions as a row's reward."""

    @property
    def group(self) -> Key:
        """The group of the column below ``"next"``, or () at the root."""
        return self.column.key[1:-1]

    @property
    def flagged(self) -> Key:
        """The group of the flags below ``"next"``."""
        return self.flags[0][1:-1] if self.flags else ()

    @property
    def agents(self) -> tuple[int, ...]:
        """The shape of the group whose agents end individually."""
        return self.flag_shape[:-1] if self.flag_shape[-1:] == (1,) else self.flag_shape


def _reward_of(schema: Schema, column: Column) -> _Reward:
    """Return the reward with the flags of the nearest enclosing group whose flags fit its shape."""
    group = column.key[1:-1]
    for depth in range(len(group), 0, -1):
        flags = [
            each
            for each in schema.columns
            if each.key[:-1] == (NEXT, *group[:depth])
            and each.key[-1] in _ENDS
            and each.dtype is torch.bool
            and _fits(each.shape, column.shape)
        ]
        if flags:
            shape = np.broadcast_shapes(*(each.shape for each in flags))
            return _Reward(column, tuple(each.key for each in flags), shape)
    return _Reward(column, ())


def _fits(flag: tuple[int, ...], reward: tuple[int, ...]) -> bool:
    pairs = zip(flag, reward, strict=False)
    return len(flag) == len(reward) and all(a in (1, b) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class _Returns:
    """Parameters of the sums: the rewards, the number of steps, the discount and the dtype."""

    n: int
    gamma: float | np.ndarray
    rewards: list[_Reward]
    dtype: torch.dtype | None


def _rows(reader: RowReader, index: Any, returns: _Returns) -> TensorDict:
    return read_consistently(reader, lambda: _rows_left(reader, index, returns))


def _rows_left(reader: RowReader, index: Any, returns: _Returns) -> TensorDict:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        rows = numbers_of(reader, index)
        failed: SumTooLarge | None = None
        try:
            found = _read(reader, rows.reshape(-1), returns)
        except SumTooLarge as error:  # possibly caused by values that were overwritten meanwhile
            failed = error
        # If rows were overwritten during the read, repeat it with the current rows.
        if not rows.size or rows.min() >= reader.span.start:
            if failed is not None:
                raise failed
            return found if rows.ndim == 1 else found.reshape(*rows.shape, *found.batch_size[1:])
        if time.monotonic() > deadline:
            raise reader.overrun(f"{returns.n} steps of these {rows.size}")


def _read(reader: RowReader, rows: np.ndarray, returns: _Returns) -> TensorDict:
    keys, index = reader.keys, reader.trajectory_index
    with index.lock:
        chain = index.rows(reader).onward(rows, returns.n)
    flags = reader.copies(chain, [key for key in _FLAGS if key in keys])
    ended = [flags_of(flag.reshape(chain.size, *flag.shape[2:])) for flag in flags]
    used = _used(chain, np.logical_or.reduce(ended).reshape(chain.shape))
    last = chain[used.sum(axis=0) - 1, np.arange(len(rows))]

    arrays = reader.gather([last if _of_the_end(key) else rows for key in keys])
    sums: dict[Key, torch.Tensor] = {}
    moved: set[Key] = set()
    for reward in returns.rewards:
        own = _of_agents(reader, reward, chain, used)
        sums |= _summed(reader, reward, chain, own, returns)
        if reward.flags and reward.flagged not in moved:
            moved.add(reward.flagged)
            _move_back(reader, arrays, reward, chain, own, last)
    found = reader.nest(arrays, rows.shape)
    if (_STEPS,) not in sums:  # only groups of agents have rewards, not the root
        count = used.sum(axis=0)[:, None]
        sums[_STEPS,] = torch.from_numpy(count)
        if not isinstance(returns.gamma, np.ndarray):
            sums[_GAMMA,] = torch.from_numpy(returns.gamma**count).float()
    for key, values in sums.items():
        found.set(key, values)
    return found


def _of_the_end(key: Key) -> bool:
    return key[0] == NEXT or bool(next_valid_keys([key]))


def _used(chain: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return a mask [n, rows] of the rows up to the last stored one of each trajectory."""
    used = np.ones(chain.shape, np.bool_)
    used[1:] = (chain[1:] != chain[:-1]) & ~ended[:-1]
    return np.logical_and.accumulate(used)


def _of_agents(
    reader: RowReader, reward: _Reward, chain: np.ndarray, used: np.ndarray
) -> np.ndarray:
    """Return a mask [n, rows, ...] of the ``used`` rows up to the end of each agent."""
    own = used.reshape(*used.shape, *(1 for _ in reward.column.shape))
    if not reward.flags:
        return own
    ended = np.logical_or.reduce(np.broadcast_arrays(*reader.copies(chain, reward.flags)))
    goes_on = np.ones(ended.shape, np.bool_)
    goes_on[1:] = ~ended[:-1]
    found: np.ndarray = own & np.logical_and.accumulate(goes_on)
    return found


def _summed(
    reader: RowReader, reward: _Reward, chain: np.ndarray, used: np.ndarray, returns: _Returns
) -> dict[Key, torch.Tensor]:
    """Return the sum, the row's own reward, the number of terms, and the remaining discount."""
    column = reward.column
    (values,) = reader.copies(chain, [column.key])
    original = torch.from_numpy(values[0])
    if column.dtype is torch.bfloat16:
        values, original = floats_of(values), original.view(column.dtype)
    total = _discounted(reward, values, used, returns, reader)
    count = used.sum(axis=0)
    if reward.group:  # one count per agent, even if all agents end together
        count = np.broadcast_to(count, (count.shape[0], *column.shape[:-1], count.shape[-1])).copy()
    else:
        count = count.reshape(len(count), 1)
    *above, name = column.key
    return {
        (*above, _ORIGINAL + name): original,
        column.key: total,
        (*reward.group, _STEPS): torch.from_numpy(count),
        (*reward.group, _GAMMA): torch.from_numpy(returns.gamma**count).to(total.dtype),
    }


def _discounted(
    reward: _Reward, values: np.ndarray, used: np.ndarray, returns: _Returns, reader: RowReader
) -> torch.Tensor:
    """Return the discounted sum of the used rewards; ``values`` is [n, rows, ...]."""
    column, gamma = reward.column, returns.gamma
    if isinstance(gamma, np.ndarray) and not _broadcasts(gamma.shape, column.shape):
        raise ValueError(
            f"gamma: expected a number, or a tensor that broadcasts to {list(column.shape)}, the "
            f"shape of {format_key(column.key)} in a row, got {list(gamma.shape)}."
        )
    powers = np.arange(len(values)).reshape(-1, *(1 for _ in values.shape[1:]))
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.where(used, values * gamma**powers, 0)
        total = terms.sum(axis=0)
    whole = not column.dtype.is_floating_point
    dtype = returns.dtype or (torch.float32 if whole else column.dtype)
    found = torch.from_numpy(total).to(dtype)
    if whole:  # the dtype represents every integer up to this bound exactly
        wrong = np.abs(terms).sum(axis=0) > 2 / torch.finfo(dtype).eps
    elif math.isfinite(found.sum()):
        return found
    else:
        wrong = ~found.isfinite().numpy() & (np.isfinite(values) | ~used).all(axis=0)
    if wrong.any():
        raise _too_large(reader, column, float(total[wrong][0]), dtype, whole=whole)
    return found


def _too_large(
    reader: RowReader, column: Column, total: float, dtype: torch.dtype, *, whole: bool
) -> SumTooLarge:
    single = abs(total) < torch.finfo(torch.float32).max and not whole
    wider = torch.float32 if single else torch.float64
    return SumTooLarge(
        f"expected sums of {format_key(column.key)} ({column.dtype_name}) in {reader.path} that "
        f"{dtype} can represent{' without rounding' if whole else ''}, got {total}. Scale the "
        f"stored rewards{f', or pass dtype={wider}' if dtype != wider else ''}."
    )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == tuple(to)
    except ValueError:
        return False


def _move_back(
    reader: RowReader,
    arrays: list[np.ndarray],
    reward: _Reward,
    chain: np.ndarray,
    used: np.ndarray,
    last: np.ndarray,
) -> None:
    """Give each agent that ended before the last row the values of the last row that it used."""
    rows, agents = len(last), math.prod(reward.agents)
    count = used.sum(axis=0).reshape(rows, agents)
    own = chain[count - 1, np.arange(rows)[:, None]]
    row, agent = np.nonzero(own != last[:, None])
    if not len(row):
        return
    inside, sizes = (NEXT, *reward.flagged), reward.agents
    for key, array in zip(reader.keys, arrays, strict=True):
        if key[: len(inside)] == inside and array.shape[1 : 1 + len(sizes)] == sizes:
            by_agent = (-1, agents, *array.shape[1 + len(sizes) :])
            values = reader.column(key).take(own[row, agent]).reshape(by_agent)
            array.reshape(by_agent)[row, agent] = values[np.arange(len(row)), agent]


def _put_into(batch: TensorDictBase, found: TensorDict) -> TensorDict:
    """Add the other entries of the batch, such as its index and weights, to the found rows."""
    if batch.device is not None:
        found = found.to(batch.device)
    known = set(found.keys(include_nested=True, leaves_only=True))
    for key, leaf in batch.items(include_nested=True, leaves_only=True):
        if key not in known and key != CUT:
            found.set(key, leaf)
    if MASK in known or (mask := batch.get(MASK, None)) is None:
        return found
    for key in known:  # zero the positions of a slice that have no row
        leaf = found.get(key)
        leaf.view(SIGNED.get(leaf.dtype, leaf.dtype))[~mask.to(leaf.device)] = 0
    return found
