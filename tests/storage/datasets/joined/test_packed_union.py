"""Test a union of packed storages: stacks across members, one cache, one budget, few open files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import DiskStorage, FrameStack, MemmapStorage, content_hash, open_storage
from tallyroll.storage.engine import available_memory
from tallyroll.storage.errors import CorruptStorage, StorageClosed
from tallyroll.storage.ext.joined import packs
from tallyroll.storage.ext.joined.packs import JoinedPacks
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.ext.packed import packed_reader
from tallyroll.storage.rows.keys import Key


def union_of(storage: DiskStorage) -> tuple[UnionReader, JoinedPacks]:
    reader = storage.reader
    assert isinstance(reader, UnionReader)
    joined = reader._joined
    assert isinstance(joined, JoinedPacks)
    return reader, joined


def stacked_rows(seed: int, count: int, *, after: bool, axis: int) -> TensorDict:
    """Return rows with stacks of three frames, in trajectories of 1 to 9 rows of one lane."""
    random = np.random.default_rng(seed)
    root, following, steps, ids = [], [], [], []
    while len(root) < count:
        length = int(random.integers(1, 10))
        frames = random.integers(1, 255, (length + 3, 4, 5), dtype=np.uint8)
        frames[:2] = 0 if random.random() < 0.5 else frames[2]
        stacks = [np.stack(frames[at : at + 3], axis) for at in range(length + 1)]
        root += stacks[:-1]
        following += stacks[1:]
        steps += range(length)
        ids += [len(ids)] * length
    columns: dict[Any, Any] = {
        "pixels": torch.from_numpy(np.stack(root[:count])),
        "value": torch.from_numpy(random.standard_normal((count, 2))),
        "collector": {
            "traj_ids": torch.tensor(ids[:count]),
            "step": torch.tensor(steps[:count]),
            "lane": torch.zeros(count, dtype=torch.int32),
        },
    }
    if after:
        columns["next"] = {"pixels": torch.from_numpy(np.stack(following[:count]))}
    return TensorDict(columns, [count])


def packed_parts(folder: Path, sizes: list[int], *, after: bool, axis: int, format: str) -> Any:
    """Pack one storage per number of rows. Return all rows, as NumPy arrays by key."""
    parts: list[TensorDict] = []
    for number, size in enumerate(sizes):
        rows = stacked_rows(number, max(1, size), after=after, axis=axis)[:size]
        with MemmapStorage() as storage:
            storage.extend(rows)
            suffix = ".h5" if format == "hdf5" else ""
            stacks = [FrameStack("pixels", axis=axis)]
            report = storage.pack(folder / f"part-{number}{suffix}", format=format, stacks=stacks)
        assert not size or report.stacks == {"pixels": 3}
        parts.append(rows)
    every = torch.cat(parts)
    keys = every.keys(include_nested=True, leaves_only=True)
    return {(key,) if isinstance(key, str) else key: every[key].numpy() for key in keys}


@pytest.mark.parametrize(
    ("after", "axis", "format"),
    [(True, 0, "zarr"), (True, -1, "zarr"), (False, 0, "zarr"), (True, 0, "hdf5")],
)
def test_stacks_of_all_members(tmp_path: Path, after: bool, axis: int, format: str) -> None:
    every: dict[Key, np.ndarray] = packed_parts(
        tmp_path, [40, 0, 7, 130, 63, 2], after=after, axis=axis, format=format
    )
    random, count = np.random.default_rng(0), 242
    with open_storage(tmp_path / "part-*", ids="offset") as union:
        reader, _ = union_of(union)
        moved = np.repeat(reader.ids_moved_by, [len(each.rows) for each in reader.members])
        assert moved.any()
        every["collector", "traj_ids"] = every["collector", "traj_ids"] + moved
        for rows in (
            random.integers(0, count, 100),
            random.integers(0, count, (5, 2)),
            np.array([]),
        ):
            rows = rows.astype(np.int64)
            got = union.get(torch.from_numpy(rows))
            some = reader.copies(rows, [("collector", "traj_ids"), ("pixels",)])
            assert (some[0] == every["collector", "traj_ids"][rows]).all()
            assert (some[1] == every["pixels",][rows]).all()
            for key, values in every.items():
                wanted = values[rows]
                assert np.array_equal(got[key].numpy(), wanted), key
                assert np.array_equal(reader.column(key).take(rows), wanted), key
                out = np.empty_like(wanted)
                assert reader.column(key).take(rows, out) is out
                assert np.array_equal(out, wanted), key
        for start in (0, 3, 39, 45, 177, 240):
            for stop in (start, start + 1, start + 2, 100, 241, 242):
                for key, values in every.items():
                    found = reader.column(key).slice(start, max(start, stop))
                    assert np.array_equal(found, values[start : max(start, stop)]), (start, stop)
        each = [random.integers(0, count, 30) for _ in reader.keys]
        for key, rows, found in zip(reader.keys, each, reader.gather(each), strict=True):
            assert np.array_equal(found, every[key][rows])
        hashed = content_hash(union)
    with MemmapStorage() as plain:
        plain.extend({key: every[key] for key in reader.keys})
        assert content_hash(plain) == hashed


def test_all_members_have_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is that of a single storage. With one each, a union would keep too much."""
    packed_parts(tmp_path, [200] * 6, after=True, axis=0, format="zarr")
    monkeypatch.setattr(packed_reader, "CACHE_NBYTES", 40_000)
    with open_storage(tmp_path / "part-*") as union:
        _, joined = union_of(union)
        most = sum(each.layout.chunk_nbytes for each in joined._arrays.values())
        for start in range(0, 1200, 50):
            union.reader.column(("pixels",)).slice(start, start + 50)
            union.get(np.arange(start, start + 50))
        kept = [each.max_nbytes for each in joined._arrays.values()]
        assert sum(kept) <= max(40_000, most)
        assert all(each.reader._arrays[0]._slab is None for each in union.reader.members)
        loads = sum(each.loads for each in joined._arrays.values())
        union.get(np.arange(1150, 1200))
        assert sum(each.loads for each in joined._arrays.values()) == loads  # they are cached
    with pytest.raises(StorageClosed):
        union.get([0])
    assert all(each._slab is None for each in joined._arrays.values())


