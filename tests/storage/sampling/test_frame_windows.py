"""Windows of frames hold the observations and the next observations that `get` returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from pixel_kit import SIDE, Pixels, color, floats, stacked, stacked_with_zeros
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.storage import (
    ColumnsMissing,
    DeviceStorage,
    FrameStack,
    FrameWindows,
    IndexOutOfRange,
    MemmapStorage,
    frame_windows,
    open_storage,
)
from tallyroll.storage.storages import DiskStorage

from devices_kit import here_and_there, on_gpu

ROWS, RING = 400, 150
NEXT_OBSERVATION = ("next", "observation")
OTHERS = {"action", ("next", "reward"), ("collector", "step")}
ENVS: dict[str, tuple[Callable[[], gymnasium.Env], int]] = {
    "stacked": (stacked, 4),
    "stacked_with_zeros": (stacked_with_zeros, 4),
    "color": (color, 1),
    "floats": (floats, 1),
}


def collected(path: Path, make: Callable[[], gymnasium.Env] = stacked, **options: Any) -> Path:
    with (
        MemmapStorage(path, **{"max_size": RING, **options}) as storage,
        SyncCollector(
            make, num_envs=3, frames_per_batch=50, total_frames=ROWS, seed=5, storage=storage
        ) as collector,
    ):
        collector.collect(ROWS)
    return path


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


def assert_rows(found: FrameWindows, rows: TensorDict) -> None:
    """Compare all columns of the windows with rows that `get` returned."""
    made = found.rows
    assert made.batch_size == found.others.batch_size == rows.batch_size
    keys = set(rows.keys(True, True))
    assert set(made.keys(True, True)) == keys
    assert all(same_bits(made[key], rows[key]) for key in keys)


@pytest.mark.parametrize("max_size", [None, RING], ids=["growing", "ring"])
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("name", ENVS)
def test_windows_hold_the_rows(name: str, once: bool, max_size: int | None, tmp_path: Path) -> None:
    make, stack = ENVS[name]
    path = collected(tmp_path / "rows", make, max_size=max_size, once=once)
    frame = (3, SIDE, SIDE) if name == "color" else (SIDE, SIDE)
    value = (stack, *frame) if stack > 1 else frame
    with open_storage(path) as storage:
        for index in (
            torch.arange(len(storage)),
            np.random.default_rng(0).integers(0, len(storage), (8, 16)),
            [5, 0, 99, 5],
            slice(3, 90, 7),
            7,
            torch.arange(0),
        ):
            rows = storage.get(index)
            found = frame_windows(storage, index)
            assert_rows(found, rows)
            shape = tuple(rows.batch_size)
            assert found.windows.shape == (*shape, stack + 1, *frame)
            assert found.windows.dtype == rows["observation"].dtype
            assert found.observation.shape == found.next_observation.shape == (*shape, *value)
            assert not len(found.unshifted)
            memory = found.windows.untyped_storage().data_ptr()
            for view in (found.observation, found.next_observation):
                assert view.untyped_storage().data_ptr() == memory


@pytest.mark.parametrize("make", [stacked, stacked_with_zeros])
def test_ends_and_starts_of_episodes(make: Callable[[], gymnasium.Env], tmp_path: Path) -> None:
    """Compare the windows with the frames that the episode and the step determine."""
    path = collected(tmp_path / "rows", make, max_size=None, once=True)
    env = Pixels()
    with open_storage(path) as storage:
        found = frame_windows(storage, slice(None))
        steps = found.others["collector", "step"].tolist()
        ends = found.others["next", "done"].view(-1)
    assert ends.sum() > 20
    for window, step in zip(found.windows.numpy(), steps, strict=True):
        env.episode, _, env.seed = window[-1, 0, :3].tolist()
        for i, frame in enumerate(window):
            at = step - 3 + i  # the last frame is that of the next observation
            env.at = max(0, at)
            zero = at < 0 and make is stacked_with_zeros
            np.testing.assert_array_equal(frame, 0 * env.frame() if zero else env.frame())


def jumping(rows: int, stack: int, seed: int = 0) -> tuple[TensorDict, list[int]]:
    """Return rows of one lane, and the rows whose next stack is not moved by one frame."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 2**32, (3 * rows, 7), np.uint32).view(np.float32)  # with NaNs
    at, begins, ends, jumps = 0, [], [], []
    for row in range(rows):
        step = int(rng.integers(0, 3))
        begins.append(frames[at : at + stack])
        ends.append(frames[at + step : at + step + stack])
        if step != 1:
            jumps.append(row)
        at += step
    observation, after = (torch.from_numpy(np.stack(each)) for each in (begins, ends))
    reward = torch.arange(rows).float()
    return TensorDict(
        {"observation": observation, "next": {"observation": after, "reward": reward}}, [rows]
    ), jumps


