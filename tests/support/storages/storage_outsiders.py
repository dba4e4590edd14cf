"""The part of the format contract about other libraries, which may read at any moment."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage import StorageFull
from tallyroll.storage.engine import commit_engine as engine_module
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.storages import DiskStorage

from storage_contract import DTYPES, arrays, process, receive

Outsider: TypeAlias = Callable[[Path, Iterable[Key]], tuple[int, dict[Key, np.ndarray]]]
"""Reader by another library. It returns the number of visible rows and the columns' values."""

KEYS = list(arrays(0, 1))
SIZE = 64
SECONDS = 0.6


def write_and_show(
    connection: Connection, kind: type[DiskStorage], path: Path, capacity: int | None
) -> None:
    """Append endlessly, and refresh the rows for other libraries a hundred times a second."""
    engine_module._REFRESH_SECONDS = 0.01
    storage = kind(path, capacity=capacity)
    storage.extend(arrays(0, SIZE))
    connection.send("begun")
    head = SIZE
    while True:
        try:
            head = storage.extend(arrays(head, SIZE)).stop
        except StorageFull:
            time.sleep(0.1)
        time.sleep(0.002)  # readers finish long before a file of fixed size is full


def assert_same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(wanted).tobytes()


class OutsiderContract:
    """Contract to inherit together with `StorageContract`. `outsiders` has readers by name."""

    storage_class: type[DiskStorage]
    make: Callable[..., DiskStorage]
    default_capacity: int | None
    outsiders: ClassVar[dict[str, Outsider]]

    def test_others_read_every_dtype_and_name_bit_for_bit(self, path: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(0, 256, (300, 4, 16), dtype=torch.uint8, generator=generator)
        values = {
            str(dtype).removeprefix("torch."): bits % 2 == 0
            if dtype is torch.bool
            else bits.view(dtype)
            for dtype in (*DTYPES, torch.uint32, torch.uint64)
            if dtype is not torch.bfloat16
        }
        data = TensorDict(
            {**values, "a b%é*": {"c:d": bits[:, 0, 0], "deep": {"x": bits}}, "row": bits[:, :1]},
            [300],
        )
        with self.make(path) as storage:
            storage.extend(data[:100])
            storage.extend(data[100:])
        keys = [(name,) for name in values]
        keys += [("a b%é*", "c:d"), ("a b%é*", "deep", "x"), ("row",)]
        for read in self.outsiders.values():
            shown, found = read(path, keys)
            assert shown == 300
            for key in keys:
                assert_same_bits(found[key], data[key].numpy())

    def test_others_read_a_storage_without_rows(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.extend(arrays(0, 0))
            for read in self.outsiders.values():
                assert read(path, KEYS)[0] == 0
        for read in self.outsiders.values():
            assert read(path, KEYS)[0] == 0

    def test_others_read_all_rows_while_a_run_is_added(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.extend(arrays(0, 5))
        with self.make(path, mode="append") as storage:
            storage.initialise(storage.schema, {"second": True})
            for read in self.outsiders.values():
                shown, found = read(path, KEYS)
                assert shown == 5
                self.assert_shown(found, shown)

    def test_others_read_while_a_writer_writes(self, path: Path) -> None:
        capacity = 500_000 if self.default_capacity else None
        with process(write_and_show, self.storage_class, path, capacity) as (_, connection):
            assert receive(connection) == "begun"
            for read in self.outsiders.values():
                seen, end = [0], time.monotonic() + SECONDS
                while time.monotonic() < end or len(set(seen)) < 3:
                    shown, found = read(path, KEYS)
                    assert shown % SIZE == 0
                    self.assert_shown(found, shown)
                    seen.append(shown)
                    assert len(seen) < 10_000
                assert seen == sorted(seen)

    def test_others_read_after_kill_9_whatever_was_shown(self, path: Path) -> None:
        pick, capacity = random.Random(3), 500_000 if self.default_capacity else None
        for number in range(4):
            place = path.with_name(f"{number}{path.suffix}")
            target = (write_and_show, self.storage_class, place, capacity)
            with process(*target) as (writer, connection):
                receive(connection)
                time.sleep(pick.uniform(0, 0.1))
                writer.kill()
                writer.join(60)
            with self.storage_class(place, mode="read") as reader:
                head = len(reader)
            for read in self.outsiders.values():
                shown, found = read(place, KEYS)
                assert shown <= head
                self.assert_shown(found, shown)
            self.storage_class(place, mode="append").close()
            for read in self.outsiders.values():
                shown, found = read(place, KEYS)
                assert shown == head
                self.assert_shown(found, shown)

    def assert_shown(self, found: dict[Key, np.ndarray], shown: int) -> None:
        for key, wanted in arrays(0, shown).items():
            assert_same_bits(found[key], wanted)
