"""Test LeRobot folders: images, videos, statistics, and data that LeRobot wrote and read."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lerobot_kit import pictured, unpacked

from tallyroll.storage import (
    LeRobotOptions,
    MemmapStorage,
    diff,
    import_dataset,
    open_storage,
    verify,
)
from tallyroll.storage.ext.exchange import export_rows
from tallyroll.storage.ext.exchange.lerobot import layout, statistics

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("PIL")
av = pytest.importorskip("av")


def exported(tmp_path: Path, rows: Any, name: str = "out", **options: Any) -> Any:
    """Write rows to a storage and export them. Return the report."""
    with MemmapStorage(tmp_path / f"{name}-rows") as storage:
        storage.extend(rows)
        return storage.export(tmp_path / name, "lerobot", options=LeRobotOptions(**options))


def come_back(tmp_path: Path, name: str = "out") -> None:
    """Import an export and compare all rows."""
    import_dataset(tmp_path / name, tmp_path / f"{name}-back", "lerobot")
    found = diff(tmp_path / f"{name}-rows", tmp_path / f"{name}-back")
    assert (found.changed, found.only, found.schema) == (0, (0, 0), ())
    assert found.equal


@settings(max_examples=4, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    st.lists(
        st.tuples(st.integers(8, 20), st.integers(8, 20), st.integers(1, 4)),
        min_size=1,
        max_size=2,
    ),
    st.sampled_from([None, "h264-lossless", "ffv1"]),
    st.booleans(),
    st.integers(1, 9),
)
def test_images_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, int, int]],
    video: str | None,
    first: bool,
    steps: int,
) -> None:
    rows = pictured(11, steps, **{f"eye{number}": each for number, each in enumerate(shapes)})
    if first:  # channels before height and width
        for key in ("eye0", ("next", "eye0")):
            rows[key] = rows[key].movedim(-1, 1).contiguous()
    place = tmp_path_factory.mktemp("images")
    report = exported(place, rows, video=video)
    assert report.lost == {}
    said = json.loads((place / "out" / layout.INFO).read_text())["features"]
    kinds = {each["dtype"] for name, each in said.items() if "eye" in name}
    filmed = video is not None and {1, 3} & {each[2] for each in shapes}
    assert ("video" in kinds) == bool(filmed)
    come_back(place)


@pytest.mark.parametrize("video", ["av1", "h264"])
def test_lossy_videos(tmp_path: Path, video: str) -> None:
    rows = pictured(13, 6, pixels=(64, 64, 3), odd=(9, 8, 3))
    report = exported(tmp_path, rows, video=video, crf=5)
    assert report.lost == {"lossy_frames": 13 + 3}
    said = json.loads((tmp_path / "out" / layout.INFO).read_text())
    assert said["features"]["observation.images.odd"]["dtype"] == "image"
    assert "next.observation.images.pixels" not in said["features"]
    film = said["video_path"].format(
        video_key="observation.images.pixels", chunk_index=0, file_index=0
    )
    with av.open(str(tmp_path / "out" / film)) as file:
        keys = [frame.key_frame for frame in file.decode(video=0)]
    assert keys[0]
    assert all(one or other for one, other in pairwise(keys))
    assert len(keys) == 16
    import_dataset(tmp_path / "out", tmp_path / "back", "lerobot")
    with open_storage(tmp_path / "back") as back:
        found = back.get(slice(None))
        for key in ("pixels", ("next", "pixels")):
            ours = rows[key].numpy()[found["observation"][:, 0].long()]
            off = np.abs(found[key].numpy().astype(int) - ours)
            assert off.mean() < 3, key
        assert (found["odd"] == rows["odd"]).all()


def test_next_images_that_are_others_are_counted(tmp_path: Path) -> None:
    rows = pictured(9, 4, pixels=(8, 8, 1))
    rows["next", "pixels"][[1, 2, 7, 8]] ^= 1  # two within, one at an end, and the last of a cut
    assert exported(tmp_path, rows, video="ffv1").lost == {"next_observations": 2}
    assert exported(tmp_path, rows, "images").lost == {}
    come_back(tmp_path, "images")


def test_small_pieces_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode starts a new file, each folder has two files, and blocks end within episodes."""
    monkeypatch.setattr(layout, "DATA_MB", 1e-5)
    monkeypatch.setattr(layout, "VIDEO_MB", 0)
    monkeypatch.setattr(layout, "CHUNK", 2)
    monkeypatch.setattr(export_rows, "BLOCK_NBYTES", 2000)
    exported(tmp_path, pictured(23, 5, pixels=(8, 8, 3)), video="ffv1")
    names = sorted(
        str(each.relative_to(tmp_path / "out")) for each in tmp_path.glob("out/data/*/*")
    )
    wanted = [f"data/chunk-{n // 2:03}/file-{n % 2:03}.parquet" for n in range(5)]
    assert names == wanted
    assert len([*tmp_path.glob("out/videos/*/*/*.mp4")]) == 5
    table = parquet.read_table(tmp_path / "out/meta/episodes")
    assert table["length"].to_pylist() == [5, 5, 5, 5, 3]
    assert table["dataset_to_index"].to_pylist() == [5, 10, 15, 20, 23]
    assert set(table["videos/observation.images.pixels/from_timestamp"].to_pylist()) == {0.0}
    come_back(tmp_path)


