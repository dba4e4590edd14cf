"""Compare a walk of rows lane by lane, chunk after chunk, with a plain loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.storage.trajectories.lane_stretches import LaneOrder, lane_order

LANES = 4
Chunks = list[list[tuple[int, bool]]]

chunks = st.lists(
    st.lists(st.tuples(st.integers(0, LANES - 1), st.booleans()), min_size=1, max_size=12),
    max_size=5,
)
"""Chunks of rows, each with its lane and a flag."""


def orders(parts: Chunks) -> list[tuple[LaneOrder, np.ndarray, np.ndarray]]:
    """Return the order of each chunk, with the rows' numbers and flags in this order."""
    found, start = [], 0
    for part in parts:
        lane, flags = (np.array(each) for each in zip(*part, strict=True))
        order = lane_order(lane)
        assert order.lane.tolist() == lane[order.at].tolist()
        found.append((order, start + order.at, flags[order.at]))
        start += len(part)
    return found


def rows_by_lane(parts: Chunks) -> list[list[tuple[int, bool]]]:
    """Return each lane's rows in time: number and flag."""
    rows = [row for part in parts for row in part]
    return [
        [(number, flag) for number, (own, flag) in enumerate(rows) if own == lane]
        for lane in range(LANES)
    ]


@given(chunks)
def test_each_row_is_told_of_the_one_before_it_in_its_lane(parts: Chunks) -> None:
    tails, found = np.full(LANES, -1), {}
    for order, numbers, _ in orders(parts):
        looked = order.before(numbers, tails)
        before = order.carry(numbers, tails)
        assert looked.tolist() == before.tolist()
        found |= dict(zip(numbers.tolist(), before.tolist(), strict=True))
    lanes = [[number for number, _ in rows] for rows in rows_by_lane(parts)]
    assert found == {
        number: before
        for numbers in lanes
        for before, number in zip([-1, *numbers], numbers, strict=False)
    }
    assert tails.tolist() == [numbers[-1] if numbers else -1 for numbers in lanes]


@given(chunks)
def test_rows_that_follow_one_another_know_where_that_began(parts: Chunks) -> None:
    tails, found = np.full(LANES, -1), {}
    for order, numbers, follows in orders(parts):
        since = order.since(follows, numbers, tails)
        order.keep(since, tails)
        found |= dict(zip(numbers.tolist(), since.tolist(), strict=True))
    wanted = {}
    for rows in rows_by_lane(parts):
        since = -1
        for number, follows in rows:
            wanted[number] = since = since if follows else number
    assert found == wanted


@given(chunks)
def test_stretches_come_one_after_the_other_as_rows_do(parts: Chunks) -> None:
    tails = np.full(LANES, -1)
    lengths: dict[int, int] = {}
    before: dict[int, int] = {}
    for order, numbers, begins in orders(parts):
        stretches = order.stretches(begins)
        first, last = numbers[stretches.at], numbers[stretches.until]
        lengths |= dict(zip(first.tolist(), stretches.length.tolist(), strict=True))
        before |= dict(zip(first.tolist(), stretches.carry(last, tails).tolist(), strict=True))
        assert stretches.lane.tolist() == order.lane[stretches.at].tolist()
        assert stretches.own.tolist() == order.own.tolist()
    # A lane's first row in a chunk starts a stretch, too.
    opening, start = set(), 0
    for part in parts:
        lanes = [lane for lane, _ in part]
        opening |= {start + lanes.index(lane) for lane in set(lanes)}
        start += len(part)
    wanted_lengths: dict[int, int] = {}
    wanted_before: dict[int, int] = {}
    for rows in rows_by_lane(parts):
        previous, current = -1, -1
        for number, begins in rows:
            if begins or number in opening:
                current = number
                wanted_lengths[current], wanted_before[current] = 0, previous
            wanted_lengths[current] += 1
            previous = number
    assert lengths == wanted_lengths
    assert before == wanted_before
    assert tails.tolist() == [rows[-1][0] if rows else -1 for rows in rows_by_lane(parts)]
