"""Spaces of columns: the valid values of an environment's inputs and outputs, as JSON. Pure.

Each column has one space, which is written in a compact variant of Minari's format. An infinite
bound is text, equal bounds are one number, and a large number of different bounds is written as
bytes.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

SPACES: Final = "spaces"
"""The field of a run's entry with the spaces of columns, by column name."""
LEFT_OUT: Final = "spaces_left_out"
"""The number of columns whose spaces did not fit in the entry."""
UNCHECKED: Final = "spaces_unchecked"
"""The reason why values of these rows may be outside their spaces."""

NO_SPACE: Final = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""Errors that `space_of` and `leaves_of` raise for JSON that is not a space."""

_NBYTES: Final = 2**13
"""Maximum bytes of all spaces in an entry, which must fit into copies and exports."""
_FEW: Final = 32
"""Maximum number of bounds to write as numbers; more bounds are shorter as bytes."""
_DEEPEST: Final = 24
_ROUNDING: Final = 1e-6
"""Relative tolerance of a float for bounds that were written as text."""
OF_LANES: Final = "of_lanes"
"""The field in the JSON of a space that has the bounds of each lane, if they differ.

Its value is a Box ``[lane, ...]`` that also has the number of its first lane, as ``first_lane``.
The space itself has the bounds that hold for all lanes.
"""
_KNOWN: Final = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "OneHot", "MultiOneHot")


@dataclass(frozen=True)
class Space:
    """A space that contains no other spaces."""

    kind: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    hot: tuple[int, ...] = ()
    """Sizes of the groups of marks along the last axis. One mark is set in each group."""
    of_lanes: Space | None = None
    """The bounds of each lane ``[lane, ...]``, if they differ."""
    first_lane: int = 0
    """The lane to which the first bounds in `of_lanes` belong."""

    def outside_of_lanes(self, values: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Return a mask of the rows with a finite value outside the bounds of their lane.

        ``values`` [n, ...] has the rows, and ``lanes`` [n] has the lane of each row.
        """
        found, own = self.outside(values), self.of_lanes
        if own is None or own.low is None or own.high is None:
            return found
        for lane in np.unique(lanes):
            at = int(lane) - self.first_lane
            if 0 <= at < len(own.low):
                rows = lanes == lane
                low, high = own.low[at], own.high[at]
                found[rows] |= Space("Box", own.dtype, low.shape, low, high).outside(values[rows])
        return found

    @property
    def is_text(self) -> bool:
        """True if values are text, or of an unknown kind."""
        return self.kind not in _KNOWN

    @property
    def takes_all(self) -> bool:
        """True if the space contains every number of its dtype."""
        if self.low is None or self.high is None or self.dtype is None:
            return self.low is None or self.high is None
        least, most = _limits(self.dtype)
        low, high = _once(self.low), _once(self.high)
        return not self.hot and bool((low <= least).all() and (high >= most).all())

    def differs(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str | None:
        """Return why rows of a dtype and shape do not belong to the space, or None."""
        if (
            self.shape is not None
            and shape != self.shape
            and not (self.shape == () and shape == (1,))
        ):
            return f"a row has the shape {list(shape)}, expected {list(self.shape)}"
        if self.dtype is not None and not np.can_cast(dtype, self.dtype, "same_kind"):
            return f"its dtype is {dtype}, expected {self.dtype}"
        return None

    def ends(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds [*shape] in a dtype; raise ValueError if it cannot hold them."""
        found = []
        for bound in (self.low, self.high):
            if bound is None:
                raise ValueError(f"{self.kind} has no bounds")
            with np.errstate(all="ignore"):
                cast = bound.astype(dtype)
            if dtype.kind != "f" and (cast != bound).any():
                raise ValueError(f"the bounds of {self.kind} cannot be represented in {dtype}")
            found.append(cast)
        return found[0], found[1]

    def holds(self, values: np.ndarray) -> bool:
        """Return True if a quick check shows that all values [n, ...] are within the bounds."""
        if self.low is None or self.high is None or self.hot or not values.size:
            return not self.hot
        with np.errstate(invalid="ignore"):  # signalling NaNs, which are outside any bounds
            low, high = _once(self.low), _once(self.high)
            return bool(values.min() >= low.max() and values.max() <= high.min())

    def outside(self, values: np.ndarray) -> np.ndarray:
        """Return a mask of the rows [n, ...] with a finite value outside the bounds."""
        if self.low is None or self.high is None or values.dtype.kind not in "biuf":
            return np.zeros(len(values), bool)
        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        slack = _ROUNDING if values.dtype.kind == "f" else 0.0
        low, high = (each.reshape(-1) for each in (self.low, self.high))
        with np.errstate(invalid="ignore", over="ignore"):
            under = flat < low - slack * np.abs(np.where(np.isfinite(low), low, 0))
            over = flat > high + slack * np.abs(np.where(np.isfinite(high), high, 0))
        found: np.ndarray = ((under | over) & np.isfinite(flat)).any(1)
        if self.hot:
            groups = values.reshape(len(values), -1, sum(self.hot)).astype(np.int64)
            begins = np.cumsum((0, *self.hot[:-1]))
            found |= (np.add.reduceat(groups, begins, axis=2) != 1).any((1, 2))
        return found


def leaves_of(space: Any, deep: int = 0) -> dict[str, Mapping[str, Any]]:
    """Return the leaves of a space by path. Every path is empty or begins with a slash.

    Raises:
        ValueError, TypeError, KeyError: the value is not a space.
    """
    if not isinstance(space, Mapping) or deep > _DEEPEST:
        raise ValueError("it is not a space")
    if space["type"] not in ("Dict", "Tuple"):
        return {"": space}
    below = space["subspaces"]
    parts = (
        below.items()
        if isinstance(below, Mapping)
        else ((f"_index_{number}", each) for number, each in enumerate(below))
    )
    return {
        f"/{name}{path}": leaf
        for name, each in parts
        for path, leaf in leaves_of(each, deep + 1).items()
    }


def space_of(said: Mapping[str, Any]) -> Space:
    """Return the space that JSON describes; raise one of `NO_SPACE` if it describes none."""
    kind = str(said["type"])
    if kind not in _KNOWN:
        return Space(kind)
    dtype = np.dtype(said["dtype"]) if "dtype" in said else None
    shape = tuple(int(each) for each in said["shape"]) if "shape" in said else None
    if dtype is not None and dtype.kind not in "biuf":
        raise ValueError(f"{kind} of the unsupported dtype {dtype!s:.80}")
    if "left_out" in said:
        return Space(kind, dtype, shape)
    hot = tuple[int, ...]()
    match kind:
        case "Box":
            if dtype is None or shape is None:
                raise ValueError("a Box needs a dtype and a shape")
            low, high = (_bounds(said[name], dtype, shape) for name in ("low", "high"))
        case "Discrete" | "MultiDiscrete":
            count = np.asarray(said["n" if kind == "Discrete" else "nvec"], np.float64)
            low = np.asarray(said.get("start", 0.0), np.float64)
            high, shape = low + count - 1, count.shape if shape is None else shape
            dtype = dtype or np.dtype(np.int64)
        case "MultiBinary":
            size = said["n"]
            shape = tuple(map(int, size)) if isinstance(size, list) else (int(size),)
            low, high = np.asarray(0.0), np.asarray(1.0)
        case _:
            hot = tuple(map(int, [said["n"]] if kind == "OneHot" else said["nvec"]))
            if not shape or min(hot, default=0) < 1 or sum(hot) != shape[-1]:
                raise ValueError(f"{kind} of {hot!s:.80} does not have the shape {shape!s:.80}")
            low, high = np.asarray(0.0), np.asarray(1.0)
    low, high = (np.broadcast_to(each, shape) for each in (low, high))
    own: Space | None = None
    first, by_lane = 0, said.get(OF_LANES)
    if by_lane is not None:
        own, first = space_of(by_lane), int(by_lane["first_lane"])
        if own.shape is None or own.shape[1:] != shape:
            raise ValueError(
                f"the bounds of lanes have the shape {own.shape!s:.80}, which does not match "
                f"{shape!s:.80}"
            )
    return Space(kind, dtype, shape, low, high, hot, own, first)


def _bounds(said: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    if isinstance(said, Mapping):
        raw = base64.b64decode(said["base64"], validate=True)
        return np.frombuffer(raw, dtype.newbyteorder("<")).reshape(shape)
    found = np.asarray(said)
    if found.dtype.kind not in "iuf":  # text, or integers beyond every dtype
        found = np.asarray(said, np.float64)
    return np.broadcast_to(found, shape)


def _once(bound: np.ndarray) -> np.ndarray:
    """Return a bound with one element per broadcast axis, because JSON may give it any shape."""
    return bound[tuple(slice(None) if stride else slice(1) for stride in bound.strides)]


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min, limits.max
    return (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)


def box(dtype: np.dtype[Any], low: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    """Return the JSON of a Box with bounds [*shape] of its dtype."""
    said = {"low": _bound_json(low), "high": _bound_json(high)}
    return {"type": "Box", "dtype": dtype.name, "shape": [*low.shape], **said}


def box_of_lanes(
    dtype: np.dtype[Any], low: np.ndarray, high: np.ndarray, first_lane: int
) -> dict[str, Any]:
    """Return the JSON of a Box with bounds [lane, *shape] of its dtype that differ by lane."""
    own = {**box(dtype, low, high), "first_lane": first_lane}
    return {**box(dtype, low.min(axis=0), high.max(axis=0)), OF_LANES: own}


def compact(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return another program's JSON of a space compactly; raise one of `NO_SPACE` if invalid."""
    space = space_of(said)
    if space.kind == "Box" and space.dtype is not None:
        return box(space.dtype, *space.ends(space.dtype))
    names = ("type", "dtype", "shape", "n", "nvec", "start")
    return {name: said[name] for name in names if name in said}


def _bound_json(bound: np.ndarray) -> Any:
    if bound.size and (bound == bound.reshape(-1)[0]).all():
        return _number(bound.reshape(-1)[0])
    if bound.size <= _FEW:
        return [_bounds_json(each) for each in bound]
    little = np.ascontiguousarray(bound, bound.dtype.newbyteorder("<"))
    return {"base64": base64.b64encode(little.tobytes()).decode()}


def _bounds_json(bound: Any) -> Any:
    return [_bounds_json(each) for each in bound] if np.ndim(bound) else _number(bound)


def _number(value: Any) -> Any:
    """Return a number as JSON; infinities and NaN become text."""
    number = value.item()
    return number if isinstance(number, int) or math.isfinite(number) else str(number)


def agreed(spaces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spaces of columns that are equal in all mappings."""
    found: dict[str, Any] | None = None
    for own in spaces:
        found = dict(own) if found is None else {k: v for k, v in found.items() if own.get(k) == v}
    return found or {}


def fitting(spaces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of an entry that hold ``spaces``, which are given by column name.

    A space that does not fit is reduced to its type, dtype, shape and size. If these do not fit
    either, the space is left out.
    """
    found, room = dict[str, Any](), _NBYTES
    for name, said in spaces.items():
        nbytes = len(json.dumps(said))
        short = {each: said[each] for each in ("type", "dtype", "shape") if each in said}
        for each in (said, {**short, "left_out": nbytes}):
            if (needed := len(json.dumps({name: each}))) <= room:
                found[name], room = dict(each), room - needed
                break
    said = {SPACES: found, LEFT_OUT: len(spaces) - len(found)}
    return {name: each for name, each in said.items() if each}


_MOST_BOUNDS: Final = 6
"""Largest number of bounds that are spelled one by one."""


def spelled(said: Mapping[str, Any]) -> str:
    """Return a short description of a space, or "" for JSON that is not a space."""
    try:
        space = space_of(said)
    except NO_SPACE:
        return ""
    match space.kind:
        case "Box" if space.low is not None and space.high is not None:
            return f"in {_spelled_bounds(space.low, space.high)}"
        case "Discrete":
            start = f", from {said['start']}" if said.get("start") else ""
            return f"Discrete({said['n']}{start})"
        case "MultiBinary":
            return f"MultiBinary({', '.join(map(str, space.shape or ()))})"
        case "OneHot" | "MultiOneHot" | "MultiDiscrete" if space.low is not None:
            return f"{space.kind}({str(said.get('n', said.get('nvec'))).strip('[]'):.60})"
    return space.kind if "left_out" not in said else f"{space.kind}, {said['left_out']:,} bytes"


def _spelled_bounds(low: np.ndarray, high: np.ndarray) -> str:
    """Return ``0..255``, the bounds of each of a few numbers, or the widest bounds of many."""
    ends = [_once(each).astype(np.float64) for each in (low, high)]
    if all(each.min() == each.max() for each in ends):
        return _spelled_range(*(each.flat[0] for each in ends))
    if low.ndim == 1 and len(low) <= _MOST_BOUNDS:
        return ", ".join(map(_spelled_range, low.tolist(), high.tolist()))
    return f"{_spelled_range(ends[0].min(), ends[1].max())}, some narrower"


def _spelled_range(low: float, high: float) -> str:
    return f"{low:.4g}..{high:.4g}"
