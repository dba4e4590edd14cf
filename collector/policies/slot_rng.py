"""Numbers for slots, drawn many slots at a time.

A generator's call costs as much as a step of a small environment, whether it draws for one slot or
for many. So it draws for many, always for as many: what a slot gets does not depend on how many
slots are asked for at once.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrl.data import TensorSpec

Array = NDArray[Any]
Draw = Callable[[np.random.Generator, int], Array]
"""Draws ``[slots, ...]`` for so many slots."""

_NUMBERS = 4096
_MOST_SLOTS = 256


def width_of(specs: Iterable[TensorSpec], lanes: int) -> int:
    """Numbers of a slot, of the ``specs`` of one lane's actions."""
    return lanes * sum(int(math.prod(spec.shape)) for spec in specs)


class SlotRng:
    """A generator for one user, whose draws do not change.

    Args:
        seed: as ``numpy.random.default_rng`` takes it.
    """

    def __init__(self, seed: Any = None) -> None:
        self._generator = np.random.default_rng(seed)
        self._drop()

    def _drop(self, taken: int = 0) -> None:
        """Drop the stock; ``taken`` slots of the next one count as taken."""
        self._stock: list[Array] = []
        self._size, self._taken = 0, taken
        self._before = self._generator.bit_generator.state

    def seed(self, seed: Any) -> None:
        """Start from ``seed``."""
        self._generator = np.random.default_rng(seed)
        self._drop()

    def take(self, draws: Sequence[Draw], slots: int, width: int) -> list[Array]:
        """Return the numbers of each of ``draws`` for the next slots, ``width`` each; read only."""
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
        taken = 0 if self._size else self._taken  # a stock that was begun before a state was saved
        while taken >= slots:  # by a run of fewer lanes
            for draw in draws:
                draw(self._generator, slots)
            taken -= slots
        self._before = self._generator.bit_generator.state
        self._stock = [draw(self._generator, slots) for draw in draws]
        self._size, self._taken = slots, taken

    @property
    def state(self) -> dict[str, Any]:
        """The state; set on another generator, it makes that one go on from the same place."""
        if self._taken and self._taken == self._size:
            return {"generator": self._generator.bit_generator.state, "taken": 0}
        return {"generator": self._before, "taken": self._taken}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        plain = "generator" not in state  # as earlier versions saved it
        taken = 0 if plain else int(state["taken"])
        if not 0 <= taken <= _MOST_SLOTS:  # as many would be drawn
            raise ValueError(f"taken: expected 0 to {_MOST_SLOTS} slots, got {taken}.")
        self._generator.bit_generator.state = state if plain else state["generator"]
        self._drop(taken)

    def return_to(
        self, state: Mapping[str, Any], draws: Sequence[Draw], slots: int, width: int
    ) -> None:
        """Go on ``slots`` slots after the place at which :attr:`state` was ``state``."""
        self.state = dict(state)
        if slots:
            self.take(draws, slots, width)