def test_statistics_are_those_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_rows, "BLOCK_NBYTES", 2000)
    rows = pictured(50, 17, pixels=(8, 9, 3))
    exported(tmp_path, rows)
    said = json.loads((tmp_path / "out" / layout.STATS).read_text())
    table = parquet.read_table(tmp_path / "out/meta/episodes").to_pylist()
    values = rows["observation"].numpy().astype(np.float64)
    parts = [(said["observation.state"], values)]
    for number, line in enumerate(table):
        found = {name: line[f"stats/observation.state/{name}"] for name in statistics.NAMES}
        found["count"] = line["stats/observation.state/count"]
        parts.append((found, values[17 * number : 17 * (number + 1)]))
    for found, part in parts:
        wanted = {"min": part.min(0), "max": part.max(0), "mean": part.mean(0), "std": part.std(0)}
        wanted |= {n: np.quantile(part, q, axis=0) for n, q in statistics.QUANTILES.items()}
        assert found["count"] == [len(part)]
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)
    pixels = rows["pixels"].numpy() / 255
    found = said["observation.images.pixels"]
    assert np.shape(found["mean"]) == (3, 1, 1)
    np.testing.assert_allclose(np.ravel(found["mean"]), pixels.mean((0, 1, 2)), atol=1e-9)
    np.testing.assert_allclose(np.ravel(found["std"]), pixels.std((0, 1, 2)), atol=1e-9)
    assert found["count"] == [50]


def test_quantiles_of_many_rows_are_of_some_of_them() -> None:
    values = np.random.default_rng(0).standard_normal((10_000, 2))
    numbers = statistics.Numbers(len(values), most=1000)
    for start in range(0, len(values), 77):
        numbers.add(values[start : start + 77])
    least, most, mean, std, *quantiles = numbers.done()
    np.testing.assert_array_equal([least, most], [values.min(0), values.max(0)])
    np.testing.assert_allclose([mean, std], [values.mean(0), values.std(0)], atol=1e-12)
    wanted = [np.quantile(values[::10], q, axis=0) for q in statistics.QUANTILES.values()]
    np.testing.assert_allclose(quantiles, wanted)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=300))
def test_statistics_of_pixels_are_exact(values: list[int]) -> None:
    """Statistics are identical on every processor, although its BLAS may sum in any order."""
    pixels = statistics.Pixels(1, 1)
    pixels.add(np.array(values, np.uint8).reshape(1, -1, 1, 1))
    mean = Fraction(sum(values), len(values))
    variance = sum((each - mean) ** 2 for each in values) / len(values)
    wanted = (min(values), max(values), float(mean), math.sqrt(variance))
    assert pixels.done()[:4, 0].tolist() == [each / 255 for each in wanted]


