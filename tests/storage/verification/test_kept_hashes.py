"""Compare `content_hash(incremental=True)`, which stores hashes, with the hash of all rows."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import (
    DiskStorage,
    H5Storage,
    MemmapStorage,
    ZarrStorage,
    content_hash,
    open_storage,
    verify,
)
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.base import BESIDE
from tallyroll.storage.replay.checkpoint import _replace
from tallyroll.storage.stores.rewinds import rewind_to
from tallyroll.storage.trajectories import leaves
from tallyroll.storage.trajectories.leaf_hashes import LEAF, UnusableLeaves
from tallyroll.storage.trajectories.leaves import leaf_hashes_of

from storage_damage import damage

LANES = 4
KINDS: dict[str, tuple[type[DiskStorage], dict[str, int]]] = {
    "rows": (MemmapStorage, {}),
    "ring": (MemmapStorage, {"max_size": 150}),
    "rows.h5": (H5Storage, {"capacity": 900}),
    "rows.zarr": (ZarrStorage, {}),
}


class Lanes:
    """Rows of lanes whose trajectories end at random, or after ``length`` steps."""

    def __init__(self, seed: int = 0, length: int = 0) -> None:
        self.rng, self.length = np.random.default_rng(seed), length
        self.step, self.id = np.zeros(LANES, np.int64), np.arange(LANES)

    def rows(self, slots: int) -> TensorDict:
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for _ in range(slots):
            found.append((self.id.copy(), self.step.copy()))
            ends = (self.step + 1 == self.length) if self.length else self.rng.random(LANES) < 0.1
            self.step = np.where(ends, 0, self.step + 1)
            self.id = np.where(ends, self.id + LANES, self.id)
        count = slots * LANES
        ids, steps = (torch.from_numpy(np.concatenate(each)) for each in zip(*found, strict=True))
        lane = torch.arange(LANES, dtype=torch.int32).repeat(slots)
        x = torch.from_numpy(self.rng.random((count, 3)))
        marks = {"traj_ids": ids, "step": steps, "lane": lane}
        return TensorDict({"x": x, "collector": marks}, [count])


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use leaves of a few rows, and record the number of hashed leaves for each read."""
    monkeypatch.setattr(leaves, "_LEAF_NBYTES", 400)
    every, found = leaves.Leaves.hashes, list[int]()

    def counted(self: Any, wanted: Any = None, progress: Any = None) -> np.ndarray:
        hashes = every(self, wanted, progress)
        found.append(len(hashes))
        return hashes

    monkeypatch.setattr(leaves.Leaves, "hashes", counted)
    return found


def made(path: Path, name: str = "rows", slots: int = 60, lanes: Lanes | None = None) -> Path:
    kind, options = KINDS[name]
    with kind(path / name, **options) as storage:
        storage.extend((lanes or Lanes()).rows(slots))
        content_hash(storage, incremental=True)
    return path / name


def file_of(path: Path) -> Path:
    with open_storage(path) as storage:
        return storage.writer.files.leaves_path


def both(path: Path) -> tuple[str, str]:
    return content_hash(path, incremental=True), content_hash(path)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_that_of_all_rows_however_they_come(name: str, tmp_path: Path) -> None:
    kind, options = KINDS[name]
    lanes, rng = Lanes(7), np.random.default_rng(1)
    with kind(tmp_path / name, **options) as storage:
        for _ in range(8):
            storage.extend(lanes.rows(int(rng.integers(1, 12))))
            for _ in range(int(rng.integers(0, 3))):
                assert content_hash(storage, incremental=True) == content_hash(storage)
    assert both(tmp_path / name)[0] == both(tmp_path / name)[1]
    assert verify(tmp_path / name, skip=["steps", "ids", "zeros"]).sound


