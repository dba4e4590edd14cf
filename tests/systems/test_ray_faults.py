"""Test nodes without space or memory, on slow networks, late, and lost with rows on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import ray
import torch
from gymnasium.spaces import Box, Discrete
from loopback_kit import (
    Nodes,
    actors,
    assert_whole,
    children_of,
    collecting,
    inside,
    nothing_left_behind,
    own_nodes,
    raylet_of,
    run_inside,
)

from tallyroll.collector import RayCollector

from worker_faults_kit import wait_until

__all__ = ["nothing_left_behind"]


@pytest.mark.timeout(1600)
def test_in_a_network_namespace() -> None:
    run_inside(__file__)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with own_nodes() as made:
        yield made


@contextmanager
def added(nodes: Nodes, count: int, **options: Any) -> Iterator[list[Any]]:
    """Add nodes for one test. A test removes nodes from the list if it has removed them itself."""
    made = [nodes.add(**options) for _ in range(count)]
    try:
        yield made
    finally:
        wait_until(lambda: not actors(), 30, "actors end")
        for node in made:
            nodes.cluster.remove_node(node)


class Large(gymnasium.Env[Any, Any]):
    """Observations whose numbers all equal the step: a megabyte, by default."""

    def __init__(self, width: int = 250_000, seconds: float = 0.0) -> None:
        self.observation_space = Box(-np.inf, np.inf, (width,), np.float32)
        self.action_space, self.at, self.seconds = Discrete(2), 0, seconds

    def _seen(self) -> Any:
        return np.full(self.observation_space.shape or (), self.at, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Start with step 0."""
        super().reset(seed=seed)
        self.at = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        """Increase the step."""
        time.sleep(self.seconds)
        self.at += 1
        return self._seen(), float(self.at), False, self.at == 50, {}


def check_large(batch: Any) -> None:
    """Check that each number of each row equals its step."""
    step = batch["collector", "step"].float()
    for seen, wanted in ((batch["observation"], step), (batch["next", "observation"], step + 1)):
        assert torch.equal(seen.amin(-1), wanted)
        assert torch.equal(seen.amax(-1), wanted)


def failures_of(collector: RayCollector, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the messages about failed workers."""
    said: list[str] = []
    pool = collector._worker_pool
    heard = pool._receive

    def noted(member: Any) -> Any:
        member, answer = heard(member)
        if isinstance(answer, Exception):
            said.append(str(answer))
        return member, answer

    monkeypatch.setattr(pool, "_receive", noted)
    return said


@inside
@pytest.mark.timeout(600)
def test_rows_that_are_lost_before_they_are_read(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases were filled and answered, and their node dies before the driver fetches them."""
    with (
        added(nodes, 2, num_cpus=1) as alive,
        RayCollector(
            Large,
            num_workers=2,
            mode="async",
            frames_per_batch=20,
            total_frames=301,
            seed=1,
            spares=0,
            heartbeat=0.5,
            on_worker_death="respawn",
            start_timeout=600,
        ) as collector,
    ):
        rows, said = 0, failures_of(collector, monkeypatch)
        link: Any = collector._worker_pool.members[0].link
        fetches, out = link._await, list[Any]()
        for number, batch in enumerate(collector):
            check_large(batch)
            rows += len(batch)
            if number == 1:
                monkeypatch.setattr(link, "_await", lambda *asked: out.append(asked))
            if number == 5:
                refs = [ref for ref, _ in out]
                assert refs
                answered = partial(ray.wait, refs, num_returns=len(refs), timeout=0)
                wait_until(lambda of=answered: not of(fetch_local=False)[1], 60, "answers")
                first = collector.worker_pids[0]
                (lost,) = (
                    node for node in alive if first in [each.pid for each in children_of(node)]
                )
                raylet_of(lost).kill()
                alive[alive.index(lost)] = nodes.add(num_cpus=1)
                for asked in out:
                    fetches(*asked)
        ledger = collector.ledger
        ledger.check()
        assert rows == ledger.stored == 301
        assert ledger.respawned == 1
    assert "Object" in said[0], said[0]


# --- full stores ----------------------------------------------------------------------------------


@inside
@pytest.mark.timeout(600)
def test_rows_that_do_not_fit_are_spilled(nodes: Nodes) -> None:
    """Six leases of 40 MB wait in a store of 80 MB."""
    with (
        added(nodes, 1, object_store_memory=80 * 2**20),
        RayCollector(
            Large,
            num_workers=3,
            mode="async",
            frames_per_batch=120,
            total_frames=301,
            seed=1,
            spares=0,
            start_timeout=600,
        ) as collector,
    ):
        rows, folder = 0, Path(os.environ["RAY_TMPDIR"])
        for batch in collector:
            if not rows:
                wait_until(lambda: any(folder.rglob("ray_spilled_objects*/*")), 60, "spilled")
            rows += len(batch)
            check_large(batch)
        assert rows == collector.ledger.stored == 301
        assert collector.ledger.lost == 0


# --- a slow network -------------------------------------------------------------------------------


@contextmanager
def slow_network(rate: str) -> Iterator[None]:
    """Shape all traffic of the loopback. Check that the traffic exceeded the limit."""
    # The loopback's large packets exceed the bucket and would never pass.
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500"], check=True)
    words = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate]
    done = subprocess.run(
        [*words, "burst", "64kb", "latency", "300ms"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"traffic cannot be shaped here: {done.stderr}")
    try:
        yield
    finally:
        words = ["tc", "-s", "qdisc", "show", "dev", "lo"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "mtu", "65536"], check=True)
    assert "overlimits 0 " not in said, said


