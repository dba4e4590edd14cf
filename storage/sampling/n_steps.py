"""n-step returns: sums of rewards and later next observations along a trajectory."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.engine.kernel import Kernel, compiled
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
from tallyroll.storage.rows.tensordict_builder import TensorDictBuilder, array_of, leaves
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
    keys: Sequence[str | Key] | None = None,
    out: TensorDict | None = None,
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
        keys: the keys to return, of columns or of the values that this function adds, such as
            ``["observation", "action", ("next", "observation"), ("next", "reward"), "gamma"]``.
            Other columns are not read. None: all keys.
        out: a result of an earlier call with the same ``keys`` and number of rows, or another
            TensorDict of contiguous tensors in host memory. The call writes to its tensors and
            returns it. ``index`` must then not be a TensorDict. After an error, the values are
            undefined.

    Returns:
        A TensorDict [...].

    Raises:
        ColumnsMissing: a reward or one of ``keys`` does not exist, or the rows have no trajectory
            columns.
        IndexOutOfRange: a row does not exist.
        SumTooLarge: the dtype cannot hold a sum: the sum of finite rewards is infinite, or a sum of
            integers would be rounded.
        Overrun: another process overwrites a ring faster than it is read.
        ValueError: an argument has an invalid value; for example, a tensor of ``out`` has another
            shape or dtype than the result.
    """
    given: dict[Key, torch.Tensor] = {}
    if out is not None:
        if keys is not None or isinstance(index, TensorDictBase):
            other = "keys" if keys is not None else "a batch as the index"
            raise ValueError(
                f"out: expected out alone, whose keys are returned, got {other} as well. Leave out "
                "the keys, and give the index of the rows."
            )
        given = leaves(out)
        keys = tuple(given)
    if type(n) is not int or n < 1:
        raise ValueError(f"n: expected a whole number of steps above 0, got {n!r}.")
    discount = _discount(gamma)
    several = isinstance(discount, np.ndarray)
    reader, plan = _plan_of(storage, reward_key, dtype, keys, several=several)
    returns = _Returns(n, discount, plan)
    batch = index if isinstance(index, TensorDictBase) else None
    if batch is not None:
        index = batch.get("index", None)
        if index is None:
            raise ValueError(
                'index: expected a batch with "index", as a TensorDictReplayBuffer returns it, '
                "got one without. Give the index itself, or a batch of such a buffer."
            )
    found = _rows(reader, index, returns, None if out is None else _Out(out, given))
    return found if batch is None else _put_into(batch, found, plan)


def _require(reader: RowReader, keys: Sequence[Key]) -> None:
    missing = [format_key(key) for key in keys if key not in reader.keys]
    if missing:
        raise ColumnsMissing(
            f"{reader.path} has no {', no '.join(missing)}. n-step returns need these columns."
            f"{excluded_note(reader.runs, keys)}"
        )


def _discount(gamma: float | torch.Tensor) -> float | np.ndarray:
    """Return the discount in float64, as an array if the tensor has several elements."""
    if type(gamma) is float and 0 <= gamma <= 1:
        return gamma
    several = isinstance(gamma, torch.Tensor) and gamma.numel() != 1
    found = torch.as_tensor(gamma).detach().double().numpy(force=True) if several else float(gamma)
    if not np.all((found >= 0) & (found <= 1)):
        raise ValueError(f"gamma: expected a discount from 0 to 1, got {gamma!r}.")
    return found


def _named(wanted: str | Key | Sequence[str | Key] | None) -> tuple[Key, ...]:
    """Return the keys of the rewards that the caller names; none for all rewards."""
    if wanted is None:
        return ()
    if isinstance(wanted, str) or (isinstance(wanted, tuple) and isinstance(wanted[-1], str)):
        keys = [as_key(wanted)]
    else:
        keys = [as_key(key) for key in wanted]
    return tuple(key if key[0] == NEXT else (NEXT, *key) for key in keys)


def _reward_keys(reader: RowReader) -> list[Key]:
    """Return the keys of all rewards."""
    found = [key for key in reader.keys if key[0] == NEXT and key[-1] == REWARD[-1]]
    return found or [REWARD]


