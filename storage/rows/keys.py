"""Column keys: the place of each value of a transition in a TensorDict.

The layout is TorchRL's episode data format: observation and action are at the root, and the results
of the step are under ``"next"``. Columns that Tallyroll adds are under ``"collector"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import torch

Key: TypeAlias = tuple[str, ...]
"""A nested TensorDict key, always written as a tuple."""

NEXT: Final = "next"
COLLECTOR: Final = "collector"

REWARD: Final[Key] = (NEXT, "reward")
DONE: Final[Key] = (NEXT, "done")
TERMINATED: Final[Key] = (NEXT, "terminated")
TRUNCATED: Final[Key] = (NEXT, "truncated")

TRAJ_IDS: Final[Key] = (COLLECTOR, "traj_ids")
STEP: Final[Key] = (COLLECTOR, "step")
LANE: Final[Key] = (COLLECTOR, "lane")
POLICY_VERSION: Final[Key] = (COLLECTOR, "policy_version")
POLICY_VERSIONS: Final[Key] = (COLLECTOR, "policy_versions")
"""Prefix of the policy versions of groups of agents that have their own policies."""
POLICY_ID: Final[Key] = (COLLECTOR, "policy_id")
NEXT_VALID: Final[Key] = (COLLECTOR, "next_valid")
"""A column, or the prefix of one column ``[row, agent]`` per group; see `next_valid_keys`."""
VALID: Final[Key] = (COLLECTOR, "valid")
RESET_SEED: Final[Key] = (COLLECTOR, "reset_seed")
CONTEXT: Final[Key] = (COLLECTOR, "context")
CUT: Final[Key] = (COLLECTOR, "cut")
MASK: Final[Key] = (COLLECTOR, "mask")

RANDOM_VERSION: Final = -1
"""The ``policy_version`` of a transition whose action was drawn at random."""

IS_INIT: Final = "is_init"
"""Last name in the keys of columns that are True in the rows at which a recurrent module starts
from the state in the row."""
COUNTERS: Final = frozenset({"step_count", IS_INIT, "episode_reward"})
"""Last names in the keys of columns in which TorchRL's transforms count along an episode
(StepCounter, InitTracker, RewardSum). The values depend on the age of the episode rather than on
observations."""


Keys: TypeAlias = Sequence[str | Key]
"""A selection of columns, as users name them."""


def next_valid_keys(keys: Iterable[Key]) -> list[Key]:
    """Return the columns that mark lost next observations, per row or per agent."""
    return [key for key in keys if key[: len(NEXT_VALID)] == NEXT_VALID]


def as_key(key: str | tuple[str, ...]) -> Key:
    """Return ``key`` as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def without_next(key: Key) -> Key:
    """Return ``key`` without a leading ``next``."""
    return key[1:] if key[:1] == (NEXT,) else key


def format_key(key: str | tuple[str, ...]) -> str:
    """Return a key in the notation for users: ``next/observation``."""
    return key if isinstance(key, str) else "/".join(key)


def can_be_stored(part: str) -> bool:
    """Return True if a file or a group can have the name ``part``."""
    try:
        part.encode()
    except UnicodeEncodeError:
        return False
    return part not in ("", ".", "..") and "/" not in part and "\0" not in part


def is_init(key: Key, dtype: torch.dtype) -> bool:
    """Return True if a column marks the first row of a trajectory, at the root or of a group."""
    return key[0] != NEXT and key[-1] == IS_INIT and dtype is torch.bool


def is_done(key: Key, dtype: torch.dtype) -> bool:
    """Return True if a column marks the end of an episode, at the root or of a group."""
    return key == DONE or (key[0] == NEXT and key[-1] == DONE[-1] and dtype is torch.bool)
