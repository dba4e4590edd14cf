"""Test exports in the formats' own readers, and sources that these libraries wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorStorage

from tallyroll.storage import MemmapStorage, import_dataset, open_storage, verify
from tallyroll.storage.ext.testing.reader_contract import collected
from tallyroll.storage.storages import DiskStorage


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DiskStorage]:
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(collected())
    with open_storage(tmp_path / "source") as storage:
        yield storage


def test_numpy_reads_an_archive(source: DiskStorage, tmp_path: Path) -> None:
    source.export(tmp_path / "rows.npz", "npz")
    rows = source.get(slice(None))
    with np.load(tmp_path / "rows.npz", allow_pickle=False) as found:
        assert "version" not in found["tallyroll"].item()[:20]
        for name in ("observation", "next/pixels", "collector/traj_ids", "next/terminated"):
            np.testing.assert_array_equal(found[name], rows[tuple(name.split("/"))])
        bits = rows["agents", "observation"].view(torch.uint16).numpy()
        np.testing.assert_array_equal(found["agents/observation"], bits)


def test_an_archive_of_numpy(tmp_path: Path) -> None:
    done = np.array([0, 0, 1, 0, 1, 0], bool)
    arrays = {
        "observation": np.arange(12.0).reshape(6, 2),
        "next/terminated": done,
        "next/truncated": np.zeros(6, bool),
        "old": np.arange(6, dtype=">i2"),
    }
    np.savez_compressed(tmp_path / "rows.npz", **arrays)
    report = import_dataset(tmp_path / "rows.npz", tmp_path / "back", "npz")
    assert (report.rows, report.numbered) == (6, True)
    with open_storage(tmp_path / "back") as back:
        rows = back.get(slice(None))
        assert rows["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 2]
        assert rows["collector", "step"].tolist() == [0, 1, 2, 0, 1, 0]
        assert rows["old"].tolist() == list(range(6))
        assert back.trajectories.ends.tolist() == ["terminated", "terminated", "cut"]


def test_arrow_and_pandas_read_parquet(source: DiskStorage, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    source.export(tmp_path / "rows.parquet", "parquet")
    rows = source.get(slice(None))
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.num_rows == len(source)
    found = table["next.observation"].combine_chunks().flatten().to_numpy()
    np.testing.assert_array_equal(found.reshape(-1, 4), rows["next", "observation"])
    np.testing.assert_array_equal(table["collector.step"], rows["collector", "step"])
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    np.testing.assert_array_equal(np.stack(frame["observation"]), rows["observation"])


def test_arrow_pandas_and_xarray_read_a_folder_for_the_hub(
    source: DiskStorage, tmp_path: Path
) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    pandas, xarray = pytest.importorskip("pandas"), pytest.importorskip("xarray")
    source.export(tmp_path / "hub", "hf")
    rows = source.get(slice(None))
    table = dataset.dataset(tmp_path / "hub" / "data", format="parquet").to_table()
    assert table.num_rows == len(source)
    frame = pandas.read_parquet(tmp_path / "hub" / "data")
    np.testing.assert_array_equal(np.stack(frame["pixels"]), rows["pixels"].reshape(141, -1))
    found = xarray.Dataset.from_dataframe(frame[["collector.step", "collector.lane", "action"]])
    assert found.sizes == {"index": 141}
    for name, key in (("action", "action"), ("collector.step", ("collector", "step"))):
        np.testing.assert_array_equal(found[name], rows[key])
        np.testing.assert_array_equal(table[name], rows[key])


def test_a_table_of_arrow(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lists = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    table = arrow.table(
        {
            "observation.state": arrow.array(lists, arrow.list_(arrow.float32())),
            "action": arrow.array(lists, arrow.list_(arrow.float64(), 2)),
            "task": ["a", "b", "c"],
            "index": [0, 1, 2],
        }
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    report = import_dataset(tmp_path / "rows.parquet", tmp_path / "back", "parquet")
    assert (report.rows, report.numbered, report.lost) == (3, False, {"columns": 1})
    with open_storage(tmp_path / "back") as back:
        rows = back.get(slice(None))
        assert rows["observation", "state"].tolist() == lists
        assert rows["action"].dtype is torch.float64
    ragged = arrow.table({"x": arrow.array([[1.0], [1.0, 2.0]], arrow.list_(arrow.float32()))})
    parquet.write_table(ragged, tmp_path / "ragged.parquet")
    with pytest.raises(Exception, match="rows of different lengths"):
        import_dataset(tmp_path / "ragged.parquet", tmp_path / "other", "parquet")
    holes = arrow.table({"x": arrow.array([1.0, None])})
    parquet.write_table(holes, tmp_path / "holes.parquet")
    with pytest.raises(Exception, match="rows without a value"):
        import_dataset(tmp_path / "holes.parquet", tmp_path / "other", "parquet")


def test_torchrl_samples_a_folder(source: DiskStorage, tmp_path: Path) -> None:
    source.export(tmp_path / "rows", "torchrl")
    found = TensorDict.load_memmap(tmp_path / "rows")
    rows = source.get(slice(None))
    assert found.batch_size == rows.batch_size
    assert found["agents"].batch_size == rows["agents"].batch_size
    for key in rows.keys(include_nested=True, leaves_only=True):
        assert torch.equal(found[key].view(torch.uint8), rows[key].view(torch.uint8)), key
    buffer = ReplayBuffer(storage=TensorStorage(found), batch_size=16)
    assert buffer.sample()["observation"].shape == (16, 4)


def test_a_folder_of_tensordict(tmp_path: Path) -> None:
    rows = collected()
    rows.memmap(tmp_path / "rows")
    report = import_dataset(tmp_path / "rows", tmp_path / "back", "torchrl")
    assert (report.rows, report.lost) == (len(rows), {})
    with open_storage(tmp_path / "back") as back:
        found = back.get(slice(None))
        for key in rows.keys(include_nested=True, leaves_only=True):
            assert torch.equal(found[key].view(torch.uint8), rows[key].view(torch.uint8)), key


def test_d4rl_has_its_names(source: DiskStorage, tmp_path: Path) -> None:
    narrow = source.trajectories.where("length > 0")
    keys = [("observation",), ("next", "observation"), "action", ("next", "reward")]
    keys += [("next", "terminated"), ("next", "truncated"), ("collector", "traj_ids")]
    keys += [("collector", "step"), ("collector", "lane")]
    narrow.export(tmp_path / "rows.hdf5", "d4rl", columns=keys)  # type: ignore[arg-type]
    with h5py.File(tmp_path / "rows.hdf5") as file:
        names = {"observations", "actions", "rewards", "terminals", "timeouts"}
        assert names | {"next_observations", "infos", "metadata"} == {*file}
        assert file["rewards"].shape == file["terminals"].shape == (141,)
        at = 0
        for rows in source.trajectories.values():
            part = slice(at, at := at + len(rows))
            np.testing.assert_array_equal(file["observations"][part], rows["observation"])
            np.testing.assert_array_equal(file["terminals"][part], rows["next", "terminated"][:, 0])


@pytest.mark.parametrize("with_next", [True, False])
def test_a_file_of_d4rl(tmp_path: Path, with_next: bool) -> None:
    seen = np.arange(14, dtype=np.float32).reshape(7, 2)
    with h5py.File(tmp_path / "theirs.hdf5", "w") as file:
        file["observations"] = seen
        if with_next:
            file["next_observations"] = seen + 2
        file["actions"] = np.ones((7, 1), np.float32)
        file["rewards"] = np.arange(7, dtype=np.float64)
        file["terminals"] = np.array([0, 0, 1, 0, 0, 0, 0], bool)
        file["timeouts"] = np.array([0, 0, 0, 0, 1, 0, 0], bool)
        file["infos/qpos"] = np.zeros((7, 3))
        file["metadata/algorithm"] = "SAC"
    report = import_dataset(tmp_path / "theirs.hdf5", tmp_path / "back", "d4rl")
    lost = {} if with_next else {"final_observations": 2, "rows_without_next_observation": 1}
    count = 7 if with_next else 6
    assert (report.rows, report.numbered, report.lost) == (count, True, lost)
    with open_storage(tmp_path / "back") as back:
        rows = back.get(slice(None))
        assert rows["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 2, 2][:count]
        after = seen + 2 if with_next else seen[1:]
        np.testing.assert_array_equal(rows["next", "observation"], after)
        if not with_next:
            valid = rows["collector", "next_valid"].tolist()
            assert valid == [True, True, False, True, False, True]
        assert back.trajectories.ends.tolist() == ["terminated", "truncated", "cut"]
    assert verify(tmp_path / "back").sound
