"""Compare `TrajectorySliceSampler` under TorchRL's buffers with a plain model of every lane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import generalized_advantage_estimate

from tallyroll.storage import MemmapStorage, TrajectorySliceSampler, n_step, open_storage
from tallyroll.storage.engine.ring import index_at, slots_at
from tallyroll.storage.errors import ColumnsMissing, NoSlices, SlotsMayChange
from tallyroll.storage.files.commit_header import word_of

from lane_model import Model


def big(rows: int = 3000, lanes: int = 8, **options: Any) -> Model:
    return Model.random(np.random.default_rng(0), rows=rows, lanes=lanes, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def buffer_of(storage: MemmapStorage, slice_len: int, slices: int, **options: Any) -> Any:
    return TensorDictReplayBuffer(
        storage=storage,
        sampler=TrajectorySliceSampler(slice_len),
        batch_size=slice_len * slices,
        **options,
    )


def numbers(batch: TensorDict, slice_len: int) -> list[tuple[int, ...]]:
    """Return the numbers of the rows of each slice."""
    return [tuple(s) for s in batch["observation"].reshape(-1, slice_len).long().tolist()]


@pytest.mark.parametrize("max_size", [None, 1500])
def test_samples_between_extends_are_slices_of_what_is_there(
    path: Path, max_size: int | None
) -> None:
    model = big(mean_length=30.0)
    with MemmapStorage(path, max_size=max_size) as storage:
        buffer = buffer_of(storage, 10, 20)
        for start in range(0, 3000, 40):
            buffer.extend(model.rows(start, start + 40))
            if start % 280 == 0 and start:
                first = storage.span.start
                known = Model(model.ids[: start + 40], model.steps[: start + 40], model.lane)
                assert set(numbers(buffer.sample(), 10)) <= set(known.slices(10, first))
        batch = buffer.sample()
        assert (storage.get(batch["index"])["observation"] == batch["observation"]).all()
    assert batch.batch_size == (200,)


def test_64_lanes_one_row_a_batch(path: Path) -> None:
    model = big(20_000, 64, mean_length=120.0, skip=0.0)
    with MemmapStorage(path, max_size=15_000) as storage:
        buffer = buffer_of(storage, 50, 32)
        for start in range(0, 20_000, 64):
            buffer.extend(model.rows(start, min(start + 64, 20_000)))
        every = set(model.slices(50, 5000))
        for _ in range(10):
            assert set(numbers(buffer.sample(), 50)) <= every


def test_marks_at_the_last_row_of_a_slice(path: Path) -> None:
    model = big()
    with MemmapStorage(path) as storage:
        buffer = buffer_of(storage, 4, 200)
        buffer.extend(model.rows())
        batch = buffer.sample()
        stored = storage.get(batch["index"])
        bare, info = ReplayBuffer(
            storage=storage, sampler=TrajectorySliceSampler(4), batch_size=800
        ).sample(return_info=True)
    last = torch.arange(800) % 4 == 3
    done = stored["next", "done"][:, 0]
    assert (batch["next", "done"][:, 0] == done | last).all()
    assert batch["collector", "cut"].shape == (800,)
    assert (batch["collector", "cut"] == last & ~done).all()
    assert 0 < batch["collector", "cut"].sum() < 200
    for name in ("terminated", "truncated"):
        assert (batch["next", name] == stored["next", name]).all()
    assert not bare["next", "done"].all()
    assert info["next", "done"].reshape(200, 4)[:, 3].all()


def test_n_steps_of_sampled_slices_know_no_cuts(path: Path) -> None:
    """The mark at a slice's end does not limit n steps, which use later rows of the trajectory."""
    model = big(500)
    with MemmapStorage(path) as storage:
        buffer = buffer_of(storage, 4, 50)
        buffer.extend(model.rows())
        batch = buffer.sample()
        batch["_weight"] = torch.rand(200)
        found = n_step(storage, batch, 3, 0.9)
        bare = n_step(storage, batch["index"], 3, 0.9)
    assert ("collector", "cut") in batch.keys(True)
    assert ("collector", "cut") not in found.keys(True)
    assert (found["next", "done"] == bare["next", "done"]).all()
    assert (found["_weight"] == batch["_weight"]).all()


