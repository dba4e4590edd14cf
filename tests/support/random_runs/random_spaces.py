"""Spaces of every kind that a column can hold, random values of them, and their leaves."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

Array: TypeAlias = npt.NDArray[Any]
Key: TypeAlias = tuple[str, ...]
Leaves: TypeAlias = dict[Key, Array]

INT64 = np.iinfo(np.int64)
LARGE = "large image"
"""A space whose rows are larger than 4 KiB."""


def _floats(*shape: int) -> Box:
    return Box(-100, 100, shape, np.float32)


def _bytes(*shape: int) -> Box:
    return Box(0, 255, shape, np.uint8)


def _uneven() -> Box:
    low, high = np.array([-1, 0, 5], np.float64), np.array([1, np.inf, 7], np.float64)
    return Box(low, high, dtype=np.float64)


def named(*names: str) -> Dict:
    """Return a Dict with these names, each with another shape."""
    return Dict({name: _floats(2 + i) for i, name in enumerate(names)})


OBSERVATIONS: dict[str, Callable[[], Space[Any]]] = {
    "float32": partial(_floats, 3),
    "float32 matrix": partial(_floats, 2, 3),
    "float32 scalar": partial(_floats),
    "float64": partial(Box, -1, 1, (4,), np.float64),
    "float16": partial(Box, -10, 10, (5,), np.float16),
    "unbounded": partial(Box, -np.inf, np.inf, (3,), np.float32),
    "uneven bounds": _uneven,
    "uint8 image": partial(_bytes, 4, 4, 3),
    LARGE: partial(_bytes, 40, 40, 3),
    "int8": partial(Box, -128, 127, (3,), np.int8),
    "int16": partial(Box, -999, 999, (2, 2), np.int16),
    "int32": partial(Box, -(2**31), 2**31 - 1, (2,), np.int32),
    "int64": partial(Box, INT64.min, INT64.max, (2,), np.int64),
    "bool": partial(Box, 0, 1, (6,), np.bool_),
    "discrete": partial(Discrete, 50),
    "few": partial(Discrete, 2),
    "discrete from -3": partial(Discrete, 9, start=-3),
    "multidiscrete": partial(MultiDiscrete, [5, 70, 3]),
    "multidiscrete matrix": partial(MultiDiscrete, [[5, 7], [2, 3]]),
    "multibinary": partial(MultiBinary, 11),
    "multibinary matrix": partial(MultiBinary, (2, 5)),
    "dict": lambda: Dict({"pos": _floats(2), "img": _bytes(3, 3), "n": Discrete(9)}),
    "nested dict": lambda: Dict(
        {"a": Dict({"b": _floats(2), "c": Dict({"d": Discrete(7)})}), "z": _bytes(2)}
    ),
    "tuple": lambda: Tuple((_floats(3), Discrete(40), _bytes(2, 2))),
    "tuple in dict": lambda: Dict({"both": Tuple((_floats(2), _bytes(3))), "n": MultiBinary(4)}),
    "large dict": lambda: Dict({"img": _bytes(40, 40, 3), "pos": _floats(2)}),
}
# TorchRL's wrapper rejects the first three, and calls images "pixels".
_NOT_IN_TORCHRL = ("multibinary matrix", "multidiscrete matrix", "discrete from -3")
_NOT_IN_TORCHRL += ("uint8 image", LARGE)
PLAIN = tuple(name for name in OBSERVATIONS if "tuple" not in name and name not in _NOT_IN_TORCHRL)
"""Spaces that TorchRL's own wrapper accepts."""
FLOAT_VECTORS = ("float32", "unbounded")

RARE: dict[str, Callable[[], Space[Any]]] = {
    "uint16 image": partial(Box, 0, 2**16 - 1, (4, 3), np.uint16),
    "uint32": partial(Box, 0, 2**32 - 1, (2,), np.uint32),
    "uint64": partial(Box, 0, 2**64 - 1, (2,), np.uint64),
    "float16 scalar": partial(Box, -10, 10, (), np.float16),
    "one of one": partial(Box, -10, 10, (1, 1), np.float32),
    "no values": partial(Box, -1, 1, (0,), np.float32),
}
"""Spaces that some columns can hold and others may refuse."""
REFUSABLE = ("uint32", "uint64", "no values")

COLLIDING = ("action", "next", "collector", "reward", "done", "terminated", "truncated", "")
TAKEN = ("step_count", "is_init", "episode_reward", "told", "tick", "action_mask", "_step", "mask")
"""Names that another part of the run may need."""
ODD = ("a.b", "a/b", "observation ", "ä", "0", "_reset", "keys", "a b", "..", "x" * 60)

ACTIONS: dict[str, Callable[[], Space[Any]]] = {
    "discrete": partial(Discrete, 3),
    "discrete from 5": partial(Discrete, 4, start=5),
    "discrete from -2": partial(Discrete, 4, start=-2),
    "box": partial(Box, -1, 1, (2,), np.float32),
    "box scalar": partial(Box, -1, 1, (), np.float32),
    "box float64": partial(Box, -2, 3, (2, 2), np.float64),
    "box unbounded": partial(Box, -np.inf, np.inf, (2,), np.float32),
    "box uint8": partial(Box, 0, 255, (3,), np.uint8),
    "box int32": partial(Box, -7, 9, (2,), np.int32),
    "box int64": partial(Box, INT64.min, INT64.max, (2,), np.int64),
    "box int64 above 0": partial(Box, 0, INT64.max, (2,), np.int64),
    "multidiscrete": partial(MultiDiscrete, [2, 3]),
    "multidiscrete from 1": lambda: MultiDiscrete([3, 4], start=[1, -1]),
    "multibinary": partial(MultiBinary, 3),
}
TORCHRL_ACTIONS = ("discrete", "box", "multidiscrete", "multibinary", "box int32")
FULL_RANGE = ("box int64", "box int64 above 0")


