"""Test readers and samplers with a fast concurrent writer: they see only whole, committed rows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement

from tallyroll.storage import MemmapStorage
from tallyroll.storage.engine.row_copies import RowCopies
from tallyroll.storage.storages import DiskStorage

from killed_storages_kit import (
    CASES,
    MOST,
    STEPS,
    Case,
    Told,
    assert_are,
    assert_whole,
    oracle,
    record_of,
    write_for_ever,
)
from storage_contract import WAIT_SECONDS, process, receive

SECONDS = 0.4
READS = 100


def write(connection: Connection, case: Case, path: Path) -> None:
    connection.send("begun")
    # In a ring, half of the rows are overwritten at a time. A growing storage must spare the disk.
    most, pause = (MOST, 0.0) if case.ring else (20, 0.0003)
    write_for_ever(case, path, Told(), seed=3, most=most, close=False, pause=pause)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    case = CASES[request.param]
    return replace(case, capacity=100_000) if case.capacity else case


@pytest.fixture(scope="module")
def written(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the path of a storage that another process writes."""
    path = tmp_path_factory.mktemp("written") / "rows"
    with process(write, case, path) as (writer, connection):
        receive(connection)
        deadline = time.monotonic() + WAIT_SECONDS
        while not (case.there(path) and rows_in(case, path) > 2000):
            assert writer.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield path
        assert writer.is_alive(), "the writer failed"
    shutil.rmtree(path.parent)


def rows_in(case: Case, path: Path) -> int:
    with case.kind(path, mode="read") as reader:
        return reader.head


