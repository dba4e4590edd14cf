"""Collectors that share a storage give each trajectory its own id, or the write is refused.

``TALLYROLL_INTERLEAVINGS`` is the number of random orders, 6 by default.
"""

from __future__ import annotations

import gc
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from tallyroll.collector import SyncCollector
from tallyroll.collector.base import Collector
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import RunUnderWay

from pairs import in_gate
from worker_kit import DISABLED, factory, in_threads, sync_collector, worker_collector

ORDERS = int(os.environ.get("TALLYROLL_INTERLEAVINGS", "6"))
IDS, STEP, LANE = (("collector", name) for name in ("traj_ids", "step", "lane"))


def collector(lanes: int, **kwargs: Any) -> Collector:
    """Return a collector of `lanes` lanes."""
    given = {"frames_per_batch": 3 * lanes - 1, "total_frames": 40, "seed": lanes, **kwargs}
    return SyncCollector(factory(DISABLED, 0, lanes), None, finals="kept", **given)


def assert_ids_are_unique(path: Path) -> None:
    """Check that each id belongs to one lane and one run.

    The ids of a run are ``base + k * lanes + lane``.
    """
    assert verify(path).sound, [str(each) for each in verify(path).findings]
    with open_storage(path) as storage:
        rows, runs = storage.get(slice(None)), storage.manifest["runs"]
        head = storage.head
    ids, lane = rows[IDS].numpy(), rows[LANE].numpy()
    assert len(set(zip(ids.tolist(), rows[STEP].tolist(), strict=True))) == len(ids)
    seen: set[int] = set()
    bounds = [*(run["first_row"] for run in runs), head]
    for run, (start, stop) in zip(runs, pairwise(bounds), strict=True):
        own = slice(start, stop)
        assert seen.isdisjoint(ids[own].tolist())
        seen.update(ids[own].tolist())
        if "lanes" in run and stop > start:
            assert len(np.unique((ids[own] - lane[own]) % run["lanes"])) == 1
            assert set(lane[own].tolist()) <= set(range(run["lanes"]))


class Played:
    """Random calls of collectors over one storage, some of which are refused."""

    def __init__(self, seed: int, path: Path) -> None:
        self.chance, self.path = random.Random(seed), path
        self.storage = MemmapStorage(path)
        self.open: list[Collector] = []
        self.refused = self.stored = 0
        for _ in range(self.chance.choice((2, 2, 3))):
            self.make()

    def make(self) -> None:
        """Open one more collector."""
        given: dict[str, Any] = {"storage": self.storage}
        if self.chance.random() < 0.3:
            buffer = ReplayBuffer(storage=self.storage, batch_size=4)
            given = {"replay_buffer": buffer}
        if self.chance.random() < 0.2:
            given["postproc"] = lambda rows: rows
        self.open.append(collector(self.chance.randint(1, 5), **given))

    def resume(self) -> None:
        """Continue the last run."""
        runs = self.storage.manifest["runs"] if self.storage.head else [{}]
        if "first_row_of_run" in runs[-1]:
            lanes, seed = runs[-1]["lanes"], runs[-1]["seed"]
            given = {"storage": self.storage, "resume": True, "seed": seed, "total_frames": 80}
            self.open.append(collector(lanes, **given))

    def extend(self) -> None:
        """Append rows as another program would."""
        if self.storage.head:
            rows = self.storage.get(slice(0, min(5, self.storage.head)))
            self.storage.extend(rows, ids="renumber")

    def collect(self) -> None:
        """Collect a random number of transitions."""
        each, n = self.chance.choice(self.open), self.chance.randint(1, 12)
        assert each.collect(n) <= n

    def iterate(self) -> None:
        """Collect one batch."""
        for batch in self.chance.choice(self.open):
            assert len(batch)
            break

    def close(self) -> None:
        """Shut down one collector, and sometimes drop it."""
        each = self.chance.choice(self.open)
        each.shutdown()
        self.open.remove(each)

    def play(self) -> None:
        """Make 25 random calls."""
        calls = [self.collect] * 5 + [self.iterate] * 5 + [self.close] * 2
        calls += [self.extend, self.make, self.resume]
        for _ in range(25):
            call = self.chance.choice(calls) if self.open else self.make
            head = self.storage.head
            try:
                call()
            except RunUnderWay:
                assert self.storage.head == head
                self.refused += 1
        for each in self.open:
            each.shutdown()
        self.storage.close()


