"""The collecting process's CPU time per row, for rows that are sent to it and for shards.

It alternates between small rows and stacks of four frames. With `--ray` the workers are Ray actors.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tallyroll.collector import MultiprocessCollector, RayCollector

SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "small": ((4,), np.float32),
    "frames": ((84, 84, 4), np.uint8),
}
WORKERS, LANES = 2, 8


class Cheap(gym.Env[Any, Any]):
    """Returns observations that were made beforehand, in episodes of 100 steps."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        high = 255 if dtype is np.uint8 else 1.0
        self.observation_space = spaces.Box(0, high, shape, dtype)
        self.action_space = spaces.Discrete(2)
        generator = np.random.default_rng(0)
        self.all = [(high * generator.random(shape)).astype(dtype) for _ in range(8)]
        self.at = 0

    def reset(self, **_: Any) -> Any:
        """Begin an episode."""
        self.at = 0
        return self.all[0], {}

    def step(self, action: Any) -> Any:
        """Return the next observation."""
        self.at += 1
        return self.all[self.at % 8], 1.0, False, self.at == 100, {}


def make(name: str) -> SyncVectorEnv:
    """Return the environment of a worker."""
    each = [partial(Cheap, *SHAPES[name])] * LANES
    return SyncVectorEnv(each, autoreset_mode=AutoresetMode.DISABLED)


def measured(name: str, sharded: bool, ray: bool, rows: int) -> tuple[float, float]:
    """Return the CPU time per row, in us.

    The first number is for the calling thread, the second for the whole process.
    """
    kind: Any = RayCollector if ray else MultiprocessCollector
    folder = Path(tempfile.mkdtemp())
    try:
        with kind(
            [partial(make, name)] * WORKERS,
            None,
            mode="async",
            sharded=sharded,
            frames_per_batch=2048,
            total_frames=-1,
            seed=0,
            storage=folder / "rows",
            start_timeout=600,
            **({} if ray else {"mp_start_method": "forkserver"}),
        ) as collector:
            collector.collect(2048)
            thread, whole = time.thread_time(), time.process_time()
            collector.collect(rows)
            spent = time.thread_time() - thread, time.process_time() - whole
            collector.ledger.check()
        return spent[0] / rows * 1e6, spent[1] / rows * 1e6
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure in turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", type=int, default=100_000, help="rows")
    parser.add_argument("--frames", type=int, default=6_000, help="rows, of 56 KB")
    args = parser.parse_args()
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for name in SHAPES:
            for sharded in (False, True):
                rows = getattr(args, name)
                each = measured(name, sharded, args.ray, rows)
                found.setdefault((name, sharded), []).append(each)
                print(f"{name} {sharded} {each}", file=sys.stderr, flush=True)
    for (name, sharded), times in found.items():
        thread, whole = (statistics.median(each) for each in zip(*times, strict=True))
        where = "in shards" if sharded else "by the collector"
        print(f"{name:<8} {where:<18} {thread:8.3f} us a row ({whole:.3f} of all threads)")


if __name__ == "__main__":
    main()
