"""Storages whose frames are stored once hold the same rows as others, for everything that reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from pixel_kit import SIDE, color, floats, stacked, stacked_with_zeros
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.storage import (
    FrameStack,
    H5Storage,
    MemmapStorage,
    content_hash,
    n_step,
    open_storage,
    verify,
)
from tallyroll.storage.engine.frame_pools import PoolFile
from tallyroll.storage.errors import CorruptStorage, FormatVersionMismatch, InvalidSchema
from tallyroll.storage.files.format_versions import ONCE_VERSION
from tallyroll.storage.storages import DiskStorage

Make = Callable[[], gymnasium.Env]


KEYS = (("observation",), ("next", "observation"))
ENVS: dict[str, Make] = {
    each.__name__: each for each in (stacked, stacked_with_zeros, color, floats)
}


def collected(path: Path, make: Make, frames: int = 400, **options: Any) -> None:
    """Collect rows to a new storage, half by iteration and half by `collect`."""
    storage = {name: options.pop(name) for name in ("once", "max_size") if name in options}
    kind = MultiprocessCollector if options.get("num_workers") else SyncCollector
    with (
        MemmapStorage(path, **storage) as rows,
        kind(
            make,
            num_envs=3,
            frames_per_batch=50,
            total_frames=frames,
            seed=5,
            storage=rows,
            **options,
        ) as collector,
    ):
        for number, _ in enumerate(collector):
            if number == 3:
                break
        while collector.ledger.stored < frames:
            collector.collect(min(7, frames - collector.ledger.stored))


@pytest.fixture(params=[None, 150], ids=["growing", "ring"])
def ring(request: pytest.FixtureRequest) -> int | None:
    size: int | None = request.param
    return size


@pytest.fixture
def both(tmp_path: Path, ring: int | None) -> tuple[Path, Path]:
    """Paths of the same rows, stored once and not."""
    paths = tmp_path / "once", tmp_path / "plain"
    for path, once in zip(paths, (True, False), strict=True):
        collected(path, stacked, max_size=ring, once=once)
    return paths


def same_rows(one: DiskStorage, other: DiskStorage) -> None:
    assert one.span == other.span
    assert_equal(one.in_order(), other.in_order())


def assert_equal(one: TensorDict, other: TensorDict) -> None:
    """Compare the bits of all columns."""
    keys = set(one.keys(include_nested=True, leaves_only=True))
    assert keys == set(other.keys(include_nested=True, leaves_only=True))
    for key in keys:
        assert one[key].dtype == other[key].dtype, key
        assert one[key].shape == other[key].shape, key
        left, right = (each[key].contiguous().numpy().tobytes() for each in (one, other))
        assert left == right, key


# --- written by collectors ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENVS)
def test_a_collector_stores_the_same_rows(name: str, tmp_path: Path, ring: int | None) -> None:
    for once in (True, False):
        collected(tmp_path / str(once), ENVS[name], max_size=ring, once=once)
    with open_storage(tmp_path / "True") as one, open_storage(tmp_path / "False") as other:
        assert len(one) == (ring or 400)
        same_rows(one, other)
        layout = one.reader.once[0].layout
        assert layout.stack == (4 if "stacked" in name else 1)
        assert layout.delta == (name != "floats")
    assert verify(tmp_path / "True").sound


@pytest.mark.slow
def test_workers_store_the_same_rows(tmp_path: Path) -> None:
    for once in (True, False):
        collected(tmp_path / str(once), stacked, once=once, num_workers=2)
    with open_storage(tmp_path / "True") as one, open_storage(tmp_path / "False") as other:
        same_rows(one, other)


def test_a_resumed_run_has_the_same_rows(tmp_path: Path, ring: int | None) -> None:
    for once in (True, False):
        path = tmp_path / str(once)
        collected(path, stacked, 150, max_size=ring, once=once)
        with (
            MemmapStorage(path, mode="append") as rows,
            SyncCollector(
                stacked,
                num_envs=3,
                frames_per_batch=50,
                total_frames=400,
                seed=5,
                storage=rows,
                resume=True,
            ) as collector,
        ):
            for _ in collector:
                pass
    with open_storage(tmp_path / "True") as one, open_storage(tmp_path / "False") as other:
        assert one.head == 400
        same_rows(one, other)


# --- consumers ------------------------------------------------------------------------------------


def test_every_index_gives_the_same_rows(both: tuple[Path, Path]) -> None:
    with open_storage(both[0]) as one, open_storage(both[1]) as other:
        for index in (slice(None), slice(3, 90, 7), [5, 0, 99, 5], torch.arange(40).view(4, 10), 7):
            assert_equal(one.get(index), other.get(index))
            keys = ["observation", ("next", "reward")]
            assert_equal(one.get(index, keys), other.get(index, keys))
        out = one.reused(64)
        for seed in range(3):
            index = np.random.default_rng(seed).integers(0, len(one), 64)
            assert_equal(one.get(index, out=out), other.get(index))
        for key in (("observation",), ("next", "observation")):
            np.testing.assert_array_equal(one.column(key), other.column(key))
            assert one.reader.column(key).array is None


@pytest.mark.parametrize("mode", ["read", "append"])
def test_given_memory_gets_each_value_at_once(
    mode: str, both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over a pool writes both observations to the given memory."""
    read, passes = PoolFile.read, []

    def noted(self: PoolFile, positions: np.ndarray, *outs: np.ndarray, **options: Any) -> None:
        passes.append([each.ctypes.data for each in outs])
        read(self, positions, *outs, **options)

    index = np.random.default_rng(0).integers(0, 150, 64)
    with open_storage(both[0], mode=mode) as one, open_storage(both[1]) as other:
        reused, steps = one.reused(64), n_step(one, index[::-1], n=3, gamma=0.9)
        monkeypatch.setattr(PoolFile, "read", noted)
        assert_equal(one.get(index, out=reused), other.get(index))
        assert_equal(
            n_step(one, index, n=3, gamma=0.9, out=steps), n_step(other, index, n=3, gamma=0.9)
        )
        assert passes == [[rows[key].data_ptr() for key in KEYS] for rows in (reused.rows, steps)]


