"""Read and write datasets with LeRobot alone, where it is installed.

    python with_lerobot.py read FOLDER...       (to FOLDER.npz)
    python with_lerobot.py write FOLDER

LeRobot 0.3.3 (``theirs_v21``) and 0.4.4 (``theirs_v30``) wrote the packed datasets beside this
file. ``ours`` is a Tallyroll export together with the values that LeRobot 0.6.1 read from it
(``read.npz``). LeRobot pins an older torch, so it is installed without its dependencies. With a CPU
build of torch, torchvision has no operators; this script declares the two that are needed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
LIBRARY = torch.library.Library("torchvision", "DEF")
for each in ("nms", "qnms"):
    LIBRARY.define(f"{each}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def read(place: Path) -> dict[str, np.ndarray]:
    """Return all values that LeRobot reads from a dataset, one array per feature."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("tallyroll/rows", root=place, video_backend="pyav")
    items = [dataset[number] for number in range(len(dataset))]
    return {name: np.stack([np.asarray(item[name]) for item in items]) for name in items[0]}


def write(place: Path, fps: int = 10) -> None:
    """Write three episodes with LeRobot alone, including images and a video."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    image = {"shape": (64, 64, 3), "names": ["height", "width", "channels"]}
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": "image", **image},
        "observation.images.side": {"dtype": "video", **image},
    }
    dataset = LeRobotDataset.create("a/b", fps=fps, features=features, root=place)
    rows, columns = np.mgrid[:64, :64]
    for episode, length in enumerate((4, 3, 5)):
        for step in range(length):
            top = np.stack([columns * 3 + step, rows * 3, columns + rows], -1).astype(np.uint8)
            frame = {
                "observation.state": np.array([episode, step, episode * 10 + step], np.float32),
                "action": np.array([step, -step], np.float32),
                "next.reward": np.array([step], np.float32),
                "next.done": np.array([step == length - 1]),
                "observation.images.top": top // 4 * 4 + np.uint8(episode),
                "observation.images.side": np.full((64, 64, 3), 20 * step + 40 * episode, np.uint8),
                "task": ["push", "pull"][episode % 2],
            }
            dataset.add_frame(frame)
        dataset.save_episode()
    dataset.finalize()


if __name__ == "__main__":
    if sys.argv[1] == "read":
        for each in map(Path, sys.argv[2:]):
            np.savez_compressed(each.with_suffix(".npz"), **read(each))
    else:
        write(Path(sys.argv[2]))
