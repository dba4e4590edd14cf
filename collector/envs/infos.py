"""Chosen ``info`` entries of a Gymnasium vector environment as columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torchrl.data import Unbounded

from tallyroll.collector.errors import ArgumentError

Array = NDArray[Any]


class InfoColumns:
    """Reads ``names`` out of vector infos; an entry that a lane lacks is 0.

    Dtype and shape are taken from the infos of a reset and, for a name that resets lack, of one
    random step; the environment must be reset afterwards, as a collector does.
    """

    def __init__(self, names: Sequence[str], env: VectorEnv) -> None:
        self.names = tuple(names)
        self._lanes = int(env.num_envs)
        self._columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        if self.names:
            self._discover(env)

    def _discover(self, env: VectorEnv) -> None:
        seen: dict[str, Any] = dict(env.reset()[1])
        if any(name not in seen for name in self.names):
            seen = {**env.step(env.action_space.sample())[-1], **seen}
        for name in self.names:
            if name not in seen:
                known = sorted(key for key in seen if not key.startswith("_"))
                raise ArgumentError(
                    f"info key {name!r} is in no info of a reset or of a step; known are {known}"
                )
            value = _dense(seen[name])
            if value is None or value.shape[:1] != (self._lanes,):
                raise ArgumentError(
                    f"info key {name!r} holds no number or array for each lane: "
                    f"got {type(seen[name]).__name__} {seen[name]!r}"
                )
            self._columns[name] = (value.dtype, value.shape[1:])

    def specs(self) -> dict[str, Unbounded]:
        """A spec a name, with the leading dimension of the lanes."""
        return {
            name: Unbounded(
                shape=(self._lanes, *shape), dtype=torch.from_numpy(np.zeros(1, dtype)).dtype
            )
            for name, (dtype, shape) in self._columns.items()
        }

    def new_rows(self) -> list[Array]:
        """Zeroed arrays ``[lane, ...]``, one a name."""
        return [np.zeros((self._lanes, *shape), dtype) for dtype, shape in self._columns.values()]

    def write(self, rows: Sequence[Array], info: Mapping[str, Any]) -> None:
        """Fill ``rows`` from ``info``; 0 where a lane has no entry."""
        for row, name in zip(rows, self.names, strict=True):
            row[...] = 0
            self._put(row, name, info, np.ones(self._lanes, np.bool_))

    def write_reset(
        self, rows: Sequence[Array], info: Mapping[str, Any], lanes: NDArray[np.bool_]
    ) -> None:
        """Fill the entries of ``lanes`` from the infos of their reset."""
        for row, name in zip(rows, self.names, strict=True):
            row[lanes] = 0
            self._put(row, name, info, lanes)

    def write_final(
        self, rows: Sequence[Array], info: Mapping[str, Any], ended: NDArray[np.bool_]
    ) -> None:
        """SAME_STEP: the infos of the step that ended an episode are in ``final_info``."""
        self.write_reset(rows, info.get("final_info", {}), ended)

    def _put(
        self, row: Array, name: str, info: Mapping[str, Any], lanes: NDArray[np.bool_]
    ) -> None:
        if name not in info:
            return
        have = lanes & np.asarray(info.get(f"_{name}", True))
        value = info[name]
        if isinstance(value, np.ndarray) and value.dtype.kind == "O":
            for lane in np.nonzero(have)[0]:
                row[lane] = value[lane]
        else:
            row[have] = np.asarray(value)[have]


def _dense(value: Any) -> Array | None:
    """A vector info entry as a numeric array ``[lane, ...]``, or None where it is not one."""
    array = np.asarray(value)
    if array.dtype.kind == "O":
        present = [np.asarray(entry) for entry in array if entry is not None]
        if not present or any(entry.shape != present[0].shape for entry in present):
            return None
        array = np.zeros((len(array), *present[0].shape), present[0].dtype)
    return array if array.dtype.kind in "biufc" else None
