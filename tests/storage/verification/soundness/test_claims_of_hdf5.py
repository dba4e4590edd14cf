"""Test HDF5 files that claim more values than they have: found without a long read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import d4rl_faults
import h5py
import minari_faults
import numpy as np
import pytest

from tallyroll.storage import repair, verify_dataset
from tallyroll.storage.errors import InvalidDataset, NotEnoughMemory

pytestmark = pytest.mark.timeout(30)
TERABYTE = 2**40
COLUMNS = {"observations": 3, "actions": 2, "rewards": 0, "terminals": 0}


def claims_in(path: Path, kind: str) -> set[str | None]:
    """Return the columns of findings about values that are missing from the file."""
    files = [each for each in verify_dataset(path, kind).findings if each.check == "files"]
    return {place.column for each in files for place in each.places if "claims" in place.what}


def _columns(
    path: Path, rows: int, make: Callable[[h5py.File, str, tuple[int, ...]], None]
) -> None:
    with h5py.File(path, "w") as file:
        for name, width in COLUMNS.items():
            make(file, name, (rows, width) if width else (rows,))


def _chunks(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
    """Claim chunks, and write only one of them."""
    chunk = (2**16, *shape[1:])
    data = file.create_dataset(name, shape, "f4", chunks=chunk, compression="gzip")
    data[:8] = 1


def _alone(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
    """Claim contiguous rows without writing any."""
    file.create_dataset(name, shape, "f4")


def _nothing(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
    """Claim rows without values."""
    file.create_dataset(name, (shape[0], 0), "f4")


@pytest.mark.parametrize("make", [_chunks, _alone, _nothing])
def test_columns_that_were_never_written(
    make: Callable[[h5py.File, str, tuple[int, ...]], None], tmp_path: Path
) -> None:
    path = tmp_path / "rows.hdf5"
    _columns(path, TERABYTE // 24, make)
    assert path.stat().st_size < 2**20
    assert claims_in(path, "d4rl") == {*COLUMNS}
    with pytest.raises(InvalidDataset, match="no readable observation, action, reward, terminated"):
        repair(path, tmp_path / "saved", "d4rl")
    assert not (tmp_path / "saved").exists()


def test_memory_is_there_before_rows_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.hdf5"
    _columns(path, 64, lambda file, name, shape: file.create_dataset(name, data=np.ones(shape)))
    monkeypatch.setattr("tallyroll.storage.engine.available_memory.available_bytes", lambda: 1000)
    with pytest.raises(NotEnoughMemory, match="the 64 rows that the file claims to have"):
        repair(path, tmp_path / "saved", "d4rl")
    assert not (tmp_path / "saved").exists()


def test_a_file_that_is_a_hole(tmp_path: Path) -> None:
    """Contiguous rows fill a file of a terabyte, of which the disk has a few kilobytes."""
    path = tmp_path / "rows.hdf5"
    rows = TERABYTE // 64

    def make(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple(shape)
        h5py.h5d.create(file.id, name.encode(), h5py.h5t.NATIVE_FLOAT, space, plist)

    _columns(path, rows, make)
    assert path.stat().st_size > rows * 4 > 2**20 > path.stat().st_blocks * 512
    assert claims_in(path, "d4rl")


def test_one_episode_by_many_names(tmp_path: Path) -> None:
    """2,000 hard links make episodes of one highly compressible group of 64 MiB."""
    minari_faults.sound(tmp_path / "rows")
    with h5py.File(tmp_path / "rows" / "data" / "main_data.hdf5", "r+") as file:
        group = file.create_group("big")
        rows = 2**26 // 8
        for name, dtype in (("rewards", "f8"), ("terminations", "?"), ("truncations", "?")):
            group.create_dataset(name, (rows,), dtype, chunks=(2**20,), compression="gzip")
        for number in range(4, 2004):
            file[f"episode_{number}"] = group
        del file["big"]
    assert claims_in(tmp_path / "rows", "minari")


def test_columns_that_pack_best_are_read(tmp_path: Path) -> None:
    """Deflate compresses a column of zeros by a factor of a thousand. It is not a false claim."""
    path = tmp_path / "rows.hdf5"
    d4rl_faults.sound(path)
    with h5py.File(path, "r+") as file:
        chunk = 2**26
        shape = (5 * chunk,)
        data = file.create_dataset("infos/zeros", shape, "u1", chunks=(chunk,), compression=9)
        for start in range(0, *shape, chunk):
            data[start : start + chunk] = np.zeros(chunk, np.uint8)
        assert data.id.get_storage_size() * 900 < shape[0] > 2**28
    found = verify_dataset(path, "d4rl").findings
    assert [each.check for each in found] == ["rows"]  # it has more rows than the others
