"""An error that ends the run ends its workers, and the collector remains usable."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.errors import StateError, WorkerRaised
from tallyroll.storage import open_storage

SYNC: dict[str, Any] = {"mode": "sync"}
ASYNC: dict[str, Any] = {"mode": "async"}
SHARDED: dict[str, Any] = {"mode": "async", "sharded": True}


class Breaks(gymnasium.Env[Any, Any]):
    """Environment with episodes of five steps, whose third episode raises."""

    observation_space = spaces.Box(-1, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)
    episodes = 0
    breaks_in = 3
    steps = itertools.count()
    """Counts the steps of all environments of worker threads."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.episodes = 0, self.episodes + 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.episodes == self.breaks_in:
            raise ValueError("broken")
        self.at += 1
        next(self.steps)
        return np.full(1, self.at, np.float32), 1.0, self.at == 5, False, {}


class Works(Breaks):
    """Environment that never raises."""

    breaks_in = -1


def collector(env: Any, **more: Any) -> MultiprocessCollector:
    kwargs: dict[str, Any] = {"num_envs": 2, "num_workers": 2, "frames_per_batch": 10}
    return MultiprocessCollector(env, **(kwargs | {"total_frames": 200, "seed": 0} | more))


def worker_threads() -> int:
    return sum(each.name.startswith("tallyroll-worker") for each in threading.enumerate())


def pipes() -> int:
    """Return the number of open pipes and sockets, without memory that batches may still view."""
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the folder itself
            found += os.readlink(f"/proc/self/fd/{each}").startswith(("pipe:", "socket:"))
    return found


def going(made: MultiprocessCollector, *, sharded: bool) -> Callable[[], object]:
    return (lambda: made.collect(200)) if sharded else (lambda: list(made))


@pytest.mark.parametrize("transport", ["thread", "process"])
@pytest.mark.parametrize("more", [SYNC, ASYNC, SHARDED], ids=["sync", "async", "sharded"])
def test_workers_end_with_the_run(tmp_path: Path, transport: Any, more: dict[str, Any]) -> None:
    sharded, before = "sharded" in more, worker_threads()
    storage = tmp_path / "rows" if sharded else None
    made = collector(Breaks, transport=transport, storage=storage, **more)
    pids, go = made.worker_pids, going(made, sharded=sharded)
    with pytest.raises(Exception, match="broken") as raised:
        go()
    assert not getattr(raised.value, "__notes__", [])
    assert worker_threads() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    stored = made.ledger.stored
    assert made.metrics()["frames"] == stored > 0
    assert len(made.episodes) == made.ledger.episodes_complete
    if not sharded:
        assert made.state_dict()["ledger"]["stored"] == stored
        with pytest.raises(WorkerRaised, match="broken"):
            made.set_seed(1)
    for _ in range(2):
        with pytest.raises(StateError, match="the run ended when WorkerRaised was raised within"):
            go()
        with pytest.raises(StateError, match="the run ended when WorkerRaised was raised within"):
            made.env_get("at")
        made.shutdown()


def test_episodes_of_discarded_rows_are_in_no_log() -> None:
    """In one of six runs, rows of a worker wait for their batch when the other worker raises."""
    for _ in range(30):
        made = collector(Breaks, transport="thread", **ASYNC)
        with pytest.raises(Exception, match="broken"):
            list(made)
        assert made.episodes.total == len(made.episodes) == made.ledger.episodes_complete
        assert all(each.ended_at <= made.ledger.stored for each in made.episodes)


def test_errors_of_this_process_end_workers_too() -> None:
    def refuse(batch: Any) -> Any:
        raise RuntimeError("refused")

    before = worker_threads()
    made = collector(Works, transport="thread", postproc=refuse)
    assert worker_threads() == before + 2
    with pytest.raises(RuntimeError, match="refused"):
        list(made)
    assert worker_threads() == before
    with pytest.raises(StateError, match="the run ended when RuntimeError"):
        list(made)
    with pytest.raises(StateError, match="set_seed: the workers ended, because"):
        made.set_seed(1)
    made.shutdown()


def test_collectors_that_are_left_open_hold_no_pipe() -> None:
    left, before = [], (worker_threads(), pipes())
    for _ in range(4):
        left.append(collector(Breaks, transport="thread"))
        with pytest.raises(Exception, match="broken"):
            list(left[-1])
    assert (worker_threads(), pipes()) == before
    for made in left:
        made.shutdown()


def test_an_exception_that_loses_nothing_ends_no_worker() -> None:
    with collector(Works, transport="thread", frames_per_batch=20, total_frames=40) as made:
        before = worker_threads()
        batches = iter(made)
        next(batches)
        with pytest.raises(
            StateError, match="load_state_dict: this collector has already collected"
        ):
            made.load_state_dict(made.state_dict())
        assert worker_threads() == before
        assert len(next(batches)) == 20
        assert list(batches) == []
        assert worker_threads() == before, "a run that is complete keeps them until it is closed"


class Slow(Works):
    """Environment with slow steps, so that leases are open when another worker raises."""

    made: ClassVar[list[Any]] = []
    """The actions of all environments of this class."""

    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        self.made.append(action)
        return super().step(action)


class BreaksLater(Breaks):
    """Environment that raises when a `Slow` environment has made eight more steps."""

    def step(self, action: Any) -> Any:
        if self.episodes == self.breaks_in:
            slow, until = len(Slow.made), time.monotonic() + 60
            while len(Slow.made) < slow + 8 and time.monotonic() < until:
                time.sleep(0.01)
        return super().step(action)


def test_shards_count_once_all_leases_of_a_worker_come_back_together(tmp_path: Path) -> None:
    made = collector(
        [BreaksLater, Slow],
        num_envs=None,
        transport="thread",
        storage=tmp_path / "rows",
        frames_per_batch=10,
        **SHARDED,
    )
    with pytest.raises(WorkerRaised, match="broken") as raised:
        made.collect(200)
    assert not getattr(raised.value, "__notes__", [])
    made.shutdown()
    with open_storage(tmp_path / "rows") as storage:
        assert len(storage) == made.ledger.stored
        slow = storage[:]["collector", "lane"] == 1
    assert slow.sum() > 0
    assert made.ledger.lost == 0


def test_the_ledger_of_shards_has_the_steps_before_an_error(tmp_path: Path) -> None:
    Breaks.steps = itertools.count()
    made = collector(
        Breaks, transport="thread", storage=tmp_path / "rows", frames_per_batch=64, **SHARDED
    )
    with pytest.raises(WorkerRaised, match="broken"):
        made.collect(200)
    made.shutdown()
    assert made.ledger.executed == next(Breaks.steps)
    assert made.ledger.stored + made.ledger.lost + made.ledger.discarded == made.ledger.executed
