"""Random numbers for slots, drawn for many slots at a time.

A call of a generator takes as long as a step of a small environment, whether it draws for one slot
or for many. So numbers are drawn in blocks. The size of a block is constant, so that the numbers of
a slot do not depend on the number of slots in a request.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrl.data import TensorSpec

Array = NDArray[Any]
Draw = Callable[[np.random.Generator, int], Array]
"""Draws an array ``[slots, ...]`` for the given number of slots."""

_NUMBERS = 4096
_MOST_SLOTS = 256


def width_of(specs: Iterable[TensorSpec], lanes: int) -> int:
    """Return the number of values per slot, given the ``specs`` of one lane's actions."""
    return lanes * sum(int(math.prod(spec.shape)) for spec in specs)


class SlotRng:
    """A random generator for a single user, who must pass the same ``draws`` to every call.

    Args:
        seed: a seed for ``numpy.random.default_rng``.
    """

    def __init__(self, seed: Any = None) -> None:
        self._generator = np.random.default_rng(seed)
        self._drop()

    def _drop(self, taken: int = 0) -> None:
        """Drop the block of drawn numbers, and skip ``taken`` slots of the next block."""
        self._stock: list[Array] = []
        self._size, self._taken = 0, taken
        self._before = self._generator.bit_generator.state

    def seed(self, seed: Any) -> None:
        """Restart from ``seed``."""
        self._generator = np.random.default_rng(seed)
        self._drop()

    def take(self, draws: Sequence[Draw], slots: int, width: int) -> list[Array]:
        """Return the numbers of each of ``draws`` for the next ``slots`` slots.

        The arrays are read-only. ``width`` is the number of values per slot.
        """
        stop = self._taken + slots
        if stop <= self._size:
            at, self._taken = self._taken, stop
            return [array[at:stop] for array in self._stock]
        pieces: list[list[Array]] = [[] for _ in draws]
        while slots:
            if self._taken >= self._size:
                self._refill(draws, max(1, min(_NUMBERS // max(1, width), _MOST_SLOTS)))
            count = min(slots, self._size - self._taken)
            for piece, array in zip(pieces, self._stock, strict=True):
                piece.append(array[self._taken : self._taken + count])
            self._taken += count
            slots -= count
        return [np.concatenate(piece) for piece in pieces]

    def _refill(self, draws: Sequence[Draw], slots: int) -> None:
        taken = 0 if self._size else self._taken  # a block that was in use when a state was saved
        while taken >= slots:  # the state is from a run with fewer lanes
            for draw in draws:
                draw(self._generator, slots)
            taken -= slots
        self._before = self._generator.bit_generator.state
        self._stock = [draw(self._generator, slots) for draw in draws]
        self._size, self._taken = slots, taken

    @property
    def state(self) -> dict[str, Any]:
        """The state of the generator. A generator that restores it continues from there."""
        if self._taken and self._taken == self._size:
            return {"generator": self._generator.bit_generator.state, "taken": 0}
        return {"generator": self._before, "taken": self._taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, an earlier value of :attr:`state`."""
        plain = "generator" not in state  # as earlier versions saved it
        taken = 0 if plain else int(state["taken"])
        if not 0 <= taken <= _MOST_SLOTS:  # so many slots would be drawn
            raise ValueError(f"taken: expected 0 to {_MOST_SLOTS} slots, got {taken}.")
        self._generator.bit_generator.state = state if plain else state["generator"]
        self._drop(taken)

    def return_to(
        self, state: Mapping[str, Any], draws: Sequence[Draw], slots: int, width: int
    ) -> None:
        """Continue ``slots`` slots after ``state``, an earlier value of :attr:`state`."""
        self.restore(dict(state))
        if slots:
            self.take(draws, slots, width)
