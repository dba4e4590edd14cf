"""Test environments that number their rows and fail as planned, and a test policy."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

How = Literal["raise", "exit", "kill", "hang"]


def length_of(lane: int, episode: int) -> int:
    """Return the number of transitions of an episode."""
    return 2 + (3 * lane + 5 * episode) % 9


@dataclass(frozen=True)
class Fault:
    """A planned failure of a lane at a step. It happens once, in the first process to reach it."""

    how: How
    lane: int
    step: int
    file: Path
    """Marker file, created when the failure happens."""

    def fall(self) -> None:
        """Fail, unless the failure happened before."""
        try:
            self.file.touch(exist_ok=False)
        except FileExistsError:
            return
        if self.how == "raise":
            raise RuntimeError("as planned")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


class Numbered(gymnasium.Env[Any, Any]):
    """A single-lane environment that observes lane, episode, step, and random noise."""

    def __init__(self, lane: int, faults: Sequence[Fault] = (), seconds: float = 0.0) -> None:
        self.observation_space = Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = Discrete(2)
        self.lane, self.episode, self.at, self.steps = lane, -1, 0, 0
        self._faults = [fault for fault in faults if fault.lane == lane]
        self._seconds = seconds

    def _observation(self) -> Any:
        noise = self.np_random.random()
        return np.array([self.lane, self.episode, self.at, noise], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, or fail as planned."""
        self.steps += 1
        for fault in self._faults:
            if fault.step == self.steps:
                fault.fall()
        time.sleep(self._seconds)
        self.at += 1
        over = self.at == length_of(self.lane, self.episode)
        reward = 10.0 * self.at + float(action)
        cut = bool(self.episode % 2)
        return self._observation(), reward, over and not cut, over and cut, {}


def _vector(lanes: range, **kwargs: Any) -> SyncVectorEnv:
    each = [partial(Numbered, lane, **kwargs) for lane in lanes]
    return SyncVectorEnv(each, autoreset_mode=AutoresetMode.NEXT_STEP)


def factories(lanes: Sequence[int], **kwargs: Any) -> list[Any]:
    """Return one factory per worker; ``lanes`` has the number of lanes of each worker."""
    first = [sum(lanes[:at]) for at in range(len(lanes) + 1)]
    return [partial(_vector, range(*pair), **kwargs) for pair in pairwise(first)]


class Versioned(TensorDictModuleBase):
    """Policy whose weights are all equal.

    Its actions depend on the value of the weights, and its columns store the value.
    """

    def __init__(self, entries: int = 100_000) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "low", "high"]
        self.weight = torch.nn.Parameter(torch.zeros(entries), requires_grad=False)

    def set_to(self, number: int) -> "Versioned":
        """Set every weight to ``number``."""
        self.weight.fill_(number)
        return self

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action, and the lowest and highest weight."""
        low, high = self.weight.min(), self.weight.max()
        shown = torch.ones(td.batch_size)
        td.set("low", shown * low).set("high", shown * high)
        return td.set("action", chosen(td["observation"], low))


def chosen(observation: torch.Tensor, version: Any) -> torch.Tensor:
    """Return the actions ``[...]`` that weights of a version choose."""
    actions: torch.Tensor = (observation[..., :3].sum(-1) + version).long() % 2
    return actions


def check_rows(rows: TensorDictBase) -> None:
    """Check that the rows are genuine, complete and without duplicates."""
    seen, after = rows["observation"].numpy(), rows["next", "observation"].numpy()
    lane, episode, step = (seen[:, at].astype(int) for at in range(3))
    assert np.array_equal(after[:, :2], seen[:, :2]), "an observation of another episode followed"
    assert np.array_equal(after[:, 2], step + 1.0), "a step is missing"
    action = rows["action"].reshape(len(rows)).numpy()
    reward = rows["next", "reward"].reshape(len(rows)).numpy()
    assert np.array_equal(reward, 10.0 * (step + 1) + action), "the reward is another step's"
    over = step + 1 == [length_of(*each) for each in zip(lane, episode, strict=True)]
    for name, odd in (("terminated", 0), ("truncated", 1)):
        got = rows["next", name].reshape(len(rows)).numpy()
        assert np.array_equal(got, over & (episode % 2 == odd)), name
    assert np.array_equal(rows["collector", "lane"].numpy(), lane)
    assert np.array_equal(rows["collector", "step"].numpy(), step)
    noise = np.stack([lane, seen[:, 3], after[:, 3]])
    assert len(np.unique(noise, axis=1).T) == len(rows), "a row is stored twice"
    ids = rows["collector", "traj_ids"].numpy()
    for number in np.unique(ids):
        own = ids == number
        assert len(set(zip(lane[own], episode[own], strict=True))) == 1, (
            "two trajectories have one id"
        )
        assert np.array_equal(step[own], np.arange(own.sum())), "a trajectory has a gap"
