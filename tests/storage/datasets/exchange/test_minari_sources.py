"""Test Minari datasets in Arrow and Parquet with JPEG images, both valid and damaged."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tallyroll.storage import (
    InvalidDataset,
    import_dataset,
    open_storage,
    verify,
    verify_dataset,
)

arrow = pytest.importorskip("pyarrow")
image = pytest.importorskip("PIL.Image")

LENGTHS = (3, 1, 4)
_BOX = {"type": "Box", "dtype": "float32", "shape": [2, 2], "low": [[-9.0] * 2] * 2}
_PAIR = {
    "type": "Tuple",
    "subspaces": [{"type": "Discrete", "dtype": "int64", "n": 9, "start": -1}],
}
_PIXELS = {"type": "Box", "dtype": "uint8", "shape": [40, 32, 3], "low": 0, "high": 255}
OBSERVED = {
    "type": "Dict",
    "subspaces": {"x": {**_BOX, "high": [[9.0] * 2] * 2}, "t": _PAIR, "pixels": _PIXELS},
}
ACTED = {"type": "MultiDiscrete", "dtype": "int64", "nvec": [3, 4], "start": [0, 0]}


def frame(seed: int) -> np.ndarray:
    """Return an image with smooth colours, which JPEG preserves well."""
    place = np.add.outer(np.arange(40), np.arange(32))[..., None]
    return (place * [1, 2, 3] + 7 * seed).astype(np.uint8)


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    image.fromarray(pixels).save(file, format="JPEG")
    return file.getvalue()


def values(number: int, count: int) -> dict[str, np.ndarray]:
    """Return the numbers of an episode of ``count`` steps."""
    generator = np.random.default_rng(number)
    return {
        "x": generator.uniform(-1, 1, (count + 1, 2, 2)).astype(np.float32),
        "t": generator.integers(-1, 8, count + 1),
        "actions": generator.integers(0, 3, (count, 2)),
        "rewards": generator.normal(size=count),
        "energy": generator.normal(size=count + 1),
        "force": generator.normal(size=(count + 1, 2)).astype(np.float32),
    }


def fixed(array: np.ndarray) -> Any:
    flat = array.reshape(len(array), -1)
    kind = arrow.list_(arrow.from_numpy_dtype(array.dtype), flat.shape[1])
    return arrow.FixedSizeListArray.from_arrays(flat.reshape(-1), type=kind)


def padded(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, np.zeros((1, *array.shape[1:]), array.dtype)])


def table(number: int, count: int) -> Any:
    """Return the rows of an episode as Minari's writer stores them for these spaces."""
    found = values(number, count)
    ended = np.arange(count) == count - 1
    pixels = [jpeg(frame(number + step)) for step in range(count + 1)]
    observed = arrow.StructArray.from_arrays(
        [
            fixed(found["x"]),
            arrow.StructArray.from_arrays([arrow.array(found["t"])], names=["0"]),
            arrow.array(pixels, arrow.binary()),
        ],
        names=["x", "t", "pixels"],
    )
    force = fixed(found["force"])
    infos = arrow.StructArray.from_arrays(
        [arrow.array(found["energy"]), force, arrow.array(["a"] * (count + 1))],
        fields=[
            arrow.field("energy", arrow.float64()),
            arrow.field("force", force.type, metadata={"shape": "2"}),
            arrow.field("text", arrow.string()),
        ],
    )
    columns = {
        "observations": observed,
        "actions": fixed(padded(found["actions"])),
        "rewards": padded(found["rewards"]),
        "terminations": padded(ended),
        "truncations": np.zeros(count + 1, bool),
        "infos": infos,
    }
    return arrow.RecordBatch.from_pydict(columns)


def write_table(path: Path, batch: Any, compression: str | None = None) -> None:
    options = arrow.ipc.IpcWriteOptions(compression=compression)
    with arrow.ipc.new_file(path, batch.schema, options=options) as file:
        file.write_batch(batch)


