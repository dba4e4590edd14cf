"""Compare `HindsightSampler` with a plain list of each lane's rows."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from tallyroll.storage import HindsightSampler, MemmapStorage, open_storage
from tallyroll.storage.errors import ColumnsMissing, NoSlices, Overrun, SlotsMayChange
from tallyroll.storage.ext.sampling import hindsight as stretches

from lane_model import Model, models

GOALS = [("desired_goal",), ("next", "desired_goal")]
STRATEGIES = ["future", "final", "episode"]


def rows_of(model: Model) -> TensorDict:
    """Return rows whose steps lead from the previous row's number to the row's own.

    Goals are < 0.
    """
    rows = model.rows()
    number = rows["observation"]
    for key, value in (("achieved_goal", number - 1), ("desired_goal", -number - 1)):
        rows[key] = value
        rows["next", key] = number if key == "achieved_goal" else value
    return rows


def filled(model: Model, max_size: int | None = None, chunk: int = 40) -> MemmapStorage:
    storage = MemmapStorage(max_size=max_size)
    for part in rows_of(model).split(chunk):
        storage.extend(part, ids="fresh")
    return storage


def near(achieved: Any, desired: Any, rows: Any) -> Any:
    """Return a reward that encodes the goals in its arguments."""
    assert achieved.shape == desired.shape == (len(rows), 1)
    assert (rows["desired_goal"].numpy() == desired).all()
    return achieved * 1000 - desired


def allowed(model: Model, strategy: str, first: int = 0) -> dict[int, list[int]]:
    """Return the rows that may give each row its goal, from a loop over lanes."""
    found: dict[int, list[int]] = {}
    for rows in model.stretches(first):
        for place, row in enumerate(rows):
            found[row] = {"future": rows[place:], "final": rows[-1:], "episode": rows}[strategy]
    return found


@settings(max_examples=10)
@given(models(), st.sampled_from(STRATEGIES), st.sampled_from([None, 20, 64]))
def test_goals_are_of_the_trajectory_and_all_else_is_as_stored(
    model: Model, strategy: Any, max_size: int | None
) -> None:
    with filled(model, max_size, chunk=20) as storage:
        batch = HindsightSampler(storage, near, strategy=strategy, relabelled=0.7).sample(40)
        may = allowed(model, strategy, storage.span.start)
    row, goal = batch["collector", "row"], batch["collector", "goal_row"]
    new = goal >= 0
    assert new.sum() == 28
    assert all(g in may[r] for r, g in zip(row[new].tolist(), goal[new].tolist(), strict=True))
    want = rows_of(model)[row]
    for key in GOALS:
        want.get(key)[new, 0] = goal[new].double()
    want["next", "reward"][new, 0] = (row * 1000 - goal)[new].float()
    want["collector", "row"], want["collector", "goal_row"] = row, goal
    assert (want == batch).all()
    assert {*want.keys(True, True)} == {*batch.keys(True, True)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_size", [None, 50])
def test_each_row_and_each_goal_has_the_same_probability(
    strategy: Any, max_size: int | None
) -> None:
    model = Model.random(np.random.default_rng(1), rows=90, lanes=4, mean_length=9.0, skip=0.2)
    random = torch.Generator().manual_seed(0)
    draws = 60_000
    with filled(model, max_size) as storage:
        sampler = HindsightSampler(
            storage, near, strategy=strategy, relabelled=1.0, generator=random
        )
        batch = sampler.sample(draws)
        may = allowed(model, strategy, storage.span.start)
    pairs = batch["collector", "row"] * 1000 + batch["collector", "goal_row"]
    seen = dict(zip(*(each.tolist() for each in pairs.unique(return_counts=True)), strict=True))
    expected = {
        row * 1000 + goal: draws / len(may) / len(goals)
        for row, goals in may.items()
        for goal in goals
    }
    assert seen.keys() <= expected.keys()
    chi = sum((seen.get(pair, 0) - mean) ** 2 / mean for pair, mean in expected.items())
    free = len(expected) - 1
    assert free > 40
    assert abs(chi - free) < 5 * (2 * free) ** 0.5


def test_long_trajectories_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "_REACH", 2)
    monkeypatch.setattr(stretches, "_MOST_REACH", 4)
    monkeypatch.setattr(stretches, "_MOST_NUMBERS", 12)
    model = Model.random(np.random.default_rng(2), rows=300, lanes=2, mean_length=60.0, skip=0.0)
    with filled(model) as storage:
        batch = HindsightSampler(storage, near, strategy="final", relabelled=1).sample(200)
    may = allowed(model, "final")
    rows, goals = batch["collector", "row"].tolist(), batch["collector", "goal_row"].tolist()
    assert [may[row] for row in rows] == [[goal] for goal in goals]
    assert max(goal - row for row, goal in zip(rows, goals, strict=True)) > 40


def test_a_share_that_is_no_whole_number_is_exact_on_average() -> None:
    with filled(Model.random(np.random.default_rng(0), rows=50, lanes=2)) as storage:
        random = torch.Generator().manual_seed(0)
        sampler = HindsightSampler(storage, near, relabelled=0.25, generator=random)
        counts = [int((sampler.sample(3)["collector", "goal_row"] >= 0).sum()) for _ in range(300)]
        assert {*counts} == {0, 1}
        assert abs(sum(counts) / 300 - 0.75) < 0.1
        none = HindsightSampler(storage, near, relabelled=0).sample(9)
        assert (none["collector", "goal_row"] == -1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_goals_of_any_dtype(dtype: torch.dtype) -> None:
    """NumPy has no bfloat16: the functions get float32, which represents it exactly."""
    seen = []

    def reward(achieved: Any, desired: Any, rows: Any) -> Any:
        seen.append((achieved, rows["next", "achieved_goal"]))
        return (achieved == desired).astype("float32")

    model = Model.random(np.random.default_rng(3), rows=60, lanes=3)
    rows = rows_of(model)
    for key in ("achieved_goal", "desired_goal"):
        rows[key] = rows[key].to(dtype)
        rows["next", key] = rows["next", key].to(dtype)
    with MemmapStorage() as storage:
        storage.extend(rows, ids="fresh")
        batch = HindsightSampler(storage, reward, relabelled=1).sample(100)
    assert batch["desired_goal"].dtype is dtype
    ((achieved, column),) = seen
    assert achieved.dtype == (np.float32 if dtype is torch.bfloat16 else column.numpy().dtype)
    assert (torch.from_numpy(achieved).double() == column.double()).all()


def test_done_is_of_the_new_goal_where_that_is_asked() -> None:
    model = Model.random(np.random.default_rng(3), rows=200, lanes=3)
    own = [("next", name) for name in ("terminated", "truncated", "done")]
    with filled(model) as storage:
        sampler = HindsightSampler(storage, near, terminated=lambda a, d, rows: a == d)
        batch = sampler.sample(400)
        as_stored = HindsightSampler(storage, near).sample(400)
    row, goal = batch["collector", "row"], batch["collector", "goal_row"]
    want = rows_of(model)[row]
    new = goal >= 0
    want["next", "terminated"][new, 0] = (row == goal)[new]
    want["next", "done"] = want["next", "terminated"] | want["next", "truncated"]
    assert 0 < (row == goal).sum() < new.sum()
    assert all(torch.equal(batch[key], want[key]) for key in own)
    stored = rows_of(model)[as_stored["collector", "row"]]
    assert all(torch.equal(as_stored[key], stored[key]) for key in own)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_end_whose_observation_is_lost_gives_no_goal(strategy: Any) -> None:
    model = Model.random(np.random.default_rng(4), rows=200, lanes=3, mean_length=4.0)
    rows = rows_of(model)
    rows["collector", "next_valid"] = ~rows["next", "done"][:, 0]
    with MemmapStorage() as storage:
        storage.extend(rows, ids="fresh")
        batch = HindsightSampler(storage, near, strategy=strategy, relabelled=1).sample(600)
    may = {
        row: [goal for goal in goals if not model.ended(goal)]
        for row, goals in allowed(model, "future" if strategy == "final" else strategy).items()
    }
    if strategy == "final":
        may = {row: goals[-1:] for row, goals in may.items()}
    for row, goal in zip(
        *(batch["collector", k].tolist() for k in ("row", "goal_row")), strict=True
    ):
        assert goal in (may[row] or [-1])


def test_under_a_buffer_and_a_loader() -> None:
    model = Model.random(np.random.default_rng(5), rows=200, lanes=3)
    with filled(model, 100) as storage:
        sampler = HindsightSampler(storage, near)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
        batch = buffer.sample()
        row, goal = batch["collector", "row"], batch["collector", "goal_row"]
        new = goal >= 0
        assert torch.equal(batch["observation"][:, 0], row.double())
        assert torch.equal(storage.get(batch["index"])["observation"], batch["observation"])
        assert torch.equal(batch["next", "reward"][new, 0], (row * 1000 - goal)[new].float())
        assert all(torch.equal(batch[key][new, 0], goal[new].double()) for key in GOALS)

        def draw(random: torch.Generator) -> TensorDict:
            found: TensorDict = sampler.sample(16, generator=random)
            return found

        one, two = (
            [*storage.loader(draw, workers=workers, seed=3, batches=3)] for workers in (0, 2)
        )
        assert all((a == b).all() for a, b in zip(one, two, strict=True))


def test_a_ring_may_go_round_meanwhile() -> None:
    model = Model.random(np.random.default_rng(6), rows=20_000, lanes=4, mean_length=30.0)
    rows = rows_of(model).split(50)
    with MemmapStorage(max_size=2000) as storage:
        for part in rows[:40]:
            storage.extend(part, ids="fresh")
        wrong: list[int] = []
        done = threading.Event()

        def draw() -> None:
            sampler = HindsightSampler(storage, near, strategy="episode")
            while not done.is_set():
                batch = sampler.sample(64)
                row, goal = batch["collector", "row"], batch["collector", "goal_row"]
                new = goal >= 0
                sound = torch.equal(batch["observation"][:, 0], row.double())
                sound &= torch.equal(batch["desired_goal"][new, 0], goal[new].double())
                same = torch.from_numpy(model.ids)
                wrong.append(not sound or not torch.equal(same[row[new]], same[goal[new]]))

        reader = threading.Thread(target=draw)
        reader.start()
        try:
            for number, part in enumerate(rows[40:]):
                storage.extend(part, ids="fresh")
                while len(wrong) < number // 30 and reader.is_alive():
                    time.sleep(1e-4)
        finally:
            done.set()
            reader.join(30)
        assert len(wrong) > 10
        assert not any(wrong)


def test_rows_that_are_gone_since_they_were_drawn_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [*rows_of(Model.random(np.random.default_rng(7), rows=900, lanes=2)).split(60)]
    with MemmapStorage(max_size=120) as storage:
        for _ in range(2):
            storage.extend(parts.pop(0), ids="fresh")
        left = 8
        sampler = HindsightSampler(storage, near, strategy="final")
        drawn, draw = [], sampler._draw

        def overtaken(count: int, random: torch.Generator | None) -> Any:
            drawn.append(draw(count, random))
            if len(parts) > left:
                storage.extend(parts.pop(0), ids="fresh")
            return drawn[-1]

        monkeypatch.setattr(sampler, "_draw", overtaken)
        batch = sampler.sample(64)
        row, goal = batch["collector", "row"], batch["collector", "goal_row"]
        assert len(drawn) > 1
        assert row.min() >= storage.span.start
        assert torch.equal(batch["observation"][:, 0], row.double())
        assert torch.equal(batch["desired_goal"][goal >= 0, 0], goal[goal >= 0].double())
        left = 0
        monkeypatch.setattr("tallyroll.storage.ext.sampling.hindsight._PATIENCE_SECONDS", 0.0)
        with pytest.raises(Overrun, match="64 rows and their goals"):
            sampler.sample(64)


# --- bad input ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored() -> Any:
    with filled(Model.random(np.random.default_rng(0), rows=50, lanes=2)) as storage:
        yield storage


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"reward": None}, TypeError, "reward: expected a function of achieved goals, .* got None"),
        ({"terminated": 3}, TypeError, "terminated: expected a function .* got 3"),
        ({"relabelled": 1.5}, ValueError, "relabelled: expected a share from 0 to 1, got 1.5"),
        ({"relabelled": float("nan")}, ValueError, "share from 0 to 1, got nan"),
        ({"relabelled": True}, ValueError, "share from 0 to 1, got True"),
        ({"strategy": "last"}, ValueError, "'future', 'final', 'episode', got 'last'"),
        (
            {"desired": "goal"},
            ColumnsMissing,
            "has no goal. Relabeling goals .* Name the goals by desi",
        ),
        ({"achieved": ("a", "b")}, ColumnsMissing, "has no next/a/b. Relabeling"),
        ({"achieved": ("collector", "lane")}, ColumnsMissing, "has no next/collector/lane"),
        ({"desired": "action"}, ValueError, r"got action torch.int64 \[\] and next/achieved_goal"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(
    stored: MemmapStorage, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        HindsightSampler(stored, **{"reward": near, **options})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda m: 1.0,
            r"expected values of shape \[8, 1\] for all \d+ rows at once, got shape \[\]",
        ),
        (lambda m: np.zeros((m, 2)), r"got shape \[8, 2\]"),
        (lambda m: np.full(m, np.nan), "infinite or NaN"),
        (lambda m: "many", "reward returned str, which cannot be converted to an array"),
        (lambda m: None, "reward returned NoneType, which cannot be converted to an array"),
    ],
)
def test_a_reward_returns_one_number_a_row(
    stored: MemmapStorage, returned: Any, message: str
) -> None:
    sampler = HindsightSampler(stored, lambda a, d, rows: returned(len(a)))
    with pytest.raises(ValueError, match=message):
        sampler.sample(10)
    ends = HindsightSampler(stored, near, terminated=lambda a, d, rows: np.full(len(a), 0.5))
    with pytest.raises(ValueError, match=r"terminated returned torch.float64 values that torch.bo"):
        ends.sample(10)


def test_what_there_is_to_draw_from_is_checked(stored: MemmapStorage, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a storage of tallyroll.storage, got list"):
        HindsightSampler([], near)  # type: ignore[arg-type]
    for count in (0, -1, 2.0, None):
        with pytest.raises(ValueError, match="number of rows: expected a whole number above 0"):
            HindsightSampler(stored, near).sample(count)
    with MemmapStorage() as storage, pytest.raises(ValueError, match="Give both the same storage"):
        HindsightSampler(stored, near).sample(storage, 3)
    with MemmapStorage(tmp_path / "ring", max_size=30) as storage:
        sampler = HindsightSampler(storage, near)
        with pytest.raises(NoSlices, match="no rows yet"):
            sampler.sample(3)
        storage.extend(rows_of(Model.random(np.random.default_rng(0), rows=30, lanes=2)))
        assert sampler.sample(3).shape == (3,)
        with open_storage(tmp_path / "ring") as reading:
            assert HindsightSampler(reading, near).sample(3).shape == (3,)
            with pytest.raises(SlotsMayChange, match=r"Call sample\(n\)"):
                HindsightSampler(reading, near).sample(reading, 3)
