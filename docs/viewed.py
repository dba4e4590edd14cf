"""Show sample storages with `tallyroll view`, and run a command that looks at them.

`python docs/viewed.py COMMAND...` appends the folder of the storages and the address of the viewer
to the command. Storages 0 to 3 are a CartPole run, an Atari run, one with names and values that are
markup, and one that the command may move away.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.collector.ext.viewer.dataset import Dataset
from tallyroll.collector.ext.viewer.flags import Flags
from tallyroll.collector.ext.viewer.server import Viewer
from tallyroll.storage import MemmapStorage

MARKUP = "<img src=x onerror=alert(1)>\u202e'\""


def collect(path: Path, env: str, frames: int) -> None:
    """Collect a run with random actions."""
    with SyncCollector(
        env, num_envs=4, frames_per_batch=frames, total_frames=frames, seed=0, storage=path
    ) as collector:
        collector.collect(frames)


def write_markup(path: Path) -> None:
    """Write a trajectory with a column named like markup, and values that are not finite."""
    values = torch.tensor([0.0, float("nan"), float("inf"), -1e300], dtype=torch.float64)
    ended = torch.tensor([False, False, False, True])
    rows = TensorDict(
        {
            "observation": values,
            MARKUP: values,
            "next": {"reward": values, "terminated": ended, "done": ended},
            "collector": {
                "traj_ids": torch.zeros(4, dtype=torch.int64),
                "step": torch.arange(4),
                "lane": torch.zeros(4, dtype=torch.int32),
            },
        },
        [4],
    )
    with MemmapStorage(path) as storage:
        storage.extend(rows)


def main(command: list[str]) -> int:
    """Serve the storages while the command runs. Return its exit status."""
    torch.set_num_threads(1)
    start = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the pages show short paths
        paths = [Path(name) for name in ("pole", "breakout", "markup", "moved")]
        collect(paths[0], "CartPole-v1", 4_000)
        collect(paths[1], "ale:breakout", 800)
        write_markup(paths[2])
        collect(paths[3], "CartPole-v1", 400)
        flags = Flags(str(Path(folder, "flags.jsonl")), [*map(str, paths)])
        datasets = [Dataset(str(path), flags) for path in paths]
        viewer = Viewer(datasets)
        thread = threading.Thread(target=viewer.serve)
        thread.start()
        try:
            words = [*command, folder, viewer.url]
            return subprocess.run(words, cwd=start, check=False).returncode
        finally:
            viewer.stop()
            thread.join()
            for each in datasets:
                each.close()
            os.chdir(start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
