"""The rows that are written and read, the floor, and Tallyroll's storages on the same work."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from common import Contender, Tally
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tallyroll import storage as tallyroll_storage
from tallyroll.collector import GymnasiumVectorEnv, SyncCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

Key = tuple[str, ...]
Rows = dict[Key, np.ndarray]

QUANTUM = 2e-3
"""Seconds of calls between two looks at the clock."""


def cartpole_rows(count: int) -> Rows:
    """Rows as a collector writes them: eleven columns, 75 bytes a row."""
    env = GymnasiumVectorEnv(gym.make_vec("CartPole-v1", 64, vectorization_mode="sync"))
    with SyncCollector(env, None, frames_per_batch=count, total_frames=count, seed=0) as collector:
        (batch,) = collector
    return {
        key if isinstance(key, tuple) else (key,): np.ascontiguousarray(leaf.numpy())
        for key, leaf in batch.items(True, True)
        if key != ("collector", "cut")
    }


def image_rows(count: int) -> Rows:
    """The same columns with two observations of 84x84x4 bytes: 56 KB a row."""
    images = np.random.default_rng(0).integers(256, size=(count + 1, 84, 84, 4), dtype=np.uint8)
    rows = cartpole_rows(count)
    rows["observation",], rows["next", "observation"] = images[:-1], images[1:].copy()
    return rows


KINDS: dict[str, Callable[[int], Rows]] = {"A": cartpole_rows, "B": image_rows}


def row_nbytes(rows: Rows) -> int:
    """Bytes of one row in all columns."""
    return sum(column[:1].nbytes for column in rows.values())


def tensordict_of(rows: Rows) -> TensorDict:
    """The rows as a TensorDict [N] over the same memory."""
    count = len(rows["action",])
    tree: dict[str, Any] = {}
    for key, column in rows.items():
        level = tree
        for name in key[:-1]:
            level = level.setdefault(name, {})
        level[key[-1]] = torch.from_numpy(column)
    for name, value in tree.items():
        if isinstance(value, dict):
            tree[name] = TensorDict(value, batch_size=[count])
    return TensorDict(tree, batch_size=[count])


@dataclass(frozen=True)
class Work:
    """What every contender is given.

    Args:
        rows: the batch, one array [N, ...] a column.
        room: rows that a storage holds: a multiple of N.
        scratch: a folder for files.
    """

    rows: Rows
    room: int
    scratch: Path

    @property
    def count(self) -> int:
        """N, the rows of the batch."""
        return len(self.rows["action",])

    @cached_property
    def data(self) -> TensorDict:
        """The batch as a TensorDict [N]."""
        return tensordict_of(self.rows)


class Calls(Contender):
    """One call over and over, its arguments in turn; as many between two looks as take 2 ms."""

    def __init__(
        self,
        name: str,
        call: Callable[[Any], Any],
        arguments: Iterable[Any],
        rows: int,
        *,
        close: Callable[[], None] | None = None,
        rewind: Callable[[], None] | None = None,
        most: int | None = None,
    ) -> None:
        """Remember all; ``rewind`` is called before every ``most`` calls, with the clock stopped."""
        self.name, self.call, self.rows = name, call, rows
        self.arguments = itertools.cycle(arguments)
        self.repeat = 0
        self._close, self._rewind, self._most = close, rewind, most
        self._made = 0

    def fill(self, calls: int) -> None:
        """Make calls untimed, until all memory is touched, and learn how long one takes."""
        for _ in range(calls):
            self.make_ready()
            self.advance(1)
        took = []
        for _ in range(5):
            self.make_ready()
            start = time.perf_counter()
            self.advance(1)
            took.append(time.perf_counter() - start)
        self.repeat = max(1, min(int(QUANTUM / sorted(took)[2]), self._most or 10**9))

    def make_ready(self) -> None:
        """Go back to the first row where the next calls would not find room."""
        if self._rewind and self._most and self._made + max(1, self.repeat) > self._most:
            self._rewind()
            self._made = 0

    def advance(self, repeat: int = 0) -> None:
        """Make the calls."""
        repeat, call = repeat or self.repeat, self.call
        for argument in itertools.islice(self.arguments, repeat):
            call(argument)
        self._made += repeat
        self._last = repeat

    def tally(self) -> Tally:
        """Return rows and calls of the last ``advance``."""
        return Tally(self.rows * self._last, self._last)

    def close(self) -> None:
        """Let go of files."""
        if self._close:
            self._close()


def raw_maps(rows: Rows, room: int, folder: Path) -> list[np.ndarray]:
    """One plain array over a memory map a column, [room, ...], in files of that size."""
    folder.mkdir()
    maps = []
    for index, column in enumerate(rows.values()):
        nbytes = room * column[:1].nbytes
        file = os.open(folder / str(index), os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(file, 0, nbytes)
        area = mmap.mmap(file, nbytes)
        os.close(file)
        maps.append(np.ndarray((room, *column.shape[1:]), column.dtype, buffer=area))
    return maps


def floor_writing(work: Work) -> Calls:
    """NumPy copies into a raw memory map, column by column, round and round."""
    pairs = list(
        zip(
            raw_maps(work.rows, work.room, work.scratch / "floor"), work.rows.values(), strict=True
        )
    )
    count, room, at = work.count, work.room, 0

    def write(_: None) -> None:
        nonlocal at
        stop = at + count
        for column, array in pairs:
            column[at:stop] = array
        at = stop % room

    return Calls("NumPy copies into a memory map (floor)", write, [None], count)


def open_ring(work: Work, name: str) -> Any:
    """A ring that is full after one lap."""
    return tallyroll_storage.MemmapStorage(work.scratch / name, max_size=work.room)


def ring_of_tensordicts(work: Work) -> Calls:
    """``storage.extend(TensorDict)``."""
    ring = open_ring(work, "ring-td")
    return Calls(
        "MemmapStorage.extend(TensorDict)", ring.extend, [work.data], work.count, close=ring.close
    )


def ring_of_arrays(work: Work) -> Calls:
    """What the collector does with a batch: ``storage.extend({key: array})``."""
    ring = open_ring(work, "ring-arrays")
    return Calls(
        "MemmapStorage.extend(arrays)", ring.extend, [work.rows], work.count, close=ring.close
    )


def ring_under_replay_buffer(work: Work) -> Calls:
    """TorchRL's ``ReplayBuffer.extend``."""
    ring = open_ring(work, "ring-rb")
    buffer = ReplayBuffer(storage=ring)
    return Calls(
        "ReplayBuffer(MemmapStorage).extend",
        buffer.extend,
        [work.data],
        work.count,
        close=ring.close,
    )


