"""Random runs store exactly the first N rows in slot order, in exact batches.

The ledger of each run balances.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector, evaluate
from tallyroll.collector.rollout import slab_plan
from tallyroll.storage import MemmapStorage, verify

from collect_kit import ByObservation, assert_same, balanced, collect, joined
from oracles import (
    OracleTorchEnv,
    OracleVectorEnv,
    check_rows,
    expected_ledger,
    make_oracle_vec,
)
from pairs import each_pair

Driver = Literal["next", "avoid", "same", "disabled", "native", "torch"]
DRIVERS: list[Driver] = ["next", "avoid", "same", "disabled", "native", "torch"]
SPENDS_SLOTS = ("next", "native")
MODES = {
    "next": AutoresetMode.NEXT_STEP,
    "avoid": AutoresetMode.NEXT_STEP,
    "same": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}

runs = given(
    frames=st.integers(1, 90),
    lanes=st.integers(1, 5),
    per_batch=st.integers(1, 40),
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    driver=st.sampled_from(DRIVERS),
)
few = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def make(driver: Driver, lanes: int, lengths: Any) -> tuple[Any, Any]:
    """Return a source for a collector, and a function that returns the number of steps taken."""
    if driver == "native":
        native = OracleVectorEnv(lanes, lengths, ends="mixed")
        return native, lambda: native.steps_taken
    if driver == "torch":
        torch_env = OracleTorchEnv(lanes, lengths, ends="mixed")
        return torch_env, lambda: torch_env.steps_taken
    vector = make_oracle_vec(lanes, lengths, mode=MODES[driver], ends="mixed")
    env = GymnasiumVectorEnv(vector, reset_slots="avoid" if driver == "avoid" else "mask")
    return env, lambda: vector.get_attr("steps_taken")


@runs
@few
def test_stored_is_what_was_asked_and_the_first_in_slot_order(
    frames: int, lanes: int, per_batch: int, lengths: Any, driver: Driver
) -> None:
    env, steps_taken = make(driver, lanes, lengths)
    batches: list[TensorDictBase] = []
    with SyncCollector(
        env, ByObservation(), frames_per_batch=per_batch, total_frames=frames
    ) as collector:
        length = len(collector)
        for batch in collector:
            batches.append(batch)
            assert len(collector) == length - len(batches)
            ledger = collector.ledger
            assert balanced(ledger)
            assert ledger.executed == sum(steps_taken())
            assert ledger.stored == sum(map(len, batches))
            wanted = expected_ledger(
                lanes, lengths, ledger.stored, reset_slots=driver in SPENDS_SLOTS
            )
            assert (ledger.slots, ledger.reset_slots) == (wanted.slots, wanted.reset_slots)
            assert (
                np.bincount(joined(batches)["collector", "lane"], minlength=lanes).tolist()
                == wanted.stored_by_lane
            )
        assert (length, len(collector)) == (len(batches), 0)
        ledger = collector.ledger
    whole, rest = divmod(frames, per_batch)
    assert [len(batch) for batch in batches] == [per_batch] * whole + [rest] * (rest > 0)
    assert ledger.carried == 0
    assert ledger.stored == frames
    assert ledger.episodes_complete == wanted.episodes_complete == len(collector.episodes)
    rows = check_rows(joined(batches), lengths, ends="mixed", from_start=True)
    open_lanes = sum(
        not rows.ended[rows.lane == lane][-1] for lane in range(lanes) if lane in rows.lane
    )
    assert ledger.episodes_cut == open_lanes


@pytest.mark.slow
@runs
@few
def test_a_row_lies_in_the_batch_of_its_slot(
    frames: int, lanes: int, per_batch: int, lengths: Any, driver: Driver
) -> None:
    env, _ = make(driver, lanes, lengths)
    batches, _ = collect(env, frames_per_batch=per_batch, total_frames=frames)
    for index, batch in enumerate(batches):
        check_rows(batch, lengths, ends="mixed")
        upto = expected_ledger(
            lanes,
            lengths,
            min(frames, (index + 1) * per_batch),
            reset_slots=driver in SPENDS_SLOTS,
        )
        got = joined(batches[: index + 1])["collector", "lane"]
        assert np.bincount(got, minlength=lanes).tolist() == upto.stored_by_lane
        lane, step = batch["collector", "lane"].numpy(), batch["collector", "step"].numpy()
        assert (np.diff(lane) >= 0).all()
        ended = batch["next", "done"].reshape(-1).numpy()
        inside = (np.diff(lane) == 0) & ~ended[:-1]
        assert (np.diff(step)[inside] == 1).all()
        assert (step[1:][(np.diff(lane) == 0) & ended[:-1]] == 0).all()


@runs
@settings(few, max_examples=20)
def test_a_trajectory_id_says_lane_and_ordinal(
    frames: int, lanes: int, per_batch: int, lengths: Any, driver: Driver
) -> None:
    env, _ = make(driver, lanes, lengths)
    batches, _ = collect(env, frames_per_batch=per_batch, total_frames=frames)
    rows = joined(batches)
    checked = check_rows(rows, lengths, ends="mixed")
    assert (rows["collector", "traj_ids"].numpy() == checked.episode * lanes + checked.lane).all()


@each_pair(random_frames=[0, 17], driver=DRIVERS, slots=[1, 4, 7])
def test_batches_longer_than_the_slab_are_the_same(
    driver: Driver, slots: int, random_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [[3, 1, 4], [1, 1, 2], [5]]
    kwargs: dict[str, Any] = {
        "frames_per_batch": 50,
        "total_frames": 130,
        "seed": 4,
        "init_random_frames": random_frames,
    }
    whole, first = collect(make(driver, 3, lengths)[0], ByObservation(), **kwargs)
    monkeypatch.setattr(slab_plan, "MOST_SLOTS", slots)
    pieces, second = collect(make(driver, 3, lengths)[0], ByObservation(), **kwargs)
    assert first.ledger == second.ledger
    for one, other in zip(whole, pieces, strict=True):
        assert_same(one, other)
        check_rows(other, lengths, ends="mixed")


@pytest.mark.parametrize("driver", DRIVERS)
def test_one_frame_a_batch(driver: Driver) -> None:
    batches, _ = collect(
        make(driver, 3, [[2, 1]])[0], ByObservation(), frames_per_batch=1, total_frames=20
    )
    assert [len(batch) for batch in batches] == [1] * 20
    check_rows(joined(batches), [[2, 1]], ends="mixed", from_start=True)
    assert all(batch["next", "done"].all() for batch in batches)
    assert all(
        bool(batch["collector", "cut"])
        != bool(batch["next", "terminated"] | batch["next", "truncated"])
        for batch in batches
    )


@pytest.mark.parametrize("driver", ["next", "native"])
def test_policy_calls_on_reset_slots_are_counted(driver: Driver) -> None:
    _, collector = collect(
        make(driver, 2, [[1]])[0], ByObservation(), frames_per_batch=4, total_frames=12
    )
    assert collector.ledger.reset_slots == collector.ledger.policy_calls_on_reset_slots > 0


@pytest.mark.parametrize("driver", ["avoid", "same", "disabled", "torch"])
def test_no_policy_call_is_wasted_where_there_are_no_reset_slots(driver: Driver) -> None:
    _, collector = collect(
        make(driver, 2, [[1]])[0], ByObservation(), frames_per_batch=4, total_frames=12
    )
    assert collector.ledger.reset_slots == collector.ledger.policy_calls_on_reset_slots == 0


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_envs": 4, "frames_per_batch": 1000, "seed": 0}
    with SyncCollector("CartPole-v1", total_frames=2500, **options) as collector:
        assert repr(collector) == "SyncCollector(4 lanes, 0 of 2,500 transitions)"
        assert repr(collector.episodes) == "EpisodeLog(0 episodes)"
        next(iter(collector))
        assert repr(collector) == "SyncCollector(4 lanes, 1,000 of 2,500 transitions)"
        newest = collector.episodes[-1]
        count = len(collector.episodes)
        assert repr(collector.episodes) == f"EpisodeLog({count} episodes, the newest: {newest})"
    assert repr(collector) == "SyncCollector(4 lanes, 1,000 of 2,500 transitions, ended)"
    with (
        MemmapStorage(tmp_path / "rows") as storage,
        SyncCollector("CartPole-v1", total_frames=-1, storage=storage, **options) as collector,
    ):
        collector.collect(10)
        assert repr(collector) == f"SyncCollector(4 lanes, 10 transitions, in {storage!r})"
        assert repr(storage).endswith("rows', mode='create', 10 rows of 75 bytes)")
    assert repr(collector).endswith(", closed), ended)")
    assert repr(SyncCollector.__new__(SyncCollector)) == "SyncCollector(not begun)"
    found = verify(tmp_path / "rows")
    checks = f"{len(found.checked)} checks made, skipped: {', '.join(found.skipped)}"
    assert repr(found) == f"Report({str(tmp_path / 'rows')!r}, 10 rows, sound, {checks})"


def test_what_a_ring_and_an_evaluation_say_of_themselves(tmp_path: Path) -> None:
    ring = MemmapStorage(tmp_path / "ring", max_size=8)
    assert repr(ring).endswith("mode='create', 0 rows, the newest of 0, in a ring of 8)")
    with SyncCollector("CartPole-v1", frames_per_batch=5, total_frames=10, storage=ring) as one:
        one.collect(10)
        assert repr(one).startswith("SyncCollector(1 lane, 10 of 10 transitions, in Memmap")
        assert repr(ring).endswith("8 rows of 75 bytes, the newest of 10, in a ring of 8)")
    ring.close()
    result = evaluate(None, "CartPole-v1", episodes=2, seed=0)
    assert repr(result).startswith(f"Evaluation(2 episodes, mean return {result.mean_return:.5g}, ")