def test_names_that_lerobot_has_or_that_are_alike(tmp_path: Path) -> None:
    rows = pictured(6, 3)
    for name in ("timestamp", "index", "task", "a.b"):
        rows[name] = rows["action"] + len(name)
    rows["a", "b"] = rows["action"] + 9
    exported(tmp_path, rows)
    said = json.loads((tmp_path / "out" / layout.INFO).read_text())["features"]
    assert {"timestamp_", "index_", "task_", "a.b", "a.b_"} <= {*said}
    come_back(tmp_path)


def test_what_lerobot_read_is_what_is_written(tmp_path: Path) -> None:
    """LeRobot's loader read the packed export once. Today's export of the same rows equals it."""
    place = unpacked("ours", tmp_path)
    rows = pictured(12, 5, pixels=(16, 16, 3), plan=(9, 11, 4))
    exported(tmp_path, rows, video="h264-lossless", fps=10, task="follow the square")
    infos, stats = (
        [json.loads((each / name).read_text()) for each in (place, tmp_path / "out")]
        for name in (layout.INFO, layout.STATS)
    )
    assert infos[0] == infos[1]
    _assert_same_statistics(*stats)
    for name in ("meta/tasks.parquet", "data/chunk-000/file-000.parquet"):
        one, other = (parquet.read_table(each / name) for each in (place, tmp_path / "out"))
        assert one.schema.equals(other.schema, check_metadata=True)
        assert one.drop_columns(_images(one)).equals(other.drop_columns(_images(other)))
    one, other = (parquet.read_table(e / "meta/episodes") for e in (place, tmp_path / "out"))
    assert one.schema.equals(other.schema, check_metadata=True)
    _assert_same_statistics(one.to_pydict(), other.to_pydict())
    with np.load(place / "read.npz", allow_pickle=False) as read:
        np.testing.assert_array_equal(read["observation.state"], rows["observation"])
        np.testing.assert_array_equal(read["next.done"], rows["next", "done"][:, 0])
        np.testing.assert_array_equal(read["collector.step"], rows["collector", "step"])
        for name, column in (("images.pixels", rows["pixels"]), ("plan", rows["plan"])):
            images = np.round(read[f"observation.{name}"] * 255).astype(np.uint8)
            np.testing.assert_array_equal(images, np.moveaxis(column.numpy(), -1, 1))
        assert {*read["task"]} == {"follow the square"}
    import_dataset(place, tmp_path / "back", "lerobot")
    assert diff(tmp_path / "out-rows", tmp_path / "back").equal == 12


