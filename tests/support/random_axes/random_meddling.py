"""Write to yielded batches, slices and samples, which must not change any stored row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer

from tallyroll.storage import TrajectorySliceSampler, n_step, open_storage

MEDDLES = (
    "batch",
    "all rows",
    "some rows",
    "add nothing",
    "column",
    "one row",
    "by numbers",
    "buffer",
    "sample",
    "done",
    "n-step",
    "slices",
    "trajectory",
)


def spoil(td: TensorDictBase) -> None:
    """Write to every leaf in place."""
    for leaf in td.values(True, True):
        if leaf.dtype is torch.bool:
            leaf.logical_not_()
        elif leaf.dtype in (torch.uint16, torch.uint32, torch.uint64):
            leaf.copy_(torch.zeros_like(leaf))
        else:
            leaf.fill_(1)


def _add_nothing(storage: Any, rng: np.random.Generator) -> None:
    for leaf in storage[:].values(True, True):
        if leaf.is_floating_point():
            leaf.add_(0.0)


def _columns(storage: Any, rng: np.random.Generator) -> None:
    for key in (("collector", "step"), ("next", "done"), ("collector", "traj_ids")):
        storage.get(key).zero_()


def _slice(storage: Any, rng: np.random.Generator) -> None:
    first = int(rng.integers(len(storage)))
    spoil(storage[first : first + int(rng.integers(1, 20))])


def _numbers(storage: Any, rng: np.random.Generator) -> None:
    spoil(storage[torch.from_numpy(rng.integers(len(storage), size=5))])


def _buffer(storage: Any, rng: np.random.Generator) -> None:
    spoil(TensorDictReplayBuffer(storage=storage, batch_size=4)[:])


def _sample(storage: Any, rng: np.random.Generator) -> None:
    spoil(TensorDictReplayBuffer(storage=storage, batch_size=7).sample())


def _done(storage: Any, rng: np.random.Generator) -> None:
    storage[:]["next", "done"][-1] = True


def _n_step(storage: Any, rng: np.random.Generator) -> None:
    if ("next", "reward") in storage.schema:
        spoil(n_step(storage, rng.integers(len(storage), size=5), n=3, gamma=0.5))


def _slices(storage: Any, rng: np.random.Generator) -> None:
    if storage.ring and storage.mode == "read":
        return
    sampler = TrajectorySliceSampler(1)
    spoil(TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=3).sample())


def _trajectory(storage: Any, rng: np.random.Generator) -> None:
    spoil(storage.trajectories[int(rng.choice(storage.trajectories.ids))])


_WAYS: dict[str, Callable[[Any, np.random.Generator], None]] = {
    "all rows": lambda storage, rng: spoil(storage[:]),
    "some rows": _slice,
    "add nothing": _add_nothing,
    "column": _columns,
    "one row": lambda storage, rng: spoil(storage[int(rng.integers(len(storage)))]),
    "by numbers": _numbers,
    "buffer": _buffer,
    "sample": _sample,
    "done": _done,
    "n-step": _n_step,
    "slices": _slices,
    "trajectory": _trajectory,
}


class Meddler:
    """A user who writes to data from a storage and an independent reader, and reads it again.

    Args:
        ways: a selection of :data:`MEDDLES`.
        storage: the collector's storage, or None if only batches exist.
        number: number of the configuration, which seeds the draws.
    """

    def __init__(self, ways: tuple[str, ...], storage: Any, number: int) -> None:
        self.ways, self.storage = ways, storage
        self.reader: Any = None
        self.rng = np.random.default_rng([17, number])
        self.found: list[str] = []

    def __call__(self, batch: TensorDictBase, held: TensorDictBase | None) -> None:
        """Write, and then check that the stored rows are the last rows of ``held``, in order."""
        if "batch" in self.ways:
            spoil(batch)
        if self.storage is None or not len(self.storage):
            return
        if self.reader is None:
            self.reader = open_storage(self.storage.path)
        for way in self.ways:
            if way in _WAYS:
                for each in (self.storage, self.reader):
                    _WAYS[way](each, self.rng)
        if held is not None:
            for name, each in (("the writer", self.storage), ("a reader", self.reader)):
                self.found += [f"{name} {what}" for what in others(rows_of(each), held)]

    def close(self) -> None:
        """Close the reader."""
        if self.reader is not None:
            self.reader.close()


def rows_of(storage: Any) -> TensorDictBase:
    """Return all rows in order, by a slice if the slots are in that order."""
    if storage.ring:
        return storage.get(torch.from_numpy(storage.index_of(np.array(storage.span, np.int64))))
    return storage[:]


def others(stored: TensorDictBase, held: TensorDictBase) -> Iterator[str]:
    """Yield differences between the stored rows and the last rows of ``held``."""
    if len(stored) > len(held):
        yield f"has {len(stored)} rows, {len(held)} were stored"
        return
    tail = held[len(held) - len(stored) :]
    for key, leaf in stored.exclude("is_init").items(True, True):
        if leaf.numpy().tobytes() != tail[key].contiguous().numpy().tobytes():
            yield f"reads another {key} after a write in place"
