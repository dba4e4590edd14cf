"""Test how the format of a storage is detected: by its files, or else by name or suffix."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage
from tallyroll.storage.errors import NotAStorage, StorageError, StorageMissing
from tallyroll.storage.storages import FORMATS, DiskStorage, storage_class

from storage_contract import assert_rows, files_of, rows

CLASSES = [MemmapStorage, H5Storage, ZarrStorage]


@pytest.fixture(params=CLASSES)
def kind(request: pytest.FixtureRequest) -> type[DiskStorage]:
    found: type[DiskStorage] = request.param
    return found


def make(kind: type[DiskStorage], path: Path) -> Path:
    with kind(path, capacity=10) as storage:
        storage.extend(rows(0, 5))
    return path


@pytest.mark.parametrize("name", ["data", "data.h5", "data.zarr", "x.HDF5"])
def test_a_storage_is_opened_whatever_its_name(
    kind: type[DiskStorage], tmp_path: Path, name: str
) -> None:
    path = make(kind, tmp_path / "first").rename(tmp_path / name)
    assert storage_class(path) is kind
    for mode in ("read", "append"):
        with open_storage(path, mode) as storage:
            assert type(storage) is kind
            assert_rows(storage, 5)


def test_a_storage_is_opened_by_its_own_class_only(kind: type[DiskStorage], tmp_path: Path) -> None:
    path = make(kind, tmp_path / "rows")
    before = files_of(path)
    for other in CLASSES:
        if other is not kind:
            for mode in ("read", "append"):
                with pytest.raises(NotAStorage):
                    other(path, mode=mode)
            with pytest.raises(StorageError):
                other(path, capacity=5).extend(rows(0, 5))
    assert files_of(path) == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.h5", H5Storage),
        ("a.H5", H5Storage),
        ("a.hdf5", H5Storage),
        ("a.zarr", ZarrStorage),
        ("a.Zarr", ZarrStorage),
        ("a", MemmapStorage),
        ("a.npy", MemmapStorage),
    ],
)
def test_a_suffix_chooses_the_format_of_a_new_storage(
    tmp_path: Path, name: str, expected: type[DiskStorage]
) -> None:
    assert storage_class(tmp_path / name) is expected


def test_a_name_chooses_the_format_unless_the_path_contradicts(tmp_path: Path) -> None:
    for name, kind in FORMATS.items():
        assert storage_class(tmp_path / "new", name) is kind
    assert storage_class(tmp_path / "new.h5", "hdf5") is H5Storage
    with pytest.raises(
        ValueError, match=r"new\.h5 has the suffix of hdf5, but the format zarr was"
    ):
        storage_class(tmp_path / "new.h5", "zarr")
    with pytest.raises(ValueError, match="format: expected one of memmap, hdf5, zarr, got 'csv'"):
        storage_class(tmp_path / "new", "csv")
    path = make(ZarrStorage, tmp_path / "rows")
    with pytest.raises(ValueError, match="holds a storage of format zarr, but the format memmap"):
        storage_class(path, "memmap")
    (tmp_path / "empty").mkdir()
    assert storage_class(tmp_path / "empty", "zarr") is ZarrStorage


def test_a_path_that_is_no_storage_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageMissing, match="does not exist"):
        open_storage(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotAStorage, match=r"no manifest\.json"):
        open_storage(tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(NotAStorage, match="is not a Tallyroll storage: it is an empty file"):
        open_storage(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAStorage, match="is not a Tallyroll storage: it is not a plain file"):
        open_storage(tmp_path / "pipe")


def test_a_newer_format_is_told(tmp_path: Path) -> None:
    path = make(MemmapStorage, tmp_path / "rows")
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": "tallyroll.tape"}
    del manifest["crc32"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        NotAStorage, match=r"knows only tallyroll\.memmap, tallyroll\.hdf5, tallyroll\.z"
    ):
        open_storage(path)
