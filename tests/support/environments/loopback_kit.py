"""A Ray of a test module's own, in a network namespace with a loopback alone."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from worker_faults_kit import wait_until

INSIDE = "TALLYROLL_LOOPBACK"
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

inside = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in a network namespace")
"""Marks tests that :func:`run_inside` runs."""


def run_inside(file: str) -> None:
    """Run the tests of a file that are marked `inside`, in a namespace of their own."""
    if INSIDE in os.environ:
        pytest.skip("this is the namespace")
    if subprocess.run([*_ENTER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    ours = {**os.environ, **_SETTINGS, INSIDE: "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ours.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*_ENTER, *words], env=ours, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.findall(r"(\d+) skipped", done.stdout) == ["1"], "only what starts them is skipped"


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