def test_slices_returns_and_samples_are_the_same(both: tuple[Path, Path]) -> None:
    with open_storage(both[0]) as one, open_storage(both[1]) as other:
        found = []
        for storage in (one, other):
            generator = torch.Generator().manual_seed(3)
            index = torch.arange(0, len(storage), 3)
            buffer = ReplayBuffer(storage=storage, batch_size=32, generator=generator)
            torch.manual_seed(0)
            drawn = storage.trajectories.sample_slices(8, 4, torch.Generator().manual_seed(3))
            found.append(
                [drawn, n_step(storage, index, n=3, gamma=0.9), buffer.sample().exclude("index")]
            )
        for ours, theirs in zip(*found, strict=True):
            assert_equal(ours, theirs)
        for (id, ours), (same, theirs) in zip(
            one.trajectories.items(), other.trajectories.items(), strict=True
        ):
            assert id == same
            assert_equal(ours, theirs)


def test_hashes_and_checksums_do_not_depend_on_the_layout(both: tuple[Path, Path]) -> None:
    hashes, sums = [], []
    for path in both:
        with open_storage(path) as storage:
            hashes.append(content_hash(storage))
        with MemmapStorage(path, mode="append") as storage:
            storage.finalize()
        with open_storage(path) as storage:
            sums.append(storage.manifest["finalized"]["checksums"])
        assert verify(path).sound
    assert hashes[0] == hashes[1]
    assert sums[0] == sums[1]


def test_copies_keep_the_layout(both: tuple[Path, Path], tmp_path: Path) -> None:
    with open_storage(both[0]) as one, open_storage(both[1]) as other:
        one.copy_to(tmp_path / "copy")
        one.copy_to(tmp_path / "other.zarr")
        one.pack(tmp_path / "packed")
        one.dumps(tmp_path / "dump")
        with open_storage(tmp_path / "copy") as copy:
            assert [each.key for each in copy.reader.once] == [("observation",)]
        for name in ("copy", "other.zarr", "dump"):
            with open_storage(tmp_path / name) as copy:
                assert_equal(copy.in_order(), other.in_order())
        with open_storage(tmp_path / "packed") as packed:  # in another order
            assert content_hash(packed) == content_hash(other)
        collected(tmp_path / "second", stacked, 60, once=True)
        with open_storage([both[0], tmp_path / "second"]) as union:
            assert_equal(union.get(slice(0, len(other))), other.in_order())
    assert verify(tmp_path / "dump").sound


