"""TorchRL environments, transforms and recurrent policies in worker processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from torchrl.data import Binary
from torchrl.envs import (
    CatFrames,
    Compose,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import GRUModule

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector

from collect_kit import ByObservation, assert_same, joined
from oracles import OracleTorchEnv, check_rows, make_oracle_vec
from policies_kit import plain_states, recurrent
from self_reset_kit import AutoResetGym
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    assert_alike,
    assert_gone,
    collect_all,
    in_threads,
    lanes_of_workers,
    make,
    start,
    sync_collector,
    worker_collector,
)

BUDGET: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 120, "seed": 3}
both_modes = pytest.mark.parametrize("mode", ["sync", "async"])


def each(made: Any, workers: int = 2) -> list[Any]:
    """Return `made(first lane, lanes)` for each worker."""
    return [partial(made, first, own) for first, own in lanes_of_workers(LANES, workers)]


def watched(source: str, first: int, lanes: int) -> TransformedEnv:
    env = make(source, first, lanes)
    if isinstance(env, VectorEnv):
        env = GymnasiumVectorEnv(env)
    return TransformedEnv(env, Compose(InitTracker(), StepCounter(), RewardSum()))


@pytest.mark.parametrize("source", ["torch", NEXT, DISABLED])
def test_transforms_follow_each_lane_as_in_one_process(source: str) -> None:
    watch = partial(watched, source)
    one = collect_all(SyncCollector(partial(watch, 0, LANES), ByObservation(), **BUDGET))
    many = collect_all(start(each(watch), ByObservation(), **BUDGET))
    assert_alike(one, many)
    check_sums(joined(many.batches))


def check_sums(rows: TensorDictBase) -> None:
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    step = rows["collector", "step"]
    assert torch.equal(rows["next", "step_count"].view(-1), step + 1)
    for ids in rows["collector", "traj_ids"].unique():
        own = rows[rows["collector", "traj_ids"] == ids]
        assert torch.equal(own["next", "episode_reward"], own["next", "reward"].cumsum(0))
        assert own["is_init"][0]


def stacked(first: int, lanes: int) -> TransformedEnv:
    return TransformedEnv(make("torch", first, lanes), CatFrames(2, -1, in_keys=["observation"]))


@both_modes
def test_buffers_that_the_first_reset_makes(mode: str) -> None:
    with in_threads():
        rows = joined(collect_all(start(each(stacked), mode=mode, **BUDGET)).batches)
    now = rows["next", "observation"]
    assert torch.equal(
        now[..., : now.shape[-1] // 2], rows["observation"][..., now.shape[-1] // 2 :]
    )
    assert len(rows) == BUDGET["total_frames"]


@pytest.mark.parametrize("source", ["serial", SAME])
def test_transforms_follow_each_lane_out_of_step(source: str) -> None:
    makes = each(partial(watched, source))
    run = collect_all(start(makes, ByObservation(), **BUDGET, mode="async"))
    check_sums(joined(run.batches))


@both_modes
@pytest.mark.parametrize("source", ["torch", DISABLED])
def test_recurrent_states_are_each_lanes_own_and_go_from_lease_to_lease(
    source: str, mode: str
) -> None:
    memory, policy = recurrent(GRUModule)
    run = collect_all(worker_collector(source, 2, policy, **BUDGET, mode=mode))
    rows = joined(run.batches)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    for ids in rows["collector", "traj_ids"].unique():
        own = rows[rows["collector", "traj_ids"] == ids]
        assert torch.allclose(own["out"], plain_states(memory, own), atol=1e-5)


def forgetful(lane: int, _: int) -> GymWrapper:
    env = AutoResetGym(lane, LENGTHS, ends="mixed")
    return GymWrapper(env, auto_reset=True, categorical_action_encoding=True)


@both_modes
def test_lost_final_observations_are_marked(mode: str) -> None:
    makes = [partial(forgetful, lane, 1) for lane in range(2)]
    run = collect_all(start(makes, ByObservation(), **BUDGET, mode=mode))
    rows = joined(run.batches)
    valid = rows["collector", "next_valid"]
    assert torch.equal(~valid, rows["next", "done"].view(-1))
    assert (~valid).any()
    check_rows(rows, LENGTHS, ends="mixed", contiguous=mode == "sync")


class Masked(OracleTorchEnv):
    """Oracle in which only action lane % 2 is legal."""

    def __init__(self, first: int, lanes: int) -> None:
        super().__init__(lanes, LENGTHS, first_lane=first)
        self.observation_spec["action_mask"] = Binary(2, (lanes, 2), dtype=torch.bool)

    def _out(self, *args: Any) -> Any:
        out = super()._out(*args)
        return out.set("action_mask", torch.eye(2, dtype=torch.bool)[self.lane_ids % 2])


@both_modes
def test_an_action_mask_is_honoured(mode: str) -> None:
    run = collect_all(start(each(Masked), **BUDGET, mode=mode))
    rows = joined(run.batches)
    assert torch.equal(rows["action"], rows["collector", "lane"].long() % 2)


def in_processes(first: int, lanes: int) -> Any:
    """Return a vector whose lanes have processes of their own, which the worker starts."""
    vec_kwargs = {"context": "fork"}
    return make_oracle_vec(
        lanes, LENGTHS, cls="async", first_lane=first, ends="mixed", vec_kwargs=vec_kwargs
    )


def in_parallel(first: int, lanes: int) -> ParallelEnv:
    makes = [partial(make, "single", first + lane, 1) for lane in range(lanes)]
    return ParallelEnv(lanes, makes, mp_start_method="fork")


@pytest.mark.parametrize(("made", "source"), [(in_processes, NEXT), (in_parallel, "serial")])
def test_environments_with_processes_of_their_own(made: Any, source: str) -> None:
    one = collect_all(sync_collector(source, ByObservation(), **BUDGET))
    collector = start(each(made), ByObservation(), **BUDGET)
    theirs = [
        child.pid for pid in collector.worker_pids for child in psutil.Process(pid).children(True)
    ]
    assert len(theirs) >= LANES
    many = collect_all(collector)
    assert_gone(theirs)
    if made is in_parallel:  # skipped frames of environments in other processes are not visible
        assert {counts["ticks"] for counts in many.counts} == {0}
        for counts in one.counts:
            counts["ticks"] = 0
    assert_alike(one, many)


def told(td: TensorDictBase) -> TensorDictBase:
    """Write the exploration type."""
    mode = torch.full(td.batch_size, exploration_type() is ExplorationType.MODE)
    return td.set("mode", mode).set("action", mode.long())


@both_modes
@pytest.mark.parametrize("kind", [ExplorationType.MODE, ExplorationType.RANDOM])
def test_the_exploration_type_holds_in_workers(kind: ExplorationType, mode: str) -> None:
    run = collect_all(worker_collector(SAME, 2, told, **BUDGET, mode=mode, exploration_type=kind))
    assert joined(run.batches)["mode"].eq(kind is ExplorationType.MODE).all()


@pytest.mark.parametrize("sizes", [[1, 3, 1], [3, 1, 1]])
@both_modes
def test_workers_may_have_lanes_unevenly(mode: str, sizes: list[int]) -> None:
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    makes = [partial(make, SAME, first, own) for first, own in zip(firsts, sizes, strict=True)]
    run = collect_all(start(makes, ByObservation(), **BUDGET, mode=mode))
    check_rows(joined(run.batches), LENGTHS, ends="mixed", from_start=True)
    assert run.collector.ledger.stored == 120
    if mode == "sync":
        assert_alike(collect_all(sync_collector(SAME, ByObservation(), **BUDGET)), run)


@pytest.mark.slow
@both_modes
def test_batches_larger_than_a_slab(mode: str) -> None:
    """A slab has at most 4096 slots, so a batch is assembled from several."""
    options = {**BUDGET, "frames_per_batch": 9000, "total_frames": 12_000, "lanes": 2}
    run = collect_all(worker_collector(SAME, 2, ByObservation(), **options, mode=mode))
    assert [len(batch) for batch in run.batches] == [9000, 3000]
    rows = joined(run.batches)
    if mode == "sync":
        one = collect_all(sync_collector(SAME, ByObservation(), **options))
        for mine, theirs in zip(one.batches, run.batches, strict=True):
            assert_same(mine, theirs)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
