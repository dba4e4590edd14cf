"""Count the rows that ``kill -9`` loses. Run ``python benchmarks/apart/kill.py``.

For each library a process collects CartPole transitions with random actions into the library's
buffer, and reports each thousand. The script kills it with SIGKILL right after a report. A new
process then opens the buffer again, and counts the rows that it can read. No checkpoint is saved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

LANES, BATCH, CAPACITY = 8, 1000, 200_000


def steps() -> Iterator[dict[str, np.ndarray]]:
    """Step the lanes with random actions, and yield one transition of each."""
    import gymnasium

    envs = gymnasium.make_vec("CartPole-v1", num_envs=LANES, vectorization_mode="sync")
    obs, _ = envs.reset(seed=0)
    while True:
        action = envs.action_space.sample()
        after, reward, terminated, truncated, _ = envs.step(action)
        yield {
            "obs": obs,
            "next_obs": after,
            "action": action,
            "reward": reward,
            "done": terminated | truncated,
        }
        obs = after


def write_tallyroll(folder: str) -> Iterator[int]:
    """Collect into a storage, and yield the number of transitions that were delivered."""
    from tallyroll.collector import SyncCollector

    with SyncCollector(
        "CartPole-v1",
        num_envs=LANES,
        frames_per_batch=BATCH,
        total_frames=CAPACITY,
        seed=0,
        storage=f"{folder}/rows",
    ) as collector:
        for count, _ in enumerate(collector, 1):
            yield count * BATCH


def read_tallyroll(folder: str) -> int:
    """Return the number of rows of the storage."""
    from tallyroll.storage import open_storage

    with open_storage(f"{folder}/rows") as storage:
        return len(storage[:])


def write_sb3(folder: str) -> Iterator[int]:
    """Add to the buffer of Stable-Baselines3, which is in memory."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer

    box = Box(-np.inf, np.inf, (4,), np.float32)
    buffer = ReplayBuffer(CAPACITY, box, Discrete(2), device="cpu", n_envs=LANES)
    for count, step in enumerate(steps(), 1):
        infos: list[dict[str, object]] = [{}] * LANES
        buffer.add(*step.values(), infos)
        yield count * LANES


def read_sb3(folder: str) -> int:
    """Return 0 if the buffer left no file."""
    if [*Path(folder).iterdir()]:
        raise AssertionError("the buffer wrote files: read them")
    return 0


def write_torchrl(folder: str) -> Iterator[int]:
    """Add to a memory-mapped storage of TorchRL."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder))
    for count, step in enumerate(steps(), 1):
        rows = {name: torch.as_tensor(values) for name, values in step.items()}
        buffer.extend(TensorDict(rows, [LANES]))
        yield count * LANES


def read_torchrl(folder: str) -> int:
    """Return the number of rows of a storage that is opened over the same files."""
    from torchrl.data import LazyMemmapStorage, ReplayBuffer

    assert [*Path(folder).iterdir()], "the files are gone"
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=folder, existsok=True)
    return len(ReplayBuffer(storage=storage))


WRITERS: dict[str, Callable[[str], Iterator[int]]] = {
    "Tallyroll, `storage=PATH`": write_tallyroll,
    "Stable-Baselines3, `ReplayBuffer`": write_sb3,
    "TorchRL, `LazyMemmapStorage`": write_torchrl,
}
READERS: dict[str, Callable[[str], int]] = {
    "Tallyroll, `storage=PATH`": read_tallyroll,
    "Stable-Baselines3, `ReplayBuffer`": read_sb3,
    "TorchRL, `LazyMemmapStorage`": read_torchrl,
}


def report(name: str, folder: str) -> None:
    """Write rows until the process is killed, and print each full thousand."""
    said = 0
    for count in WRITERS[name](folder):
        if count // BATCH > said:
            said = count // BATCH
            print(said * BATCH, flush=True)


def lost(name: str, rows: int) -> int:
    """Return how many of this number of rows are lost by a kill."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", name, folder]
        with subprocess.Popen([*command, "write"], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.strip().isdigit() and int(line) >= rows:
                    break
            else:
                raise RuntimeError(f"{name}: the writer ended before {rows} rows")
            child.kill()
        done = subprocess.run([*command, "read"], stdout=subprocess.PIPE, text=True, check=True)
        return max(rows - int(done.stdout.splitlines()[-1]), 0)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000, help="rows before the kill")
    parser.add_argument("--kills", type=int, default=5, help="kills for each library")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument(
        "--child", nargs=3, metavar=("NAME", "FOLDER", "WHAT"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.child:
        name, folder, what = args.child
        report(name, folder) if what == "write" else print(READERS[name](folder))
        return
    found = {name: [lost(name, args.rows) for _ in range(args.kills)] for name in WRITERS}
    print(f"| rows lost of {args.rows:,}, {args.kills} kills | at least | at most |")
    print("| --- | --- | --- |")
    for name, counts in found.items():
        print(f"| {name} | {min(counts):,} | {max(counts):,} |")
    if args.json:
        args.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
