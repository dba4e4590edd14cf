"""CartPole storages for replays, with and without recorded reset seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tallyroll.collector import Resets, SyncCollector, choice, uniform

KINDS: dict[str, dict[str, Any]] = {
    "seeded": {"resets": Resets(seeds=True)},
    "contexts": {
        "resets": Resets(sampler={"low": uniform(-0.1, 0), "high": choice([0.05, 0.1])}, seeds=True)
    },
    "drawn": {"resets": Resets(sampler={"low": uniform(-0.1, 0), "high": 0.05})},
    "plain": {},
    "limited": {"max_frames_per_traj": 9},
    "one lane": {"num_envs": 1},
}
ROWS = 203
"""A number of rows that is not a multiple of 8 lanes."""


def collect(path: Path, env: Any = "CartPole-v1", **options: Any) -> Path:
    """Collect rows into a new storage at ``path``."""
    given = {"num_envs": 8, "frames_per_batch": 50, "total_frames": ROWS, "seed": 3} | options
    with SyncCollector(env, storage=path, **given) as collector:
        for _ in collector:
            pass
    return path