def test_few_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = packed_parts(tmp_path, [9] * 12, after=True, axis=0, format="zarr")
    monkeypatch.setattr(packs, "_MOST_OPEN", 12)
    before = len(os.listdir("/proc/self/fd"))
    with open_storage(tmp_path / "part-*") as union:
        for _ in range(2):
            assert np.array_equal(union.get(slice(None))["pixels"].numpy(), every["pixels",])
            union_of(union)[1]._arrays["collector", "step"]._forget()
        assert len(os.listdir("/proc/self/fd")) - before <= 12
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_damaged_member_is_named(tmp_path: Path) -> None:
    packed_parts(tmp_path, [50, 50, 50], after=True, axis=0, format="zarr")
    file = tmp_path / "part-1" / "value" / "c.0.0"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    with open_storage(tmp_path / "part-*") as union:
        union_of(union)
        assert len(union.get([0, 49, 100], ["value"])) == 3
        with pytest.raises(CorruptStorage, match=r"part-1/value/c\.0\.0 is damaged"):
            union.get([0, 60])


def test_a_member_is_asked_once_for_all_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members have several formats."""
    every = packed_parts(tmp_path, [20, 20], after=True, axis=0, format="zarr")
    with MemmapStorage(tmp_path / "part-2") as storage:
        storage.extend({key: values[:5] for key, values in every.items()})
    calls = []
    with open_storage(tmp_path / "part-*") as union:
        assert isinstance(union.reader, UnionReader)
        assert union.reader._joined is None
        for member in union.reader.members:

            def copies(
                *args: Any, ask: Any = member.reader.copies, path: Path = member.path
            ) -> Any:
                calls.append(path.name)
                return ask(*args)

            monkeypatch.setattr(member.reader, "copies", copies)
        got = union.get([0, 44, 21, 3, 40])
        assert np.array_equal(got["pixels"].numpy(), every["pixels",][[0, 4, 21, 3, 0]])
    assert calls == ["part-0", "part-1", "part-2"]


def test_small_members_do_not_look_at_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query takes half a millisecond, a third of the remaining time to open a member."""
    every = packed_parts(tmp_path, [9, 20], after=True, axis=0, format="zarr")
    looks = []

    def looked() -> int:
        looks.append(1)
        return 2**30

    monkeypatch.setattr(packed_reader, "available_bytes", looked)
    monkeypatch.setattr(available_memory, "available_bytes", looked)
    # Both storages and the union query it for caches, and both storages for breaks and starts.
    for little, wanted in ((available_memory._LITTLE_NBYTES, 0), (0, 7)):
        monkeypatch.setattr(available_memory, "_LITTLE_NBYTES", little)
        with open_storage(tmp_path / "part-*") as union:
            assert np.array_equal(union.get([3, 28])["pixels"].numpy(), every["pixels",][[3, 28]])
        assert len(looks) == wanted
