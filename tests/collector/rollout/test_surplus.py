"""Surplus of a batch's last step: carried, discarded, or never executed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import ParallelEnv, SerialEnv

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.errors import ArgumentError

from collect_kit import (
    LENGTHS,
    Batches,
    ByObservation,
    assert_same,
    balanced,
    collect,
    joined,
)
from oracles import OracleTorchEnv, OracleVectorEnv, check_rows, make_oracle_vec
from pairs import each_pair

NUMBERS = (("collector", "step"), ("collector", "traj_ids"))


def vec(mode: AutoresetMode, lanes: int = 3, **kwargs: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(lanes, LENGTHS, mode=mode, ends="mixed", **kwargs))


def batched(cls: Any, lanes: int = 3) -> Any:
    makes = [
        partial(OracleTorchEnv, None, LENGTHS, first_lane=lane, ends="mixed")
        for lane in range(lanes)
    ]
    start = {"mp_start_method": "fork"} if cls is ParallelEnv else {}
    return cls(lanes, makes, **start)


def steps_are_counted_within_each_id(batches: Batches) -> None:
    rows = joined(batches)
    ids, step = (rows["collector", name].numpy() for name in ("traj_ids", "step"))
    for each in np.unique(ids):
        assert step[ids == each].tolist() == list(range((ids == each).sum()))


def test_carried_transitions_open_the_next_batch_with_their_own_version() -> None:
    collector = SyncCollector(
        vec(AutoresetMode.DISABLED), ByObservation(), frames_per_batch=4, total_frames=12
    )
    versions = []
    with collector:
        for batch in collector:
            versions.append(sorted(batch["collector", "policy_version"].tolist()))
            collector.update_policy_weights_()
    # Two slots of three lanes make six rows, of which two are carried; then two more slots, ...
    assert versions == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 2, 2, 2]]
    assert collector.ledger.discarded == 0


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("per_batch", [1, 4, 8])
def test_discarded_surplus_is_in_no_batch(mode: AutoresetMode, per_batch: int) -> None:
    env = vec(mode)
    batches, collector = collect(
        env, ByObservation(), frames_per_batch=per_batch, total_frames=40, surplus="discard"
    )
    rows = joined(batches)
    check_rows(rows.exclude(*NUMBERS), LENGTHS, ends="mixed", contiguous=False)
    steps_are_counted_within_each_id(batches)
    assert len(rows) == 40
    assert collector.ledger.discarded == collector.ledger.executed - 40 > 0
    assert balanced(collector.ledger)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_after_a_discard_every_action_is_by_the_latest_weights(mode: AutoresetMode) -> None:
    with SyncCollector(
        vec(mode), ByObservation(), frames_per_batch=4, total_frames=20, surplus="discard"
    ) as collector:
        for version, batch in enumerate(collector):
            assert set(batch["collector", "policy_version"].tolist()) == {version}
            assert collector.ledger.carried == 0
            collector.update_policy_weights_()


def never_stepping(kind: str) -> Any:
    if kind.startswith("vector"):
        return vec(AutoresetMode.DISABLED, vec_kwargs={"copy": kind == "vector"})
    return batched(SerialEnv if kind == "serial" else ParallelEnv)


@each_pair(
    per_batch=[1, 2, 4, 7], kind=["vector", "vector, no copy", "serial"], random=[False, True]
)
def test_never_step_executes_nothing_beyond_the_batch(
    kind: str, per_batch: int, random: bool
) -> None:
    batches, collector = collect(
        lambda: never_stepping(kind),
        None if random else ByObservation(),
        frames_per_batch=per_batch,
        total_frames=31,
        surplus="never_step",
    )
    check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)
    assert collector.ledger.executed == collector.ledger.slots == collector.ledger.stored == 31


@pytest.mark.parametrize("kind", ["vector", "vector, no copy", "serial"])
@pytest.mark.parametrize("per_batch", [1, 2, 4, 7])
def test_never_step_with_a_budget_of_episodes_carries_nothing(kind: str, per_batch: int) -> None:
    with SyncCollector(
        lambda: never_stepping(kind),
        ByObservation(),
        frames_per_batch=per_batch,
        total_episodes=9,
        surplus="never_step",
    ) as collector:
        for batch in collector:
            assert collector.ledger.carried == 0
            assert len(batch) == per_batch or collector.ledger.episodes_complete == 9


def test_never_step_in_a_parallel_environment() -> None:
    kwargs: dict[str, Any] = {
        "frames_per_batch": 5,
        "total_frames": 17,
        "surplus": "never_step",
        "seed": 0,
    }
    one, _ = collect(lambda: never_stepping("parallel"), ByObservation(), **kwargs)
    other, _ = collect(lambda: never_stepping("serial"), ByObservation(), **kwargs)
    for mine, theirs in zip(one, other, strict=True):
        check_rows(mine, LENGTHS, ends="mixed")
        assert_same(mine, theirs)


def test_never_step_takes_the_lowest_lanes_first() -> None:
    batches, _ = collect(
        vec(AutoresetMode.DISABLED), frames_per_batch=5, total_frames=10, surplus="never_step"
    )
    for batch in batches:
        assert batch["collector", "lane"].tolist() == [0, 0, 1, 1, 2]


def test_never_step_counts_what_the_environment_counts() -> None:
    env = vec(AutoresetMode.DISABLED)
    with SyncCollector(env, frames_per_batch=4, total_frames=30, surplus="never_step") as collector:
        for _ in collector:
            assert collector.ledger.executed == sum(env.vector_env.get_attr("steps_taken"))


@pytest.mark.parametrize(
    "make",
    [
        partial(vec, AutoresetMode.NEXT_STEP),
        partial(vec, AutoresetMode.SAME_STEP),
        partial(OracleVectorEnv, 3, LENGTHS),
        partial(OracleTorchEnv, 3, LENGTHS),
    ],
)
def test_never_step_is_refused_where_lanes_cannot_be_stepped_apart(make: Any) -> None:
    with pytest.raises(ArgumentError, match='surplus="never_step" needs an environment that can'):
        SyncCollector(make(), frames_per_batch=4, total_frames=8, surplus="never_step")


@pytest.mark.parametrize("make", [partial(vec, mode, 1) for mode in AutoresetMode])
def test_one_lane_never_has_a_surplus(make: Any) -> None:
    batches, collector = collect(
        make(), ByObservation(), frames_per_batch=4, total_frames=18, surplus="never_step"
    )
    check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)
    assert collector.ledger.executed == 18


@given(
    frames=st.integers(1, 60),
    per_batch=st.integers(1, 20),
    lanes=st.integers(1, 4),
    mode=st.sampled_from(list(AutoresetMode)),
    surplus=st.sampled_from(["carry", "discard", "never_step"]),
    random_frames=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_any_surplus_gives_the_exact_total_and_a_balanced_ledger(
    frames: int, per_batch: int, lanes: int, mode: Any, surplus: Any, random_frames: int
) -> None:
    if surplus == "never_step":
        mode = AutoresetMode.DISABLED
    env = vec(mode, lanes)
    sizes, random = [], 0
    with SyncCollector(
        env,
        ByObservation(),
        frames_per_batch=per_batch,
        total_frames=frames,
        surplus=surplus,
        init_random_frames=random_frames,
    ) as collector:
        for batch in collector:
            sizes.append(len(batch))
            random += int((batch["collector", "policy_version"] == -1).sum())
            assert balanced(collector.ledger)
            assert collector.ledger.executed == sum(env.vector_env.get_attr("steps_taken"))
    assert sizes == [per_batch] * (frames // per_batch) + [frames % per_batch] * (
        frames % per_batch > 0
    )
    assert random == collector.ledger.random == min(random_frames, frames)


def test_carried_transitions_are_delivered_when_stopped_between_batches() -> None:
    with SyncCollector(make_oracle_vec(5, [[9]]), frames_per_batch=3, total_frames=-1) as collector:
        rows = 0
        for batch in collector:
            rows += len(batch)
            collector.stop()
    assert rows == collector.ledger.executed == 5


def test_all_that_is_carried_is_delivered_when_stopped_between_batches() -> None:
    with SyncCollector(make_oracle_vec(9, [[9]]), frames_per_batch=2, total_frames=-1) as collector:
        rows = 0
        for batch in collector:
            rows += len(batch)
            collector.stop()
    assert rows == collector.ledger.executed == 9
