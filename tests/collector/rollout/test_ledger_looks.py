"""The ledger balances and only grows, between any two instructions of a collector.

Another thread may run between any two of them.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from random_looking import wrong_after
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tallyroll import collector as package
from tallyroll.collector import SyncCollector
from tallyroll.collector import torchrl as names
from tallyroll.collector.base import Collector
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.storage import MemmapStorage, fast_paths, open_storage

from traced_code import traced
from worker_kit import (
    DISABLED,
    LANES,
    NEXT,
    SAME,
    RecordingPolicy,
    factory,
    in_threads,
    sync_collector,
    worker_collector,
)

INSIDE = str(Path(package.__file__).parent)
FRAMES, BATCH = 60, 12


class Looks:
    """Function that reads the ledger, and checks that it balances and never shrinks."""

    def __init__(self, collector: Collector) -> None:
        self.collector, self.count, self.wrong = collector, 0, list[str]()
        self.last = collector.ledger
        self.stored = {self.last.stored}
        """Numbers of stored transitions that were seen."""

    def __call__(self, *_: Any) -> None:
        ledger, last = self.collector.ledger, self.last
        self.count, self.last = self.count + 1, ledger
        self.stored.add(ledger.stored)
        self.wrong += wrong_after(last, ledger)


RUNS: dict[str, Callable[..., Collector]] = {
    "random": partial(sync_collector, NEXT),
    "policy": partial(sync_collector, NEXT, RecordingPolicy(), init_random_frames=17),
    "same step": partial(sync_collector, SAME, RecordingPolicy()),
    "disabled": partial(sync_collector, DISABLED, finals="kept"),
    "part": partial(sync_collector, DISABLED, surplus="never_step"),
    "discard": partial(sync_collector, SAME, surplus="discard"),
    "reset": partial(sync_collector, NEXT, RecordingPolicy(), reset_at_each_iter=True),
    "torch": partial(sync_collector, "torch", RecordingPolicy()),
    "processed": partial(sync_collector, NEXT, RecordingPolicy(), postproc=lambda rows: rows),
    "sync": partial(worker_collector, NEXT, 2, RecordingPolicy(), mode="sync"),
    "sync random": partial(worker_collector, DISABLED, 2, mode="sync", finals="kept"),
    "async": partial(worker_collector, NEXT, 2, RecordingPolicy(), mode="async"),
}


def iterate(collector: Collector) -> None:
    for _ in collector:
        pass


def collect(n: int, collector: Collector) -> None:
    while collector.collect(n):
        pass


WAYS: dict[str, Callable[[Collector], None]] = {
    "iterate": iterate,
    "a slot a call": partial(collect, LANES),
    "a part of a slot a call": partial(collect, 3),
    "all in a call": partial(collect, FRAMES),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RUNS)
def test_each_look_balances(name: str, way: str, tmp_path: Path) -> None:
    with in_threads():
        collector = RUNS[name](
            frames_per_batch=BATCH, total_frames=FRAMES, storage=tmp_path / "rows", seed=3
        )
        looks = Looks(collector)
        with collector, traced(INSIDE, looks):
            WAYS[way](collector)
            looks()
    assert not looks.wrong, looks.wrong[:3]
    assert looks.count > 1000
    assert len(looks.stored) > 2  # some reads occur during the call
    assert looks.last.stored == FRAMES
    with open_storage(tmp_path / "rows") as storage:
        assert storage.head == FRAMES


@pytest.mark.parametrize("off", ["kernel", "fast-collect"])
def test_without_a_faster_way(off: str, tmp_path: Path) -> None:
    with fast_paths.switched_off(off):
        collector = RUNS["policy"](
            frames_per_batch=BATCH, total_frames=FRAMES, storage=tmp_path / "rows"
        )
        looks = Looks(collector)
        with collector, traced(INSIDE, looks):
            WAYS["a part of a slot a call"](collector)
    assert not looks.wrong, looks.wrong[:3]
    assert len(looks.stored) > 10


def test_by_torchrls_names() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = names.Collector(
        factory("torch", 0, LANES),
        RecordingPolicy(),
        frames_per_batch=2 * LANES,
        total_frames=6 * LANES,
        replay_buffer=buffer,
    )
    looks = Looks(collector)
    with traced(INSIDE, looks):
        for _ in collector:
            pass
    collector.shutdown()
    assert not looks.wrong, looks.wrong[:3]
    assert {10, 20, 30} <= looks.stored


def test_a_run_that_an_error_ends(tmp_path: Path) -> None:
    calls = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 7:
            raise ValueError("the eighth call")
        return torch.zeros(len(observation), dtype=torch.int64)

    collector = SyncCollector(
        "CartPole-v1", policy, num_envs=4, frames_per_batch=10, total_frames=100, storage=tmp_path
    )
    calls.clear()  # the trial also called it
    looks = Looks(collector)
    with traced(INSIDE, looks), pytest.raises(ValueError, match="eighth"):
        for _ in collector:
            pass
    collector.shutdown()
    assert not looks.wrong, looks.wrong[:3]
    with open_storage(tmp_path) as storage:
        assert collector.ledger.stored == storage.head == 4 * 7


@contextmanager
def eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(("frames", "each"), [(64, 7), (64, 64), (8, 8), (1000, 1000)])
def test_a_thread_that_reads_while_another_collects(frames: int, each: int) -> None:
    storage = MemmapStorage(max_size=3000)
    collector = SyncCollector(
        "CartPole-v1", num_envs=8, frames_per_batch=frames, total_frames=-1, storage=storage
    )
    with storage, collector:
        looks, ended = Looks(collector), threading.Event()

        def learn() -> None:
            while not ended.is_set():
                looks()
                collector.metrics()
                repr(collector)

        thread = threading.Thread(target=learn)
        with eager_threads():
            thread.start()
            for _ in range(max(4, 2000 // each)):
                collector.collect(each)
            ended.set()
            thread.join()
    assert not looks.wrong, looks.wrong[:3]
    assert looks.count > 20


def test_a_snapshot_does_not_change() -> None:
    collector = SyncCollector("CartPole-v1", num_envs=4, frames_per_batch=6, total_frames=12)
    with collector:
        before = collector.ledger
        next(iter(collector))
        after = collector.ledger
        assert (before.stored, before.slots) == (0, 0)
        assert (after.stored, after.carried, after.slots) == (6, 2, 8)
        assert before != after == collector.ledger
        with pytest.raises(AttributeError, match=r"stored: the ledger .* is a read-only snapshot"):
            after.stored = 7
        assert pickle.loads(pickle.dumps(after)) == after
        own: Ledger = copy.copy(after)
        own.stored = 7
        assert (own.stored, after.stored) == (7, 6)
        after.versions.clear()
        assert collector.ledger.versions


def test_metrics_are_of_one_moment() -> None:
    """All parts of metrics come from the same ledger and thus count all frames of a batch."""
    collector = sync_collector(SAME, surplus="discard", frames_per_batch=7, total_frames=42)
    seen: set[tuple[float, ...]] = set()

    def look(*_: Any) -> None:
        found = collector.metrics()
        seen.add((found["frames"], found["discarded"]))

    with collector, traced(str(Path(INSIDE) / "batches"), look):
        for _ in collector:
            pass
    # Ten rows of five lanes make seven rows and three surplus ones. No other number occurs.
    assert seen <= {(7.0 * n, 3.0 * m) for n in range(7) for m in (n, n - 1)}
