"""Wrappers of a random lane: Gymnasium's own, the witness, and the bad habits."""

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
    """A wrapper that records copies of all calls and results in a journal."""

    def __init__(self, env: gym.Env[Any, Any], journal: Journal) -> None:
        super().__init__(env)
        self.journal = journal

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset, and record it."""
        given = kwargs.get("seed"), dict(kwargs.get("options") or {})
        observation, info = self.env.reset(**kwargs)
        self.journal.write(Event(leaves(observation), _numbers(info), given=given))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and record it."""
        given = np.array(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.journal.write(
            Event(leaves(observation), _numbers(info), given, float(reward), terminated, truncated)
        )
        return observation, reward, terminated, truncated, info


def _numbers(info: dict[str, Any]) -> dict[str, Array]:
    return {name: np.array(value) for name, value in info.items() if name in INFOS}


class Reused(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that returns observations in the same arrays, or as views of the same memory."""

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
            # Return a new Dict each time, because TorchRL's wrapper writes to it.
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
    """Yield the paths of arrays and then of all other values."""
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
    """A wrapper that resets at an end, and silently returns the next episode's first observation.

    With "once" the following reset returns the same observation. With "twice" it begins another
    episode.
    """

    def __init__(self, env: gym.Env[Any, Any], kind: SelfReset) -> None:
        super().__init__(env)
        self.kind = kind
        self.fresh: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset, unless step has already done so."""
        fresh, self.fresh = self.fresh, None
        if fresh is not None and self.kind == "once" and kwargs.get("seed") is None:
            observation, info = _same_arrays(fresh[0]), fresh[1]
        else:
            observation, info = self.env.reset(**kwargs)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and reset at an end of an episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.fresh = None
        if terminated or truncated:
            self.fresh = self.env.reset()
            observation = _same_arrays(self.fresh[0])
        return observation, reward, terminated, truncated, info


def _same_arrays(value: Any) -> Any:
    """Return the same arrays in another Dict, because TorchRL's wrapper writes to it."""
    return {k: _same_arrays(v) for k, v in value.items()} if isinstance(value, dict) else value


class WritesAction(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that overwrites the array of its action after the step."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and overwrite the action."""
        out = self.env.step(np.array(action) if isinstance(action, np.ndarray) else action)
        if isinstance(action, np.ndarray) and action.flags.writeable:
            action[...] = 1 - action if action.dtype != np.bool_ else ~action
        return out


class Formed(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper whose rewards and flags have another form than Python numbers and bools."""

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
    """Return ``value`` in a form. The journal has the original value."""
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
    """A wrapper that raises at one step, or returns a value outside its declared space."""

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
    """Return a lane with its journal, wrappers and habits."""
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
