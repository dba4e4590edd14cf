"""Test nodes that die, freeze and join late: exactly N rows, none from a node after its death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
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

from worker_faults_kit import wait_until

__all__ = ["nothing_left_behind"]

KILLS = int(os.environ.get("TALLYROLL_RAY_NODES", "1"))


@pytest.mark.timeout(1600)
def test_in_a_network_namespace() -> None:
    run_inside(__file__)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with own_nodes() as made:
        yield made


@inside
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nodes_that_die_while_others_join(mode: str, nodes: Nodes, tmp_path: Path) -> None:
    alive, killed = [nodes.add(), nodes.add()], 0
    with collecting(tmp_path, mode) as collector:
        seen = 0
        for _ in collector:
            ledger = collector.ledger
            if killed < KILLS and ledger.respawned >= seen:
                pids = {*collector.worker_pids}
                with_workers = [
                    node for node in alive if pids & {child.pid for child in children_of(node)}
                ]
                if not with_workers:
                    continue  # the replacements are not ready yet
                victim = with_workers[0]
                raylet_of(victim).kill()
                alive.remove(victim)
                alive.append(nodes.add())
                killed, seen = killed + 1, ledger.respawned + 1
            if killed == KILLS and ledger.respawned >= seen and ledger.stored > 1000:
                break
        stored = collector.ledger.stored
        collector.ledger.check()
    assert_whole(tmp_path, stored, mode)
    wait_until(lambda: not actors(), 30, "actors end")
    for node in alive:
        nodes.cluster.remove_node(node)


@inside
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_node_that_freezes_and_comes_back(mode: str, nodes: Nodes, tmp_path: Path) -> None:
    alive = [nodes.add(), nodes.add()]
    with collecting(tmp_path, mode, heartbeat=0.3) as collector:
        frozen: list[psutil.Process] = []
        slowest, last = 0.0, time.monotonic()
        for number, _ in enumerate(collector):
            now = time.monotonic()
            slowest, last = max(slowest, now - last), now
            if number == 3:
                pid = collector.worker_pids[0]
                node = next(
                    node for node in alive if pid in [each.pid for each in children_of(node)]
                )
                frozen = [raylet_of(node), *children_of(node)]
                for process in frozen:
                    os.kill(process.pid, signal.SIGSTOP)
                on_it = len({each.pid for each in frozen} & {*collector.worker_pids})
            if number > 3 and collector.ledger.respawned >= on_it and collector.ledger.stored > 900:
                break
        for process in frozen:
            os.kill(process.pid, signal.SIGCONT)
        for number, _ in enumerate(collector):
            if number == 3:
                break
        stored = collector.ledger.stored
        collector.ledger.check()
    if mode == "async" and on_it < 3:
        assert slowest < 2, f"others waited {slowest:.1f} s"
    assert_whole(tmp_path, stored, mode)
    wait_until(lambda: not actors(), 30, "actors end")
    for node in alive:
        nodes.cluster.remove_node(node)
