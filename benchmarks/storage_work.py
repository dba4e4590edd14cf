"""The rows to write and read, the work of a storage, and the floor."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import time
from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from common import Contender, Tally, play_round
from tensordict import TensorDict

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.storage.rows.tensordict_builder import TensorDictBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

Key = tuple[str, ...]
Rows = dict[Key, np.ndarray]

READ_ROWS = 256
"""Rows per read."""
READS = 1024
"""Reads of different rows, before they repeat."""
QUANTUM = 2e-3
"""Seconds of calls between two checks of the clock."""
WARMING = 0.02
"""Seconds of untimed calls before a round, to warm the caches with the contender's own data."""
LONGEST_LAP = 0.25
"""Seconds of calls on a growing file, before it is started again."""
FIRST_STEP, LARGEST_STEP = 2**20, 2**28
"""Bytes by which growing files are enlarged: their current size, within these bounds."""


def cartpole_rows(count: int) -> Rows:
    """Return rows [count] as a collector writes them: eleven columns, 75 bytes per row."""
    env = GymnasiumVectorEnv(gym.make_vec("CartPole-v1", 64, vectorization_mode="sync"))
    with SyncCollector(env, None, frames_per_batch=count, total_frames=count, seed=0) as collector:
        (batch,) = collector
    return {
        key if isinstance(key, tuple) else (key,): np.ascontiguousarray(leaf.numpy())
        for key, leaf in batch.items(True, True)
        if key != ("collector", "cut")  # only in batches
    }


def image_rows(count: int) -> Rows:
    """Return rows with the same columns, and observations of 84x84x4 bytes: 56 KB per row."""
    images = np.random.default_rng(0).integers(256, size=(count + 1, 84, 84, 4), dtype=np.uint8)
    rows = cartpole_rows(count)
    rows["observation",], rows["next", "observation"] = images[:-1], images[1:].copy()
    return rows


def length(rows: Rows) -> int:
    """Return the number of rows."""
    return len(rows["action",])


def first(rows: Rows, count: int) -> Rows:
    """Return a copy of the first ``count`` rows."""
    return {key: column[:count].copy() for key, column in rows.items()}


def row_nbytes(rows: Rows) -> int:
    """Return the bytes of one row in all columns."""
    return sum(column[:1].nbytes for column in rows.values())


def flat(rows: Rows) -> dict[str, np.ndarray]:
    """Return the same arrays by flat names, for libraries without nested keys."""
    return {"_".join(key): column for key, column in rows.items()}


def tensordict_of(rows: Rows) -> TensorDict:
    """Return the rows as a TensorDict [N] that shares their memory."""
    data = TensorDict({}, batch_size=[length(rows)])
    for key, column in rows.items():
        data[key] = torch.from_numpy(column)
    return data


@dataclass(frozen=True)
class Spec:
    """The parameters of a storage.

    Args:
        rows: the batch [N, ...] of one write.
        filler: a batch to fill the storage with.
        room: capacity in rows, a multiple of both batches.
        scratch: a separate folder for files.
    """

    rows: Rows
    filler: Rows
    room: int
    scratch: Path

    @property
    def count(self) -> int:
        """The number of rows in a batch, N."""
        return length(self.rows)


