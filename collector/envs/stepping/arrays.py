"""Conversion of the arrays that systems return to NumPy and torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.envs.system import AgentFlags, Array, Step, System
from tallyroll.collector.errors import TransitionError, ValueRefused
from tallyroll.collector.slab.lossless import cast
from tallyroll.storage.rows.keys import NEXT, Key

_FLAGS: Key = (NEXT, "terminated or truncated")


def whole(system: System, lanes: int) -> Step:
    """Receive one step of each lane from a system that returns lanes in any order."""
    parts: list[Step] = []
    while sum(len(part.terminated) for part in parts) < lanes:
        parts.append(system.recv())
    joined: Step = _mapped(_joined, *(_with_all(part, parts) for part in parts))
    came = np.asarray(joined.lanes)
    order = np.argsort(came, kind="stable")
    if not np.array_equal(came[order], np.arange(lanes)):
        raise TransitionError(f"expected each of {lanes} lanes once, got {came.tolist()!r:.200}")
    return reordered(joined, order)._replace(lanes=None)


def reordered(out: Step, order: NDArray[np.intp]) -> Step:
    """Return the result ``out`` of ``recv`` with its rows in ``order``."""
    found: Step = _mapped(lambda value: None if value is None else np.asarray(value)[order], out)
    return found


def _mapped(change: Callable[..., Any], *steps: Any) -> Any:
    """Apply ``change`` to the corresponding values of all ``steps``."""
    one = steps[0]
    if isinstance(one, Mapping):
        return {name: _mapped(change, *(each[name] for each in steps)) for name in one}
    if not isinstance(one, (tuple, list)):
        return change(*steps)
    values = [_mapped(change, *each) for each in zip(*steps, strict=True)]
    return type(one)(*values) if isinstance(one, (Step, AgentFlags)) else values


def _joined(*values: Array | None) -> Array | None:
    return None if values[0] is None else np.concatenate([np.asarray(each) for each in values])


def _with_all(part: Step, parts: Sequence[Step]) -> Step:
    """Return ``part`` with a value for every optional field that any of ``parts`` has."""
    no_lane = np.zeros(len(part.terminated), np.bool_)
    absent: dict[str, Any] = {"final": part.obs, "final_valid": no_lane, "skipped": no_lane}
    for name, value in absent.items():
        if getattr(part, name) is None and any(getattr(each, name) is not None for each in parts):
            part = part._replace(**{name: value})
    return part


def fitting(value: Array, row: NDArray[Any], key: Key) -> NDArray[Any]:
    """Convert ``value`` of all lanes to the dtype of ``row``; only digits of floats may be lost.

    A plain NumPy assignment would broadcast too few values to all lanes, and would change values
    that the dtype cannot hold.

    Raises:
        ValueError: the shape differs, or the values are not numbers.
        ValueRefused: the conversion would change a value. Its lane is the row of ``value``.
    """
    if (
        type(value) is np.ndarray
        and value.shape == row.shape
        and (value.dtype is row.dtype or (row.dtype is _FLOAT and are_small(value)))
    ):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        value = np.from_dlpack(value)
    found = np.asarray(value)
    if found.shape != row.shape or found.dtype.kind not in "biuf":
        raise ValueError(f"expected the shape {row.shape}, got {found.shape} of {found.dtype}")
    return _as_it_is(found, row.dtype, key)


def _as_it_is(found: NDArray[Any], dtype: np.dtype[Any], key: Key) -> NDArray[Any]:
    taken, lost = cast(found, dtype)
    if lost is not None and found.dtype.kind == dtype.kind == "f":
        with np.errstate(all="ignore"):
            taken = found.astype(dtype)
        lost = np.isfinite(found) != np.isfinite(taken)
    if lost is None or not lost.any():
        return taken
    at = tuple(int(index) for index in np.argwhere(lost)[0])
    wanted = "one bool, or 0 or 1" if dtype == np.bool_ else f"a number that {dtype} holds"
    advice = "return bools" if dtype == np.bool_ else "scale or round it in a wrapper"
    if key[0] == NEXT and dtype == _FLOAT:
        advice += ", or pass reward_dtype=torch.float64"
    error = ValueRefused(key, wanted, f"{found[at]} of {found.dtype}", advice)
    raise error.locate(lane=at[0] if at else None)


def first_changed_reward(values: Array, stored: NDArray[Any]) -> tuple[int, float] | None:
    """Return the lane and the value of the first reward that float32 stores as another number.

    These are finite rewards that became 0, and integers that became other integers. Ordinary
    rounding of digits does not count. Return None if there is no such reward.

    Args:
        values: rewards ``[lane, ...]`` that :func:`fitting` accepted.
        stored: the same rewards in their column.
    """
    if stored.dtype != _FLOAT:
        return None
    if isinstance(values, torch.Tensor):
        values = values.detach().numpy()
    found = np.asarray(values)
    if found.dtype.kind != "f" or found.dtype.itemsize <= stored.dtype.itemsize:
        return None
    squares = found.dot(found) if found.ndim == 1 else np.vdot(found, found)
    if squares <= _EXACT**2 and np.count_nonzero(stored) == np.count_nonzero(found):
        return None
    whole = (np.abs(found) > _EXACT) & (np.trunc(found) == found)
    changed = ((stored == 0) & (found != 0)) | (whole & (stored != found))
    if not changed.any():
        return None
    at = tuple(int(index) for index in np.argwhere(changed)[0])
    return at[0], float(found[at])


_EXACT = 2.0**24
"""Largest bound up to which float32 represents every integer."""
_FLOAT, _DOUBLE, _BOOL = (np.dtype(kind) for kind in (np.float32, np.float64, np.bool_))


def are_small(values: NDArray[Any]) -> bool:
    """Return True if a fast check shows that all float64 values are finite as float32."""
    if values.dtype is not _DOUBLE:
        return False
    # On some processors the BLAS sets the overflow flag, so NumPy warns of overflows in `dot`. It
    # never warns in `vdot`.
    return bool(np.vdot(values, values) < 1e76)


def put_flags(columns: Sequence[NDArray[Any]], at: int, flags: AgentFlags) -> None:
    """Write the flags of a group of agents to a slot of their columns."""
    terminated, truncated, done = columns
    for column, values in ((terminated, flags.terminated), (truncated, flags.truncated)):
        is_plain = type(values) is np.ndarray and values.dtype is _BOOL
        column[at] = values if is_plain else as_flags(values)
    np.logical_or(terminated[at], truncated[at], out=done[at])


def put_valid(row: NDArray[Any], flags: AgentFlags, lost: NDArray[np.bool_] | None) -> None:
    """Write to ``row`` ``[lane, agent]`` which next observations of a group are present.

    ``lost`` marks lanes whose final observations the user declares as lost; None if there are none.
    """
    row[...] = True if flags.next_valid is None else as_flags(flags.next_valid)
    if lost is not None:
        row[lost] = False


def as_flags(value: Array) -> NDArray[np.bool_]:
    """Return flags as a NumPy array, copied.

    Raises:
        ValueRefused: a value is not a flag.
    """
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        value = as_tensor(value, torch.device("cpu")).numpy()
    flags: NDArray[np.bool_] = np.array(_as_it_is(np.asarray(value), _BOOL, _FLAGS))
    return flags


def as_tensor(value: Array, device: torch.device) -> torch.Tensor:
    """Return a copy of ``value`` on ``device``."""
    if hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, torch.Tensor)):
        on_host = value.__dlpack_device__()[0] == torch.utils.dlpack.DLDeviceType.kDLCPU
        # torch does not accept read-only arrays of the host
        value = np.from_dlpack(value) if on_host else torch.utils.dlpack.from_dlpack(value)
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    return torch.from_numpy(np.array(value)).to(device)
