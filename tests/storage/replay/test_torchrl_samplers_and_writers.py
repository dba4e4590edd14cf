"""Test each of TorchRL's samplers and writers, and transforms, over rows of one lane and of three.

Rows are written as a collector does, all lanes step by step. An observation is the row's number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    HERReplayBuffer,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    replay_buffers,
)
from torchrl.data.replay_buffers import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
    WriterEnsemble,
)
from torchrl.envs import (
    CatFrames,
    Compose,
    MultiStepTransform,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    SelectTransform,
    Transform,
)

from tallyroll.storage import MemmapStorage, NotAnAppend
from tallyroll.storage.storages import DiskStorage

PAGE = Path(__file__).resolve().parents[3] / "docs" / "torchrl_buffers.md"
STEPS, COUNT, SLICE = 8, 96, 4
IDS, STEP = ("collector", "traj_ids"), ("collector", "step")
VERSION = ("collector", "policy_version")


def rows(lanes: int, start: int = 0, count: int = COUNT) -> TensorDict:
    """Return rows of alternating lanes, in trajectories of 8 steps. A version has 24 rows."""
    number = torch.arange(start, start + count)
    lane, time = number % lanes, number // lanes
    end = (time % STEPS == STEPS - 1)[:, None]
    state, flags = (
        number[:, None].float(),
        {"done": end, "terminated": end, "truncated": end & False},
    )
    columns = {
        "observation": state,
        "action": number % 2,
        **{name: torch.zeros_like(end) for name in flags},
        "next": {"observation": state + lanes, "reward": state, **flags},
        "collector": {
            "traj_ids": time // STEPS * lanes + lane,
            "step": time % STEPS,
            "lane": lane.int(),
            "policy_version": number // 24,
        },
    }
    return TensorDict(columns, [count])


@pytest.fixture(scope="module")
def stored() -> Iterator[dict[int, DiskStorage]]:
    """Make read-only storages, by their number of lanes."""
    with MemmapStorage() as one, MemmapStorage(max_size=COUNT) as three:
        one.extend(rows(1)), three.extend(rows(3))
        yield {1: one, 3: three}


@pytest.fixture(autouse=True)
def without_buffers(stored: dict[int, DiskStorage]) -> Iterator[None]:
    yield
    for storage in stored.values():  # it would hold the semaphores of its buffers
        storage._attached_entities_list.clear()


def over(storage: Any, sampler: Any = None, batch_size: int = 24, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    return TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=batch_size, generator=generator, **more
    )


def numbers(sample: Any) -> list[int]:
    """Return the row numbers of a sample. Each row must be complete."""
    lanes = int(sample["next", "observation"][0] - sample["observation"][0])
    found: list[int] = sample["observation"].reshape(-1).long().tolist()
    kept = ["observation", "action", ("next", "observation"), ("next", "reward"), "collector"]
    want = torch.stack([rows(lanes, each, 1)[0] for each in found]).select(*kept)
    assert (sample.select(*kept).reshape(-1) == want).all()
    return found


def all_slices(sample: Any) -> bool:
    slices = sample.reshape(-1, SLICE)
    one = (slices[IDS] == slices[IDS][:, :1]).all()
    return bool(one and (slices[STEP].diff(dim=1) == 1).all())


# -- samplers

RANDOM: dict[str, Callable[[], Sampler]] = {
    "RandomSampler": RandomSampler,
    "SamplerWithoutReplacement": SamplerWithoutReplacement,
    "ConsumingSampler": ConsumingSampler,
}


@pytest.mark.parametrize("name", RANDOM)
def test_rows_are_drawn(stored: dict[int, DiskStorage], name: str) -> None:
    buffer = over(stored[3], RANDOM[name]())
    found = [row for _ in range(COUNT // 24) for row in numbers(buffer.sample())]
    assert {*found} <= {*range(COUNT)}
    assert (len({*found}) == COUNT) == (name != "RandomSampler")


SLICES: dict[str, Callable[[], Sampler]] = {
    "SliceSampler": lambda: SliceSampler(slice_len=SLICE),
    "SliceSamplerWithoutReplacement": lambda: SliceSamplerWithoutReplacement(slice_len=SLICE),
    "StreamingSliceSampler": lambda: StreamingSliceSampler(slice_len=SLICE),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_are_drawn_of_one_lane_only(stored: dict[int, DiskStorage], name: str) -> None:
    assert all_slices(over(stored[1], SLICES[name]()).sample())
    with pytest.raises(RuntimeError):  # no piece is long enough if lanes alternate
        over(stored[3], SLICES[name]()).sample()


def test_slices_of_several_lanes_need_the_step(stored: dict[int, DiskStorage]) -> None:
    sampler = SliceSampler(slice_len=SLICE, step_key=STEP, fragmented=True)
    assert all(all_slices(over(stored[3], sampler).sample()) for _ in range(4))
    # With ends only, TorchRL's sampler treats rows of all lanes as one trajectory.
    mixed = over(stored[3], SliceSampler(slice_len=SLICE, end_key=("next", "done"))).sample()
    assert not all_slices(mixed)


def test_versions_are_drawn_by_their_age(stored: dict[int, DiskStorage]) -> None:
    sampler = StalenessAwareSampler(max_staleness=1, version_key=VERSION)
    sampler.consumer_version = 3
    sample = over(stored[3], sampler, 48).sample()
    assert {*numbers(sample)} == {*range(48, 96)}
    assert torch.equal(sample["staleness"], 3.0 - sample[VERSION])
    with pytest.raises(KeyError, match="policy_version"):
        over(stored[3], StalenessAwareSampler()).sample()


def test_groups_are_drawn_by_trajectory(stored: dict[int, DiskStorage]) -> None:
    sampler = PromptGroupSampler(num_groups=3, group_key=IDS, strategy="reward")
    sample = over(stored[3], sampler, 12).sample()
    numbers(sample)
    groups = sample[IDS].reshape(3, 4)
    assert len(groups.unique()) == 3
    assert (groups == groups[:, :1]).all()
    assert sorted(sample[STEP].unique().tolist()) == [4, 5, 6, 7]


def test_ensembles_draw_from_each(stored: dict[int, DiskStorage]) -> None:
    buffers = [over(storage, RandomSampler()) for storage in stored.values()]
    both = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=24)
    assert isinstance(both._sampler, SamplerEnsemble)
    assert isinstance(both._writer, WriterEnsemble)
    for lanes, sample in zip(stored, both.sample(), strict=True):
        numbers(sample)
        assert (sample["next", "observation"] - sample["observation"] == lanes).all()


def test_priorities_need_torchrls_compiled_part() -> None:
    """The extension loads only with its own torch: 0.14.1's does not load with 2.13."""
    with MemmapStorage(max_size=COUNT) as storage, MemmapStorage() as growing:
        storage.extend(rows(3))
        growing.extend(rows(3))
        # Priority trees of that size raise MemoryError. For 2 ** 63 - 1, TorchRL never returns.
        assert growing.max_size == 2**48
        if getattr(replay_buffers.samplers.prioritized, "SumSegmentTreeFp32", None) is None:
            for make in (PrioritizedSampler, PrioritizedSliceSampler):
                more = {"slice_len": SLICE} if make is PrioritizedSliceSampler else {}
                with pytest.raises(RuntimeError, match="SumSegmentTreeFp32 is not available"):
                    make(COUNT, 0.7, 0.5, **more)
            return
        buffer = over(storage, PrioritizedSampler(COUNT, 1.0, 1.0))
        buffer.update_priority(torch.arange(COUNT), torch.full((COUNT,), 1e-9))
        buffer.update_priority(torch.tensor([5]), torch.ones(1))
        assert {*numbers(buffer.sample())} == {5}
        with pytest.raises(MemoryError):
            TensorDictPrioritizedReplayBuffer(storage=growing, alpha=0.7, beta=0.5, batch_size=4)
        storage._attached_entities_list.clear()


