"""Conversion of Gymnasium spaces to TorchRL specs, leaf by leaf."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, TensorSpec, Unbounded

from tallyroll.collector.envs.gymnasium.info_entries import joined
from tallyroll.collector.errors import SpaceError, TransitionError
from tallyroll.collector.policies.masked_actions import Choices
from tallyroll.collector.policies.random_actions import MASK_NAME, block_draw
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import Key, format_key

_SUPPORTED = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
_SUPPORTED += [torch.float16, torch.float32, torch.float64, torch.complex64]
_SEEN_ALONE = [torch.uint16, torch.uint32, torch.uint64, torch.complex128]
"""Dtypes for observations only. Torch cannot compare them and so cannot validate actions."""
_NO_ACTIONS = {NUMPY[dtype] for dtype in _SEEN_ALONE}
_TORCH_DTYPES = {NUMPY[dtype]: dtype for dtype in (*_SUPPORTED, *_SEEN_ALONE)}


@dataclass(frozen=True)
class Leaf:
    """One column of an observation: its path in the values of the space, and its spec."""

    key: Key
    path: tuple[str | int, ...]
    spec: TensorSpec
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    text: bool = False
    """True for a string, whose column contains its UTF-8 bytes, padded with zeros."""

    def getter(self) -> Callable[[Any], Any]:
        """Return a function from a (batched) value of the space to this leaf's array."""
        path = self.path

        def walk(value: Any) -> Any:
            for name in path:
                value = value[name]
            return value

        if self.text:
            return lambda value: self._bytes(walk(value))
        if not path:
            return lambda value: value
        if len(path) == 1:
            (name,) = path
            return lambda value: value[name]
        return walk

    def _bytes(self, texts: str | Sequence[str]) -> NDArray[np.uint8]:
        """Encode a string as ``[width]``, or several as ``[string, width]``."""
        width = self.shape[-1]
        coded = [text.encode() for text in ((texts,) if isinstance(texts, str) else texts)]
        if too_long := next((text for text in coded if len(text) > width), None):
            raise TransitionError(
                f"{format_key(self.key)}: the space declares at most {width} bytes of text, the "
                f"environment returned {too_long.decode()!r}; correct the environment's space"
            )
        joined = b"".join(text.ljust(width, b"\0") for text in coded)
        array = np.frombuffer(joined, np.uint8)
        return array if isinstance(texts, str) else array.reshape(-1, width)


def observation_leaves(
    space: spaces.Space[Any], lanes: int, of_all: spaces.Space[Any] | None = None
) -> tuple[Leaf, ...]:
    """Return the columns of an observation space for ``lanes`` lanes.

    ``of_all`` is the space of all lanes together, whose bounds may differ between lanes.

    A plain space becomes ``("observation",)``. The names of a Dict become root keys, like in
    TorchRL's ``GymWrapper``. A Tuple becomes ``"0"``, ``"1"``, … below ``"observation"``. A Text
    becomes its UTF-8 bytes, padded with zeros to the length of the longest text.

    Raises:
        SpaceError: the space has no leaf, or a Graph, Sequence or OneOf is among its leaves.
    """
    key: Key = () if isinstance(space, spaces.Dict) else ("observation",)
    leaves = tuple(_leaves(space, key, (), lanes, of_all))
    if not leaves:
        raise SpaceError(
            f"observation: expected a space with at least one value, got {space}. Add a value in a "
            "wrapper."
        )
    return leaves


def action_leaf(
    space: spaces.Space[Any], lanes: int, of_all: spaces.Space[Any] | None = None
) -> Leaf:
    """Return the column of an action space: Box, Discrete, MultiDiscrete or MultiBinary.

    ``of_all`` is the space of all lanes together, whose bounds may differ between lanes.

    Raises:
        SpaceError: the space is composite or of another kind.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        raise SpaceError(
            f"expected a Box, Discrete, MultiDiscrete or MultiBinary action space, got {space}; "
            "flatten it with gymnasium.wrappers.FlattenAction or a wrapper of your own"
        )
    return next(_leaves(space, ("action",), (), lanes, of_all))


def drawn_from(space: spaces.Space[Any], lanes: int) -> Callable[[Any], Any]:
    """Return a function that draws actions ``[lanes, ...]`` like collectors, from a fixed seed.

    ``space`` is the action space of one lane. The function takes a mask of legal actions or None,
    and ignores a mask that does not fit the actions. It exists because Gymnasium cannot sample a
    ``Box`` of integers without an upper bound.
    """
    batched = batch_space(space, lanes)
    batched.seed(0)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return lambda mask: batched.sample()
    leaf, rng = action_leaf(space, lanes), np.random.default_rng(0)
    draw = block_draw(leaf.spec)
    choices = Choices.of(leaf.spec, len(leaf.shape) - 1)

    def drawn(mask: Any) -> Any:
        marks = _marks(mask, leaf)
        if choices is None or choices.parts(marks, choices.batch(leaf.shape)) is None:
            return batched.sample() if draw is None else draw(rng, 1)[0]
        uniform = rng.random(choices.uniforms(leaf.shape))
        return choices.draw(marks, uniform).astype(leaf.dtype)

    return drawn


def _marks(mask: Any, leaf: Leaf) -> NDArray[Any]:
    """Return a mask of all lanes, or of one alone, as an array; an empty array if it is invalid."""
    try:
        several = isinstance(mask, np.ndarray) and mask.dtype.kind == "O"
        each = [joined((MASK_NAME,), one) for one in (mask if several else [mask])]
        marks = np.stack([np.asarray(one) for one in each]) if several else np.asarray(each[0])
    except ValueError:
        return np.zeros(0)
    if isinstance(leaf.spec, Binary) and marks.size == np.prod(leaf.shape):
        marks = np.stack([marks != 1, marks != 0], -1).reshape(leaf.shape[0], -1)
    return marks


def mask_in(observation: Any, info: Mapping[str, Any]) -> Any:
    """Return the mask of legal actions in an environment's info or observation, or None."""
    seen = observation if isinstance(observation, Mapping) else {}
    return info.get(MASK_NAME, seen.get(MASK_NAME))


