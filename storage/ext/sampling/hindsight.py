"""Rows whose goals are what was reached later: hindsight experience replay."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage.errors import ColumnsMissing, IndexOutOfRange, NoSlices
from tallyroll.storage.ext.sampling.prioritized import ROW
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import (
    DONE,
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    as_key,
    format_key,
    next_valid_keys,
)
from tallyroll.storage.sampling.sampled_storage import (
    StatelessSampler,
    require_same,
    require_slots_stay,
    require_storage,
)
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.row_index import RowIndex
from tallyroll.storage.trajectories.windows import check_positive
from tallyroll.storage.user_code import user_callback

_REACH, _MOST_REACH, _MOST_NUMBERS = 32, 2**12, 2**20


def ends_of(index: RowIndex, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the last row of each one's stretch, and how many steps it is after ``rows`` [n].

    It looks at as many rows as the stretches have left, of all ``rows`` at once.
    """
    last, left = rows.copy(), np.zeros(len(rows), np.int64)
    going, reach = np.arange(len(rows)), _REACH
    while len(going):
        size, more = max(1, _MOST_NUMBERS // reach), []
        for begin in range(0, len(going), size):
            part = going[begin : begin + size]
            onward = index.onward(last[part], reach)
            steps = (onward[1:] != onward[:-1]).sum(axis=0)  # the last row is repeated
            last[part] = onward[-1]
            left[part] += steps
            more.append(part[steps == reach - 1])
        going, reach = np.concatenate(more), min(2 * reach, _MOST_REACH)
    return last, left


def steps_before(index: RowIndex, rows: np.ndarray, first: int) -> np.ndarray:
    """Return how many rows from ``first`` on come before each of ``rows`` [n] in its stretch."""
    before, _ = index.places(rows)
    most = before.astype(np.int64)
    if not first:
        return most
    least, middle = np.zeros_like(most), most
    while True:
        there = index.back(rows, middle) >= first
        least, most = np.where(there, middle, least), np.where(there, most, middle - 1)
        if (least >= most).all():
            return least
        middle = (least + most + 1) >> 1


Strategy: TypeAlias = Literal["future", "final", "episode"]
"""Rows from which goals come."""
Judge: TypeAlias = Callable[[np.ndarray, np.ndarray, TensorDict], Any]
"""A function of what was achieved [n, ...], what was desired [n, ...], and the rows [n]."""

GOAL_ROW: Final[Key] = ("collector", "goal_row")
_PATIENCE_SECONDS: Final = 1.0


class HindsightSampler(StatelessSampler):
    """Draws rows, and gives some of them a goal that their trajectory reached.

    Hindsight experience replay (Andrychowicz et al., 2017), for environments like those of
    Gymnasium-Robotics, whose observations say what is desired and what is achieved. Alone::

        sampler = HindsightSampler(storage, reward)
        batch = sampler.sample(256)

    and in a replay buffer of TorchRL's::

        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=256)

    Rows are drawn uniformly, with replacement. Of ``relabelled * n`` of them, at places drawn at
    random, the goal is replaced by what was achieved in the step of another row of the same
    trajectory, wherever that is stored: lanes may alternate, and trajectories cross batches. Of a
    trajectory that still goes on, the steps that are stored count; where rows in between were never
    stored, those before the gap are a trajectory of their own. Where ``relabelled * n`` is no whole
    number, it is rounded at random, so that its mean is exact.

    In a row with a new goal the desired goal and that below ``"next"`` are replaced, and
    ``("next", "reward")`` is what ``reward`` returns; with ``terminated`` the row's terminated and
    done too. All other rows, and all other values, are as stored. ``("collector", "row")`` has the
    number of each row, and ``("collector", "goal_row")`` that of the row whose achieved goal it
    got, -1 where the goal is the stored one.

    Args:
        storage: a Tallyroll storage; one with ``mode="read"`` may be growing.
        reward: called with the achieved goals [m, ...] and the desired ones [m, ...], as arrays
            (float32 for bfloat16 columns), and with the m rows as they will be returned, without
            their new rewards; returns m rewards.
            ``compute_reward`` of an environment is one, if it takes many at once. It is called with
            the relabelled rows only.
        relabelled: the share of rows with a new goal, from 0 to 1; 0.8 are four for each other.
        strategy: the row that a goal comes from: ``"future"``, one of those from the row itself
            on, each with the same probability; ``"final"``, the last one; ``"episode"``, any.
        terminated: as ``reward``, returns whether the row ended its episode, with the new goal.
            None leaves it as stored.
        desired, achieved: keys of the goals, as ``("agent", "desired_goal")``; those below
            ``"next"`` follow from them.
        generator: of random numbers, where neither a buffer nor the caller gives one; None is
            torch's own.

    Raises:
        TypeError: not a Tallyroll storage, or ``reward`` is no function.
        ValueError: an argument is out of its range, or goals differ in shape or dtype.
        ColumnsMissing: the rows have no such goals, or do not say which trajectory they belong to.
    """

    def __init__(
        self,
        storage: DiskStorage,
        reward: Judge,
        *,
        relabelled: float = 0.8,
        strategy: Strategy = "future",
        terminated: Judge | None = None,
        desired: str | Key = "desired_goal",
        achieved: str | Key = "achieved_goal",
        generator: torch.Generator | None = None,
    ) -> None:
        others = "TorchRL's HERReplayBuffer draws from TorchRL's, one lane."
        require_storage(storage, "HindsightSampler", others)
        for name, judge in (("reward", reward), ("terminated", terminated)):
            if not callable(judge) and not (name == "terminated" and judge is None):
                raise TypeError(
                    f"{name} is a function of achieved goals, desired goals and rows, got "
                    f"{judge!r}."
                )
        if type(relabelled) not in (int, float) or not 0 <= relabelled <= 1:
            raise ValueError(f"relabelled is a share from 0 to 1, got {relabelled!r}.")
        if strategy not in get_args(Strategy):
            names = ", ".join(map(repr, get_args(Strategy)))
            raise ValueError(f"strategy is one of {names}, got {strategy!r}.")
        self.storage, self.relabelled, self.strategy = storage, relabelled, strategy
        self._reader: RowReader = storage.reader
        self._reward, self._terminated = reward, terminated
        self._desired, self._achieved = as_key(desired), (NEXT, *as_key(achieved))
        self._generator = generator
        self._goals: list[Key] | None = None
        if self._reader.initialised:
            self._goal_columns()

    def sample(
        self,
        storage: Any,
        batch_size: int | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Return a sample: ``sample(n)`` of the storage, ``sample(storage, n)`` for a buffer.

        ``sample(n)`` is a TensorDict [n]. ``sample(storage, n)``, which TorchRL's buffers call,
        returns the index of n rows, and a mapping of the values that are not as stored.

        Args:
            storage: the number of rows; or the storage of a buffer.
            batch_size: the number of rows, for a buffer.
            generator: of random numbers, as threads of a loader have them; None: the sampler's.

        Raises:
            NoSlices: there are no rows yet.
            ValueError: another storage than the sampler's, or a function returned no m values.
            Overrun: a ring is overwritten by another process faster than it is read.
        """
        count = storage if batch_size is None else batch_size
        if batch_size is not None:
            require_same(self.storage, storage)
        check_positive("the number of rows", count)
        random = self._generator if generator is None else generator
        batch = read_consistently(self._reader, lambda: self._sample(count, random))
        if batch_size is None:
            return batch
        require_slots_stay(self.storage, "Call sample(n), which looks again.")
        index = self._reader.index_of(batch.get(ROW).numpy())
        ends = [] if self._terminated is None else [TERMINATED, DONE]
        keys = [*self._goal_columns(), REWARD, *ends, ROW, GOAL_ROW]
        info = {key: batch.get(key) for key in keys if batch.get(key, None) is not None}
        return torch.from_numpy(index), info

    # --- which rows -------------------------------------------------------------------------------

    def _sample(self, count: int, random: torch.Generator | None) -> TensorDict:
        reader = self._reader
        if not len(reader.span):
            raise NoSlices(f"{reader.path} has no rows yet to draw from. Collect some first.")
        columns = self._goal_columns()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            rows, goal_rows = self._draw(count, random)
            at = np.flatnonzero(goal_rows >= 0)
            with contextlib.suppress(IndexOutOfRange):  # overwritten since they were drawn
                goals = reader.take(goal_rows[at], [self._achieved]).get(self._achieved)
                found = reader.take(rows)
                break
            if time.monotonic() > deadline:
                raise reader.overrun(f"{count} rows and their goals")
        found.set(ROW, torch.from_numpy(rows))
        found.set(GOAL_ROW, torch.from_numpy(goal_rows))
        if len(at):
            self._relabel(found, torch.from_numpy(at), goals, columns)
        return found

    def _draw(self, count: int, random: torch.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows [count], and the row of each one's new goal; -1: it keeps its own."""
        reader = self._reader
        uniform = torch.empty(2 * count + 1, dtype=torch.float64, device=_device_of(random))
        numbers = uniform.uniform_(generator=random).numpy(force=True)
        share = self.relabelled * count
        some = min(count, int(share + numbers[-1]))
        order = torch.randperm(count, generator=random, device=_device_of(random))
        at = order[:some].numpy(force=True)
        index = reader.trajectory_index
        with index.lock:
            known = index.rows(reader)
            first = reader.span.start
            left = max(1, known.seen - first)  # without any, they are found to be gone
            rows = first + _below(numbers[:count], left)
            goals = np.full(count, -1)
            if some and known.seen > first:
                goals[at] = self._goal_rows(known, rows[at], first, numbers[count : count + some])
        return rows, goals

    def _goal_rows(
        self, index: Any, rows: np.ndarray, first: int, numbers: np.ndarray
    ) -> np.ndarray:
        """Return the rows whose achieved goals ``rows`` get, -1 where there is none."""
        last, after = ends_of(index, rows)
        steps = after
        if keys := next_valid_keys(self._reader.keys):  # a lost observation says no goal
            columns = self._reader.copies(last, keys)
            valid = [(each != 0).reshape(len(last), -1).all(1) for each in columns]
            steps = after - ~np.logical_and.reduce(valid)
        if self.strategy == "final":
            back = after - steps
        elif self.strategy == "future":
            back = after - _below(numbers, steps + 1)
        else:
            count = steps + 1 + steps_before(index, rows, first)
            back = after - steps + _below(numbers, count)
            steps = count - 1
        none = steps < 0
        found = index.back(last, np.where(none, 0, back))
        found[none] = -1
        return np.asarray(found)

    # --- what they become -------------------------------------------------------------------------

    def _relabel(
        self, found: TensorDict, at: torch.Tensor, goals: torch.Tensor, columns: list[Key]
    ) -> None:
        for key in columns:
            found.get(key)[at] = goals
        rows = found[at]
        reached, wanted = rows.get(self._achieved), rows.get(self._desired)

        def judged(name: str, judge: Judge, column: torch.Tensor) -> torch.Tensor:
            with user_callback(name):
                value = judge(_array(reached), _array(wanted), rows)
            return _values(name, value, column[at])

        reward = found.get(REWARD)
        reward[at] = judged("reward", self._reward, reward)
        if self._terminated is not None:
            ended = found.get(TERMINATED)
            ended[at] = judged("terminated", self._terminated, ended)
            if (done := found.get(DONE, None)) is not None:
                truncated = found.get(TRUNCATED, None)
                done[at] = ended[at] if truncated is None else ended[at] | truncated[at]

    def _goal_columns(self) -> list[Key]:
        """Return the columns that new goals are written to."""
        if self._goals is None:
            reader = self._reader
            ends = [] if self._terminated is None else [TERMINATED]
            needed = [self._desired, self._achieved, REWARD, *ends]
            if missing := [key for key in needed if key not in reader.keys]:
                raise ColumnsMissing(
                    f"{reader.path} has no {', no '.join(map(format_key, missing))}, which goals "
                    f"in hindsight need. It has {', '.join(map(format_key, reader.keys))}. Name "
                    "the goals by desired= and achieved=."
                )
            columns = {column.key: column for column in reader.schema.columns}
            keys = [key for key in (self._desired, (NEXT, *self._desired)) if key in columns]
            achieved = columns[self._achieved]
            for key in keys:
                if (columns[key].shape, columns[key].dtype) != (achieved.shape, achieved.dtype):
                    raise ValueError(
                        f"expected goals of one shape and dtype, got {format_key(key)} "
                        f"{columns[key].dtype} {list(columns[key].shape)} and "
                        f"{format_key(self._achieved)} {achieved.dtype} {list(achieved.shape)}. "
                        "Store them alike."
                    )
            self._goals = keys
        return self._goals

    # --- what TorchRL's buffers ask ---------------------------------------------------------------

    @property
    def _rng(self) -> torch.Generator | None:
        return self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        if generator is not None:  # a buffer without one leaves the sampler's
            self._generator = generator

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        return len(self._reader.span)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.storage!r}, relabelled={self.relabelled}, "
            f"strategy={self.strategy!r})"
        )


