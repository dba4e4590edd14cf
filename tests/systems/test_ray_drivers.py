"""Test drivers in their own processes: killed, two on one storage, and without their head."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from loopback_kit import (
    Nodes,
    actors,
    assert_whole,
    collecting,
    folder_of_ray,
    inside,
    nothing_left_behind,
    own_nodes,
    run_inside,
)
from ray.experimental import get_object_locations

from tallyroll.storage import StorageError, open_storage

from worker_faults_kit import wait_until

__all__ = ["nothing_left_behind"]

TOTAL = 1_003
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Agents that check for their raylet once a minute."""


@pytest.mark.timeout(1600)
def test_in_a_network_namespace() -> None:
    run_inside(__file__)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with own_nodes(connected=False) as made:
        made.add()
        yield made


class Driver:
    """Process that collects rows below ``folder``, with the Ray at an address."""

    def __init__(self, folder: Path, address: str, **options: Any) -> None:
        self.log = folder / f"log-{time.monotonic_ns()}"
        words = [sys.executable, __file__, address, str(folder), repr(options)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "3",  # 60 by default
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait(10)

    def ended(self, seconds: float = 240.0) -> int:
        """Return the exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.said}") from None

    @property
    def said(self) -> str:
        """The end of the output."""
        return self.log.read_text()[-3000:]


def rows_in(folder: Path) -> int:
    """Return the number of committed rows."""
    with suppress(StorageError, FileNotFoundError), open_storage(folder / "rows") as storage:
        return len(storage)
    return 0


def drive(address: str, folder: str, options: dict[str, Any]) -> None:
    """Collect to the end. Print whether answers of 400 KB are in Ray's store or in its replies."""
    given = {"workers": 2, "spares": 0, "total_frames": TOTAL, **options}
    with collecting(Path(folder), "async", address=address, **given) as collector:
        answer = ray.remote(num_cpus=0)(lambda: bytes(400_000)).remote()
        ray.wait([answer])
        stored = get_object_locations([answer])[answer]["node_ids"]
        os.write(1, b"in the store" if stored else b"in its reply")
        for _ in collector:
            pass


def waits_for_rows(folder: Path, driver: Driver, rows: int) -> None:
    wait_until(
        lambda: rows_in(folder) > rows or driver.process.poll() is not None, 240, "rows come"
    )
    assert rows_in(folder) > rows, driver.said


@inside
@pytest.mark.timeout(900)
def test_a_killed_driver_is_gone_on_with(nodes: Nodes, tmp_path: Path) -> None:
    for kill in range(2):
        with Driver(tmp_path, nodes.cluster.address, resume="auto", slow=0.004) as driver:
            waits_for_rows(tmp_path, driver, 100 * (kill + 1))
        wait_until(lambda: not actors(), 30, "actors end with their driver")
    before = rows_in(tmp_path)
    assert 200 < before < TOTAL
    with Driver(tmp_path, nodes.cluster.address, resume=True) as driver:
        assert driver.ended() == 0, driver.said
    assert_whole(tmp_path, TOTAL, "async")


@inside
@pytest.mark.timeout(900)
def test_a_second_driver_is_refused_and_the_first_goes_on(nodes: Nodes, tmp_path: Path) -> None:
    with Driver(tmp_path, nodes.cluster.address, slow=0.01, total_frames=-1) as first:
        waits_for_rows(tmp_path, first, 50)
        with Driver(tmp_path, nodes.cluster.address, resume=True) as second:
            assert second.ended() != 0
            assert "StorageLocked" in second.said
        waits_for_rows(tmp_path, first, rows_in(tmp_path) + 200)
        assert first.process.poll() is None
    wait_until(lambda: not actors(), 30, "actors end with their driver")
    assert_whole(tmp_path, rows_in(tmp_path), "async")


@inside
@pytest.mark.timeout(900)
def test_rows_go_on_under_another_head(tmp_path: Path) -> None:
    with own_nodes(connected=False) as nodes:
        nodes.add()
        # The lanes are slow because actors on the other node continue until Ray stops waiting.
        with Driver(tmp_path, nodes.cluster.address, slow=0.04) as driver:
            waits_for_rows(tmp_path, driver, 100)
            for name in ("gcs_server", "raylet"):
                for process in nodes.cluster.head_node.all_processes[name]:
                    with suppress(psutil.NoSuchProcess):
                        psutil.Process(process.process.pid).kill()
            assert driver.ended() != 0
        wait_until(lambda: not actors(), 60, "actors end without their head")
    before = rows_in(tmp_path)
    assert 100 < before < TOTAL
    with own_nodes(connected=False) as nodes:
        nodes.add()
        with Driver(tmp_path, nodes.cluster.address, resume=True) as driver:
            assert driver.ended() == 0, driver.said
    assert_whole(tmp_path, TOTAL, "async")


@inside
@pytest.mark.timeout(900)
def test_a_driver_that_starts_a_ray_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folder_of_ray():
        with Driver(tmp_path, "local", slow=0.004) as driver:
            waits_for_rows(tmp_path, driver, 100)
            started = psutil.Process(driver.process.pid).children(recursive=True)
            names = [name_of(each) for each in started]
        assert {"gcs_server", "raylet", "ray::Lanes"} <= {*names}
        assert "in its reply" in driver.said
        wait_until(lambda: {*map(name_of, started)} <= {"", *AGENTS}, 30, "Ray and actors end")
        assert 100 < rows_in(tmp_path) < TOTAL
        monkeypatch.setenv("RAY_max_direct_call_object_size", "1000")
        with Driver(tmp_path, "local", resume=True) as driver:
            assert driver.ended() == 0, driver.said
        assert "in the store" in driver.said
        assert_whole(tmp_path, TOTAL, "async")
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def name_of(process: psutil.Process) -> str:
    """Return the name of the program that a process runs, or "" if the process has ended."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return re.split(r"[ .(]", (process.cmdline() or [""])[0].rpartition("/")[2])[0]
    return ""


if __name__ == "__main__":
    drive(sys.argv[1], sys.argv[2], eval(sys.argv[3]))
