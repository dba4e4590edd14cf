"""Test files, keys, counts and shapes that are far too large: refused before memory is taken.

Each is tried in a child process with a limit of two more GiB and a few seconds. By default, each is
tried in one or two random ways; `TALLYROLL_SIZES` selects every way.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tallyroll.storage import MemmapStorage, Schema, ZarrStorage, open_storage, verify
from tallyroll.storage.errors import CorruptStorage, DamagedTable, InvalidSchema, StorageError
from tallyroll.storage.files.commit_header import HEADER_NBYTES, word_of
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.hdf5.user_block import newest_manifest, write_manifest
from tallyroll.storage.formats.zarr.metadata import documents
from tallyroll.storage.trajectories.episode_file import read_table
from tallyroll.storage.trajectories.episodes import table_dtype

from hostile_kit import GIB, KINDS, WAYS, collect, in_a_child, told_or_done
from pairs import in_gate

HUGE = 64 * GIB
ALL = "TALLYROLL_SIZES" in os.environ
MANY = 200_000 if ALL else 20_000
SECONDS = 30
"""Limit for all ways together on a shared machine. They take about one second."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bases")
    for name in KINDS:
        (place / name).mkdir()
        collect(place / name / name)
    return place


@pytest.fixture
def work(bases: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        place = tmp_path / "work"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(bases / name, place)
        return place / name

    return copied


def try_all(path: Path, which: str = "") -> None:
    """Try each way to open.

    It must give a Tallyroll error or a sound answer, quickly and with little memory.
    """
    ways = WAYS if ALL else random.Random(f"{path.name} {which}").sample(WAYS, 1)

    def trials() -> list[str]:
        found = []
        for way in ways:
            copy = path.parent.with_name("copy")
            shutil.rmtree(copy, ignore_errors=True)
            copied(path.parent, copy)
            began = time.monotonic()
            if wrong := told_or_done(way, copy / path.name):
                found.append(f"{way.__name__} ({time.monotonic() - began:.1f} s):\n{wrong}")
        return found

    wrong = in_a_child(trials, seconds=SECONDS, nbytes=2 * GIB)
    assert not wrong, "\n\n".join(wrong)


def copied(source: Path, target: Path) -> None:
    """Copy like `shutil.copytree`, and keep files sparse."""
    for each in [source, *sorted(source.rglob("*"))]:
        place = target / each.relative_to(source)
        if each.is_dir():
            place.mkdir()
            continue
        with open(each, "rb") as file, open(place, "wb") as copy:
            size = os.fstat(file.fileno()).st_size
            at = 0
            while at < size:
                try:
                    start = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break  # only a hole is left
                at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                copy.seek(start)
                copy.write(os.pread(file.fileno(), at - start, start))
            copy.truncate(size)


def format_of(path: Path) -> Any:
    return KINDS[path.name]._format_class(path)


def manifest_of(path: Path) -> dict[str, Any]:
    with open(format_of(path).manifest_path, "rb") as file:
        content = newest_manifest(file.fileno()) if path.name == "rows.h5" else file.read()
    assert content
    value = json.loads(content)
    value.pop("crc32", None)
    return value


def give_manifest(path: Path, content: bytes) -> None:
    if path.name == "rows.h5":
        with open(path, "r+b") as file:
            write_manifest(file.fileno(), content)
    else:
        format_of(path).manifest_path.write_bytes(content)


def give_schema(path: Path, columns: list[Any]) -> None:
    give_manifest(path, json.dumps({**manifest_of(path), "schema": columns}).encode())


# --- files ----------------------------------------------------------------------------------------

SMALL = {
    "rows": [
        "manifest.json",
        "meta.json",
        "next/meta.json",
        "episodes.npy",
        "tallyroll.header",
        "tallyroll.lock",
        "manifest.json.tmp",
        "action.memmap",
    ],
    "rows.h5": ["", ".lock", ".episodes.npy", ".tmp"],
    "rows.zarr": [
        "zarr.json",
        "next/zarr.json",
        "action/zarr.json",
        "action/c.0",
        "tallyroll/manifest.json",
        "tallyroll/zarr.json",
        "tallyroll/episodes.npy",
        "tallyroll/c.0",
        "tallyroll/lock",
    ],
}


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize(
    ("name", "file"), [(name, file) for name, files in SMALL.items() for file in files]
)
@pytest.mark.filterwarnings("ignore:unclosed storage")
def test_a_sparse_file(
    name: str, file: str, emptied: bool, work: Callable[[str], Path], tmp_path: Path
) -> None:
    """The file keeps its content, or has only zeros."""
    path = work(name)
    place = path / file if path.is_dir() else path.with_name(name + file)
    if emptied or not place.exists():
        place.write_bytes(b"")
    os.truncate(place, HUGE)
    # The number of rows is unchanged: longer columns are sound, and verify immediately.
    try_all(path, f"{file} {emptied}")


@pytest.mark.parametrize("name", KINDS)
def test_a_table_with_the_end_of_a_table(name: str, work: Callable[[str], Path]) -> None:
    path = work(name)
    place = format_of(path).episodes_path
    end = place.read_bytes()[-12:]
    with open(place, "r+b") as file:
        file.truncate(HUGE)
        file.seek(HUGE)
        file.write(end)
    try_all(path)


# --- manifests ------------------------------------------------------------------------------------

COLUMN = {"key": ["x"], "dtype": "int8", "shape": []}
SCHEMAS: dict[str, Callable[[], list[Any]]] = {
    "key of 20,000 parts": lambda: [{**COLUMN, "key": ["a"] * 20_000}],
    "key that is text": lambda: [{**COLUMN, "key": "a" * 20_000}],
    "part of 100,000 letters": lambda: [{**COLUMN, "key": ["a" * 100_000]}],
    "columns": lambda: [{**COLUMN, "key": [f"{n}"]} for n in range(5 * MANY)],
    "one column a million times": lambda: [COLUMN] * MANY,
    "20,000 dimensions": lambda: [{**COLUMN, "shape": [1] * 20_000}],
    "65 dimensions": lambda: [{**COLUMN, "shape": [1] * 64}],
    "large row": lambda: [{**COLUMN, "shape": [2**62]}],
    "larger row": lambda: [{**COLUMN, "shape": [2**31, 2**31, 2**31]}],
    "largest row": lambda: [{**COLUMN, "shape": [10**4000]}],
    "row of 64 TiB": lambda: [{**COLUMN, "shape": [2**46]}],
    "many rows of 64 TiB": lambda: [
        {**COLUMN, "key": [f"{n}"], "shape": [2**46]} for n in range(1000)
    ],
    "batch dimensions": lambda: [{**COLUMN, "batch_dims": [10**4000]}],
    "all batch dimensions": lambda: [{**COLUMN, "shape": [1] * 63, "batch_dims": [63]}],
    "no key": lambda: [{**COLUMN, "key": []}],
    "deep keys": lambda: [
        {**COLUMN, "key": [f"{n}", *["a"] * 31]} for n in range(2000 if ALL else 300)
    ],
    "not a column": lambda: [[[[]]]] * 100_000,
}


@pytest.mark.parametrize(("name", "which"), in_gate(KINDS, SCHEMAS))
def test_a_schema(name: str, which: str, work: Callable[[str], Path]) -> None:
    """The header fits the schema."""
    path, columns = work(name), SCHEMAS[which]()
    try:
        give_schema(path, columns)
    except StorageError:  # an HDF5 file has no space for it
        return
    crc = zlib.crc32(json.dumps(columns).encode())
    with open(format_of(path).header_path, "r+b") as file:
        content = struct.pack("<8sqqq", b"TALLYROL", 3, 0, crc)
        file.write(content + struct.pack("<I", zlib.crc32(content)))
    with pytest.raises(StorageError):
        open_storage(path)
    if ALL or which in ("key of 20,000 parts", "columns", "larger row"):
        try_all(path, which)


CONTENTS: dict[str, Callable[[], bytes]] = {
    "deep lists": lambda: b"[" * 5_000_000,
    "deep objects": lambda: b'{"a":' * 2_000_000,
    "many lists": lambda: b"[" + b"[]," * 20 * MANY + b"[]]",
    "one long text": lambda: b'"' + b"a" * (15 * 2**20) + b'"',
    "a long number": lambda: b"1" * 5_000_000,
    "many names": lambda: b"{" + b",".join(b'"%d":0' % n for n in range(4 * MANY)) + b"}",
}


@pytest.mark.slow
@pytest.mark.parametrize("which", CONTENTS)
@pytest.mark.parametrize("name", ["rows", "rows.zarr"])
def test_json(name: str, which: str, work: Callable[[str], Path]) -> None:
    """The text replaces a JSON file, or a part of a manifest."""
    content = CONTENTS[which]()
    path = work(name)
    whole = json.dumps(manifest_of(path)).encode()
    give_manifest(path, whole[:-1] + b', "more": ' + content + b"}")
    try_all(path, which)
    give_manifest(path, whole)
    shown = "meta.json" if name == "rows" else "zarr.json"
    for file in sorted(path.rglob(shown)) if ALL else [path / shown]:
        before = file.read_bytes()
        file.write_bytes(content)
        try_all(path, f"{which} {file.name}")
        file.write_bytes(before)


@pytest.mark.parametrize("name", ["rows", "rows.zarr"])
def test_runs(name: str, work: Callable[[str], Path]) -> None:
    path = work(name)
    manifest = manifest_of(path)
    manifest["runs"] *= MANY // 20
    give_manifest(path, json.dumps(manifest).encode()[: 2**24])
    try_all(path)
    manifest["runs"] = [{"first_row": 0}] * 2 * MANY
    give_manifest(path, json.dumps(manifest).encode())
    try_all(path)


def test_chunks(work: Callable[[str], Path]) -> None:
    for rows in (2**40, 2**62, 10**4000):
        path = work("rows.zarr")
        manifest = manifest_of(path)
        give_manifest(path, json.dumps({**manifest, "chunk_rows": [rows] * 20}).encode())
        try_all(path)
        count = len(manifest["schema"])
        give_manifest(path, json.dumps({**manifest, "chunk_rows": [rows] * count}).encode())
        with pytest.raises(CorruptStorage, match=r"chunks of column .* more than the maximum"):
            open_storage(path)


# --- headers and rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [0, 10, 2**46, 2**62, -1])
@pytest.mark.parametrize("head", [2**33, 2**46, 2**47, 2**48 - 1])
@pytest.mark.parametrize("name", KINDS)
def test_a_header(name: str, head: int, ring: int, work: Callable[[str], Path]) -> None:
    path = work(name)
    with open(format_of(path).header_path, "r+b") as file:
        magic, version, _, crc = struct.unpack("<8sqqq", file.read(32))
        content = struct.pack("<8sqqq", magic, version, ring, crc)
        file.seek(0)
        file.write(content + struct.pack("<I", zlib.crc32(content)))
        for at in (64, 128):
            file.seek(at)
            file.write(struct.pack("<Q", word_of(head)))
    if name != "rows" or ring != 10 or head > 2**47:
        with pytest.raises(CorruptStorage):
            open_storage(path)
    else:
        try_all(path, f"{head}")


def test_a_table_that_many_rows_may_have(work: Callable[[str], Path]) -> None:
    """A table of 2**28 rows may have 20 GiB, and it is read only if its end is valid."""
    path = work("rows")
    table = format_of(path).episodes_path
    os.truncate(table, 2**28 * table_dtype().itemsize)

    def tried() -> None:
        with pytest.raises(DamagedTable, match="its checksum is missing"):
            read_table(Inside(path), table, table_dtype(), 2**28)

    in_a_child(tried, seconds=SECONDS, nbytes=2 * GIB)


# --- HDF5 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "capacity", "provenance", "schema"])
@pytest.mark.parametrize("shape", [(), (7000,), (2**40,), None])
def test_attributes_of_hdf5(
    name: str, shape: tuple[int, ...] | None, work: Callable[[str], Path]
) -> None:
    path = work("rows.h5")
    with h5py.File(path, "r+") as file:
        del file.attrs[name]
        if shape is None:
            file.attrs[name] = h5py.Empty("f8")
        elif shape == (2**40,):  # a crafted space whose size is a number of eight bytes
            file.attrs.create(name, np.full(7, 77), shape=(7,))
        else:
            file.attrs.create(name, np.full(shape, 77))
    if shape == (2**40,):
        content = path.read_bytes()
        space, found = struct.pack("<Q", 7), 0
        at = content.find(space, content.find(name.encode() + b"\0", HEADER_NBYTES))
        with open(path, "r+b") as raw:
            raw.seek(at)
            raw.write(struct.pack("<Q", 2**40))
            found += 1
        assert found
    try_all(path)


def test_datasets_of_hdf5(work: Callable[[str], Path]) -> None:
    """Recreated datasets are larger than the file.

    They are detected regardless of the metadata.
    """
    path = work("rows.h5")
    with h5py.File(path, "r+") as file:
        del file["action"]
        file.create_dataset("action", (2**45,), "i8")
    try_all(path)
    path = work("rows.h5")
    with h5py.File(path, "r+") as file:
        for n in range(3000):
            file.create_group(f"g{n}")
        file["next"]["up"] = file["/"]
    try_all(path)


@pytest.mark.parametrize("part", ["rows", "provenance", "offsets", "capacity"])
@pytest.mark.parametrize("value", [2**45, 2**62, 2**63, 10**4000])
def test_places_in_hdf5(part: str, value: int, work: Callable[[str], Path]) -> None:
    path = work("rows.h5")
    manifest = manifest_of(path)
    places = manifest["places"]
    right = manifest_of(path)["places"]
    with open_storage(path) as storage:
        head = storage.head
    if part == "capacity":
        places[part] = value
    elif part == "offsets":
        places[part] = [value] * 100_000 if value == 2**45 else [value]
    else:
        places[part] = [value, "00" * 64]
    with open(path, "r+b") as file:
        try:
            write_manifest(file.fileno(), json.dumps(manifest).encode())
        except StorageError:
            return
    for before in ("", "00" * 64):
        attribute = part in ("rows", "provenance")
        if attribute:
            places[part][1] = before
            give_manifest(path, json.dumps(manifest).encode())
        if attribute and before and value < 2**63:  # possible: ours are found again
            with open_storage(path, "append") as storage:
                assert storage.head == head
            assert verify(path).sound
            assert manifest_of(path)["places"] == right
        else:
            with pytest.raises(CorruptStorage):
                open_storage(path, "append")


# --- refusals to create ---------------------------------------------------------------------------


def test_an_environment_that_would_be_refused_is_not_made(tmp_path: Path) -> None:
    key = ("a",) * 33
    with pytest.raises(InvalidSchema, match="at most 32 names"):
        Schema.of({key: np.zeros(3)})
    with pytest.raises(InvalidSchema, match="holds at most 16384 columns"):
        Schema.of({(f"{n}",): np.zeros(1) for n in range(16385)})
    with pytest.raises(InvalidSchema, match="more than the maximum of 140737488355328"):
        Schema.from_json([{**COLUMN, "shape": [2**48]}])


@pytest.mark.parametrize("kind", [MemmapStorage, ZarrStorage])
def test_as_deep_as_may_be(kind: Any, tmp_path: Path) -> None:
    keys = [(*(f"{n}{d}" for d in range(31)), "x") for n in range(10)]
    with kind(tmp_path / "rows") as storage:
        storage.extend({key: np.arange(5) for key in keys})
    assert verify(tmp_path / "rows").sound


def groups() -> Iterator[tuple[str, ...]]:
    for n in range(300):
        yield (*(f"{n}-{depth}" for depth in range(15)), "x")


def test_metadata_of_many_groups_take_no_square() -> None:
    """With 4,500 groups, a quadratic algorithm takes minutes."""
    schema = Schema.of({key: np.zeros(1) for key in groups()})
    began = time.process_time()
    found = documents(schema, [1] * 300, 7, {})
    assert time.process_time() - began < 10
    assert len(found) == 1 + 15 * 300 + 300
    root = found[min(found, key=lambda place: len(place.parts))]
    below = root["consolidated_metadata"]["metadata"]
    assert len(below) == len(found) - 1
    assert below["/".join(next(groups()))]["shape"] == [7]
