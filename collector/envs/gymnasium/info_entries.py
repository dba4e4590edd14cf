"""Lookup of entries in infos, and the errors for invalid ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.errors import ArgumentError, TransitionError
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.lossless import cast
from tallyroll.storage.rows.keys import Key

Array = NDArray[Any]
Mask = NDArray[np.bool_]


def entry_of(info: Any, path: Key) -> Any:
    """Return the entry at ``path`` in the info of one lane; None if absent."""
    for name in path:
        info = info.get(name) if isinstance(info, Mapping) else None
    return info


def complete(info: Mapping[str, Any], key: Key) -> bool:
    """Return True if every lane has the entry."""
    found = lookup(info, key)
    return found is not None and (found[1] is None or bool(found[1].all()))


def found_in(info: Info, infos: Mapping[str, Any], lanes: int) -> Info:
    """Return ``info`` with the dtype and shape of its entry in ``infos``.

    Raises:
        ArgumentError: the entry is absent, or is not a number or an array of one shape per lane.
    """
    found = lookup(infos, info.key)
    if found is None:
        raise unknown(info, infos, "is not in the infos of the first reset")
    value = found[0]
    array = as_array(value)
    if array is not None and array.dtype.kind == "O" and array.shape == (lanes,):
        array = _stacked([joined(info.key, each) for each in array if each is not None])
    elif array is not None and array.shape[:1] != (lanes,):
        array = None
    if array is None or array.dtype.kind not in "biufc":
        raise ArgumentError(
            f"{name_of(info)}: expected a number, or an array of one shape, for each lane, got "
            f"{shown(value)}. Leave the key out, or encode its value in a wrapper."
        )
    return replace(info, dtype=array.dtype, shape=array.shape[1:])


def unknown(info: Info, infos: Mapping[str, Any], why: str) -> ArgumentError:
    """Return the error for an entry that cannot be declared, with a list of known entries."""
    known = sorted(key for key in infos if not key.startswith("_"))
    return ArgumentError(
        f"{name_of(info)} {why}. The known keys are {known}. If the key appears later, or only "
        f'sometimes, declare it: Info({spelled(info)}, dtype="float64", fill=0)'
    )


def _stacked(entries: Sequence[Any]) -> Array | None:
    arrays = [as_array(entry) for entry in entries]
    found = [array for array in arrays if array is not None and array.dtype.kind in "biufc"]
    if not found or len(found) < len(arrays) or len({array.shape for array in found}) > 1:
        return None
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.stack([array.astype(np.result_type(*found)) for array in found])


def lookup(info: Mapping[str, Any], path: Key) -> "tuple[Any, Mask | None] | None":
    """Return the entry at ``path`` of a vector info, and the lanes that have it (None: all)."""
    mask: Mask | None = None
    value: Any = info
    for name in path:
        if not (type(value) is dict or isinstance(value, Mapping)) or name not in value:
            return None
        given = value.get(f"_{name}")
        if isinstance(given, np.ndarray) and given.dtype == np.bool_ and given.ndim == 1:
            mask = given if mask is None else mask & given
        value = value[name]
    return value, mask


def of_step(info: Mapping[str, Any], path: Key) -> bool:
    """Return True if a vector wrapper, such as RecordEpisodeStatistics, added this group.

    A group that Gymnasium merged from lanes contains masks. In SAME_STEP mode such a group belongs
    to a reset.
    """
    group = info.get(path[0]) if len(path) > 1 else None
    return isinstance(group, Mapping) and path[1] in group and f"_{path[1]}" not in group


def as_array(value: Any) -> Array | None:
    """Return ``value`` as a NumPy array; None if it cannot be converted."""
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        return np.asarray(value)
    except Exception:  # noqa: BLE001  any failure means that it is not an array
        return None


def joined(key: Key, value: Any) -> Any:
    """Return ``value``. If it is a mask of several choices, concatenate the parts of its tuple."""
    if key[-1] != MASK_NAME or not isinstance(value, (tuple, list)) or not value:
        return value
    if any(np.ndim(each) != 1 for each in value):
        return value
    return np.concatenate([np.asarray(each) for each in value])


def spelled(info: Info) -> str:
    """Return the key as a user would write it."""
    return repr("/".join(info.key) if all("/" not in part for part in info.key) else info.key)


def name_of(info: Info) -> str:
    """Return the name of an entry for messages."""
    return f"info key {spelled(info)}"


def _declared(info: Info, dtype: str | None = None) -> str:
    dtype = dtype or ("float64" if info.dtype is None else str(info.dtype))
    shape = f", shape={info.shape}" if info.shape else ""
    fill = "" if info.fill is None else f", fill={info.fill!r}"
    return f'info_keys=[Info({spelled(info)}, dtype="{dtype}"{shape}{fill})]'


def shown(value: Any) -> str:
    """Format a value for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.tolist()!r:.80}"
    return f"{type(value).__name__} {value!r:.80}"


def absent_entry(info: Info, where: str) -> TransitionError:
    """Return the error for an entry that is absent in a step or a reset."""
    filled = replace(info, fill=0)
    return TransitionError(
        f"{name_of(info)}: expected an entry in every step and every reset, got none {where}. "
        f"Declare a fill value for such steps: {_declared(filled)}"
    )


def misshapen(info: Info, entry: Array, where: str) -> TransitionError:
    """Return the error for an entry of another shape."""
    return TransitionError(
        f"{name_of(info)}: expected a value of shape {list(info.shape)}, got {shown(entry)} of "
        f"shape {list(entry.shape)} {where}. Return values of one shape, or declare this "
        f"shape: {_declared(replace(info, shape=entry.shape))}"
    )


def does_not_fit(info: Info, entry: Any, where: str) -> TransitionError:
    """Return the error for an entry that its dtype cannot hold."""
    entry = np.asarray(entry)
    wider = np.result_type(info.dtype, entry.dtype)
    if cast(entry, wider)[1] is not None or wider == info.dtype:
        wider = entry.dtype
    return TransitionError(
        f"{name_of(info)}: expected a value that {info.dtype} holds without loss, got "
        f"{shown(entry)} {where}. Declare another dtype: {_declared(info, str(wider))}"
    )
