"""Lossless merge of infos of several lanes, without Gymnasium's casts."""

import copy
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from tallyroll.collector.compat import info_merge, is_gymnasiums, set_info_merge
from tallyroll.collector.slab.lossless import cast

_PLAIN = {float: np.dtype(np.float64), int: np.dtype(np.int64), bool: np.dtype(np.bool_)}
_PLAIN |= {kind: np.dtype(kind) for kind in (np.float32, np.float64, np.int32, np.int64, np.bool_)}
_MOST = 2**63 - 1

Infos = dict[str, Any]
Merge = Callable[[Infos, dict[str, Any], int], Infos]


class ExactMerge:
    """Replaces ``VectorEnv._add_info`` for some names, at any depth.

    Gymnasium stores the values of a step in an array of the first lane's type, so that 0 and 0.75
    become 0 and 0. This merge keeps such values unchanged in an array of objects.
    """

    def __init__(self, merge: Merge, names: Collection[str], lanes: int) -> None:
        self.merge, self.names, self.lanes = merge, frozenset(names), lanes
        self._masks = {name: f"_{name}" for name in self.names}
        # A lane's own "_name" would replace the mask that belongs to "name".
        self._apart = self.names.union(self._masks.values())

    def __call__(self, infos: Infos, info: dict[str, Any], lane: int) -> Infos:
        """Add the ``info`` of ``lane`` to ``infos``."""
        found = self.names & info.keys()
        if not found:
            return self.merge(infos, info, lane)
        if len(info) > len(found):
            rest = {name: value for name, value in info.items() if name not in self._apart}
            infos = self.merge(infos, rest, lane)
        for name in found:
            if isinstance(info[name], dict) and isinstance(infos.get(name, {}), dict):
                infos = self.merge(infos, {name: info[name]}, lane)
            else:
                self._put(infos, name, info[name], lane)
        return infos

    def _put(self, infos: Infos, name: str, value: Any, lane: int) -> None:
        array, mask = infos.get(name), infos.get(self._masks[name])
        if array is not None and mask is not None and takes(array, value):
            array[lane] = value
            mask[lane] = True
            return
        if mask is None:
            mask = infos[self._masks[name]] = np.zeros(self.lanes, np.bool_)
        if array is None:
            array = _new(value, self.lanes)
        elif not isinstance(array, np.ndarray) or not _fits(array, value):
            array = _as_objects(array, mask)
        array[lane] = _own(value)
        infos[name] = array
        mask[lane] = True


def takes(array: Any, value: Any) -> bool:
    """Return True if ``value`` is a plain number of the array's type, so that no cast is needed."""
    kind = type(value)
    return (
        type(array) is np.ndarray
        and array.ndim == 1
        and _PLAIN.get(kind) is array.dtype
        and (kind is not int or -_MOST <= value <= _MOST)
    )


def _own(value: Any) -> Any:
    """Return a copy of a value that the environment could change before it is read."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (list, tuple, dict)) else value


def _new(value: Any, lanes: int) -> NDArray[Any]:
    if type(value) in (int, float, bool) or isinstance(value, (np.number, np.bool_, np.ndarray)):
        entry = np.asarray(value)
        if entry.dtype.kind in "biufc":
            return np.zeros((lanes, *entry.shape), entry.dtype)
    return np.full(lanes, None, object)


def _fits(array: NDArray[Any], value: Any) -> bool:
    if array.dtype.kind == "O":
        return True
    if not isinstance(value, (int, float, np.generic, np.ndarray)):
        return False
    entry = np.asarray(value)
    if entry.dtype.kind not in "biufc" or entry.shape != array.shape[1:]:
        return False
    return entry.dtype == array.dtype or cast(entry, array.dtype)[1] is None


def _as_objects(array: Any, mask: NDArray[np.bool_]) -> NDArray[Any]:
    objects = np.full(len(mask), None, object)
    for lane in np.nonzero(mask)[0].tolist():
        objects[lane] = array[lane] if isinstance(array, np.ndarray) else array
    return objects


def install(env: VectorEnv, names: Collection[str]) -> None:
    """Make ``env`` and its wrappers merge infos called ``names`` without loss."""
    merge = info_merge(env)
    if isinstance(merge, ExactMerge):
        names = {*names, *merge.names}
        merge = merge.merge
    set_info_merge(env, ExactMerge(merge, names, int(env.unwrapped.num_envs)))


def merges_plainly(env: VectorEnv) -> bool:
    """Return True if ``env`` merges infos like Gymnasium, possibly through an `ExactMerge`."""
    merge = info_merge(env)
    merge = merge.merge if isinstance(merge, ExactMerge) else merge
    return is_gymnasiums(merge)
