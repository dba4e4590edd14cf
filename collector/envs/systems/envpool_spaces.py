"""What EnvPool's spaces mean, and values in the dtypes that they declare."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


def cast(value: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """EnvPool's integers are of 32 bits, those of Gymnasium's discrete spaces of 64."""
    if value.dtype == dtype or not np.can_cast(value.dtype, dtype):
        return value
    return value.astype(dtype)


def true_space(space: Any) -> Any:
    """A space whose bounds are those that are meant.

    Where EnvPool knows none, it declares the smallest positive number as the lowest.
    """
    if isinstance(space, (dict, spaces.Dict)):
        return spaces.Dict({name: true_space(part) for name, part in space.items()})
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low)
    high = np.where(space.high == limits.max, np.inf, space.high)
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)