def test_copies_of_views_and_unions_keep_the_layout(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    collected(tmp_path / "second", stacked, 60, once=True)
    with (
        open_storage(both[0]) as one,
        open_storage(both[1]) as other,
        open_storage([both[0], tmp_path / "second"]) as joined,
        open_storage([both[0], both[1]]) as mixed,
    ):
        one.trajectories.where("length > 2").copy_to(tmp_path / "view")
        other.trajectories.where("length > 2").copy_to(tmp_path / "view of plain rows")
        joined.copy_to(tmp_path / "joined")
        mixed.copy_to(tmp_path / "mixed")
        with open_storage(tmp_path / "joined") as copy:
            assert copy.stores_once
            assert_equal(copy.in_order(), joined.in_order())
    with open_storage(tmp_path / "mixed") as copy:
        assert copy.reader.once == ()
    with open_storage(tmp_path / "view") as one, open_storage(tmp_path / "view of plain rows") as b:
        assert [each.key for each in one.reader.once] == [("observation",)]
        assert b.reader.once == ()
        same_rows(one, b)


def test_a_checkpoint_is_loaded_into_a_new_storage(
    both: tuple[Path, Path], tmp_path: Path, ring: int | None
) -> None:
    with open_storage(both[0]) as one:
        one.dumps(tmp_path / "dump")
    with MemmapStorage(tmp_path / "new", max_size=ring, once=True) as new:
        new.loads(tmp_path / "dump")
        with open_storage(both[1]) as other:
            same_rows(new, other)
        rows = new.get(slice(0, 20))
        new.extend(rows, ids="renumber")
        assert_equal(
            new.get(list(new.index_of(np.arange(new.head - 20, new.head)))).exclude("collector"),
            rows.exclude("collector"),
        )


def test_overlays_lie_over_rows_that_are_stored_once(both: tuple[Path, Path]) -> None:
    with MemmapStorage(both[0], mode="append") as storage:
        overlay = storage.overlay("advantage", "float32")
        overlay[np.arange(len(storage))] = np.arange(len(storage), dtype=np.float32)
        rows = storage.get([3, 8], ["observation", "advantage"])
        assert rows["observation"].shape == (2, 4, SIDE, SIDE)
        with open_storage(both[1]) as other:
            assert_equal(rows.select("observation"), other.get([3, 8], ["observation"]))


def test_frames_are_stored_once(tmp_path: Path) -> None:
    """A thousand rows of stacks take little more than their frames' differences."""
    for once in (True, False):
        collected(tmp_path / str(once), stacked, 1000, once=once)
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*observation*"))
        for name in ("True", "False")
    ]
    assert sizes[1] >= 2 * 4 * SIDE * SIDE * 1000
    assert 5 * sizes[0] < sizes[1]


