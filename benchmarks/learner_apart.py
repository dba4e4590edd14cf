"""Run the whole loops of `small_batches.py`, with the gradient step timed separately.

The time of a gradient step of 10 ms varies by more than the difference between the loops. Here all
contenders run in one process, around one learner, in blocks of steps in random order. The output
gives medians, with standard errors in parentheses.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from common import console, prepare, print_setting
from small_batch_loops import TASKS, Loop, contenders
from small_batch_steps import RING

STEPS = 12
"""Steps of a block."""
UNCOUNTED = 2
"""Warm-up blocks of each contender, which are not counted."""


def block(loop: Loop) -> tuple[float, float]:
    """Return median seconds per vector step, without the gradient step and of the gradient step."""
    times = np.zeros((STEPS, 4))
    for row in times:
        row[0] = perf_counter()
        loop.step()
        rows = loop.sample()
        row[1] = perf_counter()
        loop.learner.update(rows)
        row[2] = perf_counter()
        loop.learnt()
        row[3] = perf_counter()
    stepped, learnt, handed = np.diff(times, axis=1).T
    return float(np.median(stepped + handed)), float(np.median(learnt))


def main() -> None:
    """Run all blocks, and print one line per contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [task.name for task in TASKS]
    parser.add_argument("--only", default=",".join(names), help=f"of {','.join(names)}")
    parser.add_argument("--blocks", type=int, default=60, help="of each contender (default: 60)")
    parser.add_argument("--quick", action="store_true", help="four blocks: does it run?")
    args = parser.parse_args()
    blocks = UNCOUNTED + 2 if args.quick else args.blocks
    if blocks <= UNCOUNTED + 1:
        parser.error(f"--blocks: expected at least {UNCOUNTED + 2}, got {blocks}")
    if unknown := set(args.only.split(",")) - {*names}:
        parser.error(f"--only: expected some of {names}, got {sorted(unknown)}")
    prepare()
    print_setting()
    for task in TASKS:
        if task.name not in args.only.split(","):
            continue
        with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
            loops, remarks = contenders(task.playable(), Path(scratch), RING, peers=True)
            try:
                found = {loop.name: [] for loop in loops}
                for _ in range(blocks):
                    for loop in random.sample(loops, len(loops)):
                        found[loop.name].append(block(loop))
            finally:
                for loop in loops:
                    loop.close()
        for remark in remarks:
            console.print(remark)
        for name, times in found.items():
            us = np.array(times[UNCOUNTED:]) * 1e6
            (loop, step), (around, inside) = np.median(us, 0), 1.25 * us.std(0) / len(us) ** 0.5
            console.print(
                f"{task.name}, {name}: {loop:.0f} us / vector step ({around:.0f}), "
                f"the gradient step {step:.0f} us ({inside:.0f})"
            )


if __name__ == "__main__":
    main()
