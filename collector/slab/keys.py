"""Column names: where each value of a transition stands in a TensorDict.

The layout is TorchRL's episode data format (observation and action at the root, what the
step returned under ``"next"``); what Tallyroll adds stands under ``"collector"``.
"""

from typing import Final

Key = tuple[str, ...]
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
NEXT_VALID: Final[Key] = (COLLECTOR, "next_valid")
VALID: Final[Key] = (COLLECTOR, "valid")
CUT: Final[Key] = (COLLECTOR, "cut")
MASK: Final[Key] = (COLLECTOR, "mask")

RANDOM_VERSION: Final = -1
"""``policy_version`` of a transition whose action was drawn at random."""


def as_key(key: str | tuple[str, ...]) -> Key:
    """``key`` as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def dotted(key: str | tuple[str, ...]) -> str:
    """``key`` as a reader writes it in a message: ``next.observation``."""
    return ".".join(as_key(key))
