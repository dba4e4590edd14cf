"""Test Minari and Hugging Face's `datasets`: the contract, and reads with their own readers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tallyroll.storage import (
    Follow,
    MemmapStorage,
    diff,
    import_dataset,
    open_storage,
    verify,
    verify_dataset,
)
from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.testing.exchange_contract import same
from tallyroll.storage.ext.testing.reader_contract import collected
from tallyroll.storage.testing import ExchangeContract

from examples_kit import numbers, run

minari = pytest.importorskip("minari")


class TestMinari(ExchangeContract):
    kind, libraries, lossless = "minari", ("minari",), False


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(collected())
    return tmp_path / "source"


def test_minari_reads_it(source: Path, tmp_path: Path) -> None:
    with open_storage(source) as storage:
        storage.export(tmp_path / "pole-v0", "minari")
        dataset = minari.MinariDataset(tmp_path / "pole-v0" / "data")
        assert (dataset.total_episodes, dataset.total_steps) == (27, 141)
        assert dataset.id == "tallyroll/pole-v0"
        for episode, (id, rows) in zip(dataset, storage.trajectories.items(), strict=True):
            seen = episode.observations
            assert len(seen["pixels"]) == len(rows) + 1, id
            np.testing.assert_array_equal(seen["pixels"][:-1], rows["pixels"])
            np.testing.assert_array_equal(seen["pixels"][-1], rows["next", "pixels"][-1])
            np.testing.assert_array_equal(episode.actions, rows["action"])
            np.testing.assert_array_equal(episode.rewards, rows["next", "reward"][:, 0])
            np.testing.assert_array_equal(episode.terminations, rows["next", "terminated"][:, 0])
            np.testing.assert_array_equal(episode.truncations, rows["next", "truncated"][:, 0])
            version = episode.infos["collector"]["policy_version"]
            np.testing.assert_array_equal(version, rows["collector", "policy_version"])


def of_theirs(place: Path) -> None:
    """Write a dataset with Minari alone, with infos of T + 1 entries."""
    from gymnasium.spaces import Box, Discrete
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    place.mkdir()
    storage = MinariStorage.new(place / "data", Box(-1, 1, (2,)), Discrete(3), jpeg_encoding=False)
    generator = np.random.default_rng(0)
    storage.update_episodes(
        EpisodeBuffer(
            seed=100 + length,
            observations=generator.random((length + 1, 2), np.float32),
            actions=np.arange(length) % 3,
            rewards=np.ones(length, np.float32),
            terminations=np.arange(length) == length - 1,
            truncations=np.zeros(length, bool),
            infos={"x": np.arange(length + 1.0)},
        )
        for length in (3, 1, 4)
    )
    storage.update_metadata({"dataset_id": "theirs/rows-v0", "minari_version": "0.5.4"})


def test_one_that_minari_made(tmp_path: Path) -> None:
    of_theirs(tmp_path / "theirs")
    report = import_dataset(tmp_path / "theirs", tmp_path / "back", "minari")
    assert (report.rows, report.lost) == (8, {})
    assert verify(tmp_path / "back").sound
    with open_storage(tmp_path / "back") as back:
        assert back.trajectories.lengths.tolist() == [3, 1, 4]
        assert back.trajectories.table["reset_seed"].tolist() == [103, 101, 104]
        assert set(back.trajectories.ends) == {"terminated"}
        dataset = minari.MinariDataset(tmp_path / "theirs" / "data")
        for episode, rows in zip(dataset, back.trajectories.values(), strict=True):
            np.testing.assert_array_equal(episode.observations[1:], rows["next", "observation"])
            np.testing.assert_array_equal(episode.infos["x"][1:], rows["next", "infos", "x"])


@pytest.mark.parametrize("kind", ["arrow", "parquet", "hdf5"])
def test_images_and_tables_that_minari_wrote(kind: str, tmp_path: Path) -> None:
    """In each format, with JPEG, our values equal those that Minari reads, pixel by pixel."""
    from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    seen = Dict(
        pixels=Box(0, 255, (48, 40, 3), np.uint8),
        depth=Box(0, 255, (40, 40), np.uint8),
        pair=Tuple([Discrete(5, start=-2), Box(-np.inf, 3, (2, 2), np.float64)]),
        bits=MultiBinary(3),
    )
    acted = MultiDiscrete([3, 4])
    (tmp_path / "theirs").mkdir()
    data = tmp_path / "theirs" / "data"
    storage = MinariStorage.new(data, seen, acted, data_format=kind)
    generator = np.random.default_rng(1)

    def smooth(count: int, *shape: int) -> np.ndarray:
        steps = generator.integers(0, 3, (count, *shape))
        return np.cumsum(np.cumsum(steps, 1), 2).astype(np.uint8)

    lengths = (3, 1, 4)
    storage.update_episodes(
        EpisodeBuffer(
            seed=7,
            observations={
                "pixels": smooth(length + 1, 48, 40, 3),
                "depth": smooth(length + 1, 40, 40),
                "pair": (
                    generator.integers(-2, 3, length + 1),
                    generator.uniform(-1, 1, (length + 1, 2, 2)),
                ),
                "bits": generator.integers(0, 2, (length + 1, 3)).astype(np.int8),
            },
            actions=generator.integers(0, 3, (length, 2)),
            rewards=generator.normal(size=length),
            terminations=np.arange(length) == length - 1,
            truncations=np.zeros(length, bool),
            infos={"force": generator.normal(size=(length + 1, 2))},
        )
        for length in lengths
    )
    storage.update_metadata({"dataset_id": "theirs/rows-v0", "minari_version": "0.5.4"})
    assert verify_dataset(tmp_path / "theirs").sound
    report = import_dataset(tmp_path / "theirs", tmp_path / "back", "minari")
    assert report.lost == {"lossy_frames": 2 * (sum(lengths) + len(lengths))}
    assert verify(tmp_path / "back").sound
    with open_storage(tmp_path / "back") as back:
        assert back.runs[0]["spaces"]["pair/_index_0"]["start"] == -2
        dataset = minari.MinariDataset(data)
        for number, (episode, rows) in enumerate(
            zip(dataset, back.trajectories.values(), strict=True)
        ):
            read = episode.observations
            for name, wanted in {
                ("pixels",): read["pixels"],
                ("depth",): read["depth"],
                ("pair", "_index_0"): read["pair"][0],
                ("pair", "_index_1"): read["pair"][1],
                ("bits",): read["bits"],
            }.items():
                np.testing.assert_array_equal(wanted[:-1], rows[name])
                np.testing.assert_array_equal(wanted[1:], rows["next", *name])
            np.testing.assert_array_equal(episode.actions, rows["action"])
            np.testing.assert_array_equal(episode.rewards, rows["next", "reward"][:, 0])
            assert len(rows) == lengths[number]


def test_spaces_of_an_environment_come_to_minari_and_back(tmp_path: Path) -> None:
    """Minari reads Gymnasium's spaces. Noise widens the space that actions leave."""
    import gymnasium

    from tallyroll.collector import SyncCollector

    for name in ("CartPole-v1", "Pendulum-v1"):
        env = gymnasium.make(name)
        place = tmp_path / name
        with SyncCollector(
            name, frames_per_batch=300, total_frames=300, seed=0, storage=place
        ) as collector:
            collector.collect(300)
        with open_storage(place) as storage:
            report = storage.export(tmp_path / f"{name}-minari", "minari")
            assert "spaces" not in report.lost
            wanted = storage.runs[0]["spaces"]
        dataset = minari.MinariDataset(tmp_path / f"{name}-minari" / "data")
        assert dataset.spec.action_space == env.action_space
        assert dataset.spec.observation_space == env.observation_space
        (tmp_path / f"{name}-minari" / "data" / "tallyroll.json").unlink()
        import_dataset(tmp_path / f"{name}-minari", tmp_path / f"{name}-back", "minari")
        with open_storage(tmp_path / f"{name}-back") as storage:
            assert storage.runs[0]["spaces"] == wanted
        assert verify_dataset(tmp_path / f"{name}-minari").sound


