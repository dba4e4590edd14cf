"""Calls of environments in workers: exact in both modes, and robust against failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import level_kit
import numpy as np
import pytest
from level_kit import Levels, require_recorded

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.errors import (
    ArgumentError,
    EnvCallError,
    EnvironmentRefused,
    WorkerDied,
    WorkerHung,
)
from tallyroll.storage import MemmapStorage

from worker_kit import QUICK

RUN: dict[str, Any] = {"num_envs": 5, "frames_per_batch": 7, "total_frames": 84, "seed": 0}
WORKERS: dict[str, Any] = {**RUN, "num_workers": 2}
THREADS: dict[str, Any] = {**WORKERS, "transport": "thread"}
KINDS: dict[str, dict[str, Any]] = {
    "async processes": {**WORKERS, **QUICK, "mode": "async"},
    "sync threads": THREADS,
    "async threads": {**THREADS, "mode": "async"},
}


def calls(run: Any) -> Iterator[int]:
    """Iterate with calls after each batch, and yield the number of each batch."""
    rng = np.random.default_rng(1)
    for number, _ in enumerate(run):
        lanes = None if number % 3 else sorted({*rng.integers(5, size=2).tolist()})
        if number % 2:
            run.env_call("raise_level", float(number), lanes=lanes)
        else:
            run.env_set("level", float(number), lanes=lanes)
        yield number


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_level_that_the_events_say(kind: str) -> None:
    with (
        MemmapStorage() as storage,
        MultiprocessCollector(Levels, **KINDS[kind], storage=storage) as run,
    ):
        for number in calls(run):
            if number == 4:
                run.env_set("level", [1.0, 2.0, 3.0], lanes=[4, 0, 2])
                assert run.env_get("level", lanes=[0, 4, 2]) == [2.0, 1.0, 3.0]
        assert run.ledger.stored == 84
        assert storage.runs[0]["events"] == [{**event, "row": event["at"]} for event in run.events]
        assert require_recorded(storage[:], run.events) > 30  # async workers have many rows waiting


def test_workers_in_step_give_the_rows_and_events_of_one_process() -> None:
    found = []
    for make, options in ((SyncCollector, RUN), (MultiprocessCollector, THREADS)):
        with MemmapStorage() as storage, make(Levels, **options, storage=storage) as run:
            list(calls(run))
            found.append((storage[:], run.events))
    assert (found[0][0] == found[1][0]).all()
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_few_rows_at_a_time_and_episodes(mode: str) -> None:
    """Leases that end early are returned, and the count stays exact."""
    options: dict[str, Any] = {**THREADS, "mode": mode, "total_frames": -1}
    with (
        MemmapStorage() as storage,
        MultiprocessCollector(Levels, **options, storage=storage) as run,
    ):
        for number in range(20):
            assert run.collect(1 + number % 7) == 1 + number % 7
            run.env_set("level", float(number))
        require_recorded(storage[:], run.events)
    options = {**THREADS, "mode": mode, "total_frames": None, "total_episodes": 30}
    with (
        MemmapStorage() as storage,
        MultiprocessCollector(Levels, **options, storage=storage) as run,
    ):
        list(calls(run))
        assert run.ledger.episodes_complete == 30
        # as many rows as async workers have ready
        assert require_recorded(storage[:], run.events) > 10


@pytest.mark.parametrize("kind", ["async processes", "sync threads"])
def test_exceptions_and_values_that_do_not_travel(kind: str) -> None:
    with MultiprocessCollector(Levels, **KINDS[kind]) as run:
        next(iter(run))
        run.env_set("level", [0.0, 1.0, 0.0, 0.0, 2.0])
        with pytest.raises(
            EnvCallError, match=r"lane 1 \(also in lane 4\) raised ValueError"
        ) as raised:
            run.env_call("refuse", 0.0)
        assert (raised.value.failed, raised.value.done) == ([1, 4], [0, 2, 3])
        assert isinstance(raised.value.__cause__, ValueError)
        assert "in refuse" in raised.value.traceback
        with pytest.raises(
            EnvCallError, match="expected a result that can be pickled, got a generator"
        ):
            run.env_call("odd")
        with pytest.raises(ArgumentError, match="expected arguments that can be pickled"):
            run.env_set("level", threading.Lock())
        with pytest.raises(EnvCallError, match="got 'levl'"):
            run.env_get("levl")
        assert [event.get("failed") for event in run.events] == [None, [1, 4], [0, 1, 2, 3, 4]]
        assert sum(map(len, run)) == 77


def vector() -> Any:
    return gymnasium.make_vec("CartPole-v1", 2)


def test_a_system_without_objects_is_refused_and_goes_on() -> None:
    options = {"frames_per_batch": 7, "total_frames": 84, "transport": "thread"}
    with MultiprocessCollector([vector] * 2, **options, validate="off") as run:
        with pytest.raises(EnvironmentRefused, match="CartPoleVectorEnv"):
            run.env_get("gravity")
        assert sum(map(len, run)) == 84


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_dies_is_replaced_and_gets_the_calls_before(mode: str) -> None:
    """The new environments have the level of the old ones from their first reset on."""
    options = {**WORKERS, **QUICK, "mode": mode, "on_worker_death": "respawn"}
    with (
        MemmapStorage() as storage,
        MultiprocessCollector(Levels, **options, storage=storage) as run,
    ):
        batches = iter(run)
        next(batches)
        run.env_set("level", [0.0, 0.0, 0.0, 3.0, 4.0])
        next(batches)
        run.env_call("raise_level", 2.0, lanes=[4])
        with pytest.raises(WorkerDied) as raised:
            run.env_call("end", how="kill", above=2.0)
        assert raised.value.lanes == range(3, 5)
        assert "the call succeeded in lanes 0, 1, 2" in "".join(raised.value.__notes__)
        event = run.events[-1]
        assert (event["name"], event["lanes"], event["failed"]) == ("end", [0, 1, 2], [3, 4])
        list(batches)
        assert (run.ledger.respawned, run.ledger.stored) == (1, 84)
        assert run.env_get("level") == [0.0, 0.0, 0.0, 3.0, 6.0]
        require_recorded(storage[:], run.events)


def test_a_worker_that_failed_while_it_went_on_is_replaced_before_the_call() -> None:
    """The exception occurs between batches, because leases of seven run ahead."""
    options = {**THREADS, "mode": "async", "on_worker_death": "respawn"}
    options |= {"num_envs": 1, "num_workers": 1}
    with (
        MemmapStorage() as storage,
        MultiprocessCollector(Levels, **options, storage=storage) as run,
    ):
        run.env_set("level", 1.0)
        level_kit.fuse[0] = 18  # a step of the third lease raises
        next(iter(run))
        until = time.monotonic() + 10
        while level_kit.fuse[0] and time.monotonic() < until:
            time.sleep(0.01)
        assert run.env_call("raise_level", by=1.0) == [2.0]
        assert run.ledger.respawned == 1
        assert sum(map(len, run)) == 77
        require_recorded(storage[:], run.events)


def test_a_worker_that_hangs_ends_within_its_time() -> None:
    options = {**WORKERS, **QUICK, "step_timeout": 1.0}
    with MultiprocessCollector(Levels, **options) as run:
        next(iter(run))
        run.env_set("level", 1.0, lanes=[0])
        with pytest.raises(WorkerHung, match="within step_timeout=1 seconds"):
            run.env_call("end", "hang", above=0.5)
        with pytest.raises(WorkerHung):
            next(iter(run))
