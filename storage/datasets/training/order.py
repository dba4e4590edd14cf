"""The order of an epoch: each item once, shuffled within a window. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Order:
    """Numbers of items, shuffled in blocks, for one epoch.

    Blocks of ``block`` items that follow one another are put in a random order, and every
    ``window`` of them are shuffled together. So a reader needs ``window`` places at a time, and an
    item is as likely at any place of the epoch as at any other. With a block of one item, the
    order is any permutation, whatever the window.

    Args:
        count: of the items.
        seed: of the order.
        epoch: its number; each has an order of its own.
        block: items of a block.
        window: blocks that are shuffled together.
    """

    count: int
    seed: int
    epoch: int
    block: int = 1
    window: int = 64

    def __post_init__(self) -> None:
        blocks = -(-self.count // self.block)
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(blocks)
        starts = np.arange(0, blocks, self._width)
        short = blocks * self.block - self.count  # what the last block lacks
        begins = starts * self.block
        if short:
            begins = begins - short * (starts > int(np.flatnonzero(order == blocks - 1)[0]))
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_begins", begins)

    @property
    def _width(self) -> int:
        return 2**16 if self.block == 1 else self.window

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the items at some places of the order, int64."""
        start, stop, step = places.indices(self.count)
        if start >= stop:
            return np.empty(0, np.int64)
        begins: np.ndarray = self._begins  # type: ignore[attr-defined]
        first, last = begins.searchsorted([start, stop - 1], side="right") - 1
        every = np.concatenate([self._window(each) for each in range(int(first), int(last) + 1)])
        offset = int(begins[first])
        return every[start - offset : stop - offset : step]

    def _window(self, number: int) -> np.ndarray:
        """Return the items of one window, in their order."""
        order: np.ndarray = self._order  # type: ignore[attr-defined]
        blocks = order[number * self._width : (number + 1) * self._width]
        if self.block == 1:
            return blocks
        items = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
        items = items[items < self.count]
        # From 1: numbers that end with 0 seed as those without it do.
        return np.random.default_rng([self.seed, self.epoch, number + 1]).permutation(items)
