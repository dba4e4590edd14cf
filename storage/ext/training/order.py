"""The order of an epoch: each item once, shuffled within a window. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
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
        order = np.random.default_rng([self.seed, self.epoch]).permutation(blocks)
        starts = np.arange(0, blocks, self.window)
        short = blocks * self.block - self.count  # what the last block lacks
        begins = starts * self.block
        if short:
            begins = begins - short * (starts > int(np.flatnonzero(order == blocks - 1)[0]))
        self._order, self._begins = order, begins
        self._last = -1, order
        """The number of the window that was asked for last, and its items."""

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the items at some places of the order, int64."""
        start, stop, step = places.indices(self.count)
        if self.block == 1 or start >= stop:
            return self._order[start:stop:step]
        first, last = self._begins.searchsorted([start, stop - 1], side="right") - 1
        every = [self._window(each) for each in range(int(first), int(last) + 1)]
        offset = int(self._begins[first])
        return np.concatenate(every)[start - offset : stop - offset : step]

    def _window(self, number: int) -> np.ndarray:
        """Return the items of one window, in their order."""
        last, items = self._last
        if number != last:
            blocks = self._order[number * self.window : (number + 1) * self.window]
            items = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
            items = items[items < self.count]
            # From 1: numbers that end with 0 seed as those without it do.
            rng = np.random.default_rng([self.seed, self.epoch, number + 1])
            items = rng.permutation(items)
            self._last = number, items
        return items
