"""Test RLDS folders that are damaged or malicious."""

from __future__ import annotations

import json
import os
import sys
import zlib
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rlds_kit as kit

from tallyroll.storage import import_dataset, repair, verify_dataset
from tallyroll.storage.errors import InvalidDataset, NotEnoughMemory, StorageError, StorageFull
from tallyroll.storage.ext.exchange.rlds.foreign import ForeignRows
from tallyroll.storage.ext.exchange.rlds.records import Damage, records, write_record

pytest.importorskip("google.protobuf")
pytest.importorskip("google_crc32c")
pytest.importorskip("PIL")

MORE = int(os.environ.get("TALLYROLL_EXCHANGES", "1"))
SHARD = "walk-train.tfrecord-00000-of-00001"
STEP = {
    "observation": kit.tensor("float32", 2),
    "camera": kit.picture(8, 8, 3),
    "packed": kit.tensor("int32", 2, encoding="zlib"),
    "action": kit.tensor("uint8"),
    **kit.FLAGS,
}


def episode(steps: int = 4) -> kit.Episode:
    """Return an episode that can be imported."""
    packed = zlib.compress(np.arange(2, dtype="<i4").tobytes())
    return {
        "steps/observation": np.arange(2 * steps, dtype=np.float32),
        "steps/camera": [kit.png(np.zeros((8, 8, 3), np.uint8))] * steps,
        "steps/packed": [packed] * steps,
        "steps/action": np.arange(steps),
        **kit.flags(steps, terminal=True),
    }


def said(**step: Any) -> dict[str, Any]:
    """Return ``features.json`` with some step features replaced."""
    return kit.dictionary(steps=kit.dataset(kit.dictionary(**{**STEP, **step})))


def written(place: Path, **lists: Any) -> Path:
    """Write a folder of one episode with some features replaced."""
    kit.write(place, [[{**episode(), **lists}]], said())
    return place


def refused(place: Path, match: str) -> None:
    back = place.parent / "back"
    kinds = (InvalidDataset, StorageFull, NotEnoughMemory)
    with pytest.raises(kinds, match=match) as caught:
        import_dataset(place, back, "rlds")
    assert str(caught.value).count("cannot be imported") <= 1
    assert not back.exists()


def test_one_that_is_whole(tmp_path: Path) -> None:
    report = import_dataset(written(tmp_path / "rows"), tmp_path / "back", "rlds")
    assert (report.rows, report.lost) == (3, {"last_actions": 1})


LISTS: dict[str, tuple[dict[str, Any], str]] = {
    "no such kind": ({"steps/observation": np.arange(8)}, "has 0 steps|has 4 steps"),
    "another width": ({"steps/observation": np.ones(7, "f4")}, "7 numbers, expected 2 for each"),
    "fewer": ({"steps/action": np.arange(3)}, "steps"),
    "beyond its dtype": ({"steps/action": np.arange(4) * 300}, "do not fit uint8"),
    "no flag": ({"steps/is_last": np.array([0, 0, 0, 7])}, "do not fit bool"),
    "no image": ({"steps/camera": [b"GIF89a"] * 4}, "cannot be decoded"),
    "a bomb of zlib": ({"steps/packed": [zlib.compress(bytes(2**24))] * 4}, "of 9 bytes, expected"),
    "no zlib": ({"steps/packed": [b"12345678"] * 4}, "cannot be unpacked"),
    "an image of another size": (
        {"steps/camera": [kit.png(np.zeros((8, 9, 3), np.uint8))] * 4},
        "expected",
    ),
}


@pytest.mark.parametrize("fault", LISTS)
def test_values_that_cannot_be(fault: str, tmp_path: Path) -> None:
    lists, match = LISTS[fault]
    refused(written(tmp_path / "rows", **lists), match)


RECORDS = {
    "a length of terabytes": (kit.framed(b"", 2**44), "ends within a record"),
    "a length beyond 63 bits": (kit.framed(b"", 2**64 - 1), "ends within a record"),
    "a length that is another": (b"\1" + kit.framed(b"1234")[1:], "record's length does not match"),
    "no example": (kit.framed(b"\xff" * 9), "is not a tf.train.Example"),
    "a name that is no text": (
        kit.framed(kit.part(1, kit.part(1, kit.part(1, b"\xff")))),
        "not a tf",
    ),
    "groups in groups": (kit.framed(b"\x0b" * 100_000), "is not a tf.train.Example"),
    "nothing": (kit.framed(b""), r"the feature steps/\S+ is missing"),
    "no record": (b"", "0 episodes, expected 1"),
    "two records": (kit.framed(kit.example(episode())) * 2, "2 episodes, expected 1"),
}


