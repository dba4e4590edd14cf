"""Test malicious sources: each is refused before it uses memory or touches a path."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tallyroll.storage import MemmapStorage, import_dataset
from tallyroll.storage.errors import InvalidDataset, NotEnoughMemory, StorageError, StorageFull
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows


class Bomb:
    """Create a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def refused(kind: str, place: Path, match: str | None = None) -> None:
    back = place.parent / "back"
    with pytest.raises((InvalidDataset, StorageFull, NotEnoughMemory), match=match):
        import_dataset(place, back, kind)
    assert not back.exists()
    assert not (place.parent / "harm").exists()


def header(shape: Any, dtype: str = "<f4") -> bytes:
    """Return the header of a NumPy array without any data."""
    file = io.BytesIO()
    said = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, said)
    return file.getvalue()


def test_pickles_in_an_archive(tmp_path: Path) -> None:
    objects = np.array([Bomb(tmp_path / "harm")], object)
    np.savez(tmp_path / "rows.npz", x=objects, allow_pickle=True)
    refused("npz", tmp_path / "rows.npz", "Pickled objects are not read")
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as archive:
        archive.writestr("x.npy", pickle.dumps(Bomb(tmp_path / "harm")))
    refused("npz", tmp_path / "raw.npz")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        file = io.BytesIO()
        np.lib.format.write_array(file, objects, allow_pickle=True)
        archive.writestr("tallyroll.npy", file.getvalue())
    refused("npz", tmp_path / "text.npz", "its metadata cannot be read")


@pytest.mark.parametrize(
    "shape", [(2**40, 1000), (2**62, 2**10), (-1, 4), (10**30,), (2,), (), (True,)]
)
def test_arrays_that_claim_too_much(tmp_path: Path, shape: Any) -> None:
    with zipfile.ZipFile(tmp_path / "rows.npz", "w") as archive:
        archive.writestr("x.npy", header(shape) + bytes(4))
    refused("npz", tmp_path / "rows.npz")


