"""Test end flags that other programs write as numbers.

They become bools if all values are 0 or 1, and are refused otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rlds_kit as kit
import torch
from tensordict import TensorDict

from tallyroll.storage import import_dataset, open_storage, verify, verify_dataset
from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.lerobot.features import LeRobotFeature
from tallyroll.storage.ext.exchange.lerobot.foreign import DerivedColumns
from tallyroll.storage.rows.schema import Column

ROWS, ENDS, TIMEOUTS = 100, (20, 99), (50,)
LENGTHS = [21, 30, 49]
Values = dict[str, np.ndarray]


def values(dtype: str, shape: tuple[int, ...] = ()) -> Values:
    """Return columns by their Tallyroll names. Flags have ``dtype``, and ``shape`` per row."""
    rng = np.random.default_rng(0)
    flags = [np.isin(np.arange(ROWS), at).astype(dtype) for at in (ENDS, TIMEOUTS)]
    return {
        "observation": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "action": rng.normal(size=(ROWS, 1)).astype(np.float32),
        "next/reward": rng.normal(size=(ROWS, 1)).astype(np.float32),
        "next/terminated": flags[0].reshape(ROWS, *shape),
        "next/truncated": flags[1].reshape(ROWS, *shape),
    }


def d4rl(path: Path, rows: Values) -> Path:
    h5py = pytest.importorskip("h5py")
    names = ("observations", "actions", "rewards", "terminals", "timeouts")
    with h5py.File(path, "w") as file:
        for name, column in zip(names, rows.values(), strict=True):
            file[name] = column.reshape(ROWS) if name == "rewards" else column
    return path


def npz(path: Path, rows: Values) -> Path:
    np.savez(path.with_suffix(".npz"), **rows)  # type: ignore[arg-type]
    return path.with_suffix(".npz")


def parquet(path: Path, rows: Values) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet_of = pytest.importorskip("pyarrow.parquet")
    columns = {}
    for name, column in rows.items():
        flat = arrow.array(column.reshape(-1))
        wide = arrow.FixedSizeListArray.from_arrays(flat, column.size // ROWS)
        columns[name.replace("/", ".")] = wide if column.ndim > 1 else flat
    parquet_of.write_table(arrow.table(columns), path)
    return path


def torchrl(path: Path, rows: Values) -> Path:
    found = TensorDict({}, [ROWS])
    for name, column in rows.items():
        found[tuple(name.split("/"))] = torch.from_numpy(column)
    found.memmap(str(path))
    return path


WRITERS: dict[str, Callable[[Path, Values], Path]] = {
    "d4rl": d4rl,
    "npz": npz,
    "parquet": parquet,
    "torchrl": torchrl,
}
DTYPES = ("bool", "uint8", "int8", "int64", "float16", "float32", "float64")


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_that_are_0_or_1_are_flags(
    kind: str, dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    source = WRITERS[kind](tmp_path / "source", values(dtype, shape))
    report = import_dataset(source, tmp_path / "rows", kind)
    assert report.numbered
    with open_storage(tmp_path / "rows") as storage:
        assert storage.trajectories.lengths.tolist() == LENGTHS
        assert storage.trajectories.ends.tolist() == ["terminated", "truncated", "terminated"]
        rows = storage.get(slice(None))
        for name, ends in (("terminated", ENDS), ("truncated", TIMEOUTS)):
            flags = rows["next", name]
            assert flags.dtype is torch.bool
            assert flags.reshape(-1).nonzero().ravel().tolist() == [*ends]
        assert rows["observation"].equal(torch.from_numpy(values(dtype)["observation"]))
    assert verify(tmp_path / "rows").sound


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [
        ("float32", 0.5, "0.5"),
        ("float64", np.nan, "nan"),
        ("uint8", 255, "255"),
        ("int64", -1, "-1"),
    ],
)
def test_the_first_other_value_is_named(
    kind: str, dtype: str, value: float, text: str, tmp_path: Path
) -> None:
    rows = values(dtype)
    rows["next/truncated"][[37, 60]] = value, 7
    source = WRITERS[kind](tmp_path / "source", rows)
    match = rf"next/truncated: expected 0 or 1 .* got {text} in row 37\. Nothing was written"
    with pytest.raises(InvalidDataset, match=match):
        import_dataset(source, tmp_path / "rows", kind)
    assert not (tmp_path / "rows").exists()
    if kind == "d4rl":
        assert not verify_dataset(source, kind).sound


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_of_rlds(dtype: str, tmp_path: Path) -> None:
    stored = "int64" if dtype in ("uint8", "int8") else dtype
    step = {"observation": kit.tensor("float32")}
    step |= {name: kit.tensor(stored) for name in ("is_last", "is_terminal")}
    last, no = np.array([0, 0, 0, 0, 1]), np.zeros(5, int)
    kind = np.float32 if stored.startswith("float") else np.int64
    episodes = [
        {
            "steps/observation": np.arange(5, dtype=np.float32),
            "steps/is_last": last.astype(kind),
            "steps/is_terminal": terminal.astype(kind),
        }
        for terminal in (last, no)
    ]
    said = kit.dictionary(steps=kit.dataset(kit.dictionary(**step)))
    kit.write(tmp_path / "walk", [episodes], said)
    import_dataset(tmp_path / "walk", tmp_path / "back", "rlds")
    with open_storage(tmp_path / "back") as back:
        assert back.trajectories.ends.tolist() == ["terminated", "truncated"]
    if stored != "bool":
        episodes[1]["steps/is_last"][2] = 3
        kit.write(tmp_path / "wrong", [episodes], said)
        with pytest.raises(InvalidDataset, match=r"steps/is_last: expected 0 or 1 .* got 3"):
            import_dataset(tmp_path / "wrong", tmp_path / "other", "rlds")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_flags_of_lerobot(dtype: str, shape: tuple[int, ...]) -> None:
    name = ("next", "done")
    kind = torch.from_numpy(np.zeros(1, dtype)).dtype
    derived = DerivedColumns([LeRobotFeature("next.done", Column(name, kind, shape), "numbers")])
    done = np.array([0, 0, 1, 0, 0]).astype(dtype).reshape(5, *shape)
    episodes, steps = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1])
    parts = [
        ({name: done[at]}, episodes[at], steps[at])
        for at in (slice(0, 2), slice(2, 4), slice(4, 5))
    ]
    blocks = list(derived.blocks(iter(parts)))
    found = {
        flag: np.concatenate([block["next", flag] for block in blocks]).ravel().tolist()
        for flag in ("terminated", "truncated", "done")
    }
    assert found["terminated"] == [False, False, True, False, False]
    assert found["truncated"] == [False, False, False, False, True]
    assert all(column.dtype is torch.bool for column in derived.schema.columns[:3])
    if dtype != "bool":
        done[3] = 2
        with pytest.raises(InvalidDataset, match=r"next/done: expected 0 or 1 .* row 3"):
            list(
                DerivedColumns(
                    [LeRobotFeature("next.done", Column(name, kind, shape), "numbers")]
                ).blocks(iter(parts))
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_of_minari(dtype: str, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    box = {"type": "Box", "dtype": "float32", "shape": [3], "low": [-9.0] * 3, "high": [9.0] * 3}
    said = {
        "total_episodes": 2,
        "total_steps": 9,
        "data_format": "hdf5",
        "observation_space": json.dumps(box),
        "action_space": json.dumps(box),
        "dataset_id": "walk/test-v0",
        "minari_version": "0.5.3",
    }
    data = tmp_path / "walk" / "data"
    data.mkdir(parents=True)
    (data / "metadata.json").write_text(json.dumps(said))
    with h5py.File(data / "main_data.hdf5", "w", track_order=True) as file:
        for number, count in enumerate((4, 5)):
            group = file.create_group(f"episode_{number}")
            group.attrs.update(id=number, total_steps=count)
            group["observations"] = np.zeros((count + 1, 3), np.float32)
            group["actions"] = np.zeros((count, 3), np.float32)
            group["rewards"] = np.zeros(count)
            group["terminations"] = ((np.arange(count) == count - 1) & (not number)).astype(dtype)
            group["truncations"] = ((np.arange(count) == count - 1) & bool(number)).astype(dtype)
    import_dataset(tmp_path / "walk", tmp_path / "back", "minari")
    with open_storage(tmp_path / "back") as back:
        assert back.trajectories.ends.tolist() == ["terminated", "truncated"]
        assert back.get(0)["next", "terminated"].dtype is torch.bool
    if dtype != "bool":
        with h5py.File(data / "main_data.hdf5", "r+") as file:
            file["episode_1/terminations"][2] = 2
        match = r"next/terminated: expected 0 or 1 .* got 2.* in row 6"
        with pytest.raises(InvalidDataset, match=match):
            import_dataset(tmp_path / "walk", tmp_path / "other", "minari")
