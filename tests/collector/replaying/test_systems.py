"""Replays of simulators, and films: stored rows of MuJoCo and the Arcade are reproduced."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from replay_kit import KINDS, collect

from tallyroll.collector import Resets, replay
from tallyroll.collector.cli import main
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra
from tallyroll.storage import open_storage


@pytest.mark.parametrize("kind", ["seeded", "plain"])
def test_half_cheetah(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    path = collect(
        tmp_path / "a", "HalfCheetah-v5", num_envs=3, env_kwargs={"max_episode_steps": 15},
        **KINDS[kind],
    )  # fmt: skip
    report = replay(path, "all")
    assert (report.same, report.rows) == (True, 203)


@pytest.fixture(scope="module")
def pong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ale_py")
    path = tmp_path_factory.mktemp("pong") / "pong"
    options = {"num_envs": 2, "frames_per_batch": 30, "total_frames": 30}
    return collect(path, "ALE/Pong-v5", resets=Resets(seeds=True), **options)


def test_frames_of_the_arcade_and_one_pixel(pong: Path, tmp_path: Path) -> None:
    assert replay(pong, "all").same
    copy = tmp_path / "copy"
    shutil.copytree(pong, copy)
    with open_storage(copy) as storage:
        row = int(storage.trajectories.rows_of(1)[4])
        octets = storage.column("observation")[:1].nbytes
    with (copy / "observation.memmap").open("r+b") as file:
        file.seek(row * octets + 3 * (160 * 50 + 20))  # the pixel at line 50, column 20
        (red,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([red ^ 64]))
    report = replay(copy, "all")
    first = report.first_difference
    assert first is not None
    assert (first.trajectory, first.step, first.row) == (1, 4, row)
    assert (first.column, first.at, first.pixels) == ("observation", (50, 20, 0), 1)
    assert first.largest == 64
    picture = tmp_path / "a.png"
    assert main(["replay", str(copy), "--all", "--quiet", "--picture", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_film_has_a_frame_for_each_action(pong: Path, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    film = tmp_path / "a.mp4"
    report = replay(pong, "all", video=film)
    assert (report.same, report.frames) == (True, 30)
    with av.open(str(film)) as container:
        frames = [*container.decode(video=0)]
    assert len(frames) == 30
    assert (frames[0].height, frames[0].width) == (420, 320)  # twice as large as the images
    with pytest.raises(ArgumentError, match=r"ends in \.mp4"):
        replay(pong, video=tmp_path / "a.gif")
    with pytest.raises(ArgumentError, match="cannot be written"):
        replay(pong, video=tmp_path / "none/a.mp4")
    with pytest.raises(
        EnvironmentRefused, match=r"make the environment with render_mode=\"rgb_array\""
    ):
        replay(pong, 0, create_env_fn="ALE/Pong-v5", video=film)


def test_a_film_names_its_extra(pong: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match=r"films need the package av.*tallyroll\[video\]"):
        replay(pong, video="a.mp4")
    assert not Path("a.mp4").exists()
