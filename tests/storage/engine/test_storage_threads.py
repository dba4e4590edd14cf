"""Test several threads that use one storage.

Acknowledged rows exist, and no operation is half done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.storage import H5Storage
from tallyroll.storage.engine.columns import PrivateRows
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.storages import DiskStorage

from killed_storages_kit import CASES, Case, check, record_of, tensors
from pairs import in_gate

WAIT_SECONDS = 60


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = CASES[request.param]
    return found


def extend(storage: DiskStorage, start: int, count: int) -> None:
    storage.extend(tensors(start, count), record=record_of(start + count))


class Writer:
    """Extends a storage row by row and counts acknowledged rows, until an append fails."""

    def __init__(self, storage: DiskStorage, *, most: int = 10**6) -> None:
        self.acknowledged = storage.head
        self.error: BaseException | None = None
        self._storage, self._most = storage, most

    def run(self) -> None:
        try:
            while self.acknowledged < self._most:
                count = 1 + self.acknowledged % 7
                extend(self._storage, self.acknowledged, count)
                self.acknowledged += count
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error


@contextmanager
def at_work(*acts: Callable[[], object]) -> Iterator[None]:
    """Run functions in threads, and join the threads at the end."""
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("how", ["close", "finalize"])
@pytest.mark.parametrize("trial", in_gate(range(6), every=3))
def test_closing_while_another_thread_writes(
    case: Case, tmp_path: Path, how: str, trial: int
) -> None:
    """The writing thread gets `StorageClosed`.

    It used to write beyond the end of trimmed files.
    """
    storage = case.create(tmp_path / "rows")
    extend(storage, 0, 1)
    writer = Writer(storage, most=9_000)
    with at_work(writer.run):
        time.sleep(0.004 * trial)
        getattr(storage, how)()
    if writer.acknowledged < 9_000:
        assert isinstance(writer.error, StorageClosed)
    with case.kind(tmp_path / "rows", mode="read") as reader:
        assert check(reader) == writer.acknowledged


def test_two_threads_begin_a_storage(case: Case, tmp_path: Path) -> None:
    storage = case.create(tmp_path / "rows")
    start = threading.Barrier(2)
    errors: list[BaseException] = []

    def begin() -> None:
        start.wait(WAIT_SECONDS)
        try:
            for _ in range(20):
                storage.extend(tensors(0, 3), ids="fresh")
        except Exception as error:  # noqa: BLE001 - looked at by the test
            errors.append(error)

    with at_work(begin, begin):
        pass
    assert not errors
    assert storage.head == 120
    np.testing.assert_array_equal(storage.column("id"), np.tile([0, 1, 2], 40))
    storage.close()


def test_a_file_is_enlarged_while_another_thread_writes(tmp_path: Path) -> None:
    """HDF5 files are rewritten for that, and writers wait."""
    with H5Storage(tmp_path / "rows", capacity=20) as storage:
        extend(storage, 0, 1)
        writer = Writer(storage, most=2000)
        with at_work(writer.run):
            for room in range(400, 3200, 400):
                storage.reserve(room)
                time.sleep(0.005)
        while writer.acknowledged < 2000:  # it was faster than the growth
            assert "capacity" in str(writer.error)
            writer.error = None
            writer.run()
        assert check(storage) == writer.acknowledged


def test_views_of_a_ring_are_handed_out_between_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is held, because a writer checks whether rows lie in such views."""
    with CASES["ring"].create(tmp_path / "rows") as storage:
        extend(storage, 0, 9)
        engine, lend = storage.reader.engine, PrivateRows.rows
        assert engine is not None
        alone: list[bool] = []

        def lent(*args: Any, **options: Any) -> list[np.ndarray]:
            alone.append(engine.space.mutex._is_owned())  # type: ignore[attr-defined]
            return lend(*args, **options)

        monkeypatch.setattr(PrivateRows, "rows", lent)
        storage.column("id")
        storage.get(slice(3))
        assert alone == [True, True]


def test_a_storage_that_cannot_be_enlarged_is_as_it_was_or_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt used to leave an open storage that claimed to be new."""
    storage = H5Storage(tmp_path / "rows", capacity=20)
    extend(storage, 0, 9)
    engine = storage.reader.engine
    assert engine is not None
    close = engine.close

    def interrupted() -> None:
        close()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        storage.reserve(1000)
    extend(storage, 9, 3)
    assert check(storage) == 12
    monkeypatch.setattr(
        "tallyroll.storage.readers.file_reader.open_existing", lambda *a, **b: 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        storage.reserve(1000)
    with pytest.raises(StorageClosed):
        extend(storage, 12, 3)
    monkeypatch.undo()
    with H5Storage(tmp_path / "rows", mode="append") as storage:
        assert check(storage) == 12
