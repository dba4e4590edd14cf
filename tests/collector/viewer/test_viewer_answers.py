"""The viewer's answers about storages, compared with the storages and with plain computations."""

from __future__ import annotations

import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.viewer import episodes, values
from tallyroll.collector.ext.viewer.dataset import PAGE, SORTED_BY, Dataset
from tallyroll.collector.ext.viewer.episodes import EpisodeTable, rows_of_episode
from tallyroll.collector.ext.viewer.flags import Flags
from tallyroll.collector.ext.viewer.values import FrameView, encoded
from tallyroll.storage import MemmapStorage, StorageMissing, UnknownTrajectory, open_storage
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.stores.rewinds import rewind_to

from viewer_kit import coded, straight


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def column(found: dict[str, Any], name: str) -> np.ndarray:
    (values,) = (each["values"] for each in found["columns"] if each["name"] == name)
    return np.array(values)


def test_each_episode_is_that_of_the_storage(path: Path) -> None:
    coded(path)
    dataset = Dataset(str(path))
    with open_storage(path) as storage:
        mine = storage.trajectories
        for at, id in enumerate(mine.ids.tolist()):
            found = dataset.episode(id)
            lane, _, step = column(found, "observation")
            assert (column(found, "observation")[1] == id).all()
            assert (lane == found["lane"]).all()
            assert step.tolist() == mine[id]["collector", "step"].tolist()
            rewards = mine[id]["next", "reward"][:, 0].tolist()
            assert column(found, "next/reward")[0].tolist() == rewards
            assert found["end"] == mine.ends[at]
            assert found["return"] == mine.returns[at] == sum(rewards)
            assert found["length"] == mine.lengths[at] == len(found["x"])
            rows = mine.rows_of(id)
            assert [found["first_row"], found["last_row"]] == [rows[0], rows[-1]]
            ids = [None, *mine.ids.tolist(), None]
            around = [None if each is None else str(each) for each in (ids[at], ids[at + 2])]
            assert [found["before"], found["after"]] == around
        with pytest.raises(UnknownTrajectory, match="has no rows of trajectory 99999"):
            dataset.episode(99999)
    dataset.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_scan_finds_the_rows_without_an_index(
    path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    model = coded(path, 400, seed)
    monkeypatch.setattr(episodes, "_CHUNK_ROWS", 5)
    with open_storage(path) as storage:
        reader = storage.reader
        read: list[int] = []
        real = episodes._values
        monkeypatch.setattr(
            episodes, "_values", lambda *each: (read.append(each[3]), real(*each))[1]
        )
        for id, rows in model.trajectories().items():
            assert rows_of_episode(reader, id, rows[0], rows[-1]).tolist() == rows
            read.clear()
            assert rows_of_episode(reader, id).tolist() == rows
            mine = np.flatnonzero(model.lane == model.lane[rows[0]])
            next_one = mine[mine > rows[-1]][:1].tolist() or [len(model)]
            assert max(read) <= next_one[0] + 5  # it stops when the lane goes on
        assert episodes.first_id(reader) == model.ids[0]
        assert reader.trajectory_index.counted is None


def test_the_first_episode_does_not_wait_for_the_table(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = coded(path)
    counting = threading.Event()
    real = EpisodeTable._whole

    def slow(table: EpisodeTable) -> Any:
        counting.wait(30)
        return real(table)

    monkeypatch.setattr(EpisodeTable, "_whole", slow)
    dataset = Dataset(str(path))
    try:
        found = dataset.episode(None)
        assert found["id"] == str(model.ids[0])
        rows = model.trajectories()[int(model.ids[0])]
        assert (found["length"], found["last_row"]) == (len(rows), rows[-1])
        assert found["return"] == model.rewards[rows].sum()
        assert not (empty := dataset.episodes())["complete"]
        assert (empty["total"], empty["rows"], empty["head"]) == (0, 0, len(model))
    finally:
        counting.set()
    assert dataset.episodes()["complete"]
    again = dataset.episode(None)
    assert [again[n] for n in ("id", "length", "end")] == [
        found[n] for n in ("id", "length", "end")
    ]
    dataset.close()


def test_the_table_fills_while_rows_are_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = coded(path, 400)
    monkeypatch.setattr("tallyroll.storage.trajectories.columns._CHUNK_ROWS", 100)
    monkeypatch.setattr("tallyroll.collector.ext.viewer.episodes._BETWEEN_SECONDS", 0)
    [file.unlink() for file in path.glob("episodes*")]
    parts = []
    real = EpisodeTable._publish

    def publish(table: EpisodeTable, *counts: int) -> None:
        real(table, *counts)
        parts.append(table._counted)

    monkeypatch.setattr(EpisodeTable, "_publish", publish)
    dataset = Dataset(str(path))
    assert dataset.counted().complete
    dataset.close()
    for part in parts[:-1]:
        assert 0 < part.rows < part.head == len(model)
        assert part.table["length"].sum() == part.rows
    assert [part.rows for part in parts[:-1]] == [100, 200, 300]


@pytest.mark.parametrize("where", ["", "length > 6", "end == 'terminated' and lane in (0, 2)"])
def test_the_table_is_sorted_filtered_and_paged(path: Path, where: str) -> None:
    coded(path, 4000)
    dataset = Dataset(str(path))
    with open_storage(path) as storage:
        chosen = storage.trajectories.matching(where) if where else storage.trajectories.table
        for sort in SORTED_BY:
            for descending in (False, True):
                found = [dataset.episodes(where, sort, descending, page) for page in range(2)]
                lines = [line for each in found for line in each["lines"]]
                assert found[0]["total"] == len(chosen) > PAGE
                assert len(lines) == min(2 * PAGE, len(chosen))
                keys = np.sort(chosen[sort])[:: -1 if descending else 1]
                by_id = {str(each["id"]): each for each in chosen}
                assert [by_id[each["id"]][sort] for each in lines] == keys[: len(lines)].tolist()
    assert dataset.episodes(page=10**15)["lines"] == []
    with pytest.raises(ValueError, match="sort: expected one of id, lane"):
        dataset.episodes(sort="observation")
    dataset.close()


def test_long_curves_have_the_extremes_of_each_stretch(path: Path) -> None:
    length = 5003
    walk = np.random.default_rng(0).normal(size=(length, 20)).cumsum(0)
    walk[17], walk[4000:4100] = np.nan, np.inf
    with MemmapStorage(path, mode="create") as storage:
        storage.extend(straight(length, walk))
    dataset = Dataset(str(path))
    found = dataset.episode(7)
    every, points = found["every"], len(found["x"])
    assert every > 1
    assert points <= 2010
    (told,) = (each for each in found["columns"] if each["name"] == "observation")
    assert (told["elements"], len(told["values"])) == (20, 16)
    assert told["not_finite"] == 101 * 16
    for element, line in enumerate(told["values"]):
        assert len(line) == points
        for at in range(0, points, 2):
            part = walk[at // 2 * every : at // 2 * every + every, element]
            least, most = np.fmin.reduce(part), np.fmax.reduce(part)
            expected = [v if np.isfinite(v) else None for v in (float(least), float(most))]
            assert line[at : at + 2] == expected
            assert found["x"][at] == at // 2 * every
    dataset.close()


SHAPES = {
    (9, 11): lambda v: v[..., None],
    (9, 11, 1): lambda v: v,
    (9, 11, 3): lambda v: v,
    (3, 9, 11): lambda v: np.moveaxis(v, 1, -1),
    (4, 9, 11): lambda v: v[:, -1][..., None],
    (9, 11, 4): lambda v: v[..., -1:],
    (16, 9, 11): lambda v: v[:, -1][..., None],
    (2, 9, 11, 3): lambda v: v[:, -1],
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_frames_are_the_stored_pixels(path: Path, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (150, *shape), np.uint8)
    model = coded(path, 150, more={"pixels": pixels, ("next", "pixels"): pixels})
    dataset = Dataset(str(path))
    rows = max(model.trajectories().values(), key=len)
    id = int(model.ids[rows[0]])
    expected = SHAPES[shape](pixels[rows])
    (picture,) = dataset.episode(id)["pictures"]
    assert picture["name"] == "pixels"
    assert [picture[n] for n in ("height", "width", "channels")] == [*expected.shape[1:]]
    found = np.concatenate(dataset.frames(id, 0, 2, np.copy))
    assert np.array_equal(found, expected[2:66])
    assert encoded(found) == ("raw", expected[2:66].tobytes())
    assert dataset.frames(id, 0, 10**9, np.copy) == []
    with pytest.raises(ValueError, match="column: expected a number below 1, got 1"):
        dataset.frames(id, 1, 0, np.copy)
    dataset.close()


@pytest.mark.parametrize(
    "column",
    [
        Column(("a",), torch.float32, (9, 9)),
        Column(("a",), torch.uint8, (9,)),
        Column(("a",), torch.uint8, (3, 3)),
        Column(("a",), torch.uint8, (9, 9, 9, 9)),
    ],
    ids=str,
)
def test_other_columns_are_no_images(column: Column) -> None:
    assert FrameView.of(column) is None


@pytest.mark.parametrize(
    ("shape", "size"), [((300, 20, 3), (20, 300)), ((512, 1024, 1), (512, 256))]
)
def test_large_frames_are_images_of_at_most_512_pixels(
    shape: tuple[int, ...], size: tuple[int, int]
) -> None:
    frames = np.zeros((3, *shape), np.uint8)
    frames[1] = 200
    encoding, content = encoded(frames)
    assert encoding == "webp"
    shown = []
    while content:
        nbytes = int.from_bytes(content[:4], "little")
        shown.append(Image.open(io.BytesIO(content[4 : 4 + nbytes]), formats=["WEBP"]))
        content = content[4 + nbytes :]
    assert [each.size for each in shown] == [size] * 3
    assert [np.asarray(each).mean() for each in shown] == pytest.approx([0, 200, 0], abs=3)


def test_histograms_count_all_values_between_the_bounds(path: Path) -> None:
    with SyncCollector(
        "Pendulum-v1", frames_per_batch=50, total_frames=300, num_envs=2, storage=path, seed=0
    ) as collector:
        collector.collect(300)
    dataset = Dataset(str(path))
    with open_storage(path) as storage:
        rows = storage.get(slice(None))
        found = {each["name"]: each for each in dataset.histograms()}
        assert {*found} >= {"action", "observation"}
        assert len(found["observation"]["elements"]) == 3
        for name, low, high in (
            ("action", [-2.0], [2.0]),
            ("observation", [-1, -1, -8], [1, 1, 8]),
        ):
            for at, bars in enumerate(found[name]["elements"]):
                values = rows[name].double().numpy().reshape(300, -1)[:, at]
                assert (bars["low"], bars["high"]) == (low[at], high[at])
                assert bars["counts"] == np.histogram(values, 40, (low[at], high[at]))[0].tolist()
                assert [bars["below"], bars["above"], bars["not_finite"]] == [0, 0, 0]
    dataset.close()


def test_values_outside_bounds_are_counted_apart() -> None:
    bars = values._bars(np.array([-9, 0.0, 1, 1, 5, np.nan, np.inf]), 0.0, 1.0, whole=True)
    assert [sum(bars["counts"]), bars["counts"]] == [3, [1, 2]]
    assert [bars["below"], bars["above"], bars["not_finite"]] == [1, 1, 2]
    half = values._bars(np.array([2.0, 4.0]), 1.0, np.inf, whole=False)
    assert (half["low"], half["high"], half["edges"][0], half["edges"][-1]) == (1, "inf", 1, 4)
    json.dumps([bars, half], allow_nan=False)


def test_the_course_has_the_means_of_equally_many_episodes(path: Path) -> None:
    coded(path, 4000)
    dataset = Dataset(str(path))
    found = dataset.trends()
    with open_storage(path) as storage:
        table = storage.trajectories.table
        table = table[(table["first_step"] == 0) & (table["end"] != 0)]
        table = table[np.argsort(table["last_row"])]
    assert found["episodes"] == len(table)
    parts = np.array_split(table, len(found["x"]))
    assert found["x"] == [int(part["last_row"][-1]) for part in parts] or len(table) > 400
    (returns,) = found["returns"]
    at = 0
    for point, last_row in enumerate(found["x"]):
        end = int(np.flatnonzero(table["last_row"] == last_row)[0]) + 1
        part, at = table[at:end], end
        assert returns["mean"][point] == pytest.approx(part["return"].mean())
        assert returns["low"][point] == part["return"].min()
        assert returns["high"][point] == part["return"].max()
        assert found["lengths"]["mean"][point] == pytest.approx(part["length"].mean())
        shares = [each[point] for each in found["ends"]]
        assert shares == pytest.approx([(part["end"] == code).mean() for code in (1, 2, 3)])
    assert at == len(table)
    dataset.close()


def test_findings_lead_to_their_episodes(path: Path) -> None:
    model = coded(path)
    with open_storage(path, "append") as storage:
        rows = model.rows(0, 1)
        rows["observation"] = torch.full((1, 3), torch.nan, dtype=torch.float64)
        rows["next", "observation"] = torch.zeros(1, 3, dtype=torch.float64)
        rows["collector", "traj_ids"][:] = 10**6
        storage.extend(rows)
    dataset = Dataset(str(path))
    assert dataset.verification() == {"state": "none"}
    assert dataset.start_verification()["state"] == "running"
    assert dataset._verifying is not None
    dataset._verifying.join(30)
    found = dataset.verification()
    assert (found["state"], found["sound"], found["rows"]) == ("done", False, 301)
    places = [place for each in found["findings"] for place in each["places"]]
    assert any(each["trajectory"] == str(10**6) and "row 300" in each["text"] for each in places)
    json.dumps(found, allow_nan=False)
    dataset.close()


def test_rows_that_were_rewound_are_gone(path: Path) -> None:
    model = coded(path)
    dataset = Dataset(str(path))
    last = int(model.ids[-1])
    assert dataset.episode(last)["length"]
    with open_storage(path, "append") as storage:
        rewind_to(storage.writer, 40, None)
    left = dict.fromkeys(model.ids[:40].tolist())
    assert [int(each["id"]) for each in dataset.episodes()["lines"]] == [*left]
    assert dataset.summary()["rows"] == 40
    with pytest.raises(UnknownTrajectory, match="They may have been removed"):
        dataset.episode(last)
    dataset.close()


def test_episodes_of_before_a_rewind_are_not_shown_while_rows_are_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded(path)
    dataset = Dataset(str(path))
    assert dataset.episodes()["complete"]
    with open_storage(path, "append") as storage:
        rewind_to(storage.writer, 40, None)
    counting = threading.Event()
    real = EpisodeTable._whole
    monkeypatch.setattr(EpisodeTable, "_whole", lambda table: (counting.wait(30), real(table))[1])
    try:
        found = dataset.episodes()
        assert (found["lines"], found["complete"], found["head"]) == ([], False, 40)
    finally:
        counting.set()
    dataset.close()


def test_a_deleted_storage_is_named_and_a_new_one_is_opened(path: Path) -> None:
    coded(path)
    dataset = Dataset(str(path))
    shutil.rmtree(path)
    for _ in range(2):
        with pytest.raises(StorageMissing, match=r"rows.* does not exist"):
            dataset.summary()
    coded(path, 20)
    assert dataset.summary()["rows"] == 20
    assert sum(each["length"] for each in dataset.episodes()["lines"]) == 20
    dataset.close()
    dataset.close()


def test_several_storages_and_rings_are_read(path: Path, tmp_path: Path) -> None:
    coded(path, 50)
    coded(tmp_path / "rows-2", 60, seed=1)
    both = Dataset(str(tmp_path / "rows*"))
    assert both.summary()["rows"] == 110
    lines = both.episodes()["lines"]
    assert sum(each["length"] for each in lines) == 110
    for each in lines:
        assert both.episode(int(each["id"]))["length"] == each["length"]
    both.close()
    with MemmapStorage(tmp_path / "ring", mode="create", max_size=40) as ring:
        with open_storage(path) as storage:
            rows = storage.get(slice(None))
        ring.extend(rows[:30])
        ring.extend(rows[30:])
        kept = ring.trajectories
        ids = kept.ids.tolist()
        dataset = Dataset(str(tmp_path / "ring"))
        for id in ids:
            assert dataset.episode(id)["length"] == len(kept[id])
        dataset.close()


def test_storages_without_rows_or_episodes_are_shown(path: Path, tmp_path: Path) -> None:
    with MemmapStorage(path, mode="create") as storage:
        storage.extend(TensorDict({"x": torch.arange(3)}, [3]))
    dataset = Dataset(str(path))
    assert dataset.summary()["rows"] == 3
    assert "collector/traj_ids" in dataset.episodes()["error"]
    with pytest.raises(Exception, match="has no columns collector/traj_ids"):
        dataset.episode(None)
    dataset.close()
    coded(tmp_path / "empty", 20)
    with open_storage(tmp_path / "empty", "append") as storage:
        rewind_to(storage.writer, 0, None)
    empty = Dataset(str(tmp_path / "empty"))
    assert empty.summary()["rows"] == 0
    assert (empty.episodes()["total"], empty.trends()["x"], empty.histograms()) == (0, [], [])
    with pytest.raises(UnknownTrajectory, match="has no rows yet"):
        empty.episode(None)
    empty.close()


def test_flags_are_lines_of_a_file_outside_the_storage(path: Path, tmp_path: Path) -> None:
    model = coded(path)
    file = tmp_path / "flags.jsonl"
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    first, other = int(model.ids[0]), int(model.ids[-1])
    dataset = Dataset(str(path), Flags(str(file), [str(path)]))
    for id, flag in ((first, "odd <b>\n\x1b"), (other, "x"), (first, "odd"), (other, "")):
        dataset.set_flag(id, flag)
    with pytest.raises(UnknownTrajectory):
        dataset.set_flag(10**9, "x")
    with pytest.raises(ValueError, match="at most 1000 characters"):
        dataset.set_flag(first, "x" * 1001)
    name = dataset.summary()["id"]
    dataset.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(each["storage"], each["trajectory"], each["flag"]) for each in lines] == [
        (name, first, "odd <b>\n\x1b"),
        (name, other, "x"),
        (name, first, "odd"),
        (name, other, ""),
    ]
    again = Dataset(str(path), Flags(str(file), [str(path)]))
    assert {each["id"]: each["flag"] for each in again.episodes()["lines"] if each["flag"]} == {
        str(first): "odd"
    }
    assert again.episode(first)["flag"] == "odd"
    again.close()
    assert {each: each.read_bytes() for each in before} == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows/flags", None, "expected a file outside the storage"),
        ("none/flags", None, "is not a folder"),
        ("folder", "", "expected a regular file"),
        ("flags", "[1]\n", "line 1 is not a flag"),
        ("flags", '{"storage": "a", "trajectory": "x", "flag": ""}\n', "line 1 is not a flag"),
    ],
)
def test_unsuitable_files_of_flags_are_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    coded(tmp_path / "rows", 20)
    (tmp_path / "folder").mkdir()
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(ArgumentError, match=message):
        Flags(str(tmp_path / name), [str(tmp_path / "rows")])
