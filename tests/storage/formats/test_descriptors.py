"""Test the files that an open storage keeps open, and errors when no more can be opened."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.engine import columns as private_rows
from tallyroll.storage.errors import CorruptStorage, MissingLibrary, TooManyFiles
from tallyroll.storage.formats.hdf5 import datasets
from tallyroll.storage.storages import DiskStorage

from storage_contract import arrays, assert_rows, rows

COLUMNS = 4
KINDS: dict[str, Callable[..., DiskStorage]] = {
    "memmap": MemmapStorage,
    "ring": lambda path, **options: MemmapStorage(path, max_size=10_000, **options),
    "hdf5": H5Storage,
    "zarr": ZarrStorage,
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[..., DiskStorage]:
    made: Callable[..., DiskStorage] = KINDS[request.param]
    return made


def held() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def no_more_files(but: int = 0) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + but  # no lower number may be free
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(but):
            os.close(taken.pop())
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_writer_has_a_file_open_for_each_column_and_a_reader_one(
    tmp_path: Path, kind: Callable[..., DiskStorage]
) -> None:
    before = held()
    with kind(tmp_path / "rows", capacity=10_000) as storage:
        storage.extend(arrays(0, 5000))
        storage.extend(arrays(5000, 5000))
        kept = storage.get(slice(None))
        assert held() - before <= COLUMNS + 3
        writer = held()
        readers = [open_storage(tmp_path / "rows") for _ in range(5)]
        for reader in readers:
            assert_rows(reader, 10_000)
        slices = [reader.get(slice(None)) for reader in readers]
        assert held() - writer <= len(readers)
        for reader in readers:
            reader.close()
        assert held() == writer
        assert all((each == kept).all() for each in slices)
    assert held() == before


def test_too_many_open_files_are_an_error_and_open_ones_go_on(
    tmp_path: Path, kind: Callable[..., DiskStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_rows, "_COPIED_NBYTES", 0)
    path, options = tmp_path / "rows", {"capacity": 100}
    with kind(path, **options) as storage:
        storage.extend(rows(0, 10))
        reader = open_storage(path)
        storage.get(slice(None))
        acts: list[Callable[[], Any]] = [
            lambda: open_storage(path),
            lambda: kind(tmp_path / "new", **options).extend(rows(0, 1)),
        ]
        with no_more_files():
            for act in acts:
                with pytest.raises(TooManyFiles, match=rf"{tmp_path}.* \d+ files .*ulimit -n"):
                    act()
            storage.extend(rows(10, 10))
            assert_rows(storage, 20)
            assert reader.get(list(range(20)))["id"].tolist() == list(range(20))
        with kind(tmp_path / "new", **options) as other:
            other.extend(rows(0, 1))
        assert_rows(reader, 20)
        reader.close()
    assert not verify(path).findings


def test_no_file_is_taken_for_damage_where_no_more_may_be_open(
    tmp_path: Path, kind: Callable[..., DiskStorage]
) -> None:
    """The limit leaves between zero and eleven files."""
    with kind(tmp_path / "rows", capacity=100) as storage:
        storage.extend(rows(0, 10))
    opened, said = 0, []
    for mode in ("read", "append"):
        for left in range(12):
            try:
                with no_more_files(but=left):
                    open_storage(tmp_path / "rows", mode).close()  # type: ignore[arg-type]
                opened += 1
            except TooManyFiles as error:
                said.append(str(error))
    assert 0 < opened < 24
    assert all(each.startswith(f"{tmp_path}") for each in said)
    assert not verify(tmp_path / "rows").findings


def test_a_library_whose_files_may_not_be_opened_is_not_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)  # as if none of its files were readable
    with no_more_files(), pytest.raises(TooManyFiles, match="ulimit -n"):
        datasets.h5py_module()
    with pytest.raises(MissingLibrary):
        datasets.h5py_module()


@pytest.mark.parametrize("kind", [MemmapStorage, ZarrStorage])
def test_a_reader_follows_a_directory_that_is_moved(
    tmp_path: Path, kind: Callable[..., DiskStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_rows, "_COPIED_NBYTES", 0)
    with kind(tmp_path / "rows") as storage:
        storage.extend(rows(0, 10))
    reader = open_storage(tmp_path / "rows")
    os.rename(tmp_path / "rows", tmp_path / "moved")
    assert_rows(reader, 10)
    with open_storage(tmp_path / "moved", "append") as storage:
        storage.extend(arrays(10, 200_000))
        assert_rows(reader, 200_010)
    reader.close()


@pytest.mark.parametrize("kind", [MemmapStorage, ZarrStorage, H5Storage])
def test_a_reader_keeps_the_rows_of_a_storage_that_is_deleted(
    tmp_path: Path, kind: Callable[..., DiskStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_rows, "_COPIED_NBYTES", 0)
    place = tmp_path / "place"
    with kind(place / "rows", capacity=10) as storage:
        storage.extend(rows(0, 10))
    with open_storage(place / "rows") as reader:
        shutil.rmtree(place)
        taken = reader.get(slice(None))
        taken["id"].zero_()
        assert_rows(reader, 10)


def test_a_reader_does_not_take_another_file_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_rows, "_COPIED_NBYTES", 0)
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows(0, 10))
    with open_storage(tmp_path / "rows") as reader:
        file = tmp_path / "rows" / "id.memmap"
        shutil.copy(file, tmp_path / "copy")
        os.replace(tmp_path / "copy", file)
        with pytest.raises(CorruptStorage, match="were replaced while it was open"):
            reader.get(slice(None))
