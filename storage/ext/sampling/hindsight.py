"""Hindsight experience replay: rows whose goals are replaced by goals that were reached later."""

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
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.readers.row_reader import RowReader, index_of, take_rows
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
    """Return the last row of the stretch of each of ``rows`` [n], and the number of steps to it.

    A stretch is a part of a trajectory without a gap. The cost is proportional to the number of
    rows that follow ``rows`` in their stretches.
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
    """Return how many rows from ``first`` on precede each of ``rows`` [n] in its stretch."""
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
"""The rows of a trajectory from which goals may be taken."""
Judge: TypeAlias = Callable[[np.ndarray, np.ndarray, TensorDict], Any]
"""Function of achieved goals [n, ...], desired goals [n, ...], and the rows [n]."""

GOAL_ROW: Final[Key] = ("collector", "goal_row")
_PATIENCE_SECONDS: Final = 1.0


class HindsightSampler(StatelessSampler):
    """Sampler that replaces the goals of some rows by goals that their trajectory reached.

    It implements hindsight experience replay (Andrychowicz et al., 2017) for environments such as
    those of Gymnasium-Robotics, whose observations contain a desired and an achieved goal. Use it
    alone::

        sampler = HindsightSampler(storage, reward)
        batch = sampler.sample(256)

    or in a TorchRL replay buffer::

        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=256)

    Rows are drawn uniformly, with replacement. ``relabelled * n`` of them, at random positions, get
    the goal that was achieved in the step of another row of the same trajectory, wherever that row
    is stored: lanes may alternate, and trajectories may cross batches. For an open trajectory, the
    steps stored so far count. If rows of a trajectory were never stored, the rows before the gap
    are treated as a separate trajectory. If ``relabelled * n`` is not an integer, it is rounded
    randomly so that its mean is exact.

    In a relabelled row, the desired goal and the desired goal below ``"next"`` are replaced, and
    ``reward`` computes ``("next", "reward")``. If ``terminated`` is given, it computes the
    terminated flag, and the done flag is set accordingly. All other rows and values are as stored.
    ``("collector", "row")`` contains the number of each row. ``("collector", "goal_row")`` contains
    the number of the row that supplied its goal, or -1 if the row has its stored goal.

    Args:
        storage: a Tallyroll storage; with ``mode="read"``, another process may append to it.
        reward: a function that returns m rewards. Its arguments are the achieved goals [m, ...]
            and the desired goals [m, ...] as arrays (float32 for bfloat16 columns), and the m
            relabelled rows as they will be returned, but without their new rewards. The
            ``compute_reward`` method of an environment is suitable if it accepts batches.
        relabelled: the fraction of rows with a new goal, from 0 to 1; 0.8 relabels four rows for
            each row that keeps its goal.
        strategy: the row that a goal comes from: ``"future"``, a uniformly drawn row among the row
            itself and the later rows of its trajectory; ``"final"``, the last row; ``"episode"``,
            any row of the trajectory.
        terminated: a function with the arguments of ``reward`` that returns whether the row ends
            its episode, given the new goal. None keeps the stored flags.
        desired, achieved: keys of the goals, such as ``("agent", "desired_goal")``. The keys below
            ``"next"`` are derived from them.
        generator: the random number generator if neither a buffer nor the caller passes one; None
            is torch's default.

    Raises:
        TypeError: ``storage`` is not a Tallyroll storage, or ``reward`` is not callable.
        ValueError: an argument is out of range, or goals differ in shape or dtype.
        ColumnsMissing: the rows lack the goals or the trajectory ids.
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
        others = "For a storage of TorchRL, use its HERReplayBuffer, which supports one lane."
        require_storage(storage, "HindsightSampler", others)
        for name, judge in (("reward", reward), ("terminated", terminated)):
            if not callable(judge) and not (name == "terminated" and judge is None):
                raise TypeError(
                    f"{name}: expected a function of achieved goals, desired goals and rows, got "
                    f"{judge!r}."
                )
        if type(relabelled) not in (int, float) or not 0 <= relabelled <= 1:
            raise ValueError(f"relabelled: expected a share from 0 to 1, got {relabelled!r}.")
        if strategy not in get_args(Strategy):
            names = ", ".join(map(repr, get_args(Strategy)))
            raise ValueError(f"strategy: expected one of {names}, got {strategy!r}.")
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
        """Return a sample: ``sample(n)`` for direct use, ``sample(storage, n)`` for a buffer.

        ``sample(n)`` returns a TensorDict [n]. ``sample(storage, n)``, which TorchRL's buffers
        call, returns the index of n rows, and a mapping of the values that differ from the stored
        ones.

        Args:
            storage: the number of rows, or the storage of a buffer.
            batch_size: the number of rows, for a buffer.
            generator: the random number generator, which loader threads pass; None uses the
                generator of the sampler.

        Raises:
            NoSlices: there are no rows yet.
            ValueError: the storage is not the sampler's, or a function did not return one value per
                relabelled row.
            Overrun: another process overwrites a ring faster than it is read.
        """
        count = storage if batch_size is None else batch_size
        if batch_size is not None:
            require_same(self.storage, storage)
        check_positive("the number of rows", count)
        random = self._generator if generator is None else generator
        batch = read_consistently(self._reader, lambda: self._sample(count, random))
        if batch_size is None:
            return batch
        require_slots_stay(
            self.storage,
            "Call sample(n) without a buffer: it draws again if rows were overwritten.",
        )
        index = index_of(self._reader, batch.get(ROW).numpy())
        ends = [] if self._terminated is None else [TERMINATED, DONE]
        keys = [*self._goal_columns(), REWARD, *ends, ROW, GOAL_ROW]
        info = {key: batch.get(key) for key in keys if batch.get(key, None) is not None}
        return torch.from_numpy(index), info

    # --- row selection ----------------------------------------------------------------------------

    def _sample(self, count: int, random: torch.Generator | None) -> TensorDict:
        reader = self._reader
        if not len(reader.span):
            raise NoSlices(f"{reader.path} has no rows yet to draw from. Collect some first.")
        columns = self._goal_columns()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            rows, goal_rows = self._draw(count, random)
            at = np.flatnonzero(goal_rows >= 0)
            with contextlib.suppress(IndexOutOfRange):  # rows were overwritten after the draw
                goals = take_rows(reader, goal_rows[at], [self._achieved]).get(self._achieved)
                found = take_rows(reader, rows)
                break
            if time.monotonic() > deadline:
                raise reader.overrun(f"{count} rows and their goals")
        found.set(ROW, torch.from_numpy(rows))
        found.set(GOAL_ROW, torch.from_numpy(goal_rows))
        if len(at):
            self._relabel(found, torch.from_numpy(at), goals, columns)
        return found

    def _draw(self, count: int, random: torch.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows [count], and for each the row of its new goal, or -1 to keep the stored one."""
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
            left = max(1, known.seen - first)  # if 0, the read below finds that the rows are gone
            rows = first + _below(numbers[:count], left)
            goals = np.full(count, -1)
            if some and known.seen > first:
                goals[at] = self._goal_rows(known, rows[at], first, numbers[count : count + some])
        return rows, goals

    def _goal_rows(
        self, index: Any, rows: np.ndarray, first: int, numbers: np.ndarray
    ) -> np.ndarray:
        """Return the row whose achieved goal each of ``rows`` gets; -1 if there is none."""
        last, after = ends_of(index, rows)
        steps = after
        if keys := next_valid_keys(self._reader.keys):  # a lost observation contains no goal
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

    # --- relabelling ------------------------------------------------------------------------------

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
        """Return the columns that receive new goals."""
        if self._goals is None:
            reader = self._reader
            ends = [] if self._terminated is None else [TERMINATED]
            needed = [self._desired, self._achieved, REWARD, *ends]
            if missing := [key for key in needed if key not in reader.keys]:
                raise ColumnsMissing(
                    f"{reader.path} has no {', no '.join(map(format_key, missing))}. Relabeling "
                    "goals needs these columns. The columns are "
                    f"{', '.join(map(format_key, reader.keys))}. "
                    "Name the goals by desired= and achieved=."
                    f"{excluded_note(reader.runs, missing)}"
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
                        "Store both with the same shape and dtype."
                    )
            self._goals = keys
        return self._goals

    # --- interface for TorchRL's buffers ----------------------------------------------------------

    @property
    def _rng(self) -> torch.Generator | None:
        return self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        if generator is not None:  # a buffer without a generator keeps the sampler's
            self._generator = generator

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        return len(self._reader.span)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.storage!r}, relabelled={self.relabelled}, "
            f"strategy={self.strategy!r})"
        )


def _below(numbers: np.ndarray, below: Any) -> np.ndarray:
    """Convert uniform numbers [n] from [0, 1) to integers from 0 to ``below - 1``."""
    found: np.ndarray = np.minimum((numbers * below).astype(np.int64), below - 1)
    return found


def _array(values: torch.Tensor) -> np.ndarray:
    """Convert a tensor to an array; bfloat16, which NumPy lacks, becomes float32 exactly."""
    found: np.ndarray = (values.float() if values.dtype is torch.bfloat16 else values).numpy(
        force=True
    )
    return found


def _values(name: str, value: Any, column: torch.Tensor) -> torch.Tensor:
    """Convert the result of a user's function to the shape and dtype of a column."""
    try:
        given = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} returned {type(value).__name__}, which cannot be converted to an array: "
            f"{error}. Return one value per row."
        ) from error
    if given.numel() != column.numel():
        raise ValueError(
            f"{name}: expected values of shape {list(column.shape)} for all {len(column)} rows at "
            f"once, got shape {list(given.shape)}. Return one value per row."
        )
    if given.dtype.is_floating_point and not given.isfinite().all():
        raise ValueError(f"{name} returned values that are infinite or NaN. Nothing was drawn.")
    found = given.detach().reshape(column.shape).to(column.dtype)
    if not column.dtype.is_floating_point and (found != given.reshape(column.shape)).any():
        raise ValueError(
            f"{name} returned {given.dtype} values that {column.dtype} cannot represent. Return "
            "values of the column's dtype."
        )
    return found


def _device_of(random: torch.Generator | None) -> torch.device | None:
    return None if random is None else random.device