@pytest.mark.parametrize("fault", RECORDS)
def test_records_that_are_damaged(fault: str, tmp_path: Path) -> None:
    content, match = RECORDS[fault]
    place = written(tmp_path / "rows")
    (place / SHARD).write_bytes(content)
    refused(place, match)


def test_damage_under_right_checksums(tmp_path: Path) -> None:
    """A reader raises only Tallyroll errors for any content of a record.

    A repair reports the reason.
    """
    generator, whole = np.random.default_rng(0), 0
    sound, damaged = kit.example(episode()), [episode(), episode(7)]
    for number in range(6 * MORE):
        content = bytearray(kit.example(damaged[number % 2]))
        for at in generator.integers(0, len(content), generator.integers(1, 9)):
            content[at] = generator.integers(256)
        del content[len(content) - generator.integers(0, 2) * generator.integers(9) :]
        place, out = written(tmp_path / f"rows{number}"), tmp_path / f"out{number}"
        (place / SHARD).write_bytes(kit.framed(bytes(content)) + kit.framed(sound))
        info = (place / "dataset_info.json").read_text().replace('["1"]', '["2"]')
        (place / "dataset_info.json").write_text(info)
        try:
            whole += import_dataset(place, out, "rlds").rows > 0
        except (InvalidDataset, NotEnoughMemory):
            assert not out.exists()
        verify_dataset(place)
        report = repair(place, tmp_path / f"saved{number}")
        assert report.rows == 3 if report.lost else report.rows >= 6
    assert whole < 6 * MORE


INFOS: dict[str, tuple[dict[str, Any], str]] = {
    "another format": (
        {"fileFormat": "array_record"},
        "Convert the dataset with TensorFlow Datasets",
    ),
    "no name": ({"name": "../walk"}, "its name .* is invalid"),
    "no splits": ({"splits": []}, "has no splits"),
    "many splits": ({"splits": [{}] * 2000}, "has no splits"),
    "no list": ({"splits": [3]}, "is not a JSON object"),
    "a way out": ({"filepathTemplate": "../../{SPLIT}"}, "leads out of the dataset"),
    "an absolute path": ({"filepathTemplate": "/etc/passwd"}, "leads out of the dataset"),
    "an attribute": ({"filepathTemplate": "{SPLIT.__class__}"}, "leads out of the dataset"),
    "a name that there is not": ({"filepathTemplate": "{HOME}"}, "unknown field HOME"),
    "one file for all": (
        {"filepathTemplate": SHARD, "shardLengths": ["1", "1"]},
        "a split is listed twice",
    ),
    "a negative length": ({"shardLengths": ["-1"]}, "a shard's length"),
    "a long length": ({"shardLengths": ["9" * 5000]}, "a shard's length"),
    "a length that is none": ({"shardLengths": [{}]}, "a shard's length"),
    "many shards": ({"shardLengths": ["1"] * 70_000}, "more than 65,536 shards"),
}


@pytest.mark.parametrize("fault", INFOS)
def test_metadata_that_cannot_be(fault: str, tmp_path: Path) -> None:
    more, match = INFOS[fault]
    place = written(tmp_path / "rows")
    info = json.loads((place / "dataset_info.json").read_text())
    if not {*more} & {"fileFormat", "name", "splits"}:
        info["splits"][0] |= more
    else:
        info |= more
    (place / "dataset_info.json").write_text(json.dumps(info))
    refused(place, match)


def deep(count: int) -> dict[str, Any]:
    found = kit.tensor("float32")
    for _ in range(count):
        found = kit.dictionary(a=found)
    return found


def older(name: str, content: Any) -> dict[str, Any]:
    """Return a feature as TensorFlow Datasets wrote it until version 4.5."""
    kind = {"FeaturesDict": "features_dict", "Dataset": "dataset_feature"}[name]
    return {"type": f"{kit.CLASS}.{kind}.{name}", "content": content}


FEATURES: dict[str, tuple[Any, str]] = {
    "none": ([], "features have no steps, as RLDS requires"),
    "no steps": (
        kit.dictionary(image=kit.picture(8, 8, 3)),
        "features have no steps, as RLDS requires",
    ),
    "no observation": (kit.dictionary(steps=kit.dataset(kit.dictionary())), "has no observation"),
    "a huge shape": (said(observation=kit.tensor("float32", 2**40, 2**40)), "has no observation"),
    "a negative shape": (said(observation=kit.tensor("float32", -3)), "has no observation"),
    "no shape": (
        said(observation={"tensor": {"shape": [], "dtype": "int8"}}),
        "has no observation",
    ),
    "no dtype": (said(observation=kit.tensor("object")), "has no observation"),
    "nested too deep": (said(observation=deep(30)), "nested too deep"),
    "older, and no steps": (older("FeaturesDict", {}), "features have no steps, as RLDS requires"),
    "older, of a module of theirs": (
        {"type": "harm.FeaturesDict", "content": {"steps": older("Dataset", {})}},
        "features have no steps, as RLDS requires",
    ),
    "a text that is no JSON": (older("FeaturesDict", "{"), "a text in its features"),
    "older, and nested too deep": (
        reduce(lambda inner, _: older("FeaturesDict", {"a": inner}), range(80), {}),
        "nested too deep",
    ),
    "a name that leads out": (
        said(observation=kit.dictionary(**{"..": deep(0)})),
        "no observation",
    ),
}


