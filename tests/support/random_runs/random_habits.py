"""Parts around a random lane: Gymnasium's wrappers, its witness, and its bad habits."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import wrappers

from random_lanes import (
    INFOS,
    Event,
    Form,
    Journal,
    Lane,
    LaneKind,
    Reuse,
    SelfReset,
    World,
    injected,
)
from random_spaces import Array, leaves


class Witness(gym.Wrapper[Any, Any, Any, Any]):
    """Writes down what was done, in copies."""

    def __init__(self, env: gym.Env[Any, Any], journal: Journal) -> None:
        super().__init__(env)
        self.journal = journal

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset, and write it down."""
        given = kwargs.get("seed"), dict(kwargs.get("options") or {})
        observation, info = self.env.reset(**kwargs)
        self.journal.write(Event(leaves(observation), _numbers(info), given=given))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and write it down."""
        given = np.array(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.journal.write(
            Event(leaves(observation), _numbers(info), given, float(reward), terminated, truncated)
        )
        return observation, reward, terminated, truncated, info


def _numbers(info: dict[str, Any]) -> dict[str, Array]:
    return {name: np.array(value) for name, value in info.items() if name in INFOS}


class Reused(gym.Wrapper[Any, Any, Any, Any]):
    """Observations are the same arrays again and again, or views of the same memory."""

    def __init__(self, env: gym.Env[Any, Any], reuse: Reuse) -> None:
        super().__init__(env)
        self.reuse, self.calls = reuse, 0
        self.buffers: dict[tuple[Any, ...], Any] = {}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset."""
        observation, info = self.env.reset(**kwargs)
        return self._again(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step."""
        observation, *rest = self.env.step(action)
        return self._again(observation), *rest

    def _again(self, observation: Any) -> Any:
        self.calls += 1
        keys = list(_paths(observation))
        return self._in_buffers(observation, (), keys[0])

    def _in_buffers(self, value: Any, path: tuple[Any, ...], first: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            # A new Dict each time: TorchRL's wrapper writes to the one that it gets.
            return {k: self._in_buffers(v, (*path, k), first) for k, v in value.items()}
        if isinstance(value, tuple):
            return tuple(self._in_buffers(v, (*path, i), first) for i, v in enumerate(value))
        if not isinstance(value, np.ndarray) or (self.reuse == "one key" and path != first):
            return value
        count = {"double": 2, "ring": 3}.get(self.reuse, 1)
        if path not in self.buffers:
            self.buffers[path] = np.zeros((count, *value.shape), value.dtype)
            self.buffers[*path, "rows"] = [row[...] for row in self.buffers[path]]
        at = self.calls % count
        self.buffers[path][at] = value
        return self.buffers[path][at] if self.reuse == "view" else self.buffers[*path, "rows"][at]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Where arrays are, and then everything else."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    else:
        yield path
        return
    for name, part in items:
        yield from _paths(part, (*path, name))


class ResetsItself(gym.Wrapper[Any, Any, Any, Any]):
    """At the end of an episode the first observation of the next one is returned, silently.

    With "once" the reset that follows returns the same again, with "twice" it begins another.
    """

    def __init__(self, env: gym.Env[Any, Any], kind: SelfReset) -> None:
        super().__init__(env)
        self.kind = kind
        self.fresh: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset, unless it was done."""
        fresh, self.fresh = self.fresh, None
        if fresh is not None and self.kind == "once" and kwargs.get("seed") is None:
            observation, info = _same_arrays(fresh[0]), fresh[1]
        else:
            observation, info = self.env.reset(**kwargs)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and reset at an end."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.fresh = None
        if terminated or truncated:
            self.fresh = self.env.reset()
            observation = _same_arrays(self.fresh[0])
        return observation, reward, terminated, truncated, info


def _same_arrays(value: Any) -> Any:
    """The same arrays in another Dict: TorchRL's wrapper writes to the one that it gets."""
    return {k: _same_arrays(v) for k, v in value.items()} if isinstance(value, dict) else value


class WritesAction(gym.Wrapper[Any, Any, Any, Any]):
    """Uses the array of its action for something else, afterwards."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and write to the action."""
        out = self.env.step(np.array(action) if isinstance(action, np.ndarray) else action)
        if isinstance(action, np.ndarray) and action.flags.writeable:
            action[...] = 1 - action if action.dtype != np.bool_ else ~action
        return out


class Formed(gym.Wrapper[Any, Any, Any, Any]):
    """Rewards and flags have another form than numbers and bools of Python."""

    def __init__(self, env: gym.Env[Any, Any], form: Form) -> None:
        super().__init__(env)
        self.form = form

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return (
            observation,
            formed(self.form, reward),
            formed(self.form, terminated),
            formed(self.form, truncated),
            info,
        )


def formed(form: Form, value: Any) -> Any:
    """``value`` as that form gives it; the journal has it as it was."""
    if form == "array of one":
        return np.array([value])
    if form == "array of none":
        return np.array(value)
    if isinstance(value, (bool, np.bool_)):
        return np.bool_(value) if form != "whole" else int(value)
    if form == "half":
        return np.float16(value)
    return int(value) if form == "whole" and value == int(value) else np.float64(value)


class Fails(gym.Wrapper[Any, Any, Any, Any]):
    """At one step it raises, or returns what its space does not declare."""

    def __init__(self, env: gym.Env[Any, Any], kind: LaneKind) -> None:
        super().__init__(env)
        self.what, self.at, self.steps, self.resets = kind.spoil, kind.spoil_at, 0, 0
        self.stops = kind.stops

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset, or raise."""
        self.resets += 1
        if self.what == "raise in reset" and self.resets == self.at:
            raise injected(f"reset {self.at}", self.stops)
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, or raise."""
        self.steps += 1
        now = self.steps == self.at
        if now and self.what == "raise":
            raise injected(f"step {self.at}", self.stops)
        observation, *rest = self.env.step(action)
        if now and self.what == "dtype":
            observation = observation.astype(np.float64 if observation.dtype.kind == "f" else "f4")
        elif now and self.what == "shape":
            observation = np.concatenate([observation, observation])
        return observation, *rest


def _wrapped(env: gym.Env[Any, Any], name: str) -> gym.Env[Any, Any]:
    what, _, number = name.partition(" ")
    if what == "limit":
        return wrappers.TimeLimit(env, int(number))
    if what == "statistics":
        return wrappers.RecordEpisodeStatistics(env)
    if what == "normalize":
        return wrappers.NormalizeObservation(env)
    if what == "stack":
        return wrappers.FrameStackObservation(env, int(number))
    if what == "autoreset":
        return wrappers.Autoreset(env)
    assert what == "rescale"
    return wrappers.TransformReward(env, _halved)


def _halved(reward: Any) -> Any:
    return reward / 2


def one_lane(kind: LaneKind, world: World, run: int, lane: int) -> gym.Env[Any, Any]:
    """A lane with its journal, its wrappers and its habits."""
    env: gym.Env[Any, Any] = Lane(kind, run, lane)
    for name in kind.wrappers:
        env = _wrapped(env, name)
    env = Witness(env, world.journal(run, lane))
    if kind.spoil in ("dtype", "shape", "raise", "raise in reset") and lane == kind.spoil_lane:
        env = Fails(env, kind)
    if kind.self_reset:
        env = ResetsItself(env, kind.self_reset)
    if kind.form:
        env = Formed(env, kind.form)
    if kind.reuse:
        env = Reused(env, kind.reuse)
    return WritesAction(env) if kind.writes_action else env
