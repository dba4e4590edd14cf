"""Rows that reveal torn writes, and processes that write or sample them until they are killed.

The row's number determines all values of the row. The columns are so wide that a copy takes time.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from tensordict import TensorDict

import tallyroll.storage
from tallyroll.storage import H5Storage, MemmapStorage, StorageFull, ZarrStorage
from tallyroll.storage.engine import commit_engine as engine
from tallyroll.storage.errors import NotAStorage, StorageMissing
from tallyroll.storage.storages import DiskStorage

from fork_server import warm_fork_server
from storage_contract import WAIT_SECONDS, process

WIDTH = 512
STEPS = 12
"""Number of rows of each trajectory."""
MOST = 250
"""Number of rows of the largest batch."""

Key = tuple[str, ...]
KEYS: tuple[Key, ...] = (
    ("id",),
    ("wide",),
    ("next", "wide"),
    ("next", "done"),
    ("next", "terminated"),
    ("collector", "traj_ids"),
    ("collector", "step"),
    ("collector", "lane"),
)
_PLACE = np.arange(WIDTH, dtype=np.uint32)


@dataclass(frozen=True)
class Case:
    """A kind of storage under test."""

    kind: type[DiskStorage]
    ring: int = 0
    capacity: int | None = None
    """Capacity at creation, for formats that require one."""
    once: bool = False

    def create(self, path: Path, **more: Any) -> DiskStorage:
        options = {"capacity": self.capacity, "max_size": self.ring or None, **more}
        if self.once:
            options["once"] = True
        return self.kind(path, **options)

    def there(self, path: Path) -> bool:
        """Return whether the creation of the storage was finished."""
        return self.kind._format_class(path).exists()

    def open_or_create(self, path: Path, **more: Any) -> DiskStorage:
        if self.there(path):
            return self.kind(path, mode="append", **more)
        return self.create(path, **more)


CASES = {
    "memmap": Case(MemmapStorage),
    "ring": Case(MemmapStorage, ring=600),
    "once": Case(MemmapStorage, ring=600, once=True),
    "hdf5": Case(H5Storage, capacity=10_000),
    "zarr": Case(ZarrStorage),
    "once zarr": Case(ZarrStorage, once=True),
}


def oracle(start: int, count: int) -> dict[Key, np.ndarray]:
    """Return the rows ``[start, start + count)``."""
    return at(np.arange(start, start + count))


def tensors(start: int, count: int) -> TensorDict:
    """Return the rows ``[start, start + count)`` as tensors."""
    columns = oracle(start, count).items()
    return TensorDict({key: torch.from_numpy(array) for key, array in columns}, [count])


def at(numbers: np.ndarray) -> dict[Key, np.ndarray]:
    """Return the rows of these numbers [count], as arrays [count, ...] by key."""
    wide, after = _wide(numbers), _wide(numbers + 1)
    done = (numbers % STEPS == STEPS - 1)[:, None]
    return {
        ("id",): numbers.astype(np.int64),
        ("wide",): wide,
        ("next", "wide"): after,
        ("next", "done"): done,
        ("next", "terminated"): done,
        ("collector", "traj_ids"): numbers // STEPS,
        ("collector", "step"): numbers % STEPS,
        ("collector", "lane"): numbers // STEPS % 4,
    }


def _wide(numbers: np.ndarray) -> np.ndarray:
    """Return values [count, 4 * WIDTH] in which every word depends on the number."""
    seed = (numbers.astype(np.uint32) * np.uint32(2654435761))[:, None]
    return (seed + _PLACE).view(np.uint8)


def record_of(head: int) -> bytes:
    """Return the record of row ``head``: its number, repeated to a varying length."""
    return head.to_bytes(8, "little") * (1 + head % 300)


def assert_are(got: Mapping[Key, np.ndarray], numbers: np.ndarray) -> None:
    """Assert that ``got`` holds exactly the rows of these numbers, in this order."""
    for key, want in at(numbers).items():
        found = np.asarray(got[key])
        assert found.shape == want.shape, key
        if not np.array_equal(found, want):
            wrong = (found != want).reshape(len(want), -1).any(1)
            raise AssertionError(
                f"{key}: {wrong.sum()} of {len(want)} rows are wrong, the first at "
                f"{int(wrong.argmax())}: row {int(numbers[wrong.argmax()])}"
            )


def assert_whole(rows: TensorDict) -> np.ndarray:
    """Assert that each of the rows [n] was written, and is not a mixture. Return their numbers."""
    numbers = rows["id"].numpy()
    assert_are({key: rows[key].numpy() for key in KEYS}, numbers)
    return numbers


def check(storage: DiskStorage, *, since: int = 0, acknowledged: int = 0) -> int:
    """Check all valid rows from row ``since`` on, and the record. Return the head."""
    head, span, ring = storage.head, storage.span, storage.ring
    assert head >= acknowledged, "acknowledged rows are gone"
    assert span.stop == head
    assert len(span) == len(storage) >= (min(head, ring - MOST) if ring else head)
    numbers = np.arange(max(since, span.start), head)
    columns = {key: storage.column(key) for key in KEYS}
    for start in range(0, len(numbers), 5000):
        part = numbers[start : start + 5000]
        slots = storage.slots_of(part)
        assert_are({key: column[slots] for key, column in columns.items()}, part)
    valid = storage.get(np.arange(max(0, len(storage) - 5000), len(storage)))
    assert set(assert_whole(valid).tolist()) <= set(span)
    assert storage.record == ((head, record_of(head)) if head else None)
    return head


# -- views of other libraries


def shown(path: Path, kind: type[DiskStorage]) -> dict[Key, np.ndarray]:
    """Return columns as h5py, zarr-python or tensordict reads them, by their own metadata."""
    if kind is H5Storage:
        with h5py.File(path, "r", locking=False) as file:
            rows = int(file.attrs["rows"])
            return {key: file["/".join(key)][:rows] for key in KEYS}
    if kind is ZarrStorage:
        group = zarr.open_group(path, mode="r")
        return {key: np.asarray(group["/".join(key)][:]) for key in KEYS}
    loaded = TensorDict.load_memmap(path)
    return {key: loaded[key].numpy() for key in KEYS}


def check_shown(path: Path, storage: DiskStorage, *, all_of_them: bool = False) -> int:
    """Check that other libraries see only committed rows, bit for bit. Return how many."""
    try:
        columns = shown(path, type(storage))
    except RuntimeError as error:
        # The metadata of tensordict are several files. A reader between two updates sees a mixture,
        # and after a kill there the mixture lasts until the next refresh.
        if all_of_them or "incompatible with the batch-size" not in str(error):
            raise
        return 0
    ring = storage.ring
    rows = len(columns[("id",)])
    for each in storage.reader.once:  # other libraries see positions
        columns |= {key: storage.column(key) for key in (each.key, each.next_key)}
    slots = min(storage.head, ring) if ring else storage.head
    assert rows == slots if all_of_them else rows <= slots
    span = storage.span
    numbers = np.arange(span.start, span.stop)
    at_slot = storage.slots_of(numbers)
    numbers, at_slot = numbers[at_slot < rows], at_slot[at_slot < rows]
    assert_are({key: column[at_slot] for key, column in columns.items()}, numbers)
    return rows


# -- a writer that is killed


class Told:
    """Two counts in shared memory, which survive the kill of a forked process."""

    def __init__(self) -> None:
        self._counts = np.frombuffer(mmap.mmap(-1, 16), np.int64)

    @property
    def head(self) -> int:
        """Rows that the process knows to be committed; -1 before it has opened the storage."""
        return int(self._counts[0])

    @head.setter
    def head(self, rows: int) -> None:
        self._counts[0] = rows

    @property
    def lines(self) -> int:
        return int(self._counts[1])

    @lines.setter
    def lines(self, count: int) -> None:
        self._counts[1] = count


def forked(act: Callable[[], None]) -> int:
    """Run ``act`` in a forked process and return its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:  # noqa: BLE001 - a fork must not go on in its parent's code
            traceback.print_exc()
        os._exit(status)
    return child


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait with a timeout."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.0005)