@pytest.mark.parametrize("once", [True, False])
def test_stacks_that_move_by_other_numbers_of_frames(once: bool, tmp_path: Path) -> None:
    rows, jumps = jumping(200, 4)
    stacks = [FrameStack("observation")] if once else []
    with MemmapStorage(tmp_path / "rows", once=once, stacks=stacks) as storage:
        storage.extend(rows)
        found = frame_windows(storage, slice(None), stack=4)
        assert found.unshifted.tolist() == jumps
        assert 0 < len(jumps) < 200
        assert same_bits(found.unshifted_next, rows[NEXT_OBSERVATION][jumps])
        assert_rows(found, rows)
        assert same_bits(found.windows[:, -1], rows[NEXT_OBSERVATION][:, -1])
        index = torch.randint(200, (6, 5), generator=torch.Generator().manual_seed(0))
        assert_rows(frame_windows(storage, index, stack=4), rows[index])
        # As one frame, each value is a window of two.
        whole = frame_windows(storage, index, stack=1)
        assert whole.windows.shape == (6, 5, 2, 4, 7)
        assert not len(whole.unshifted)
        assert_rows(whole, rows[index])
        default = frame_windows(storage, index)
        assert default.stack == (4 if once else 1)
        assert_rows(default, rows[index])


def test_chosen_columns_and_overlays(tmp_path: Path) -> None:
    path = collected(tmp_path / "rows")
    with open_storage(path, mode="append") as storage:
        overlay = storage.overlay("weight", torch.float32, fill=2.0)
        overlay[torch.arange(10)] = torch.arange(10).float()
        for keys in (
            ["action", ("next", "reward"), "weight"],
            "weight",
            [NEXT_OBSERVATION, "action"],
        ):
            found = frame_windows(storage, range(20), keys=keys)
            rows = storage.get(range(20), [keys] if isinstance(keys, str) else keys)
            named = set(rows.keys(True, True)) - {NEXT_OBSERVATION}
            assert set(found.others.keys(True, True)) == named
            assert all(same_bits(found.others[key], rows[key]) for key in named)
        assert found.others.batch_size == (20,)
        assert frame_windows(storage, range(20), keys=[]).others.is_empty()


def test_other_readers(tmp_path: Path) -> None:
    paths = [collected(tmp_path / name, max_size=None, once=name == "a") for name in ("a", "b")]
    with open_storage(paths[0]) as one, open_storage(paths) as union:
        index = torch.arange(0, len(union), 3)
        assert_rows(frame_windows(union, index), union.get(index))
        chosen = one.trajectories.where("length > 2")
        assert_rows(frame_windows(chosen, range(9)), chosen.get(range(9)))


@here_and_there
def test_a_device_storage_gives_windows_on_the_host(device: str) -> None:
    rows = jumping(60, 4)[0]
    with DeviceStorage(max_size=40, device=device) as storage:
        for part in rows.split(30):
            storage.extend(part)
        index = torch.arange(0, 40, 3)
        found = frame_windows(storage, index, stack=4)
        assert found.windows.device.type == "cpu"
        assert found.unshifted.tolist()
        assert_rows(found, storage.get(index).cpu())


