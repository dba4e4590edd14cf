"""Names of columns: the place of each value of a transition in a TensorDict.

TorchRL's episode data format: observation and action at the root, what the step returned under
``"next"``. The columns that Tallyroll adds are under ``"collector"``.
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
"""Above a version for each group of agents with a policy of its own."""
POLICY_ID: Final[Key] = (COLLECTOR, "policy_id")
NEXT_VALID: Final[Key] = (COLLECTOR, "next_valid")
"""A column, or above one for each group of agents ``[row, agent]``; see `next_valid_keys`."""
VALID: Final[Key] = (COLLECTOR, "valid")
RESET_SEED: Final[Key] = (COLLECTOR, "reset_seed")
CONTEXT: Final[Key] = (COLLECTOR, "context")
CUT: Final[Key] = (COLLECTOR, "cut")
MASK: Final[Key] = (COLLECTOR, "mask")

RANDOM_VERSION: Final = -1
"""``policy_version`` of a transition whose action was drawn at random."""

IS_INIT: Final = "is_init"
"""Last name of columns that are True where recurrent modules begin from the state of the row."""
COUNTERS: Final = frozenset({"step_count", IS_INIT, "episode_reward"})
"""Last names of columns in which TorchRL's transforms count along an episode (StepCounter,
InitTracker, RewardSum): they tell how long it has lasted, and not what was observed."""


Keys: TypeAlias = Sequence[str | Key]
"""Some columns, as users name them."""


def next_valid_keys(keys: Iterable[Key]) -> list[Key]:
    """Return the columns that mark lost next observations: of rows, or of agents."""
    return [key for key in keys if key[: len(NEXT_VALID)] == NEXT_VALID]


def as_key(key: str | tuple[str, ...]) -> Key:
    """``key`` as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def format_key(key: str | tuple[str, ...]) -> str:
    """Return a key as users read and write it: ``next/observation``."""
    return key if isinstance(key, str) else "/".join(key)


def can_be_stored(part: str) -> bool:
    """Return whether a file or a group can be called ``part``."""
    try:
        part.encode()
    except UnicodeEncodeError:
        return False
    return part not in ("", ".", "..") and "/" not in part and "\0" not in part


def is_init(key: Key, dtype: torch.dtype) -> bool:
    """Return whether a column marks the first row of a trajectory, at the root or of a group."""
    return key[0] != NEXT and key[-1] == IS_INIT and dtype is torch.bool


def is_done(key: Key, dtype: torch.dtype) -> bool:
    """Return whether a column says that an episode ended: at the root, or for a group of agents."""
    return key == DONE or (key[0] == NEXT and key[-1] == DONE[-1] and dtype is torch.bool)