def _leaves(
    space: spaces.Space[Any],
    key: Key,
    path: tuple[str | int, ...],
    lanes: int,
    of_all: spaces.Space[Any] | None = None,
) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for name, part in space.items():
            among = of_all.get(name) if isinstance(of_all, spaces.Dict) else None
            yield from _leaves(part, (*key, str(name)), (*path, name), lanes, among)
    elif isinstance(space, spaces.Tuple):
        parts = of_all.spaces if isinstance(of_all, spaces.Tuple) else ()
        for index, part in enumerate(space.spaces):
            among = parts[index] if len(parts) == len(space.spaces) else None
            yield from _leaves(part, (*key, str(index)), (*path, index), lanes, among)
    elif key[0] != "action" and (width := text_width(space)):
        spec = Unbounded((lanes, width), dtype=torch.uint8)
        yield Leaf(key, path, spec, np.dtype(np.uint8), (lanes, width), text=True)
    else:
        dtype, shape = space.dtype, space.shape
        if key[0] == "action" and dtype in _NO_ACTIONS:
            raise SpaceError(
                f"the space {space!r} at {format_key(key)}: torch cannot compare {dtype}, so no "
                "policy can choose such actions. Declare a wider integer dtype in a wrapper that "
                "casts actions."
            )
        if dtype is None or shape is None or dtype not in _TORCH_DTYPES:
            raise SpaceError(
                f"the space {space!r} at {format_key(key)} has no fixed dtype and shape that a "
                "column could hold; wrap the environment so that it returns arrays"
            )
        spec = _spec_of_lanes(of_all, (lanes, *shape), np.dtype(dtype)) or _spec(space, lanes)
        yield Leaf(key, path, spec, np.dtype(dtype), (lanes, *shape))


def _spec_of_lanes(
    of_all: spaces.Space[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> TensorSpec | None:
    """Return the spec of lanes with different bounds; None if the bounds are equal or unknown."""
    low: NDArray[Any]
    high: NDArray[Any]
    if isinstance(of_all, spaces.Box):
        low, high = of_all.low, of_all.high
    elif isinstance(of_all, spaces.MultiDiscrete):
        low = np.asarray(of_all.start)
        high = low + (of_all.nvec - 1)
    else:
        return None
    if low.shape != shape or dtype.kind == "b" or not np.can_cast(low.dtype, dtype, "same_kind"):
        return None
    if (low == low[:1]).all() and (high == high[:1]).all():
        return None
    return _bounded(low, high, torch.Size(shape), _TORCH_DTYPES[dtype])


def text_width(space: spaces.Space[Any]) -> int:
    """Return the maximum number of bytes of a string in ``space``; 0 if unlimited or no strings."""
    if isinstance(space, spaces.Text):
        widest = max((len(char.encode()) for char in space.character_set), default=1)
        return max(1, int(space.max_length) * widest)
    # MiniGrid's missions: a function of words, each from a list.
    words, mission = (
        getattr(space, "ordered_placeholders", ()),
        getattr(space, "mission_func", None),
    )
    if mission is None:
        return 0
    return len(mission(*(max(each, key=len) for each in words or ())).encode())


def _spec(space: spaces.Space[Any], lanes: int) -> TensorSpec:
    """Return the spec of one leaf space, with a leading dimension of ``lanes``."""
    assert space.shape is not None and space.dtype is not None
    shape = torch.Size((lanes, *space.shape))
    dtype = _TORCH_DTYPES[np.dtype(space.dtype)]
    if isinstance(space, spaces.Discrete):
        if space.start == 0:
            return Categorical(int(space.n), shape=shape, dtype=dtype)
        low = int(space.start)
        return Bounded(low, low + int(space.n) - 1, shape=shape, dtype=dtype)
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim == 1 and not np.any(space.start):
            return MultiCategorical(space.nvec.tolist(), shape=shape, dtype=dtype)
        return _bounded(space.start, space.start + (space.nvec - 1), shape, dtype)
    if isinstance(space, spaces.MultiBinary):
        return Binary(shape[-1], shape=shape, dtype=dtype)
    if isinstance(space, spaces.Box):
        if dtype is torch.bool:
            return Unbounded(shape=shape, dtype=dtype)
        if np.isinf(space.low).all() and np.isinf(space.high).all():
            return Unbounded(shape=shape, dtype=dtype)
        return _bounded(space.low, space.high, shape, dtype)
    raise SpaceError(f"the space {space!r} cannot be stored in a column")


def _bounded(low: Any, high: Any, shape: torch.Size, dtype: torch.dtype) -> TensorSpec:
    bounds = [torch.as_tensor(np.asarray(bound)).to(dtype).expand(shape) for bound in (low, high)]
    return Bounded(*bounds, shape=shape, dtype=dtype)
