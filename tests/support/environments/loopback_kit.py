"""A Ray cluster for one test module, in a network namespace that has only a loopback.

``TALLYROLL_RAY_KILLS`` is the number of actors to kill at random, 3 by default. Timeouts grow with
it. ``TALLYROLL_RAY_SEED`` seeds the choice. With ``TALLYROLL_RAY_WARM=1`` actors are forks of one
process (`warm_actors`), and each starts in 0.2 seconds of CPU time instead of 4. If the run takes
more than ten minutes, pass ``-o faulthandler_timeout=0`` to pytest.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import ray
import warm_actors
from ray.cluster_utils import Cluster

from tallyroll.collector import RayCollector
from tallyroll.storage import open_storage, verify

from worker_faults_kit import Fault, Faults, check_lives, factories, wait_until

INSIDE = "TALLYROLL_LOOPBACK"
SHORT = os.environ.get("TALLYROLL_RAY") == "short"
"""Only a few of these tests run, as in `check.sh --all`."""
KILLS = int(os.environ.get("TALLYROLL_RAY_KILLS", "3"))
SEED = int(os.environ.get("TALLYROLL_RAY_SEED", KILLS))
WARM = "TALLYROLL_RAY_WARM" in os.environ
SECONDS_OF_KILLS = 120 + 60 * KILLS
"""Timeout of a test with all kills: under load an actor may take most of a minute to start."""
SECONDS_OF_ALL = 1500 + 3 * 60 * max(0, KILLS - 3)
"""Timeout for all tests of a file."""
LANES = 6
_ENTER = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise Ray warns of this future default
    "RAY_worker_niceness": "0",  # otherwise actors yield to all other processes
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

_OUTSIDE = "runs in a network namespace"
inside = pytest.mark.skipif(INSIDE not in os.environ, reason=_OUTSIDE)
"""Mark for the tests that :func:`run_inside` runs."""


def run_inside(file: str, short: str = "") -> None:
    """Run the tests of a file that are marked `inside`, in their own namespace.

    ``short`` selects the tests of the short form, like pytest's ``-k``. "" means that there is
    none.
    """
    if INSIDE in os.environ:
        pytest.skip("this is the namespace")
    if SHORT and not short:
        pytest.skip("the short form leaves these out: check.sh --apart ray runs them")
    if subprocess.run([*_ENTER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    words += ["-o", "faulthandler_timeout=0"]  # each test has its own timeout
    words += ["-k", short] if SHORT else []
    ours = {**os.environ, **_SETTINGS, INSIDE: "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ours.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*_ENTER, *words],
        env=ours,
        capture_output=True,
        text=True,
        timeout=SECONDS_OF_ALL,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout[-8000:]
    assert _OUTSIDE not in done.stdout, "what is to run in the namespace was skipped there"


@contextmanager
def folder_of_ray() -> Iterator[Path]:
    """Make a temporary folder with a short name, because socket paths are limited.

    No process outlives the folder.
    """
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    (folder / "ray").mkdir()  # Ray keeps an address here, instead of in the folder of another Ray
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        wait_until(lambda: not _called("ray", "gcs_server"), 30, "processes of Ray end")
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def own_ray(**options: Any) -> Iterator[None]:
    """Start a cluster of one node and connect to it. Outside the namespace, do nothing."""
    if INSIDE not in os.environ:
        yield
        return
    with folder_of_ray() as folder:
        given: dict[str, Any] = {"num_cpus": 12, "object_store_memory": 200 * 2**20, **options}
        with _python_of_actors(folder) as python:
            with patch.object(sys, "executable", python):
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder),
                    **given,
                )
            try:
                yield
            finally:
                ray.shutdown()


@contextmanager
def _python_of_actors(folder: Path) -> Iterator[str]:
    """Yield the program that starts Ray's actors: Python, or a script that requests a fork."""
    if not WARM:
        yield sys.executable
        return
    kit, asking, at = warm_actors.__file__, folder / "python", folder / "forks"
    asking.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {kit} ask {at} "$@"\n')
    asking.chmod(0o700)
    # The server ends when its standard input closes.
    with subprocess.Popen([sys.executable, kit, "serve", at], stdin=subprocess.PIPE):
        wait_until(at.exists, 60, "a process that forks")
        yield str(asking)


class Nodes:
    """A head node without workers, and nodes that have workers."""

    def __init__(self, folder: Path) -> None:
        self._more = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
        head = {**self._more, "num_cpus": 0, "temp_dir": str(folder)}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(self, **options: Any) -> Any:
        """Add a node."""
        given = {"num_cpus": 6, "object_store_memory": 100 * 2**20, **options}
        return self.cluster.add_node(**given)


