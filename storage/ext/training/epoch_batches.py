"""Batch sampler for a `DataLoader` that visits each item once per epoch and can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from tallyroll.storage.errors import StateMismatch


@dataclass
class Order:
    """Block-wise random permutation of items for one epoch.

    Blocks of ``block`` consecutive items are put in a random order, and the items of every
    ``window`` successive blocks are shuffled together. A reader therefore accesses ``window``
    places at a time, and each item is equally likely at any position of the epoch. If a block has
    one item, the order is an unrestricted permutation, whatever the window.

    Args:
        count: the number of items.
        seed: the seed of the order.
        epoch: the number of the epoch; each epoch has a different order.
        block: items per block.
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
        short = blocks * self.block - self.count  # items that the last block lacks
        begins = starts * self.block
        if short:
            begins = begins - short * (starts > int(np.flatnonzero(order == blocks - 1)[0]))
        self._order, self._begins = order, begins
        self._last = -1, order
        """The number of the window that was accessed last, and its items."""

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the items at some positions of the order, int64."""
        start, stop, step = places.indices(self.count)
        if self.block == 1 or start >= stop:
            return self._order[start:stop:step]
        first, last = self._begins.searchsorted([start, stop - 1], side="right") - 1
        every = [self._window(each) for each in range(int(first), int(last) + 1)]
        offset = int(self._begins[first])
        return np.concatenate(every)[start - offset : stop - offset : step]

    def _window(self, number: int) -> np.ndarray:
        """Return the items of one window in their order."""
        last, items = self._last
        if number != last:
            blocks = self._order[number * self.window : (number + 1) * self.window]
            items = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
            items = items[items < self.count]
            # Count from 1, since NumPy ignores trailing zeros of a seed sequence.
            rng = np.random.default_rng([self.seed, self.epoch, number + 1])
            items = rng.permutation(items)
            self._last = number, items
        return items


_MOST: int = 2**53


class EpochBatches(Sampler[list[int]]):
    """Batches of a dataset, epoch after epoch, in an order that the seed determines::

        data = storage.dataset()
        batches = EpochBatches(len(data), 256, seed=0)
        loader = DataLoader(data, batch_sampler=batches, collate_fn=data.collate, num_workers=2)
        for batch in loader:  # one epoch; the next loop reads the next epoch
            ...

    Each iteration is a whole epoch with each item once. It takes the next epoch number at its first
    batch, even if the previous iteration was abandoned or is still running. Only the first
    iteration after `load_state_dict` starts in mid-epoch. The order does not depend on the number
    of workers.

    `state_dict` returns the epoch and position of the most recent request. A loader with workers
    has requested more batches than it has returned, so pass the number of batches that you have
    received, or use torchdata's ``StatefulDataLoader``, which counts them.

    Args:
        count: the number of items, ``len(dataset)``.
        batch_size: items per batch; the last batch of an epoch may have fewer.
        seed: the seed of all orders.
        shuffle: False returns the items in their original order.
        block: the number of consecutive items that stay close to each other, for rows that are
            read from compressed chunks; 1 shuffles all items independently.
        window: blocks that are shuffled together.
        drop_last: skip the last batch of an epoch if it has fewer than ``batch_size`` items.
        rank: the number of this process, below ``world``.
        world: the number of processes. Each one gets every ``world``-th item of the order, so that
            together they visit each item once. Without ``drop_last``, some processes may get one
            item more than the others.

    Raises:
        ValueError: an argument is out of range.
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
                    f"{name}: expected a whole number of at least {least[name]}, got {value!r}."
                )
        if type(rank) is not int or not 0 <= rank < world:
            raise ValueError(
                f"rank: expected a number from 0 to {world - 1} with world={world}, got {rank!r}."
            )
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.block, self.window, self.drop_last = block, window, drop_last
        self.rank, self.world = rank, world
        self.epoch = 0
        """The epoch number of the next iteration, which may resume in mid-epoch after a load."""
        self._first = 0
        """The first batch of the next iteration: 0, unless a state was loaded."""
        self._position = 0, 0
        """The epoch and the number of batches requested from it, for `state_dict`."""

    @property
    def _items(self) -> int:
        """The number of items per epoch for this process."""
        if self.drop_last:
            return self.count // self.world
        return len(range(self.rank, self.count, self.world))

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
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
        """Set the number of the next epoch, which begins with its first batch.

        With several ranks, call this method if a rank may abandon an iteration, because all ranks
        must use the same epoch number.
        """
        if type(epoch) is not int or not 0 <= epoch < _MOST:
            raise ValueError(f"epoch: expected a whole number of at least 0, got {epoch!r}.")
        self.epoch, self._first, self._position = epoch, 0, (epoch, 0)

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the epoch and position of the most recent batch request.

        Args:
            taken: the number of batches of this epoch that were received from a loader with
                workers, which requests batches ahead. Include batches that a loaded state skips.
                Default: all batches that were requested.

        Raises:
            ValueError: ``taken`` exceeds the batches of an epoch.
        """
        epoch, requested = self._position
        batch = requested if taken is None else taken
        if type(batch) is not int or not 0 <= batch <= len(self):
            raise ValueError(
                f"taken: expected a number of batches from 0 to {len(self)}, got {taken!r}."
            )
        return {**self._order(), "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, so that the next iteration returns the rest of its epoch.

        Later iterations are whole epochs. A state at the end of an epoch continues with the next
        one.

        Raises:
            StateMismatch: the state belongs to an order with other items, sizes or seed.
        """
        for name, value in self._order().items():
            if state.get(name) != value:
                raise StateMismatch(
                    f"this state has {name}={state.get(name)!r}, but these batches have "
                    f"{name}={value!r}. Create the batches with the arguments of the saved ones."
                )
        epoch, batch = state.get("epoch"), state.get("batch")
        if type(epoch) is not int or type(batch) is not int or epoch < 0 or batch < 0:
            raise StateMismatch(
                "this state has no valid epoch and batch. Load a state that state_dict() returned."
            )
        whole = batch >= len(self)
        self.epoch, self._first = (epoch + 1, 0) if whole else (epoch, batch)
        self._position = self.epoch, self._first

    def _order(self) -> dict[str, Any]:
        names = ("count", "batch_size", "seed", "shuffle", "drop_last", "rank", "world")
        found = {name: getattr(self, name) for name in names}
        if self.shuffle:
            found |= {"block": self.block, "window": self.window}
        return found
