"""Spaces as Minari's metadata write them: what a value may be. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_DEEPEST: Final = 24
_ROUNDING: Final = 1e-6
"""By which a float may pass a bound that was written as text, as a part of the bound."""


@dataclass(frozen=True)
class Leaf:
    """A space without spaces in it."""

    kind: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    @property
    def is_text(self) -> bool:
        """Return whether values are texts, or of a kind that is not known here."""
        return self.kind not in ("Box", "Discrete", "MultiDiscrete", "MultiBinary")

    @property
    def is_picture(self) -> bool:
        """Return whether Minari may have written values as JPEG."""
        return self.dtype == np.uint8 and self.shape is not None and len(self.shape) == 3

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
        return found


def leaves_of(space: Any, deep: int = 0) -> dict[str, Leaf]:
    """Return the leaves of a space by their paths, each of which begins with a slash, or is empty.

    Raises:
        ValueError, TypeError, KeyError: it is no space.
    """
    if not isinstance(space, Mapping) or deep > _DEEPEST:
        raise ValueError("it is no space")
    kind = space["type"]
    if kind in ("Dict", "Tuple"):
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
    return {"": _leaf(str(kind), space)}


def _leaf(kind: str, space: Mapping[str, Any]) -> Leaf:
    match kind:
        case "Box":
            shape = tuple(int(each) for each in space["shape"])
            low, high = (np.asarray(space[name], np.float64) for name in ("low", "high"))
            return Leaf(
                kind,
                np.dtype(space["dtype"]),
                shape,
                np.broadcast_to(low, shape),
                np.broadcast_to(high, shape),
            )
        case "Discrete":
            start, count = int(space.get("start", 0)), int(space["n"])
            ends = np.asarray(start), np.asarray(start + count - 1)
            return Leaf(kind, np.dtype(np.int64), (), *ends)
        case "MultiDiscrete":
            counts = np.asarray(space["nvec"])
            begins = np.asarray(space.get("start", np.zeros_like(counts)))
            dtype = np.dtype(space.get("dtype", "int64"))
            return Leaf(kind, dtype, counts.shape, begins, begins + counts - 1)
        case "MultiBinary":
            size = space["n"]
            wide = tuple(size) if isinstance(size, list) else (int(size),)
            return Leaf(kind, None, wide, np.zeros(wide), np.ones(wide))
    return Leaf(kind)