def killed(child: int) -> None:
    """Kill a child, which must still be running."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child had failed"


def in_a_process(target: Callable[..., Any], *args: Any, seconds: float = WAIT_SECONDS) -> Any:
    """Return the result of ``target(*args)`` in a process with one thread, which may fork."""
    warm_fork_server()
    with process(_answer, target, args) as (_, connection):
        assert connection.poll(seconds), "the process said nothing"
        succeeded, answer = connection.recv()
    assert succeeded, answer
    return answer


def _answer(connection: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        connection.send((True, target(*args)))
    except BaseException:  # noqa: BLE001 - the test fails with it
        connection.send((False, traceback.format_exc()))


# -- a writer that is killed


def write_for_ever(
    case: Case,
    path: Path,
    told: Told,
    seed: int,
    *,
    most: int = MOST,
    close: bool = True,
    pause: float = 0.0,
) -> None:
    """Append batches of up to ``most`` rows, each with its record, until killed.

    Batches are arrays or tensors. From the second batch of a size on, tensors take another copy
    path. If ``close``, the storage is sometimes closed and reopened. ``pause`` is in seconds. Every
    fourth writer syncs each commit.
    """
    pick = random.Random(seed)
    count = 1
    durability = "power" if seed % 4 == 1 else "process"
    storage = case.open_or_create(path, durability=durability)
    told.head = head = storage.head
    for step in itertools.count(1):
        if step % 3 == 0:
            count = pick.choice([1, 2, most // 9, most, most, pick.randrange(1, most)])
        batch = pick.choice([oracle, tensors, tensors])(head, count)
        try:
            storage.extend(batch, record=record_of(head + count))
        except StorageFull:
            assert case.kind is H5Storage
            storage.reserve(head + 2000)
            continue
        told.head = head = head + count
        if pause:
            time.sleep(pause)
        if step % 40 == 0:
            storage.flush()
        if close and step % 60 == 0:
            storage.close()
            storage = case.open_or_create(path, durability=durability)


def kill_at_random(case: Case, path: Path, kills: int) -> list[int]:
    """Kill writers of one storage, and check it after each kill. Return the heads found."""
    heads = [0]
    for seed in range(kills):
        pick, told = random.Random(seed), Told()
        told.head = -1
        writer = forked(lambda told=told, seed=seed: write_for_ever(case, path, told, seed))
        # Kill one third of the writers at any moment, and the others once they have opened the
        # storage or appended rows.
        wait_until(lambda told=told, seed=seed: seed % 3 == 0 or told.head >= 0)
        wait_until(lambda told=told, seed=seed: seed % 3 < 2 or told.head > heads[-1])
        time.sleep(pick.uniform(0.0, 0.02))
        killed(writer)
        if not case.there(path):
            assert told.head <= 0
            continue
        with case.kind(path, mode="read") as reader:
            heads.append(check(reader, since=heads[-1], acknowledged=max(heads[-1], told.head)))
            if seed % 10 == 0:
                check_shown(path, reader)
    survived(case, path, heads[-1])
    return heads


# -- one process for many forks: a kill at every line


PACKAGE = str(Path(tallyroll.storage.__file__).parent)


def lines_of(act: Callable[[], None], kill_at: int = 0, inside: str = PACKAGE) -> int:
    """Count the lines of files ``inside`` that ``act`` runs. Kill this process at ``kill_at``."""
    count = 0

    def local(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return local

    def trace(frame: Any, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(inside) else None

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return count


Scenario = Callable[[Case, Path, Told], None]


def scenario_create(case: Case, path: Path, told: Told) -> None:
    with case.create(path) as storage:
        storage.extend(oracle(0, 3), record=record_of(3))
        told.head = 3


def scenario_append(case: Case, path: Path, told: Told) -> None:
    """Reopen, append, grow, refresh for other libraries, write only a record, and close."""
    with case.kind(path, mode="append") as storage:
        head = storage.head
        sizes = [(oracle, count) for count in (2, MOST, 1, MOST)]
        for make, count in [*sizes, (tensors, 3), (tensors, 3)]:
            storage.extend(make(head, count), record=record_of(head + count))
            told.head = head = head + count
        storage.writer.put_record(record_of(head))


def scenario_reserve(case: Case, path: Path, told: Told) -> None:
    """Reserve space, which replaces an HDF5 file, and use it."""
    with case.kind(path, mode="append") as storage:
        head = storage.head
        storage.reserve(2 * head + 3000)
        storage.extend(oracle(head, 5), record=record_of(head + 5))
        told.head = head + 5


def scenario_finalize(case: Case, path: Path, told: Told) -> None:
    with case.kind(path, mode="append") as storage:
        head = storage.head
        storage.extend(oracle(head, 5), record=record_of(head + 5))
        told.head = head + 5
        storage.finalize()


SCENARIOS: dict[str, Scenario] = {
    "create": scenario_create,
    "append": scenario_append,
    "reserve": scenario_reserve,
    "finalize": scenario_finalize,
}


def kill_at_lines(case: Case, name: str, folder: Path, points: int, seed: int) -> list[int]:
    """Run a scenario in forks, each killed at another line, and check the remaining storage.

    Return the heads found.
    """
    # Refresh the rows for other libraries at each commit, so that a kill can interrupt this too.
    engine._REFRESH_SECONDS = 0.0
    base, work = folder / "base", folder / "work"
    _build_base(case, base / "rows", empty=name == "create")
    act, heads = SCENARIOS[name], []
    total = _run_scenario(case, act, base, work, 0).lines
    stride = max(1.0, total / points)
    offset = random.Random(seed).uniform(0, stride)
    for number in range(min(points, total)):
        line = 1 + int(offset + number * stride) % total
        told = _run_scenario(case, act, base, work, line)
        try:
            heads.append(survived(case, work / "rows", told.head))
        except BaseException as error:
            raise AssertionError(f"killed at line {line} of {total} of {name}") from error
    return heads


def _build_base(case: Case, path: Path, *, empty: bool) -> None:
    path.parent.mkdir(parents=True)
    if empty:
        return
    with case.create(path) as storage:
        for start in range(0, 1000, 200):
            storage.extend(oracle(start, 200), record=record_of(start + 200))


def _run_scenario(case: Case, act: Scenario, base: Path, work: Path, line: int) -> Told:
    """Act on a copy of ``base`` in a fork that is killed at a line, or never if that is 0."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base, work)
    told = Told()

    def run() -> None:
        told.lines = lines_of(lambda: act(case, work / "rows", told), line)

    _, status = os.waitpid(forked(run), 0)
    # The clock changes the number of lines a little, so a run may not reach the last ones.
    assert status == 0 or (line and os.WIFSIGNALED(status)), status
    return told


def survived(case: Case, path: Path, acknowledged: int) -> int:
    """Assert that a killed writer left whole rows, and write on. Return the number of rows left."""
    if not case.there(path):
        assert not acknowledged
        with pytest.raises((NotAStorage, StorageMissing)):
            case.kind(path, mode="read")
        with case.create(path) as storage:
            storage.extend(oracle(0, 4), record=record_of(4))
        return 0
    with case.kind(path, mode="read") as reader:
        head = check(reader, acknowledged=acknowledged)
        if head:
            check_shown(path, reader)
    with case.kind(path, mode="append", capacity=head + MOST) as storage:
        assert check(storage, acknowledged=head) == head
        storage.extend(oracle(head, MOST), record=record_of(head + MOST))
    with case.kind(path, mode="read") as reader:
        assert check(reader) == head + MOST
        check_shown(path, reader, all_of_them=True)
        lengths = reader.trajectories.lengths
        assert lengths.max() <= STEPS
        assert case.ring or lengths.sum() == reader.head
    return head
