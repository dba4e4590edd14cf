"""A system that counts its steps in wide observations."""

from __future__ import annotations

import numpy as np
import torch
from torchrl.data import Bounded, Unbounded

from tallyroll.collector.envs.system import Declares, Step, System

LANES, SLOTS, WIDE = 4, 128, 600


class Counting(System):
    """Lanes that observe the number of steps. The last lane observes `bad` in step `at`."""

    def __init__(self, at: int = -1, bad: float = 0.0, high: float = 1e6) -> None:
        self.declares = Declares(
            lanes=LANES,
            observation={("observation",): Bounded(0.0, high, (WIDE,), dtype=torch.float32)},
            action={("action",): Bounded(0.0, 1.0, (1,), dtype=torch.float32)},
            reward={("reward",): Unbounded((1,))},
            at_end="first",
            finals="extra",
        )
        self._count, self._at, self._bad = 0, at, bad

    def reset(self, lanes: object, seeds: object, **options: object) -> list[np.ndarray]:
        return [np.zeros((LANES, WIDE), np.float32)]

    def step(self, action: object, lanes: object = None) -> Step:
        self._count += 1
        seen = np.full((LANES, WIDE), self._count, np.float32)
        if self._count == self._at:
            seen[-1, -1] = self._bad
        never = np.zeros(LANES, np.bool_)
        return Step([seen], [np.zeros(LANES, np.float32)], never, never)
