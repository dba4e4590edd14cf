"""Rows, lanes and trajectories hold the same transitions; splits match those of a plain dict."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from tallyroll.collector import GymnasiumVectorEnv, split_trajectories
from tallyroll.collector.errors import ArgumentError

from collect_kit import LENGTHS, ByObservation, assert_same, collect
from oracles import OracleTorchEnv, check_rows, flat_rows, make_oracle_vec

MASK = ("collector", "mask")


def batches_in(layout: str, mode: AutoresetMode, **kwargs: Any) -> list[TensorDictBase]:
    env = GymnasiumVectorEnv(make_oracle_vec(3, LENGTHS, mode=mode, kind="dict", ends="mixed"))
    kwargs = {"layout": layout, **kwargs}
    return collect(
        env, ByObservation("dict"), frames_per_batch=17, total_frames=60, seed=0, **kwargs
    )[0]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_lanes_are_rows_lane_by_lane(mode: AutoresetMode) -> None:
    for rows, lanes in zip(batches_in("rows", mode), batches_in("lanes", mode), strict=True):
        counts = np.bincount(rows["collector", "lane"], minlength=3)
        assert lanes.batch_size == (3, counts.max())
        wanted = np.arange(counts.max()) < counts[:, None]
        assert np.array_equal(lanes[MASK], wanted)
        assert_same(flat_rows(lanes).exclude(MASK), rows)
        assert not any(leaf[~lanes[MASK]].any() for leaf in lanes.values(True, True))
        check_rows(lanes, LENGTHS, kind="dict", ends="mixed")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_trajectories_are_rows_by_id(mode: AutoresetMode) -> None:
    for rows, trajectories in zip(
        batches_in("rows", mode), batches_in("trajectories", mode), strict=True
    ):
        ids = rows["collector", "traj_ids"]
        assert len(trajectories) == len(ids.unique())
        for each, wanted in zip(trajectories, ids.unique(), strict=True):
            assert_same(each[each[MASK]].exclude(MASK), rows[ids == wanted])
        check_rows(trajectories, LENGTHS, kind="dict", ends="mixed", contiguous=False)


def test_split_trajs_is_torchrls_name() -> None:
    mode = AutoresetMode.NEXT_STEP
    for one, other in zip(
        batches_in("trajectories", mode), batches_in("rows", mode, split_trajs=True), strict=True
    ):
        assert_same(one, other)


@pytest.mark.parametrize("layout", ["lanes", "trajectories"])
def test_one_lane_without_a_batch_dimension(layout: str) -> None:
    batches, _ = collect(
        OracleTorchEnv(None, LENGTHS), layout=layout, frames_per_batch=9, total_frames=30
    )
    for batch in batches:
        assert batch.ndim == 2
        check_rows(batch, LENGTHS)


def test_a_lane_without_rows_is_empty_in_lanes() -> None:
    batches, _ = collect(
        OracleTorchEnv(3, LENGTHS), layout="lanes", frames_per_batch=2, total_frames=2
    )
    assert batches[0].batch_size == (3, 1)
    assert batches[0][MASK].squeeze(-1).tolist() == [True, True, False]


# --- split_trajectories -------------------------------------------------------------------------


def rows_of(ids: Any, steps: Any = None, done: Any = None) -> TensorDict:
    count = len(ids)
    rows = TensorDict(
        {
            "x": torch.arange(2.0 * count).view(count, 2),
            "next": {"done": torch.as_tensor(done or [False] * count).view(-1, 1)},
            "collector": {"traj_ids": torch.as_tensor(ids, dtype=torch.int64)},
        },
        batch_size=[count],
    )
    if steps is not None:
        rows["collector", "step"] = torch.as_tensor(steps, dtype=torch.int64)
    return rows


def plain_split(rows: TensorDictBase) -> dict[int, list[int]]:
    """Return the row numbers of each trajectory id, ordered in time."""
    found: dict[int, list[int]] = {}
    for row, each in enumerate(rows["collector", "traj_ids"].tolist()):
        found.setdefault(each, []).append(row)
    step = rows.get(("collector", "step"), None)
    if step is not None:
        for at in found.values():
            at.sort(key=lambda row: int(step[row]))
    return dict(sorted(found.items()))


@st.composite
def shuffled(draw: st.DrawFn) -> TensorDict:
    """Draw trajectories with random ids and lengths, and shuffle their rows."""
    ids = draw(st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 5), max_size=8, unique=True))
    lengths = [draw(st.integers(1, 6)) for _ in ids]
    pairs = [
        (each, step) for each, length in zip(ids, lengths, strict=True) for step in range(length)
    ]
    pairs = draw(st.permutations(pairs))
    done = [draw(st.booleans()) for _ in pairs]
    return rows_of([p[0] for p in pairs], [p[1] for p in pairs], done)


@given(shuffled(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_split_is_that_of_a_plain_dict(rows: TensorDict, with_steps: bool) -> None:
    if not with_steps:
        rows = rows.exclude(("collector", "step"))
    before = rows.clone()
    wanted = plain_split(rows)
    each = split_trajectories(rows, out="list")
    together = split_trajectories(rows, out="offsets")
    padded = split_trajectories(rows)
    assert len(each) == len(wanted) == len(padded)
    assert together.traj_ids.tolist() == list(wanted)
    assert together.offsets.tolist() == [0, *np.cumsum([len(at) for at in wanted.values()])]
    assert padded.batch_size == (len(wanted), max(map(len, wanted.values()), default=0))
    for index, (traj_id, at) in enumerate(wanted.items()):
        for piece in (
            each[index],
            together.rows[together.offsets[index] : together.offsets[index + 1]],
            padded[index][padded[index][MASK]],
        ):
            assert torch.equal(piece["x"], rows["x"][at])
            assert set(piece["collector", "traj_ids"].tolist()) == {traj_id}
            done = piece["next", "done"].view(-1)
            assert bool(done[-1])
            assert torch.equal(done[:-1], rows["next", "done"][at].view(-1)[:-1])
            cut = piece["collector", "cut"]
            assert cut.tolist() == [False] * (len(at) - 1) + [not rows["next", "done"][at[-1]]]
        assert padded[index][MASK].tolist() == [i < len(at) for i in range(padded.batch_size[1])]
    assert_same(rows, before)


@given(shuffled(), st.data())
@settings(max_examples=30, deadline=None)
def test_rows_that_are_masked_out_are_left_out(rows: TensorDict, data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    masked = rows.clone()
    masked[MASK] = torch.tensor(mask, dtype=torch.bool)
    kept = rows[torch.tensor(mask, dtype=torch.bool)]
    one, other = split_trajectories(masked, out="offsets"), split_trajectories(kept, out="offsets")
    assert_same(one.rows, other.rows)
    assert torch.equal(one.offsets, other.offsets)


def test_a_padded_batch_is_split_again() -> None:
    rows = batches_in("rows", AutoresetMode.NEXT_STEP)[0]
    lanes = batches_in("lanes", AutoresetMode.NEXT_STEP)[0]
    once = split_trajectories(rows)
    assert_same(split_trajectories(lanes), once)
    assert_same(split_trajectories(once), once)


def test_shuffled_rows_of_a_run_are_put_in_order() -> None:
    rows = torch.cat(batches_in("rows", AutoresetMode.SAME_STEP))
    shuffled_rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    for one, other in zip(
        split_trajectories(rows, out="list"),
        split_trajectories(shuffled_rows, out="list"),
        strict=True,
    ):
        assert_same(one, other)
        assert one["collector", "step"].tolist() == list(range(len(one)))


def test_a_trajectory_over_two_joined_batches_is_not_cut() -> None:
    one = rows_of([4, 4], [0, 1])
    both = torch.cat([one, rows_of([4], [2], [True])])
    (piece,) = split_trajectories(both, out="list")
    assert piece["next", "done"].view(-1).tolist() == [False, False, True]
    assert piece["collector", "cut"].tolist() == [False] * 3


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40), st.booleans())
@settings(max_examples=100, deadline=None)
def test_repeated_and_missing_rows_begin_pieces(rows: list[tuple[int, int]], ended: bool) -> None:
    batch = rows_of([i for i, _ in rows], [s for _, s in rows], [ended and s > 3 for _, s in rows])
    pieces = split_trajectories(batch, out="list")
    numbers: list[int] = []
    for piece in pieces:
        numbers += (piece["x"][:, 0] / 2).int().tolist()
        assert len(set(piece["collector", "traj_ids"].tolist())) == 1
        step = piece["collector", "step"]
        assert step.tolist() == list(range(int(step[0]), int(step[0]) + len(piece)))
    assert sorted(numbers) == list(range(len(rows)))  # each row occurs once
    count = Counter(rows)
    fewest = sum(max(0, n - count[i, s - 1]) for (i, s), n in count.items())
    assert len(pieces) == fewest
    begins = [(int(p["collector", "traj_ids"][0]), int(p["collector", "step"][0])) for p in pieces]
    assert begins == sorted(begins)
    if fewest == len({i for i, _ in rows}):
        split_trajectories(batch, on_gap="raise")
    else:
        with pytest.raises(ArgumentError, match=r"expected consecutive steps of each trajectory"):
            split_trajectories(batch, on_gap="raise")


@pytest.mark.parametrize(
    ("steps", "pieces"),
    [
        ([0, 1, 2, 0, 1, 2], [[0, 1, 2], [3, 4, 5]]),
        ([2, 2, 1, 1, 0, 0], [[4, 2, 0], [5, 3, 1]]),
        ([1, 2, 3, 2, 3, 4], [[0, 1, 2], [3, 4, 5]]),
        ([2, 3, 4, 1, 2, 3], [[3, 4, 5], [0, 1, 2]]),
        ([3, 4, 0, 1, 2], [[2, 3, 4, 0, 1]]),
        ([0, 1, 3, 4, 5], [[0, 1], [2, 3, 4]]),
        ([5, 1, 1, 3, 2], [[1, 4, 3], [2], [0]]),
    ],
)
def test_slices_that_overlap_stay_as_they_were_drawn(
    steps: list[int], pieces: list[list[int]]
) -> None:
    rows = rows_of([7] * len(steps), steps)
    found = split_trajectories(rows, out="list")
    assert [(p["x"][:, 0] / 2).int().tolist() for p in found] == pieces
    assert all(
        p["next", "done"].view(-1).tolist() == [False] * (len(p) - 1) + [True] for p in found
    )
    assert all(bool(p["collector", "cut"][-1]) for p in found)
    offsets = split_trajectories(rows, out="offsets")
    assert offsets.traj_ids.tolist() == [7] * len(pieces)


def test_a_row_that_ends_an_episode_is_not_followed_by_one_of_another_copy() -> None:
    # Two runs use the same ids and their rows alternate. The first episode ends one step earlier.
    rows = rows_of([0] * 7, [2, 2, 1, 1, 0, 0, 3], [True] + [False] * 5 + [True])
    found = split_trajectories(rows, out="list")
    assert [(p["x"][:, 0] / 2).int().tolist() for p in found] == [[4, 2, 0], [5, 3, 1, 6]]
    assert not any(bool(p["collector", "cut"].any()) for p in found)


def test_rows_without_steps_are_one_trajectory_an_id() -> None:
    rows = rows_of([1, 0, 1, 1])
    assert [len(p) for p in split_trajectories(rows, out="list", on_gap="raise")] == [1, 3]


def test_a_step_is_one_number_a_row() -> None:
    rows = rows_of([0, 0])
    rows["collector", "step"] = torch.zeros(2, 3, dtype=torch.int64)
    match = r"collector/step: expected one number for each of 2 rows, got the shape \[2, 3\]"
    with pytest.raises(ArgumentError, match=match):
        split_trajectories(rows)
    with pytest.raises(ArgumentError, match='on_gap: expected "split" or "raise", got \'skip\''):
        split_trajectories(rows, on_gap="skip")  # type: ignore[call-overload]


def test_nothing_is_split_into_nothing() -> None:
    rows = rows_of([])
    assert split_trajectories(rows, out="list") == []
    assert split_trajectories(rows).batch_size == (0, 0)
    assert split_trajectories(rows, out="offsets").offsets.tolist() == [0]


def test_rows_without_done_are_split_too() -> None:
    padded = split_trajectories(rows_of([1, 0, 1]).exclude("next"))
    assert padded[MASK].tolist() == [[True, False], [True, True]]


def test_there_must_be_ids() -> None:
    rows = TensorDict({"x": torch.zeros(3)}, [3])
    with pytest.raises(
        ArgumentError, match=r"rows: expected the column collector/traj_ids, got .*\['x'\]"
    ):
        split_trajectories(rows)


def test_the_form_of_a_split_is_one_of_three() -> None:
    with pytest.raises(
        ArgumentError, match='out: expected "padded", "list" or "offsets", got \'lanes\''
    ):
        split_trajectories(rows_of([0]), out="lanes")  # type: ignore[call-overload]


def test_a_split_of_many_rows_does_not_take_long() -> None:
    import time

    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(4000), 16))
    rows = rows_of(ids)
    begin = time.process_time()  # CPU time, because other processes may run at the same time
    split_trajectories(rows, out="offsets")
    assert time.process_time() - begin < 1
