"""Test that zarr-python, TensorStore, xarray and h5py read packed rows without Tallyroll."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numcodecs.blosc
import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.ext.testing.reader_contract import collected
from tallyroll.storage.storages import DiskStorage

numcodecs.blosc.get_mutex()  # create this semaphore of zarr-python's now, so that no test leaks it


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskStorage]:
    folder = tmp_path_factory.mktemp("packed")
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(collected())
        storage.pack(folder / "packed", codecs={"action": "none", ("next", "reward"): "zstd:9"})
        storage.pack(folder / "as_they_are", once=False)
        storage.pack(folder / "packed.h5", format="hdf5")
    with open_storage(folder / "packed") as found:
        yield found


def from_states(group: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rebuild observations and next observations as the group's attributes describe."""
    frames, breaks = np.asarray(group["frames"]), np.asarray(group["breaks"])
    rows = np.arange(len(frames) - len(breaks))
    state = rows + np.searchsorted(breaks, rows, side="right") - 1
    return frames[state], frames[state + 1]


def by_tensorstore(path: Path) -> np.ndarray:
    place = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    found: np.ndarray = np.asarray(tensorstore.open(place).result().read().result())
    return found


def test_zarr_and_tensorstore(packed: DiskStorage) -> None:
    group = zarr.open_group(packed.path, mode="r")
    seen = set()
    for key in packed.schema.keys:
        name, wanted = "/".join(key), packed.column(key)
        if name in group and isinstance(group[name], zarr.Array):
            assert (np.asarray(group[name]) == wanted).all()
            assert (by_tensorstore(Path(packed.path, *key)) == wanted).all()
            seen.add(name)
        elif name in group:
            root, after = from_states(group[name])
            assert (root == wanted).all()
            assert (after == packed.column(("next", *key))).all()
            assert "Row r begins in state r" in group[name].attrs["rows"]
            assert (
                by_tensorstore(Path(packed.path, *key, "frames")) == group[name]["frames"]
            ).all()
    assert {"action", "next/reward", "is_init", "collector/lane"} <= seen
    assert (np.asarray(group["tallyroll/row"]) == packed.old_rows()).all()
    assert group.attrs["rows"] == len(packed)


def test_xarray(packed: DiskStorage) -> None:
    path = Path(packed.path).with_name("as_they_are")
    with open_storage(path) as storage, xarray.open_zarr(path) as found:
        for name in ("observation", "pixels", "action"):
            assert (found[name].values == storage.column(name)).all()
            assert found[name].dims[0] == "row"
    with xarray.open_zarr(path, group="next") as found:
        assert found["reward"].shape == (141, 1)


def test_h5py(packed: DiskStorage) -> None:
    path = Path(packed.path).with_name("packed.h5")
    with h5py.File(path) as file:
        assert (file["action"][:] == packed.column("action")).all()
        root, after = from_states(file["pixels"])
        assert (root == packed.column("pixels")).all()
        assert (after == packed.column(("next", "pixels"))).all()
