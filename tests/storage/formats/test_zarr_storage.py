"""Test the Zarr format: the contract, the view of other libraries, and damaged files."""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tensorstore
import torch
import xarray
import zarr
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tallyroll.storage import (
    CorruptStorage,
    Schema,
    StorageFull,
    ZarrStorage,
    open_storage,
    verify,
)
from tallyroll.storage.errors import (
    DirectoryNotEmpty,
    InvalidSchema,
    NotAStorage,
    UnsupportedPlatform,
)
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit
from tallyroll.storage.files.commit_header import HEADER_NBYTES
from tallyroll.storage.files.mapping import PAGE_NBYTES, Region
from tallyroll.storage.formats.zarr.metadata import chunk_rows_of
from tallyroll.storage.rows.dtypes import TORCH
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.storages import DiskStorage

from storage_contract import (
    GrowingStorageContract,
    arrays,
    assert_rows,
    files_of,
    rows,
)
from storage_damage import DamageContract, assert_refused, damage
from storage_outsiders import Outsider, OutsiderContract


def zarr_python(path: Path, keys: Iterable[Key]) -> tuple[int, dict[Key, np.ndarray]]:
    root = zarr.open_group(path, mode="r")
    found = {key: root["/".join(key)][...] for key in keys}
    assert {len(array) for array in found.values()} == {root.attrs["rows"]}
    return root.attrs["rows"], found


def tensor_store(path: Path, keys: Iterable[Key]) -> tuple[int, dict[Key, np.ndarray]]:
    found = {}
    for key in keys:  # one by one: each shows its own refresh
        kvstore = {"driver": "file", "path": str(path.joinpath(*key))}
        array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
        found[key] = array.read().result()
    shown = min(map(len, found.values()))
    return shown, {key: array[:shown] for key, array in found.items()}


def x_array(path: Path, keys: Iterable[Key]) -> tuple[int, dict[Key, np.ndarray]]:
    tree = xarray.open_datatree(path, engine="zarr")
    found = {key: tree["/".join(key)].values for key in keys}
    assert {len(array) for array in found.values()} == {tree.attrs["rows"]}
    return tree.attrs["rows"], found


def fill_with_large_chunks(kind: type[DiskStorage], place: Path) -> None:
    """Zarr's files have the size of a chunk, which is chosen at creation."""
    with kind(place) as storage:
        words = "largest file would have 262,144 bytes, and a file"
        with file_size_limit(HEADER_NBYTES), pytest.raises(StorageFull, match=words):
            storage.extend(rows(0, 5))
        assert not place.exists()
        with file_size_limit(2**20):
            storage.extend(arrays(0, 100_000))
    with file_size_limit(2**19), open_storage(place, "append") as storage:
        assert_rows(storage, 100_000)
        with pytest.raises(StorageFull, match="File too large"):
            storage.extend(arrays(100_000, 500_000))
        assert_rows(storage, 100_000)


