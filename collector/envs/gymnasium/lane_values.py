"""Validation of the values that lanes return to a `SyncVectorEnv`, before casts hide faults."""

from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

from tallyroll.collector.compat import own_observations, replace_values
from tallyroll.collector.envs.exact import (
    ExactRow,
    checked,
    reward_reader,
    terminated_of,
    truncated_of,
)
from tallyroll.collector.envs.gymnasium.spaces import Leaf, observation_leaves
from tallyroll.collector.errors import SpaceError

_FLAGS = {"terminated": terminated_of, "truncated": truncated_of}


CANNOT_TAKE = KeyError, IndexError, TypeError, ValueError
"""Exceptions of a vector that cannot process the values that a lane returned."""


_UTILS = "gymnasium.vector.utils"
_STEPS, _MOST_STEPS = 32, 2048


class LaneValues:
    """Validates the values of the lanes of ``env`` if the vector below its wrappers is plain.

    A plain vector is a `SyncVectorEnv` and not a subclass. Nothing is validated in other vectors.

    Args:
        env: the vector.
        rewards: shape of a lane's reward.
    """

    def __init__(self, env: VectorEnv, rewards: tuple[int, ...]) -> None:
        self.reward: Callable[[Any], Any] = reward_reader(None)
        self._many_rewards = bool(rewards)
        if rewards:
            self.reward = ExactRow(("reward",), rewards, np.dtype(np.float64)).array
        base = env.unwrapped
        self._steps, self._ended = 0, np.zeros(env.num_envs, np.bool_)
        self.watching = type(base) is SyncVectorEnv
        """True if rewards and flags are validated."""
        self._env = base if type(base) is SyncVectorEnv else None
        self._rows: list[tuple[Any, Callable[[Any], Any], ExactRow]] = []
        self._are_bare = False
        """True if observations are arrays themselves."""
        if self._env is None:
            return
        try:
            leaves = observation_leaves(base.single_observation_space, base.num_envs)
        except SpaceError:  # a wrapper converts the space to another
            return
        self._rows = [
            (leaf.path[0] if len(leaf.path) == 1 else None, leaf.getter(), row_of(leaf))
            for leaf in leaves
            if not leaf.text
        ]
        self._are_bare = not any(leaf.path or leaf.text for leaf in leaves)

    def read_rewards_as(self, dtype: torch.dtype | None) -> None:
        """Convert scalar rewards as for a column of ``dtype``."""
        if not self._many_rewards:
            self.reward = reward_reader(dtype)

    def watch(self) -> None:
        """Validate each written reward and flag until each lane has ended an episode.

        :meth:`stepped` stops the validation, after at least 32 and at most 2048 steps.

        Validation takes as long as a step of a small environment, and the types of these values do
        not change. A full reset makes new arrays of flags, so call this method after each one.
        """
        if self._env is not None and self.watching:
            replace_values(self._env, self._watched)

    def stepped(self, ended: Any) -> None:
        """Stop the validation once enough steps were seen. ``ended`` marks lanes ``[lane]``."""
        self._steps += 1
        self._ended |= ended
        if self._steps >= _MOST_STEPS or (self._steps >= _STEPS and self._ended.all()):
            self.watching = False
            replace_values(self._env, lambda _, values: values.view(np.ndarray))  # type: ignore[arg-type]

    def _watched(self, name: str, values: Any) -> Any:
        flags = name != "reward"
        return checked(values, _FLAGS[name] if flags else self.reward, flags=flags)

    def look(self, *, first: bool, raised: Exception | None = None) -> None:
        """Validate the last observation of each lane, also if the vector could not process it.

        ``raised`` is the exception of the vector, if any. A lane may have raised before it
        returned an observation.

        Raises:
            ValueRefused: an observation differs from the declaration of the space.
        """
        if self._env is None:
            return
        held = own_observations(self._env)
        lanes: Sequence[int] = range(len(held))
        if raised is not None and not _puts_together(raised):
            lanes = [lane for lane in lanes if held[lane] is not None]
        for name, get, row in self._rows:
            if self._are_bare and row.are_right(held):
                continue
            right = row.is_right
            for lane in lanes:
                seen = held[lane]
                if name is None or type(seen) is not dict or name not in seen:
                    value = part_of(get, seen, row, lane)
                else:
                    value = seen[name]
                if not right(value):
                    row.of_lane(lane, value, first=first)


def _puts_together(error: Exception) -> bool:
    """Return True if Gymnasium raised ``error`` while it concatenated observations of lanes."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith(_UTILS) for frame in frames)


def row_of(leaf: Leaf) -> ExactRow:
    """Return the converter of one lane's values for the column of a leaf."""
    return ExactRow(leaf.key, leaf.shape[1:], leaf.dtype)


def part_of(
    get: Callable[[Any], Any], seen: Any, row: ExactRow, lane: int, *, first: bool = False
) -> Any:
    """Return a leaf of a lane's observation.

    Raises:
        ValueRefused: the observation has no such leaf.
    """
    try:
        return get(seen)
    except (KeyError, IndexError, TypeError) as error:
        refused = row.refused(f"none in {type(seen).__name__} {seen!r:.80}", first=first)
        raise refused.locate(lane=lane) from error