def _added(rewards: Sequence[Key], *, several: bool) -> list[Key]:
    """Return the keys of the values that are added or replaced for these rewards, in order."""
    found: dict[Key, None] = {}
    for key in rewards:
        group = key[1:-1]
        added = (*key[:-1], _ORIGINAL + key[-1]), key, (*group, _STEPS), (*group, _GAMMA)
        found |= dict.fromkeys(added)
    if (_STEPS,) not in found:
        found |= dict.fromkeys([(_STEPS,)] if several else [(_STEPS,), (_GAMMA,)])
    return [*found]


def _rewards(reader: RowReader, keys: Sequence[Key]) -> list[_Reward]:
    """Return the rewards to sum."""
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
class _Plan:
    """The columns that a call reads, and the keys of its result."""

    rewards: list[_Reward]
    dtype: torch.dtype | None
    """The dtype of the sums; None: the dtype of the column."""
    flags: list[Key]
    """The columns of flags that end a trajectory."""
    keys: tuple[Key, ...]
    """The keys of the result."""
    columns: tuple[Column, ...]
    """The columns among the keys."""
    own: list[Key]
    """The keys of those columns whose values come from the row itself."""
    later: list[Key]
    """The keys of those columns whose values come from the last row that is used."""
    reads_most: bool
    """True if most columns of the storage are read."""
    every: frozenset[Key]
    """The keys of all columns and of all values that `n_step` adds."""
    nest: TensorDictBuilder
    plain: tuple[Kernel, Column, list[Key]] | None
    """The extension, the only reward and the flags, if each column has one value per row."""

    def is_asked(self, *keys: Key) -> bool:
        """Return True if one of ``keys`` is in the result."""
        return any(key in self.keys for key in keys)


@dataclass(frozen=True, slots=True)
class _Returns:
    """Parameters of a call: the number of steps, the discount, and the plan."""

    n: int
    gamma: float | np.ndarray
    plan: _Plan


def _plan_of(
    storage: ReadableStorage,
    reward_key: str | Key | Sequence[str | Key] | None,
    dtype: torch.dtype | None,
    keys: Sequence[str | Key] | None,
    *,
    several: bool,
) -> tuple[RowReader, _Plan]:
    """Return the reader and the plan of a call; ``several``: the discount is an array."""
    reader = storage.reader
    keys = None if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
    given = (keys, reward_key, dtype, several) if reward_key is None else None
    known: dict[Any, _Plan] = vars(reader).setdefault("_n_step_plans", {})
    if given is not None and (plan := known.get(given)) is not None:
        return reader, plan
    named = _named(reward_key)
    asked = None if keys is None else tuple(dict.fromkeys(map(as_key, keys)))
    if named or not {*(asked or ())} <= {*reader.keys}:  # some may be overlays
        added = _added(named or _reward_keys(reader), several=several)
        more = [*named, *(key for key in asked or () if key not in added)]
        reader = storage.reader_with([*reader.keys, *more])
    plan = _make_plan(reader, named, dtype, asked, several=several)
    if reader is storage.reader and given is not None:
        known[given] = plan
    return reader, plan


def _make_plan(
    reader: RowReader,
    named: tuple[Key, ...],
    dtype: torch.dtype | None,
    asked: tuple[Key, ...] | None,
    *,
    several: bool,
) -> _Plan:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"dtype: expected a floating-point dtype, such as torch.float64, got {dtype}."
        )
    _require(reader, [TERMINATED])
    rewards = _rewards(reader, named or _reward_keys(reader))
    added = _added([reward.column.key for reward in rewards], several=several)
    columns = {column.key: column for column in reader.schema.columns if column.key not in added}
    keys = tuple(dict.fromkeys([*reader.keys, *added])) if asked is None else asked
    if not keys or any(key not in columns and key not in added for key in keys):
        every = ", ".join(map(format_key, [*columns, *added]))
        got = ", ".join(map(format_key, keys)) or "none"
        note = excluded_note(reader.runs, keys)
        raise ColumnsMissing(f"keys: expected some of {every}, got {got}.{note}")
    # The added values are tensors of their own dtypes.
    dtypes = [columns[key].dtype if key in columns else torch.float32 for key in keys]
    read = tuple(columns[key] for key in keys if key in columns)
    return _Plan(
        rewards,
        dtype,
        [key for key in _FLAGS if key in reader.keys],
        keys,
        read,
        [column.key for column in read if not _is_from_last_row(column.key)],
        [column.key for column in read if _is_from_last_row(column.key)],
        len(read) > len(reader.keys) / 2,
        frozenset([*columns, *added]),
        TensorDictBuilder(list(zip(keys, dtypes, strict=True)), reader.schema.batch_shapes),
        _compiled_source(reader, rewards),
    )