# -- writers


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_writers_append(writer: type[Writer]) -> None:
    with MemmapStorage(max_size=24) as ring:
        buffer = over(ring, writer=writer())
        for start in (0, 20):
            slots = buffer.extend(rows(3, start, 20)).tolist()
            assert slots == [each % 24 for each in range(start, start + 20)]
        assert sorted(numbers(ring.in_order())) == [*range(16, 40)]
        ring._attached_entities_list.clear()


def test_a_writer_that_refuses_reads(stored: dict[int, DiskStorage]) -> None:
    buffer = over(stored[3], writer=ImmutableDatasetWriter())
    numbers(buffer.sample())
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        buffer.extend(rows(3))


@pytest.mark.parametrize("given", [TensorDictMaxValueWriter(), TensorDictMaxValueWriter])
def test_a_writer_that_replaces_rows_is_refused_before_it_writes(given: Any) -> None:
    with MemmapStorage(max_size=24) as ring:
        with pytest.raises(NotAnAppend, match=r"TensorDictMaxValueWriter replaces .* LazyTensor"):
            over(ring, writer=given)
        assert ring.head == 0
        ring._attached_entities_list.clear()


def test_ensembles_write_into_each() -> None:
    with MemmapStorage() as one, MemmapStorage() as other:
        both = ReplayBufferEnsemble(over(one), over(other), sample_from_all=True)
        both[1].extend(rows(3))
        assert (one.head, other.head) == (0, COUNT)
        for storage in (one, other):
            storage._attached_entities_list.clear()