def test_a_second_call_reads_what_came_since(tmp_path: Path, hashed: list[int]) -> None:
    lanes = Lanes()
    path = made(tmp_path, slots=200, lanes=lanes)
    every = hashed.pop()
    assert every > 50
    told: list[tuple[int, int]] = []
    content_hash(path, incremental=True, progress=lambda *done: told.append(done))
    assert hashed == [1]  # only the newest one, to compare
    assert told[-1][0] == told[-1][1] > 0
    before = file_of(path).read_bytes()
    with open_storage(path, mode="append") as storage:
        storage.extend(lanes.rows(2))
        hashed.clear()
        content_hash(storage, incremental=True)
    assert hashed[0] == 1
    assert 1 <= hashed[1] <= 2 * LANES < every / 5
    assert file_of(path).read_bytes() != before


def test_without_it_nothing_is_kept_or_used(tmp_path: Path, hashed: list[int]) -> None:
    path = made(tmp_path)
    file = file_of(path)
    before, every = file.read_bytes(), hashed.pop()
    content_hash(path)
    assert hashed == [every]
    assert file.read_bytes() == before
    file.unlink()
    content_hash(path)
    assert not file.exists()


def test_leaves_of_rows_that_were_overwritten_are_dropped(tmp_path: Path) -> None:
    lanes = Lanes(3)
    path = made(tmp_path, "ring", 30, lanes)
    with open_storage(path, mode="append") as storage:
        storage.extend(lanes.rows(20))
        assert content_hash(storage, incremental=True) == content_hash(storage)
        kept = leaf_hashes_of(storage.reader, storage.writer.files).read()
        assert kept is not None
        assert kept["first"].min() >= storage.span.start
        assert kept["rows"].sum() == len(storage)


def test_a_changed_row_is_found_by_verify_and_by_all(tmp_path: Path) -> None:
    path = made(tmp_path)
    wanted = content_hash(path)
    assert "content" in verify(path).checked
    row = 50
    damage(path / "x.memmap", 24 * row + 8, b"\x01")
    assert content_hash(path) != wanted
    assert content_hash(path, incremental=True) == wanted  # no row is read again
    (found,) = verify(path).findings
    assert str(found) == "content: rows do not match their stored hash"
    with open_storage(path) as storage:
        id = int(storage.get(row)["collector", "traj_ids"])
    (place,) = found.places
    assert place.trajectory is not None
    assert place.trajectory // 8 == id // 8
    assert "by trajectory and step" in place.what
    assert verify(path, skip=["content"]).sound


def test_rows_in_place_of_others_are_noticed(tmp_path: Path) -> None:
    """An older copy of the storage is restored without the hashes, and continued differently."""
    path, older = tmp_path / "rows", tmp_path / "older"
    lanes = Lanes(0, length=5)
    with MemmapStorage(path) as storage:
        storage.extend(lanes.rows(20))
    shutil.copytree(path, older)
    for seed, slots in ((1, 20), (2, 30)):
        lanes.rng = np.random.default_rng(seed)
        lanes.id, lanes.step = np.arange(LANES) + 4 * LANES, np.zeros(LANES, np.int64)
        with open_storage(path, mode="append") as storage:
            storage.extend(lanes.rows(slots))
            assert content_hash(storage, incremental=True) == content_hash(storage)
        kept = (path / "content.leaves").read_bytes()
        shutil.rmtree(path)
        shutil.copytree(older, path)
        (path / "content.leaves").write_bytes(kept)
        assert both(path)[0] == both(path)[1]  # the file covers more rows than exist


def test_rows_that_were_taken_back_are_forgotten(tmp_path: Path) -> None:
    path = made(tmp_path, slots=100)
    with open_storage(path, mode="append") as storage, open_storage(path) as reader:
        files = storage.writer.files
        assert files.leaves_path.exists()
        stale = leaf_hashes_of(reader.reader, files)
        lines = stale.read()
        assert lines is not None
        rewind_to(storage.writer, 200, None)
        assert not files.leaves_path.exists()
        assert content_hash(storage, incremental=True) == content_hash(storage)
        stale.write(lines, 400)  # as a reader that had started earlier
        assert leaf_hashes_of(reader.reader, files).read() is None
        assert content_hash(reader, incremental=True) == content_hash(reader)


def test_a_ring_that_takes_over_others_rows_forgets_them(tmp_path: Path) -> None:
    paths = [made(tmp_path / name, "ring", 20, Lanes(seed)) for seed, name in enumerate("ab")]
    with open_storage(paths[0], mode="append") as one, open_storage(paths[1]) as other:
        _replace(one.writer, other.reader)
        assert not one.writer.files.leaves_path.exists()
        assert content_hash(one, incremental=True) == content_hash(other)