def test_recurrent_modules_start_anew_at_each_slice(path: Path) -> None:
    rows = big().rows()
    rows["is_init"] = (rows["collector", "step"] == 0)[:, None]
    of_two = rows["is_init"][..., None].expand(-1, 2, 1).clone()
    rows["agents"] = TensorDict({"is_init": of_two}, [len(rows), 2])
    with MemmapStorage(path) as storage:
        storage.extend(rows)
        batch = buffer_of(storage, 4, 50).sample()
        drawn = storage.trajectories.sample_slices(3, 2)
    first = torch.arange(200) % 4 == 0
    begins = first | (batch["collector", "step"] == 0)
    assert (batch["is_init"][:, 0] == begins).all()
    assert (batch["agents", "is_init"] == begins[:, None, None]).all()
    begins = drawn["collector", "step"] == 0
    begins[:, 0] = True
    assert (drawn["is_init"][..., 0] == begins).all()
    assert (drawn["agents", "is_init"] == begins[..., None, None]).all()


def test_advantages_of_slices_are_those_of_each_slice_alone(path: Path) -> None:
    model = big()
    with MemmapStorage(path) as storage:
        storage.extend(model.rows())
        batch = buffer_of(storage, 8, 30).sample()
    batch = batch.apply(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf)
    value = TensorDictModule(lambda seen: seen / 100, ["observation"], ["state_value"])
    estimator = GAE(gamma=0.9, lmbda=0.8, value_network=value)
    flat = estimator(batch.clone())["advantage"].reshape(30, 8)
    for alone, advantage in zip(batch.reshape(30, 8), flat, strict=True):
        wanted, running = [], 0.0
        for row in alone.flip(0):
            goes_on = 1.0 - row["next", "terminated"].float().item()
            now, then = row["observation"].item() / 100, row["next", "observation"].item() / 100
            delta = row["next", "reward"].item() + 0.9 * goes_on * then - now
            ended = (row["next", "terminated"] | row["next", "truncated"]).item()
            running = delta + 0.9 * 0.8 * (0.0 if ended else running)
            wanted.append(running)
        torch.testing.assert_close(advantage, torch.tensor(wanted[::-1]), atol=1e-3, rtol=1e-4)
        by_torchrl, _ = generalized_advantage_estimate(
            0.9,
            0.8,
            alone["observation"] / 100,
            alone["next", "observation"] / 100,
            alone["next", "reward"],
            alone["next", "done"],
            alone["next", "terminated"],
        )
        torch.testing.assert_close(advantage[:, None], by_torchrl, atol=1e-3, rtol=1e-4)


def test_samples_repeat_with_the_generator(path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(big().rows())

        def drawn(seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            buffer = buffer_of(storage, 5, 10, generator=generator)
            return torch.stack([buffer.sample()["index"] for _ in range(3)])

        assert (drawn(1) == drawn(1)).all()
        assert not (drawn(1) == drawn(2)).all()


def test_a_reopened_ring_whose_writer_was_killed_in_the_middle(path: Path) -> None:
    model = big(700, mean_length=30.0)
    with MemmapStorage(path, max_size=500) as storage:
        storage.extend(model.rows(0, 500))
        storage.extend(model.rows(500, 700))
    reserve_forty_more(path, 740)
    with open_storage(path, mode="append") as storage:
        assert storage.span == range(240, 700)
        buffer = buffer_of(storage, 6, 100)
        every = set(model.slices(6, 240))
        assert set(numbers(buffer.sample(), 6)) <= every


def reserve_forty_more(path: Path, rows: int) -> None:
    """Reserve rows as a writer does before it overwrites them."""
    header = path / "tallyroll.header"
    content = bytearray(header.read_bytes())
    content[64:72] = word_of(rows).to_bytes(8, "little")
    header.write_bytes(content)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 90), st.integers(0, 30))