# -- transforms, and composite buffers


class _AsSlices(Transform):
    def forward(self, sample: Any) -> Any:
        return sample.reshape(-1, SLICE).refine_names(None, "time")


def test_transforms_change_the_sample_alone(stored: dict[int, DiskStorage]) -> None:
    before = stored[3][:].clone()
    norm = ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"])
    scaled = RewardScaling(loc=0.0, scale=3.0, in_keys=[("next", "reward")])
    renamed = RenameTransform(["observation"], ["state"])
    chosen = SelectTransform("state", ("next", "reward"), "index")
    sample = over(stored[3], transform=Compose(norm, scaled, renamed, chosen)).sample()
    number = sample["index"].float()[:, None]
    assert torch.equal(sample["state"], 2 * number + 1)
    assert torch.equal(sample["next", "reward"], 3 * number)
    assert "observation" not in sample.keys()
    assert (stored[3][:] == before).all()


def test_frames_are_stacked_within_slices(stored: dict[int, DiskStorage]) -> None:
    stack = CatFrames(3, -1, ["observation"], ["stack"], padding="same", done_key="done")
    sampler = SliceSampler(slice_len=SLICE, step_key=STEP, fragmented=True)
    buffer = ReplayBuffer(  # a TensorDictReplayBuffer would put columns [rows] into the sample
        storage=stored[3], sampler=sampler, batch_size=24, transform=Compose(_AsSlices(), stack)
    )
    slices = buffer.sample()
    now = slices["observation"][..., 0]
    for at in range(SLICE):
        want = torch.stack([now[:, max(0, at - back)] for back in (2, 1, 0)], -1)
        assert torch.equal(slices["stack"][:, at], want)


def test_steps_are_joined_while_they_are_written() -> None:
    with MemmapStorage() as storage:
        buffer = over(storage, transform=MultiStepTransform(n_steps=3, gamma=1.0))
        buffer.extend(rows(1))
        reward = storage[:]["next", "reward"][:, 0]
        want = [
            sum(range(at, min(at + 3, at // STEPS * STEPS + STEPS))) for at in range(len(reward))
        ]
        assert reward.tolist() == want
        storage._attached_entities_list.clear()


def test_goals_of_the_future_of_a_lane() -> None:
    goals = rows(1)
    goals["achieved_goal"] = goals["observation"].clone()
    goals["desired_goal"] = goals["observation"] * 0 - 1
    goals["next", "achieved_goal"] = goals["next", "observation"].clone()
    goals["next", "desired_goal"] = goals["desired_goal"].clone()
    with MemmapStorage() as storage:
        storage.extend(goals)
        near = lambda sample: (sample["desired_goal"] - sample["observation"]).abs()  # noqa: E731
        buffer = HERReplayBuffer(near, her_ratio=1.0, storage=storage, batch_size=48)
        sample = buffer.sample()
        goal, now = sample["desired_goal"][:, 0], sample["observation"][:, 0]
        assert (goal >= 0).all()
        assert (goal // STEPS == now // STEPS).all()
        assert (goal >= now).all()
        assert (storage[:]["desired_goal"] == -1).all()
        storage._attached_entities_list.clear()


def test_offline_rows_and_new_ones_in_one_sample(stored: dict[int, DiskStorage]) -> None:
    with MemmapStorage() as new:
        both = OfflineToOnlineReplayBuffer(
            ReplayBuffer(storage=stored[1]),
            online_storage=new,
            batch_size=24,
            offline_fraction=0.25,
        )
        both.extend(rows(3))
        sample = both.sample()
        assert new.head == COUNT
        ahead = sample["next", "observation"] - sample["observation"]
        assert ahead.reshape(-1).long().bincount().tolist() == [0, 6, 0, 18]
        new._attached_entities_list.clear()


def test_the_page_has_each_kind() -> None:
    kinds = {
        name
        for name in replay_buffers.__all__
        if inspect.isclass(kind := getattr(replay_buffers, name))
        and issubclass(kind, (Sampler, Writer))
        and kind not in (Sampler, Writer)
    }
    page, tests = PAGE.read_text("utf-8"), Path(__file__).read_text("utf-8")
    assert len(kinds) >= 16
    assert {each for each in kinds if f"`{each}`" not in page or each not in tests} == set()
