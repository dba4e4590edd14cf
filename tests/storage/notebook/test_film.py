"""Videos of stored episodes: decoded, they are the images of the rows, one after another."""

from __future__ import annotations

import io
import re
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, Video
from tallyroll.storage.errors import ColumnsMissing, MissingLibrary, UnknownTrajectory
from tallyroll.storage.ext.notebook.film import Mp4

ROWS = 5


def test_pixels_of_small_images_are_repeated() -> None:
    image = np.zeros((20, 30, 3), np.uint8)
    image[3, 4] = 255
    file = io.BytesIO()
    encoder = Mp4(av, file)
    encoder.add(image)
    with pytest.raises(ValueError, match=r"frames of one size, \[20, 30\], got \[30, 20\]"):
        encoder.add(image.transpose(1, 0, 2))
    encoder.close()
    with av.open(io.BytesIO(file.getvalue())) as decoded:
        (frame,) = (each.to_ndarray(format="rgb24") for each in decoded.decode(video=0))
    assert frame.shape == (180, 270, 3)
    bright = np.argwhere(frame.mean(-1) > 128)
    assert (bright.min(0).tolist(), bright.max(0).tolist()) == ([27, 36], [35, 44])


def shades(shape: tuple[int, ...]) -> torch.Tensor:
    """Return images whose brightness tells their number; the last frame of a stack counts."""
    found = torch.zeros((ROWS + 1, *shape), dtype=torch.uint8)
    for number in range(ROWS + 1):
        image = found[number]
        channels = image if len(shape) < 3 or shape[-1] == 3 else image[-1]
        channels.fill_(40 * number + 20)
    return found


def rows_of(shape: tuple[int, ...]) -> TensorDict:
    every = shades(shape)
    rows = TensorDict({"pixels": every[:-1], "x": torch.zeros(ROWS, 2)}, [ROWS])
    rows["next", "pixels"] = every[1:]
    rows["next", "reward"] = torch.ones(ROWS, 1)
    for name in ("done", "terminated", "truncated"):
        rows["next", name] = torch.zeros(ROWS, 1, dtype=torch.bool)
    rows["collector", "traj_ids"] = torch.full((ROWS,), 7)
    rows["collector", "step"] = torch.arange(ROWS)
    rows["collector", "lane"] = torch.zeros(ROWS, dtype=torch.int32)
    return rows


def brightness(data: bytes) -> list[float]:
    with av.open(io.BytesIO(data)) as file:
        return [frame.to_ndarray(format="rgb24").mean() for frame in file.decode(video=0)]


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        ((32, 48, 3), 288),
        ((33, 47), 282),
        ((3, 32, 48), 288),
        ((4, 84, 84), 336),
        ((1, 16, 16), 256),
        ((257, 33), 33),
    ],
)
def test_a_video_has_a_frame_for_each_row_and_the_final_one(
    shape: tuple[int, ...], width: int, tmp_path: Path
) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        rows = rows_of(shape)
        if shape == (3, 32, 48):
            rows["pixels"] = shades((32, 48, 3))[:-1].movedim(-1, 1)
            rows["next", "pixels"] = shades((32, 48, 3))[1:].movedim(-1, 1)
        storage.extend(rows)
        video = storage.trajectories.video(7)
    assert isinstance(video, Video)
    assert video.frames == ROWS + 1
    found = brightness(video.data)
    share = np.prod(shape) / (258 * 34) if shape == (257, 33) else 1.0  # padded to even sizes
    wanted = [share * (40 * number + 20) for number in range(ROWS + 1)]
    np.testing.assert_allclose(found, wanted, atol=4)
    assert video.width == width
    video.save(tmp_path / "episode.mp4")
    assert (tmp_path / "episode.mp4").read_bytes() == video.data
    (text,) = re.findall(r'src="data:video/mp4;base64,([^"]*)"', video._repr_html_())
    assert b64decode(text) == video.data
    assert len(repr(video)) < 80


def test_what_cannot_be_filmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows_of((32, 32, 3)))
        found = storage.trajectories
        assert found.video(7, "pixels", rate=5).frames == found.video(7, ("pixels",)).frames
        with pytest.raises(ColumnsMissing, match="expected one of pixels, got x"):
            found.video(7, "x")
        with pytest.raises(UnknownTrajectory):
            found.video(8)
        monkeypatch.setitem(sys.modules, "av", None)
        with pytest.raises(MissingLibrary, match=r'pip install "tallyroll\[video\]"'):
            found.video(7)
    with MemmapStorage(tmp_path / "other") as storage:
        storage.extend(rows_of((2,)))
        with pytest.raises(ColumnsMissing, match="tallyroll replay --render"):
            storage.trajectories.video(7)


def test_a_notebook_does_not_store_a_large_video() -> None:
    made: Any = Video(b"\0" * 9_000_000, 3, 64)
    assert made._repr_html_() == "<div>a video of 3 frames, 9.0 MB: use save(path)</div>"