class TestZarrStorage(GrowingStorageContract, DamageContract, OutsiderContract):
    storage_class = ZarrStorage
    holds_bfloat16 = False
    fill_files = staticmethod(fill_with_large_chunks)
    outsiders: ClassVar[dict[str, Outsider]] = {
        "zarr-python": zarr_python,
        "TensorStore": tensor_store,
        "xarray": x_array,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.zarr"


@pytest.fixture
def five(path: Path) -> Path:
    with ZarrStorage(path) as storage:
        storage.extend(rows(0, 5))
    return path


# -- chunks


@given(
    shape=st.lists(st.integers(1, 300), max_size=3).map(tuple),
    dtype=st.sampled_from([torch.bool, torch.float16, torch.float32, torch.complex128]),
    capacity=st.integers(0, 10**9),
)
def test_chunks_are_whole_pages_of_a_fitting_size(
    shape: tuple[int, ...], dtype: torch.dtype, capacity: int
) -> None:
    column = Column(("x",), dtype, shape)
    nbytes = chunk_rows_of(column, capacity) * column.row_nbytes
    assert nbytes % 4096 == 0
    smallest = math.lcm(4096, column.row_nbytes)
    low, high = (2**18, 2**26) if capacity else (2**20, 2**24)
    assert min(low, smallest) / 2 <= nbytes <= max(2 * high, 2 * smallest)
    if math.lcm(65536, column.row_nbytes) <= low:
        assert nbytes % 65536 == 0


def test_chunks_are_whole_and_go_when_there_are_no_rows_in_them(path: Path) -> None:
    with ZarrStorage(path, capacity=100_000) as storage:
        storage.extend(arrays(0, 10))
        sizes = {file.stat().st_size for file in (path / "wide").glob("c.*")}
        blocks = [file.stat().st_blocks * 512 for file in (path / "wide").glob("c.*")]
        assert sizes == {3 * 65536}
        assert min(blocks) >= 3 * 65536
        assert len(blocks) == 7
        storage.extend(arrays(10, 29_990))
    assert sorted(file.name for file in (path / "wide").glob("c.*")) == ["c.0.0", "c.1.0"]
    with ZarrStorage(path, mode="append") as storage:
        storage.extend(arrays(30_000, 100_000))
        assert_rows(storage, 130_000)


def test_space_of_a_killed_writer_goes_at_the_next_close(five: Path) -> None:
    for number in (1, 7):
        (five / "id" / f"c.{number}").write_bytes(b"\xff" * 100)
    with open_storage(five) as reader:
        assert_rows(reader, 5)
    with open_storage(five, "append") as storage:
        storage.extend(arrays(5, 200_000))
        assert_rows(storage, 200_005)
    with open_storage(five) as reader:
        assert_rows(reader, 200_005)
    assert not (five / "id" / "c.7").exists()


def test_more_chunks_than_the_system_maps_are_refused_in_time(
    five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.storage.formats.zarr.format._FEW_MAPS", 2)
    monkeypatch.setattr("tallyroll.storage.formats.zarr.format.maps_left", lambda: 9)
    with open_storage(five, "append") as storage:
        with pytest.raises(
            StorageFull, match=r"needs maps of \d\d more chunk files, .* only 9 more \(vm"
        ):
            storage.extend(arrays(5, 700_000))
        assert_rows(storage, 5)
    monkeypatch.setattr("tallyroll.storage.formats.zarr.format.maps_left", lambda: 3)
    with pytest.raises(UnsupportedPlatform, match="needs maps of 4 more chunk files"):
        open_storage(five)


def test_pages_that_are_larger_than_those_of_the_chunks_are_told(
    five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.storage.formats.zarr.format.PAGE_NBYTES", 2**24)
    assert_refused(five, UnsupportedPlatform, "not a multiple of the page size of this machine")


def test_rows_of_an_odd_size_beyond_what_a_chunk_may_have_are_refused(path: Path) -> None:
    data = TensorDict({"x": torch.zeros(1, 999, 999, dtype=torch.uint8)}, [1])
    with ZarrStorage(path) as storage:
        with pytest.raises(
            InvalidSchema, match=r"998001 bytes per row, so a chunk of .* 4087812096"
        ):
            storage.extend(data)
        assert not path.exists()


@pytest.mark.parametrize(
    "name", ["tallyroll", "zarr.json", "__x", "...", "a\\b", "c.__lock", "x.partial", "a" * 256]
)
def test_names_that_zarr_does_not_have_are_refused(path: Path, name: str) -> None:
    with ZarrStorage(path) as storage:
        with pytest.raises(InvalidSchema, match=r"Rename it|too long for a file name"):
            storage.extend(TensorDict({name: {"x": torch.zeros(1)}}, [1]))
        assert not path.exists()


# -- other libraries' view


def test_others_find_schema_runs_and_nothing_foreign(path: Path) -> None:
    with ZarrStorage(path) as storage:
        storage.initialise(Schema.of(rows(0, 1)), {"seed": 3})
        storage.extend(rows(0, 5))
    root = zarr.open_group(path, mode="r")
    assert json.loads(root.attrs["schema"]) == Schema.of(rows(0, 1)).to_json()
    provenance = json.loads(root.attrs["provenance"])
    assert provenance["runs"] == [{"seed": 3, "first_row": 0}]
    assert sorted(root) == ["id", "next", "wide"]
    listed = zarr.open_group(path, mode="r", use_consolidated=False)
    assert sorted(listed) == ["id", "next", "tallyroll", "wide"]
    header = listed["tallyroll"][...]
    assert header[:8].tobytes() == b"TALLYROL"
    assert root["wide"].metadata.dimension_names == ("row", "axis1_3")


def test_attributes_that_others_added_stay(five: Path) -> None:
    root = zarr.open_group(five, mode="r+", use_consolidated=False)
    root.attrs["license"] = "CC0"
    root["next/id"].attrs["unit"] = "steps"
    with open_storage(five, "append") as storage:
        storage.extend(rows(5, 3))
    root = zarr.open_group(five, mode="r")
    assert root.attrs["license"] == "CC0"
    assert root.attrs["rows"] == 8
    assert dict(root["next/id"].attrs) == {"unit": "steps"}


def test_attributes_that_others_added_are_sound(path: Path) -> None:
    """The dtype of the array does not matter: zarr-python rewrites all of its metadata."""
    columns = {("next", dtype.name): np.ones((5, 2), dtype) for dtype in TORCH}
    with ZarrStorage(path) as storage:
        storage.extend(columns)
    root = zarr.open_group(path, mode="r+")
    root.attrs["obs_mean"] = [1.0, 2.0]
    for key in columns:
        root["/".join(key)].attrs["unit"] = "m"
    report = verify(path)
    assert (report.findings, report.notes) == ((), ())
    with ZarrStorage(path, mode="append") as storage:
        storage.extend(columns)
        storage.finalize()
    assert verify(path).sound
    root = zarr.open_group(path, mode="r")
    assert root.attrs["obs_mean"] == [1.0, 2.0]
    assert all(root["/".join(key)].attrs["unit"] == "m" for key in columns)


def test_zarrs_metadata_is_written_anew_where_it_was_damaged(five: Path) -> None:
    (five / "zarr.json").write_bytes(b"{")
    (five / "next" / "zarr.json").unlink()
    (five / "wide" / "zarr.json").write_text('{"attributes": 7}')
    with open_storage(five) as reader:
        assert_rows(reader, 5)
    open_storage(five, "append").close()
    shown, found = zarr_python(five, [("wide",), ("next", "id")])
    assert shown == 5
    assert found[("wide",)].tolist() == rows(0, 5)["wide"].tolist()


def test_files_of_killed_programs_are_swept_by_a_writer(five: Path) -> None:
    left = [
        five / "zarr.json.tmp",
        five / "next" / "id" / f"zarr.{'0f' * 16}.partial",
        five / "wide" / "c.0.0.__lock",
        five / "tallyroll" / "manifest.json.tmp",
    ]
    for file in left:
        file.write_bytes(b"x")
    open_storage(five).close()
    assert all(file.exists() for file in left)
    open_storage(five, "append").close()
    assert not any(file.exists() for file in left)


# -- the place of a new storage


def test_another_programs_zarr_is_told_and_left(path: Path, tmp_path: Path) -> None:
    zarr.create_group(path).create_array("x", shape=(3,), dtype="f4")[...] = 1
    zarr.create_array(tmp_path / "array", shape=(3,), dtype="f4")
    zarr.create_group(tmp_path / "two", zarr_format=2)
    for place in (path, tmp_path / "array", tmp_path / "two"):
        before = files_of(place)
        assert_refused(place, NotAStorage, r"is Zarr \(.*another program wrote it")
        with pytest.raises(NotAStorage, match=r"no manifest\.json"):
            ZarrStorage(place, mode="read")
        with pytest.raises(DirectoryNotEmpty, match="directory of its own"):
            ZarrStorage(place)
        assert files_of(place) == before


def test_an_unfinished_creation_is_begun_anew(five: Path) -> None:
    (five / "tallyroll" / "manifest.json").unlink()
    with pytest.raises(CorruptStorage, match=r"has 5 committed rows, but manifest\.json, which"):
        ZarrStorage(five)
    damage(five / "tallyroll" / "c.0", 64, bytes(72))  # nothing was committed
    (five / "old").mkdir()
    (five / "old" / "c.0").write_text("")
    for mode in ("append", "read"):
        with pytest.raises(NotAStorage, match="create it again"):
            open_storage(five, mode)
    with ZarrStorage(five) as storage:
        storage.extend(rows(0, 3))
        assert storage.record is None
    with open_storage(five) as reader:
        assert_rows(reader, 3)
    assert not (five / "old").exists()
    (five / "tallyroll" / "manifest.json").unlink()
    damage(five / "tallyroll" / "c.0", 64, bytes(72))
    (five / "wide" / "notes.txt").write_text("mine")
    with pytest.raises(DirectoryNotEmpty, match=r"it holds notes\.txt"):
        ZarrStorage(five)


def test_a_creation_that_fails_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with ZarrStorage(path, capacity=10) as storage:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageFull, match="more bytes"):
                storage.extend(rows(0, 1))
            assert not path.exists()
        storage.extend(rows(0, 1))


@pytest.mark.parametrize("fits", range(4))
def test_chunks_that_fit_go_where_others_do_not(
    five: Path, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    """The columns are written one after the other. The space is free again immediately."""
    reserve, calls = os.posix_fallocate, []

    def full(*args: int) -> None:
        calls.append(args)
        if len(calls) > fits:
            raise OSError(28, "No space left on device")
        reserve(*args)

    with open_storage(five, "append") as storage:
        before = sorted(five.rglob("c.*"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageFull, match="Committed rows are intact"):
                storage.reserve(200_000)
        assert sorted(five.rglob("c.*")) == before
        storage.extend(arrays(5, 200_000))
        assert_rows(storage, 200_005)


# -- damage


def test_a_chunk_that_is_missing_or_of_another_size_is_told(five: Path) -> None:
    chunk = five / "wide" / "c.0.0"
    size = chunk.stat().st_size
    for other in (size - 1, 0, size + 1):
        os.truncate(chunk, other)
        wording = rf"c\.0\.0 of column wide in .* has {other} bytes, expected {size}"
        assert_refused(five, CorruptStorage, wording)
    chunk.unlink()
    assert_refused(
        five, CorruptStorage, r"chunk c\.0\.0 of column wide in .* is missing, so its comm"
    )
    chunk.mkdir()
    assert_refused(five, CorruptStorage, "is not a regular file, and links are not followed")


def test_rows_lie_inside(five: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for inside, wording in (
        (five / "wide" / "c.0.0", "is not a regular file, and links are not followed"),
        (five / "wide", r"rows\.zarr/wide is a link .* neither reads through links"),
        (five / "next", "next/id was replaced by a link"),
    ):
        inside.rename(elsewhere)
        inside.symlink_to(elsewhere)
        assert_refused(five, CorruptStorage, wording)
        inside.unlink()
        elsewhere.rename(inside)
    (five / "next").rename(elsewhere)
    assert_refused(five, CorruptStorage, ", a column in the manifest, is missing")


@pytest.mark.parametrize(
    "rows_a_chunk",
    [None, 7, "all", [], [1], [2, 2, 2, 2], [0] * 4, [-1] * 4, [1.5] * 4, [True] * 4],
)
def test_a_manifest_with_other_chunks_is_told(five: Path, rows_a_chunk: object) -> None:
    file = five / "tallyroll" / "manifest.json"
    manifest = json.loads(file.read_bytes())
    del manifest["crc32"]
    file.write_text(json.dumps(manifest | {"chunk_rows": rows_a_chunk}))
    wording = (
        "expected the rows per chunk of each column|chunks of . columns"
        "|multiple of the page size of this machine"
    )
    assert_refused(five, (CorruptStorage, UnsupportedPlatform), wording)
    doubled = [2 * count for count in manifest["chunk_rows"]]
    file.write_text(json.dumps(manifest | {"chunk_rows": doubled}))
    assert_refused(five, CorruptStorage, r"has \d+ bytes, expected \d+")


def test_a_header_cut_short_or_missing_is_told(five: Path) -> None:
    os.truncate(five / "tallyroll" / "c.0", HEADER_NBYTES - 1)
    assert_refused(five, CorruptStorage, "should have 143360 bytes and has 143359")
    (five / "tallyroll" / "c.0").unlink()
    assert_refused(five, CorruptStorage, "is missing, so the number of committed rows")


# -- maps


def test_a_reader_sees_rows_in_chunks_that_were_made_anew(path: Path) -> None:
    with ZarrStorage(path, capacity=200_000) as storage:
        storage.extend(arrays(0, 10))
        reader = open_storage(path)
        assert_rows(reader, 10)
    with ZarrStorage(path, mode="append", capacity=200_000) as storage:
        storage.extend(arrays(10, 190_000))
        assert_rows(reader, 190_010)
        assert (reader.get(slice(190_000, None)) == rows(190_000, 10)).all()
    reader.close()


def test_several_threads_map_chunks(path: Path) -> None:
    numbers = np.arange(32768 * 60)
    with ZarrStorage(path, capacity=len(numbers)) as storage:
        storage.extend({("id",): numbers})
    for _ in range(5):
        with open_storage(path) as reader, ThreadPoolExecutor(8) as pool:
            counts = [32768 * chunks for chunks in range(1, 60)]
            maps = pool.map(lambda count: reader.writer.files.arrays(count, "private")[0], counts)
            assert all((one == numbers[: len(one)]).all() for one in maps)


def test_files_that_are_open_do_not_grow_with_the_chunks(path: Path) -> None:
    with ZarrStorage(path) as storage:
        storage.extend(arrays(0, 100_000))
        before = len(os.listdir("/proc/self/fd"))
        storage.extend(arrays(100_000, 1_000_000))
        storage.get(slice(None))
        assert len(list((path / "wide").glob("c.*"))) > 10
        assert len(os.listdir("/proc/self/fd")) <= before + len(storage.schema.keys)


def test_a_regions_arrays_outlive_it_and_the_files(tmp_path: Path) -> None:
    region = Region(4 * PAGE_NBYTES, "write")
    for number in range(2):
        with open(tmp_path / f"{number}", "w+b") as file:
            file.truncate(PAGE_NBYTES)
            region.add(file.fileno(), PAGE_NBYTES)
    array = region.array(np.dtype(np.uint8), (2 * PAGE_NBYTES,))
    array[:] = 1
    array[PAGE_NBYTES:] = 2
    region.sync(0)
    for number in range(2):
        assert (tmp_path / f"{number}").read_bytes() == bytes([number + 1]) * PAGE_NBYTES
        (tmp_path / f"{number}").unlink()
    del region
    gc.collect()
    assert int(array.sum()) == 3 * PAGE_NBYTES


def test_a_region_refuses_what_does_not_fit_and_goes_on(tmp_path: Path) -> None:
    region = Region(2 * PAGE_NBYTES, "read")
    with pytest.raises(OSError, match="Bad file descriptor"):
        region.add(-1, PAGE_NBYTES)
    with open(tmp_path / "0", "w+b") as file:
        file.write(b"\x07" * PAGE_NBYTES)
        file.flush()
        region.add(file.fileno(), PAGE_NBYTES)
        with pytest.raises(ValueError, match="do not fit"):
            region.add(file.fileno(), 2 * PAGE_NBYTES)
    array = region.array(np.dtype(np.uint8), (PAGE_NBYTES,))
    assert set(array) == {7}
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="bytes are mapped"):
        region.array(np.dtype(np.uint8), (PAGE_NBYTES + 1,))


def test_power_durability_syncs_what_is_new(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    sync = Region.sync

    def watched(region: Region, start: int) -> None:
        starts.append(start)
        sync(region, start)

    monkeypatch.setattr(Region, "sync", watched)
    with ZarrStorage(path, durability="power") as storage:
        storage.extend(TensorDict({"x": torch.zeros(3, dtype=torch.int64)}, [3]))
        storage.extend(TensorDict({"x": torch.zeros(3, dtype=torch.int64)}, [3]))
        assert starts == [0, 24]
