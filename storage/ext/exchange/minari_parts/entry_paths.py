"""Map paths in an episode of Minari to columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tallyroll.storage.rows.keys import REWARD, TERMINATED, TRUNCATED, Key

OBSERVATIONS, ACTIONS, INFOS = "observations", "actions", "infos"
FLAGS: Final = {REWARD: "rewards", TERMINATED: "terminations", TRUNCATED: "truncations"}


def key_of(path: Key) -> Key | None:
    """Return the key of the column for a dataset, or None if no column corresponds to it."""
    match path:
        case ("observations", *rest):
            return tuple(rest) or ("observation",)
        case ("actions", *rest):
            return (*rest, "action")
        case (name,) if name in FLAGS.values():
            return next(each for each, other in FLAGS.items() if other == name)
    return None


def nested(values: Mapping[Key, Any]) -> dict[str, Any]:
    """Return values in nested dictionaries, one level for each part of their keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        here = found
        for part in key[:-1]:
            here = here.setdefault(part, {})
        here[key[-1]] = value
    return found
