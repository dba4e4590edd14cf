"""An environment that shows its level in each observation, and a check of recorded calls by it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

FORM = spaces.Box(-1e6, 1e6, (3,), np.float32)


fuse = [0]
"""Steps of all environments in this process until one raises; 0 disables it."""


class Levels(gymnasium.Env[Any, Any]):
    """An environment that observes its level, step and episode. Episodes last 2 to 5 steps."""

    observation_space, action_space = FORM, spaces.Discrete(2)

    def __init__(self) -> None:
        self.level, self._step, self._episode = 0.0, 0, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._step, self._episode = 0, self._episode + 1
        return self._seen(), {}

    def _seen(self) -> Any:
        return np.array([self.level, self._step, self._episode], np.float32)

    def step(self, action: Any) -> Any:
        self._step += 1
        if fuse[0]:
            fuse[0] -= 1
            if not fuse[0]:
                raise ValueError("the fuse is burnt")
        return self._seen(), 1.0, self._step >= 2 + self._episode % 4, False, {}

    def raise_level(self, by: float = 1.0) -> float:
        """Raise the level."""
        self.level += by
        return self.level

    def refuse(self, above: float) -> float:
        """Raise an error in lanes whose level is higher than `above`."""
        if self.level > above:
            raise ValueError(f"{self.level} is above {above}")
        return self.level

    def take(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments, and change nothing."""

    def nap(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def odd(self) -> Any:
        """Return a value that cannot be pickled."""
        return (each for each in ())

    def end(self, how: str, above: float = -1.0) -> None:
        """Kill the process, or hang, in lanes whose level is higher than `above`."""
        if self.level > above:
            if how == "hang":
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL)


class Inner(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper with an attribute of its own."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.scale = 1.0


def wrapped() -> Any:
    """Return an environment in wrappers."""
    return Inner(gymnasium.wrappers.TimeLimit(Levels(), 3))


def require_recorded(rows: Any, events: Sequence[Mapping[str, Any]]) -> int:
    """Compare each row's level with the recorded events. Return how many levels were not 0.

    The plain model replays each lane's rows in order, and applies the calls that came before each
    row.
    """
    lane, ids, steps = (rows["collector", name].tolist() for name in ("lane", "traj_ids", "step"))
    shown = rows["next", "observation"][:, 0].tolist()
    levels, calls, changed = dict.fromkeys(lane, 0.0), {own: [*events] for own in lane}, 0
    for row, own in enumerate(lane):
        while calls[own] and _is_before(calls[own][0], own, row, ids[row], steps[row]):
            levels[own] = _applied(calls[own].pop(0), own, levels[own])
        assert shown[row] == levels[own], (row, own, ids[row], steps[row], events)
        changed += levels[own] != 0
    return changed


def _is_before(event: Mapping[str, Any], lane: int, row: int, id: int, step: int) -> bool:
    lanes = event["lanes"]
    if lanes is not None and lane not in lanes:
        return row >= event["at"]
    if "first" in event:
        first = event["first"][lane if lanes is None else lanes.index(lane)]
        return [id, step] >= first
    return row >= event["at"]


def _applied(event: Mapping[str, Any], lane: int, level: float) -> float:
    lanes, args = event["lanes"], event["args"]
    if lanes is not None and lane not in lanes:
        return level
    if event["call"] == "env_call" and event["name"] != "raise_level":
        return level
    if event["call"] == "env_call":
        return level + (args or [event["kwargs"].get("by", 1.0)])[0]
    place = lane if lanes is None else lanes.index(lane)
    return args[0][place] if isinstance(args[0], list) else args[0]