def say(data: Path, **more: Any) -> None:
    said = {
        "total_episodes": len(LENGTHS),
        "total_steps": sum(LENGTHS),
        "observation_space": json.dumps(OBSERVED),
        "action_space": json.dumps(ACTED),
        "jpeg_encoding": True,
        "minari_version": "0.5.4",
    }
    (data / "metadata.json").write_text(json.dumps(said | more))


def dataset(place: Path, kind: str) -> Path:
    """Write a dataset of three episodes."""
    data = place / "data"
    data.mkdir(parents=True)
    say(data, data_format=kind)
    for number, count in enumerate(LENGTHS):
        folder, batch = data / str(number), table(number, count)
        if kind == "hdf5":
            _group(data, number, count)
            continue
        folder.mkdir()
        if kind == "arrow":
            write_table(folder / "part-0.arrow", batch)
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.Table.from_batches([batch]), folder / "part-0.parquet")
        said = {"id": number, "total_steps": count, "seed": 100 + number}
        (folder / "metadata.json").write_text(json.dumps(said))
    return place


def _group(data: Path, number: int, count: int) -> None:
    found, ended = values(number, count), np.arange(count) == count - 1
    with h5py.File(data / "main_data.hdf5", "a") as file:
        group = file.create_group(f"episode_{number}")
        group.attrs.update(id=number, total_steps=count, seed=100 + number)
        group["observations/x"], group["observations/t/_index_0"] = found["x"], found["t"]
        frames = [jpeg(frame(number + step)) for step in range(count + 1)]
        pixels = group.create_dataset(
            "observations/pixels", len(frames), h5py.vlen_dtype(np.uint8), chunks=True
        )
        for at, each in enumerate(frames):
            pixels[at] = np.frombuffer(each, np.uint8)
        group["actions"], group["rewards"] = found["actions"], found["rewards"]
        group["terminations"], group["truncations"] = ended, np.zeros(count, bool)
        group["infos/energy"], group["infos/force"] = found["energy"], found["force"]
        group["infos/text"] = ["a"] * (count + 1)


@pytest.mark.parametrize("kind", ["arrow", "parquet", "hdf5"])
def test_every_number_and_every_pixel_of_jpeg(kind: str, tmp_path: Path) -> None:
    place = dataset(tmp_path / "theirs", kind)
    report = import_dataset(place, tmp_path / "back", "minari")
    frames = sum(LENGTHS) + len(LENGTHS)
    assert (report.rows, report.lost) == (sum(LENGTHS), {"columns": 1, "lossy_frames": frames})
    assert verify(tmp_path / "back").sound
    with open_storage(tmp_path / "back") as storage:
        said = storage.runs[0]["spaces"]
        assert said["x"] == {**_BOX, "low": -9.0, "high": 9.0}
        assert said["t/_index_0"] == _PAIR["subspaces"][0]
        assert (said["action"], said["pixels"]) == (ACTED, _PIXELS)
        assert storage.trajectories.table["reset_seed"].tolist() == [100, 101, 102]
        for number, rows in enumerate(storage.trajectories.values()):
            wanted = values(number, LENGTHS[number])
            pixels = [
                np.asarray(image.open(io.BytesIO(jpeg(frame(number + step)))))
                for step in range(LENGTHS[number] + 1)
            ]
            for key, each in (
                (("x",), wanted["x"]), (("t", "_index_0"), wanted["t"]), (("pixels",), pixels),
            ):  # fmt: skip
                assert rows[key].numpy().tobytes() == np.asarray(each)[:-1].tobytes()
                assert rows["next", *key].numpy().tobytes() == np.asarray(each)[1:].tobytes()
            assert rows["action"].numpy().tobytes() == wanted["actions"].tobytes()
            assert rows["next", "reward"].numpy().tobytes() == wanted["rewards"].tobytes()
            for name in ("energy", "force"):
                found = rows["next", "infos", name].numpy()
                assert found.tobytes() == wanted[name][1:].tobytes()


