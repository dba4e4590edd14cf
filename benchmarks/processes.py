"""Contenders with processes of their own, which idle while others run and are gone at the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING

import psutil
from common import Contender

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from common import Tally

LOOK = 0.05
"""Seconds between two checks of the CPU time of processes."""
IDLE = 0.02
"""CPU seconds between two checks that still count as idle: two ticks of the kernel's clock."""
PATIENCE = 60.0
"""Seconds after which processes should be idle."""
GRACE = 5.0
"""Seconds that processes have to exit by themselves."""
START = "forkserver"
"""Start method of all processes: a fast one. The measurements do not depend on it."""
HEAVY = ["gymnasium", "torchrl.collectors", "torchrl.envs", "tallyroll.collector.multiprocess"]
"""Modules that the fork server imports once for all processes."""


def family() -> set[psutil.Process]:
    """Return all descendants of this process."""
    return set(psutil.Process().children(recursive=True))


def cpu_seconds(processes: Collection[psutil.Process]) -> float:
    """Return the CPU time that the processes that still run have used."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def wait_for_rest(processes: Collection[psutil.Process]) -> None:
    """Wait until the processes have finished the requested work."""
    deadline = time.monotonic() + PATIENCE
    used = cpu_seconds(processes)
    while time.monotonic() < deadline:
        time.sleep(LOOK)
        before, used = used, cpu_seconds(processes)
        if used - before <= IDLE:
            return
    raise SystemExit(f"processes that should wait were at work for {PATIENCE:.0f} s: {processes}")


def end(processes: Collection[psutil.Process]) -> None:
    """Make sure that no process is left."""
    _, alive = psutil.wait_procs(processes, GRACE)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, GRACE)


@contextmanager
def none_left() -> Iterator[None]:
    """Start the helpers that start processes, and make sure that no process is left at the end.

    SIGTERM becomes an ordinary exit, so that the cleanup runs then too.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    # Importing TorchRL sets another start method globally.
    multiprocessing.set_start_method(START, force=True)
    multiprocessing.set_forkserver_preload(HEAVY)
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    helpers = family()
    try:
        yield
    finally:
        end(family() - helpers)


class Apart(Contender):
    """A contender with processes of its own.

    The processes may work ahead, which must not affect the measurements. After a round, the clock
    is stopped until they are idle. Each round begins with batches that are thrown away.

    Args:
        make: builds the contender and starts its processes.
        ahead: calls of ``advance`` whose work may have been done beforehand.
    """

    def __init__(self, make: Callable[[], Contender], ahead: int = 1) -> None:
        """Build the contender and let it make a first batch, which includes the time to start."""
        before = family()
        try:
            self.inner = make()
            self.inner.advance()
            self.inner.tally()
        except BaseException:
            end(family() - before)
            raise
        self.name, self.ahead = self.inner.name, ahead
        self.processes = family() - before

    def begin_round(self) -> None:
        """Throw away the batches that were made ahead."""
        for _ in range(self.ahead):
            self.inner.advance()
        self.inner.tally()

    def end_round(self) -> None:
        """Wait until the processes are idle."""
        wait_for_rest(self.processes)

    def advance(self) -> None:
        """Do one batch of work."""
        self.inner.advance()

    def tally(self) -> Tally:
        """Return the work of the last ``advance``."""
        return self.inner.tally()

    def close(self) -> None:
        """Close the contender, and kill processes that still run."""
        try:
            self.inner.close()
        finally:
            end(self.processes)
