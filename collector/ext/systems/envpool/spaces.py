"""EnvPool spaces, getters of its observations, and casts to the declared dtypes."""

import re
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tallyroll.collector.envs.gymnasium.spaces import Leaf


def cast(value: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Cast EnvPool's 32-bit integers to the 64-bit dtype of Gymnasium's discrete spaces."""
    if value.dtype is dtype or value.dtype == dtype or not np.can_cast(value.dtype, dtype):
        return value
    return value.astype(dtype)


def true_space(space: Any) -> Any:
    """Return ``space`` with its real bounds.

    For an unknown lower bound, EnvPool declares the smallest positive number. For an unknown upper
    bound, it declares the largest finite number.
    """
    if isinstance(space, (dict, spaces.Dict)):
        return spaces.Dict({name: true_space(part) for name, part in space.items()})
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low)
    high = np.where(space.high == limits.max, np.inf, space.high)
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)


def is_pool(made: object) -> bool:
    """Return True if ``made`` is an EnvPool environment.

    With EnvPool's dm API, environments also have the class of a single-lane environment.
    """
    package = sys.modules.get("envpool.python.envpool")
    return package is not None and isinstance(made, package.EnvPoolMixin)


def dm_getter(leaf: Leaf, env: Any) -> Callable[[Any], Any]:
    """Return a function that gets the array of ``leaf`` from an observation of the dm API."""
    only = next(key for key in env.spec.state_array_spec if key.startswith("obs"))
    path = leaf.path or only.removeprefix("obs:").split(".")
    walk = attrgetter(".".join(re.sub(r"\W", "_", str(name)) for name in path))
    walk(env.observation_spec())
    return walk
