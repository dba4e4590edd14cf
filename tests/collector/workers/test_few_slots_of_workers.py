"""``collect(n)`` of few slots with workers gives the rows of one process in all circumstances."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.base import Collector
from tallyroll.collector.batches.fast_collect import FastPath
from tallyroll.collector.errors import StateError, WorkerDied
from tallyroll.collector.native.kernel import compiled
from tallyroll.storage import MemmapStorage, fast_paths, open_storage, verify

import worker_faults_kit
from collect_kit import assert_same, balanced
from oracles import check_rows
from pairs import each_pair
from random_runs import flat
from traced_code import Interruption
from worker_faults_kit import Fault, Faults, How, check_ledger, check_lives, no_process_left
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    RecordingPolicy,
    SlowPolicy,
    in_threads,
    sync_collector,
    worker_collector,
)

__all__ = ["no_process_left"]

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no compiler")

POLICIES: dict[str, Callable[[], Any]] = {
    "random": lambda: None,
    "policy": RecordingPolicy,
    "delays": SlowPolicy,
}
CALLS = {"lanes": [LANES], "odd": [1, LANES, 2 * LANES + 1, 3, LANES - 1, 4 * LANES, LANES]}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the slots that the fast path stored, and those that it did not."""
    store, counts = FastPath.store, [0, 0]

    def counted(self: FastPath, *given: Any) -> bool:
        stored = store(self, *given)
        counts[not stored] += 1
        return stored

    monkeypatch.setattr(FastPath, "store", counted)
    return counts


def collected(make: Callable[..., Collector], calls: str, storage: MemmapStorage) -> Any:
    """Collect all rows with some updates of weights.

    Return the rows, the record, the ledger and the episodes.
    """
    wants = cycle(CALLS[calls])
    with make(frames_per_batch=LANES, total_frames=203, storage=storage, seed=1) as collector:
        for number in range(1000):
            if number % 3 == 2 and collector.policy_version >= 0:
                collector.update_policy_weights_()
            if collector.collect(want := next(wants)) < want:
                break
    slots = storage.slots_of(np.array(storage.span, np.int64))
    rows = flat(storage.get(torch.from_numpy(slots)).clone())
    return rows, storage.record, collector.ledger.counts(), [*collector.episodes]


@each_pair(
    source=[DISABLED, NEXT, SAME, "avoided", "torch"], policy=POLICIES, calls=CALLS, ring=[None, 40]
)
def test_rows_are_those_of_one_process(
    source: str, policy: str, calls: str, ring: int | None, tmp_path: Path, at_once: list[int]
) -> None:
    found = []
    for way in ("one process", "at once", "longer", "three workers"):
        workers = {"one process": 0, "three workers": 3}.get(way, 2)
        make = partial(sync_collector, source)
        if workers:
            make = partial(worker_collector, source, workers, mode="sync")
        off = ("fast-collect",) if way == "longer" else ()
        before = at_once[0]
        storage = MemmapStorage(tmp_path / way, max_size=ring)
        with in_threads(), fast_paths.switched_off(*off), storage:
            made = partial(make, POLICIES[policy](), finals="kept")
            found.append(collected(made, calls, storage))
        assert (at_once[0] - before > 15) is (way != "longer"), at_once
        assert verify(tmp_path / way).sound
    (rows, record, ledger, episodes), *others = found
    assert ledger["stored"] == 203
    for other in others:
        assert_same(rows, other[0])
        assert other[1:] == (record, ledger, episodes)


def test_calls_and_batches_take_turns(tmp_path: Path, at_once: list[int]) -> None:
    """The extension and the workers share the state of filled slots in both directions."""
    make: dict[str, Callable[..., Collector]] = {
        "one": partial(sync_collector, NEXT, RecordingPolicy()),
        "many": partial(worker_collector, NEXT, 2, RecordingPolicy()),
    }
    found = []
    for name, each in make.items():
        with in_threads(), MemmapStorage(tmp_path / name) as storage:
            run: dict[str, Any] = {"frames_per_batch": 17, "total_frames": -1, "seed": 1}
            with each(storage=storage, finals="kept", **run) as collector:
                for number in range(12):
                    for n in (LANES, 2 * LANES, 3, 50):
                        collector.collect(n)
                    next(iter(collector))
                    if number == 7:
                        collector.set_seed(5)
            found.append((flat(storage.get(slice(None)).clone()), collector.ledger.counts()))
    assert at_once[0] > 40
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(("how", "n"), [("raise", 4), ("exit", 8), ("exit", 6)])
def test_workers_that_fail_are_replaced(
    how: How, n: int, tmp_path: Path, at_once: list[int]
) -> None:
    """The counts equal those of the slow path, and every row was made by a step."""
    found = []
    for way in ("at once", "longer"):
        folder = tmp_path / way
        (folder / "faults").mkdir(parents=True)
        faults = Faults(folder / "faults", [Fault("step", how, 1, 21), Fault("step", how, 2, 43)])
        before = at_once[0]
        with (
            fast_paths.switched_off(*(("fast-collect",) if way == "longer" else ())),
            MultiprocessCollector(
                worker_faults_kit.factories(faults, 4, 2),
                frames_per_batch=4,
                total_frames=400,
                storage=folder / "rows",
                seed=1,
                finals="kept",
                on_worker_death="respawn",
                mp_start_method="forkserver",
            ) as collector,
        ):
            while collector.collect(n) == n:
                assert collector.ledger.executed >= collector.ledger.stored
        assert (at_once[0] - before > 20) is (way == "at once")
        ledger = collector.ledger
        assert (ledger.respawned, ledger.stored) == (2, 400)
        with open_storage(folder / "rows") as storage:
            rows = storage.get(slice(None))
        assert sum(check_lives(rows, 4)) == 8
        check_ledger(ledger, rows, faults, 4)
        found.append((flat(rows.clone()), ledger.counts()))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def killable(path: Path, seconds: float = 0.0, **options: Any) -> MultiprocessCollector:
    """Return a collector with two workers whose steps take `seconds`."""
    (path / "faults").mkdir()
    create = worker_faults_kit.factories(Faults(path / "faults"), 4, 2, slow=seconds)
    if options.get("transport") != "thread":
        options["mp_start_method"] = "forkserver"
    run: dict[str, Any] = {"frames_per_batch": 4, "total_frames": -1, "finals": "kept"}
    return MultiprocessCollector(create, storage=path / "rows", **run, **options)


