"""An environment that observes the arguments of its resets, and a loop that replays its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

LEVELS = ("sea", "moon", "jupiter")
NOTHING = -1.0


class Weather(gymnasium.Env[NDArray[np.float64], np.int64]):
    """An environment that observes gravity, level, a draw, a sum of actions, and the step.

    Each reset draws a number. Without options it observes `NOTHING` as gravity and level.
    Episodes last for 1 to 6 steps.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float64], dict[str, Any]]:
        """Begin an episode with the gravity and the level in ``options``."""
        super().reset(seed=seed)
        given = options or {}
        level = LEVELS.index(given["level"]) if "level" in given else NOTHING
        self.last = int(self.np_random.integers(1, 7))
        start = self.np_random.random()
        self.seen = np.array([given.get("gravity", NOTHING), level, start, 0.0, 0.0])
        if options is not None:
            options.clear()  # the environment owns its options
        return self.seen.copy(), {"air": start}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        """Add the action, and noise from the environment's own generator."""
        self.seen[3] += int(action) + self.np_random.random()
        self.seen[4] += 1
        over = self.seen[4] == self.last
        return self.seen.copy(), float(self.seen[0] * self.seen[4]), bool(over), False, {"air": 1.0}


class Careless(Weather):
    """An environment that kills its process once, in step `after`, if there is no file `mark`."""

    def __init__(self, mark: str, after: int) -> None:
        self.mark, self.after = mark, after

    def step(self, action: np.int64) -> Any:
        """Step, or end the process."""
        import os
        import signal

        self.after -= 1
        if not self.after and not os.path.exists(self.mark):
            with open(self.mark, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def trajectories(rows: TensorDictBase) -> list[TensorDictBase]:
    """Split rows into trajectories, in the order of their steps."""
    ids, step = rows["collector", "traj_ids"], rows["collector", "step"]
    parts = [rows[ids == each] for each in ids.unique()]
    assert len(rows) == len(step)
    return [part[part["collector", "step"].argsort()] for part in parts]


def replay(
    rows: TensorDictBase,
    make: Callable[[], gymnasium.Env[Any, Any]],
    options_of: Callable[[int], Mapping[str, Any]],
    names: tuple[str, ...] = (),
) -> int:
    """Replay each trajectory in a single environment, from the recorded seed and context.

    ``names`` of the context come from the rows, and must equal the draws of ``options_of``.
    Returns the number of trajectories.
    """
    found = trajectories(rows)
    for part in found:
        own = part["collector"]
        seeds = own["reset_seed"].unique()
        assert len(seeds) == 1, "a seed is constant in its trajectory"
        assert own["step"].tolist() == list(range(len(part)))
        drawn = dict(options_of(int(seeds[0])))
        for name in names:
            (value,) = own["context", name].unique().tolist()
            assert value == drawn[name]
            drawn[name] = value
        env = make()
        seen, _ = env.reset(seed=int(seeds[0]), options=drawn or None)
        for row in part:
            assert np.array_equal(seen, row["observation"].numpy())
            seen, reward, over, cut, _ = env.step(row["action"].numpy())
            after = row["next"]
            assert np.array_equal(seen, after["observation"].numpy())
            assert np.float32(reward) == after["reward"].numpy()
            assert (over, cut) == (bool(after["terminated"]), bool(after["truncated"]))
        env.close()
    return len(found)


def joined(batches: Any) -> TensorDictBase:
    """Return all rows of the batches."""
    rows: TensorDictBase = torch.cat([batch.clone() for batch in batches])
    return rows
