"""Rows with images, and LeRobot datasets in archives next to the tests."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

GOLDEN = Path(__file__).parents[3] / "storage/datasets/exchange/golden/lerobot"
"""Datasets that LeRobot wrote or read. `with_lerobot.py` in this folder shows how."""


def unpacked(name: str, place: Path) -> Path:
    """Unpack a dataset and return its folder."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as packed:
        packed.extractall(place, filter="data")
    return place / name


def frames(count: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return images [count, height, width, channels]: a square moves over a grey gradient."""
    height, width, channels = shape
    rows, columns = np.mgrid[:height, :width]
    found = np.repeat((2 * rows + columns)[..., None], channels, -1).astype(np.uint8)
    found = np.repeat(found[None], count, 0)
    generator = np.random.default_rng(seed)
    for number, image in enumerate(found):
        top, left = number * 3 % (height - 4), number * 5 % (width - 4)
        image[top : top + 4, left : left + 4] = generator.integers(0, 256, channels)
    return found


def pictured(count: int, steps: int, **shapes: tuple[int, ...]) -> TensorDict:
    """Return rows of trajectories of ``steps`` rows, with a column of images for each shape.

    The next image after a trajectory's last row is the negative of the image that would follow.
    """
    number = np.arange(count)
    done = (number % steps == steps - 1)[:, None]
    columns: dict[tuple[str, ...], np.ndarray] = {
        ("observation",): (number[:, None] + np.linspace(0, 0.5, 3)).astype(np.float32),
        ("action",): np.sin(number[:, None] * np.array([1.0, 2.0])).astype(np.float32),
        ("next", "reward"): np.cos(number[:, None]).astype(np.float32),
        ("next", "done"): done,
        ("next", "terminated"): done,
        ("next", "truncated"): np.zeros_like(done),
        ("collector", "traj_ids"): number // steps,
        ("collector", "step"): number % steps,
        ("collector", "lane"): np.zeros(count, np.int32),
    }
    columns["next", "observation"] = columns[("observation",)] + 1
    for name, shape in shapes.items():
        images = frames(count + 1, shape)
        after = images[1:].copy()
        after[done[:, 0]] = 255 - after[done[:, 0]]
        columns[(name,)], columns["next", name] = images[:-1], after
    found = {key: torch.from_numpy(np.ascontiguousarray(v)) for key, v in columns.items()}
    return TensorDict(found, [count])
