"""Contenders with processes of their own: at rest while others play, and gone at the end."""

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
"""Seconds between two looks at what processes have used."""
IDLE = 0.02
"""Seconds of CPU time in between that count as rest: two ticks of the kernel's clock."""
PATIENCE = 60.0
"""Seconds after which processes should be at rest."""
GRACE = 5.0
"""Seconds that processes have to end by themselves."""
START = "forkserver"
"""How all processes are started: quickly. What is measured does not depend on it."""
HEAVY = ["gymnasium", "torchrl.collectors", "torchrl.envs", "tallyroll.collector.multiprocess"]
"""What the fork server imports, once for all processes."""


def family() -> set[psutil.Process]:
    """All processes that descend from this one."""
    return set(psutil.Process().children(recursive=True))


def cpu_seconds(processes: Collection[psutil.Process]) -> float:
    """CPU time that those of them which still run have used."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def wait_for_rest(processes: Collection[psutil.Process]) -> None:
    """Wait until the processes have done what they had been asked for."""
    deadline = time.monotonic() + PATIENCE
    used = cpu_seconds(processes)
    while time.monotonic() < deadline:
        time.sleep(LOOK)
        before, used = used, cpu_seconds(processes)
        if used - before <= IDLE:
            return
    raise SystemExit(f"processes that should wait were at work for {PATIENCE:.0f} s: {processes}")


def end(processes: Collection[psutil.Process]) -> None:
    """See to it that none of them is left."""
    _, alive = psutil.wait_procs(processes, GRACE)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, GRACE)


@contextmanager
def none_left() -> Iterator[None]:
    """Start what processes are started with; whatever happens inside, nothing goes on behind it.

    SIGTERM becomes an ordinary exit, so that it happens then too.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    # Importing TorchRL has set another method, for everyone.
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

    They may work ahead, which nobody should see or pay for: after a round the clock stands until
    they are at rest, and a round begins with batches that are thrown away.

    Args:
        make: builds the contender and starts its processes.
        ahead: calls of ``advance`` whose work may have been done beforehand.
    """

    def __init__(self, make: Callable[[], Contender], ahead: int = 1) -> None:
        """Build it and let it make a first batch, which takes as long as starting takes."""
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
        """Throw away what was made ahead."""
        for _ in range(self.ahead):
            self.inner.advance()
        self.inner.tally()

    def end_round(self) -> None:
        """Wait until nothing is made any more."""
        wait_for_rest(self.processes)

    def advance(self) -> None:
        """Do one batch of work."""
        self.inner.advance()

    def tally(self) -> Tally:
        """Return what the last ``advance`` did."""
        return self.inner.tally()

    def close(self) -> None:
        """Close it; what is then still there is killed."""
        try:
            self.inner.close()
        finally:
            end(self.processes)
