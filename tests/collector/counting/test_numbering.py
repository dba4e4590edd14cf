"""Pure arithmetic: which slots are transitions, their order, numbers, seeds and counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tallyroll.collector.counting import numbering
from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import Budget, Ledger
from tallyroll.collector.counting.numbering import (
    LaneState,
    driver_seed,
    lane_seed,
    lane_seeds,
    number,
)
from tallyroll.collector.counting.transitions import (
    first_in_slot_order,
    lane_major,
    next_step_transitions,
)

masks = hnp.arrays(np.bool_, st.tuples(st.integers(0, 8), st.integers(1, 4)))


@given(st.data(), st.integers(0, 9), st.integers(1, 4))
def test_the_slot_after_an_end_is_a_reset_slot(data: st.DataObject, time: int, lanes: int) -> None:
    flags = data.draw(hnp.arrays(np.bool_, (time + 1, lanes)))
    pending, ended = flags[0], flags[1:].copy()
    wanted = np.ones((time, lanes), bool)
    for lane in range(lanes):
        after_end = bool(pending[lane])
        for slot in range(time):
            wanted[slot, lane] = not after_end
            after_end = bool(ended[slot, lane])
    assert np.array_equal(next_step_transitions(ended, pending), wanted)


@given(masks, st.integers(0, 40))
def test_slot_order_is_time_first_then_lane(transitions: Any, count: int) -> None:
    wanted, left = np.zeros_like(transitions), count
    for slot, lane in np.argwhere(transitions):
        if left > 0:
            wanted[slot, lane] = True
            left -= 1
    before = transitions.copy()
    assert np.array_equal(first_in_slot_order(transitions, count), wanted)
    assert np.array_equal(transitions, before)


@given(masks)
def test_rows_stand_lane_by_lane_in_time(taken: Any) -> None:
    index, lane = lane_major(taken)
    wanted = [
        (own, slot * taken.shape[1] + own)
        for own in range(taken.shape[1])
        for slot in range(len(taken))
        if taken[slot, own]
    ]
    assert list(zip(lane.tolist(), index.tolist(), strict=True)) == wanted
    assert lane.dtype == np.int32


@st.composite
def blocks(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[bool]]]]:
    """Draw a number of lanes, and blocks of (lane of each row, ended of each row)."""
    lanes = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        rows = sorted(draw(st.lists(st.integers(0, lanes - 1), max_size=12)))
        found.append((rows, [draw(st.booleans()) for _ in rows]))
    return lanes, found


@given(blocks(), st.integers(0, 100))
@settings(max_examples=150)
def test_rows_are_numbered_as_a_plain_loop_numbers_them(
    given_blocks: tuple[int, list[tuple[list[int], list[bool]]]], base: int
) -> None:
    lanes, parts = given_blocks
    state = LaneState.fresh(lanes, base)
    trajectory, step, total, first = [0] * lanes, [0] * lanes, [0.0] * lanes, [0] * lanes
    clock = 0
    for rows, ended in parts:
        reward = np.arange(clock, clock + len(rows), dtype=np.float64)
        version = np.arange(clock, clock + len(rows)) // 3
        ids, steps, episodes = [], [], []
        for row, lane in enumerate(rows):
            ids.append(base + trajectory[lane] * lanes + lane)
            steps.append(step[lane])
            first[lane] = int(version[row]) if step[lane] == 0 else first[lane]
            step[lane] += 1
            total[lane] += reward[row]
            if ended[row]:
                episodes.append((row, total[lane], step[lane], first[lane]))
                trajectory[lane] += 1
                step[lane], total[lane] = 0, 0.0
        numbers = number(
            state,
            np.array(rows, np.int32),
            np.array(ended, bool),
            reward,
            version,
        )
        clock += len(rows)
        assert numbers.traj_ids.tolist() == ids
        assert numbers.step.tolist() == steps
        told = zip(
            *(each.tolist() for each in numbers.ended),
            strict=True,
        )
        assert list(told) == episodes
        assert state.open.tolist() == [each > 0 for each in step]
        assert state.next_id > max(ids, default=-1)


def test_a_cut_trajectory_gives_its_id_up() -> None:
    state = LaneState.fresh(2, 10)
    args = (np.array([False] * 3), np.zeros(3), np.zeros(3, np.int64))
    assert number(state, np.array([0, 0, 1], np.int32), *args).traj_ids.tolist() == [
        10,
        10,
        11,
    ]
    assert state.cut(np.array([True, False])) == 1
    assert state.cut(np.array([True, False])) == 0
    again = number(state, np.array([0, 0, 1], np.int32), *args)
    assert again.traj_ids.tolist() == [12, 12, 11]
    assert again.step.tolist() == [0, 1, 1]


def test_a_lane_that_is_interrupted_skips_an_id() -> None:
    state = LaneState.fresh(3, 10)
    number(state, np.array([0, 1], np.int32), np.array([False, True]), np.zeros(2), np.zeros(2))
    assert state.traj_id.tolist() == [10, 14, 12]
    assert state.interrupt(np.array([True, True, True])) == 1  # two lanes have no row yet
    assert state.traj_id.tolist() == [13, 17, 15]
    assert not state.open.any()
    assert state.first_id == 10
    state.begin_at(20)
    assert (state.first_id, state.traj_id.tolist()) == (20, [23, 27, 25])


def test_seeds_differ_by_lane_and_start_and_never_change() -> None:
    seeds = {
        (seed, lane, start): lane_seed(seed, lane, start)
        for seed in range(3)
        for lane in range(40)
        for start in range(4)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    # Pinned, so that later versions reproduce data from a seed.
    assert [lane_seed(0, lane, 0) for lane in range(3)] == [1941048836, 1805848317, 1961512366]
    assert driver_seed(0, 0).generate_state(1) != driver_seed(0, 1).generate_state(1)


def test_lanes_that_would_be_alike_get_seeds_that_differ() -> None:
    # Found by search: among 3000 lanes with 31 bits, two seeds coincide in one of 480 runs.
    seed, lower, upper = 2061, 654, 694
    alike = lane_seed(seed, lower, 0)
    assert lane_seed(seed, upper, 0) == alike
    seeds = lane_seeds(seed, upper + 2, 0)
    assert len(set(seeds)) == upper + 2
    words = np.random.SeedSequence(seed, spawn_key=(upper, 0)).generate_state(2)
    assert seeds[upper] == int(words[1]) & 0x7FFF_FFFF
    others = [lane for lane in range(upper + 2) if lane != upper]
    assert [seeds[lane] for lane in others] == [lane_seed(seed, lane, 0) for lane in others]


@given(st.integers(0, 2**64), st.integers(0, 16), st.integers(0, 3))
def test_seeds_differ_and_do_not_depend_on_how_many_lanes_follow(
    seed: int, lanes: int, incarnation: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbering, "SEED_MASK", 0xF)  # makes many seeds coincide
        seeds = lane_seeds(seed, lanes, incarnation)
        assert len(set(seeds)) == lanes
        for fewer in range(lanes):
            assert lane_seeds(seed, fewer, incarnation) == seeds[:fewer]
        assert seeds[:1] == [lane_seed(seed, 0, incarnation)][:lanes]


@given(
    st.integers(1, 8),
    st.lists(st.lists(st.integers(1, 5), min_size=8, max_size=8), min_size=1, max_size=4),
    st.lists(st.integers(1, 7), min_size=1, max_size=30),
)
def test_the_gate_admits_the_first_started_in_any_pieces(
    total: int, lengths: list[list[int]], pieces: list[int]
) -> None:
    lanes, time = len(lengths), 40
    ended, episode = np.zeros((time, lanes), bool), np.zeros((time, lanes), int)
    for lane, own in enumerate(lengths):
        slot = index = 0
        while slot < time:
            stop = slot + own[index % len(own)]
            episode[slot:stop, lane] = index
            if stop <= time:
                ended[stop - 1, lane] = True
            slot, index = stop, index + 1
    begun = sorted(
        (int(np.argmax(episode[:, lane] == index)), lane, index)
        for lane in range(lanes)
        for index in range(int(episode[:, lane].max()) + 1)
    )
    admitted = {(lane, index) for _, lane, index in begun[:total]}
    wanted = np.array(
        [[(lane, episode[slot, lane]) in admitted for lane in range(lanes)] for slot in range(time)]
    )
    gate = EpisodeBudget(total, lanes)
    got, slot = [], 0
    for piece in [*pieces, time]:
        part = ended[slot : slot + piece]
        got.append(gate.wanted(np.ones_like(part), part))
        slot += piece
    assert np.array_equal(np.concatenate(got), wanted)
    assert gate.completed == int((wanted & ended).sum())


@given(
    st.integers(1, 8),
    st.lists(st.lists(st.integers(1, 4), min_size=8, max_size=8), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_the_gate_foresees_what_it_will_admit(
    total: int, lengths: list[list[int]], reset_slots: bool, data: st.DataObject
) -> None:
    """The prediction is checked slot by slot, with and without reset slots."""
    lanes = len(lengths)
    gate = EpisodeBudget(total, lanes)
    episode, left = [0] * lanes, [own[0] for own in lengths]
    resets = np.zeros(lanes, bool)
    for _ in range(25):
        steps = np.array(data.draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes)))
        transitions, ended = steps & ~resets, np.zeros(lanes, bool)
        foreseen = gate.upcoming(transitions)
        for lane in np.flatnonzero(transitions):
            left[lane] -= 1
            ended[lane] = left[lane] == 0
            if ended[lane]:
                episode[lane] += 1
                left[lane] = lengths[lane][episode[lane] % 8]
        assert np.array_equal(gate.wanted(transitions[None], ended[None])[0], foreseen)
        resets = np.where(steps, ended & reset_slots, resets)


@given(st.none() | st.integers(1, 100), st.integers(1, 30))
def test_a_budget_is_spent_exactly(total: int | None, per_batch: int) -> None:
    budget, stored, sizes = Budget(total), 0, []
    while (size := budget.batch(stored, per_batch)) and len(sizes) < 200:
        sizes.append(size)
        stored += size
    assert all(size == per_batch for size in sizes[:-1])
    assert stored == (200 * per_batch if total is None else total)
    assert budget.remaining(stored) == (None if total is None else 0)


def test_a_ledger_is_balanced_and_loads_its_own_counts() -> None:
    ledger = Ledger(slots=9, executed=7, reset_slots=2, stored=4, discarded=1, carried=1, lost=1)
    ledger.check()
    other = Ledger()
    other.load(ledger.counts())
    assert other == ledger
    assert {"seed", "versions"} == set(ledger.as_dict()) - set(ledger.counts())


@pytest.mark.parametrize(
    "name", ["slots", "executed", "reset_slots", "stored", "discarded", "lost"]
)
def test_one_count_more_is_noticed(name: str) -> None:
    from tallyroll.collector.errors import LedgerError

    ledger = Ledger(slots=9, executed=7, reset_slots=2, stored=4, discarded=1, carried=1, lost=1)
    setattr(ledger, name, getattr(ledger, name) + 1)
    with pytest.raises(LedgerError, match=r"expected (executed|slots) ="):
        ledger.check()
