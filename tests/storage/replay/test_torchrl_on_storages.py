"""Test TorchRL's buffers, samplers and transforms over each of our storages, filled by a collector.

The oracle's observations encode lane, episode and step, so that each sampled row, stack or n-step
target is checked by itself against a plain model of the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import (
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from torchrl.envs import CatFrames, Compose, MultiStepTransform, Transform

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.storage import MemmapStorage, TrajectorySliceSampler, open_storage, verify
from tallyroll.storage.storages import FORMATS

from devices_kit import on_gpu
from oracles import check_rows, length_of, make_oracle_vec, reward_of
from pairs import each_pair

LENGTHS = [[7, 12, 5], [9, 6], [11, 4, 8]]
LANES = 3


def collector(lanes: int, frames: int, batch: int, **kwargs: Any) -> SyncCollector:
    env = GymnasiumVectorEnv(make_oracle_vec(lanes, LENGTHS))
    return SyncCollector(env, frames_per_batch=batch, total_frames=frames, seed=3, **kwargs)


@pytest.fixture(params=["memmap", "ring", "hdf5", "zarr"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Make a new storage of each kind. The ring wraps."""
    kind = FORMATS["memmap" if request.param == "ring" else request.param]
    room = {"max_size": 150} if request.param == "ring" else {"capacity": 400}
    with kind(tmp_path / "rows", **room) as made:
        yield made
        # pytest keeps the storage alive longer, which would keep its buffers' semaphores.
        made._attached_entities_list.clear()


def numbers(td: Any) -> torch.Tensor:
    """Return lane, episode and step, [..., 3]."""
    return td["observation"].long()


def assert_true_rows(sample: Any) -> None:
    """Check that each sampled row is a transition that its lane really made."""
    sample = sample.reshape(-1)
    lane, episode, step = numbers(sample).unbind(1)
    key = (lane * 1000 + episode) * 1000 + step
    _, first = np.unique(key.numpy(), return_index=True)
    check_rows(sample[torch.from_numpy(first)], LENGTHS, contiguous=False)


@each_pair(
    buffer_class=[ReplayBuffer, TensorDictReplayBuffer],
    sampler_class=[RandomSampler, SamplerWithoutReplacement],
    directly=[True, False],
)
def test_collectors_write_and_samplers_read(
    storage: Any, buffer_class: type[ReplayBuffer], sampler_class: Any, directly: bool
) -> None:
    buffer = buffer_class(storage=storage, sampler=sampler_class(), batch_size=50)
    where: dict[str, Any] = {"storage": storage} if directly else {"replay_buffer": buffer}
    with collector(LANES, 300, 32, **where) as run:
        for count, _ in enumerate(run, 1):
            assert storage.head == min(32 * count, 300)
            assert len(buffer) == len(storage) == min(storage.head, storage.ring or 300)
            if len(buffer) >= 50:
                assert_true_rows(buffer.sample())
    assert run.ledger.stored == storage.head == 300
    everything = storage.get(torch.arange(len(storage)))
    assert len(np.unique(numbers(everything).numpy(), axis=0)) == len(storage)
    assert_true_rows(everything)


@pytest.mark.filterwarnings("ignore:SliceSampler returned a short flat batch:UserWarning")
@pytest.mark.parametrize("sampler_class", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_of_one_lane_by_torchrls_own_samplers(storage: Any, sampler_class: Any) -> None:
    """TorchRL's samplers are right, too, if the rows of a trajectory are contiguous."""
    with collector(1, 120, 40, storage=storage) as run:
        list(run)
    sampler = sampler_class(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=True)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=16)
    for _ in range(5):
        slices = buffer.sample().reshape(-1, 4)
        ids = slices["collector", "traj_ids"]
        assert (ids == ids[:, :1]).all()
        assert (slices["collector", "step"].diff(dim=1) == 1).all()


class _InTime(Transform):
    """Adds a time dimension to sliced rows, which CatFrames needs."""

    def __init__(self, slice_len: int) -> None:
        super().__init__()
        self.slice_len = slice_len

    def forward(self, rows: Any) -> Any:
        return rows.reshape(-1, self.slice_len).refine_names(None, "time")


def test_stacks_of_frames_made_from_slices(storage: Any) -> None:
    """CatFrames runs at sample time, on slices that cross batches and never lanes."""
    with collector(LANES, 300, LANES, storage=storage) as run:
        list(run)
    slice_len, count = 5, 3
    buffer = ReplayBuffer(
        storage=storage,
        sampler=TrajectorySliceSampler(slice_len),
        batch_size=8 * slice_len,
        transform=Compose(
            _InTime(slice_len),
            CatFrames(
                N=count,
                dim=-1,
                padding="same",
                in_keys=["observation"],
                out_keys=["stack"],
                done_key="done",
            ),
        ),
    )
    for _ in range(5):
        slices = buffer.sample()
        now = slices["observation"]
        stack = slices["stack"].unflatten(-1, (count, 3))
        for at in range(slice_len):
            for back in range(count):
                want = now[:, max(0, at - back)]
                assert (stack[:, at, count - 1 - back] == want).all()