def _below(numbers: np.ndarray, below: Any) -> np.ndarray:
    """Return whole numbers from 0 to ``below - 1``, of uniform ones [n] from 0 to 1."""
    found: np.ndarray = np.minimum((numbers * below).astype(np.int64), below - 1)
    return found


def _array(values: torch.Tensor) -> np.ndarray:
    """Return values as an array; NumPy has no bfloat16, whose values float32 holds exactly."""
    found: np.ndarray = (values.float() if values.dtype is torch.bfloat16 else values).numpy(
        force=True
    )
    return found


def _values(name: str, value: Any, column: torch.Tensor) -> torch.Tensor:
    """Return what a function of the caller's returned, in the shape and dtype of a column."""
    try:
        given = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} returned {type(value).__name__}, which is no array: {error}. Return one "
            "value a row."
        ) from error
    if given.numel() != column.numel():
        raise ValueError(
            f"{name} is called with all {len(column)} rows at once: expected values of shape "
            f"{list(column.shape)}, or as many, got {list(given.shape)}. Return one a row."
        )
    if given.dtype.is_floating_point and not given.isfinite().all():
        raise ValueError(f"{name} returned values that are infinite or NaN. Nothing was drawn.")
    found = given.detach().reshape(column.shape).to(column.dtype)
    if not column.dtype.is_floating_point and (found != given.reshape(column.shape)).any():
        raise ValueError(
            f"{name} returned {given.dtype} values that {column.dtype} cannot hold. Return what "
            "the column holds."
        )
    return found


def _device_of(random: torch.Generator | None) -> torch.device | None:
    return None if random is None else random.device