def test_bfloat16(tmp_path: Path) -> None:
    values = torch.randn(9, 3, 8).bfloat16()
    rows = TensorDict({"x": values, "next": {"x": values + 1}}, [9])
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        found = frame_windows(storage, [1, 5], "x", stack=3)
        assert found.windows.dtype == torch.bfloat16
        assert torch.equal(found.rows["next", "x"], rows["next", "x"][[1, 5]])
        assert torch.equal(found.rows["x"], rows["x"][[1, 5]])


@on_gpu
@pytest.mark.parametrize("jumps", [True, False])
def test_a_device_gets_each_frame_once(jumps: bool, device: str, tmp_path: Path) -> None:
    rows = jumping(64, 4)[0]
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        index = torch.arange(64)
        if not jumps:
            index = index[~torch.isin(index, frame_windows(storage, index, stack=4).unshifted)]
        found = frame_windows(storage, index, stack=4)
        there = found.to(device)
    assert there.windows.device.type == there.others.device.type == device
    memory = there.windows.untyped_storage().data_ptr()
    assert there.observation.untyped_storage().data_ptr() == memory
    shares = there.next_observation.untyped_storage().data_ptr() == memory
    assert shares is not jumps
    assert_rows(found, rows[index])
    assert_rows(there.to("cpu"), rows[index])


def test_rows_of_a_ring_that_is_written_meanwhile(tmp_path: Path) -> None:
    """Each row that a reader gets belongs together, while a writer overwrites the ring."""
    path, stop = tmp_path / "rows", threading.Event()
    number = torch.arange(2_000)
    frames = (number[:, None] + torch.arange(5)).to(torch.int64)[..., None].expand(-1, -1, 16)
    rows = TensorDict(
        {"x": frames[:, :4], "next": {"x": frames[:, 1:]}, "number": number}, [2_000]
    ).contiguous()
    with MemmapStorage(path, max_size=64, once=True, stacks=[FrameStack("x")]) as ring:
        ring.extend(rows[:64])

        def write() -> None:
            at = 64
            while not stop.is_set():
                ring.extend(rows[at : at + 7])
                at = (at + 7) % 1_900

        thread = threading.Thread(target=write)
        thread.start()
        try:
            with open_storage(path) as reader:
                seen = set()
                for seed in range(150):
                    index = np.random.default_rng(seed).integers(8, 56, 16)
                    found = frame_windows(reader, index, "x")
                    first = found.others["number"]
                    wanted = (first[:, None] + torch.arange(5))[..., None].expand(-1, -1, 16)
                    assert torch.equal(found.windows, wanted)
                    seen.update(first.tolist())
        finally:
            stop.set()
            thread.join()
    assert len(seen) > 100


def storage_of(path: Path, **columns: torch.Tensor) -> DiskStorage:
    after = {name.removeprefix("next_"): each for name, each in columns.items() if "next_" in name}
    rows = {name: each for name, each in columns.items() if "next_" not in name}
    storage = MemmapStorage(path)
    storage.extend(TensorDict({**rows, "next": after}, [len(next(iter(columns.values())))]))
    return storage


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    x = torch.zeros(3, 4, 2)
    with storage_of(tmp_path / "rows", x=x, next_x=x, y=x, next_z=x) as storage:
        for key, missing in (("y", "next/y"), ("z", "no z"), ("q", "no q, no next/q")):
            with pytest.raises(ColumnsMissing, match=missing):
                frame_windows(storage, [0], key)
        for stack in (0, 2, 3, -1):
            with pytest.raises(
                ValueError, match="stack: expected 1, or the 4 entries of the first"
            ):
                frame_windows(storage, [0], "x", stack=stack)
        with pytest.raises(IndexOutOfRange):
            frame_windows(storage, [3], "x")
        with pytest.raises(TypeError, match=r"got a TensorDict.*use n_step instead"):
            frame_windows(storage, storage.get([0]), "x")
        with pytest.raises(ColumnsMissing, match="nothing"):
            frame_windows(storage, [0], "x", keys=["nothing"])
    with (
        storage_of(tmp_path / "other", x=x, next_x=x.double()) as storage,
        pytest.raises(ValueError, match=r"key: expected a column like next/x, with torch\.float64"),
    ):
        frame_windows(storage, [0], "x")