def drawn(space: Space[Any], rng: np.random.Generator) -> Any:
    """Return a random value of ``space``, with its dtype and shape."""
    if isinstance(space, Dict):
        return {name: drawn(part, rng) for name, part in space.items()}
    if isinstance(space, Tuple):
        return tuple(drawn(part, rng) for part in space.spaces)
    if isinstance(space, Discrete):
        return np.int64(space.start + rng.integers(space.n))
    if isinstance(space, MultiDiscrete):
        return (space.start + rng.integers(space.nvec)).astype(space.dtype)
    if isinstance(space, MultiBinary):
        return rng.integers(2, size=space.shape, dtype=np.int8)
    assert isinstance(space, Box)
    return _in_box(space, rng)


def _in_box(space: Box, rng: np.random.Generator) -> Array:
    if space.dtype == np.bool_:
        return rng.integers(2, size=space.shape).astype(np.bool_)
    if space.dtype.kind in "iu":
        return rng.integers(space.low, space.high, dtype=space.dtype, endpoint=True)
    low = np.where(np.isfinite(space.low), space.low, -50).astype(np.float64)
    high = np.where(np.isfinite(space.high), space.high, 50).astype(np.float64)
    value = np.asarray(rng.uniform(low, high), space.dtype)
    return np.clip(value, space.low, space.high).astype(space.dtype)


def leaves(value: Any) -> Leaves:
    """Return copies of the arrays in an observation, by the keys of their columns."""
    key: Key = () if isinstance(value, dict) else ("observation",)
    return {key: np.array(leaf) for key, leaf in _walk(value, key)}


def _walk(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _walk(part, (*key, str(name)))
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _walk(part, (*key, str(index)))
    else:
        yield key, value


def acted(space: Space[Any], numbers: npt.NDArray[np.uint64], masks: Array | None = None) -> Array:
    """Return an action for each of ``numbers`` ``[lane]``, a function of the number alone.

    If ``masks`` ``[lane, value]`` are given, they allow the action.
    """
    rngs = [np.random.default_rng(int(number)) for number in numbers]
    if masks is None:
        each = [drawn(space, rng) for rng in rngs]
    else:
        each = [legal(space, mask, rng) for mask, rng in zip(masks, rngs, strict=True)]
    return np.stack([np.asarray(value) for value in each])


def parts_of_mask(space: Space[Any]) -> list[int]:
    """Return the number of values of each part of a masked action."""
    if isinstance(space, Discrete):
        return [int(space.n)]
    assert isinstance(space, MultiDiscrete)
    return [int(n) for n in space.nvec]


def legal(space: Space[Any], mask: Array, rng: np.random.Generator) -> Any:
    """Return a random value of ``space`` that ``mask`` allows."""
    starts = np.atleast_1d(space.start)  # type: ignore[attr-defined]
    found, first = [], 0
    for n, start in zip(parts_of_mask(space), starts, strict=True):
        allowed = np.flatnonzero(mask[first : first + n])
        found.append(start + (rng.choice(allowed) if len(allowed) else 0))
        first += n
    if isinstance(space, Discrete):
        return np.int64(found[0])
    return np.array(found, space.dtype)


def is_legal(space: Space[Any], action: Any, mask: Array) -> bool:
    """Return whether ``mask`` allows every part of ``action``."""
    values = np.atleast_1d(action) - np.atleast_1d(space.start)  # type: ignore[attr-defined]
    firsts = np.cumsum([0, *parts_of_mask(space)[:-1]])
    return bool(mask[firsts + values].all())


def action_sum(action: Any) -> float:
    """Return a small number that depends on every byte of an action; exact in float32."""
    return float(sum(np.ascontiguousarray(action).tobytes()) % 16) / 2


def space_of_observation(name: str, names: tuple[str, ...] = (), mask: int = 0) -> Space[Any]:
    """Return the space called ``name``. ``names`` make it a Dict, ``mask`` adds an action mask."""
    space = named(*names) if names else {**OBSERVATIONS, **RARE}[name]()
    if mask:
        parts = dict(space.items()) if isinstance(space, Dict) else {"observation": space}
        return Dict({**parts, "action_mask": spaces.Box(0, 1, (mask,), np.bool_)})
    return space


def digest(parts: list[Array]) -> int:
    """Return a checksum of the bytes of arrays."""
    found = 0
    for part in parts:
        found = zlib.crc32(np.ascontiguousarray(part).tobytes(), found)
    return found


def numbers_of(columns: list[Array], lead: int = 1) -> Any:
    """Return a number for each row ``[row, ...]``; with ``lead`` 0 the columns are a single row."""
    if not lead:
        columns = [column[None] for column in columns]
    rows = len(columns[0])
    return np.array([digest([column[row] for column in columns]) for row in range(rows)], np.uint64)