def _assert_same_statistics(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare statistics. Deviations may differ by rounding because they were summed elsewhere."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            _assert_same_statistics(value, other[name])
        elif "std" in name:
            np.testing.assert_allclose(other[name], value, rtol=1e-14, err_msg=name)
        else:
            assert value == other[name], name


def _images(table: Any) -> list[str]:
    """Return the PNG columns, whose bytes depend on the version of zlib."""
    return [each.name for each in table.schema if str(each.type).startswith("struct")]


@pytest.mark.parametrize("name", ["theirs_v21", "theirs_v30"])
def test_one_that_lerobot_made(tmp_path: Path, name: str) -> None:
    place = unpacked(name, tmp_path)
    report = import_dataset(place, tmp_path / "back", "lerobot")
    assert (report.rows, report.lost) == (12, {"final_observations": 3, "tasks": 2})
    assert verify(tmp_path / "back").sound
    with open_storage(tmp_path / "back") as back:
        assert back.trajectories.lengths.tolist() == [4, 3, 5]
        assert {*back.trajectories.ends} == {"terminated"}
        rows = back.get(slice(None))
    step, episode = rows["collector", "step"].numpy(), rows["collector", "traj_ids"].numpy()
    state = np.stack([episode, step, episode * 10 + step], 1)
    np.testing.assert_array_equal(rows["observation", "state"], state)
    np.testing.assert_array_equal(rows["action"], np.stack([step, -step], 1))
    np.testing.assert_array_equal(rows["next", "reward"][:, 0], step)
    height, width = np.mgrid[:64, :64]
    for number in range(12):
        planes = [width * 3 + step[number], height * 3, width + height]
        top = np.stack(planes, -1).astype(np.uint8) // 4 * 4 + np.uint8(episode[number])
        np.testing.assert_array_equal(rows["observation", "images", "top"][number], top)
        side = rows["observation", "images", "side"][number].numpy().astype(int)
        assert np.abs(side - 20 * step[number] - 40 * episode[number]).max() <= 3
    valid = rows["collector", "next_valid"].numpy()
    assert valid.tolist() == [length - 1 != at for length in (4, 3, 5) for at in range(length)]
    for key in (("state",), ("images", "top"), ("images", "side")):
        here, after = rows["observation", *key], rows["next", "observation", *key]
        np.testing.assert_array_equal(after[:-1][valid[:-1]], here[1:][valid[:-1]])
    assert rows["task_index"][:, 0].tolist() == [0] * 4 + [1] * 3 + [0] * 5


def test_an_episode_whose_end_is_not_said_was_stopped(tmp_path: Path) -> None:
    place = unpacked("theirs_v30", tmp_path)
    info = json.loads((place / layout.INFO).read_text())
    del info["features"]["next.done"]
    info["features"]["action.left"] = info["features"].pop("action") | {"dtype": "string"}
    info["features"]["observation"] = {"dtype": "float32", "shape": [1], "names": None}
    (place / layout.INFO).write_text(json.dumps(info))
    (file,) = place.glob("data/*/*.parquet")
    table = parquet.read_table(file)
    parquet.write_table(table.append_column("observation", table["next.reward"]), file)
    report = import_dataset(place, tmp_path / "back", "lerobot")
    assert report.lost == {"columns": 1, "final_observations": 3, "tasks": 2}
    assert "observation" in report.columns
    assert "observation.state" in report.columns, "no column is below another"
    assert verify(tmp_path / "back").sound
    with open_storage(tmp_path / "back") as back:
        assert {*back.trajectories.ends} == {"truncated"}
        assert back.get(slice(None))["next", "done"].sum() == 3


def test_an_end_within_an_episode_is_counted(tmp_path: Path) -> None:
    place = unpacked("theirs_v30", tmp_path)
    (file,) = place.glob("data/*/*.parquet")
    table = parquet.read_table(file)
    at = table.schema.get_field_index("next.done")
    done = [number in (1, 2, 6) for number in range(12)]
    parquet.write_table(table.set_column(at, "next.done", pyarrow.array(done)), file)
    report = import_dataset(place, tmp_path / "back", "lerobot")
    assert report.lost["dones_within_episodes"] == 2
    assert verify(tmp_path / "back").sound
    with open_storage(tmp_path / "back") as back:
        assert back.trajectories.ends.tolist() == ["truncated", "terminated", "truncated"]


def test_rows_wait_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any size, even of one row, give the same rows."""
    from tallyroll.storage.ext.exchange.lerobot import reader

    place = unpacked("theirs_v30", tmp_path)
    import_dataset(place, tmp_path / "one", "lerobot")
    for size in (1, 3):
        monkeypatch.setattr(reader, "_PIECE_ROWS", size)
        import_dataset(place, tmp_path / f"other{size}", "lerobot")
        assert diff(tmp_path / "one", tmp_path / f"other{size}").equal == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"video": "gif"}, "video: expected one of 'av1', 'h264', 'h264-lossless', 'ffv1' or None"),
        ({"fps": 0}, "fps: expected a whole number from 1 to 1000, got 0"),
        ({"fps": 29.97}, "fps: expected a whole number"),
        ({"crf": 52}, "crf: expected a whole number from 0 to 51, got 52"),
        ({"task": "x" * 5000}, "task: expected a text of at most 4096 characters"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LeRobotOptions(**options)


def test_options_of_another_format(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(pictured(3, 3))
        with pytest.raises(ValueError, match="npz accepts no options"):
            storage.export(tmp_path / "out", "npz", options=LeRobotOptions())
        with pytest.raises(ValueError, match="lerobot accepts LeRobotOptions"):
            storage.export(tmp_path / "out", "lerobot", options="av1")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
