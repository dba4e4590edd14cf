"""Columns that a storage reads by name: TorchRL's, and those that collectors add."""

from __future__ import annotations

from typing import Final

from .rows import Key

__all__ = [
    "COUNTERS",
    "CUT",
    "DONE",
    "LANE",
    "NEXT",
    "NEXT_VALID",
    "POLICY_VERSION",
    "REWARD",
    "STEP",
    "TERMINATED",
    "TRAJ_IDS",
    "TRUNCATED",
]

NEXT: Final = "next"
REWARD: Final[Key] = (NEXT, "reward")
DONE: Final[Key] = (NEXT, "done")
TERMINATED: Final[Key] = (NEXT, "terminated")
TRUNCATED: Final[Key] = (NEXT, "truncated")

TRAJ_IDS: Final[Key] = ("collector", "traj_ids")
STEP: Final[Key] = ("collector", "step")
LANE: Final[Key] = ("collector", "lane")
POLICY_VERSION: Final[Key] = ("collector", "policy_version")
NEXT_VALID: Final[Key] = ("collector", "next_valid")
CUT: Final[Key] = ("collector", "cut")

COUNTERS: Final = frozenset({"step_count", "is_init", "episode_reward"})
"""Last names of columns in which TorchRL's transforms count along an episode (StepCounter,
InitTracker, RewardSum): they tell how long it has lasted, and not what was observed."""