def _compiled_source(
    reader: RowReader, rewards: Sequence[_Reward]
) -> tuple[Kernel, Column, list[Key]] | None:
    kernel = compiled()
    flags = [column for column in reader.schema.columns if column.key in _FLAGS]
    column = rewards[0].column
    if kernel is None or len(rewards) > 1 or rewards[0].group or rewards[0].flags:
        return None
    if column.dtype not in (torch.float32, torch.float64) or any(
        each.shape != (1,) for each in [column, *flags]
    ):
        return None
    if any(each.dtype is not torch.bool for each in flags):
        return None
    return kernel, column, [each.key for each in flags]


class _Out:
    """The TensorDict to which a call writes its result.

    Args:
        rows: the TensorDict.
        leaves: its tensors, by key.
    """

    def __init__(self, rows: TensorDict, leaves: dict[Key, torch.Tensor]) -> None:
        self._rows, self._leaves = rows, leaves

    def arrays(self, plan: _Plan, batch: tuple[int, ...]) -> dict[Key, np.ndarray]:
        """Return an array [rows, ...] for each column, with the memory of its tensor."""
        found = {}
        for column in plan.columns:
            leaf = self._fitting(column.key, (*batch, *column.shape), column.dtype)
            found[column.key] = array_of(column.key, leaf).reshape(-1, *column.shape)
        return found

    def filled(self, added: Mapping[Key, torch.Tensor], batch: tuple[int, ...]) -> TensorDict:
        """Copy the added values [rows, ...] to their tensors, and return the TensorDict."""
        for key, values in added.items():
            if key in self._leaves:
                leaf = self._fitting(key, (*batch, *values.shape[1:]), values.dtype)
                to = array_of(key, leaf).reshape(values.shape)
                np.copyto(to, array_of(key, values))
        return self._rows

    def _fitting(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        leaf = self._leaves[key]
        if leaf.dtype is dtype and leaf.shape == shape and leaf.is_cpu and leaf.is_contiguous():
            return leaf
        raise ValueError(
            f"out: expected {dtype} {list(shape)} in contiguous host memory as {format_key(key)}, "
            f"got {leaf.dtype} {list(leaf.shape)} on {leaf.device}. Call n_step without out, and "
            "reuse its result for the same number of rows."
        )


def _rows(reader: RowReader, index: Any, returns: _Returns, out: _Out | None) -> TensorDict:
    return read_consistently(reader, lambda: _read_with_retries(reader, index, returns, out))


def _read_with_retries(
    reader: RowReader, index: Any, returns: _Returns, out: _Out | None
) -> TensorDict:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        rows = numbers_of(reader, index)
        failed: SumTooLarge | None = None
        try:
            found = _read(reader, rows, returns, out)
        except SumTooLarge as error:  # possibly caused by values that were overwritten meanwhile
            failed = error
        # If rows were overwritten during the read, repeat it with the current rows.
        if not reader.ring or not rows.size or rows.min() >= reader.span.start:
            if failed is not None:
                raise failed
            return found
        if time.monotonic() > deadline:
            raise reader.overrun(f"{returns.n} steps of these {rows.size}")


def _read(reader: RowReader, shaped: np.ndarray, returns: _Returns, out: _Out | None) -> TensorDict:
    plan, index, rows = returns.plan, reader.trajectory_index, shaped.reshape(-1)
    with index.lock:
        chain = index.rows(reader).onward(rows, returns.n)
    if (summed := _compiled_sums(reader, chain, returns)) is not None:
        count, last, sums = summed
        rewards: Sequence[_Reward] = ()
    else:
        used = _used(reader, chain, plan.flags)
        count, sums, rewards = used.sum(axis=0), {}, plan.rewards
        last = chain[count - 1, np.arange(len(rows))]

    if out is not None:
        arrays = out.arrays(plan, shaped.shape)
        ends = [last if _is_from_last_row(key) else rows for key in arrays]
        reader.copy_into([*arrays.values()], ends, [*arrays])
    elif plan.reads_most:  # to memory that is reused
        ends = [last if _is_from_last_row(key) else rows for key in reader.keys]
        arrays = dict(zip(reader.keys, reader.gather(ends), strict=True))
    else:
        arrays = {}
        for some, numbers in (plan.own, rows), (plan.later, last):
            arrays.update(zip(some, reader.copies(numbers, some), strict=True))
    moved: set[Key] = set()
    for reward in rewards:
        own = _of_agents(reader, reward, chain, used)
        counts = own.sum(axis=0) if reward.flags else count.reshape(own.shape[1:])
        sums |= _summed(reader, reward, chain, own, counts, returns)
        if reward.flags and reward.flagged not in moved:
            moved.add(reward.flagged)
            _move_back(reader, arrays, reward, chain, own, last)
    if plan.is_asked((_STEPS,), (_GAMMA,)) and (_STEPS,) not in sums:
        # Only groups of agents have rewards, not the root.
        if isinstance(returns.gamma, np.ndarray):
            sums[_STEPS,] = torch.from_numpy(count[:, None])
        else:
            sums |= _counted((), count[:, None], returns, torch.float32)
    if out is not None:
        return out.filled(sums, shaped.shape)
    found = plan.nest.of_mixed(
        [sums[key] if key in sums else arrays[key] for key in plan.keys], rows.shape
    )
    return found if shaped.ndim == 1 else found.reshape(shaped.shape)


def _compiled_sums(
    reader: RowReader, chain: np.ndarray, returns: _Returns
) -> tuple[np.ndarray, np.ndarray, dict[Key, torch.Tensor]] | None:
    """Return the numbers of steps, the last rows and the sums of plain rewards, or None.

    The result is None if there is no extension, if it cannot read the columns, or if a sum is not
    finite.
    """
    plan, gamma = returns.plan, returns.gamma
    if plan.plain is None or not isinstance(gamma, float):
        return None
    kernel, column, flags = plan.plain
    arrays = reader.mapped([*flags, column.key])
    if arrays is None:
        return None
    rows = chain.shape[1]
    count, last = np.empty((rows, 1), np.int64), np.empty(rows, np.int64)
    total = np.empty((rows, 1))
    powers = _powers(gamma, returns.n)
    ends, others, rewards = arrays[0], arrays[-2], arrays[-1]
    kernel.sum_steps(chain, ends, others, rewards, powers, count, last, total, reader.ring)
    dtype = plan.dtype or column.dtype
    found = {}
    if plan.is_asked(column.key):
        with np.errstate(invalid="ignore", over="ignore"):
            found[column.key] = _cast(total, dtype)
        if not math.isfinite(found[column.key].sum()):
            return None
    original = (NEXT, _ORIGINAL + column.key[-1])
    if plan.is_asked(original):
        found[original] = torch.from_numpy(reader.copies(chain[0], [column.key])[0])
    if plan.is_asked((_STEPS,), (_GAMMA,)):
        found |= _counted((), count, returns, dtype)
    return count.reshape(-1), last, found


def _is_from_last_row(key: Key) -> bool:
    return key[0] == NEXT or bool(next_valid_keys([key]))


def _used(reader: RowReader, chain: np.ndarray, flags: Sequence[Key]) -> np.ndarray:
    """Return a mask [n, rows] of the rows up to the last stored one of each trajectory."""
    used = np.ones(chain.shape, np.bool_)
    before, goes_on = chain[:-1], used[1:]
    if not before.size:
        return used
    np.not_equal(chain[1:], before, out=goes_on)
    for flag in reader.copies(before, flags):
        ended = flags_of(flag.reshape(before.size, *flag.shape[2:])).reshape(before.shape)
        np.greater(goes_on, ended, out=goes_on)
    for earlier, later in pairwise(goes_on):
        later &= earlier
    return used


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
    reader: RowReader,
    reward: _Reward,
    chain: np.ndarray,
    used: np.ndarray,
    count: np.ndarray,
    returns: _Returns,
) -> dict[Key, torch.Tensor]:
    """Return the sum, the row's own reward, the number of terms, and the remaining discount."""
    column, plan, found = reward.column, returns.plan, {}
    key = column.key
    original = (*key[:-1], _ORIGINAL + key[-1])
    if plan.is_asked(key, original):
        (values,) = reader.copies(chain, [key])
        first = torch.from_numpy(values[0])
        if column.dtype is torch.bfloat16:
            values, first = floats_of(values), first.view(column.dtype)
        found[original] = first
        if plan.is_asked(key):
            found[key] = _discounted(reward, values, used, returns, reader)
    group = reward.group
    if not plan.is_asked((*group, _STEPS), (*group, _GAMMA)):
        return found
    if group:  # one count per agent, even if all agents end together
        count = np.broadcast_to(count, (count.shape[0], *column.shape[:-1], count.shape[-1])).copy()
    else:
        count = count.reshape(len(count), 1)
    return found | _counted(group, count, returns, plan.dtype or _sum_dtype(column))


