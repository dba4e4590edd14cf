"""What does a block of one slot cost beside its steps? Run ``python benchmarks/blocks.py``."""

from __future__ import annotations

import argparse
import gc
import timeit
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tallyroll.collector.counting.ledger import Ledger, post
from tallyroll.collector.rollout.driver import Account, Driver
from tallyroll.collector.rollout.fill_and_carry import Rollout
from tallyroll.collector.rollout.os_signals import admitted, deferred, keep_for
from tallyroll.collector.slab.slab import Slab, SlabColumn
from tallyroll.storage.rows.keys import REWARD, TERMINATED, TRUNCATED

if TYPE_CHECKING:
    from collections.abc import Callable

OBSERVATION = ("observation",)
LAYOUT = {
    OBSERVATION: SlabColumn(torch.float32, (4,)),
    ("next", *OBSERVATION): SlabColumn(torch.float32, (4,)),
    ("action",): SlabColumn(torch.int64, ()),
    REWARD: SlabColumn(torch.float32, (1,)),
    TERMINATED: SlabColumn(torch.bool, (1,)),
    TRUNCATED: SlabColumn(torch.bool, (1,)),
}


class Idle(Driver):
    """Fills slots by saying so; it accounts for them as a driver of this process does."""

    used, stopping, paused = 0, False, False

    def __init__(self, slab: Slab, reset_slot: bool) -> None:
        self.slab, self.run_lanes = slab, slab.lanes
        self._reset_slot = reset_slot

    def interruptible(self) -> admitted:
        return admitted()

    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def begin(self) -> None: ...
    def restart(self) -> None: ...
    def part(self, at: int, lanes: int, random_lanes: Any) -> None: ...

    def random_steps(self, start: int, stop: int) -> None:
        self.used = stop

    def policy_steps(self, start: int, stop: int, random_lanes: Any = None) -> None:
        self.used = stop

    def upcoming(self) -> Any:
        return np.ones(self.run_lanes, np.bool_)

    def account(self, start: int, stop: int, stepped: int) -> Account:
        transitions = np.ones((stop - start, self.run_lanes), np.bool_)
        if self._reset_slot:
            transitions[:, 0] = False
        executed = int(np.count_nonzero(transitions))
        return Account((stop - start) * stepped, executed, transitions)


class Constant:
    """Stands for a policy."""

    version = 0


def block_of(lanes: int, reset_slot: bool) -> Callable[[], None]:
    """What takes a block of one slot, with its entry, as a collector does."""
    slab = Slab(6, lanes, LAYOUT, flowing=[OBSERVATION], shared=True)
    rollout = Rollout(
        Idle(slab, reset_slot),
        Constant(),  # type: ignore[arg-type]
        extra=(),
        surplus="carry",
        random_frames=0,
        gate=None,
    )
    ledger, want = Ledger(), lanes - reset_slot

    def take() -> None:
        block = rollout.block(want)
        post(ledger, block.entry)
        block.keep(more=False)
        rollout.given(block)
        block.release()

    return take


def guard() -> None:
    """What a batch does once."""
    with deferred():
        pass


def inner() -> None:
    """What each call of user code does."""
    with admitted():
        pass


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="the best of so many is shown")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    chosen = parser.parse_args()
    rounds, number = (1, 10) if chosen.quick else (chosen.rounds, 1000)

    def show(what: str, call: Callable[[], None]) -> None:
        seconds = min(timeit.repeat(call, number=number, repeat=rounds)) / number
        print(f"{what:40} {seconds * 1e6:6.2f} us / call")

    gc.disable()
    for lanes in (1, 8, 64):
        show(f"block of a slot of {lanes} lanes", block_of(lanes, False))
        if lanes > 1:
            show("  where one of them is reset", block_of(lanes, True))
    run = Constant()
    with deferred():
        keep_for(run)
        show("guard around user code", inner)
    show("guard around a batch", guard)


if __name__ == "__main__":
    main()
