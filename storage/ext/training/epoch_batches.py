"""Batches of an epoch, for a `DataLoader`: each item once, resumable at any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from tallyroll.storage.errors import StateMismatch


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


_MOST: int = 2**53


class EpochBatches(Sampler[list[int]]):
    """The batches of a dataset, epoch after epoch, in an order that follows from the seed::

        data = storage.dataset()
        batches = EpochBatches(len(data), 256, seed=0)
        loader = DataLoader(data, batch_sampler=batches, collate_fn=data.collate, num_workers=2)
        for batch in loader:  # one epoch; the next iteration is the next one
            ...

    Each iteration is a whole epoch with each item once, and takes the next epoch's number at its
    first batch, also if the iteration before it was left early or still runs. Only the first
    iteration after `load_state_dict` starts in mid-epoch. The order is the same for any number of
    workers.

    `state_dict` returns the position in the epoch from which a batch was requested last. A loader
    with workers has requested more batches than it has returned, so pass the number that were
    taken, or let torchdata's ``StatefulDataLoader`` count them.

    Args:
        count: of the items, ``len(dataset)``.
        batch_size: items of a batch; the last one of an epoch may have fewer.
        seed: of all orders.
        shuffle: False goes through the items in their order.
        block: items that follow one another and stay near each other, for rows that are read from
            compressed chunks; 1 shuffles all.
        window: blocks that are shuffled together.
        drop_last: leave out the last batch of an epoch, if it has fewer items.
        rank, world: of ``world`` processes, each with a ``rank`` of its own, this one gets each
            ``world``-th item of the order, so that together they have each item once. Without
            ``drop_last`` some may have one item more.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        block: int = 1,
        window: int = 64,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        least = {"count": 0, "batch_size": 1, "seed": 0, "block": 1, "window": 1, "world": 1}
        given = {
            "count": count,
            "batch_size": batch_size,
            "seed": seed,
            "block": block,
            "window": window,
            "world": world,
        }
        for name, value in given.items():
            if type(value) is not int or not least[name] <= value < _MOST:
                raise ValueError(
                    f"{name} is a whole number of at least {least[name]}, got {value!r}."
                )
        if type(rank) is not int or not 0 <= rank < world:
            raise ValueError(f"rank is a number from 0 to {world - 1}, of world={world}: {rank!r}.")
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.block, self.window, self.drop_last = block, window, drop_last
        self.rank, self.world = rank, world
        self.epoch = 0
        """The number of the epoch that the next iteration has, or continues after a load."""
        self._first = 0
        """The batch with which the next iteration starts: 0, unless a state was loaded."""
        self._position = 0, 0
        """Epoch, and batches requested of it: what `state_dict` returns."""

    @property
    def _items(self) -> int:
        """Items of an epoch for this process."""
        if self.drop_last:
            return self.count // self.world
        return len(range(self.rank, self.count, self.world))

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        items = self._items
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch, or the rest of one after `load_state_dict`."""
        epoch, start, size = self.epoch, self._first, self.batch_size
        self.epoch, self._first, self._position = epoch + 1, 0, (epoch, start)
        order = Order(self.count, self.seed, epoch, self.block, self.window)
        for batch in range(start, len(self)):
            first = batch * size
            stop = min(first + size, self._items)
            places = slice(
                self.rank + first * self.world, self.rank + stop * self.world, self.world
            )
            self._position = epoch, batch + 1
            found = order[places] if self.shuffle else np.arange(self.count)[places]
            yield found.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be a whole epoch of this number.

        Several ranks need it if one of them may leave an iteration early: their epochs must have
        the same number.
        """
        if type(epoch) is not int or not 0 <= epoch < _MOST:
            raise ValueError(f"epoch is a whole number of at least 0, got {epoch!r}.")
        self.epoch, self._first, self._position = epoch, 0, (epoch, 0)

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch from which a batch was requested last.

        Args:
            taken: batches of this epoch that were taken from a loader with workers, which requests
                some ahead, with those before a state that was loaded. Default: all that were
                requested.

        Raises:
            ValueError: an epoch has fewer batches.
        """
        epoch, requested = self._position
        batch = requested if taken is None else taken
        if type(batch) is not int or not 0 <= batch <= len(self):
            raise ValueError(f"taken is a number of batches from 0 to {len(self)}, got {taken!r}.")
        return {**self._order(), "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: the next iteration has the rest of its epoch.

        The iterations after that are whole epochs. A state at the end of an epoch continues with
        the next one.

        Raises:
            StateMismatch: it is of another order: other items, sizes or seed.
        """
        for name, value in self._order().items():
            if state.get(name) != value:
                raise StateMismatch(
                    f"this state is of {name}={state.get(name)!r}, and these batches have "
                    f"{name}={value!r}. Make them as they were."
                )
        epoch, batch = state.get("epoch"), state.get("batch")
        if type(epoch) is not int or type(batch) is not int or epoch < 0 or batch < 0:
            raise StateMismatch("this state does not say where the order is.")
        whole = batch >= len(self)
        self.epoch, self._first = (epoch + 1, 0) if whole else (epoch, batch)
        self._position = self.epoch, self._first

    def _order(self) -> dict[str, Any]:
        names = ("count", "batch_size", "seed", "shuffle", "drop_last", "rank", "world")
        found = {name: getattr(self, name) for name in names}
        if self.shuffle:
            found |= {"block": self.block, "window": self.window}
        return found
