"""Test many actors for a long time: memory is constant, and each row is right.

``TALLYROLL_RAY_ACTORS`` sets the number of actors, 3 by default, and ``TALLYROLL_RAY_MINUTES`` the
minutes, half of one by default. With ``TALLYROLL_RAY_WARM=1``, many actors start quickly and fit
into memory. Memory use is logged (``--log-cli-level INFO``).
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from loopback_kit import actors, inside, nothing_left_behind, own_ray, run_inside

from tallyroll.collector import RayCollector

__all__ = ["nothing_left_behind"]

_log = logging.getLogger(__name__)
ACTORS = int(os.environ.get("TALLYROLL_RAY_ACTORS", "3"))
SECONDS = 60 * float(os.environ.get("TALLYROLL_RAY_MINUTES", "0.5"))
LONGEST = int(600 + SECONDS + 60 * ACTORS)
LENGTH, LANES, WIDTH = 100, 2, 512
"""Length of episodes, lanes per actor, and width of observations.

The width is large enough that answers go through Ray's object store.
"""


@pytest.mark.timeout(LONGEST + 200)
def test_in_a_network_namespace() -> None:
    run_inside(__file__)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray(num_cpus=ACTORS + 2):
        yield


class Lane(gymnasium.Env[Any, Any]):
    """Observations contain lane, episode and step.

    All lanes together make 1,280 rows per second.
    """

    def __init__(self, lane: int) -> None:
        self.observation_space = Box(-np.inf, np.inf, (WIDTH,), np.float32)
        self.action_space, self.lane, self.episode, self.at = Discrete(2), lane, 0, 0

    def _seen(self) -> Any:
        seen = np.full(WIDTH, self.at, np.float32)
        seen[:2] = self.lane, self.episode
        return seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Start the next episode."""
        super().reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        """Increase the step."""
        time.sleep(ACTORS / 1280)
        self.at += 1
        return self._seen(), 1.0, False, self.at == LENGTH, {}


def lanes_of(actor: int) -> Any:
    """Return the environment of an actor."""
    own = range(actor * LANES, (actor + 1) * LANES)
    return SyncVectorEnv(
        [partial(Lane, lane) for lane in own], autoreset_mode=AutoresetMode.DISABLED
    )


class Judge:
    """Checks that each row follows the previous one of its lane, or starts a later episode."""

    def __init__(self) -> None:
        self.last = np.zeros((ACTORS * LANES, 2))
        self.rows = 0

    def look(self, batch: Any) -> None:
        """Check a batch."""
        seen, after = (batch[key].numpy() for key in ("observation", ("next", "observation")))
        assert (seen[:, 2:] == seen[:, 2, None]).all()
        assert (after - seen == [0, 0] + [1] * (WIDTH - 2)).all()
        for lane in np.unique(seen[:, 0]).astype(int):
            own = np.vstack([self.last[lane], seen[seen[:, 0] == lane, 1:3]])
            (episode, step), (later, now) = own[:-1].T, own[1:].T
            follows = (later == episode) & (now == step + 1)
            begins = (later > episode) & (now == 0)
            assert (follows | begins).all(), f"lane {lane}: {own}"
            self.last[lane] = own[-1]
        self.rows += len(batch)


def memory() -> dict[str, float]:
    """Return MiB of this process, of all actors and of one, of Ray, and of data from its store."""
    of: dict[str, list[Any]] = {"actor": [], "ray": []}
    known, me = {*actors()}, psutil.Process()
    for process in me.children(recursive=True):
        with suppress(psutil.Error):  # it may end meanwhile
            of["actor" if process.pid in known else "ray"].append(process.memory_full_info())
    own = [each.uss for each in of["actor"]]
    found = {
        "driver": me.memory_info().rss,
        "store": sum(each.rss for each in me.memory_maps() if "plasma" in each.path),
        "actors": sum(each.pss for each in of["actor"]),
        "uss of one": statistics.median(own) if own else 0,
        "ray": sum(each.pss for each in of["ray"]),
    }
    left = psutil.virtual_memory().available
    assert left > 3 * 2**30, "this machine has no memory left"
    found["left"] = left
    return {name: value / 2**20 for name, value in found.items()}


@inside
@pytest.mark.timeout(LONGEST)
def test_memory_is_flat_and_rows_are_right() -> None:
    judge, samples = Judge(), []
    with RayCollector(
        [partial(lanes_of, actor) for actor in range(ACTORS)],
        None,
        mode="async",
        frames_per_batch=64 * ACTORS,
        total_frames=-1,
        seed=1,
        spares=0,
        heartbeat=5,  # on a busy machine, one of many may wait for seconds
        start_timeout=LONGEST,
    ) as collector:
        began, due = time.monotonic(), 0.0
        for batch in collector:
            judge.look(batch)
            now = time.monotonic() - began
            if now >= due:
                due, found = now + SECONDS / 60, memory()
                samples.append(found)
                said = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
                _log.info("%.0f s, rows %d, MiB: %s", now, judge.rows, said)
            if now >= SECONDS:
                break
        ledger = collector.ledger
        assert len(collector.worker_pids) == ACTORS
    ledger.check()
    assert judge.rows == ledger.stored
    assert ledger.lost == ledger.respawned == 0
    assert (judge.last[:, 0] > 0).all()
    quarter = len(samples) // 4
    assert quarter
    for name in ("driver", "store", "actors"):  # Ray's server keeps events of 100,000 calls
        warm, end = (
            statistics.median(each[name] for each in part)
            for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        assert end < 1.02 * warm + 8, f"{name}: from {warm:.1f} to {end:.1f} MiB"