def test_the_index_of_slots_is_the_inverse_of_the_slots_of_an_index(
    size: int, head: int, torn: int
) -> None:
    reserve = head + min(torn, size)
    valid = head - min(head, max(0, reserve - size))
    index = np.arange(valid)
    slots = slots_at(index, head, reserve, size)
    assert index_at(slots, head, reserve, size).tolist() == index.tolist()


def test_a_reader_of_a_storage_that_grows(path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(big().rows())
    every = set(big().slices(5))
    with open_storage(path) as storage:
        assert set(numbers(buffer_of(storage, 5, 50).sample(), 5)) <= every


def test_a_reader_of_a_ring_is_told_what_to_do(path: Path) -> None:
    with MemmapStorage(path, max_size=100) as storage:
        storage.extend(big(80).rows())
    with (
        open_storage(path) as storage,
        pytest.raises(SlotsMayChange, match=r"sample_slices\(num_slices, slice_len\)"),
    ):
        buffer_of(storage, 2, 5).sample()


def test_prefetched_samples(path: Path) -> None:
    model = big(mean_length=30.0)
    every = set(model.slices(6))
    with MemmapStorage(path) as storage:
        buffer = buffer_of(storage, 6, 10, prefetch=2)
        for start in range(0, 3000, 50):
            buffer.extend(model.rows(start, start + 50))
            if start > 200:
                assert set(numbers(buffer.sample(), 6)) <= every


def test_iterating_a_buffer(path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(big().rows())
        batches = zip(range(3), buffer_of(storage, 5, 4), strict=False)
        assert [len(batch) for _, batch in batches] == [20, 20, 20]


def test_the_state_of_a_buffer(path: Path, tmp_path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(big().rows())
        buffer = buffer_of(storage, 5, 4, generator=torch.Generator().manual_seed(3))
        buffer.sample()
        buffer.dumps(tmp_path / "dump")
        state, wanted = buffer.state_dict(), buffer.sample()["index"]
        buffer.load_state_dict(state)
        assert (buffer.sample()["index"] == wanted).all()
        buffer.loads(tmp_path / "dump")
        assert (buffer.sample()["index"] == wanted).all()


def test_no_slices(path: Path) -> None:
    with MemmapStorage(path) as storage:
        buffer = buffer_of(storage, 5, 2)
        with pytest.raises(NoSlices, match="no rows yet"):
            buffer.sample()
        sampler = TrajectorySliceSampler(3)
        assert not sampler.can_sample(storage, 3)
        storage.extend(big(3, 1, skip=0.0, mean_length=1e9, restart=0.0).rows())
        with pytest.raises(NoSlices, match=r"slices of 5 rows.*has 3\. Request shorter"):
            buffer.sample()
        assert sampler.can_sample(storage, 3)
        assert not TrajectorySliceSampler(4).can_sample(storage, 4)


def test_batches_that_cannot_be_cut_into_slices(path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(big().rows())
        with pytest.raises(ValueError, match=r"a multiple of the s\w+ length .*, got 12"):
            TrajectorySliceSampler(5).sample(storage, 12)


@pytest.mark.parametrize("slice_len", [0, -1, 2.0, True, None])
def test_lengths_that_cannot_be(slice_len: Any) -> None:
    with pytest.raises(ValueError, match="slice_len: expected a whole number above 0"):
        TrajectorySliceSampler(slice_len)


def test_other_storages_are_refused() -> None:
    with pytest.raises(TypeError, match="got LazyTensorStorage"):
        TrajectorySliceSampler(2).sample(LazyTensorStorage(10), 4)


def test_rows_without_trajectories(path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(big(50).rows().exclude("collector"))
        with pytest.raises(ColumnsMissing, match="no collector/traj_ids"):
            buffer_of(storage, 2, 2).sample()


def test_it_says_what_it_is() -> None:
    assert repr(TrajectorySliceSampler(16)) == "TrajectorySliceSampler(slice_len=16)"
