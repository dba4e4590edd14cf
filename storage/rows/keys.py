"""Columns that a storage reads by name: TorchRL's, and those that collectors add."""

from __future__ import annotations

from typing import Final

import torch

from tallyroll.storage.rows.nesting import Key

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
    "is_done",
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


def is_done(key: Key, dtype: torch.dtype) -> bool:
    """Whether a column says that an episode ended: at the root, or for a group of agents."""
    return key == DONE or (key[0] == NEXT and key[-1] == DONE[-1] and dtype is torch.bool)
