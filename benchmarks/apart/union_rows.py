"""Compare random rows of a union of storages with those of one storage.

    python benchmarks/apart/union_rows.py --members 64

The same rows are in one storage and in many. The script reads 256 random rows from each in turn,
with `get` and through a replay buffer. Times are CPU times of this thread.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrl.data import ReplayBuffer

from tallyroll.storage import MemmapStorage, open_storage

COUNT = 256
SHAPES = {"a float32 [4] observation": ((4,), np.float32), "84 x 84": ((84, 84), np.uint8)}


def rows_of(count: int, shape: tuple[int, ...], dtype: Any) -> dict[Any, np.ndarray]:
    """Return the rows of one trajectory, with the columns of a collector."""
    random = np.random.default_rng(0)
    observation = random.integers(0, 255, (count + 1, *shape)).astype(dtype)
    return {
        ("observation",): observation[:-1],
        ("action",): random.integers(0, 4, count),
        ("next", "observation"): observation[1:],
        ("next", "reward"): random.random((count, 1), np.float32),
        ("next", "terminated"): np.zeros((count, 1), np.bool_),
        ("next", "truncated"): np.zeros((count, 1), np.bool_),
        ("next", "done"): np.zeros((count, 1), np.bool_),
        ("collector", "traj_ids"): np.zeros(count, np.int64),
        ("collector", "step"): np.arange(count),
    }


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median microseconds of each call. The calls take turns."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            spent[name].append((time.thread_time() - began) * 1e6)
    return {name: float(np.median(each)) for name, each in spent.items()}


def play(name: str, args: argparse.Namespace, scratch: Path, *, packed: bool) -> None:
    """Measure rows of one shape."""
    shape, dtype = SHAPES[name]
    count = args.rows // args.members * args.members
    rows = rows_of(count, shape, dtype)
    size, paths = count // args.members, []
    bounds = [(0, count), *((start, start + size) for start in range(0, count, size))]
    for number, (start, stop) in enumerate(bounds):
        paths.append(scratch / f"{number}")
        with MemmapStorage(paths[-1]) as storage:
            storage.extend({key: each[start:stop] for key, each in rows.items()}, ids="fresh")
            if packed:
                paths[-1] = scratch / f"{number}.packed"
                storage.pack(paths[-1])
    random = np.random.default_rng(0)
    with open_storage(paths[0]) as one, open_storage(paths[1:]) as union:
        index = random.integers(0, count, COUNT)
        assert (one.get(index)["observation"] == union.get(index)["observation"]).all()
        for way in ("get", "buffer"):
            calls: dict[str, Callable[[], Any]] = {}
            for label, storage in (("one", one), ("union", union)):
                if way == "get":
                    calls[label] = lambda it=storage: it.get(random.integers(0, count, COUNT))
                else:
                    calls[label] = ReplayBuffer(storage=storage, batch_size=COUNT).sample
            medians(calls, 5 if not packed else 20)
            found = medians(calls, args.rounds)
            kind = "packed" if packed else "memmap"
            print(
                f"| {name}, {kind}, {way} | {found['one']:.0f} | {found['union']:.0f} "
                f"| {found['union'] / found['one']:.2f} |",
                flush=True,
            )


def main() -> None:
    """Measure each shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, default=64, help="storages of the union")
    parser.add_argument("--rows", type=int, default=64_000, help="rows in all")
    parser.add_argument("--rounds", type=int, default=300, help="calls of each")
    parser.add_argument("--quick", action="store_true", help="few rows: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.rounds = 640, 3
    torch.set_num_threads(1)
    print(f"{args.members} members, {args.rows:,} rows, load {os.getloadavg()[0]:.1f}")
    print(f"| {COUNT} random rows | one, us / call | union, us / call | ratio |")
    print("| --- | --- | --- | --- |")
    for name in SHAPES:
        for packed in (False, True):
            with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
                play(name, args, Path(scratch), packed=packed)


if __name__ == "__main__":
    main()
