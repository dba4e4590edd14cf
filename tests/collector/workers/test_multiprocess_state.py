"""A saved run continues with any number of workers, in any mode, to exactly N rows."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.envs import Compose, RewardScaling, RewardSum, TransformedEnv, VecNormV2

from tallyroll.collector import SyncCollector
from tallyroll.collector.base import Collector
from tallyroll.collector.errors import StateError
from tallyroll.storage import MemmapStorage

from collect_kit import Batches, ByObservation, assert_same, flat, joined, through_a_file
from oracles import OracleTorchEnv, check_rows
from worker_kit import (
    DISABLED,
    LENGTHS,
    NEXT,
    SAME,
    Run,
    Versioned,
    chosen_by,
    collect_all,
    drawing,
    lanes_of_workers,
    slow_factories,
    start,
    sync_collector,
    worker_collector,
)

BUDGET: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 61, "seed": 3}
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "sync 2": {"workers": 2, "mode": "sync"},
    "sync 3": {"workers": 3, "mode": "sync"},
    "async 1": {"workers": 1, "mode": "async"},
    "async 3": {"workers": 3, "mode": "async"},
}


def collector_of(way: str, source: str, policy: Any = None, **kwargs: Any) -> Collector:
    options = {**BUDGET, **kwargs, **WAYS[way]}
    if "workers" in options:
        return worker_collector(source, options.pop("workers"), policy, **options)
    return sync_collector(source, policy, **options)


def in_two_halves(
    ways: tuple[str, str], source: str, policy: Any = None, batches: int = 3, **kwargs: Any
) -> tuple[Run, Run]:
    """Interrupt a run after some batches and continue it from its state; return both runs."""
    one = Run([], [], collector_of(ways[0], source, policy, **kwargs))
    state: dict[str, Any] = {}
    with one.collector:
        for batch in one.collector:
            one.batches.append(batch)
            if len(one.batches) == batches:
                state = through_a_file(one.collector.state_dict())
                break
    stored = sum(map(len, one.batches))
    assert (state["ledger"]["stored"], state["seed"]) == (stored, 3)
    assert state["next_id"] > max(batch["collector", "traj_ids"].max() for batch in one.batches)
    other = collector_of(ways[1], source, policy, **kwargs)
    other.load_state_dict(state)
    return one, collect_all(other)


PAIRS = [
    ("one", "sync 2"),
    ("sync 2", "one"),
    ("sync 2", "sync 3"),
    ("sync 3", "async 1"),
    ("async 3", "sync 2"),
    ("async 3", "async 3"),
    ("async 3", "one"),
    ("one", "async 3"),
]


@pytest.mark.parametrize(
    ("ways", "source"), [(pair, (DISABLED, NEXT)[turn % 2]) for turn, pair in enumerate(PAIRS)]
)
def test_a_run_that_goes_on_ends_at_the_exact_total(ways: tuple[str, str], source: str) -> None:
    kwargs = {"oracle": {"kind": "seeded"}}
    one, other = in_two_halves(ways, source, ByObservation("seeded"), **kwargs)
    assert [len(batch) for batch in one.batches + other.batches] == [7] * 8 + [5]
    ledger = other.collector.ledger
    ledger.check()
    assert (ledger.stored, ledger.carried, ledger.incarnation) == (61, 0, 1)
    for run in (one, other):
        check_rows(joined(run.batches), LENGTHS, kind="seeded", ends="mixed")
    ids = [set(joined(run.batches)["collector", "traj_ids"].tolist()) for run in (one, other)]
    assert not ids[0] & ids[1]
    noise = joined(one.batches + other.batches)["observation"][:, 3]
    assert len(noise.unique()) == 61, "a seed was used twice"


@pytest.mark.slow
@pytest.mark.parametrize(("source", "policy"), [(DISABLED, None), (SAME, ByObservation("seeded"))])
def test_in_step_it_goes_on_as_one_process_would(source: str, policy: Any) -> None:
    kwargs = {"oracle": {"kind": "seeded"}, "init_random_frames": 30}
    wanted = in_two_halves(("one", "one"), source, policy, **kwargs)
    for ways in (("sync 2", "sync 3"), ("one", "sync 2"), ("sync 3", "one")):
        for mine, theirs in zip(wanted, in_two_halves(ways, source, policy, **kwargs), strict=True):
            for batch, again in zip(mine.batches, theirs.batches, strict=True):
                assert_same(batch, again)
            assert theirs.counts == mine.counts


@pytest.mark.parametrize(
    "ways",
    [
        ("one", "sync 2"),
        ("sync 3", "async 1"),
        pytest.param(("async 3", "sync 2"), marks=pytest.mark.slow),
        pytest.param(("async 3", "one"), marks=pytest.mark.slow),
    ],
)
def test_budgets_of_episodes_and_random_frames_go_on(ways: tuple[str, str]) -> None:
    runs = in_two_halves(ways, SAME, ByObservation(), total_frames=None, total_episodes=25)
    assert runs[1].collector.ledger.episodes_complete == 25
    ended = 0
    for run in runs:
        rows = joined(run.batches)
        ended += int(check_rows(rows, LENGTHS, ends="mixed").ended.sum())
    assert ended == 25
    runs = in_two_halves(ways, SAME, ByObservation(), init_random_frames=30)
    rows = joined(runs[0].batches + runs[1].batches)
    assert int((rows["collector", "policy_version"] == -1).sum()) == 30
    assert runs[1].collector.ledger.random == 30


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_state_is_there_at_once_while_a_worker_is_in_a_slow_step(mode: str) -> None:
    """The state contains the delivered rows, from which a run ends at exactly N."""
    slow = {"seconds": 1.5 if mode == "async" else 0.01, "slow": [0]}
    options = {**BUDGET, "total_frames": 210, "mode": mode}
    batches: Batches = []
    states: list[tuple[int, dict[str, Any]]] = []
    with start(slow_factories(2, **slow), ByObservation(), **options) as collector:
        for batch in collector:
            batches.append(batch)
            before = time.monotonic()
            state = collector.state_dict()
            assert time.monotonic() - before < 1.2  # shorter than the slow step
            states.append((len(batches), through_a_file(state)))
            if len(batches) == 8:
                break
    for count, state in states:
        counts = state["ledger"]
        assert counts["stored"] == 7 * count
        assert counts["executed"] == counts["stored"] + counts["discarded"] + counts["carried"]
    rows = check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)
    if mode == "async":
        assert 0 not in rows.lane
    count, state = states[4]
    with worker_collector(DISABLED, 2, ByObservation(), **options) as other:
        other.load_state_dict(state)
        rest = list(other)
    assert [len(batch) for batch in rest] == [7] * (30 - count)
    assert other.ledger.stored == 210
    other.ledger.check()
    check_rows(joined(rest), LENGTHS, ends="mixed")
    ids = [set(joined(part)["collector", "traj_ids"].tolist()) for part in (batches[:count], rest)]
    assert not ids[0] & ids[1]


def test_random_frames_that_were_not_delivered_are_drawn_again() -> None:
    """Some of the first leases, of random frames, are not yet delivered when the state is saved."""
    options = {**BUDGET, "init_random_frames": 30}
    slow = slow_factories(2, seconds=1.0, slow=[0])
    with start(slow, ByObservation(), **options, mode="async") as one:
        first = [batch for _, batch in zip(range(2), one, strict=False)]
        saved = through_a_file(one.state_dict())
    random = int((joined(first)["collector", "policy_version"] == -1).sum())
    assert random < 30
    with worker_collector(DISABLED, 2, ByObservation(), **options) as other:
        other.load_state_dict(saved)
        rows = joined(first + list(other))
    assert int((rows["collector", "policy_version"] == -1).sum()) == 30
    assert other.ledger.random == 30


@pytest.mark.parametrize("ways", [("sync 2", "sync 3"), ("one", "async 3"), ("async 1", "one")])
def test_the_policy_and_its_version_go_on(ways: tuple[str, str]) -> None:
    saved: dict[str, Any] = {}
    with collector_of(ways[0], SAME, Versioned()) as one:
        one.update_policy_weights_(Versioned().set_to(3))
        one.update_policy_weights_(Versioned().set_to(6))
        next(iter(one))
        saved = through_a_file(one.state_dict())
    with collector_of(ways[1], SAME, Versioned()) as other:
        other.load_state_dict(saved)
        assert other.policy_version == 2
        batch = next(iter(other))
    assert set(batch["collector", "policy_version"].tolist()) == {2}
    assert torch.equal(batch["low"], torch.full((7,), 6.0))
    assert torch.equal(batch["low"], batch["high"])
    assert torch.equal(batch["action"], chosen_by(batch, torch.tensor(6)))


def test_draws_of_workers_go_on_from_a_state_alike() -> None:
    kwargs = {"frames_per_batch": 40, "total_frames": 120}
    with worker_collector(SAME, 2, drawing, **{**BUDGET, **kwargs}) as one:
        first = next(iter(one))
        saved = through_a_file(one.state_dict())
    runs = []
    for seed in (7, 8):
        with worker_collector(SAME, 2, drawing, **{**BUDGET, **kwargs, "seed": seed}) as other:
            other.load_state_dict(saved)
            runs.append(list(other))
    for mine, theirs in zip(*runs, strict=True):
        assert_same(mine, theirs)
    assert not torch.equal(runs[0][0]["action"], first["action"])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_states_of_the_beginning_and_of_the_end(mode: str) -> None:
    with worker_collector(SAME, 2, ByObservation(), **BUDGET, mode=mode) as one:
        beginning = through_a_file(one.state_dict())
        whole = list(one)
        end = through_a_file(one.state_dict())
        with pytest.raises(StateError, match="this collector has already collected"):
            one.load_state_dict(beginning)
    with worker_collector(SAME, 3, ByObservation(), **BUDGET, mode=mode) as other:
        other.load_state_dict(beginning)
        assert [len(batch) for batch in other] == [len(batch) for batch in whole]
    with worker_collector(SAME, 2, ByObservation(), **BUDGET, mode=mode) as other:
        other.load_state_dict(end)
        assert list(other) == []
        assert other.ledger.stored == 61
    with (
        worker_collector(SAME, 2, None, **BUDGET, mode=mode) as other,
        pytest.raises(StateError, match="the state was saved with a policy, unlike the state"),
    ):
        other.load_state_dict(beginning)


# --- storages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [SAME, pytest.param(NEXT, marks=pytest.mark.slow)])
def test_a_stored_run_is_resumed_with_other_numbers_of_workers(source: str, tmp_path: Any) -> None:
    batches: Batches = []
    plan = [("one", 3), ("sync 3", 5), ("async 1", 6), ("async 3", 7), ("sync 2", 100)]
    for number, (way, stop) in enumerate(plan):
        options = {"storage": tmp_path / "s", "resume": number > 0}
        with collector_of(way, source, ByObservation("seeded"), **options, **SEEDED) as collector:
            assert (collector.ledger.seed, collector.ledger.incarnation) == (3, number)
            for batch in collector:
                batches.append(batch)
                collector.ledger.check()
                if len(batches) == stop:
                    break
    assert [len(batch) for batch in batches] == [7] * 8 + [5]
    assert collector.ledger.stored == 61
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        rows = storage.get(slice(None)).clone()
        assert_same(rows, joined(batches))
        runs = storage.manifest["runs"]
    assert [run["incarnation"] for run in runs] == [0, 1, 2, 3, 4]
    assert [run["call"].get("num_workers") for run in runs] == [None, 3, 1, 3, 2]
    assert [run["call"].get("mode") for run in runs] == [None, "sync", "async", "async", "sync"]
    assert len(rows["observation"][:, 3].unique()) == 61
    begin = 0
    for stop in (3, 5, 6, 7, 9):
        check_rows(
            joined(batches[begin:stop]), LENGTHS, kind="seeded", ends="mixed", from_start=True
        )
        begin = stop


SEEDED = {"oracle": {"kind": "seeded"}}


def test_in_step_a_resumed_run_is_that_of_one_process(tmp_path: Any) -> None:
    def resumed(folder: Path, ways: tuple[str, ...]) -> list[Batches]:
        found: list[Batches] = []
        for number, way in enumerate(ways):
            options = {"storage": folder, "resume": number > 0, **SEEDED}
            run = collect_all(
                collector_of(way, DISABLED, ByObservation("seeded"), **options),
                3 if number < len(ways) - 1 else None,
            )
            found.append(run.batches)
        return found

    one = resumed(tmp_path / "one", ("one", "one", "one"))
    many = resumed(tmp_path / "many", ("sync 3", "one", "sync 2"))
    for mine, theirs in zip(one, many, strict=True):
        for batch, again in zip(mine, theirs, strict=True):
            assert_same(batch, again)


# --- transforms with a state --------------------------------------------------------------------


def normed(first: int, lanes: int) -> TransformedEnv:
    """Return an environment whose state depends on all its observations."""
    norm = VecNormV2(in_keys=["observation"], out_keys=["normed"])
    return TransformedEnv(OracleTorchEnv(lanes, LENGTHS, first_lane=first, ends="mixed"), norm)


def scaled(first: int, lanes: int, loc: float = 0.5) -> TransformedEnv:
    """Return an environment whose state is in buffers."""
    transforms = Compose(RewardScaling(loc=loc, scale=2.0), RewardSum())
    base = OracleTorchEnv(lanes, LENGTHS, first_lane=first, ends="mixed")
    return TransformedEnv(base, transforms)


def transformed(make: Any, workers: int, **kwargs: Any) -> Collector:
    options = {**BUDGET, "frames_per_batch": 30, "total_frames": 90, **kwargs}
    makes = [partial(make, first, own) for first, own in lanes_of_workers(6, workers)]
    if workers == 1 and "mode" not in options:
        return SyncCollector(makes[0], **options)
    return start(makes, **options)


def count_of(state: Any) -> float:
    """Return how often a normalizer was updated."""
    (count,) = (value for name, value in flat(state).items() if ".count." in name)
    return float(count)


@pytest.mark.filterwarnings("ignore:VecNormV2. expected statistics of all lanes")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_states_of_transforms_are_those_after_the_last_step_and_go_on(mode: str) -> None:
    with transformed(normed, 2, mode=mode, layout="torchrl") as one:
        batches = iter(one)
        next(batches)
        first = through_a_file(one.state_dict())
        next(batches)
        saved = through_a_file(one.state_dict())
    assert len(first["env"]) == len(saved["env"]) == 2
    assert flat(saved["env"][0]) != flat(saved["env"][1])
    before, after = ([count_of(each) for each in state["env"]] for state in (first, saved))
    if mode == "sync":
        assert before[0] < after[0]
        assert before[1] < after[1]
    else:
        assert sum(before) <= sum(after)
    with transformed(normed, 2, mode=mode, layout="torchrl") as other:
        other.load_state_dict(saved)
        assert [flat(each) for each in other.state_dict()["env"]] == [
            flat(each) for each in saved["env"]
        ]
        batch = next(iter(other))
        later = other.state_dict()["env"]
    assert sum(map(count_of, later)) > sum(map(count_of, saved["env"]))
    assert batch.numel() == 30


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_states_of_transforms_with_another_number_of_workers(before: int, after: int) -> None:
    """Each worker loads one state. Sums of rewards restart with each trajectory."""
    with transformed(partial(scaled, loc=1.5), before) as one:
        next(iter(one))
        saved = through_a_file(one.state_dict())
    with transformed(scaled, after) as other:
        other.load_state_dict(saved)
        rows = joined(list(other))
    assert len(rows) == 60
    base = rows.clone()
    base["next", "reward"] = (rows["next", "reward"] - 1.5) / 2.0
    check_rows(base, LENGTHS, ends="mixed")
    begin = rows["collector", "step"] == 0
    assert torch.equal(rows["next", "episode_reward"][begin], rows["next", "reward"][begin])
