"""Small arrays of a compiled step in one: each array that JAX hands out costs microseconds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tallyroll.collector.envs.system import Array

_WORD = 4


class Packing:
    """Puts arrays into one of 32-bit words, and takes them out as views of it.

    Where each one lies is known from the first call of :meth:`packed` on, which compiles it.
    """

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._places: list[tuple[tuple[int, ...], np.dtype[Any], int]] = []
        """Shape, dtype and offset in bytes, in the order of the arrays."""

    def packed(self, arrays: Sequence[Any]) -> Any:
        """All ``arrays`` of JAX in one, bit by bit; bools are bytes."""
        jax = self._jax
        numpy, places, words, offset = jax.numpy, {}, [], 0
        # They are computed as if each was returned, and not as the packing might have it.
        values = jax.lax.optimization_barrier([*arrays])
        for at in sorted(range(len(values)), key=lambda at: -values[at].dtype.itemsize):
            value, size = values[at].ravel(), values[at].dtype.itemsize
            places[at] = values[at].shape, np.dtype(value.dtype), offset
            if value.dtype == np.bool_:
                value = value.astype(np.uint8)
            elif value.dtype.kind == "c":
                value = numpy.stack([value.real, value.imag], -1)
            if size < _WORD:
                each = _WORD // size
                value = numpy.pad(value, (0, -value.size % each))
                value = value.reshape(value.size // each, each)
            words.append(jax.lax.bitcast_convert_type(value, np.uint32).ravel())
            offset += words[-1].size * _WORD
        self._places = [places[at] for at in range(len(values))]
        return numpy.concatenate(words)

    def views(self, words: Array, start: int, stop: int | None = None) -> list[Array]:
        """Return the arrays ``[start:stop]`` that were packed, without a copy."""
        new = np.ndarray
        return [new(shape, kind, words, at) for shape, kind, at in self._places[start:stop]]