class Store(ABC):
    """One way of storing rows. When it is full it wraps around, or `rewind` empties it."""

    name: str
    wraps: ClassVar[bool] = True

    def __init__(self, spec: Spec) -> None:
        """Create it without rows."""
        self.spec = spec

    def given(self, rows: Rows) -> Any:
        """Convert rows to the form that `write` takes. Not timed."""
        return rows

    def write(self, given: Any) -> Any:
        """Write a batch."""
        raise NotImplementedError

    def asked(self, index: np.ndarray) -> Any:
        """Convert unique row numbers [M] to the form that `read` takes. Not timed."""
        return index

    def read(self, asked: Any) -> Any:
        """Read these rows, or as many rows that the storage chooses itself."""
        raise NotImplementedError

    def fill(self) -> None:
        """Write every row once, so that every page of memory or of a file has been touched."""
        given = self.given(self.spec.filler)
        for _ in range(self.spec.room // length(self.spec.filler)):
            self.write(given)

    def rewind(self) -> None:
        """Start at row 0 again, if ``wraps`` is False."""
        return

    def close(self) -> None:
        """Close the files."""
        return


class Calls(Contender):
    """One call, repeated with each argument in turn, for 2 ms between two checks of the clock.

    Args:
        name: name of the row in the table.
        call: the function to time.
        arguments: its arguments, one per call.
        rows: rows of one call.
        before: called after every ``most`` calls, with the clock stopped.
        most: maximum number of calls at a time; None for no limit.
        close: called at the end.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[Any], Any],
        arguments: Iterable[Any],
        rows: int,
        *,
        before: Callable[[], None] | None = None,
        most: int | None = None,
        close: Callable[[], None] | None = None,
        quantum: float = QUANTUM,
    ) -> None:
        """Measure how long a call takes."""
        self.name, self.call, self.rows = name, call, rows
        self.arguments = itertools.cycle(arguments)
        self._before, self._most, self._close = before, most, close
        self._calls, self._made = 1, 0
        took = sorted(self._time_once() for _ in range(5))[2]
        self._calls = max(1, min(int(quantum / took), most or int(quantum / took)))

    def _time_once(self) -> float:
        self.make_ready()
        start = time.perf_counter()
        self.advance()
        return time.perf_counter() - start

    def begin_round(self) -> None:
        """Replace the previous contender's data in the caches."""
        play_round(self, WARMING)

    def make_ready(self) -> None:
        """Prepare for the next calls."""
        if self._before and self._most and self._made + self._calls > self._most:
            self._before()
            self._made = 0

    def advance(self) -> None:
        """Make the calls."""
        call = self.call
        for argument in itertools.islice(self.arguments, self._calls):
            call(argument)
        self._made += self._calls

    def tally(self) -> Tally:
        """Return the rows and calls of one ``advance``."""
        return Tally(self.rows * self._calls, self._calls)

    def close(self) -> None:
        """Close the files."""
        if self._close:
            self._close()


def writing(make: type[Store], spec: Spec) -> Calls:
    """Measure batches written to a storage whose pages have all been written before."""
    store = make(spec)
    store.fill()
    store.rewind()
    return Calls(
        store.name,
        store.write,
        [store.given(spec.rows)],
        spec.count,
        before=None if store.wraps else store.rewind,
        most=None if store.wraps else spec.room // spec.count,
        close=store.close,
    )


def reading(make: type[Store], spec: Spec) -> Calls:
    """Measure random reads from a full storage. Storages that accept indices get the same ones."""
    store = make(spec)
    store.fill()
    generator = np.random.default_rng(0)
    asked = [
        store.asked(generator.choice(spec.room, READ_ROWS, replace=False)) for _ in range(READS)
    ]
    return Calls(store.name, store.read, asked, READ_ROWS, close=store.close)


def growing(make: type[Store], spec: Spec) -> Calls:
    """Measure batches written to growing files.

    The files are started again with the clock stopped, which includes their first batch.
    """
    store = make(spec)
    given = store.given(spec.rows)

    def begin() -> None:
        nonlocal store
        store.close()
        shutil.rmtree(spec.scratch)
        spec.scratch.mkdir()
        store = make(spec)
        store.write(given)

    begin()
    return Calls(
        store.name,
        lambda given: store.write(given),
        [given],
        spec.count,
        before=begin,
        most=spec.room // spec.count - 1,
        close=lambda: store.close(),
        quantum=LONGEST_LAP,
    )


def raw_files(spec: Spec) -> list[int]:
    """Open a file for each column."""
    paths = [spec.scratch / f"{index}.raw" for index in range(len(spec.rows))]
    return [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]


def raw_maps(spec: Spec) -> list[np.ndarray]:
    """Return a plain array [room, ...] for each column, over a memory map of a file.

    The files are full of rows. Pages that `os.pwrite` has written are larger than pages that were
    first touched through a map, and copies to them are a few per cent faster.
    """
    maps = []
    for file, column in zip(raw_files(spec), spec.filler.values(), strict=True):
        nbytes = spec.room * column[:1].nbytes
        os.posix_fallocate(file, 0, nbytes)
        for at in range(0, nbytes, column.nbytes):
            os.pwrite(file, column, at)
        shape = (spec.room, *column.shape[1:])
        maps.append(np.ndarray(shape, column.dtype, buffer=mmap.mmap(file, nbytes)))
        os.close(file)
    return maps


class Floor(Store):
    """NumPy copies into raw memory maps, and ``take`` into reused arrays."""

    name = "NumPy and raw memory maps (floor)"

    def __init__(self, spec: Spec) -> None:
        """Map the files."""
        super().__init__(spec)
        self.columns = raw_maps(spec)
        self.outs: list[np.ndarray] = []
        self.at = 0

    def fill(self) -> None:
        """Touch all pages through the maps too."""
        for column in self.columns:
            column[:] = column

    def given(self, rows: Rows) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each column's map, and the array to copy into it."""
        return list(zip(self.columns, rows.values(), strict=True))

    def write(self, given: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Copy column by column."""
        start = self.at
        stop = start + len(given[0][1])
        for column, array in given:
            column[start:stop] = array
        self.at = stop % self.spec.room

    def asked(self, index: np.ndarray) -> np.ndarray:
        """Create the output arrays on the first call."""
        if not self.outs:
            self.outs = [np.empty((len(index), *c.shape[1:]), c.dtype) for c in self.columns]
        return index

    def read(self, asked: np.ndarray) -> Any:
        """Gather column by column. With mode ``clip``, NumPy needs no intermediate copy."""
        for column, out in zip(self.columns, self.outs, strict=True):
            column.take(asked, axis=0, out=out, mode="clip")


class BareTensorDict(Floor):
    """The floor, plus a TensorDict over its arrays, created in the fastest known way.

    It checks no index, and the next read overwrites the result of this one.
    """

    name = "the floor and a TensorDict of it"

    def __init__(self, spec: Spec) -> None:
        """Prepare the nested levels of the TensorDict."""
        super().__init__(spec)
        self.nest = TensorDictBuilder(
            [(key, torch.from_numpy(a).dtype) for key, a in spec.rows.items()]
        )

    def read(self, asked: np.ndarray) -> TensorDict:
        """Gather, and nest."""
        super().read(asked)
        return self.nest(self.outs, asked.shape)


class GrowingFloor(Store):
    """``os.pwrite`` of full arrays to plain files, whose space is reserved as they grow.

    Through a memory map every new page costs a page fault, which takes several times as long.
    """

    name = "os.pwrite to bare files (floor)"

    def __init__(self, spec: Spec) -> None:
        """Open the files."""
        super().__init__(spec)
        self.files = raw_files(spec)
        self.row_nbytes = row_nbytes(spec.rows)
        self.at = self.room = 0

    def given(self, rows: Rows) -> list[tuple[int, np.ndarray]]:
        """Return each array with the bytes of one of its rows."""
        return [(array[:1].nbytes, array) for array in rows.values()]

    def write(self, given: list[tuple[int, np.ndarray]]) -> None:
        """Write column by column."""
        at = self.at
        self.at += len(given[0][1])
        if self.at > self.room:
            step = min(
                max(self.room, FIRST_STEP // self.row_nbytes), LARGEST_STEP // self.row_nbytes
            )
            self.room = max(self.at, self.room + step)
            for file, (nbytes, _) in zip(self.files, given, strict=True):
                os.posix_fallocate(file, 0, self.room * nbytes)
        for file, (nbytes, array) in zip(self.files, given, strict=True):
            os.pwrite(file, array, at * nbytes)

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            os.close(file)
