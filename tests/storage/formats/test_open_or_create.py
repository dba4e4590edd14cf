"""Test ``mode="auto"``, which opens an existing storage or creates one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.storage import FrameStack, H5Storage, MemmapStorage, ZarrStorage
from tallyroll.storage.errors import (
    DirectoryNotEmpty,
    NotAStorage,
    OpenError,
    RowsMismatch,
    SchemaMismatch,
    StorageLocked,
)

KINDS: list[Any] = [
    (MemmapStorage, {}),
    (MemmapStorage, {"max_size": 5}),
    (H5Storage, {"capacity": 8}),
    (ZarrStorage, {}),
]


def rows(start: int, stop: int, name: str = "x") -> TensorDict:
    return TensorDict({name: torch.arange(start, stop)}, [stop - start])


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_storage_is_created_then_opened(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    path = tmp_path / "rows"
    for call in range(3):
        with kind(path, mode="auto", **options) as storage:
            assert storage.mode == ("append" if call else "create")
            assert storage.head == 2 * call
            storage.extend(rows(2 * call, 2 * call + 2))
    with kind(path, mode="read") as storage:
        assert storage.in_order()["x"].tolist() == [*range(6)][-len(storage) :]
        assert len(storage) == options.get("max_size", 6)


def test_without_rows_nothing_is_written(tmp_path: Path) -> None:
    MemmapStorage(tmp_path / "rows", mode="auto").close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"max_size": 5}, {"max_size": 6}, "max_size=6 was given, .* a ring of 5 .*max_size=5"),
        ({"max_size": 5}, {}, "max_size was not given, .* a ring of 5 rows. Give max_size=5"),
        ({}, {"max_size": 6}, "max_size=6 was given, .* keeps every row. Leave max_size out"),
        ({}, {"once": True}, "once=True was given, .* has whole observations"),
    ],
)
def test_other_options_are_refused(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path, mode="auto", **first) as storage:
        storage.extend(rows(0, 3))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=message):
        MemmapStorage(path, mode="auto", **second)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    with MemmapStorage(path, mode="auto", **first) as storage:  # and it is not locked
        assert storage.mode == "append"


def test_other_stacks_are_refused(tmp_path: Path) -> None:
    path, frames = tmp_path / "rows", torch.zeros(2, 4, 32, 32, dtype=torch.uint8)
    whole: dict[str, Any] = {"mode": "auto", "once": True}
    with MemmapStorage(path, **whole, stacks=[FrameStack("observation")]) as storage:
        storage.extend(TensorDict({"observation": frames, "next": {"observation": frames}}, [2]))
    for stack, message in (
        (FrameStack("observation", 2), "2 frames of observation .* stores 4 along axis 0"),
        (FrameStack("observation", axis=1), "32 frames of observation along axis 1 were given"),
        (FrameStack("pixels"), "expected some of observation, next/observation, got pixels"),
    ):
        with pytest.raises(ValueError, match=f"stacks: {message}"):
            MemmapStorage(path, **whole, stacks=[stack])
    for same in ([], [FrameStack("observation")], [FrameStack("observation", 4)]):
        with MemmapStorage(path, **whole, stacks=same) as storage:  # and it is not locked
            assert storage.mode == "append"


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_other_columns_are_refused(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    path = tmp_path / "rows"
    with kind(path, mode="auto", **options) as storage:
        storage.extend(rows(0, 3))
    with kind(path, mode="auto", **options) as storage:
        with pytest.raises(RowsMismatch, match="y"):
            storage.extend(rows(3, 6, "y"))
        with pytest.raises(SchemaMismatch, match="has other columns than the data"):
            SyncCollector("CartPole-v1", frames_per_batch=2, total_frames=2, storage=storage)
        assert storage.head == 3


def test_other_things_at_the_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("text")
    with pytest.raises(DirectoryNotEmpty):
        MemmapStorage(tmp_path / "folder", mode="auto")
    with pytest.raises(OpenError):
        MemmapStorage(tmp_path / "folder" / "file", mode="auto")
    with pytest.raises(OpenError):
        H5Storage(tmp_path / "folder" / "file", mode="auto", capacity=3)
    with H5Storage(tmp_path / "rows.h5", mode="auto", capacity=3) as storage:
        storage.extend(rows(0, 3))
    with pytest.raises((OpenError, NotAStorage)):
        MemmapStorage(tmp_path / "rows.h5", mode="auto")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows", mode="auto") as storage:
        storage.extend(rows(0, 3))
        with pytest.raises(StorageLocked):
            MemmapStorage(tmp_path / "rows", mode="auto")


def test_a_temporary_storage_is_created_by_mode_create() -> None:
    with pytest.raises(ValueError, match="Give its path"):
        MemmapStorage(mode="auto")


@pytest.mark.parametrize("options", [{"once": "yes"}, {"stacks": [FrameStack("observation", 4)]}])
def test_options_are_checked_for_an_existing_storage_too(
    options: dict[str, Any], tmp_path: Path
) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="once"):
            MemmapStorage(tmp_path / "rows", mode="auto", **options)
        with MemmapStorage(tmp_path / "rows", mode="auto") as storage:
            storage.extend(rows(len(storage), len(storage) + 3))