@pytest.mark.parametrize("kind", ["arrow", "parquet", "hdf5"])
def test_a_sound_one_is_sound(kind: str, tmp_path: Path) -> None:
    report = verify_dataset(dataset(tmp_path / "theirs", kind))
    assert report.sound, str(report)
    assert (report.format, report.rows) == ("minari", sum(LENGTHS))


def rewritten(place: Path, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a table with other columns."""
    count = LENGTHS[number]
    columns = dict(zip(*_columns(table(number, count)), strict=True))
    change(columns)
    batch = arrow.RecordBatch.from_pydict(columns)
    write_table(place / "data" / str(number) / "part-0.arrow", batch)


def _columns(batch: Any) -> tuple[list[str], list[Any]]:
    return batch.schema.names, batch.columns


def an_action_outside(place: Path) -> None:
    wrong = np.array([[1, 4], [0, 0], [0, 0], [0, 0]])
    rewritten(place, 0, lambda columns: columns.update(actions=fixed(wrong)))


def an_end_too_early(place: Path) -> None:
    wrong = np.array([True, False, True, False])
    rewritten(place, 0, lambda columns: columns.update(terminations=wrong))


def no_rewards(place: Path) -> None:
    rewritten(place, 2, lambda columns: columns.pop("rewards"))


def nothing_for_a_row(place: Path) -> None:
    wrong = arrow.array([1.0, None, 2.0, 3.0, 0.0])
    rewritten(place, 2, lambda columns: columns.update(rewards=wrong))


def an_image_of_another_size(place: Path) -> None:
    def change(columns: dict[str, Any]) -> None:
        small = jpeg(np.zeros((8, 8, 3), np.uint8))
        old = columns["observations"]
        fields = [old.field(0), old.field(1), arrow.array([small] * 4, arrow.binary())]
        columns["observations"] = arrow.StructArray.from_arrays(fields, names=["x", "t", "pixels"])

    rewritten(place, 0, change)


def cut_in_a_batch(place: Path) -> None:
    path = place / "data" / "2" / "part-0.arrow"
    os.truncate(path, path.stat().st_size // 2)


def a_link(place: Path) -> None:
    path = place / "data" / "1" / "part-0.arrow"
    path.rename(place / "elsewhere")
    path.symlink_to(place / "elsewhere")


def compressed(place: Path) -> None:
    write_table(place / "data" / "1" / "part-0.arrow", table(1, 1), "zstd")


def an_episode_too_few(place: Path) -> None:
    (place / "data" / "1" / "part-0.arrow").unlink()


@pytest.mark.parametrize(
    ("fault", "check", "imports"),
    [
        (an_action_outside, "spaces", True),
        (an_end_too_early, "ends", True),
        (no_rewards, "columns", False),
        (nothing_for_a_row, "files", False),
        (an_image_of_another_size, "files", False),
        (cut_in_a_batch, "files", False),
        (a_link, "files", False),
        (compressed, "files", False),
        (an_episode_too_few, "files", False),
    ],
)
def test_one_that_is_wrong(
    fault: Callable[[Path], None], check: str, imports: bool, tmp_path: Path
) -> None:
    """Verification names the episode, and the import is complete or leaves nothing."""
    place = dataset(tmp_path / "theirs", "arrow")
    fault(place)
    found = next(each for each in verify_dataset(place).findings if each.check == check)
    assert found.places[0].episode in (0, 1, 2)
    if imports:
        import_dataset(place, tmp_path / "back", "minari")
        return
    with pytest.raises(InvalidDataset):
        import_dataset(place, tmp_path / "back", "minari")
    assert not (tmp_path / "back").exists()


def test_rows_of_a_file_without_an_end(tmp_path: Path) -> None:
    """The footer of an Arrow file repeats the positions of its batches.

    Rows are readable without it.
    """
    place = dataset(tmp_path / "theirs", "arrow")
    path = place / "data" / "2" / "part-0.arrow"
    footer = int.from_bytes(path.read_bytes()[-10:-6], "little")
    os.truncate(path, path.stat().st_size - 10 - footer)
    assert import_dataset(place, tmp_path / "back", "minari").rows == sum(LENGTHS)
