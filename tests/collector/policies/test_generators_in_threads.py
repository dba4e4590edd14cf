"""Threads that save and restore generators during garbage collection do not deadlock."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import faulthandler, gc, sys, threading, time

import numpy, random, torch
from tallyroll.collector.policies.trial import generators_restored

faulthandler.dump_traceback_later(60, exit=True)  # needs no turn of the interpreter
sys.setswitchinterval(1e-5)
gc.set_threshold(50)
until = time.monotonic() + 4


class Garbage:
    def __init__(self):
        self.own = self

    def __del__(self):
        for _ in range(200):
            pass


def run():
    while time.monotonic() < until:
        Garbage()
        kept = [[] for _ in range(7)]
        with generators_restored():
            pass


threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
before = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
with generators_restored():
    torch.rand(3), numpy.random.rand(3), random.random()
assert torch.equal(before[0], torch.get_rng_state())
assert (before[1][1] == numpy.random.get_state()[1]).all() and before[2] == random.getstate()
print("went on")
"""


@pytest.mark.slow
def test_threads_wait_for_each_other_only_while_a_policy_is_tried() -> None:
    """In Python 3.11, torch's own `fork_rng` deadlocks here within a second or two."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.stdout == "went on\n", ran.stderr[-2000:]