@inside
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_slow_network_is_no_dead_one(mode: Any, nodes: Nodes) -> None:
    """Rows of a lease take as long as the limit for the answer to a heartbeat."""
    with (
        added(nodes, 2, num_cpus=2),
        RayCollector(
            partial(Large, 25_000),
            num_workers=3,
            mode=mode,
            frames_per_batch=60,
            total_frames=601,
            seed=1,
            spares=0,
            start_timeout=600,
        ) as collector,
    ):
        rows, batches = 0, iter(collector)
        with slow_network("24mbit"):
            for batch in islice(batches, 4):
                check_large(batch)
                rows += len(batch)
        for batch in batches:
            check_large(batch)
            rows += len(batch)
        ledger = collector.ledger
        ledger.check()
        assert (rows, ledger.stored, ledger.respawned, ledger.lost) == (601, 601, 0, 0)


# --- late, and without memory ---------------------------------------------------------------------


@inside
@pytest.mark.timeout(600)
def test_workers_wait_for_a_node_that_joins_late(nodes: Nodes, tmp_path: Path) -> None:
    """Workers of a dead node find no CPU until another node has some.

    The other workers continue.
    """
    with (
        added(nodes, 1, num_cpus=1) as alive,
        added(nodes, 1, num_cpus=2) as dying,
        collecting(tmp_path, "async", spares=0, heartbeat=0.5, slow=0.01) as collector,
    ):
        killed, joined = 0, 0
        for _ in collector:
            ledger = collector.ledger
            if not killed:
                raylet_of(dying.pop()).kill()
                killed = 1
            elif ledger.respawned >= 2 and not joined:
                joined = ledger.stored + 300
            elif joined and ledger.stored > joined and len(alive) == 1:
                assert len(children_of(alive[0])) > 0
                alive.append(nodes.add(num_cpus=2))
            elif len(alive) == 2 and all(member.ready for member in collector._worker_pool.members):
                break
        late = {each.pid for each in children_of(alive[1])}
        assert len(late & {*collector.worker_pids}) == 2
        ledger.check()
        stored = collector.ledger.stored
    assert_whole(tmp_path, stored, "async")


class Hungry(Large):
    """Takes memory once, in the process that reaches its twentieth step first."""

    def __init__(self, file: Path) -> None:
        super().__init__(width=1)
        self.file, self.steps, self.taken = file, 0, []

    def step(self, action: Any) -> Any:
        """Take memory until Ray intervenes."""
        self.steps += 1
        if self.steps == 20 and not self.file.exists():
            self.file.touch()
            until = time.monotonic() + 60
            while time.monotonic() < until:
                self.taken.append(np.ones(25 * 2**20, np.uint8))
                time.sleep(0.02)
                if len(self.taken) > 160:
                    time.sleep(1)
        return super().step(action)


@inside
@pytest.mark.timeout(600)
def test_an_actor_out_of_memory_is_replaced(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray kills actors on a node that has less free memory than its threshold."""
    memory = psutil.virtual_memory()
    if memory.available < 6 * 2**30:
        pytest.skip("less than 6 GB of memory are free")
    threshold = 1 - (memory.available - 2.5 * 2**30) / memory.total
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{threshold:.3f}")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    file = tmp_path / "hungry"
    with (
        added(nodes, 1),
        RayCollector(
            partial(Hungry, file),
            num_workers=2,
            mode="async",
            frames_per_batch=50,
            total_frames=901,
            seed=1,
            on_worker_death="respawn",
            spares=1,
            start_timeout=600,
        ) as collector,
    ):
        said = failures_of(collector, monkeypatch)
        assert sum(map(len, collector)) == 901
        assert collector.ledger.stored == 901
        assert collector.ledger.respawned >= 1
        collector.ledger.check()
    assert any("was killed by Ray because the node ran out of memory" in each for each in said), (
        said
    )
