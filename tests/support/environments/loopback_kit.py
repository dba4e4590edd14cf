"""A Ray of a test module's own, in a network namespace with a loopback alone.

``TALLYROLL_RAY_KILLS`` says how many actors are killed at random, 3 by default, and
``TALLYROLL_RAY_SEED`` which: limits of time grow with them. With ``TALLYROLL_RAY_WARM=1`` actors
are forks of one process (`warm_actors`): one starts in 0.2 seconds of CPU time instead of 4. Where
that takes more than ten minutes, give pytest ``-o faulthandler_timeout=0``.
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
"""Only a few tests of these are run, as `check.sh --all` does it."""
KILLS = int(os.environ.get("TALLYROLL_RAY_KILLS", "3"))
SEED = int(os.environ.get("TALLYROLL_RAY_SEED", KILLS))
WARM = "TALLYROLL_RAY_WARM" in os.environ
SECONDS_OF_KILLS = 120 + 60 * KILLS
"""For a test with all of them: an actor may take most of a minute to start beside other work."""
SECONDS_OF_ALL = 1500 + 3 * 60 * max(0, KILLS - 3)
"""For all tests of a file."""
LANES = 6
_ENTER = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that this is going to be so
    "RAY_worker_niceness": "0",  # actors would wait for all else on the machine
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

_OUTSIDE = "runs in a network namespace"
inside = pytest.mark.skipif(INSIDE not in os.environ, reason=_OUTSIDE)
"""Marks tests that :func:`run_inside` runs."""


def run_inside(file: str, short: str = "") -> None:
    """Run the tests of a file that are marked `inside`, in a namespace of their own.

    ``short``: names those of the short form, as pytest's ``-k`` has it; "": it has none.
    """
    if INSIDE in os.environ:
        pytest.skip("this is the namespace")
    if SHORT and not short:
        pytest.skip("the short form leaves these out: check.sh --apart ray runs them")
    if subprocess.run([*_ENTER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    words += ["-o", "faulthandler_timeout=0"]  # each test has a limit of its own
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
    """A folder whose name is short: names of sockets are limited. No process is left after it."""
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    (folder / "ray").mkdir()  # where Ray keeps an address, and else another Ray's
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        wait_until(lambda: not _called("ray", "gcs_server"), 30, "processes of Ray end")
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def own_ray(**options: Any) -> Iterator[None]:
    """A cluster of one node, that this process is connected to; none outside the namespace."""
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
    """The program that Ray starts actors with: Python, or what asks for forks."""
    if not WARM:
        yield sys.executable
        return
    kit, asking, at = warm_actors.__file__, folder / "python", folder / "forks"
    asking.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {kit} ask {at} "$@"\n')
    asking.chmod(0o700)
    # Its end of standard input ends it.
    with subprocess.Popen([sys.executable, kit, "serve", at], stdin=subprocess.PIPE):
        wait_until(at.exists, 60, "a process that forks")
        yield str(asking)


class Nodes:
    """A head without workers, and nodes that have them."""

    def __init__(self, folder: Path) -> None:
        self._more = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
        head = {**self._more, "num_cpus": 0, "temp_dir": str(folder)}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(self, **options: Any) -> Any:
        """Let another node join."""
        given = {"num_cpus": 6, "object_store_memory": 100 * 2**20, **options}
        return self.cluster.add_node(**given)


@contextmanager
def own_nodes(*, connected: bool = True) -> Iterator[Nodes]:
    """A cluster of several nodes, that this process is connected to."""
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
    """The process that has the actors of a node for children."""
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def children_of(node: Any) -> list[psutil.Process]:
    """Its actors, and others."""
    found: list[psutil.Process] = raylet_of(node).children(recursive=True)
    return found


def collecting(folder: Path, mode: Any, *planned: Fault, **options: Any) -> RayCollector:
    """A run of three workers that goes on for ever, whose lanes fail as planned."""
    given: dict[str, Any] = {
        "storage": folder / "rows",
        "on_worker_death": "respawn",
        "max_respawns": 1000,
        "start_timeout": 600,  # machines that do much else import for minutes
        "frames_per_batch": 50,
        "total_frames": -1,
        "seed": 1,
        **options,
    }
    workers = given.pop("workers", 3)
    lanes = factories(Faults(folder, planned), LANES, workers, slow=given.pop("slow", 0.002))
    return RayCollector(lanes, None, mode=mode, **given)


def assert_whole(folder: Path, stored: int, mode: str) -> list[int]:
    """The storage has so many rows, each really made; returns how many lives each lane had."""
    with open_storage(folder / "rows") as storage:
        assert len(storage) == stored
        lives = check_lives(storage[:], LANES, gaps=mode == "async")
    assert verify(folder / "rows").sound
    return lives


class Killer(threading.Thread):
    """Kills actors at random moments: one, several in the same moment, those that wait or start.

    Args:
        collector: the run whose actors they are.
        draws: decides which, and when.
        deaths: after so many it ends.
    """

    def __init__(self, collector: RayCollector, draws: random.Random, deaths: int) -> None:
        super().__init__(daemon=True)
        self._collector, self._draws, self._left = collector, draws, deaths
        self._ages: Counter[int] = Counter()
        self._over = threading.Event()
        self._killed: set[int] = set()
        self.deaths: Counter[str] = Counter()
        """How many were workers, waited or started, had just been seen, died with others."""

    def run(self) -> None:
        """Kill until enough are dead, or until :meth:`stop`."""
        stored = -1
        while self._left and not self._over.wait(self._draws.expovariate(1 / 0.2)):
            alive = [pid for pid in actors() if pid not in self._killed]
            self._ages.update(alive)
            now, full = self._collector.ledger.stored, len(self._collector.worker_pids)
            # Mostly after rows came, and where there are enough; but not always.
            if alive and ((len(alive) >= full and now > stored) or self._draws.random() < 0.1):
                stored = now
                self._strike(alive)

    def stop(self) -> None:
        """End it, if it goes on, and wait until it has ended."""
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
    """Return our processes, of any node of ours, whose names begin so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            name = (process.cmdline() or [""])[0].rpartition("/")[2]
            if name.startswith(beginnings):
                found.append(process.pid)
    return found


def actors() -> list[int]:
    """Return processes of our actors."""
    return _called("ray::Lanes")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Check after each test that no actor is left; Ray keeps processes of its own meanwhile."""
    yield
    if INSIDE in os.environ:
        wait_until(lambda: not actors(), 10, "actors end")
