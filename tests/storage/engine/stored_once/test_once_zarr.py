"""Zarr storages that store frames once hold the same rows as others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import zarr
from pixel_kit import color, floats, stacked, stacked_with_zeros
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    ZarrStorage,
    content_hash,
    frame_windows,
    n_step,
    open_storage,
    verify,
)
from tallyroll.storage.errors import CorruptStorage, FormatVersionMismatch
from tallyroll.storage.files.format_versions import ONCE_VERSION
from tallyroll.storage.storages import DiskStorage

LANES, ROWS = 3, 400
Make = Callable[[], gymnasium.Env]
ENVS: dict[str, Make] = {
    each.__name__: each for each in (stacked, stacked_with_zeros, color, floats)
}
NEXT_OBSERVATION = ("next", "observation")

gymnasium.register("once-zarr/Pixels-v0", stacked)


def collected(
    storage: DiskStorage, make: Make = stacked, frames: int = ROWS, **options: Any
) -> Path:
    kind = MultiprocessCollector if options.get("num_workers") else SyncCollector
    with (
        storage,
        kind(
            make,
            num_envs=LANES,
            frames_per_batch=50,
            total_frames=frames,
            seed=5,
            storage=storage,
            **options,
        ) as collector,
    ):
        while collector.ledger.stored < frames:
            collector.collect(min(37, frames - collector.ledger.stored))
    return storage.path


def bits_of(rows: TensorDict) -> dict[Any, tuple[Any, ...]]:
    return {
        key: (rows[key].dtype, rows[key].shape, rows[key].contiguous().numpy().tobytes())
        for key in rows.keys(True, True)
    }


def layouts_of(path: Path) -> dict[Any, tuple[int, bool]]:
    with open_storage(path) as storage:
        return {each.key: (each.layout.stack, each.layout.delta) for each in storage.reader.once}


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """Paths of the same rows in Zarr storages, stored once and not."""
    paths = tmp_path / "once.zarr", tmp_path / "plain.zarr"
    return tuple(  # type: ignore[return-value]
        collected(ZarrStorage(path, once=once))
        for path, once in zip(paths, (True, False), strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ENVS)
def test_a_collector_stores_the_same_rows(name: str, workers: int, tmp_path: Path) -> None:
    paths = tmp_path / "once.zarr", tmp_path / "memmap"
    more: dict[str, Any] = {"num_workers": 2, "transport": "thread"} if workers else {}
    collected(ZarrStorage(paths[0], once=True), ENVS[name], **more)
    collected(MemmapStorage(paths[1], once=False), ENVS[name], **more)
    found = []
    for path in paths:
        with open_storage(path) as storage:
            found.append((bits_of(storage.in_order()), content_hash(storage)))
        assert verify(path).sound
    assert found[0] == found[1]
    stack = 4 if "stacked" in name else 1
    assert layouts_of(paths[0]) == {("observation",): (stack, name != "floats")}


def test_consumers_get_the_same_rows(both: tuple[Path, Path]) -> None:
    found = []
    for path in both:
        with open_storage(path) as storage:
            index = torch.arange(0, len(storage), 3)
            buffer = ReplayBuffer(
                storage=storage, batch_size=32, generator=torch.Generator().manual_seed(3)
            )
            torch.manual_seed(0)
            drawn = storage.trajectories.sample_slices(8, 4, torch.Generator().manual_seed(3))
            out = storage.reused(64)
            found.append(
                [
                    bits_of(each)
                    for each in (
                        *(storage.get(at) for at in (slice(3, 90, 7), [5, 0, 99], 7)),
                        storage.get(np.arange(64), out=out),
                        n_step(storage, index, n=3, gamma=0.9),
                        frame_windows(storage, index).rows,
                        drawn,
                        buffer.sample().exclude("index"),
                    )
                ]
            )
            found[-1] += [storage.column(NEXT_OBSERVATION).tobytes()]
    assert found[0] == found[1]


def test_a_resumed_run_and_appended_rows(tmp_path: Path) -> None:
    found = []
    for once in (True, False):
        path = collected(ZarrStorage(tmp_path / f"{once}.zarr", once=once), frames=150)
        collected(ZarrStorage(path, mode="append"), resume=True)
        with ZarrStorage(path, mode="append") as storage:
            storage.extend(storage.get(slice(0, 100)), ids="renumber")
            with open_storage(path) as reader:
                assert bits_of(reader.in_order()) == bits_of(storage.in_order())
            storage.finalize()
        with open_storage(path) as storage:
            assert len(storage) == 500
            found.append(bits_of(storage.in_order()))
        assert verify(path).sound
        assert bool(layouts_of(path)) is once
    assert found[0] == found[1]


def test_copies(both: tuple[Path, Path], tmp_path: Path) -> None:
    """Copies within Zarr, and to memory-mapped storages, keep the layout."""
    once = {("observation",): (4, True)}
    with open_storage(both[0]) as storage:
        rows, hashed = bits_of(storage.in_order()), content_hash(storage)
        storage.copy_to(tmp_path / "a.zarr")
        storage.copy_to(tmp_path / "memmap")
        storage.trajectories.where("length > 2").copy_to(tmp_path / "view.zarr")
        storage.pack(tmp_path / "rows.pack")
        storage.dumps(tmp_path / "dump")
    with open_storage(both[1]) as storage:
        storage.trajectories.where("length > 2").copy_to(tmp_path / "plain view.zarr")
    with open_storage(tmp_path / "plain view.zarr") as copy:
        of_view = bits_of(copy.in_order())
    with open_storage(tmp_path / "memmap") as storage:
        storage.copy_to(tmp_path / "whole.zarr")
    with ZarrStorage(tmp_path / "loaded.zarr") as storage:
        storage.loads(tmp_path / "dump")
    for name, expected in {
        "a.zarr": once,
        "memmap": once,
        "view.zarr": once,
        "dump": once,
        "whole.zarr": {},
        "loaded.zarr": {},
    }.items():
        path = tmp_path / name
        assert layouts_of(path) == expected, name
        with open_storage(path) as copy:
            assert bits_of(copy.in_order()) == (of_view if "view" in name else rows), name
        assert verify(path).sound
    with open_storage(tmp_path / "rows.pack") as packed:
        assert content_hash(packed) == hashed


def test_other_libraries_get_positions(both: tuple[Path, Path]) -> None:
    found = [zarr.open_group(path, mode="r") for path in both]
    once, plain = ({name for name, _ in each.members(max_depth=None)} for each in found)
    assert once == plain
    assert found[0]["observation"].dtype == np.int32
    assert found[0]["observation"].shape == (ROWS, 4)
    assert found[0]["next/reward"].shape == (ROWS, 1)
    np.testing.assert_array_equal(found[0]["next/reward"][...], found[1]["next/reward"][...])


def test_damage_is_found(both: tuple[Path, Path]) -> None:
    path = both[0]
    places = zarr.open_group(path, mode="r+")["observation"]
    before = places[5].copy()
    places[5] = 2**30
    assert not verify(path).sound
    with open_storage(path) as storage, pytest.raises(CorruptStorage, match="not in its pool"):
        storage.get([5])
    places[5] = before
    assert verify(path).sound
    (path / "tallyroll" / "observation.frames").unlink()
    with pytest.raises(CorruptStorage, match=r"observation\.frames"):
        open_storage(path)


def test_keys_of_groups(tmp_path: Path) -> None:
    """Keys that differ only by their dots have pools of their own."""
    values = torch.randn(9, 40)
    columns = {"a": {"b": values, "c.d": values + 1}, "a.b": values + 2, "é": values + 3}
    rows = TensorDict({**columns, "next": columns}, [9])
    with ZarrStorage(tmp_path / "rows.zarr", once=True) as storage:
        storage.extend(rows)
        assert len(storage.reader.once) == 4
        assert bits_of(storage.in_order()) == bits_of(rows)
    pools = sorted(file.name for file in tmp_path.rglob("*.frames"))
    assert pools == ["%C3%A9.frames", "a%2Eb.frames", "a.b.frames", "a.c%2Ed.frames"]
    assert verify(tmp_path / "rows.zarr").sound


def test_earlier_versions_refuse_the_layout(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.storage.files.format_versions.READABLE", (ONCE_VERSION - 1,))
    monkeypatch.setattr("tallyroll.storage.files.manifest.READABLE", (ONCE_VERSION - 1,))
    with pytest.raises(FormatVersionMismatch):
        open_storage(both[0])


def test_an_unfinished_creation_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.zarr"
    rows = TensorDict({"x": torch.ones(2, 40), "next": {"x": torch.ones(2, 40)}}, [2])
    with ZarrStorage(path, once=True) as storage:
        storage.extend(rows)
    (path / "tallyroll" / "manifest.json").unlink()
    with open(path / "tallyroll" / "c.0", "r+b") as header:
        header.truncate(0)
    with ZarrStorage(path, once=True) as storage:
        storage.extend(rows)
        assert torch.equal(storage[:]["x"], rows["x"])


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collect", "once-zarr/Pixels-v0", "--frames", "200", "--seed", "1"]
    path = tmp_path / "rows.zarr"
    assert main([*words, "--once", "yes", "--out", str(path)]) == 0
    assert "frames of observation are stored once" in capsys.readouterr().err
    assert layouts_of(path) == {("observation",): (4, True)}
    assert main(["inspect", str(path)]) == 0
    assert "observation: stored once, " in capsys.readouterr().out
    assert main(["verify", str(path), "--quiet"]) == 0
    assert main([*words, "--once", "yes", "--out", str(tmp_path / "rows.h5")]) == 1
    assert (
        "--once: expected a MemmapStorage or ZarrStorage, got H5Storage" in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match="the size of a frame pool is not known"):
        H5Storage(tmp_path / "rows.h5", once=True)
    assert not (tmp_path / "rows.h5").exists()
