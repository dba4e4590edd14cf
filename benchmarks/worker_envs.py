"""Environments for worker processes: one that works for a millisecond, two that return immediately.

Gymnasium imports this module in every process that creates one of its ids: ``worker_envs:Busy-v0``,
``worker_envs:HalfCheetah-v5``. It therefore imports little.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

BUSY = "worker_envs:Busy-v0"
CHEETAH = "worker_envs:HalfCheetah-v5"
TIME_LIMIT = 1000
"""Steps per episode, for both ids."""
IMAGE = (84, 84, 4)
IMAGES = 8
"""Number of different images that a lane returns in turn."""


def spin(iterations: int) -> int:
    """Keep the processor busy: run a random generator for some iterations, in plain Python."""
    state = 1
    for _ in range(iterations):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


def iterations_for(seconds: float) -> int:
    """Return the iterations of ``spin`` in this time, from the fastest of many short runs."""
    trial = 10_000
    times = []
    for _ in range(50):
        start = time.perf_counter()
        spin(trial)
        times.append(time.perf_counter() - start)
    return round(trial * seconds / min(times))


class Busy(gym.Env):
    """An environment whose steps only work for some iterations."""

    def __init__(self, iterations: int) -> None:
        """Declare observations of CartPole's size."""
        self.iterations = iterations
        self.observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Begin an episode, without any work."""
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Work."""
        spin(self.iterations)
        return np.full(4, action / 2, np.float32), 1.0, False, False, {}


class Images(VectorEnv):
    """Returns images ``[lanes, 84, 84, 4]`` that exist already, so that a step costs nothing."""

    def __init__(self, lanes: int) -> None:
        """Create the images."""
        self.num_envs = lanes
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = gym.spaces.Box(0, 255, IMAGE, np.uint8)
        self.single_action_space = gym.spaces.Discrete(6)
        self.observation_space = batch_space(self.single_observation_space, lanes)
        self.action_space = batch_space(self.single_action_space, lanes)
        self.images = images(lanes)
        self.reward, self.flags = np.ones(lanes), np.zeros(lanes, np.bool_)
        self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Return the first image."""
        return self.images[0], {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Return the next image. Episodes never end."""
        self.steps += 1
        image = self.images[self.steps % IMAGES]
        return image, self.reward, self.flags, self.flags, {}


class Still(VectorEnv):
    """Returns the same observation immediately, so that a step costs nothing."""

    def __init__(self, lanes: int) -> None:
        """Declare observations of CartPole's size."""
        self.num_envs = lanes
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, lanes)
        self.action_space = batch_space(self.single_action_space, lanes)
        self.observation = np.zeros((lanes, 4), np.float32)
        self.reward, self.flags = np.ones(lanes), np.zeros(lanes, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Return the observation."""
        return self.observation, {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Return the same observation. Episodes never end."""
        return self.observation, self.reward, self.flags, self.flags, {}


def images(lanes: int) -> np.ndarray:
    """Return random images ``[IMAGES, lanes, 84, 84, 4]``."""
    size = (IMAGES, lanes, *IMAGE)
    return np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)


if "Busy-v0" not in gym.registry:
    gym.register("Busy-v0", entry_point=Busy, max_episode_steps=TIME_LIMIT)
if find_spec("mujoco") is not None:
    import mujoco

    # MuJoCo writes a line to stderr and to a file for each deprecated keyword in Gymnasium's
    # models.
    mujoco.set_mju_user_warning(lambda _: None)
