"""Seeds, workers and ends change at awkward moments while other workers step."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.errors import StateError, WorkerDied, WorkerHung, WorkerRaised
from tallyroll.collector.workers import messages
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.pool import WorkerPool
from tallyroll.storage import open_storage
from tallyroll.storage.ext.verification.storage_checks import verify

from collect_kit import balanced, joined
from oracles import OracleEnv, check_rows
from worker_kit import (
    DISABLED,
    LENGTHS,
    NEXT,
    RecordingPolicy,
    Versioned,
    collect_all,
    slow_factories,
    start,
    worker_collector,
)

MODES = ("sync", "async")


class Bad(OracleEnv):
    """Oracle with a step that raises or hangs."""

    def __init__(self, *args: Any, at: int, hangs: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at, self.hangs = at, hangs

    def step(self, action: Any) -> Any:
        """Fail once."""
        if self.steps_taken == self.at:
            self.at = -1
            if self.hangs:
                time.sleep(1000)
            raise RuntimeError("boom")
        return super().step(action)


def vec(first: int, lanes: int, *, at: int = -1, hangs: bool = False) -> SyncVectorEnv[Any, Any]:
    """Return lanes of which the first fails at step `at`."""
    makes = [
        partial(Bad, lane, LENGTHS, ends="mixed", at=at if lane == first else -1, hangs=hangs)
        for lane in range(first, first + lanes)
    ]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)


def only_once(flag: Path, lanes: int) -> SyncVectorEnv[Any, Any]:
    """Make lanes that fail in a step and cannot be made again."""
    if flag.exists():
        raise RuntimeError("no second time")
    flag.touch()
    return vec(0, lanes, at=13)


def assert_right(path: Path, collector: MultiprocessCollector) -> None:
    """Check the ledger's balance, the number of stored rows, and every row."""
    ledger = collector.ledger
    assert balanced(ledger), ledger.counts()
    with open_storage(path) as storage:
        assert storage.head == ledger.stored
        if storage.head:
            rows = storage.get(slice(0, storage.head))
            check_rows(rows, LENGTHS, ends="mixed", contiguous=False)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_new_worker_that_fails_as_it_begins(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that the previous worker never filled are not rows."""
    ask = WorkerPool.ask

    def failing(self: WorkerPool, member: Member, message: object) -> None:
        if isinstance(message, messages.Begin) and collector.ledger.respawned:
            if how == "interrupted":
                raise KeyboardInterrupt
            assert member.link.pid is not None
            os.kill(member.link.pid, signal.SIGKILL)
        ask(self, member, message)

    monkeypatch.setattr(WorkerPool, "ask", failing)
    collector = start(
        [partial(vec, 0, 2, at=25), partial(vec, 2, 2)],
        frames_per_batch=80,
        total_frames=400,
        storage=tmp_path / "data",
        on_worker_death="respawn",
        max_respawns=1,
    )
    error = KeyboardInterrupt if how == "interrupted" else WorkerDied
    with collector, pytest.raises(error):
        for _ in collector:
            pass
    assert collector.ledger.stored == 80 + 40  # rows of the other worker
    assert_right(tmp_path / "data", collector)


@pytest.mark.parametrize("others", [[], [partial(vec, 3, 2)]])
def test_a_worker_that_cannot_be_replaced(others: list[Any], tmp_path: Path) -> None:
    """The rows of the worker are counted, and the error names the reason."""
    collector = start(
        [partial(only_once, tmp_path / "flag", 3), *others],
        frames_per_batch=10,
        total_frames=400,
        storage=tmp_path / "data",
        on_worker_death="respawn",
        max_respawns=2,
    )
    with collector, pytest.raises(WorkerRaised, match="no second time"):
        for _ in collector:
            pass
    # The step of the failed lane is not counted.
    assert collector.ledger.executed >= 13 * 3
    assert_right(tmp_path / "data", collector)


@pytest.mark.parametrize("mode", MODES)
def test_stop_while_a_worker_is_replaced(mode: str) -> None:
    with start(
        [partial(vec, 0, 3, at=13)],
        mode=mode,
        frames_per_batch=10,
        total_frames=100_000,
        on_worker_death="respawn",
        max_respawns=100_000,
    ) as collector:

        def stop() -> None:
            while not collector.ledger.respawned:
                time.sleep(0.001)
            collector.stop()

        thread = threading.Thread(target=stop)
        thread.start()
        began = time.monotonic()
        for _ in collector:
            assert time.monotonic() < began + 30
        thread.join()
    assert collector.ledger.stored < 100_000
    assert balanced(collector.ledger)


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_after_a_worker_failed(mode: str) -> None:
    """A second call raises the same error instead of waiting forever."""
    with start(
        [partial(vec, 0, 2, at=12)], mode=mode, frames_per_batch=20, total_frames=400
    ) as collector:
        batches = iter(collector)
        next(batches)
        if mode == "sync":
            with pytest.raises(WorkerRaised, match="boom"):
                next(batches)
        else:
            time.sleep(0.5)  # it fails ahead of the consumer
        with pytest.raises(WorkerRaised, match="boom"):
            collector.set_seed(5)
        with pytest.raises(StateError, match="the run ended when WorkerRaised was raised"):
            list(collector)
    assert balanced(collector.ledger)


@pytest.mark.slow
def test_a_seed_while_steps_take_seconds() -> None:
    """Slow workers are not replaced, and the run continues."""
    with start(
        slow_factories(2, 2, seconds=1.2), mode="async", frames_per_batch=2, total_frames=6
    ) as collector:
        batches = iter(collector)
        next(batches)
        collector.set_seed(5)
        assert sum(len(batch) for batch in batches) == 4
    assert collector.ledger.respawned == 0
    assert balanced(collector.ledger)


@pytest.mark.parametrize("mode", MODES)
def test_random_frames_across_a_new_seed(mode: str) -> None:
    """Discarded random frames are drawn again."""
    with worker_collector(
        DISABLED,
        2,
        RecordingPolicy(),
        mode=mode,
        frames_per_batch=10,
        total_frames=200,
        init_random_frames=50,
    ) as collector:
        batches = []
        for batch in collector:
            batches.append(batch)
            if len(batches) == 1:
                time.sleep(0.3)
                collector.set_seed(3)
    version = joined(batches)["collector", "policy_version"]
    assert int((version == -1).sum()) == collector.ledger.random == 50


def test_random_frames_come_first_in_every_lane(tmp_path: Path) -> None:
    """Resets take slots, so that leases return fewer rows than they could."""
    with worker_collector(
        NEXT,
        2,
        Versioned(),
        mode="async",
        frames_per_batch=30,
        total_frames=301,
        init_random_frames=101,
        storage=tmp_path / "data",
    ) as collector:
        for batch in collector:
            del batch
            collector.update_policy_weights_()
    with open_storage(tmp_path / "data") as storage:
        rows = storage.get(slice(0, storage.head))
    version = rows["collector", "policy_version"]
    assert int((version == -1).sum()) == 101
    for lane in range(5):
        own = version[rows["collector", "lane"] == lane]
        assert (own.diff() >= 0).all()
    assert not verify(tmp_path / "data").findings


def test_a_hang_beside_a_busy_worker() -> None:
    began = time.monotonic()
    with start(
        [partial(vec, 0, 1), partial(vec, 1, 1, at=5, hangs=True)],
        mode="async",
        frames_per_batch=200,
        total_frames=-1,
        step_timeout=1.0,
    ) as collector:
        batches = iter(collector)
        with pytest.raises(WorkerHung, match="lane 1"):  # noqa: PT012
            while time.monotonic() < began + 30:
                next(batches)


def test_a_worker_killed_while_idle_lost_nothing() -> None:
    """Leases from before a new seed are not confused with later ones."""
    with worker_collector(
        DISABLED,
        2,
        lanes=2,
        mode="async",
        frames_per_batch=9,
        total_frames=10,
        on_worker_death="respawn",
    ) as collector:
        batches = iter(collector)
        next(batches)
        time.sleep(0.2)
        collector.set_seed(3)
        victim = psutil.Process(collector.worker_pids[0])
        victim.kill()
        time.sleep(0.2)
        assert sum(map(len, batches)) == 1
    assert collector.ledger.lost == 0
    assert balanced(collector.ledger)


def test_weights_that_could_not_be_published() -> None:
    """Rows have the version that chose their actions."""
    policy = Versioned()
    with worker_collector(DISABLED, 2, policy, frames_per_batch=10, total_frames=40) as collector:
        batches = iter(collector)
        next(batches)
        policy.set_to(1)
        publish = collector._weights.publish

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        collector._weights.publish = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            collector.update_policy_weights_()
        collector._weights.publish = publish  # type: ignore[method-assign]
        for batch in batches:
            assert torch.equal(batch["collector", "policy_version"].float(), batch["low"])


@pytest.mark.parametrize("mode", MODES)
def test_an_iterator_yields_nothing_after_the_collector_exited(mode: str, tmp_path: Path) -> None:
    """SystemExit, for example from a handler of SIGTERM, ends the run like any error."""
    done = 0

    def leave(td: Any) -> Any:
        nonlocal done
        done += 1
        if done == 3:
            raise SystemExit(4)
        return td

    collector = worker_collector(
        NEXT,
        2,
        RecordingPolicy(),
        mode=mode,
        frames_per_batch=10,
        total_frames=100,
        postproc=leave,
        storage=tmp_path / "data",
    )
    run = None
    with collector:
        with pytest.raises(SystemExit):
            run = collect_all(collector)
        assert run is None
        with pytest.raises(StateError, match="the run ended when SystemExit was raised"):
            list(collector)
    assert collector.ledger.stored == 20
    assert_right(tmp_path / "data", collector)
