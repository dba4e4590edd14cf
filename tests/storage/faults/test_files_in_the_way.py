"""Test invalid objects in place of a storage's files.

Also test batches that no format can hold.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.errors import (
    CorruptStorage,
    InvalidSchema,
    NotWritable,
    RowsMismatch,
    StorageClosed,
    StorageError,
    StorageFull,
)
from tallyroll.storage.storages import DiskStorage

KINDS: dict[str, type[DiskStorage]] = {
    "rows": MemmapStorage,
    "rows.h5": H5Storage,
    "rows.zarr": ZarrStorage,
}
ROWS = 300


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the path of a storage that a collector filled."""
    where: Path = tmp_path / request.param
    with SyncCollector(
        "CartPole-v1", num_envs=2, frames_per_batch=100, total_frames=ROWS, seed=0, storage=where
    ) as collector:
        for _ in collector:
            pass
    return where


def files_of(path: Path) -> list[Path]:
    beside = [each for each in path.parent.iterdir() if each.name.startswith(path.name)]
    inside = path.rglob("*") if path.is_dir() else []
    return sorted(each for each in {*beside, *inside} if each.is_file())


def use(path: Path, how: str) -> bool:
    """Use a storage. Return whether all operations succeed."""
    if how == "verify":
        return not verify(path).findings
    if how == "read":
        with open_storage(path) as storage:
            storage.get(np.arange(len(storage)))
            len(storage.trajectories)
    if how == "append":
        with open_storage(path, mode="append") as storage:
            storage.extend(storage.get(np.arange(3)))
            storage.flush()
    return True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["verify", "read", "append"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
@pytest.mark.filterwarnings("ignore:unclosed storage")
def test_something_else_in_the_place_of_a_file(
    path: Path, tmp_path: Path, make: Callable[[Path], None], how: str
) -> None:
    """A Tallyroll error reports it immediately, or the operation does not need the file."""
    work = tmp_path / "work"
    for file in files_of(path):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        for each in path.parent.glob(path.name + "*"):
            copy = shutil.copytree if each.is_dir() else shutil.copy
            copy(each, work / each.name)
        odd = work / file.relative_to(path.parent)
        odd.unlink()
        make(odd)
        try:
            well = use(work / path.name, how)
        except StorageError:
            continue
        if well:  # the operation recreated the file
            with open_storage(work / path.name) as storage:
                assert len(storage) >= ROWS


@pytest.mark.parametrize("kind", [MemmapStorage, ZarrStorage])
def test_no_room_for_the_manifest_of_a_finalized_storage(
    kind: type[DiskStorage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = kind(tmp_path / "rows")
    storage.extend({("x",): np.arange(9)})

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("tallyroll.storage.files.safe_files.Inside.write_atomically", full)
        with pytest.raises(StorageFull, match="Committed rows are intact"):
            storage.finalize()
    with pytest.raises(StorageClosed):
        storage.extend({("x",): np.arange(9)})
    with kind(tmp_path / "rows", mode="append") as storage:
        assert storage.column("x").tolist() == list(range(9))
        storage.finalize()


# --- verify ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_storage_without_rows_is_sound(name: str, tmp_path: Path) -> None:
    with KINDS[name](tmp_path / name, capacity=5) as storage:
        storage.extend(TensorDict({"a": torch.zeros(0, 3), "b": torch.zeros(0, 2, 2)}, [0]))
    assert not verify(tmp_path / name).findings


@pytest.mark.parametrize(
    ("column", "value"), [("traj_ids", 12345678), ("lane", -5), ("lane", 9), ("step", -1)]
)
def test_a_column_of_nothing_but_nonsense(path: Path, column: str, value: int) -> None:
    with open_storage(path, mode="append") as storage:
        engine = storage.reader.engine
        assert engine is not None
        table = storage.writer.files.episodes_path
        before = table.read_bytes()
        engine.space.columns.arrays[engine.schema.keys.index(("collector", column))][:ROWS] = value
    table.write_bytes(before)
    assert verify(path).findings


@pytest.mark.parametrize("max_size", [None, 7])
def test_rows_of_no_collector_whose_lanes_are_all_nonsense(
    tmp_path: Path, max_size: int | None
) -> None:
    """No run gives the number of lanes, and no id gives the lane of a row."""
    ended = torch.tensor([False, True] * 3)[:, None]
    batch = TensorDict(
        {
            "next": {"terminated": ended, "truncated": torch.zeros_like(ended), "done": ended},
            "collector": {
                "traj_ids": torch.tensor([0, 0, 1, 1, 2, 2]),
                "step": torch.tensor([0, 1] * 3),
                "lane": torch.full((6,), -5, dtype=torch.int32),
            },
        },
        [6],
    )
    with MemmapStorage(tmp_path / "rows", max_size=max_size) as storage:
        for _ in range(2):
            storage.extend(batch, ids="fresh")
    assert verify(tmp_path / "rows").findings


# --- batches that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_left_out_silently(name: str, tmp_path: Path, later: bool) -> None:
    whole = TensorDict({"a": torch.zeros(3)}, [3])
    stacks: list[Any] = [
        whole.clone().set("s", NonTensorStack("a", "b", "c")),
        LazyStackedTensorDict(*whole[:2].unbind(0), TensorDict({"a": torch.zeros(()), "b": 1})),
        TensorDict(
            {
                "a": torch.zeros(3),
                "n": LazyStackedTensorDict(TensorDict({"x": 1}), TensorDict({}), TensorDict({})),
            },
            [3],
        ),
    ]
    with KINDS[name](tmp_path / name, capacity=9) as storage:
        if later:
            storage.extend(whole)
        for stack in stacks:
            with pytest.raises(
                RowsMismatch if later else InvalidSchema, match=r"s is NonT|only some"
            ):
                storage.extend(stack)
        assert storage.head == 3 * later


@pytest.mark.parametrize("name", KINDS)
def test_columns_of_different_lengths_make_no_storage(name: str, tmp_path: Path) -> None:
    with KINDS[name](tmp_path / name, capacity=9) as storage:
        with pytest.raises(RowsMismatch, match="b/c does not have the 3 rows"):
            storage.extend({("a",): np.zeros(3), ("b", "c"): np.zeros((4, 2))})
        assert list(tmp_path.iterdir()) == []
        storage.extend({("a",): np.zeros(3)})


@pytest.mark.parametrize("name", KINDS)
def test_rows_have_at_most_so_many_dimensions_in_each_format(name: str, tmp_path: Path) -> None:
    most = 64 if name == "rows" else 32
    storage = KINDS[name](tmp_path / name, capacity=9)
    with pytest.raises(InvalidSchema, match=f"{most + 1} dimensions, rows included"):
        storage.extend(TensorDict({"a": torch.ones(3, *[1] * most)}, [3]))
    assert list(tmp_path.iterdir()) == []
    with KINDS[name](tmp_path / name, capacity=9) as storage:
        storage.extend(TensorDict({"a": torch.ones(3, *[1] * (most - 1))}, [3]))
    assert not verify(tmp_path / name).findings


@pytest.mark.parametrize("kind", [MemmapStorage, ZarrStorage])
def test_paths_that_are_too_long(kind: type[DiskStorage], tmp_path: Path) -> None:
    key = ("d" * 150,) * 32
    storage = kind(tmp_path / "rows")
    with pytest.raises((NotWritable, CorruptStorage), match="shorter names"):
        storage.extend({key: np.zeros(3)})
    storage.extend({("a",): np.zeros(3)})
    storage.close()
