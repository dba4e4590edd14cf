"""Convert spaces of the old gym package."""

from typing import Any

from gymnasium import spaces


def as_gymnasium(space: Any) -> spaces.Space[Any]:
    """Convert a space of the old gym package to a Gymnasium space."""
    kind, of = type(space).__name__, spaces
    if kind == "Dict":
        return of.Dict({name: as_gymnasium(each) for name, each in space.spaces.items()})
    if kind == "Discrete":
        return of.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return of.MultiDiscrete(space.nvec)
    return of.Box(space.low, space.high, space.shape, space.dtype)
