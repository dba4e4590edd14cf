"""LeRobot's own loader reads what is exported.

LeRobot asks for a torch that is older than ours, so that it is installed without its dependencies.
Beside torch for CPUs torchvision has no operators, and two of them are declared here.

The packed datasets of `golden_lerobot` are what LeRobot 0.3.3 (``theirs_v21``) and 0.4.4
(``theirs_v30``) wrote of `of_theirs`, and an export of ours (``ours``) beside what LeRobot 0.6.1
read of it (``read.npz``, by `read`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot_kit import pictured

from tallyroll.storage import LeRobotOptions, MemmapStorage, open_storage

os.environ["HF_HUB_OFFLINE"] = "1"


def declared() -> Any:
    """Declare the operators that torchvision asks for as it is imported."""
    pytest.importorskip("lerobot")
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


LIBRARY = declared()


def read(place: Path) -> dict[str, np.ndarray]:
    """Return all that LeRobot gives of a dataset, an array a feature."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("tallyroll/rows", root=place, video_backend="pyav")
    items = [dataset[number] for number in range(len(dataset))]
    return {name: np.stack([np.asarray(item[name]) for item in items]) for name in items[0]}


def of_theirs(place: Path, fps: int = 10) -> None:
    """Write three episodes by LeRobot alone, with images and a video."""
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


def test_lerobot_reads_numbers_and_images(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(pictured(23, 5, pixels=(16, 12, 3), plan=(9, 11, 1), stack=(8, 8, 4)))
        storage.export(tmp_path / "out", "lerobot", options=LeRobotOptions(task="balance"))
    found = read(tmp_path / "out")
    with open_storage(tmp_path / "rows") as storage:
        rows = storage.get(slice(None))
    names = {
        "observation.state": "observation",
        "next.observation.state": ("next", "observation"),
        "action": "action",
        "collector.traj_ids": ("collector", "traj_ids"),
    }
    for name, key in names.items():
        np.testing.assert_array_equal(found[name], rows[key])
    for name in ("reward", "done", "terminated"):
        np.testing.assert_array_equal(found[f"next.{name}"], rows["next", name][:, 0])
    pictures = {"images.pixels": "pixels", "images.plan": "plan", "stack": "stack"}
    for name, key in pictures.items():
        for begin, column in (("", rows[key]), ("next.", rows["next", key])):
            images = np.round(found[f"{begin}observation.{name}"] * 255).astype(np.uint8)
            np.testing.assert_array_equal(images, np.moveaxis(column.numpy(), -1, 1))
    np.testing.assert_array_equal(found["episode_index"], np.arange(23) // 5)
    assert {*found["task"]} == {"balance"}