def collect_for_ever(collector: Collector, n: int) -> None:
    while True:
        collector.collect(n)


def seconds_until_noticed(path: Path, when: str, worker: int) -> float:
    """Kill a worker, and return how long it took to notice.

    The run must have all rows that it counted.
    """
    path.mkdir()
    killed: list[float] = []

    def kill(pid: int) -> None:
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    within = when == "within a step"
    with killable(path, 0.15 if within else 0.0) as collector:
        for _ in range(4 if within else 30):
            collector.collect(4)
        pid = collector.worker_pids[worker]
        if within:
            threading.Timer(0.1, kill, [pid]).start()
        else:
            kill(pid)
            time.sleep(0.1)
        with pytest.raises(WorkerDied, match=f"worker {worker} .* was killed by SIGKILL"):
            collect_for_ever(collector, 4)
        noticed = time.monotonic() - killed[0]
        ledger = collector.ledger
    assert balanced(ledger)
    with open_storage(path / "rows") as storage:
        assert storage.head == ledger.stored
        check_lives(storage.get(slice(0, storage.head)), 4)
    assert verify(path / "rows").sound
    return noticed


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("when", ["between calls", "within a step"])
def test_a_worker_that_was_killed_is_noticed_at_once(
    when: str, worker: int, tmp_path: Path, at_once: list[int]
) -> None:
    # The other worker may finish its step before it is idle.
    limit, noticed = 1.2 if when == "within a step" else 0.6, []
    while not noticed or min(noticed) >= limit:
        assert len(noticed) < 4, noticed  # a busy machine may take longer
        noticed.append(seconds_until_noticed(tmp_path / str(len(noticed)), when, worker))
        assert at_once[0]


def interrupt(*_: Any) -> None:
    raise Interruption


@pytest.mark.parametrize("slots", [1, 3])
def test_an_exception_of_a_handler_leaves_workers_at_rest(slots: int, tmp_path: Path) -> None:
    """The exception occurs while workers step. Slots that all workers completed are stored."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with killable(tmp_path, 0.05) as collector:
            for _ in range(4):
                collector.collect(4)
            stored = collector.ledger.stored
            signal.setitimer(signal.ITIMER_REAL, 0.13)
            with pytest.raises(Interruption):
                collect_for_ever(collector, 4 * slots)
            with suppress(StateError):
                collector.collect(4)
            ledger = collector.ledger
            assert balanced(ledger)
            assert ledger.stored >= stored
            assert ledger.lost == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with open_storage(tmp_path / "rows") as storage:
        assert storage.head == ledger.stored
        check_lives(storage.get(slice(0, storage.head)), 4)


@pytest.mark.parametrize(("slots", "transport"), [(1, "process"), (3, "process"), (3, "thread")])
def test_after_a_signal_the_run_goes_on(
    slots: int, transport: str, tmp_path: Path, at_once: list[int]
) -> None:
    """The handler runs after the present steps, and nothing is lost."""
    before = signal.signal(signal.SIGTERM, interrupt)
    raised = 0
    try:
        with killable(tmp_path, 0.02, transport=transport) as collector:
            for number in range(20):
                timer = threading.Timer(0.03, os.kill, [os.getpid(), signal.SIGTERM])
                if number % 4 == 3:
                    timer.start()
                try:
                    collector.collect(4 * slots)
                    if number % 4 == 3:
                        timer.join()  # the handler runs here at the latest
                except Interruption:
                    raised += 1
            ledger = collector.ledger
            assert ledger.executed == ledger.stored + ledger.carried
            assert collector.plan.commits.way == "one call"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised == 5
    assert at_once[0] > 7
    assert balanced(ledger)
    assert ledger.lost == 0
    with open_storage(tmp_path / "rows") as storage:
        assert storage.head == ledger.stored
        check_lives(storage.get(slice(0, storage.head)), 4)


def test_lanes_of_workers_start_where_they_are(tmp_path: Path) -> None:
    with (
        in_threads(),
        worker_collector(
            DISABLED, 2, frames_per_batch=LANES, total_frames=300, storage=tmp_path / "rows"
        ) as collector,
    ):
        assert collector.plan.commits.way == "one call"
        while collector.collect(LANES) == LANES:
            pass
    with open_storage(tmp_path / "rows") as storage:
        check_rows(storage.get(slice(None)), LENGTHS, ends="mixed", from_start=True)
