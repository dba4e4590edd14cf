"""What EnvPool tells of its lanes beside observations, by either of its APIs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def infos_of(made: Any, is_dm: bool) -> dict[str, Any]:
    """The infos in what a step or a reset returned; those of the dm API stand with observations."""
    return _fields(made.observation) if is_dm else made[-1]  # type: ignore[no-any-return]


def _fields(state: Any) -> Any:
    if not hasattr(state, "_asdict"):
        return state
    return {name: _fields(value) for name, value in state._asdict().items()}


def in_lanes(infos: Mapping[str, Any], ids: NDArray[np.int32], lanes: int) -> dict[str, Any]:
    """Infos that have a row for each of ``ids`` as infos ``[lane, ...]``."""
    found: dict[str, Any] = {}
    for name, value in infos.items():
        if isinstance(value, Mapping):
            found[name] = in_lanes(value, ids, lanes)
        elif isinstance(value, np.ndarray) and value.shape[:1] == (len(ids),):
            found[name] = np.zeros((lanes, *value.shape[1:]), value.dtype)
            found[name][ids] = value
    return found