def ring_under_tensordict_replay_buffer(work: Work) -> Calls:
    """TorchRL's ``TensorDictReplayBuffer.extend``."""
    ring = open_ring(work, "ring-tdrb")
    buffer = TensorDictReplayBuffer(storage=ring)
    return Calls(
        "TensorDictReplayBuffer(MemmapStorage).extend",
        buffer.extend,
        [work.data],
        work.count,
        close=ring.close,
    )


def rewind(storage: Any) -> Callable[[], None]:
    """Forget the rows and leave the files, so that a storage that grows writes warm pages too."""

    def forget() -> None:
        header = storage._engine._header
        header.head = 0
        header.reserve = 0

    return forget


def growing_in_place(work: Work, kind: str, suffix: str) -> Calls:
    """A storage without a ring, its rows forgotten when it is full."""
    storage = getattr(tallyroll_storage, kind)(
        work.scratch / f"grow-{kind}{suffix}", capacity=work.room
    )
    return Calls(
        f"{kind}(capacity).extend(arrays)",
        storage.extend,
        [work.rows],
        work.count,
        close=storage.close,
        rewind=rewind(storage),
        most=work.room // work.count,
    )


FORMATS = {"MemmapStorage": "", "H5Storage": ".h5", "ZarrStorage": ".zarr"}


def our_writers() -> list[Callable[[Work], Calls]]:
    """Ways of writing with Tallyroll, formats that this build lacks left out."""
    formats = [
        lambda work, kind=kind, suffix=suffix: growing_in_place(work, kind, suffix)
        for kind, suffix in FORMATS.items()
        if hasattr(tallyroll_storage, kind)
    ]
    return [
        ring_of_tensordicts,
        ring_of_arrays,
        *formats,
        ring_under_replay_buffer,
        ring_under_tensordict_replay_buffer,
    ]


@dataclass(frozen=True)
class Reads:
    """What every reader is given: rows to hold, and which to read.

    Args:
        rows: a batch, written again and again until the storage is full.
        room: rows held, a multiple of the batch.
        indices: int64 arrays [256], rows to read.
        scratch: a folder for files.
    """

    rows: Rows
    room: int
    indices: Sequence[np.ndarray]
    scratch: Path

    @property
    def count(self) -> int:
        """Rows of one read."""
        return len(self.indices[0])

    @cached_property
    def data(self) -> TensorDict:
        """The batch as a TensorDict [N]."""
        return tensordict_of(self.rows)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The indices as tensors."""
        return [torch.from_numpy(index) for index in self.indices]

    @property
    def laps(self) -> int:
        """Times that the batch is written."""
        return self.room // len(self.rows["action",])


def floor_reading(reads: Reads) -> Calls:
    """``take`` from a raw memory map into arrays that are used again."""
    maps = raw_maps(reads.rows, reads.room, reads.scratch / "floor")
    for column, array in zip(maps, reads.rows.values(), strict=True):
        for lap in range(reads.laps):
            column[lap * len(array) : (lap + 1) * len(array)] = array
    pairs = [(column, np.empty((reads.count, *column.shape[1:]), column.dtype)) for column in maps]

    def read(index: np.ndarray) -> None:
        for column, out in pairs:
            column.take(index, axis=0, out=out, mode="clip")

    return Calls(
        "NumPy take from a memory map (floor)", read, reads.indices, reads.count
    )


def filled(reads: Reads, kind: str, suffix: str, name: str) -> Any:
    """A storage of ours with all rows."""
    storage = getattr(tallyroll_storage, kind)(
        reads.scratch / f"{name}-{kind}{suffix}", capacity=reads.room
    )
    for _ in range(reads.laps):
        storage.extend(reads.rows)
    return storage


def our_readers(reads: Reads) -> list[Calls]:
    """``get`` of every format there is, and ``sample`` of TorchRL's buffers on ours."""
    found, count = [], reads.count
    for kind, suffix in FORMATS.items():
        if not hasattr(tallyroll_storage, kind):
            continue
        storage = filled(reads, kind, suffix, "get")
        found.append(
            Calls(f"{kind}.get", storage.get, reads.tensors, count, close=storage.close)
        )
        if kind == "MemmapStorage":
            for buffer_class in (ReplayBuffer, TensorDictReplayBuffer):
                buffer = buffer_class(storage=storage, batch_size=count)
                found.append(
                    Calls(
                        f"{buffer_class.__name__}(MemmapStorage).sample",
                        lambda _, buffer=buffer: buffer.sample(),
                        [None],
                        count,
                    )
                )
    return found
