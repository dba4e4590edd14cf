"""Nodes of a cluster that die, freeze and join late: exactly N, and nothing of a dead one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from loopback_kit import actors, folder_of_ray, inside, nothing_left_behind, run_inside
from ray.cluster_utils import Cluster

from tallyroll.collector import RayCollector
from tallyroll.storage import open_storage, verify

from worker_faults_kit import Faults, check_lives, factories, wait_until

__all__ = ["nothing_left_behind"]

KILLS = int(os.environ.get("TALLYROLL_RAY_NODES", "1"))
LANES = 6


@pytest.mark.timeout(1600)
def test_in_a_network_namespace() -> None:
    run_inside(__file__)


class Nodes:
    """A head without workers, and nodes that have them."""

    def __init__(self, folder: Path) -> None:
        self._more = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
        head = {**self._more, "num_cpus": 0, "temp_dir": str(folder)}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(self) -> Any:
        """Let another node join."""
        return self.cluster.add_node(num_cpus=6, object_store_memory=100 * 2**20)


def raylet_of(node: Any) -> psutil.Process:
    """The process that has the actors of a node for children."""
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with folder_of_ray() as folder:
        made = Nodes(folder)
        ray.init(address=made.cluster.address, log_to_driver=False, logging_level="ERROR")
        yield made
        ray.shutdown()
        made.cluster.shutdown()


def collecting(folder: Path, mode: Any, **options: Any) -> RayCollector:
    """A run of three workers."""
    return RayCollector(
        factories(Faults(folder), LANES, 3, slow=0.002),
        None,
        mode=mode,
        storage=folder / "rows",
        on_worker_death="respawn",
        max_respawns=1000,
        frames_per_batch=50,
        total_frames=-1,
        seed=1,
        **options,
    )


def assert_whole(folder: Path, stored: int, mode: str) -> None:
    """The storage has so many rows, each really made."""
    with open_storage(folder / "rows") as storage:
        assert len(storage) == stored
        check_lives(storage[:], LANES, gaps=mode == "async")
    assert verify(folder / "rows").sound


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
                victim = next(
                    node
                    for node in alive
                    if {child.pid for child in raylet_of(node).children(recursive=True)}
                    & {*collector.worker_pids}
                )
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
                    node
                    for node in alive
                    if pid in [each.pid for each in raylet_of(node).children(recursive=True)]
                )
                frozen = [raylet_of(node), *raylet_of(node).children(recursive=True)]
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