@contextmanager
def own_nodes(*, connected: bool = True) -> Iterator[Nodes]:
    """Start a cluster of several nodes and connect to it."""
    with folder_of_ray() as folder:
        made = Nodes(folder)
        try:
            if connected:
                ray.init(address=made.cluster.address, log_to_driver=False, logging_level="ERROR")
            yield made
        finally:
            ray.shutdown()
            made.cluster.shutdown()


def raylet_of(node: Any) -> psutil.Process:
    """Return the raylet of a node, which is the parent process of its actors."""
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def children_of(node: Any) -> list[psutil.Process]:
    """Return the child processes of a node: its actors and others."""
    found: list[psutil.Process] = raylet_of(node).children(recursive=True)
    return found


def collecting(folder: Path, mode: Any, *planned: Fault, **options: Any) -> RayCollector:
    """Return an endless run of three workers, whose lanes fail as planned."""
    given: dict[str, Any] = {
        "storage": folder / "rows",
        "on_worker_death": "respawn",
        "max_respawns": 1000,
        "start_timeout": 600,  # on a busy machine imports take minutes
        "frames_per_batch": 50,
        "total_frames": -1,
        "seed": 1,
        **options,
    }
    workers = given.pop("workers", 3)
    lanes = factories(Faults(folder, planned), LANES, workers, slow=given.pop("slow", 0.002))
    return RayCollector(lanes, None, mode=mode, **given)


def assert_whole(folder: Path, stored: int, mode: str) -> list[int]:
    """Check that the storage has `stored` real rows. Return the number of lives of each lane."""
    with open_storage(folder / "rows") as storage:
        assert len(storage) == stored
        lives = check_lives(storage[:], LANES, gaps=mode == "async")
    assert verify(folder / "rows").sound
    return lives


class Killer(threading.Thread):
    """A thread that kills actors at random moments.

    It kills one actor, several at the same moment, or those that wait or start.

    Args:
        collector: the run that the actors belong to.
        draws: generator that chooses victims and moments.
        deaths: number of kills after which the thread ends.
    """

    def __init__(self, collector: RayCollector, draws: random.Random, deaths: int) -> None:
        super().__init__(daemon=True)
        self._collector, self._draws, self._left = collector, draws, deaths
        self._ages: Counter[int] = Counter()
        self._over = threading.Event()
        self._killed: set[int] = set()
        self.deaths: Counter[str] = Counter()
        """Kills by case: of workers, of waiting actors, of newly seen actors, and of several."""

    def run(self) -> None:
        """Kill until enough actors are dead, or until :meth:`stop`."""
        stored = -1
        while self._left and not self._over.wait(self._draws.expovariate(1 / 0.2)):
            alive = [pid for pid in actors() if pid not in self._killed]
            self._ages.update(alive)
            now, full = self._collector.ledger.stored, len(self._collector.worker_pids)
            # Mostly kill when new rows have arrived and all workers run, but not always.
            if alive and ((len(alive) >= full and now > stored) or self._draws.random() < 0.1):
                stored = now
                self._strike(alive)

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._over.set()
        self.join(60)
        assert not self.is_alive()

    def _strike(self, alive: list[int]) -> None:
        workers = set(self._collector.worker_pids)
        groups = {
            "one": [self._draws.choice([pid for pid in alive if pid in workers] or alive)],
            "several": self._draws.sample(alive, min(len(alive), self._draws.randint(2, 4))),
            "workers": [pid for pid in alive if pid in workers],
            "waiting": [pid for pid in alive if pid not in workers],
            "youngest": [min(alive, key=lambda pid: self._ages[pid])],
            "all": alive,
        }
        drawn = self._draws.choices([*groups], (6, 5, 1, 2, 3, 1))[0]
        chosen = groups[drawn if self._killed else "one"][: self._left]
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._killed.add(pid)
                self._left -= 1
                self.deaths["worker" if pid in workers else "waiting"] += 1
                self.deaths["young"] += self._ages[pid] == 1
                self.deaths["together"] += len(chosen) > 1


def _called(*beginnings: str) -> list[int]:
    """Return the ids of our processes, on any of our nodes, whose names begin with one of these."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            name = (process.cmdline() or [""])[0].rpartition("/")[2]
            if name.startswith(beginnings):
                found.append(process.pid)
    return found


def actors() -> list[int]:
    """Return the process ids of our actors."""
    return _called("ray::Lanes")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Check after each test that no actor is left. Ray keeps its own processes until later."""
    yield
    if INSIDE in os.environ:
        wait_until(lambda: not actors(), 10, "actors end")
