"""Test overlays: how they are read, who may write them, and unusable files."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tallyroll.storage import MemmapStorage, TrajectorySliceSampler, n_step, open_storage, verify
from tallyroll.storage.errors import (
    ColumnsMissing,
    DamagedOverlay,
    FormatVersionMismatch,
    IndexOutOfRange,
    InvalidSchema,
    NotInitialised,
    ReadOnlyStorage,
    RowsMismatch,
    SchemaMismatch,
    StorageClosed,
    StorageLocked,
)
from tallyroll.storage.ext.overlays import header
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to

from formats_kit import KINDS

STEPS = 5


def made(path: Path, rows: int = 20, **options: Any) -> DiskStorage:
    options = {"capacity": 40} if path.suffix == ".h5" else options
    storage = KINDS.get(path.name, MemmapStorage)(path, **options)
    storage.extend(trajectory_rows(0, rows, steps=STEPS))
    return storage


@pytest.mark.parametrize("name", KINDS)
def test_samplers_slices_and_n_step_read_them(name: str, tmp_path: Path) -> None:
    with made(tmp_path / name) as storage:
        storage.overlay("tens", torch.float32, [1])[:] = 10 * torch.arange(20.0)[:, None]
        twice = storage.overlay(("next", "twice"), torch.bfloat16, [1])
        twice[:] = (2 * torch.arange(20)[:, None]).bfloat16()
        assert storage.overlays == [("next", "twice"), "tens"]
        assert "tens" not in storage.get([0])
        rows = storage.with_overlays("tens", ("next", "twice"))
        buffer = TensorDictReplayBuffer(
            storage=rows, sampler=TrajectorySliceSampler(3), batch_size=12
        )
        for found in (
            buffer.sample(),
            rows.trajectories.sample_slices(4, 3),
            rows.trajectories[2],
            rows[4:9],
            rows.get(3),
            rows.in_order(),
            rows[:],
        ):
            assert found["tens"].equal(10 * found["observation"])
            assert found["next", "twice"].equal((2 * found["observation"]).bfloat16())
        storage.extend(trajectory_rows(20, 1, steps=STEPS))
        assert len(rows) == 21
        assert rows[-1]["tens"].item() == 0
        # Rows 14 and 15 belong to two trajectories.
        sums = n_step(storage, [3, 14], 2, 0.5, reward_key="twice")
        assert sums["next", "twice"].ravel().tolist() == [6 + 0.5 * 8, 28]
        with pytest.raises(ReadOnlyStorage, match="with_overlays"):
            rows.extend(trajectory_rows(21, 1, steps=STEPS))
        with pytest.raises(ColumnsMissing, match="no overlay other"):
            storage.with_overlays("other")


def test_a_view_of_a_reader_is_pickled(tmp_path: Path) -> None:
    with made(tmp_path / "rows") as storage:
        storage.overlay("x", torch.int64)[3] = 7
    with open_storage(tmp_path / "rows") as reader:
        again = pickle.loads(pickle.dumps(reader.with_overlays("x")))
        assert again[2:5]["x"].tolist() == [0, 7, 0]
        again.of_rows.close()


def test_it_is_opened_where_it_is_equal(tmp_path: Path) -> None:
    with made(tmp_path / "rows") as storage:
        storage.overlay("x", torch.float32, [2], 0.1)[0] = torch.ones(2)
        assert storage.overlay("x", "float32", (2,), 0.1)[0].tolist() == [1, 1]
        assert storage.overlay("x", np.float32, [2], 0.1)[:2].shape == (2, 2)
        with pytest.raises(SchemaMismatch, match=r"dtype float32, expected float64"):
            storage.overlay("x", torch.float64, [2], 0.1)
        with pytest.raises(SchemaMismatch, match=r"shape \[2\], expected \[\], fill"):
            storage.overlay("x", torch.float32)
        storage.drop_overlay("x")
        with pytest.raises(ColumnsMissing, match="no overlay x"):
            storage.overlay("x")
        assert storage.overlays == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("observation", torch.float32), InvalidSchema, "have a column of this name"),
        ((("next",), torch.float32), InvalidSchema, "both a column and a group"),
        ((("observation", "x"), torch.float32), InvalidSchema, "both a column and a group"),
        (("a/b", torch.float32), InvalidSchema, "cannot be a name"),
        (("x" * 300, torch.float32), InvalidSchema, "too long"),
        (("x", "text"), TypeError, "dtype: expected a torch dtype"),
        (("x", torch.float32, [0]), InvalidSchema, "no values"),
        (("x", torch.float32, [1.5]), InvalidSchema, "whole numbers"),
        (("x", torch.int8, [], 300), ValueError, "fill"),
        (("x", torch.int8, [], 0.5), ValueError, "it would become 0"),
        (("x", torch.int8, [], float("nan")), ValueError, "fill"),
        (("x", torch.float32, [], "0"), TypeError, "one number for all rows"),
        (
            ("x", torch.int64, [], 2**63),
            ValueError,
            "fill: expected a number that int64 can",
        ),
        (("x", torch.float32, [], 1e39), ValueError, "fill"),
        (("x", torch.bool, [], 2), ValueError, "fill"),
        (("x", torch.bool, [], float("nan")), ValueError, "fill"),
    ],
)
def test_what_no_overlay_can_be(
    arguments: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with made(tmp_path / "rows") as storage:
        with pytest.raises(error, match=message):
            storage.overlay(*arguments)
        assert storage.overlays == []


NAN, INF = float("nan"), float("inf")
REFUSED: dict[torch.dtype, list[Any]] = {
    torch.uint8: [-1, 256, 1.5, NAN, INF, 1j, "1", None, [0, 1, 2, -1], np.array([1] * 4)],
    torch.int8: [128, -129, [True, 2, 3, 0.5]],
    torch.int64: [2**63, -(2**63) - 1, 0.5, 1e19, NAN],
    torch.uint64: [2**64, -1],
    torch.bool: [2, -1, 0.5, NAN, 1j, [True, False, 1, 3]],
    torch.float16: [65520.0, 1e300, 2049, 1j],
    torch.bfloat16: [1e39, 257],
    torch.float32: [1e39, -1e39, 2**24 + 1, 10**400, [0, 0.5, 1e39, 1], np.float64(0.5)],
    torch.float64: [2**53 + 1, 10**400],
    torch.complex64: [1e39, 1e39j, 2**24 + 1],
}
TAKEN: dict[torch.dtype, list[tuple[Any, Any]]] = {
    torch.uint8: [(255, 255), (True, 1), (2.0, 2), ([0, 1.0, True, 255], [0, 1, 1, 255])],
    torch.int64: [(-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1)],
    torch.uint64: [(2**64 - 1, 2**64 - 1)],
    torch.bool: [(1, True), (0.0, False), ([1, 0, True, 1.0], [True, False, True, True])],
    torch.float16: [(0.1, 0.0999755859375), (65519.0, 65504.0), (1e-9, 0.0), (-INF, -INF)],
    torch.float32: [(1e-60, 0.0), (2**24, 2.0**24), (2**64, 2.0**64), (INF, INF)],
    torch.complex64: [(1, 1 + 0j), (0.5j, 0.5j)],
}


@pytest.mark.parametrize("dtype", REFUSED)
def test_a_number_that_the_dtype_does_not_have_is_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    with made(tmp_path / "rows", rows=4) as storage:
        overlay = storage.overlay("x", dtype)
        overlay[:] = [0, 1, 0, 1]
        before = overlay[:].tolist()
        for values in REFUSED[dtype]:
            for index in (slice(None), [0, 1, 2, 3]):
                with pytest.raises(RowsMismatch, match=r"overlay x: expected values of .* Nothing"):
                    overlay[index] = values
            with pytest.raises(RowsMismatch):
                overlay.set(rows=[3, 2, 1, 0], values=values)
            assert overlay[:].tolist() == before


@pytest.mark.parametrize("dtype", TAKEN)
def test_numbers_that_the_dtype_has_are_kept_or_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    with made(tmp_path / "rows", rows=4) as storage:
        overlay = storage.overlay("x", dtype)
        for values, kept in TAKEN[dtype]:
            overlay[:] = values
            assert overlay[:].tolist() == (kept if isinstance(kept, list) else [kept] * 4)
            if not isinstance(kept, list):
                storage.drop_overlay("x")
                overlay = storage.overlay("x", dtype, fill=values)
                assert overlay.fill == kept


def test_overlays_can_be_read_together(tmp_path: Path) -> None:
    with made(tmp_path / "rows") as storage:
        storage.overlay("v", torch.float32)
        storage.overlay(("a", "b", "c"), torch.float32)
        for name, other in ((("v", "w"), "v"), ("a", "a/b/c"), (("a", "b"), "a/b/c")):
            with pytest.raises(InvalidSchema, match=f"together with the overlay {other}, got"):
                storage.overlay(name, torch.float32)
        storage.overlay(("a", "b", "d"), torch.float32)
        names = storage.overlays
        assert len(names) == 3
        assert len(storage.get([0], keys=names).keys(True, True)) == 3


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_a_removed_storage_left_blocks_no_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with made(path) as storage:
        storage.overlay("x", torch.int64)[:] = 7
        file = storage.overlay_files.path_of(("x",))
    left = file.read_bytes()
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with made(path) as storage:
        file.write_bytes(left)
        assert storage.overlays == []
        with pytest.raises(DamagedOverlay, match="another storage"):
            storage.overlay("x")
        storage.overlay(("x", "y"), torch.int64)  # "x" is not a group here
        storage.drop_overlay(("x", "y"))
        overlay = storage.overlay("x", torch.float32, fill=0.5)
        assert set(overlay[:].tolist()) == {0.5}
        overlay[:2] = 1.0
        assert storage.overlays == ["x"]
    with open_storage(path) as reader:
        assert reader.overlay("x")[:3].tolist() == [1.0, 1.0, 0.5]
    assert not [each for each in verify(path).findings if each.check == "overlays"]


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    with made(tmp_path / "rows", max_size=8, rows=8) as storage:
        storage.extend(trajectory_rows(8, 4, steps=STEPS))
        overlay = storage.overlay("x", torch.float32, [2], -1)
        for values, message in (
            (torch.ones(2, 2, dtype=torch.float64), "expected values of float32, got float64"),
            (torch.ones(2), r"expected values of shape \[2, 2\], got \[2\]"),
            (torch.ones(3, 2), r"expected values of shape \[2, 2\], got \[3, 2\]"),
            ("text", "expected values of float32, got str"),
        ):
            with pytest.raises(RowsMismatch, match=message):
                overlay[:2] = values
        for index in (8, [-9], range(7, 9)):
            with pytest.raises(IndexOutOfRange):
                overlay[index] = 1.0
        with pytest.raises(IndexOutOfRange, match="rows from 4 to 11, got 3 to 12"):
            overlay.set(rows=[3, 12], values=1.0)
        with pytest.raises(IndexOutOfRange, match="rows from 4 to 11, got 3 to 3"):
            overlay.get(rows=[3])
        with pytest.raises(TypeError, match="got both"):
            overlay.set(0, 1.0, rows=[4])
        with pytest.raises(TypeError, match="whole numbers"):
            overlay.get(rows=[0.5])
        assert (overlay[:] == -1).all()
        assert overlay.set(rows=[3, 4], values=torch.ones(2, 2)) == 1
        assert overlay.get(rows=torch.tensor([[4], [5]]))[..., 0].tolist() == [[1], [-1]]
    with pytest.raises(StorageClosed):
        overlay[0]
    with pytest.raises(StorageClosed):
        overlay[0] = 1.0
    with MemmapStorage() as empty, pytest.raises(NotInitialised):
        empty.overlay("x", torch.float32)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with made(path) as storage, open_storage(path) as reader:
        with pytest.raises(ReadOnlyStorage, match="writable=True"):
            reader.overlay("x", torch.float32)
        mine = storage.overlay("x", torch.float32)
        theirs = reader.overlay("x")
        with pytest.raises(ReadOnlyStorage, match="writable=True"):
            theirs[0] = 1.0
        with pytest.raises(ReadOnlyStorage, match='mode="append"'):
            reader.drop_overlay("x")
        learner = reader.overlay("x", torch.float32, writable=True)
        learner[3] = 4.0
        assert mine[3] == theirs[3] == 4
        with pytest.raises(StorageLocked, match=f"process {os.getpid()} is writing"):
            mine[3] = 5.0
        with pytest.raises(StorageLocked, match="one writer at a time"):
            storage.drop_overlay("x")
        reader.close()
        mine[3] = 5.0
        with open_storage(path) as other:
            seen = other.overlay("x")
            rows = other.with_overlays("x")
            assert seen[3] == 5
            storage.drop_overlay("x")
            storage.overlay("x", torch.float32, fill=9)
            with pytest.raises(ColumnsMissing, match="was dropped"):
                seen[3]
            with pytest.raises(ColumnsMissing, match="was dropped"):
                rows[3]
            assert other.get([3], ["x"])["x"].tolist() == [9]


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def changed(at: int, content: bytes) -> Any:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return change


def newer(path: Path) -> None:
    content = path.read_bytes()
    said = content[24 : 24 + int.from_bytes(content[16:20], "little")]
    start = header._START.pack(header._MAGIC, 2, len(said), header._crc(2, said))
    path.write_bytes(start + content[24:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 4096 + 8), "was truncated"),
        (lambda path: os.truncate(path, 100), "got 100 bytes"),
        (lambda path: path.write_bytes(b""), "got 0 bytes"),
        (changed(0, b"X"), "did not write this file as an overlay"),
        (changed(8, b"\7"), "checksum"),
        (changed(30, b"X"), "checksum"),
        (changed(2048, (2**50).to_bytes(8, "little")), "an impossible size of"),
        (changed(2048, (2**63).to_bytes(8, "little")), "an impossible size of"),
        (link, "it is a link"),
        (lambda path: path.rename(path.with_name("y.overlay")), None),
        (newer, "version 2"),
    ],
)
def test_a_file_that_cannot_be_used(damage: Any, message: str | None, tmp_path: Path) -> None:
    path, name = tmp_path / "rows", "x" if message else "y"
    with made(path) as storage:
        storage.overlay("x", torch.float32)[:] = 1.0
    damage(path / "x.overlay")
    error = FormatVersionMismatch if message == "version 2" else DamagedOverlay
    with open_storage(path) as reader:
        assert reader.get(slice(None))["observation"].ravel().tolist() == list(range(20))
        with pytest.raises(
            error, match=message or "header is for overlay x, but its file name is for y"
        ):
            reader.overlay(name)
        with pytest.raises(error, match="drop_overlay"):
            reader.get([0], keys=[name])
    (found,) = (each for each in verify(path).findings if each.check == "overlays")
    assert "drop_overlay" in found.message
    with MemmapStorage(path, mode="append") as storage:
        storage.drop_overlay(name)
        assert storage.overlays == []
        assert storage.overlay(name, torch.float32, fill=2)[0] == 2
    assert not [each for each in verify(path).findings if each.check == "overlays"]


def test_a_sparse_file_with_room_for_very_many_rows(tmp_path: Path) -> None:
    """The file has few entries: `verify`, copies and rewinds skip the hole of two GiB."""
    path = tmp_path / "rows"
    with made(path) as storage:
        storage.overlay("x", torch.float32)[:] = 1.0
    changed(2048, (2**27).to_bytes(8, "little"))(path / "x.overlay")
    os.truncate(path / "x.overlay", 4096 + 2**27 * 16)
    changed(4096 + 2**26 * 16, (2**62).to_bytes(8, "little"))(path / "x.overlay")
    started = time.process_time()
    (found,) = (each for each in verify(path).findings if each.check == "overlays")
    assert found.places[0].what == f"entry {2**26}"
    with open_storage(path) as reader:
        reader.dumps(tmp_path / "dumped")
    with MemmapStorage(tmp_path / "loaded") as copy:
        copy.loads(tmp_path / "dumped")
        assert copy.overlay("x")[:].tolist() == [1.0] * 20
    with MemmapStorage(path, mode="append") as storage:
        rewind_to(storage.writer, 10, None)
        storage.overlay("x")[0] = 2.0
        assert storage.overlay("x")[:].tolist() == [2.0, *[1.0] * 9]
    assert time.process_time() - started < 2


def test_one_of_another_storage(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with made(tmp_path / name) as storage:
            storage.overlay("x", torch.float32)
    os.replace(tmp_path / "one" / "x.overlay", tmp_path / "two" / "x.overlay")
    with (
        open_storage(tmp_path / "two") as reader,
        pytest.raises(DamagedOverlay, match="another storage"),
    ):
        reader.overlay("x")


def test_verify_finds_entries_of_rows_that_are_not_theirs(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with made(path) as storage:
        storage.overlay("x", torch.int64)[:4] = 1
    for entry, row in ((0, 999), (2, 5)):
        changed(4096 + 24 * entry, ((row + 1) << 24).to_bytes(8, "little"))(path / "x.overlay")
    (found,) = (each for each in verify(path).findings if each.check == "overlays")
    assert found.count == 2
    assert [place.row for place in found.places] == [999, 5]
    with open_storage(path) as reader:
        assert reader.overlay("x")[:4].tolist() == [0, 1, 0, 1]