# --- unusable files -------------------------------------------------------------------------------


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def renamed(content: bytes, **changes: Any) -> bytes:
    """Replace the second line, with a valid checksum."""
    magic, line, rest = content[:-32].split(b"\n", 2)
    return sealed(b"\n".join([magic, json.dumps(json.loads(line) | changes).encode(), rest]))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "flipped": (lambda told: told[:-60] + bytes([told[-60] ^ 1]) + told[-59:], "checksum"),
    "cut": (lambda told: told[:-1], "checksum"),
    "empty": (lambda told: b"", "checksum"),
    "other": (lambda told: sealed(b"x" + told[1:-32]), "checksum"),
    "no JSON": (lambda told: sealed(told[:19] + b"{" + told[19:-32]), "the storage of its hashes"),
    "no mapping": (lambda told: sealed(told[:19] + b"[]\n"), "the storage of its hashes"),
    "nothing": (lambda told: sealed(told[:19] + b"{}\n"), "the storage of its hashes"),
    "of another": (lambda told: renamed(told, id="0" * 32), "another storage"),
    "columns": (lambda told: renamed(told, about="0" * 64), "another storage"),
    "later": (lambda told: renamed(told, rows=10_000), "10000 rows, but the storage has 240"),
    "lines": (lambda told: renamed(told, leaves=1), "does not have"),
    "text": (lambda told: renamed(told, rows="1"), "does not have"),
    "flag": (lambda told: renamed(told, leaves=True), "does not have"),
    "large": (lambda told: told + bytes(2**17 * LEAF.itemsize), "bytes, more than"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_not_used(how: str, tmp_path: Path) -> None:
    path = made(tmp_path)
    change, why = DAMAGES[how]
    file = file_of(path)
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    (found,) = verify(path).findings
    assert found.check == "content"
    assert why in found.message
    assert "Delete it" in found.message
    with open_storage(path) as storage, pytest.raises(UnusableLeaves, match=why):
        leaf_hashes_of(storage.reader, storage.writer.files).read()
    wanted = content_hash(path)
    assert content_hash(path, incremental=True) == wanted
    assert file.read_bytes() == whole  # it is recreated
    assert verify(path).sound


def test_a_file_of_a_great_size_takes_no_memory(tmp_path: Path) -> None:
    path = made(tmp_path)
    os.truncate(file_of(path), 2**42)
    assert both(path)[0] == both(path)[1]


def test_links_are_not_followed(tmp_path: Path) -> None:
    path = made(tmp_path)
    file, other = file_of(path), tmp_path / "other"
    file.rename(other)
    file.symlink_to(other)
    before = other.read_bytes()
    assert both(path)[0] == both(path)[1]
    assert other.read_bytes() == before
    assert not file.is_symlink()


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)
    file = file_of(path)
    file.unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Inside, "write_atomically", refuse)
    assert both(path)[0] == both(path)[1]
    assert not file.exists()


def test_wrong_arguments(tmp_path: Path) -> None:
    path = made(tmp_path)
    with pytest.raises(ValueError, match="expected ids='kept', got 'relative'"):
        content_hash(path, ids="relative", incremental=True)


def test_a_storage_without_rows_or_columns(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "none") as storage:
        assert content_hash(storage, incremental=True) == content_hash(storage)
        storage.extend(Lanes().rows(1))
        assert content_hash(storage, incremental=True) == content_hash(storage)


@pytest.mark.parametrize("name", KINDS)
def test_one_list_names_the_files(name: str, tmp_path: Path) -> None:
    """The files are in the storage's place, and an unfinished creation may leave them there."""
    path = made(tmp_path, name, 30)
    with open_storage(path) as storage:
        files = storage.writer.files
        assert len(files.beside) == len(BESIDE)
        for file, known in zip(files.beside, BESIDE, strict=True):
            assert file.name.endswith(known)
            assert file in files.replaced_files()
        assert files.leaves_path.exists()
        assert files.leaves_path in files.beside
