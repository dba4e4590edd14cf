"""One lane of a random environment: a Gymnasium environment, its journal, and its bad habits.

From the inside out::

    Lane        observations, rewards and infos are functions of (run, lane, episode, step, seed)
    wrappers    Gymnasium's own
    Witness     records the actual calls: the action received, the values returned
    habits      ways in which environments change values that they have returned

So the journal alone decides whether a collector's rows are right.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from random_running import Told
from random_spaces import (
    ACTIONS,
    Array,
    Leaves,
    action_sum,
    drawn,
    is_legal,
    parts_of_mask,
    space_of_observation,
)

Reuse = Literal["", "same", "one key", "view", "double", "ring"]
SelfReset = Literal["", "once", "twice"]
Spoil = Literal["", "nan", "range", "dtype", "shape", "raise", "raise in reset", "nothing legal"]
Dull = Literal["", "zeros", "goal at 0", "all equal"]
Form = Literal["", "array of one", "array of none", "numpy", "half", "whole"]


class Injected(Exception):
    """Error that a random environment or policy raises deliberately."""


def injected(text: str, stops: bool) -> Exception:
    """Return that error, or `StopIteration`, as an exhausted iterator raises it."""
    return StopIteration(text) if stops else Injected(text)


# --- journals -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """A reset (``action`` is None) or a step, and its results."""

    obs: Leaves
    infos: dict[str, Array]
    action: Array | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    given: tuple[int | None, dict[str, Any]] | None = None
    """Seed and options of a reset."""


_TOLD: dict[str, Told] = defaultdict(dict)
_HERE: dict[str, list[tuple[int, int, list[Event]]]] = defaultdict(list)


@dataclass(frozen=True)
class World:
    """The place of the lanes' journals: this process, or files in ``folder``."""

    token: str
    folder: str | None = None

    def journal(self, run: int, lane: int) -> Journal:
        """Return an empty journal for an instance of a lane."""
        if self.folder is not None:
            return Journal(path=Path(self.folder) / f"{run}-{lane}-{os.getpid()}-{id(object())}")
        journal = Journal()
        _HERE[self.token].append((run, lane, journal.events))
        return journal

    def read(self) -> dict[tuple[int, int], list[list[Event]]]:
        """Return the journals of all stepped instances by run and lane, longest first."""
        found: dict[tuple[int, int], list[list[Event]]] = defaultdict(list)
        for run, lane, events in _HERE.get(self.token, []):
            found[run, lane].append(events)
        for path in Path(self.folder).glob("*-*-*-*") if self.folder is not None else ():
            run, lane = map(int, path.name.split("-")[:2])
            found[run, lane].append(_read(path))
        return {
            key: sorted((e for e in each if len(e) > 1), key=len, reverse=True)
            for key, each in found.items()
        }

    @property
    def told(self) -> Told:
        """Results of the transforms in this process."""
        return _TOLD[self.token]

    def forget(self) -> None:
        """Drop the journals and results that this process holds."""
        _HERE.pop(self.token, None)
        _TOLD.pop(self.token, None)


def _read(path: Path) -> list[Event]:
    events = []
    with path.open("rb") as file:
        while file.peek(1):
            events.append(pickle.load(file))
    return events


@dataclass
class Journal:
    """The events of one instance of a lane."""

    path: Path | None = None
    events: list[Event] = field(default_factory=list)

    def write(self, event: Event) -> None:
        """Append an event."""
        if self.path is None:
            self.events.append(event)
        else:
            with self.path.open("ab") as file:
                pickle.dump(event, file)


# --- traits of a lane -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LaneKind:
    """Traits that all lanes of an environment share."""

    observation: str = "float32"
    names: tuple[str, ...] = ()
    """Names of the entries, if the observation is a Dict."""
    action: str = "discrete"
    masked: bool = False
    """Whether the observation has a mask of legal actions. At the end no action is legal."""
    mask_in_infos: bool = False
    """Whether infos have an action mask in three of four steps. At the end no action is legal."""
    mask_extra: int = 0
    """Number of extra values in the mask, compared with the action."""
    wider: bool = False
    """Whether the bounds of lane k are k + 1 times those of lane 0."""
    bound: bool = True
    """Whether the mask must allow every action."""
    lengths: tuple[tuple[int, ...], ...] = ((5,),)
    """Lengths of the episodes of each lane, in turn."""
    ends: Literal["terminated", "truncated", "mixed", "both"] = "terminated"
    infos: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    reuse: Reuse = ""
    self_reset: SelfReset = ""
    writes_action: bool = False
    spoil: Spoil = ""
    spoil_lane: int = 0
    spoil_at: int = 0
    """The step (or reset) of that lane, counted over all episodes."""
    stops: bool = False
    """True if the exception is `StopIteration`."""
    agents: int = 0
    joins: bool = False
    """Whether agents join and leave."""
    dull: Dull = ""
    """Which values are dull: zero rewards and observations, zero final ones, or constant ones."""
    form: Form = ""
    """The form of rewards and flags."""

    def observation_space(self) -> gym.Space[Any]:
        """Return the space of one lane's observation."""
        if self.agents:
            return Box(-100, 100, (self.agents, 2), np.float32)
        mask = sum(parts_of_mask(self.action_space())) + self.mask_extra if self.masked else 0
        return space_of_observation(self.observation, self.names, mask)

    def action_space(self) -> gym.Space[Any]:
        """Return the space of one lane's action."""
        if self.agents:
            return gym.spaces.MultiDiscrete([3] * self.agents)
        return ACTIONS[self.action]()


