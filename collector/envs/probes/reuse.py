"""Detection of memory that values of different calls of an environment share.

A value is anything that an environment may return: arrays, tensors, and dictionaries, tuples, lists
and TensorDicts of them. Dictionaries, lists and TensorDicts count as memory too, because an
environment may return the same one with other arrays in it. The functions have no side effects.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.exceptions import TooHardError
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor

from tallyroll.collector.slab.slab import Array

Leaf: TypeAlias = NDArray[Any] | torch.Tensor
_MOST_WORK = 10_000
"""Limit for NumPy's overlap search. Above it, arrays with interleaved elements count as sharing."""


class _Place(Protocol):
    __array_interface__: dict[str, Any]


class _At:
    """A place in memory, in NumPy's array interface. Its bytes are never read."""

    def __init__(
        self, address: int, shape: Iterable[int], strides: Iterable[int], size: int
    ) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{size}",
            "version": 3,
        }


def leaves(value: Any) -> Iterator[Leaf]:
    """Yield every array and tensor in ``value``."""
    for each in _walk(value):
        if isinstance(each, (np.ndarray, torch.Tensor)):
            yield each


def places(value: Any) -> list[Array]:
    """Return the memory of ``value`` as one array for each leaf or container.

    The arrays are not meant to be read. Keep ``value`` alive while they are compared, because its
    memory may otherwise be reused.
    """
    found = []
    for each in _walk(value):
        if isinstance(each, np.ndarray):
            place = each
        elif not isinstance(each, torch.Tensor):
            place = _asarray(_At(id(each), (1,), (1,), 1))
        elif each.layout is torch.strided:
            size = each.element_size()
            strides = (step * size for step in each.stride())
            place = _asarray(_At(each.data_ptr(), each.shape, strides, size))
        else:
            continue
        if place.size:
            found.append(place)
    return found


def overlap(one: Iterable[Array], other: Iterable[Array]) -> bool:
    """Return True if a place of ``one`` and a place of ``other`` have a byte in common."""
    others = list(other)
    return any(_overlap(mine, theirs) for mine in one for theirs in others)


def share_memory(one: Any, other: Any) -> bool:
    """Return True if ``one`` and ``other`` share memory: writing one may change the other."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return _overlap(one, other)
    return overlap(places(one), places(other))


def sharing(values: Sequence[Any]) -> tuple[int, int] | None:
    """Return the indices of two of ``values`` that share memory; None if there are none."""
    spans = sorted(
        (
            (*byte_bounds(place), index, place)
            for index, v in enumerate(values)
            for place in places(v)
        ),
        key=lambda span: span[0],
    )
    open_: list[tuple[int, int, Array]] = []
    for low, high, index, place in spans:
        open_ = [each for each in open_ if each[0] > low]
        for _, other, theirs in open_:
            if other != index and _overlap(theirs, place):
                return min(index, other), max(index, other)
        open_.append((high, index, place))
    return None


def contents(value: Any) -> tuple[bytes, ...]:
    """Return a copy of the bytes of every leaf of ``value``."""
    return tuple(
        each.tobytes() if isinstance(each, np.ndarray) else _bytes(each) for each in leaves(value)
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    # A dimension of size 1 may have any stride, which a view as bytes does not accept.
    copy = tensor.detach().new_empty(tensor.numel(), device="cpu").copy_(tensor.reshape(-1))
    return copy.view(torch.uint8).numpy().tobytes()


def _walk(value: Any) -> Iterator[Any]:
    """Yield the leaves and containers of ``value`` that can be changed in place."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        yield value
    elif isinstance(value, LazyStackedTensorDict):
        yield value
        for part in value.tensordicts:
            yield from _walk(part)
    elif isinstance(value, TensorDictBase):
        if is_non_tensor(value):
            return
        yield value
        for part in value.values():
            yield from _walk(part)
    elif isinstance(value, Mapping):
        yield value
        for part in value.values():
            yield from _walk(part)
    elif isinstance(value, (tuple, list)):
        if isinstance(value, list):
            yield value
        for part in value:
            yield from _walk(part)


def _asarray(place: _Place) -> Array:
    array: Array = np.asarray(place)
    return array


def _overlap(one: Array, other: Array) -> bool:
    if not np.may_share_memory(one, other):
        return False
    try:
        # NumPy's stubs declare only the named work limits.
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except TooHardError:
        return True
