"""A system as a user writes one by docs/own_system.md: every number of it can be recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchrl.data import Bounded, Categorical, Unbounded

from tallyroll.collector.envs import Declares, Step, System


def length_of(lane: Any, episode: Any) -> Any:
    """Return the number of steps of an episode."""
    return 1 + (3 * lane + 5 * episode) % 7


class Corridor(System):
    """Counts the steps of each lane.

    The observation is ``[lane, episode, step, draw]``, and each pixel of ``camera`` the sum of the
    first three. The reward is the step that was left plus a quarter of the action. Every second
    episode is truncated.
    """

    about = "counts the steps of each lane"

    def __init__(self, lanes: int) -> None:
        self.declares = Declares(
            lanes=lanes,
            observation={
                ("observation",): Unbounded((4,)),
                ("camera",): Bounded(0, 255, (8, 8, 1), dtype=torch.uint8),
            },
            action={("action",): Categorical(3, shape=())},
            at_end="final",
        )
        self.generators = [np.random.default_rng(lane) for lane in range(lanes)]
        self.at = np.zeros((lanes, 4), np.float32)
        self.at[:, 1] = -1

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Corridor:
        """Make the system that ``corridor:NAME`` names."""
        return cls(lanes)

    def reset(self, lanes: Any, seeds: Sequence[int] | None, **options: Any) -> list[np.ndarray]:
        """Begin the next episode of some lanes."""
        if seeds is not None:
            self.generators = [np.random.default_rng(seed) for seed in seeds]
        for lane in np.flatnonzero(np.ones(len(self.at), bool) if lanes is None else lanes):
            draw = self.generators[lane].integers(1000)
            self.at[lane] = self.first_lane + lane, self.at[lane, 1] + 1, 0, draw
        return self.seen()

    def step(self, action: Sequence[Any], lanes: Any = None) -> Step:
        """Step all lanes."""
        reward = self.at[:, 2] + action[0] / 4
        self.at[:, 2] += 1
        lane, episode, step = self.at[:, :3].T
        over, odd = step >= length_of(lane, episode), episode % 2 == 1
        return Step(self.seen(), [reward], over & ~odd, over & odd)

    def seen(self) -> list[np.ndarray]:
        """Return both observations."""
        pixels = self.at[:, :3].sum(1).astype(np.uint8)[:, None, None, None]
        return [self.at, np.broadcast_to(pixels, (len(pixels), 8, 8, 1))]


def corridor(num_envs: int = 1) -> Corridor:
    """Make a system of ``num_envs`` lanes."""
    return Corridor(num_envs)