def until_enough(read: Callable[[], object], seconds: float = SECONDS, reads: int = READS) -> int:
    """Read for at least this many seconds and this many times."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end or count < reads:
        read()
        count += 1
    return count


def is_between(numbers: np.ndarray, before: range, after: range) -> None:
    """Check that rows were committed, and not overwritten before the read began."""
    assert not len(numbers) or before.start <= numbers.min()
    assert not len(numbers) or numbers.max() < after.stop


def test_random_rows(case: Case, written: Path) -> None:
    chance = np.random.default_rng(0)
    with case.kind(written, mode="read") as reader:
        heads = set()

        def read() -> None:
            before, count = reader.span, int(chance.integers(1, 300))
            out = reader.reused(count) if count % 2 else None
            got = reader.get(chance.integers(0, len(reader), count), out=out)
            is_between(assert_whole(got), before, reader.span)
            one = reader.get(int(chance.integers(0, len(reader))))
            assert_whole(one[None])
            heads.add(reader.head)

        until_enough(read)
        assert len(heads) > 3


def test_slices_and_masks(case: Case, written: Path) -> None:
    chance = np.random.default_rng(1)
    with case.kind(written, mode="read") as reader:

        def read() -> None:
            before, length = reader.span, len(reader)
            start = int(chance.integers(0, length))
            got = reader.get(slice(start, min(length, start + 200), 1 + start % 3))
            numbers = assert_whole(got)
            is_between(numbers, before, reader.span)
            if not reader.ring:
                assert (
                    numbers.tolist()
                    == list(range(start, start + 200, 1 + start % 3))[: len(numbers)]
                )

        until_enough(read)


def test_slices_of_trajectories(case: Case, written: Path) -> None:
    with case.kind(written, mode="read") as reader:
        heads = set()

        def read() -> None:
            head = reader.head
            got = reader.trajectories.sample_slices(16, 5)
            ids = got["id"].numpy()
            assert (np.diff(ids) == 1).all()
            assert (ids[:, 0] // STEPS == ids[:, -1] // STEPS).all()
            assert got["next", "done"][:, -1].all()
            got["next", "done"] = (got["id"] % STEPS == STEPS - 1)[..., None]
            assert_whole(got.reshape(-1))
            heads.add(head)

        until_enough(read)
        assert len(heads) > 3


def test_columns_of_what_grows(written: Path, case: Case) -> None:
    if case.ring:
        return
    with case.kind(written, mode="read") as reader:

        def read() -> None:
            ids = reader.column("id")
            low = max(0, len(ids) - 300)
            rows = {key: reader.column(key)[low : len(ids)] for key in oracle(0, 1)}
            assert_are(rows, np.arange(low, len(ids)))

        # The columns of frames that are stored once are decoded whole.
        until_enough(read, reads=3 if case.once else READS)


def test_records(case: Case, written: Path) -> None:
    with case.kind(written, mode="read") as reader:

        def read() -> None:
            before, record = reader.head, reader.record
            assert record is not None
            assert before <= record[0] <= reader.head
            assert record[1] == record_of(record[0])

        until_enough(read, reads=1000)


@pytest.mark.parametrize(
    ("sampler", "prefetch"), [(RandomSampler, 3), (SamplerWithoutReplacement, None)]
)
def test_replay_buffers_of_a_reader(
    case: Case, written: Path, sampler: Any, prefetch: int | None
) -> None:
    with case.kind(written, mode="read") as reader:
        buffer = TensorDictReplayBuffer(
            storage=reader, sampler=sampler(), batch_size=128, prefetch=prefetch
        )
        newest = 0

        def read() -> None:
            nonlocal newest
            newest = max(newest, int(assert_whole(buffer.sample().exclude("index")).max()))

        before = reader.head
        until_enough(read)
        if sampler is RandomSampler:
            assert newest > before, "rows that came meanwhile were not sampled"


def test_reopened_again_and_again(case: Case, written: Path) -> None:
    heads = []

    def read() -> None:
        with case.kind(written, mode="read") as reader:
            heads.append(reader.head)
            if case.ring:  # its columns are overwritten during the check
                assert_whole(reader.get(torch.arange(100)))
                return
            newest = slice(heads[-1] - 50, heads[-1])
            if case.once:  # its columns are decoded whole
                assert assert_whole(reader.get(newest))[-1] == heads[-1] - 1
            else:
                columns = {key: reader.column(key)[newest] for key in oracle(0, 1)}
                assert_are(columns, np.arange(newest.start, newest.stop))

    until_enough(read, reads=20)
    assert heads == sorted(heads)


def test_without_the_second_look_rows_are_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test shows that the tests above would detect torn rows."""
    case, path = CASES["ring"], tmp_path / "rows"
    monkeypatch.setattr(
        RowCopies,
        "_take_checked",
        lambda self, index, _, only, room=None: (self.gather(index, only, room=room), index),
    )
    with process(write, case, path) as (_, connection):
        receive(connection)
        while not (case.there(path) and rows_in(case, path) > 2000):
            time.sleep(0.005)
        with case.kind(path, mode="read") as reader:
            chance = np.random.default_rng(0)
            deadline, torn = time.monotonic() + 20, 0
            while not torn and time.monotonic() < deadline:
                try:
                    assert_whole(reader.get(chance.integers(0, 300, 128)))
                except AssertionError:
                    torn += 1
            assert torn


def test_threads_of_the_writer_sample_what_it_writes(case: Case, tmp_path: Path) -> None:
    with case.create(tmp_path / "rows") as storage:
        buffer = ReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=128, prefetch=4)
        head, newest, seen = 0, 0, 0
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or seen < READS:
            for count in (1, 250 if case.ring else 20, 4):
                rows = TensorDict({}, [count])
                for key, array in oracle(head, count).items():
                    rows[key] = torch.from_numpy(array)
                buffer.extend(rows)
                head += count
            sample = buffer.sample()
            newest = max(newest, int(assert_whole(sample).max()))
            seen += 1
        assert newest > head - 5000
        assert head == storage.head
        if isinstance(storage, MemmapStorage):
            check_rows_only(storage)


def check_rows_only(storage: DiskStorage) -> None:
    numbers = np.arange(storage.span.start, storage.span.stop)
    slots = storage.slots_of(numbers)
    assert_are({key: storage.column(key)[slots] for key in oracle(0, 1)}, numbers)