class Lane(gym.Env[Any, Any]):
    """The innermost environment, which is correct and asserts that it is used correctly."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  gymnasium declares it so

    def __init__(self, kind: LaneKind, run: int, lane: int) -> None:
        self.kind, self.run, self.lane = kind, run, lane
        self.observation_space, self.action_space = kind.observation_space(), kind.action_space()
        if kind.wider:
            space: Any = self.observation_space
            self.observation_space = Box(space.low * (lane + 1), space.high * (lane + 1))
        self.lengths = kind.lengths[lane % len(kind.lengths)]
        self.episode, self.at, self.steps, self.resets = -1, 0, 0, 0
        self.salt, self.over = 0, True
        self.mask: Array = np.zeros(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.salt = int(self.np_random.integers(2**31))
        self.episode, self.at, self.over = self.episode + 1, 0, False
        return self._observation(), self._infos()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        assert not self.over, f"lane {self.lane}: a step behind the end of an episode"
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        if self.kind.bound and not self.kind.mask_extra and self.mask.any():
            legal = is_legal(self.action_space, action, self.mask)
            assert legal, f"lane {self.lane}: {action!r} is not legal by {self.mask}"
        reward = 1 + (31 * self.lane + 7 * self.episode + self.at) % 97 + action_sum(action)
        reward = 0 if self.kind.dull else reward
        self.at += 1
        self.steps += 1
        self.over = self.at >= self.lengths[self.episode % len(self.lengths)]
        observation = self._observation()
        if self._spoilt("nan"):
            observation = np.full_like(observation, np.nan)
        elif self._spoilt("range"):
            observation = np.full_like(observation, 101 * (self.lane + 1 if self.kind.wider else 1))
        ends = self.kind.ends
        odd = (self.lane + self.episode) % 2
        terminated = ends in ("terminated", "both") or (ends == "mixed" and odd == 0)
        truncated = ends in ("truncated", "both") or (ends == "mixed" and odd == 1)
        return (
            observation,
            float(reward),
            self.over and terminated,
            self.over and truncated,
            self._infos(),
        )

    def _spoilt(self, what: Spoil) -> bool:
        kind = self.kind
        return (what, self.lane, self.steps) == (kind.spoil, kind.spoil_lane, kind.spoil_at)

    def _observation(self) -> Any:
        rng = np.random.default_rng([self.run, self.lane, self.episode, self.at, self.salt])
        if self.kind.dull == "all equal":
            rng = np.random.default_rng(0)
        value = drawn(self.observation_space, rng)
        if self.kind.dull == "zeros":
            value = np.zeros_like(value)
        elif self.kind.dull == "goal at 0":
            length = self.lengths[self.episode % len(self.lengths)]
            value = (value * np.float32(1 - self.at / length)).astype(value.dtype)
        if self.kind.masked:
            self.mask = value["action_mask"] = self._mask(rng, len(value["action_mask"]))
        return value

    def _mask(self, rng: np.random.Generator, size: int) -> Array:
        mask = rng.integers(2, size=size).astype(np.bool_)
        first = 0
        for count in parts_of_mask(self.action_space):
            mask[min(first + rng.integers(count), len(mask) - 1)] = True  # it may be too short
            first += count
        none = self.over or (self._spoilt("nothing legal") and self.at > 0)
        return mask & (not none)

    def _infos(self) -> dict[str, Any]:
        infos = {name: INFOS[name](self) for name in self.kind.infos if not _absent(name, self)}
        if self.kind.mask_in_infos:
            rng = np.random.default_rng([self.run, self.lane, self.episode, self.at, 1])
            self.mask = self._mask(rng, sum(parts_of_mask(self.action_space)))
            if self.at % 4 == 3:
                self.mask = np.zeros(0, np.bool_)
            else:
                infos["action_mask"] = self.mask.copy()
        return infos


def _drift(lane: Lane) -> Any:
    return 0 if lane.at < 3 else 0.75


def _flag(lane: Lane) -> Any:
    return False if lane.at < 3 else 3


def _wide(lane: Lane) -> Any:
    return np.int32(lane.at) if lane.at < 3 else np.int64(2**40)


def _unsigned(lane: Lane) -> Any:
    return np.uint8(lane.at) if lane.at < 3 else np.int64(-1)


def _shrinking(lane: Lane) -> Any:
    return np.arange(3.0) if lane.at < 3 else np.array([1.5])


INFOS: dict[str, Any] = {
    "tick": lambda lane: lane.steps,
    "spot": lambda lane: np.array([lane.episode, lane.at], np.float32),
    "even": lambda lane: lane.at % 2 == 0,
    "drift": _drift,
    "flag": _flag,
    "wide": _wide,
    "unsigned": _unsigned,
    "shrinking": _shrinking,
    "won": lambda lane: lane.episode + 1,
    "now and then": lambda lane: lane.at + 0.5,
}
STEADY = ("tick", "spot", "even")
CHANGING = ("drift", "flag", "wide", "unsigned", "shrinking")
SOMETIMES = ("won", "now and then")


def _absent(name: str, lane: Lane) -> bool:
    if name == "won":
        return not lane.over
    return name == "now and then" and lane.at % 3 != 1


def is_discrete(kind: LaneKind) -> bool:
    """Return whether an action is a single index, which may have a mask."""
    space = kind.action_space()
    return isinstance(space, Discrete) and space.start == 0