@pytest.mark.parametrize("first", in_gate([0, 1]))
def test_random_orders(first: int, tmp_path: Path) -> None:
    refused = 0
    for seed in range(first, ORDERS, 2):
        path = tmp_path / str(seed)
        played = Played(seed, path)
        try:
            played.play()
            if path.exists():
                assert_ids_are_unique(path)
        except BaseException as error:
            error.add_note(f"order {seed}")
            raise
        refused += played.refused
    assert refused > ORDERS / 2


@pytest.mark.parametrize("first", [0, 1])
def test_one_after_the_other(first: int, tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        both = [collector(3, storage=storage), collector(2, storage=storage)]
        for each in (both[first], both[1 - first]):
            assert sum(map(len, each)) == 40
        for each in both:
            each.shutdown()
            assert each.ledger.stored == 40
        runs = storage.manifest["runs"]
        assert [(run["first_row"], run["lanes"]) for run in runs] == [
            (0, 2 + (first == 0)),
            (40, 2 + (first == 1)),
        ]
    assert_ids_are_unique(tmp_path / "rows")


def test_what_was_refused_begins_later(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        one, other = collector(3, storage=storage), collector(2, storage=storage)
        next(iter(one))
        for call in (lambda: other.collect(4), lambda: next(iter(other))):
            with pytest.raises(RunUnderWay, match=r"another collector.*shutdown\(\)"):
                call()
        assert other.ledger.slots == 0
        with pytest.raises(RunUnderWay):
            collector(3, storage=storage, resume=True)
        one.shutdown()
        assert sum(map(len, other)) == 40
        other.shutdown()
    assert_ids_are_unique(tmp_path / "rows")


def test_workers_beside_one_that_has_begun(tmp_path: Path) -> None:
    with in_threads(), MemmapStorage(tmp_path / "rows") as storage:
        given = {"frames_per_batch": 10, "total_frames": 30, "storage": storage}
        for mode in ("sync", "async"):
            with (
                worker_collector(DISABLED, 2, mode=mode, **given) as many,
                sync_collector(DISABLED, **given) as one,
            ):
                next(iter(many))
                with pytest.raises(RunUnderWay):
                    next(iter(one))
                assert sum(map(len, many)) == 20
                assert sum(map(len, one)) == 30
    assert_ids_are_unique(tmp_path / "rows")


def test_a_buffer_of_torchrl_s_that_two_fill_in_turn() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000))
    with (
        collector(3, replay_buffer=buffer, total_frames=200) as one,
        collector(2, replay_buffer=buffer, total_frames=200) as other,
    ):
        for _ in range(10):
            one.collect(6)
            other.collect(4)
    with collector(2, replay_buffer=buffer) as third:
        third.collect(10)
    rows = buffer[:]
    ids, steps = rows[IDS].reshape(-1), rows[STEP].reshape(-1)
    assert len(set(zip(ids.tolist(), steps.tolist(), strict=True))) == len(ids) == 110
    for number in ids.unique():
        assert len(torch.unique(rows[LANE].reshape(-1)[ids == number])) == 1


def test_a_run_without_rows_is_not_taken_for_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        for seed in (5, 6):
            collector(2, storage=storage, seed=seed).shutdown()
        with collector(2, storage=storage, seed=6, resume="auto") as again:
            assert sum(map(len, again)) == 40
    assert_ids_are_unique(path)


def test_a_run_without_rows_leaves_no_count_to_a_later_one(tmp_path: Path) -> None:
    """Each run records its own start and seed."""
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        collector(2, storage=storage, seed=5).shutdown()
        killed = collector(2, storage=storage, seed=6)
        del killed
    with (
        MemmapStorage(path, mode="append") as storage,
        collector(2, storage=storage, seed=6, resume=True) as again,
    ):
        assert sum(map(len, again)) == 40
        assert again.ledger.incarnation == 1
    assert_ids_are_unique(path)


def test_a_run_in_a_buffer_gives_its_ids_back_when_it_is_over() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000))
    kept = [collector(2, replay_buffer=buffer) for _ in range(2)]
    for each in kept:
        each.shutdown()
    with collector(2, replay_buffer=buffer) as other:
        other.collect(10)
    assert buffer[:][IDS].max() < 10


def test_one_that_was_dropped_without_an_end_is_over(tmp_path: Path) -> None:
    """Only the garbage collector may be able to detect a dropped collector."""
    gc.disable()
    try:
        with MemmapStorage(tmp_path / "rows") as storage:
            dropped: Any = collector(3, storage=storage)
            dropped.collect(6)
            dropped.itself = dropped
            del dropped
            with collector(2, storage=storage) as other:
                assert sum(map(len, other)) == 40
    finally:
        gc.enable()
    assert_ids_are_unique(tmp_path / "rows")
