"""Episodes are reported correctly; a budget of episodes takes those that start first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector

from collect_kit import LENGTHS, Batches, ByObservation, balanced, collect, joined
from oracles import (
    OracleTorchEnv,
    OracleVectorEnv,
    check_rows,
    how_it_ends,
    length_of,
    make_oracle_vec,
    reward_of,
)
from pairs import each_pair

MODES = list(AutoresetMode)


def vec(mode: AutoresetMode, lanes: int = 3, lengths: Any = LENGTHS) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(lanes, lengths, mode=mode, ends="mixed"))


DRIVERS: dict[str, Any] = {
    **{mode.value: partial(vec, mode) for mode in MODES},
    "native": lambda lanes=3, lengths=LENGTHS: OracleVectorEnv(lanes, lengths, ends="mixed"),
    "torch": lambda lanes=3, lengths=LENGTHS: OracleTorchEnv(lanes, lengths, ends="mixed"),
}
SPENDS_SLOTS = (AutoresetMode.NEXT_STEP.value, "native")


def first_started(
    count: int, lanes: int, lengths: Any, *, reset_slots: bool
) -> list[tuple[int, int]]:
    """Return the (lane, episode) pairs that start first, ordered by (slot, lane)."""
    starts = []
    for lane in range(lanes):
        slot = 0
        for episode in range(count):
            starts.append((slot, lane, episode))
            slot += length_of(lengths, lane, episode) + reset_slots
    return [(lane, episode) for _, lane, episode in sorted(starts)[:count]]


def taken(batches: Batches) -> Iterator[tuple[int, int, int]]:
    rows = check_rows(joined(batches), LENGTHS, ends="mixed", contiguous=False)
    return zip(rows.lane.tolist(), rows.episode.tolist(), rows.step.tolist(), strict=True)


@each_pair(count=[1, 2, 3, 11], driver=list(DRIVERS), per_batch=[1, 5, 1000])
def test_a_budget_in_episodes_takes_those_that_start_first_whole(
    driver: str, count: int, per_batch: int
) -> None:
    batches, collector = collect(
        DRIVERS[driver](), ByObservation(), frames_per_batch=per_batch, total_episodes=count
    )
    wanted = first_started(count, 3, LENGTHS, reset_slots=driver in SPENDS_SLOTS)
    rows = {
        (lane, episode, step)
        for lane, episode in wanted
        for step in range(length_of(LENGTHS, lane, episode))
    }
    got = list(taken(batches))
    assert len(got) == len(rows)
    assert set(got) == rows
    assert len(collector.episodes) == collector.ledger.episodes_complete == count
    assert all(len(batch) == per_batch for batch in batches[:-1])
    assert balanced(collector.ledger)
    assert collector.ledger.stored == len(rows)


@given(
    count=st.integers(1, 12),
    lanes=st.integers(1, 4),
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3),
    per_batch=st.integers(1, 30),
    driver=st.sampled_from(list(DRIVERS)),
)
@settings(max_examples=40, deadline=None)
def test_random_budgets_in_episodes(
    count: int, lanes: int, lengths: Any, per_batch: int, driver: str
) -> None:
    env = DRIVERS[driver](lanes=lanes, lengths=lengths)
    batches, collector = collect(env, frames_per_batch=per_batch, total_episodes=count)
    rows = check_rows(joined(batches), lengths, ends="mixed", contiguous=False)
    got = sorted(set(zip(rows.lane.tolist(), rows.episode.tolist(), strict=True)))
    assert got == sorted(first_started(count, lanes, lengths, reset_slots=driver in SPENDS_SLOTS))
    assert len(rows.lane) == sum(length_of(lengths, *each) for each in got)
    assert collector.ledger.episodes_cut == 0


@pytest.mark.parametrize("surplus", ["carry", "discard"])
def test_budgeted_episodes_are_whole_whatever_happens_to_the_surplus(surplus: Any) -> None:
    from tallyroll.collector.errors import ArgumentError

    try:
        batches, collector = collect(
            DRIVERS["torch"](), frames_per_batch=4, total_episodes=7, surplus=surplus
        )
    except ArgumentError:
        assert surplus == "discard"
        return
    wanted = first_started(7, 3, LENGTHS, reset_slots=False)
    assert len(joined(batches)) == sum(length_of(LENGTHS, *each) for each in wanted)
    assert len(collector.episodes) == 7


def test_random_frames_of_an_episode_budget_are_the_first_stored() -> None:
    batches, _ = collect(
        DRIVERS["torch"](lengths=[[9]]),
        ByObservation(),
        frames_per_batch=100,
        total_episodes=1,
        init_random_frames=5,
    )
    version = joined(batches)["collector", "policy_version"].tolist()
    assert version == [-1] * 5 + [0] * 4


@pytest.mark.parametrize("driver", list(DRIVERS))
@pytest.mark.parametrize("per_batch", [1, 7, 40])
def test_episodes_are_told_as_they_were(driver: str, per_batch: int) -> None:
    batches, collector = collect(
        DRIVERS[driver](), ByObservation(), frames_per_batch=per_batch, total_frames=80, seed=0
    )
    rows = joined(batches)
    checked = check_rows(rows, LENGTHS, ends="mixed")
    told = {(each.lane, each.traj_id): each for each in collector.episodes}
    assert len(told) == len(collector.episodes) == int(checked.ended.sum())
    for at in np.flatnonzero(checked.ended):
        lane, episode = int(checked.lane[at]), int(checked.episode[at])
        each = told[lane, int(rows["collector", "traj_ids"][at])]
        own = (checked.lane == lane) & (checked.episode == episode)
        actions = rows["action"].numpy()[own]
        assert each.length == length_of(LENGTHS, lane, episode)
        assert each.total_return == sum(
            reward_of(lane, episode, step, action) for step, action in enumerate(actions)
        )
        assert each.end == ("terminated" if how_it_ends("mixed", lane, episode)[0] else "truncated")
        assert each.policy_versions == (0, 0)


def test_an_episode_tells_the_versions_of_its_first_and_last_action() -> None:
    with SyncCollector(
        vec(AutoresetMode.DISABLED, 1, [[5]]), ByObservation(), frames_per_batch=2, total_frames=10
    ) as collector:
        for _ in collector:
            collector.update_policy_weights_()
    assert [each.policy_versions for each in collector.episodes] == [(0, 2), (2, 4)]


def test_an_episode_that_ends_both_ways_is_terminated() -> None:
    env = GymnasiumVectorEnv(make_oracle_vec(1, [[2]], ends="both"))
    _, collector = collect(env, frames_per_batch=4, total_frames=4)
    assert [each.end for each in collector.episodes] == ["terminated"] * 2


def test_returns_lengths_and_slices() -> None:
    _, collector = collect(vec(AutoresetMode.DISABLED), frames_per_batch=7, total_frames=200)
    episodes = collector.episodes
    assert episodes.returns.tolist() == [each.total_return for each in episodes]
    assert episodes.lengths.tolist() == [each.length for each in episodes]
    assert episodes[-1] == list(episodes)[-1] == episodes[len(episodes) - 1]
    assert episodes[2:5] == list(episodes)[2:5]
    with pytest.raises(IndexError, match=f"the log has {len(episodes)} episodes"):
        episodes[len(episodes)]


def test_metrics_are_flat_numbers_of_the_last_episodes() -> None:
    _, collector = collect(vec(AutoresetMode.NEXT_STEP), frames_per_batch=7, total_frames=70)
    metrics = collector.metrics(window=5)
    last = collector.episodes[-5:]
    assert metrics["frames"] == metrics["ticks"] == 70
    assert metrics["episodes"] == len(collector.episodes)
    assert metrics["return_mean"] == pytest.approx(np.mean([each.total_return for each in last]))
    assert metrics["length_mean"] == pytest.approx(np.mean([each.length for each in last]))
    assert metrics["reset_slots"] == collector.ledger.reset_slots
    assert metrics["policy_version"] == -1
    assert all(isinstance(value, (int, float)) for value in metrics.values())


def test_metrics_before_the_first_episode_are_not_numbers() -> None:
    with SyncCollector(
        vec(AutoresetMode.DISABLED), frames_per_batch=1, total_frames=1
    ) as collector:
        assert np.isnan(collector.metrics()["return_mean"])


@pytest.mark.parametrize("frames", range(1, 8))
def test_a_new_seed_in_between_leaves_a_budget_of_episodes_exact(frames: int) -> None:
    env = make_oracle_vec(4, [[3], [2], [1], [1]], mode=AutoresetMode.DISABLED)
    with SyncCollector(env, frames_per_batch=frames, total_episodes=9) as collector:
        batches = iter(collector)
        next(batches)
        collector.set_seed(3)
        for _ in batches:
            pass
    assert collector.ledger.episodes_complete == 9


@pytest.mark.timeout(20)
@pytest.mark.parametrize("frames", [1, 3, 7])
def test_a_budget_of_episodes_ends_where_lanes_are_stepped_in_part(frames: int) -> None:
    lengths = [[2, 2, 2, 2], [2, 7, 3, 3], [3], [1, 2], [2, 2, 2, 7]]
    env = make_oracle_vec(5, lengths, mode=AutoresetMode.DISABLED)
    seen = 0
    with SyncCollector(
        env, frames_per_batch=frames, total_episodes=5, surplus="never_step"
    ) as collector:
        for batch in collector:
            seen += len(batch)
            assert collector.ledger.slots < 500, "it does not end"
    assert collector.ledger.episodes_complete == 5