def _counted(
    group: Key, count: np.ndarray, returns: _Returns, dtype: torch.dtype
) -> dict[Key, torch.Tensor]:
    """Return the numbers of terms ``count`` [rows, ...] and the remaining discounts."""
    gamma = returns.gamma
    left = _powers(gamma, returns.n + 1).take(count) if isinstance(gamma, float) else gamma**count
    return {
        (*group, _STEPS): torch.from_numpy(count),
        (*group, _GAMMA): _cast(left, dtype),
    }


def _cast(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float32:  # takes a sixth of the time of torch, with the same result
        return torch.from_numpy(values.astype(np.float32))
    return torch.from_numpy(values).to(dtype)


@lru_cache(maxsize=8)
def _powers(gamma: float, count: int) -> np.ndarray:
    """Return the first powers of a discount, [count]. Do not write to the array."""
    return gamma ** np.arange(count)


def _sum_dtype(column: Column) -> torch.dtype:
    return column.dtype if column.dtype.is_floating_point else torch.float32


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
    whole = not column.dtype.is_floating_point
    dtype = returns.plan.dtype or _sum_dtype(column)
    shape = (-1, *(1 for _ in values.shape[1:]))
    if isinstance(gamma, float):
        powers = _powers(gamma, len(values)).reshape(shape)
    else:
        powers = gamma ** np.arange(len(values)).reshape(shape)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.where(used, values * powers, 0)
        total = terms[0].copy()
        for term in terms[1:]:  # in the order of the compiled sums
            total += term
        found = _cast(total, dtype)
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
    arrays: Mapping[Key, np.ndarray],
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
    for key, array in arrays.items():
        if key[: len(inside)] == inside and array.shape[1 : 1 + len(sizes)] == sizes:
            by_agent = (-1, agents, *array.shape[1 + len(sizes) :])
            values = reader.column(key).take(own[row, agent]).reshape(by_agent)
            array.reshape(by_agent)[row, agent] = values[np.arange(len(row)), agent]


def _put_into(batch: TensorDictBase, found: TensorDict, plan: _Plan) -> TensorDict:
    """Add the other entries of the batch, such as its index and weights, to the found rows."""
    if batch.device is not None:
        found = found.to(batch.device)
    known = plan.every
    for key, leaf in batch.items(include_nested=True, leaves_only=True):
        if as_key(key) not in known and key != CUT:
            found.set(key, leaf)
    if MASK in known or (mask := batch.get(MASK, None)) is None:
        return found
    for key in plan.keys:  # zero the positions of a slice that have no row
        leaf = found.get(key)
        leaf.view(SIGNED.get(leaf.dtype, leaf.dtype))[~mask.to(leaf.device)] = 0
    return found
