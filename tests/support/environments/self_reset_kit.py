"""Environments that reset themselves within step, and correct ones that look similar."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import CatFrames, EnvBase, GymWrapper, SerialEnv, StepCounter, TransformedEnv

from oracles import OracleEnv


class SelfResetting(gym.Env[Any, Any]):
    """An environment whose step resets it at an end. The following reset() does nothing.

    Observes lane, episode and step. `same_start`: the observation leaves out the episode.
    `rightly`: it does not reset itself. `still`: number of steps before it moves.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  gymnasium declares it so

    def __init__(
        self,
        lane: int = 0,
        *,
        same_start: bool = False,
        rightly: bool = False,
        side: int = 0,
        length: int = 3,
        still: int = 0,
    ) -> None:
        shape = (3, side, side) if side else (3,)
        self.observation_space = spaces.Box(-1e6, 1e6, shape, np.float32)
        self.action_space = spaces.Discrete(2)
        self.lane, self.same_start, self.rightly, self.side = lane, same_start, rightly, side
        self.episode, self.at, self.fresh = -1, 0, False
        self.length, self.still = length, still

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, unless step has already begun it."""
        super().reset(**kwargs)
        if not self.fresh:
            self._begin()
        self.fresh = False
        return self._observed(), {"tick": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step. At an end, begin the next episode."""
        self.at += 1
        tick = self.at
        ended = self.at >= self.length + (self.lane + self.episode) % 3
        if ended and not self.rightly:
            self._begin()
            self.fresh = True
        return self._observed(), 1.0, ended, False, {"tick": tick}

    def _begin(self) -> None:
        self.episode, self.at = self.episode + 1, 0

    def _observed(self) -> Any:
        episode = 0 if self.same_start else self.episode
        numbers = np.array([self.lane, episode, max(0, self.at - self.still)], np.float32)
        if not self.side:
            return numbers
        return np.ascontiguousarray(
            np.broadcast_to(numbers[:, None, None], (3, self.side, self.side))
        )


class SelfResettingTorch(EnvBase):
    """A batched simulator that resets itself, as a user wraps it: masked resets only observe it."""

    def __init__(self, lanes: int = 4, wrong: int | None = None) -> None:
        super().__init__(batch_size=torch.Size([lanes]))
        self.observation_spec = Composite(observation=Unbounded((lanes, 4)), shape=[lanes])
        self.action_spec = Categorical(2, shape=(lanes,))
        self.reward_spec = Unbounded((lanes, 1))
        flag = Categorical(2, shape=(lanes, 1), dtype=torch.bool)
        self.done_spec = Composite(
            done=flag.clone(), terminated=flag.clone(), truncated=flag.clone(), shape=[lanes]
        )
        self.numbers = torch.arange(lanes)
        self.episode, self.at = torch.full((lanes,), -1), torch.zeros(lanes, dtype=torch.int64)
        self.resets_itself = self.numbers < (lanes if wrong is None else wrong)

    def _observed(self) -> torch.Tensor:
        nothing = torch.zeros_like(self.at)
        return torch.stack([self.numbers, self.episode, self.at, nothing], 1).float()

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        mask = torch.ones_like(self.resets_itself)
        if tensordict is not None and "_reset" in tensordict.keys():
            mask = tensordict["_reset"].reshape(-1) & ~self.resets_itself
        self._begin(mask)
        return TensorDict({"observation": self._observed()}, self.batch_size)

    def _begin(self, mask: torch.Tensor) -> None:
        self.episode = self.episode + mask
        self.at = torch.where(mask, 0, self.at)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.at = self.at + 1
        ended = self.at >= 3 + (self.numbers + self.episode) % 3
        self._begin(ended & self.resets_itself)
        flag = ended.unsqueeze(-1)
        return TensorDict(
            {
                "observation": self._observed(),
                "reward": torch.ones(*self.batch_size, 1),
                "done": flag,
                "terminated": flag.clone(),
                "truncated": torch.zeros_like(flag),
            },
            self.batch_size,
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class Scripted(gym.Env[Any, Any]):
    """A correct environment: observes `observe(episode, step)`, for `length` steps an episode."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  gymnasium declares it so

    def __init__(self, observe: Any, length: int) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.observe, self.length, self.episode, self.at = observe, length, -1, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(**kwargs)
        self.episode, self.at = self.episode + 1, 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        self.at += 1
        return self._observed(), 1.0, self.at == self.length, False, {}

    def _observed(self) -> Any:
        return np.array(self.observe(self.episode, self.at), np.float32)


def vector(lanes: int = 4, first: int = 0, **kwargs: Any) -> SyncVectorEnv:
    """Make a vector of self-resetting lanes, numbered from ``first``, with autoreset disabled."""
    return SyncVectorEnv(
        [lambda lane=lane: SelfResetting(first + lane, **kwargs) for lane in range(lanes)],
        autoreset_mode=AutoresetMode.DISABLED,
    )


def scripted(observe: Any, length: int, lanes: int = 3) -> SyncVectorEnv:
    """Make a vector of correct lanes. `observe` takes the lane as its first argument."""

    def make(lane: int) -> Any:
        return lambda: Scripted(lambda episode, at: observe(lane, episode, at), length)

    return SyncVectorEnv(
        [make(lane) for lane in range(lanes)], autoreset_mode=AutoresetMode.DISABLED
    )


def serial(lanes: int = 3) -> SerialEnv:
    """Make a SerialEnv of self-resetting lanes, with TorchRL's wrapper and a step counter."""
    makes = [
        lambda lane=lane: TransformedEnv(GymWrapper(SelfResetting(lane)), StepCounter(100))
        for lane in range(lanes)
    ]
    return SerialEnv(lanes, makes)


def stacked() -> TransformedEnv:
    """Make a self-resetting environment with a column of stacked frames."""
    stack = CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["stack"])
    return TransformedEnv(GymWrapper(SelfResetting()), stack)


class AutoResetGym(OracleEnv):
    """An oracle that resets itself in an episode's last step and loses the final observation."""

    def step(self, action: Any) -> Any:
        """Take a step. At an end, return the first observation of the next episode."""
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            observation, _ = self.reset()
        return observation, reward, terminated, truncated, info
