"""New weights reach every worker as a whole, and each row has the version that chose its action."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.nn import TensorDictSequential as Sequential
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule

from tallyroll.collector.errors import ArgumentError

from collect_kit import joined
from devices_kit import on_gpu
from oracles import check_rows
from pairs import each_pair, in_gate
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    Versioned,
    chosen_by,
    collect_all,
    drawing,
    slow_factories,
    start,
    sync_collector,
    worker_collector,
)

BUDGET: dict[str, Any] = {"frames_per_batch": 15, "total_frames": 300, "seed": 3}
LARGE = 400_000
"""Weights of 1.6 MB, because copying them takes much longer than a step."""


def assert_each_row_by_its_version(rows: TensorDictBase) -> torch.Tensor:
    """Check that weights and inputs of the policy equal the version, and return the versions."""
    version = rows["collector", "policy_version"]
    for name in ("low", "high"):
        assert torch.equal(rows[name], version.float()), f"weights were mixed: {name}"
    assert torch.equal(rows["mark"], version.float().unsqueeze(-1).expand(-1, 2)), "a buffer"
    assert torch.equal(rows["action"], chosen_by(rows, version))
    return version


def in_order_of_versions(rows: TensorDictBase, lanes: int = LANES) -> None:
    for lane in range(lanes):
        own = rows["collector", "policy_version"][rows["collector", "lane"] == lane]
        assert (own.diff() >= 0).all(), f"lane {lane}: versions go back"


def updated(mode: str, source: Any = SAME, entries: int = 7, **kwargs: Any) -> list[TensorDictBase]:
    """Return the batches of a run that updates its weights `times` times after each batch."""
    policy, batches, times = Versioned(entries), [], kwargs.pop("times", 1)
    with worker_collector(source, 2, policy, **{**BUDGET, **kwargs}, mode=mode) as collector:
        for batch in collector:
            batches.append(batch)
            for _ in range(times):
                version = collector.policy_version + 1
                collector.update_policy_weights_(policy.set_to(version))
                assert collector.policy_version == version
    check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)
    return batches


@pytest.mark.parametrize("source", [SAME, NEXT, "torch"])
def test_in_step_every_action_after_an_update_is_by_the_new_weights(source: str) -> None:
    """Without reset slots, a batch has three slots and no carried rows."""
    for number, batch in enumerate(updated("sync", source)):
        version = assert_each_row_by_its_version(batch)
        carried = version == number - 1
        if source != NEXT:
            assert not carried.any()
        assert carried.sum() < LANES
        assert (carried | (version == number)).all()


def test_in_step_what_was_carried_says_so() -> None:
    batches = updated("sync", DISABLED, frames_per_batch=17)
    in_order_of_versions(joined(batches))
    held = 0
    for number, batch in enumerate(batches):
        version = assert_each_row_by_its_version(batch)
        old = version < number
        assert (version[old] == number - 1).all()
        assert int(old.sum()) == held
        held = (held - 17) % LANES


def test_in_step_updates_give_the_data_of_one_process() -> None:
    runs = []
    for collector in (
        sync_collector(NEXT, Versioned(), **BUDGET),
        worker_collector(NEXT, 3, Versioned(), **BUDGET),
    ):
        batches = []
        with collector:
            for batch in collector:
                batches.append(batch)
                if len(batches) % 3 == 0:
                    collector.update_policy_weights_(Versioned().set_to(len(batches)))
        runs.append((batches, collector))
    for mine, theirs in zip(runs[0][0], runs[1][0], strict=True):
        assert (mine == theirs).all()
    assert list(runs[0][1].episodes) == list(runs[1][1].episodes)
    assert runs[0][1].ledger.counts() == runs[1][1].ledger.counts()


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("source", [DISABLED, "serial"])
def test_in_step_new_weights_arrive_before_a_slot_in_parts(source: str, size: int) -> None:
    options = {"surplus": "never_step", "frames_per_batch": size, "total_frames": 12 * size}
    for number, batch in enumerate(updated("sync", source, **options)):
        version = assert_each_row_by_its_version(batch)
        assert (version == number).all()


@each_pair(random=[3, 8], source=[SAME, "serial"], mode=["sync", "async"])
def test_new_weights_are_there_before_a_slot_of_both_kinds(
    source: str, random: int, mode: str
) -> None:
    """The weights are new before the first slot, in which some lanes act at random."""
    policy = Versioned()
    with worker_collector(source, 2, policy, **BUDGET, mode=mode, init_random_frames=random) as run:
        for version in (1, 2):
            policy.set_to(version)
            run.update_policy_weights_()
        rows = joined(list(run))
    drawn = rows["collector", "policy_version"] == -1
    assert int(drawn.sum()) == random
    assert set(assert_each_row_by_its_version(rows[~drawn]).tolist()) == {2}
    assert rows["low"][drawn].eq(0).all()


@pytest.mark.parametrize(("source", "entries"), in_gate([SAME, "torch"], [7, LARGE]))
def test_out_of_step_no_action_is_chosen_by_half_of_new_weights(source: str, entries: int) -> None:
    times = 8 if entries < LARGE else 4  # some versions are superseded before a worker loads them
    batches = updated("async", source, entries, total_frames=900, times=times)
    rows = joined(batches)
    version = assert_each_row_by_its_version(rows)
    in_order_of_versions(rows)
    assert len(version.unique()) > 20
    for number, batch in enumerate(batches):  # never newer than the published weights
        assert (batch["collector", "policy_version"] <= number * times).all()


def test_out_of_step_new_weights_are_taken_in_the_middle_of_a_lease() -> None:
    """Leases are long and steps slow: the next action uses the update, not only the next lease."""
    policy, batches = Versioned(), []
    options = {**BUDGET, "frames_per_batch": 100, "total_frames": 400}
    with start(slow_factories(2, seconds=0.002), policy, mode="async", **options) as collector:
        for number, batch in enumerate(collector, start=1):
            batches.append(batch)
            collector.update_policy_weights_(policy.set_to(number))
    rows = joined(batches)
    version = assert_each_row_by_its_version(rows)
    in_order_of_versions(rows)
    assert set(version.tolist()) == {0, 1, 2, 3}
    lane = rows["collector", "lane"]
    within = [
        len(batch["collector", "policy_version"][batch["collector", "lane"] == 0].unique())
        for batch in batches
    ]
    assert max(within) > 1
    assert len(lane.unique()) == LANES


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_may_be_of_any_kind(mode: str) -> None:
    kinds = [
        Versioned().set_to(1),
        Versioned().set_to(2).state_dict(),
        TensorDict.from_module(Versioned().set_to(3)).data.clone(),
        {"weight": torch.full((7,), 4.0)},
    ]
    seen = {}
    with worker_collector(SAME, 2, Versioned(), **BUDGET, mode=mode) as collector:
        batches = iter(collector)
        for version, weights in enumerate(kinds, start=1):
            collector.update_policy_weights_(weights)
            assert collector.policy_version == version
            for batch in batches:
                fresh = batch["collector", "policy_version"] == version
                if fresh.any():
                    break
            assert (batch["low"][fresh] == version).all()
            assert (batch["high"][fresh] == version).all()
            seen[version] = batch["mark"][fresh][0].tolist()
    # A given buffer is loaded. One that is not persistent, or omitted, stays.
    assert [seen[version][0] for version in seen] == [1, 2, 3, 3]


def test_values_that_are_no_weights_are_refused_and_change_nothing() -> None:
    with worker_collector(SAME, 2, Versioned(), **BUDGET) as collector:
        batches = iter(collector)
        next(batches)
        wrong = {"weight": torch.zeros(7), "bias": torch.zeros(1)}
        with pytest.raises(ArgumentError, match=r"missing are \[\], unknown are \['bias'\]"):
            collector.update_policy_weights_(wrong)
        with pytest.raises(ArgumentError, match=r"missing are \['weight'\]"):
            collector.update_policy_weights_({})
        for wrong, said in (
            (
                torch.zeros(7),
                "expected a TensorDict of parameters, a state dict or a module, got Te",
            ),
            ({"weight": torch.zeros(3)}, r"weight: expected shape \[7\], got \[3\]"),
            ({"weight": [0.0] * 7}, "weight: expected a tensor, got list"),
        ):
            with pytest.raises(ArgumentError, match=said):
                collector.update_policy_weights_(wrong)
        assert collector.policy_version == 0
        assert set(next(batches)["collector", "policy_version"].tolist()) == {0}


def test_a_callable_and_no_policy_have_no_weights_to_update() -> None:
    with worker_collector(SAME, 2, drawing, **BUDGET) as collector:
        match = "as the policy, got a function. Only the weights of a module"
        for weights in (None, {"weight": torch.zeros(1)}):
            with pytest.raises(ArgumentError, match=match):
                collector.update_policy_weights_(weights)
        assert collector.policy_version == 0
    with worker_collector(SAME, 2, None, **BUDGET) as collector:
        with pytest.raises(ArgumentError, match="draws random actions: it has no weights"):
            collector.update_policy_weights_()
        assert collector.policy_version == -1


def test_the_policy_of_the_caller_stays_its_own() -> None:
    policy = Versioned().set_to(5)
    with worker_collector(SAME, 2, policy, **BUDGET) as collector:
        batches = iter(collector)
        assert next(batches)["low"].eq(5).all()
        policy.set_to(9)  # not published
        assert next(batches)["low"].eq(5).all()
        collector.update_policy_weights_()
        batch = next(batches)
        assert batch["low"].eq(9).all()
        assert batch["collector", "policy_version"].eq(1).all()
    assert policy.weight.eq(9).all()


def greedy(eps: float) -> Sequential:
    """Return a policy whose greedy action is 1."""
    chosen = TensorDictModule(_ones, in_keys=["observation"], out_keys=["action"])
    module = EGreedyModule(Categorical(2), eps_init=eps, eps_end=0.0, annealing_num_steps=10)
    return Sequential(chosen, module)


def _ones(observation: torch.Tensor) -> torch.Tensor:
    return torch.ones(observation.shape[:-1], dtype=torch.int64)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_rate_of_exploration_travels(mode: str) -> None:
    policy = greedy(1.0)
    options = {**BUDGET, "frames_per_batch": 150, "total_frames": 600}
    with worker_collector(SAME, 2, policy, **options, mode=mode) as collector:
        batches = iter(collector)
        assert 0.3 < next(batches)["action"].double().mean() < 0.7
        policy[1].step(10)
        assert float(policy[1].eps) == 0.0
        collector.update_policy_weights_()
        rows = joined(list(batches))
    explored = rows["action"][rows["collector", "policy_version"] == 1]
    assert len(explored) > 150
    assert explored.eq(1).all()


def test_without_weights_versions_stay_at_zero() -> None:
    run = collect_all(worker_collector(SAME, 2, drawing, **BUDGET))
    assert joined(run.batches)["collector", "policy_version"].eq(0).all()
    assert {each.policy_versions for each in run.episodes} == {(0, 0)}


def test_episodes_know_the_versions_of_their_first_and_last_action() -> None:
    one, many = [], []
    for runs, collector in (
        (one, sync_collector(DISABLED, Versioned(), **BUDGET)),
        (many, worker_collector(DISABLED, 2, Versioned(), **BUDGET)),
    ):
        with collector:
            for number, _ in enumerate(collector, start=1):
                collector.update_policy_weights_(Versioned().set_to(number))
        runs += [each.policy_versions for each in collector.episodes]
    assert one == many
    assert any(first < last for first, last in one)


@on_gpu
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_policy_on_a_gpu_acts_in_workers_on_the_cpu(mode: str, device: str) -> None:
    policy = Versioned().to(device)
    with worker_collector(
        NEXT, 2, policy, mode=mode, frames_per_batch=20, total_frames=200
    ) as collector:
        for number, batch in enumerate(collector, 1):
            version = batch["collector", "policy_version"]
            assert torch.equal(batch["low"], version.float())
            assert torch.equal(batch["high"], version.float())
            assert torch.equal(batch["action"], chosen_by(batch, version))
            policy.set_to(number)
            collector.update_policy_weights_()
    assert next(policy.parameters()).device.type == device
