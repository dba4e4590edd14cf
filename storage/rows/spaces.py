"""Spaces of columns: the values that an environment may give or take, as JSON. Pure.

A space is written as Minari writes it, for a column each, but in few bytes: a bound that is
infinite is a text, bounds that are all alike are one number, and many that differ are their bytes.
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
"""The name, in a run's entry, of the spaces of columns, by the columns' names."""
LEFT_OUT: Final = "spaces_left_out"
"""The number of columns whose spaces had no room in the entry."""
UNCHECKED: Final = "spaces_unchecked"
"""The reason why values of these rows may be outside their spaces."""

NO_SPACE: Final = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""Errors that `space_of` and `leaves_of` raise for JSON that is no space."""

_NBYTES: Final = 2**13
"""Bytes of all spaces in an entry: it has to fit into what travels with copies and exports."""
_FEW: Final = 32
"""Bounds that are written as numbers; more take fewer characters as bytes."""
_DEEPEST: Final = 24
_ROUNDING: Final = 1e-6
"""By which a float may pass a bound that was written as text, as a part of the bound."""
OF_LANES: Final = "of_lanes"
"""The name, in the JSON of a space, of the bounds of each lane where these differ.

It is a Box ``[lane, ...]``, with the number of its first lane as ``first_lane``; the space itself
has the bounds that hold for all.
"""
_KNOWN: Final = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "OneHot", "MultiOneHot")