def test_the_use_of_a_pool_is_that_of_the_valid_rows(both: tuple[Path, Path]) -> None:
    with open_storage(both[0]) as storage:
        for head in (400, 430):
            columns = storage.reader.running().space.arrays()
            at = [storage.reader.keys.index(key) for key in KEYS]
            slots = storage.slots_of(np.arange(storage.span.start, storage.span.stop))
            positions = np.unique(np.concatenate([columns[place][slots] for place in at]))
            (layout,) = (each.layout for each in storage.reader.once)
            segments = len(np.unique(positions // layout.segment_frames))
            (usage,) = storage.pool_usage()
            assert storage.head == head
            assert usage.frames == len(positions)
            assert usage.used_nbytes == segments * layout.segment_nbytes
            assert usage.used_nbytes <= usage.nbytes
            if head == 400:
                with MemmapStorage(both[0], mode="append") as writer:
                    writer.extend(writer.get(range(30)), ids="renumber")
                    with open_storage(both[0]) as reader:  # which reads the positions
                        assert writer.reader.stored_size() == reader.reader.stored_size()


def test_load_memmap_shows_the_other_columns(both: tuple[Path, Path]) -> None:
    found = TensorDict.load_memmap(both[0])
    with open_storage(both[1]) as other:
        np.testing.assert_array_equal(found["next", "reward"], other.column(("next", "reward")))
    assert found["observation"].shape == (len(found), 4)
    assert found["observation"].dtype == torch.int32


# --- errors ---------------------------------------------------------------------------------------


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="once: expected a MemmapStorage or ZarrStorage, got H5"):
        H5Storage(tmp_path / "rows", once=True, capacity=5)
    with pytest.raises(ValueError, match="once: expected \"auto\", True or False, got 'yes'"):
        MemmapStorage(tmp_path / "rows", once="yes")  # type: ignore[arg-type]
    for once in ("auto", False):
        with pytest.raises(ValueError, match=f"stacks: expected once=True, got once={once!r}"):
            MemmapStorage(tmp_path / "rows", once=once, stacks=[FrameStack("observation")])
    with pytest.raises(ValueError, match='once: expected mode="create"'):
        MemmapStorage(tmp_path / "rows", mode="append", once=True)
    with (
        MemmapStorage(tmp_path / "rows", once=True) as storage,
        pytest.raises(InvalidSchema, match="once=True: expected a column of 64 bytes"),
    ):
        storage.extend(TensorDict({"observation": torch.zeros(3, 2)}, [3]))
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (FrameStack("nothing"), "stacks: expected some of .*, got nothing"),
        (FrameStack("observation", axis=-1), "stacks: expected frames along the whole first axis"),
        (FrameStack("observation", 2), "stacks: expected frames along the whole first axis"),
    ],
)
def test_wrong_stacks_are_refused(stack: FrameStack, message: str, tmp_path: Path) -> None:
    frames = torch.zeros(2, 4, SIDE, SIDE, dtype=torch.uint8)
    with (
        MemmapStorage(tmp_path / "rows", once=True, stacks=[stack]) as storage,
        pytest.raises(ValueError, match=message),
    ):
        storage.extend(TensorDict({"observation": frames, "next": {"observation": frames}}, [2]))
    assert not (tmp_path / "rows").exists()


def test_declared_stacks_replace_the_guess(tmp_path: Path) -> None:
    frames = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)
    rows = TensorDict({"observation": frames, "next": {"observation": frames}}, [2])
    for name, stacks, frames_of in (("a", [FrameStack("observation")], 3), ("b", [], 1)):
        with MemmapStorage(tmp_path / name, once=True, stacks=stacks) as storage:
            storage.extend(rows)
            assert storage.reader.once[0].layout.stack == frames_of
            assert_equal(storage.get(slice(None)), rows)


def test_positions_outside_the_pool_are_found(both: tuple[Path, Path]) -> None:
    file = both[0] / "next" / "observation.memmap"
    positions = np.memmap(file, np.int32, "r+")
    positions[10] = 2**30
    del positions
    with open_storage(both[0]) as storage:
        with pytest.raises(CorruptStorage, match="observation names frames that are not in its"):
            storage.get(np.arange(len(storage)))
        assert_equal(storage.get([50]), storage.get([50]))
    assert not verify(both[0]).sound


def test_damaged_layouts_are_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    manifest = (both[0] / "manifest.json").read_text()
    for number, (old, new) in enumerate(
        [
            ('"stack": 4', '"stack": 3'),
            ('"key": ["observation"]', '"key": ["action"]'),
            ('"segment_frames": 64', '"segment_frames": -64'),
            ('"once": [', '"once": [5, '),
        ]
    ):
        path = tmp_path / str(number)
        shutil.copytree(both[0], path)
        assert old in manifest
        text = manifest.replace(old, new, 1)
        seal = text[text.index(', "crc32"') : text.index(', "crc32"') + 21]
        (path / "manifest.json").write_text(text.replace(seal, ""))
        with pytest.raises(CorruptStorage):
            open_storage(path)


def test_a_missing_pool_is_named(both: tuple[Path, Path]) -> None:
    (both[0] / "observation.frames").unlink()
    with pytest.raises(CorruptStorage, match=r"observation\.frames, .*is missing"):
        open_storage(both[0])


def test_earlier_versions_refuse_the_layout(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tallyroll.storage.files import format_versions, header_identity, manifest

    for module in (format_versions, header_identity, manifest):
        monkeypatch.setattr(module, "READABLE", (2, 3))
    with pytest.raises(FormatVersionMismatch, match=f"has format version {ONCE_VERSION}"):
        open_storage(both[0])
