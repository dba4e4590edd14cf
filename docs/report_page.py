"""Make a sample page of `tallyroll report`: `python docs/report_page.py FILE`.

The script collects a few runs for it: runs of two policies, one run that is still below its budget,
and a path that does not exist.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from tallyroll.collector import SyncCollector, report

FRAMES = 2_000


def upright(td: TensorDictBase) -> TensorDictBase:
    """Push towards the side to which the pole is falling."""
    return td.set("action", (td["observation"][..., 2] > 0).long())


def collect(path: Path, policy: Any, seed: int, frames: int) -> None:
    """Collect this number of transitions of a run of `FRAMES`."""
    with SyncCollector(
        "CartPole-v1",
        policy,
        num_envs=4,
        frames_per_batch=250,
        total_frames=FRAMES,
        seed=seed,
        storage=path,
    ) as collector:
        for _ in collector:
            if collector.ledger.stored >= frames:
                break


def main(file: Path) -> None:
    """Write the page."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, policy in {"upright": upright, "random": None}.items():
            for seed in range(5):
                stopped = (name, seed) == ("random", 4)
                collect(Path(folder, name, str(seed)), policy, seed, 1_500 if stopped else FRAMES)
        report([folder, Path(folder, "gone")], window=20).to_html(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