@dataclass(frozen=True)
class Space:
    """A space without spaces in it."""

    kind: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    hot: tuple[int, ...] = ()
    """Sizes of the groups of marks along the last axis, of each of which one mark is set."""
    of_lanes: Space | None = None
    """The bounds of each lane ``[lane, ...]`` where these differ."""
    first_lane: int = 0
    """The lane of the first of these."""

    def outside_of_lanes(self, values: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Return which rows [n, ...] have a finite value outside the bounds of their lane [n]."""
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
        """Return whether values are texts, or of a kind that is not known here."""
        return self.kind not in _KNOWN

    @property
    def takes_all(self) -> bool:
        """Return whether every number of its dtype is inside."""
        if self.low is None or self.high is None or self.dtype is None:
            return self.low is None or self.high is None
        least, most = _limits(self.dtype)
        low, high = _once(self.low), _once(self.high)
        return not self.hot and bool((low <= least).all() and (high >= most).all())

    def differs(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str | None:
        """Return why rows of such a dtype and shape are not of the space."""
        if (
            self.shape is not None
            and shape != self.shape
            and not (self.shape == () and shape == (1,))
        ):
            return f"a row has the shape {list(shape)}, expected {list(self.shape)}"
        if self.dtype is not None and not np.can_cast(dtype, self.dtype, "same_kind"):
            return f"it has {dtype}, expected {self.dtype}"
        return None

    def ends(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the largest values [*shape] of a dtype; ValueError for others."""
        found = []
        for bound in (self.low, self.high):
            if bound is None:
                raise ValueError(f"{self.kind} has no bounds")
            with np.errstate(all="ignore"):
                cast = bound.astype(dtype)
            if dtype.kind != "f" and (cast != bound).any():
                raise ValueError(f"the bounds of {self.kind} are none of {dtype}")
            found.append(cast)
        return found[0], found[1]

    def holds(self, values: np.ndarray) -> bool:
        """Return whether all values [n, ...] are within bounds that all entries share: quick."""
        if self.low is None or self.high is None or self.hot or not values.size:
            return not self.hot
        with np.errstate(invalid="ignore"):  # of signalling NaNs, which are in no bounds
            low, high = _once(self.low), _once(self.high)
            return bool(values.min() >= low.max() and values.max() <= high.min())

    def outside(self, values: np.ndarray) -> np.ndarray:
        """Return which rows [n, ...] have a finite value outside the bounds."""
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
    """Return the leaves of a space by their paths, each of which begins with a slash, or is empty.

    Raises:
        ValueError, TypeError, KeyError: it is no space.
    """
    if not isinstance(space, Mapping) or deep > _DEEPEST:
        raise ValueError("it is no space")
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
    """Return the space that JSON says; raise one of `NO_SPACE` if it says none."""
    kind = str(said["type"])
    if kind not in _KNOWN:
        return Space(kind)
    dtype = np.dtype(said["dtype"]) if "dtype" in said else None
    shape = tuple(int(each) for each in said["shape"]) if "shape" in said else None
    if dtype is not None and dtype.kind not in "biuf":
        raise ValueError(f"{kind} of {dtype!s:.80}")
    if "left_out" in said:
        return Space(kind, dtype, shape)
    hot = tuple[int, ...]()
    match kind:
        case "Box":
            if dtype is None or shape is None:
                raise ValueError("a Box has a dtype and a shape")
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
                raise ValueError(f"{kind} of {hot!s:.80} has not the shape {shape!s:.80}")
            low, high = np.asarray(0.0), np.asarray(1.0)
    low, high = (np.broadcast_to(each, shape) for each in (low, high))
    own: Space | None = None
    first, by_lane = 0, said.get(OF_LANES)
    if by_lane is not None:
        own, first = space_of(by_lane), int(by_lane["first_lane"])
        if own.shape is None or own.shape[1:] != shape:
            raise ValueError(f"bounds of lanes of {own.shape!s:.80} are none of {shape!s:.80}")
    return Space(kind, dtype, shape, low, high, hot, own, first)


def _bounds(said: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    if isinstance(said, Mapping):
        raw = base64.b64decode(said["base64"], validate=True)
        return np.frombuffer(raw, dtype.newbyteorder("<")).reshape(shape)
    found = np.asarray(said)
    if found.dtype.kind not in "iuf":  # texts, or whole numbers that no dtype has
        found = np.asarray(said, np.float64)
    return np.broadcast_to(found, shape)


def _once(bound: np.ndarray) -> np.ndarray:
    """Return a bound without what broadcasting repeats: its shape may be any that JSON says."""
    return bound[tuple(slice(None) if stride else slice(1) for stride in bound.strides)]


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min, limits.max
    return (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)


def box(dtype: np.dtype[Any], low: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    """Return the JSON of a Box, of bounds [*shape] that have its dtype."""
    said = {"low": _said(low), "high": _said(high)}
    return {"type": "Box", "dtype": dtype.name, "shape": [*low.shape], **said}


def box_of_lanes(
    dtype: np.dtype[Any], low: np.ndarray, high: np.ndarray, first_lane: int
) -> dict[str, Any]:
    """Return the JSON of a Box, of bounds [lane, *shape] that have its dtype and differ by lane."""
    own = {**box(dtype, low, high), "first_lane": first_lane}
    return {**box(dtype, low.min(axis=0), high.max(axis=0)), OF_LANES: own}


def compact(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a space of another program in few bytes; raise one of `NO_SPACE`."""
    space = space_of(said)
    if space.kind == "Box" and space.dtype is not None:
        return box(space.dtype, *space.ends(space.dtype))
    names = ("type", "dtype", "shape", "n", "nvec", "start")
    return {name: said[name] for name in names if name in said}


def _said(bound: np.ndarray) -> Any:
    if bound.size and (bound == bound.reshape(-1)[0]).all():
        return _number(bound.reshape(-1)[0])
    if bound.size <= _FEW:
        return [_said_each(each) for each in bound]
    little = np.ascontiguousarray(bound, bound.dtype.newbyteorder("<"))
    return {"base64": base64.b64encode(little.tobytes()).decode()}


def _said_each(bound: Any) -> Any:
    return [_said_each(each) for each in bound] if np.ndim(bound) else _number(bound)


def _number(value: Any) -> Any:
    """Return a number as JSON has it: an infinite one, and NaN, as a text."""
    number = value.item()
    return number if isinstance(number, int) or math.isfinite(number) else str(number)


def agreed(spaces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spaces of columns that are alike in all mappings."""
    found: dict[str, Any] | None = None
    for own in spaces:
        found = dict(own) if found is None else {k: v for k, v in found.items() if own.get(k) == v}
    return found or {}


def fitting(spaces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what an entry says of spaces, by columns' names: of large ones, how large they are."""
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


def spelled(said: Mapping[str, Any]) -> str:
    """Return a space in a few words, nothing for JSON that is none."""
    try:
        space = space_of(said)
    except NO_SPACE:
        return ""
    match space.kind:
        case "Box" if space.low is not None and space.high is not None:
            return f"Box {_spelled_ends(space.low, space.high)}"
        case "Discrete":
            start = f", from {said['start']}" if said.get("start") else ""
            return f"Discrete({said['n']}{start})"
        case "MultiBinary":
            return f"MultiBinary({', '.join(map(str, space.shape or ()))})"
        case "OneHot" | "MultiOneHot" | "MultiDiscrete" if space.low is not None:
            return f"{space.kind}({str(said.get('n', said.get('nvec'))).strip('[]'):.60})"
    return space.kind if "left_out" not in said else f"{space.kind}, {said['left_out']:,} bytes"


def _spelled_ends(low: np.ndarray, high: np.ndarray) -> str:
    ends = []
    for bound in (low, high):
        each = _once(bound)
        least, most = float(each.min()), float(each.max())
        ends.append(f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}")
    return f"[{', '.join(ends)}]"
