"""Test that LeRobot's own loader reads our exports."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lerobot_kit import GOLDEN, pictured

from tallyroll.storage import LeRobotOptions, MemmapStorage, open_storage
from tallyroll.storage.ext.exchange.lerobot.options import Video

if importlib.util.find_spec("lerobot") is None:
    pytest.skip("lerobot is not installed", allow_module_level=True)


pytestmark = pytest.mark.timeout(600)  # a process compiles LeRobot's modules first
VIDEOS: tuple[Video, ...] = ("ffv1", "h264-lossless")


def read(*places: Path) -> list[dict[str, np.ndarray]]:
    """Return all values that LeRobot reads from datasets, in a separate process.

    Its progress bars leak a semaphore.
    """
    words = [sys.executable, GOLDEN / "with_lerobot.py", "read", *places]
    subprocess.run([*map(str, words)], check=True, timeout=550)
    found = []
    for place in places:
        with np.load(place.with_suffix(".npz"), allow_pickle=False) as arrays:
            found.append(dict(arrays))
    return found


def test_lerobot_reads_numbers_and_images(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(pictured(23, 5, pixels=(16, 12, 3), plan=(9, 11, 1), stack=(8, 8, 4)))
        storage.export(tmp_path / "out", "lerobot", options=LeRobotOptions(task="balance"))
    (found,) = read(tmp_path / "out")
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


def test_lerobot_reads_every_bit_of_lossless_videos(tmp_path: Path) -> None:
    """LeRobot turns one channel into three equal ones."""
    rows = pictured(23, 5, pixels=(16, 12, 3), odd=(9, 11, 3), plan=(12, 10, 1))
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        for video in VIDEOS:
            out = storage.export(tmp_path / video, "lerobot", options=LeRobotOptions(video=video))
            assert "lossy_frames" not in out.lost
    for video, found in zip(VIDEOS, read(*(tmp_path / each for each in VIDEOS)), strict=True):
        for name in ("pixels", "odd", "plan"):
            feature = f"observation.images.{name}"
            assert list((tmp_path / video / "videos" / feature).glob("*/*.mp4"))
            images = np.round(found[feature] * 255).astype(np.uint8)
            wanted = np.moveaxis(rows[name].numpy(), -1, 1)
            np.testing.assert_array_equal(images, np.broadcast_to(wanted, images.shape))