def test_n_step_targets_made_by_torchrl_while_one_lane_writes(storage: Any) -> None:
    """MultiStepTransform is right for one lane. Ours is right for any (see test_trajectories)."""
    n, gamma = 3, 0.9
    buffer = TensorDictReplayBuffer(
        storage=storage, batch_size=64, transform=MultiStepTransform(n_steps=n, gamma=gamma)
    )
    with collector(1, 100, 20) as run:
        for batch in run:
            buffer.extend(batch)
    rows = storage.get(slice(0, 90))
    for at, row in enumerate(rows):
        lane, episode, step = numbers(row).tolist()
        length = length_of(LENGTHS, lane, episode)
        # Yielded batches are done where they are cut, so it stops there, too.
        used = min(n, length - step, 20 - at % 20)
        ahead = [reward_of(lane, episode, step + k, 0) for k in range(used)]
        # Actions add halves that the model does not know, and the remainder is theirs.
        plain = sum(gamma**k * reward for k, reward in enumerate(ahead))
        action_part = float(row["next", "reward"]) - plain
        assert -1e-3 <= action_part <= 0.5 * 1.0 * sum(gamma**k for k in range(used)) + 1e-3
        assert row["next", "observation"].long().tolist() == [lane, episode, step + used]


def test_prefetching_threads_sample_while_a_collector_writes(storage: Any) -> None:
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=RandomSampler(), batch_size=64, prefetch=4
    )
    with collector(LANES, 400, 16, replay_buffer=buffer) as run:
        for _ in run:
            for _ in range(4):
                assert_true_rows(buffer.sample())
    buffer._prefetch_executor.shutdown()


def test_dumps_and_loads_go_on_where_they_were(storage: Any, tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=16)
    with collector(LANES, 200, 40, replay_buffer=buffer) as run:
        list(run)
    buffer.dumps(tmp_path / "dump")
    room = {"max_size": storage.ring} if storage.ring else {"capacity": 400}
    with type(storage)(tmp_path / "copy", **room) as copy:
        again = TensorDictReplayBuffer(storage=copy, batch_size=16)
        again.loads(tmp_path / "dump")
        assert (copy.get(slice(None)) == storage.get(slice(None))).all()
        assert copy.span == storage.span
        more = storage.get(torch.arange(10))
        more["collector", "traj_ids"] += 1000  # of other trajectories
        slots = [200 % storage.ring + i for i in range(10)] if storage.ring else range(200, 210)
        assert again.extend(more).reshape(-1).tolist() == list(slots)
    with open_storage(tmp_path / "copy") as reader:
        assert reader.head == 210
        assert (reader.get(torch.tensor(list(slots))) == more).all()


def test_torchrls_own_storage_under_the_collector() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(120), batch_size=32)
    with collector(LANES, 300, 50, replay_buffer=buffer) as run:
        for _ in run:
            assert_true_rows(buffer.sample())
    assert len(buffer) == 120
    assert run.ledger.stored == 300


@on_gpu
def test_torchrls_storage_on_a_gpu_under_the_collector(device: str) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(120, device=torch.device(device)), batch_size=32
    )
    with collector(LANES, 300, 50, replay_buffer=buffer) as run:
        for _ in run:
            sample = buffer.sample()
            assert sample["observation"].device.type == device
            assert_true_rows(sample.cpu())
    assert len(buffer) == 120


def test_a_run_whose_buffer_is_emptied_counts_on(tmp_path: Path) -> None:
    """On-policy loops empty the buffer. Counts, ids and a resumed run are the same as otherwise."""
    ids: list[int] = []
    with MemmapStorage(tmp_path / "ring", max_size=120) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement())
        with collector(LANES, 200, 40, replay_buffer=buffer) as run:
            for count, batch in enumerate(run, 1):
                assert storage.span == range(40 * (count - 1), 40 * count)
                assert run.ledger.stored == storage.head == 40 * count
                assert_true_rows(buffer.sample(40))
                ids.extend(batch["collector", "traj_ids"].tolist())
                buffer.empty()
                assert len(buffer) == 0
        assert storage.head == 200
    assert not verify(tmp_path / "ring").findings
    with MemmapStorage(tmp_path / "ring", mode="append") as storage:
        with collector(LANES, 300, 40, storage=storage, resume=True) as run:
            later = [id for batch in run for id in batch["collector", "traj_ids"].tolist()]
        assert run.ledger.stored == storage.head == 300
        assert storage.span == range(200, 300)
        assert min(later) > max(ids)
    assert not verify(tmp_path / "ring").findings