@pytest.mark.parametrize("fault", FEATURES)
def test_features_that_cannot_be(fault: str, tmp_path: Path) -> None:
    features, match = FEATURES[fault]
    place = written(tmp_path / "rows")
    (place / "features.json").write_text(json.dumps(features))
    refused(place, match)


def test_a_name_that_is_a_column_and_a_group_is_lost_once() -> None:
    """The other features are imported."""

    def group(**features: Any) -> dict[str, Any]:
        return {"featuresDict": {"features": features}}

    one: dict[str, Any] = {"tensor": {"dtype": "float32", "shape": {}, "encoding": "none"}}
    step = group(observation=one, infos=one, next=one, terminated=group(why=one))
    of_steps = {"sequence": {"feature": step}}
    rows = ForeignRows(group(steps=of_steps, episode_metadata=one, seed=one))
    names = ["/".join(each.column.key) for each in rows.features]
    assert names == ["observation", "infos", "episode_metadata"]
    assert rows.lost["columns"] == 3


def test_texts_that_are_nested_too_deep(tmp_path: Path) -> None:
    for name in ("features.json", "dataset_info.json"):
        place = written(tmp_path / name)
        (place / name).write_text("[" * 100_000)
        refused(place, "cannot be read")


def test_images_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes claim gigabytes of pixels. The reader checks the available memory first."""
    large = said(camera=kit.picture(2**14, 2**14, 3))
    kit.write(tmp_path / "rows", [[episode()]], large)
    monkeypatch.setattr(
        "tallyroll.storage.engine.available_memory.available_bytes", lambda *_: 2**28
    )
    refused(tmp_path / "rows", "of memory|no room")


def test_no_module_of_a_dataset_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow Datasets imports the module of a feature's class, whatever it is."""
    (tmp_path / "harmful_feature.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    place = written(tmp_path / "rows")
    features = said(other={"pythonClassName": "harmful_feature.Feature", "jsonFeature": {}})
    text = json.dumps(features).replace(f"{kit.CLASS}.tensor_feature.Tensor", "harmful_feature.It")
    (place / "features.json").write_text(text)
    report = import_dataset(place, tmp_path / "back", "rlds")
    assert (report.rows, report.lost) == (3, {"columns": 1, "last_actions": 1})
    assert not (tmp_path / "harm").exists()
    assert "harmful_feature" not in sys.modules


def test_a_text_of_ours_of_other_columns(tmp_path: Path) -> None:
    place = written(tmp_path / "rows")
    columns: list[Any] = [
        {"key": ["observation"], "dtype": "float32", "shape": [2]},
        {"key": ["next", "observation"], "dtype": "float32", "shape": [2]},
        {"key": ["action"], "dtype": "uint8", "shape": []},
        {"key": ["next", "reward"], "dtype": "float32", "shape": [1]},
        {"key": ["next", "terminated"], "dtype": "bool", "shape": [1]},
    ]
    text = json.dumps({"tallyroll_exchange": 1, "columns": columns})
    (place / "tallyroll.json").write_text(text)
    refused(place, "the feature steps/reward is missing")
    (place / "tallyroll.json").write_text(text.replace("float32", "object"))
    with pytest.raises(StorageError):
        import_dataset(place, tmp_path / "back", "rlds")


def test_records_after_a_damaged_length(tmp_path: Path) -> None:
    """The reader finds the next record wherever it starts, without losing a byte of it."""
    draws, path = np.random.default_rng(0), tmp_path / "records"
    contents = [draws.bytes(int(nbytes)) for nbytes in draws.integers(0, 3000, 30)]
    starts = []
    with path.open("wb") as file:
        for content in contents:
            starts.append(file.tell())
            write_record(file, content)
    for number in (0, 7, 29):
        damaged = bytearray(path.read_bytes())
        damaged[starts[number] + 3] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        with (tmp_path / "damaged").open("rb") as file:
            found = [*records(file)]
        assert [each for each in found if isinstance(each, bytes)] == [
            *contents[:number],
            *contents[number + 1 :],
        ]
        assert [each.at for each in found if isinstance(each, Damage)] == [starts[number]]