def test_an_archive_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The importer checks for the space of all rows before it unpacks the first of them."""
    rows = 2**24
    with (
        zipfile.ZipFile(tmp_path / "rows.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as file,
    ):
        file.write(header((rows,)))
        for _ in range(rows // 2**18):
            file.write(bytes(2**20))
    assert (tmp_path / "rows.npz").stat().st_size < 2**17
    monkeypatch.setattr("tallyroll.storage.formats.space.free_bytes", lambda path: 2**20)
    refused("npz", tmp_path / "rows.npz", "no room for 16,777,216 rows")


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a//b", "x\\..\\y/.."])
def test_names_that_lead_out_of_an_archive(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "rows.npz", "w") as archive:
        archive.writestr(f"{name}.npy", header((1,)) + bytes(4))
    refused("npz", tmp_path / "rows.npz")


def test_a_member_that_is_locked_or_there_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "rows.npz", "w") as archive:
        archive.writestr("x.npy", header((1,)) + bytes(4))
    content = bytearray((tmp_path / "rows.npz").read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + at] |= 1  # encrypted
    (tmp_path / "locked.npz").write_bytes(content)
    refused("npz", tmp_path / "locked.npz", "encrypted")
    with (
        pytest.warns(UserWarning, match="Duplicate"),
        zipfile.ZipFile(tmp_path / "rows.npz", "a") as archive,
    ):
        archive.writestr("x.npy", header((1,)) + bytes(4))
    refused("npz", tmp_path / "rows.npz", "two arrays with the same name")


def theirs(place: Path) -> None:
    with h5py.File(place, "w") as file:
        file["observations"] = np.zeros((3, 2), np.float32)
        file["actions"] = np.zeros((3, 1), np.float32)
        file["rewards"] = np.zeros(3, np.float32)
        file["terminals"] = np.zeros(3, bool)


@pytest.mark.parametrize(
    "fault", ["external", "soft", "virtual", "raw", "huge", "chunk", "loop", "rows", "reference"]
)
def test_hdf5(tmp_path: Path, fault: str) -> None:
    place, other = tmp_path / "rows.hdf5", tmp_path / "other.hdf5"
    theirs(place)
    theirs(other)
    with h5py.File(place, "r+") as file:
        if fault != "loop":
            del file["actions"]
        if fault == "external":
            file["actions"] = h5py.ExternalLink(str(other), "/actions")
        if fault == "soft":
            file["actions"] = h5py.SoftLink("/observations")
        if fault == "virtual":
            layout = h5py.VirtualLayout((3, 1), np.float32)
            layout[:] = h5py.VirtualSource(str(other), "actions", (3, 1))
            file.create_virtual_dataset("actions", layout)
        if fault == "raw":
            outside = [("/etc/hostname", 0, h5py.h5f.UNLIMITED)]
            file.create_dataset("actions", (3, 1), np.float32, external=outside)
        if fault == "huge":  # never written, so it takes no space
            for name in ("observations", "rewards", "terminals"):
                del file[name]
            for name in ("observations", "actions", "rewards", "terminals"):
                kind = bool if name == "terminals" else np.float32
                file.create_dataset(name, (2**50,), kind, chunks=(2**10,))
        if fault == "chunk":
            file.create_dataset(
                "actions", (3, 2**29), np.float64, chunks=(1, 2**28), compression="gzip"
            )
        if fault == "loop":
            file["infos/again"] = file["/"]
        if fault == "rows":
            file["actions"] = np.zeros((4, 1), np.float32)
        if fault == "reference":
            file["actions"] = np.array([file.ref] * 3, h5py.ref_dtype)
    if fault == "chunk":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "tallyroll.storage.engine.available_memory.available_bytes", lambda *_: 2**30
            )
            refused("d4rl", place)
    else:
        refused("d4rl", place)


def test_a_text_that_is_nested_too_deep(tmp_path: Path) -> None:
    theirs(tmp_path / "rows.hdf5")
    text = b"[" * 100_000
    with h5py.File(tmp_path / "rows.hdf5", "r+") as file:
        file["metadata/tallyroll"] = np.frombuffer(text, np.uint8)
    refused("d4rl", tmp_path / "rows.hdf5", "metadata cannot be read")


@pytest.mark.parametrize(
    "columns",
    [
        [],
        [{"key": ["x"], "dtype": "float32", "shape": [2**60]}],
        [{"key": ["..", "x"], "dtype": "float32", "shape": []}],
        [{"key": ["x"], "dtype": "object", "shape": []}],
        {"x": 1},
        None,
    ],
)
def test_texts_that_say_what_cannot_be(tmp_path: Path, columns: Any) -> None:
    said = json.dumps({"tallyroll_exchange": 1, "columns": columns, "rows": {"copied_from": 3}})
    np.savez(tmp_path / "rows.npz", x=np.zeros(3), tallyroll=np.array(said))
    refused("npz", tmp_path / "rows.npz")


def folder(place: Path) -> None:
    with MemmapStorage(place.parent / "source") as storage:
        storage.extend(trajectory_rows(0, 10, steps=3))
        storage.export(place, "torchrl")
    (place / "tallyroll.json").unlink()


@pytest.mark.parametrize("fault", ["dots", "absolute", "rows", "negative", "short", "deep"])
def test_memory_maps(tmp_path: Path, fault: str) -> None:
    place = tmp_path / "rows"
    folder(place)
    meta = json.loads((place / "meta.json").read_text())
    leaf = dict(meta["observation"])
    if fault == "dots":
        meta[".."] = {"type": "TensorDict"}
    if fault == "absolute":
        meta["/etc/passwd"] = leaf
    if fault == "rows":
        meta["observation"] = {**leaf, "shape": [2**50, 1]}
    if fault == "negative":
        meta["observation"] = {**leaf, "shape": [10, -1]}
    if fault == "short":
        (place / "observation.memmap").write_bytes(b"1234")
    if fault == "deep":
        (place / "meta.json").write_text("[" * 100_000)
    else:
        (place / "meta.json").write_text(json.dumps(meta))
    refused("torchrl", place)


def test_what_tensordict_pickles_is_not_read(tmp_path: Path) -> None:
    place = tmp_path / "rows"
    folder(place)
    (place / "other.pickle").write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    meta = json.loads((place / "meta.json").read_text())
    meta["text"] = {"type": "NonTensorData", "_type": "x", "is_nested": True}
    (place / "meta.json").write_text(json.dumps(meta))
    report = import_dataset(place, tmp_path / "back", "torchrl")
    assert report.lost == {"columns": 1}
    assert not (tmp_path / "harm").exists()


def test_a_parquet_that_claims_too_much(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"x": np.zeros(2**22)})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").stat().st_size < 2**18
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tallyroll.storage.engine.available_memory.available_bytes", lambda *_: 2**24)
        refused("parquet", tmp_path / "rows.parquet")
    content = bytearray((tmp_path / "rows.parquet").read_bytes())
    content[-8:-4] = (2**31 - 1).to_bytes(4, "little")
    (tmp_path / "rows.parquet").write_bytes(content)
    refused("parquet", tmp_path / "rows.parquet", "no Parquet footer")


def test_an_unknown_kind(tmp_path: Path) -> None:
    kinds = "d4rl, hf, lerobot, minari, npz, parquet, rlds, torchrl"
    with pytest.raises(ValueError, match=f"kind: expected one of {kinds}"):
        import_dataset(tmp_path, tmp_path / "back", "csv")


def test_a_column_that_a_format_lacks(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend({("tallyroll",): np.zeros(3)})
        for kind, match in (
            ("npz", "has the name of the archive's metadata"),
            ("d4rl", "have no next/reward, no next/terminated"),
            ("minari", "have no next/reward, no next/terminated"),
        ):
            with pytest.raises(StorageError, match=match):
                storage.export(tmp_path / kind, kind)
            assert not (tmp_path / kind).exists()
        with pytest.raises(StorageError, match="so its trajectories are unknown"):
            storage.export(tmp_path / "rows", "torchrl", cuts="drop")
        with pytest.raises(ValueError, match="cuts: expected 'drop', 'truncate' or 'keep'"):
            storage.export(tmp_path / "rows", "torchrl", cuts="no")  # type: ignore[arg-type]
        with pytest.raises(StorageError, match="is inside the storage"):
            storage.export(tmp_path / "source" / "rows", "torchrl")
