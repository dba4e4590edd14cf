"""Image environments whose frames show where they belong, alone and stacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import FrameStackObservation

from tallyroll.storage import open_storage

SIDE = 36
EPISODES = (1, 2, 5, 30)


class Pixels(gymnasium.Env):
    """Image environment whose frames show the episode, the step and the seed."""

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, channels: tuple[int, ...] = (), dtype: Any = np.uint8) -> None:
        shape = (*channels, SIDE, SIDE)
        high = 255 if dtype is np.uint8 else np.inf
        self.observation_space = gymnasium.spaces.Box(0, high, shape, dtype)
        self.episode = self.at = 0
        self._background = (np.arange(np.prod(shape)) % 97).astype(dtype).reshape(shape)

    def frame(self) -> np.ndarray:
        frame = self._background.copy()
        frame[..., 0, :3] = self.episode % 200, self.at % 200, self.seed
        frame[..., self.at % SIDE, 5:9] = 201
        return frame

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.seed = seed % 200
        self.episode, self.at = self.episode + 1, 0
        return self.frame(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.at += 1
        over = self.at >= EPISODES[self.episode % len(EPISODES)]
        cut = over and self.episode % 3 == 0
        return self.frame(), float(self.at), over and not cut, cut, {}


def stacked() -> gymnasium.Env:
    return FrameStackObservation(Pixels(), 4)


def stacked_with_zeros() -> gymnasium.Env:
    return FrameStackObservation(Pixels(), 4, padding_type="zero")


def color() -> gymnasium.Env:
    return Pixels((3,))


def floats() -> gymnasium.Env:
    return Pixels((), np.float32)


def assert_frames_show_their_place(path: Path) -> None:
    """Compare each stack with the frames that the seed, the episode and the step determine."""
    with open_storage(path) as storage:
        rows = storage[:].clone()
    background = Pixels()
    for begin, end, step in zip(
        rows["observation"], rows["next", "observation"], rows["collector", "step"], strict=True
    ):
        for value, newest in ((begin, int(step)), (end, int(step) + 1)):
            background.episode, _, background.seed = value[-1, 0, :3].tolist()
            for i, frame in enumerate(value):
                background.at = max(0, newest - 3 + i)
                np.testing.assert_array_equal(frame, background.frame())
