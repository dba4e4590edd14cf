"""Test the HDF5 format: the contract, the view of other libraries, and damaged files."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
from tensordict import PersistentTensorDict

from tallyroll.storage import (
    CorruptStorage,
    H5Storage,
    Schema,
    StorageError,
    StorageFull,
    StorageLocked,
    open_storage,
    verify,
)
from tallyroll.storage.errors import (
    CapacityMissing,
    ForeignContent,
    InvalidProvenance,
    MissingLibrary,
    NotAStorage,
    NotWritable,
    PathIsDirectory,
    PathIsFile,
    PathIsTaken,
)
from tallyroll.storage.files.commit_header import HEADER_NBYTES, word_of
from tallyroll.storage.formats.hdf5.user_block import (
    USER_BLOCK_NBYTES,
    newest_manifest,
    write_manifest,
)
from tallyroll.storage.rows.keys import Key

from storage_contract import (
    StorageContract,
    arrays,
    assert_rows,
    files_of,
    rows,
)
from storage_damage import DamageContract, assert_refused, assert_told_or_harmless, damage
from storage_outsiders import Outsider, OutsiderContract


def h5(path: Path, keys: Iterable[Key]) -> tuple[int, dict[Key, np.ndarray]]:
    with h5py.File(path) as file:
        shown = int(file.attrs["rows"])
        return shown, {key: file["/".join(key)][:shown] for key in keys}


def persistent_tensordict(path: Path, keys: Iterable[Key]) -> tuple[int, dict[Key, np.ndarray]]:
    with h5py.File(path) as file:
        shown, capacity = int(file.attrs["rows"]), int(file.attrs["capacity"])
    data = PersistentTensorDict.from_h5(path)
    assert data.batch_size == (capacity,)
    found = {key: data[key][:shown].numpy() for key in keys}
    data.close()
    return shown, found


class TestH5Storage(StorageContract, DamageContract, OutsiderContract):
    storage_class = H5Storage
    default_capacity = 10_000
    holds_bfloat16 = False
    outsiders: ClassVar[dict[str, Outsider]] = {
        "h5py": h5,
        "PersistentTensorDict": persistent_tensordict,
    }

    def manifest_bytes(self, path: Path) -> bytes:
        with open(path, "rb") as file:
            found = newest_manifest(file.fileno())
        assert found is not None
        return found

    def replace_manifest(self, path: Path, content: bytes) -> None:
        with open(path, "r+b") as file:
            write_manifest(file.fileno(), content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.h5"


@pytest.fixture
def five(path: Path) -> Path:
    with H5Storage(path, capacity=6) as storage:
        storage.extend(rows(0, 5))
    return path


# -- other libraries' view


def test_others_find_schema_runs_and_the_rows_of_the_last_refresh(path: Path) -> None:
    with H5Storage(path, capacity=9) as storage:
        storage.initialise(Schema.of(rows(0, 1)), {"seed": 3})
        storage.extend(rows(0, 5))
        storage.flush()
        storage.extend(rows(5, 2))
        with h5py.File(path) as file:
            assert file.attrs["rows"] == 5
    with h5py.File(path) as file:
        assert (file.attrs["rows"], file.attrs["capacity"]) == (7, 9)
        assert json.loads(file.attrs["schema"]) == Schema.of(rows(0, 1)).to_json()
        provenance = json.loads(file.attrs["provenance"])
        assert provenance["runs"] == [{"seed": 3, "first_row": 0}]
        assert provenance["id"] == open_storage(path).manifest["id"]
        assert file["next/done"].dtype == bool
        assert file["wide"].shape == (9, 3)
        assert file.userblock_size == 2**20


def test_h5dump_reads_it(five: Path) -> None:
    if shutil.which("h5dump") is None:
        pytest.skip("h5dump is not installed: it comes with HDF5's tools, not with h5py")

    def dumped(*options: str) -> str:
        done = subprocess.run(
            ["h5dump", *options, str(five)], capture_output=True, text=True, check=True
        )
        return done.stdout

    assert re.findall(r"\d+", dumped("-y", "-w", "0", "-d", "/next/id").split("DATA")[-1])[:5] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]
    assert "DATA {\n   (0): 5\n   }" in dumped("-a", "/rows")
    assert "CONTIGUOUS" in dumped("-H", "-p", "-d", "/wide")


def test_a_reader_with_the_file_open_is_in_nobodys_way(five: Path) -> None:
    with h5py.File(five) as file, open_storage(five, "append") as storage:
        storage.extend(rows(5, 1))
        assert file["id"][5] == 5
        with open_storage(five) as reader:
            assert_rows(reader, 6)


def test_many_runs_are_kept_and_the_newest_shown(path: Path) -> None:
    schema = Schema.of(rows(0, 1))
    for number in range(60):
        mode = "append" if number else "create"
        with H5Storage(path, mode=mode, capacity=60) as storage:
            storage.initialise(schema, {"number": number, "text": "x" * 2000})
            storage.extend(rows(number, 1))
    with open_storage(path) as reader:
        assert [run["number"] for run in reader.manifest["runs"]] == list(range(60))
        assert_rows(reader, 60)
    with h5py.File(path) as file:
        shown = [run["number"] for run in json.loads(file.attrs["provenance"])["runs"]]
    assert shown == list(range(60 - len(shown), 60))
    assert len(shown) > 20
    with open_storage(path, "append") as storage:
        with pytest.raises(InvalidProvenance, match=r"expected at most \d+ bytes, got \d+"):
            storage.initialise(schema, {"text": "x" * 400_000})
        assert len(storage.manifest["runs"]) == 60


# -- capacity


def test_a_new_file_must_know_how_many_rows_it_is_for(path: Path) -> None:
    with H5Storage(path) as storage:
        with pytest.raises(
            CapacityMissing, match=r"capacity: expected the number of rows.* Pass capacity="
        ):
            storage.extend(rows(0, 5))
        assert list(path.parent.iterdir()) == []
        storage.reserve(5)
        storage.extend(rows(0, 5))
        assert_rows(storage, 5)


def test_space_is_reserved_at_once(path: Path) -> None:
    with H5Storage(path, capacity=100_000) as storage:
        for wanted in (100_000, 300_000):
            storage.reserve(wanted)
            storage.extend(arrays(storage.head, 10))
            found = path.stat()
            assert found.st_blocks * 512 >= found.st_size > wanted * 29


def test_rows_beyond_the_capacity_are_refused_until_it_is_larger(five: Path) -> None:
    with open_storage(five, "append") as storage:
        wording = r"space for 6 rows, but 7 are needed\. Committed rows are intact\. .*capacity=7"
        with pytest.raises(StorageFull, match=wording):
            storage.extend(rows(5, 2))
        storage.extend(rows(5, 1), record=b"kept")
        assert_rows(storage, 6)
    runs = open_storage(five).manifest["runs"]
    with open_storage(five, "append", capacity=500_000) as storage:
        assert_rows(storage, 6)
        assert storage.record == (6, b"kept")
        assert storage.manifest["runs"] == runs
        storage.extend(arrays(6, 499_994))
        assert_rows(storage, 500_000)
    with h5py.File(five) as file:
        assert file.attrs["rows"] == file.attrs["capacity"] == 500_000


def test_a_finalized_file_has_exactly_the_rows(path: Path) -> None:
    with H5Storage(path, capacity=100_000) as storage:
        storage.extend(arrays(0, 1000), record=b"r")
        storage.finalize()
    assert path.stat().st_size < 2**20 + 1000 * 29 + 20 * 4096 + 2 * 65536
    with h5py.File(path) as file:
        assert file["wide"].shape == (1000, 3)
        assert file.attrs["capacity"] == 1000
    assert PersistentTensorDict.from_h5(path).batch_size == (1000,)
    with open_storage(path) as reader:
        assert_rows(reader, 1000)
        assert reader.record == (1000, b"r")
        assert "finalized" in reader.manifest
    with open_storage(path, "append", capacity=1001) as storage:
        storage.extend(arrays(1000, 1))
        assert_rows(storage, 1001)


def test_a_finalized_file_without_rows(path: Path) -> None:
    with H5Storage(path, capacity=10) as storage:
        storage.initialise(Schema.of(rows(0, 1)))
        storage.finalize()
    with h5py.File(path) as file:
        assert file["wide"].shape == (0, 3)
    with open_storage(path) as reader:
        assert_rows(reader, 0)
    with open_storage(path, "append") as storage:
        with pytest.raises(StorageFull, match="space for 0 rows"):
            storage.extend(rows(0, 1))
        storage.reserve(3)
        storage.extend(rows(0, 3))
        assert_rows(storage, 3)


def test_a_file_is_replaced_whole_or_not_at_all(
    five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(five)

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((os, "replace"), (os, "posix_fallocate"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            with pytest.raises(StorageFull, match=r"Committed rows are intact"):
                open_storage(five, "append", capacity=1000)
        assert files_of(five) == before
    with monkeypatch.context() as patch:
        patch.setattr("tallyroll.storage.formats.hdf5.format.free_bytes", lambda path: 1000)
        wording = (
            r"needs \d+ more bytes in addition to the \d+ of the present file, and 1000 are free"
        )
        with pytest.raises(StorageFull, match=wording):
            open_storage(five, "append", capacity=1000)
    assert files_of(five) == before


def test_a_copy_that_a_killed_writer_left_goes(five: Path) -> None:
    left = five.with_name("rows.h5.tmp")
    left.write_bytes(b"half")
    open_storage(five).close()
    assert left.exists()
    open_storage(five, "append").close()
    assert not left.exists()


def test_files_that_others_added_are_not_lost(five: Path) -> None:
    with h5py.File(five, "r+") as file:
        file["theirs"] = [1, 2, 3]
    with open_storage(five, "append") as storage:
        storage.extend(rows(5, 1))
    before = files_of(five)
    with pytest.raises(
        ForeignContent, match=r"of another program: theirs\. Move them to another file"
    ):
        open_storage(five, "append", capacity=100)
    assert files_of(five) == before
    with h5py.File(five) as file:
        assert file["theirs"][2] == 3
        assert file.attrs["rows"] == 6


THEIRS: dict[str, Any] = {
    "mean": np.arange(4.0),
    "unit": "m/s",
    "names": np.array(["left", "right"], object),
    "nothing": h5py.Empty("f4"),
    "flag": np.bool_(True),
}


def give(file: h5py.File, count: int = 0) -> None:
    """Give attributes of another program to the file, and to a group and a dataset of ours."""
    for node in (file, file["next"], file["observation"]):
        for name, value in THEIRS.items():
            if isinstance(value, np.ndarray) and value.dtype == object:
                node.attrs.create(name, value, dtype=h5py.string_dtype())
            else:
                node.attrs[name] = value
    for number in range(count):
        file.attrs[f"note {number}"] = "x" * 100


def assert_theirs(path: Path) -> None:
    with h5py.File(path) as file:
        for node in (file, file["next"], file["observation"]):
            for name, value in THEIRS.items():
                found = node.attrs[name]
                if name == "nothing":
                    assert isinstance(found, h5py.Empty)
                else:
                    assert np.array_equal(found, value), name


@pytest.mark.parametrize("count", [0, 1, 50, 600])
def test_attributes_of_others_are_kept(path: Path, count: int) -> None:
    """Neither their number nor the resulting location of our attributes matters."""
    with H5Storage(path, capacity=10) as storage:
        storage.extend(named(0, 5))
    with h5py.File(path, "r+") as file:
        give(file, count)
    assert verify(path).sound
    with open_storage(path, "append") as storage:
        storage.extend(named(5, 1))
    assert_theirs(path)
    assert verify(path).sound
    with open_storage(path, "append", capacity=100) as storage:
        storage.extend(named(6, 40))
    assert_theirs(path)
    with open_storage(path, "append") as storage:
        storage.finalize()
    assert_theirs(path)
    report = verify(path)
    assert (report.rows, report.findings, report.notes) == (46, (), ())
    with h5py.File(path) as file:
        assert file.attrs["rows"] == 46
        assert sum(name.startswith("note") for name in file.attrs) == count
        assert json.loads(file.attrs["provenance"])


def named(start: int, count: int) -> dict[tuple[str, ...], np.ndarray]:
    numbers = np.arange(start, start + count, dtype=np.float32)[:, None]
    return {("observation",): numbers, ("next", "observation"): numbers + 1}


def test_an_attribute_that_refers_to_the_file_is_not_lost(five: Path) -> None:
    with h5py.File(five, "r+") as file:
        file.attrs["origin"] = file.ref
    open_storage(five, "append").close()
    before = files_of(five)
    with pytest.raises(ForeignContent, match="its attribute origin cannot be copied"):
        open_storage(five, "append", capacity=100)
    assert files_of(five) == before


@pytest.mark.parametrize("name", ["rows", "provenance"])
def test_attributes_of_ours_that_others_removed_are_missed(five: Path, name: str) -> None:
    with h5py.File(five, "r+") as file:
        del file.attrs[name]
        for number in range(50):
            file.attrs[f"note {number}"] = "x" * 100
    with open_storage(five) as reader:
        assert_rows(reader, 5)
    assert not verify(five).sound
    before = files_of(five)
    with pytest.raises(CorruptStorage, match=r"attributes rows and provenance of .* are missing"):
        open_storage(five, "append")
    assert files_of(five) == before


def test_h5py_is_asked_for_by_name(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    before = files_of(five)
    for act in (
        lambda: open_storage(five),
        lambda: open_storage(five, "append"),
        lambda: H5Storage(five.with_name("new.h5"), capacity=9).extend(rows(0, 5)),
    ):
        with pytest.raises(MissingLibrary, match=r'pip install "tallyroll\[hdf5\]"'):
            act()
    assert files_of(five) == before
    assert not five.with_name("new.h5").exists()


# -- the place of a new storage


def test_a_link_is_the_file_that_it_leads_to(five: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.h5"
    link.symlink_to(five)
    with open_storage(link, "append", capacity=1000) as storage:
        storage.extend(rows(5, 100))
        with pytest.raises(StorageLocked):
            open_storage(five, "append")
    assert link.is_symlink()
    with open_storage(five) as reader:
        assert_rows(reader, 105)


def test_rows_that_are_there_are_not_written_over(path: Path) -> None:
    path.mkdir()
    with pytest.raises(PathIsDirectory, match="should be a file, but is a directory"):
        H5Storage(path, capacity=5)
    with pytest.raises(NotAStorage, match="is a directory, but an HDF5 storage is a file"):
        H5Storage(path, mode="read")
    path.rmdir()
    for content, what in ((b"", "an empty file"), (b"thesis", "a file of another program")):
        path.write_bytes(content)
        assert_refused(path, NotAStorage, "not a Tallyroll storage")
        with pytest.raises(NotAStorage, match=what):
            H5Storage(path, mode="read")
        with pytest.raises(PathIsTaken, match=what):
            H5Storage(path, capacity=5)
        assert path.read_bytes() == content


@pytest.mark.parametrize("user_block", [0, 512, 4096, 2**20])
def test_another_programs_hdf5_is_told_and_left(path: Path, user_block: int) -> None:
    with h5py.File(path, "w", userblock_size=user_block) as file:
        file["x"] = [1, 2, 3]
    assert_refused(path, NotAStorage, "an HDF5 file of another program.* h5py can open it")
    with pytest.raises(NotAStorage, match="an HDF5 file of another program"):
        H5Storage(path, mode="append")
    with pytest.raises(PathIsTaken, match="an HDF5 file of another program"):
        H5Storage(path, capacity=5)


def test_a_place_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PathIsFile, match=r"should be a directory, but .*file is a file"):
        H5Storage(tmp_path / "file" / "rows.h5", capacity=5)
    with pytest.raises(NotWritable, match="File name too long"):
        H5Storage(tmp_path / ("a" * 252), capacity=5)
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(NotWritable, match="cannot be written to"):
        H5Storage(tmp_path / "rows.h5", capacity=5)


@pytest.mark.timeout(20)
def test_a_pipe_in_its_place_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(PathIsTaken, match=r"rows\.h5 already exists: it is not a plain file"):
        H5Storage(path, capacity=5)
    for mode in ("read", "append"):
        with pytest.raises(
            NotAStorage, match=r"is not a Tallyroll storage: it is not a plain file"
        ):
            H5Storage(path, mode=mode)  # type: ignore[arg-type]


def test_files_that_may_not_be_read_or_replaced(
    five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = five.with_name("unfinished.h5")
    unfinished.write_bytes(five.read_bytes())
    damage(unfinished, 64, bytes(72))
    damage(unfinished, HEADER_NBYTES, bytes(USER_BLOCK_NBYTES - HEADER_NBYTES))
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(NotWritable, match=r"rows\.h5 cannot be read: permission denied"):
        H5Storage(five, mode="read")
    with pytest.raises(NotWritable, match=f"{five.parent} cannot be written to"):
        H5Storage(unfinished, capacity=5)
    monkeypatch.undo()
    with H5Storage(unfinished, capacity=5) as storage:
        storage.extend(rows(0, 5))
        assert_rows(storage, 5)


def test_an_unfinished_creation_is_begun_anew(five: Path) -> None:
    with open(five, "r+b") as file:
        file.seek(HEADER_NBYTES)
        file.write(bytes(USER_BLOCK_NBYTES - HEADER_NBYTES))
    with pytest.raises(
        CorruptStorage, match=r"has 5 committed rows, but the manifest, .* both copies"
    ):
        H5Storage(five, capacity=5)
    damage(five, 64, bytes(72))  # nothing was committed
    assert_refused(five, NotAStorage, r"creation was interrupted\. Create it again")
    with H5Storage(five, capacity=9) as storage:
        storage.extend(rows(0, 9))
    with open_storage(five) as reader:
        assert_rows(reader, 9)


# -- damage


def test_a_file_cut_short_anywhere_is_told(five: Path) -> None:
    content = five.read_bytes()
    cuts = [*range(0, len(content), 40_009), 7, 512, 4097, 2**20 - 1, 2**20, len(content) - 1]
    for size in cuts:
        os.truncate(five, size)
        wording = "cut short|damaged|should have|not a Tallyroll storage|interrupted"
        assert_refused(five, (CorruptStorage, NotAStorage), wording)
        five.write_bytes(content)
    with open_storage(five) as reader:
        assert_rows(reader, 5)


def test_a_damaged_copy_of_the_manifest_leaves_the_older(five: Path) -> None:
    with open_storage(five, "append") as storage:
        storage.initialise(storage.schema, {"second": True})
    slots = [HEADER_NBYTES, HEADER_NBYTES + 450_560]
    content = five.read_bytes()
    runs = []
    for at in slots:
        for byte in (at, at + 8, at + 16, at + 24, at + 28, at + 500):
            damage(five, byte, bytes([content[byte] ^ 1]))
            with open_storage(five) as reader:
                runs.append(len(reader.manifest["runs"]))
                assert_rows(reader, 5)
            damage(five, byte, content[byte : byte + 1])
    assert sorted(set(runs)) == [1, 2]
    for at in slots:
        damage(five, at + 40, b"\xff")
    assert_refused(five, CorruptStorage, "the manifest, .* is damaged in both copies")


def test_flipped_bits_of_hdf5s_metadata_are_told_or_harmless(five: Path) -> None:
    content = five.read_bytes()
    pick = random.Random(5)
    with h5py.File(five) as file:
        taken = [
            range(start, start + file[name].nbytes)
            for name in ("id", "wide", "next/id", "next/done")
            for start in [file[name].id.get_offset()]
        ]
    telling = [
        at
        for at in range(USER_BLOCK_NBYTES, len(content))
        if content[at] not in b"\0 " and not any(at in extent for extent in taken)
    ]
    for at in pick.sample(telling, 150):
        damage(five, at, bytes([content[at] ^ 1 << pick.randrange(8)]))
        assert_told_or_harmless(five)
        five.write_bytes(content)


def test_rows_are_not_copied_from_elsewhere(five: Path) -> None:
    with h5py.File(five, "r+") as file:
        del file["id"]
        file["in its place"] = np.arange(6)
        file["id"] = np.arange(6)
        del file["in its place"]
    before = files_of(five)
    with pytest.raises(CorruptStorage, match=r"the datasets in .* have moved"):
        open_storage(five, "append", capacity=1000)
    assert files_of(five) == before
    for at in (64, 128):
        damage(five, at, word_of(7).to_bytes(8, "little"))
    with pytest.raises(CorruptStorage, match=r"have moved|reports 7 committed rows"):
        open_storage(five, "append", capacity=1000)


def test_datasets_that_lie_elsewhere_are_refused(five: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["id"] = np.arange(6)
    content = five.read_bytes()
    links = (h5py.SoftLink("/next/id"), h5py.ExternalLink(str(other), "/id"))
    for link in links:
        with h5py.File(five, "r+") as file:
            del file["id"]
            file["id"] = link
        assert_refused(five, CorruptStorage, "has no dataset id.*or has only a link")
        five.write_bytes(content)
    with h5py.File(five, "r+") as file:
        del file["id"]
        file.create_dataset("id", data=np.arange(6), chunks=(2,))
    assert_refused(five, CorruptStorage, "id in .* should be a contiguous dataset of int64")
    five.write_bytes(content)
    with h5py.File(five, "r+") as file:
        del file["id"]
        file.create_dataset("id", shape=(6,), dtype="<i8", external=[(str(other), 0, 48)])
    assert_refused(five, CorruptStorage, "id in .* should be a contiguous dataset of int64")
    five.write_bytes(content)
    with h5py.File(five, "r+") as file:
        del file["id"]
        file["in its place"] = np.arange(6)
        file["id"] = np.arange(6)
    assert_refused(five, CorruptStorage, "the datasets in .* have moved")
    five.write_bytes(content)
    with h5py.File(five, "r+") as file:
        del file["id"]
        file["id"] = np.arange(7)
    assert_refused(five, CorruptStorage, r"have different numbers of rows, \[6, 7\]: the")


OFFSETS = ("id", "wide", "next/id", "next/done")


def move_dataset(path: Path, name: str, to: Callable[[dict[str, int], int], int]) -> None:
    """Move a dataset to another offset in HDF5's metadata and in the manifest.

    ``to`` receives the places of all datasets, by name, and the size of the file.
    """
    with h5py.File(path) as file:
        offsets = {each: file[each].id.get_offset() for each in OFFSETS}
        nbytes = file[name].nbytes
    content = path.read_bytes()
    at = to(offsets, len(content))
    message = struct.pack("<QQ", offsets[name] - USER_BLOCK_NBYTES, nbytes)
    assert content.count(message) == 1
    damage(path, content.index(message), struct.pack("<Q", (at - USER_BLOCK_NBYTES) % 2**64))
    with open(path, "r+b") as file:
        found = newest_manifest(file.fileno())
        assert found is not None
        manifest = json.loads(found)
        places = manifest["places"]
        places["offsets"] = [at if each == offsets[name] else each for each in places["offsets"]]
        write_manifest(file.fileno(), json.dumps(manifest).encode())


MOVES: dict[str, tuple[str, Callable[[dict[str, int], int], int]]] = {
    "onto another": ("id", lambda at, size: at["wide"]),
    "into the end of another": ("id", lambda at, size: at["wide"] + 71),
    "before another, into its begin": ("id", lambda at, size: at["wide"] - 47),
    "into the header": ("id", lambda at, size: 64),
    "into the end of the user block": ("next/done", lambda at, size: USER_BLOCK_NBYTES - 1),
    "past the end, by one byte": ("next/done", lambda at, size: size - 5),
    "past the end": ("next/done", lambda at, size: size),
    "far past the end": ("id", lambda at, size: 2**40),
}


@pytest.mark.parametrize("move", MOVES)
def test_datasets_that_overlap_or_pass_the_end_are_refused(five: Path, move: str) -> None:
    """Such datasets are refused even if the manifest agrees: a write must not hit other data."""
    move_dataset(five, *MOVES[move])
    wording = "in a separate part between bytes|cannot be read as HDF5|have moved"
    assert_refused(five, CorruptStorage, wording)
    with pytest.raises(CorruptStorage, match=wording):
        open_storage(five, "append", capacity=1000)


@pytest.mark.parametrize("gap", [0, 1])
def test_datasets_that_touch_lie_apart(five: Path, gap: int) -> None:
    move_dataset(five, "next/done", lambda at, size: at["wide"] + 72 + gap)
    with open_storage(five, "append") as storage:
        storage.extend(rows(5, 1), ids="fresh")
        assert storage.column("wide").tolist() == rows(0, 6)["wide"].tolist()
    with open_storage(five) as storage:
        assert storage.column(("next", "done"))[5:].tolist() == [[False]]


def test_a_file_cut_short_while_it_is_written_anew(
    five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old file stays as it is, and the new one is removed."""
    with h5py.File(five) as file:
        at = file["next/done"].id.get_offset()
    read = os.pread

    def short(file: int, count: int, offset: int) -> bytes:
        return b"" if offset == at else read(file, count, offset)

    before = files_of(five)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", short)
        with pytest.raises(StorageError, match="the file ends before its rows do"):
            open_storage(five, "append", capacity=1000)
    assert files_of(five) == before
    with open_storage(five, "append", capacity=1000) as storage:
        assert_rows(storage, 5)


@pytest.mark.parametrize(
    "places",
    [
        None,
        [],
        {},
        {"rows": 1},
        {"rows": [5, ""]},
        {"rows": [2**21, "zz"]},
        {"rows": [2**21, ""], "provenance": [2**21, ""], "offsets": 3, "capacity": 6},
        {"rows": [2**21, ""], "provenance": [2**21, ""], "offsets": ["x"], "capacity": 6},
        {"rows": [2**21, ""], "provenance": [2**21, ""], "offsets": [], "capacity": -1},
        {"rows": [2**21, ""], "provenance": [2**21, ""], "offsets": [], "capacity": 6},
    ],
)
def test_a_manifest_with_other_places_is_told(five: Path, places: object) -> None:
    with open(five, "r+b") as file:
        content = newest_manifest(file.fileno())
        assert content is not None
        changed = json.loads(content) | {"places": places}
        write_manifest(file.fileno(), json.dumps(changed).encode())
    wording = "lacks the positions of rows and attributes|the datasets in .* have moved"
    assert_refused(five, CorruptStorage, wording)
