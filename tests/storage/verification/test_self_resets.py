"""Test the judgement alone: which rows indicate an environment that resets itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tallyroll.storage.trajectories.self_resets import (
    ComparisonCounts,
    Ends,
    SelfResets,
    Verdict,
    digest,
    digests,
    judge,
)

Row = dict[str, Any]
FINE, UNDECIDED = Verdict.FINE, Verdict.UNDECIDED
KNOWN_START, SELF_RESET = Verdict.KNOWN_START, Verdict.SELF_RESET


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (ComparisonCounts(15, 15, 15, 15, 99, 0, 60), UNDECIDED),
        (ComparisonCounts(16, 16, 16, 16, 99, 0, 64), SELF_RESET),
        (ComparisonCounts(16, 16, 16, 16, 99, 0, 24), SELF_RESET),
        (ComparisonCounts(16, 16, 16, 16, 99, 0, 23.9), KNOWN_START),
        (ComparisonCounts(16, 16, 16, 16, 90, 9, 23.9), UNDECIDED),
        (ComparisonCounts(16, 16, 0, 0, 90, 9), FINE),
        (ComparisonCounts(16, 16, 16, 16, 90, 60, 64), SELF_RESET),
        (ComparisonCounts(20, 18, 20, 18, 99, 0, 70), SELF_RESET),
        (ComparisonCounts(20, 17, 20, 17, 99, 0, 70), FINE),
        (ComparisonCounts(16, 16, 0, 0, 99, 0), KNOWN_START),
        (ComparisonCounts(16, 16, 1, 1, 99, 0, 4), KNOWN_START),
        (ComparisonCounts(20, 19, 1, 0, 99, 0), FINE),
        (ComparisonCounts(16, 16, 16, 16, 4, 0, 64), SELF_RESET),
        (ComparisonCounts(16, 16, 16, 16, 3, 0, 64), UNDECIDED),
        (ComparisonCounts(500, 500, 500, 500, 0, 0, 900), UNDECIDED),
        (ComparisonCounts(16, 0, 16, 0, 0, 0), FINE),
    ],
)
def test_the_rule(seen: ComparisonCounts, verdict: Verdict) -> None:
    assert judge(seen) is verdict


def episodes(
    lane: int, rng: np.random.Generator, self_reset: float = 1.0, starts: int = 10**6
) -> Iterator[list[Row]]:
    """Yield trajectories of a lane. Observations are numbers, and some trajectories are cut."""
    first = int(rng.integers(starts))
    while True:
        length, following = int(rng.integers(1, 7)), int(rng.integers(starts))
        states = [first, *(10**7 + int(rng.integers(10**6)) for _ in range(length))]
        cut = rng.random() < 0.2
        if not cut and rng.random() < self_reset:
            states[-1] = following
        yield [
            {
                "lane": lane,
                "step": at,
                "here": here,
                "next": after,
                "ended": at == length - 1 and not cut,
                "terminated": at == length - 1 and not cut and bool(length % 2),
            }
            for at, (here, after) in enumerate(pairwise(states))
        ]
        first = following


def shuffled(rows: list[list[Row]], rng: np.random.Generator) -> list[Row]:
    """Return rows of lanes in random order, keeping the order within each lane."""
    turns = rng.permutation([lane for lane, each in enumerate(rows) for _ in each])
    at = [iter(each) for each in rows]
    return [next(at[lane]) for lane in turns]


def fed(resets: SelfResets, rows: list[Row], valid: bool | None = None) -> None:
    here, after = (np.array([row[name] for row in rows], np.int64) for name in ("here", "next"))
    lane, step = (np.array([row[name] for row in rows], np.int32) for name in ("lane", "step"))
    ended, terminated = (
        np.array([r[name] for r in rows], bool) for name in ("ended", "terminated")
    )
    resets.look(
        Ends(
            lane, step, ended, terminated,
            [(lambda at: here[at], here.itemsize)], [(lambda at: after[at], after.itemsize)],
            None if valid is None else np.full(len(rows), valid),
        )
    )  # fmt: skip


def in_pieces(resets: SelfResets, rows: list[Row], rng: np.random.Generator) -> None:
    while rows:
        count = int(rng.integers(1, 9 + resets.lanes))
        fed(resets, rows[:count])
        rows = rows[count:]


def model(rows: list[Row], lanes: int) -> tuple[int, int, int, int]:
    """Count ends, equal ends, informative ends and both, lane by lane."""
    ends = equal = telling = both = 0
    for lane in range(lanes):
        own, last = None, None
        for row in (row for row in rows if row["lane"] == lane):
            if row["step"] == 0:
                if last is not None and last["ended"]:
                    same, tells = last["next"] == row["here"], own != row["here"]
                    ends, equal = ends + 1, equal + same
                    telling, both = telling + tells, both + (same and tells)
                own = row["here"]
            last = row
    return ends, equal, telling, both


@pytest.mark.parametrize("seed", range(40))
def test_counts_in_any_order_and_pieces_are_those_of_a_plain_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lanes = int(rng.integers(1, 8))
    share, starts = float(rng.choice([0.0, 0.5, 1.0])), int(rng.choice([1, 2, 10**6]))
    rows = []
    for lane in range(lanes):
        source = episodes(lane, rng, share, starts)
        rows.append([row for _ in range(15 // lanes) for row in next(source)])
    mixed = shuffled(rows, rng)
    resets = SelfResets(lanes)
    in_pieces(resets, mixed, rng)
    seen = resets.seen
    assert (seen.ends, seen.equal, seen.telling, seen.telling_equal) == model(mixed, lanes)
    assert not resets.decided


@pytest.mark.parametrize(
    ("share", "starts", "verdict"),
    [(1.0, 10**6, SELF_RESET), (0.0, 10**6, FINE), (0.0, 1, FINE), (0.5, 10**6, FINE)],
)
@pytest.mark.parametrize("lanes", [1, 5, 40])
def test_the_verdict(lanes: int, share: float, starts: int, verdict: Verdict) -> None:
    rng = np.random.default_rng(lanes)
    rows = []
    for lane in range(lanes):
        source = episodes(lane, rng, share, starts)
        count = 40 + 600 // lanes if verdict is FINE else 40 // lanes + 3
        rows.append([row for _ in range(count) for row in next(source)])
    resets = SelfResets(lanes)
    in_pieces(resets, shuffled(rows, rng), rng)
    assert resets.verdict is verdict


def test_one_lane_of_many_that_resets_itself_is_detected() -> None:
    rng = np.random.default_rng(0)
    rows = [
        [row for source in [episodes(lane, rng, float(lane == 7))] for _ in range(40)
         for row in next(source)]
        for lane in range(40)
    ]  # fmt: skip
    resets = SelfResets(40)
    in_pieces(resets, shuffled(rows, rng), rng)
    assert resets.verdict is SELF_RESET
    assert resets.seen.ends < 40  # of that lane


def test_ends_of_a_time_limit_around_it_do_not_hide_it() -> None:
    rng = np.random.default_rng(1)
    rows = []
    source = episodes(0, rng)
    for _ in range(200):
        each = next(source)
        if each[-1]["ended"] and not each[-1]["terminated"]:
            each[-1]["next"] = -1  # an outer limit: the task does not reset itself there
        rows += each
    resets = SelfResets(1)
    in_pieces(resets, rows, rng)
    assert resets.verdict is SELF_RESET


def test_a_bandit_is_never_decided_and_is_left_alone_in_the_end() -> None:
    resets = SelfResets(2)
    row = {"step": 0, "here": 0, "next": 0, "ended": True, "terminated": True}
    for context in range(400):  # a contextual bandit, whose reset keeps the context
        here = {"here": context, "next": context + 1}
        fed(resets, [{**row, **here, "lane": lane} for lane in (1, 0)])
        assert resets.verdict in (UNDECIDED, FINE)
    assert resets.decided


def test_lost_finals_are_not_compared() -> None:
    rng = np.random.default_rng(2)
    source = episodes(0, rng)
    rows = [row for _ in range(60) for row in next(source)]
    resets = SelfResets(1)
    fed(resets, rows, valid=False)
    assert resets.seen.ends == 0
    assert resets.verdict is UNDECIDED


def test_rows_behind_missing_ones_are_not_compared() -> None:
    row = {"lane": 0, "step": 0, "ended": True, "terminated": True}
    resets = SelfResets(1)
    fed(resets, [{**row, "here": 0, "next": 1}])
    resets.forget(np.array([True]))
    fed(resets, [{**row, "here": 1, "next": 2}])
    assert resets.seen.ends == 0
    fed(resets, [{**row, "here": 2, "next": 3}])
    assert resets.seen == ComparisonCounts(1, 1, 1, 1)


def test_lanes_that_the_run_does_not_have_end_it() -> None:
    row = {"lane": 3, "step": 0, "here": 0, "next": 1, "ended": True, "terminated": True}
    resets = SelfResets(2)
    fed(resets, [row])
    assert resets.verdict is FINE


def test_few_ends_that_agree_are_likely() -> None:
    row = {"lane": 0, "terminated": True}
    rows = [
        {**row, "step": at, "here": 10 * e + at, "next": 10 * (e + at // 2) + (at + 1) % 3,
         "ended": at == 2}
        for e in range(5) for at in range(3)
    ]  # fmt: skip
    resets = SelfResets(1)
    fed(resets, rows[:-1])
    assert resets.likely
    assert resets.verdict is UNDECIDED
    spoilt = SelfResets(1)
    rows[2]["next"] = 99
    fed(spoilt, rows)
    assert not spoilt.likely


# --- digests --------------------------------------------------------------------------------------


def test_equal_bytes_have_equal_digests_and_others_do_not() -> None:
    nan = np.float64("nan")
    rows = np.array(
        [[1, -2, nan], [1, -2, nan], [-1, 2, nan], [1, -2, 0], [-2, 1, nan], [-1, -2, nan],
         [1, -2, -0.0], [0, 0, 0]]
    )  # fmt: skip
    found = digest(rows).tolist()
    assert found[0] == found[1]
    assert len(set(found)) == len(found) - 1


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5)])
def test_one_bit_changes_a_digest(dtype: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 2, (40, *shape)).astype(dtype)
    flat = rows.reshape(40, -1)
    for at in range(1, 40):
        flat[at] = flat[0]
        place = rng.integers(flat.shape[1])
        flat[at, place] = 1 - flat[at, place]
    found = digest(rows)
    assert (found[1:] != found[0]).all()


def test_large_rows_are_taken_few_at_a_time() -> None:
    rows = np.random.default_rng(4).integers(0, 256, (300, 200, 200), np.uint8)
    taken: list[int] = []

    def take(at: np.ndarray) -> np.ndarray:
        taken.append(len(at))
        return rows[at]

    at = np.arange(299, -1, -1)
    assert (digests([(take, rows[0].nbytes)], at) == digest(rows)[::-1]).all()
    assert max(taken) * rows[0].nbytes <= 2**22


def test_every_key_counts_in_its_place() -> None:
    one, two = (np.array([value], np.uint64).take for value in (5, 6))

    def joined(*takes: Any) -> int:
        return int(digests([(take, 8) for take in takes], np.array([0]))[0])

    assert joined(one, two) != joined(two, one)
    assert joined(one, one) != joined(one, two)
    assert digest(np.zeros((3, 0))).tolist() == [0, 0, 0]