def test_values_that_leave_their_space_widen_it(tmp_path: Path) -> None:
    from gymnasium.spaces import Box
    from tensordict.nn import TensorDictModule

    from tallyroll.collector import SyncCollector

    policy = TensorDictModule(lambda x: x[..., :1] * 9, ["observation"], ["action"])
    with (
        pytest.warns(UserWarning, match="outside"),
        SyncCollector(
            "Pendulum-v1", policy, frames_per_batch=50, total_frames=50, seed=0,
            storage=tmp_path / "rows",
        ) as collector,
    ):  # fmt: skip
        collector.collect(50)
    assert verify(tmp_path / "rows").sound
    with open_storage(tmp_path / "rows") as storage:
        assert storage.export(tmp_path / "out", "minari").lost == {"spaces": 1}
    dataset = minari.MinariDataset(tmp_path / "out" / "data")
    assert dataset.spec.action_space == Box(-np.inf, np.inf, (1,))
    assert verify_dataset(tmp_path / "out").sound


@pytest.mark.parametrize("fault", ["longer", "outside", "format"])
def test_one_that_is_wrong(fault: str, tmp_path: Path) -> None:
    of_theirs(tmp_path / "theirs")
    data = tmp_path / "theirs" / "data"
    metadata = json.loads((data / "metadata.json").read_text())
    with h5py.File(data / "main_data.hdf5", "r+") as file:
        if fault == "longer":
            group = file["episode_1"]
            del group["actions"]
            group["actions"] = np.zeros(7, np.int64)
        if fault == "outside":
            del file["episode_2"]["actions"]
            file["episode_2"]["actions"] = h5py.ExternalLink("/etc/passwd", "/")
    if fault == "format":
        metadata["data_format"] = "zarr"
    (data / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(InvalidDataset):
        import_dataset(tmp_path / "theirs", tmp_path / "back", "minari")
    assert not (tmp_path / "back").exists()


def test_the_example_learns_from_episodes_that_minari_wrote(tmp_path: Path) -> None:
    out = run("datasets/from_minari.py", tmp_path, out="x", episodes=8, epochs=2, eval_episodes=5)
    (place,) = (tmp_path / "x" / "minari").rglob("main_data.hdf5")
    theirs = minari.MinariDataset(place.parent)
    assert numbers(r"^(\d+) rows imported, lost: nothing$", out) == [theirs.total_steps]
    returns = [episode.rewards.sum() for episode in theirs]
    good = [each for each in returns if each >= 200]
    assert 0 < len(good) < len(returns) == 8
    found = re.findall(r"^(\w+) +(\d+) +(\d+) +([\d.]+) +[\d.]+$", out, re.MULTILINE)
    assert found == [
        ("all", str(theirs.total_steps), "8", f"{np.mean(returns):.1f}"),
        ("good", str(int(sum(good))), str(len(good)), f"{np.mean(good):.1f}"),
    ]
    with open_storage(tmp_path / "x" / "rows") as storage:
        assert storage.trajectories.table["reset_seed"].tolist() == [*range(1, 9)]


_READ = """
import sys, numpy, datasets
found = datasets.load_dataset(sys.argv[1], cache_dir=sys.argv[2])["train"].with_format("numpy")[:]
numpy.savez(sys.argv[3], **{name: numpy.stack(values) for name, values in found.items()})
"""


def test_datasets_reads_a_folder_for_the_hub(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with open_storage(source) as storage:
        storage.export(tmp_path / "hub", "hf")
        places = [str(tmp_path / name) for name in ("hub", "cache", "found.npz")]
        env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
        # Use a separate process, because Minari's progress bars leak a semaphore.
        subprocess.run([sys.executable, "-c", _READ, *places], check=True, timeout=100, env=env)
        rows = storage.get(slice(None))
        with np.load(places[-1]) as table:
            np.testing.assert_array_equal(table["observation"], rows["observation"])
            pixels = table["pixels"].reshape(rows["pixels"].shape)
            np.testing.assert_array_equal(pixels, rows["pixels"])
            ids = rows["collector", "traj_ids"]
            np.testing.assert_array_equal(table["collector.traj_ids"], ids)


def test_datasets_reads_a_version_of_parquet(source: Path, tmp_path: Path) -> None:
    """The library reads through the resolved link, like a concurrent reader."""
    pytest.importorskip("datasets")
    with open_storage(source) as storage:
        report = storage.export(tmp_path / "out", "parquet", follow=Follow())
        rows = storage.get(slice(None))
    version = os.path.realpath(report.path)
    assert version.endswith("00000001.parquet")
    places = [version, *(str(tmp_path / name) for name in ("cache", "found.npz"))]
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    read = _READ.replace("load_dataset(", "load_dataset('parquet', data_files=")
    subprocess.run([sys.executable, "-c", read, *places], check=True, timeout=100, env=env)
    with np.load(places[-1]) as table:
        assert {*table} >= {"observation", "action", "next.reward", "collector.traj_ids"}
        np.testing.assert_array_equal(table["observation"], rows["observation"])
        np.testing.assert_array_equal(table["next.reward"], rows["next", "reward"])


def test_polars_reads_a_folder_for_the_hub(source: Path, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    with open_storage(source) as storage:
        storage.export(tmp_path / "hub", "hf")
        rows = storage.get(slice(None))
    found = polars.scan_parquet(tmp_path / "hub" / "data" / "*.parquet").collect()
    np.testing.assert_array_equal(found["observation"].to_numpy(), rows["observation"])
    np.testing.assert_array_equal(found["collector.step"].to_numpy(), rows["collector", "step"])
    ends = found.filter(polars.col("next.terminated").arr.get(0)).height
    assert ends == int(rows["next", "terminated"].sum())


def test_the_hub_reads_our_cards(source: Path, tmp_path: Path) -> None:
    """Use the Hub's own library, whose data card has the fields that it sorts by."""
    hub = pytest.importorskip("huggingface_hub")
    with open_storage(source) as storage:
        storage.export(tmp_path / "hub", "hf")
        (tmp_path / "README.md").write_text(str(storage.card(licence="apache-2.0")))
    said = hub.DatasetCard.load(tmp_path / "hub" / "README.md").data
    assert (said.license, said.size_categories) == ("unknown", ["n<1K"])
    assert said.task_categories == ["reinforcement-learning"]
    assert said.configs[0]["data_files"][0]["path"] == "data/train-*.parquet"
    card = hub.DatasetCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.pretty_name) == ("apache-2.0", "source")
    assert card.text.strip().startswith("# source")


def test_polars_reads_parquet(source: Path, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    with open_storage(source) as storage:
        storage.export(tmp_path / "rows.parquet", "parquet")
        found, rows = polars.read_parquet(tmp_path / "rows.parquet"), storage.get(slice(None))
    np.testing.assert_array_equal(found["observation"].to_numpy(), rows["observation"])
    np.testing.assert_array_equal(found["next.reward"].to_numpy(), rows["next", "reward"])


def test_one_format_after_the_other_gives_the_rows_back(source: Path, tmp_path: Path) -> None:
    with open_storage(source) as storage:
        storage.export(tmp_path / "minari", "minari")
    import_dataset(tmp_path / "minari", tmp_path / "one", "minari")
    with open_storage(tmp_path / "one") as one:
        one.export(tmp_path / "rows.parquet", "parquet")
        import_dataset(tmp_path / "rows.parquet", tmp_path / "two", "parquet")
        with open_storage(tmp_path / "two") as two:
            same(one.reader, two.reader)
    assert diff(source, tmp_path / "two").equal == 141
