"""Rows of a run with a policy per lane equal a manual loop that calls each on its lanes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.modules import GRUModule

from tallyroll.collector import (
    OnePolicy,
    SyncCollector,
    evaluate,
    load_checkpoint,
    save_checkpoint,
)
from tallyroll.collector.cli import main
from tallyroll.collector.errors import ArgumentError, PolicyError, StateError
from tallyroll.storage import MemmapStorage, open_storage, verify

from collect_kit import assert_same, collect, joined, stream
from oracles import OracleEnv, check_rows
from policies_kit import linear, recurrent
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    Versioned,
    assert_alike,
    chosen_by,
    collect_all,
    drawing,
    factory,
    in_threads,
    sync_collector,
    worker_collector,
)

TWO: list[Any] = [([0, 3, 4], linear(1)), (range(1, 3), linear(2))]
BUDGET: dict[str, Any] = {"frames_per_batch": 15, "total_frames": 75, "seed": 3}
POLICY_OF_LANE = torch.tensor([0, 1, 1, 0, 0])


def by_hand(policies: list[tuple[list[int], Any]], steps: int) -> dict[int, list[TensorDictBase]]:
    """Return the rows of each lane; each policy is called with a batch of only its lanes."""
    envs = [OracleEnv(lane, LENGTHS, ends="mixed") for lane in range(LANES)]
    seen = [env.reset()[0] for env in envs]
    rows: dict[int, list[TensorDictBase]] = {lane: [] for lane in range(LANES)}
    for _ in range(steps):
        before = list(seen)
        for lanes, policy in policies:
            told = torch.from_numpy(np.stack([before[lane] for lane in lanes]))
            with torch.no_grad():
                out = policy(TensorDict({"observation": told}, [len(lanes)]))
            for lane, row in zip(lanes, out, strict=True):
                seen[lane], reward, terminated, truncated, _ = envs[lane].step(int(row["action"]))
                row["next", "observation"] = torch.from_numpy(seen[lane].copy())
                row["next", "reward"] = torch.tensor([reward], dtype=torch.float32)
                rows[lane].append(row)
                if terminated or truncated:
                    seen[lane] = envs[lane].reset()[0]
    return rows


def test_rows_are_those_of_a_hand_loop_bit_for_bit() -> None:
    """The logits are compared too, although they depend on the lanes that are computed together."""
    batches, collector = collect(factory(DISABLED, 0, LANES), TWO, **BUDGET)
    rows = joined(batches)
    check_rows(rows, LENGTHS, ends="mixed")
    wanted = by_hand([([0, 3, 4], TWO[0][1]), ([1, 2], TWO[1][1])], 15)
    for lane in range(LANES):
        for key in ("observation", "action", "logits", ("next", "observation"), ("next", "reward")):
            expected = torch.stack([row[key] for row in wanted[lane]])
            got = stream(rows, lane, 15)[key]
            assert got.numpy().tobytes() == expected.numpy().tobytes(), (lane, key)
    assert torch.equal(rows["collector", "policy_id"], POLICY_OF_LANE[rows["collector", "lane"]])
    assert rows["collector", "policy_id"].dtype is torch.int32
    plan = str(collector.plan)
    assert "by lane, because several policies act" in plan
    assert plan.startswith("acts       module, because")


@pytest.mark.parametrize(
    ("source", "surplus"),
    [
        (DISABLED, "carry"),
        (DISABLED, "never_step"),
        (NEXT, "carry"),
        (NEXT, "discard"),
        ("torch", "discard"),
    ],
)
def test_each_row_has_the_version_of_the_policy_that_acted(source: str, surplus: Any) -> None:
    first, second = Versioned(), Versioned()
    policies = [(slice(0, 2), first), ("rest", second)]
    with sync_collector(
        source, policies, frames_per_batch=13, total_frames=130, seed=0, surplus=surplus
    ) as collector:
        rows = []
        for number, batch in enumerate(collector):
            rows.append(batch.clone())
            if number % 3:
                first.set_to(collector.policy_versions[0] + 1)
                collector.update_policy_weights_(policy_id=0)
            if number == 4:
                collector.update_policy_weights_(Versioned().set_to(1).state_dict(), policy_id=1)
        assert collector.policy_versions == {0: 6, 1: 1}
        assert collector.policy_version == 7, "updates of any"
        episodes = list(collector.episodes)
    found = joined(rows)
    version, lane = found["collector", "policy_version"], found["collector", "lane"]
    assert torch.equal(found["low"], version.float())
    assert torch.equal(found["action"], chosen_by(found, version))
    assert set(version[lane < 2].tolist()) == set(range(7))
    assert set(version[lane >= 2].tolist()) == {0, 1}
    for episode in episodes:
        own = version[found["collector", "traj_ids"] == episode.traj_id]
        if len(own) == episode.length:
            assert episode.policy_versions == (own[0], own[-1])


@pytest.mark.parametrize("source", [DISABLED, NEXT])
@pytest.mark.parametrize("surplus", ["carry", "discard"])
def test_openings_of_their_own_are_exact(source: str, surplus: Any) -> None:
    policies = [
        ([1, 4], OnePolicy(Versioned().set_to(1), init_random_frames=7)),
        ([0], Versioned().set_to(2)),
        ([2, 3], OnePolicy(Versioned().set_to(3), init_random_frames=11)),
    ]
    with sync_collector(
        source, policies, frames_per_batch=7, total_frames=98, seed=1, surplus=surplus
    ) as collector:
        rows = joined([batch.clone() for batch in collector])
        assert collector.ledger.random == 18
    drawn = rows["collector", "policy_version"] == -1
    of_policy = [int(drawn[rows["collector", "policy_id"] == at].sum()) for at in range(3)]
    assert of_policy == [7, 0, 11]
    for lane in range(LANES):
        own = drawn[rows["collector", "lane"] == lane]
        assert not (own.int().diff() > 0).any(), f"lane {lane}: at random after its policy acted"
    assert torch.equal(rows["low"] == 0, drawn), "the other columns of a policy are 0 then"


def test_random_actions_of_lanes_do_not_depend_on_other_policies() -> None:
    """The draws of a policy that uses torch's generator do not depend on them either."""

    def run(other: Any, frames: int) -> TensorDictBase:
        opened = OnePolicy(linear(1), init_random_frames=frames)
        policies = [([0, 2], None), ([1], drawing), ([3], other), ([4], opened)]
        return joined(collect(factory(DISABLED, 0, LANES), policies, **BUDGET)[0])

    one, two = run(linear(0), 3), run(drawing, 9)
    assert (one["collector", "policy_version"] == -1).sum() == 30 + 3
    for lane in (0, 1, 2):
        assert torch.equal(stream(one, lane, 15)["action"], stream(two, lane, 15)["action"])
    opening = stream(one, 4, 3)["action"], stream(two, 4, 3)["action"]
    assert torch.equal(*opening)
    both = torch.stack([stream(one, lane, 15)["action"] for lane in (0, 1, 2)])
    assert len({tuple(each) for each in both.tolist()}) == 3, "streams of their own"
    assert set(both[1].tolist()) == {0, 1}, "which go on from slot to slot"


MIXED: list[Any] = [
    ([0, 3], OnePolicy(linear(1), init_random_frames=9)),
    ([1, 4], None),
    ("rest", lambda td: td.set("action", td["observation"].long().sum(-1) % 2)),
]
"""Policies whose actions in a lane do not depend, bit for bit, on the other lanes."""


@pytest.mark.parametrize(
    ("workers", "source", "surplus"),
    [
        (1, DISABLED, "carry"),
        (3, DISABLED, "carry"),
        (3, DISABLED, "never_step"),
        (3, NEXT, "carry"),
    ],
)
def test_workers_in_step_give_the_same_rows(workers: int, source: str, surplus: Any) -> None:
    budget = {**BUDGET, "frames_per_batch": 13, "surplus": surplus}
    alone = collect_all(sync_collector(source, MIXED, **budget))
    with in_threads():
        many = collect_all(worker_collector(source, workers, MIXED, **budget))
    for run in (alone, many):  # a product of one row has other bits than one of two rows
        for batch in run.batches:
            batch.set("logits", batch["logits"].round(decimals=3))
    assert_alike(alone, many)


def test_workers_of_their_own_processes_give_the_rows_of_each_lane() -> None:
    policies = [([0, 3], Versioned()), ([1], None), ([2, 4], Versioned())]
    alone = joined(collect_all(sync_collector(DISABLED, policies, **BUDGET)).batches)
    with worker_collector(DISABLED, 2, policies, **BUDGET, mode="async") as collector:
        batches = []
        for batch in collector:
            batches.append(batch.clone())
            collector.update_policy_weights_(Versioned().set_to(len(batches)), policy_id=2)
        assert collector.policy_versions == {0: 0, 2: 5}
    rows = joined(batches)
    assert len(rows) == 75
    check_rows(rows, LENGTHS, ends="mixed")
    version, lane = rows["collector", "policy_version"], rows["collector", "lane"]
    assert (version[lane == 1] == -1).all()
    assert (version[(lane == 0) | (lane == 3)] == 0).all()
    acted = lane != 1
    assert torch.equal(rows["low"][acted], version[acted].float())
    assert version[(lane == 2) | (lane == 4)].max() > 0
    for each in (0, 1, 3):
        count = min(int((lane == each).sum()), 15)
        for key in ("action", ("next", "observation"), ("collector", "policy_id")):
            assert torch.equal(stream(rows, each, count)[key], stream(alone, each, count)[key])


def test_recurrent_policies_keep_the_states_of_their_lanes() -> None:
    alone = []
    for seed in (1, 2):
        memory, policy = recurrent(GRUModule)
        with torch.no_grad():
            for weights in memory.parameters():
                weights.mul_(seed)
        alone.append(policy)
    policies = [([0, 3, 4], alone[0]), ([1, 2], alone[1])]
    rows = joined(collect(factory("torch", 0, LANES), policies, **BUDGET)[0])
    for number, lanes in enumerate(([0, 3, 4], [1, 2])):
        each = joined(collect(factory("torch", 0, LANES), alone[number], **BUDGET)[0])
        for lane in lanes:
            mine, theirs = stream(rows, lane, 15), stream(each, lane, 15)
            for key in ("action", "h", ("next", "h"), "out"):
                assert torch.allclose(mine[key].float(), theirs[key].float(), atol=1e-6), key
            assert mine["h"].any(), "states go from step to step"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ([], "empty list"),
        ([linear()], "at index 0"),
        ([([0, 1, 2, 3, 4], linear()), 7], "got int 7 at index 1"),
        (
            [([0, 1], linear())],
            r"got none for 2-4. Assign these lanes to a policy, or add \(.rest., policy\)",
        ),
        ([(range(5), linear()), (4, None)], "got lane 4 for policy 0 and for policy 1"),
        ([(range(6), linear())], "expected lanes 0 to 4, got lane 5 for policy 0"),
        ([([-1, 0, 1, 2, 3], linear())], "got lane -1"),
        ([(slice(None), linear()), (slice(9, 12), None)], "policy 1 acts in none of the 5 lanes"),
        ([("rest", None), ("rest", linear())], "'rest'|\"rest\" once"),
        ([("first", None)], "got 'first'"),
        ([(True, None)], "got True"),
        ([([], None)], r"got \[\]"),
        ([(np.array([0.5, 1]), None)], r"got \[0.5, 1.0\]"),
        ([(np.array([0, 3]), None), (torch.arange(3), linear())], "got lane 0 for policy 0 and"),
        ([({0, 1}, None)], r"got \{0, 1\}"),
        ([("rest", 3)], "got int"),
        ([("rest", [(0, None)])], "expected one policy for policy 0, got several"),
        ({"agents": linear()}, "needs groups of agents, but the environment has the action action"),
        ({}, r"names of groups, got \[\]"),
        ({0: linear()}, r"names of groups, got \[0\]"),
    ],
)
def test_what_cannot_be_is_refused_before_a_file_is_made(
    policy: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=words):
        sync_collector(DISABLED, policy, storage=tmp_path / "rows", **BUDGET)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OnePolicy(linear(), init_random_frames=-1), "at least 0, got -1"),
        (lambda: OnePolicy(None, init_random_frames=3), "expected 0 if the policy is None"),
        (lambda: OnePolicy(OnePolicy(None)), "got another OnePolicy"),
        (
            lambda: sync_collector(
                DISABLED, [("rest", OnePolicy(linear(), policy_device="cuda:77"))], **BUDGET
            ),
            "policy_device: expected a torch device of this machine",
        ),
        (
            lambda: sync_collector(DISABLED, MIXED, init_random_frames=5, **BUDGET),
            "expected 0, because one of the policies has init_random_frames",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_which_policy_an_update_means_has_to_be_said() -> None:
    with sync_collector(DISABLED, [([0], None), ("rest", linear())], **BUDGET) as collector:
        for wrong in (None, 0, 7, "rest"):
            with pytest.raises(ArgumentError, match=r"policy_id: expected .* one of \[1\]"):
                collector.update_policy_weights_(policy_id=wrong)
    with sync_collector(DISABLED, linear(), **BUDGET) as collector:
        assert collector.policy_versions == {}
        with pytest.raises(ArgumentError, match="there is only one policy, got 0"):
            collector.update_policy_weights_(policy_id=0)


def test_columns_of_policies_agree_or_are_zero() -> None:
    def wide(td: TensorDictBase) -> TensorDictBase:
        logits = torch.zeros(*td.batch_size, 5)
        return td.set("action", td["observation"].long()[..., 0] * 0).set("logits", logits)

    with pytest.raises(
        PolicyError, match=r"policy 1: expected logits to be .* of another policy, got .*\[5\]"
    ) as got:
        sync_collector(DISABLED, [([0, 1], linear()), ("rest", wide)], **BUDGET)

    def without(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.ones(td.batch_size).long())

    policies = [([0, 1], Versioned().set_to(3)), ("rest", without)]
    rows = joined(collect(factory(DISABLED, 0, LANES), policies, **BUDGET)[0])
    assert torch.equal(rows["low"] == 0, rows["collector", "policy_id"] == 1)

    with pytest.raises(PolicyError, match="expected the key action in the output") as got:
        sync_collector(DISABLED, [([0, 1], linear()), ("rest", lambda td: td)], **BUDGET)
    assert "raised for policy 1, of the lanes 2-4" in str(got.value.__notes__)


def test_an_evaluation_is_of_policies_that_act() -> None:
    """Evaluation has no random openings, and sets the modules to evaluation mode."""
    training = []

    class Seen(TensorDictModuleBase):
        in_keys, out_keys = ["observation"], ["action"]

        def forward(self, td: TensorDictBase) -> TensorDictBase:
            training.append(self.training)
            return td.set("action", td["observation"].long().sum(-1) % 2)

    policy = Seen()
    wanted = evaluate(policy, factory(DISABLED, 0, LANES), episodes=6, seed=0)
    opened = OnePolicy(policy, init_random_frames=500)
    for given in ([([0, 3], opened), ("rest", policy)], [("rest", opened)]):
        found = evaluate(given, factory(DISABLED, 0, LANES), episodes=6, seed=0)  # type: ignore[arg-type]
        assert [each.total_return for each in found.episodes] == [
            each.total_return for each in wanted.episodes
        ]
        assert found.ledger.random == 0
    assert not any(training)
    assert policy.training
    with pytest.raises(ArgumentError, match="got int 7 at index 0"):
        evaluate([7], factory(DISABLED, 0, LANES), episodes=6)  # type: ignore[list-item]


def test_an_error_says_which_policy_raised() -> None:
    calls = []

    def late(td: TensorDictBase) -> TensorDictBase:
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("a fault of its own")
        return td.set("action", td["observation"].long().sum(-1) % 2)

    with (
        sync_collector(DISABLED, [([0, 1], linear()), ("rest", late)], **BUDGET) as collector,
        pytest.raises(RuntimeError, match="a fault of its own") as got,
    ):
        for _ in collector:
            pass
    assert "tallyroll: raised for policy 1" in got.value.__notes__


def test_a_recurrent_policy_beside_random_actions() -> None:
    """The states are the same as without other policies, and do not change in random lanes."""
    _, policy = recurrent(GRUModule)
    made = factory("torch", 0, LANES)
    rows = joined(collect(made, [([0, 3, 4], policy), ("rest", None)], **BUDGET)[0])
    alone = joined(collect(factory("torch", 0, LANES), policy, **BUDGET)[0])
    for lane in (0, 3, 4):
        mine, theirs = stream(rows, lane, 15), stream(alone, lane, 15)
        for key in ("action", "h", ("next", "h")):
            assert torch.allclose(mine[key].float(), theirs[key].float(), atol=1e-6), key
    assert not rows["next", "h"][rows["collector", "policy_id"] == 1].any()
    opened = [([0, 3, 4], OnePolicy(policy, init_random_frames=7)), ("rest", None)]
    rows = joined(collect(factory("torch", 0, LANES), opened, **BUDGET)[0])
    drawn = rows["collector", "policy_version"] == -1
    assert not rows["h"][drawn].any()
    assert rows["next", "h"][~drawn].any(-1).all()


def test_forms_of_actions_are_those_of_each_policy() -> None:
    """One policy writes an index, and the other a one-hot vector."""

    def one_hot(td: TensorDictBase) -> TensorDictBase:
        index = td["observation"].long().sum(-1) % 2
        return td.set("action", nn.functional.one_hot(index, 2))

    def column(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", (td["observation"].sum(-1, keepdim=True) % 2).double())

    with pytest.warns(UserWarning, match="policy 0: action is stored as an index"):
        batches, _ = collect(
            factory(DISABLED, 0, LANES), [([0, 4], one_hot), ("rest", column)], **BUDGET
        )
    rows = joined(batches)
    assert torch.equal(rows["action"], rows["observation"].long().sum(-1) % 2)


OPENED: list[Any] = [
    ([0, 3], OnePolicy(linear(1), init_random_frames=20)),
    ("rest", OnePolicy(linear(2), init_random_frames=31)),
]


@pytest.mark.parametrize("frames", [13, 37, 60])
def test_a_storage_is_resumed_with_exact_openings(frames: int, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    budget = {"frames_per_batch": 13, "seed": 3, "storage": path}
    with sync_collector(NEXT, OPENED, total_frames=frames, **budget) as collector:
        for _ in collector:
            pass
    with sync_collector(NEXT, OPENED, total_frames=120, resume=True, **budget) as collector:
        assert collector.policy_versions == dict.fromkeys((0, 1), int(frames == 60))
        for _ in collector:
            pass
        assert collector.ledger.random == 51
    with open_storage(path) as storage:
        rows = storage[:]
        call = storage.runs[0]["call"]
    assert not verify(path).findings
    drawn = rows["collector", "policy_version"] == -1
    found = [int(drawn[rows["collector", "policy_id"] == at].sum()) for at in (0, 1)]
    assert found == [20, 31]
    assert [each["lanes"] for each in call["policies"]] == ["0, 3", "1-2, 4"]


@pytest.mark.parametrize("workers", [None, 2])
def test_a_state_is_gone_on_from(workers: int | None, tmp_path: Path) -> None:
    """The state may lie anywhere in the openings.

    Random actions, versions and weights are exact.
    """

    def make(policies: Any) -> Any:
        kwargs = {"frames_per_batch": 7, "total_frames": 91, "seed": 3}
        if workers is None:
            return sync_collector(DISABLED, policies, **kwargs)
        return worker_collector(DISABLED, workers, policies, **kwargs)

    def opened(number: int = 0) -> Any:
        return [
            ([0, 3], OnePolicy(Versioned().set_to(number), init_random_frames=20)),
            ("rest", OnePolicy(Versioned().set_to(number), init_random_frames=31)),
        ]

    with in_threads():
        for batches in (1, 4, 9):
            with make(opened()) as collector:
                before = [each.clone() for each in islice(collector, batches)]
                collector.update_policy_weights_(Versioned().set_to(1), policy_id=1)
                state = collector.state_dict()
            with make(opened(5)) as collector:
                collector.load_state_dict(state)
                assert collector.policy_versions == {0: 0, 1: 1}
                rows = joined(before + [each.clone() for each in collector])
                assert collector.ledger.random == 51
            assert len(rows) == 91
            version = rows["collector", "policy_version"]
            own = [version[rows["collector", "policy_id"] == at] for at in (0, 1)]
            assert [int((each == -1).sum()) for each in own] == [20, 31]
            assert torch.equal(rows["low"], version.clamp(min=0).float())
    with make(linear()) as collector, pytest.raises(StateError, match="but this collector has one"):
        collector.load_state_dict(state)
    other = [([0], OnePolicy(Versioned())), ([1], None), ("rest", None)]
    with make(other) as collector, pytest.raises(StateError, match="of the policies"):
        collector.load_state_dict(state)


@pytest.mark.parametrize("rows", ["rewind", "keep"])
def test_checkpoints_restore_each_policy(rows: Any, tmp_path: Path) -> None:
    path, saved = tmp_path / "rows", tmp_path / "saved"

    def make(**more: Any) -> SyncCollector:
        policies = [([0, 3], Versioned()), ("rest", OnePolicy(Versioned(), init_random_frames=31))]
        return sync_collector(DISABLED, policies, storage=path, **BUDGET, **more)

    with make() as collector:
        next(iter(collector))
        collector.update_policy_weights_(Versioned().set_to(1), policy_id=0)
        save_checkpoint(saved, collector=collector)
        next(iter(collector))
        collector.update_policy_weights_(Versioned().set_to(2), policy_id=0)
        next(iter(collector))
    with make(resume=True) as collector:
        load_checkpoint(saved, collector=collector, rows=rows)
        versions = collector.policy_versions
        assert min(versions.values()) >= (1 if rows == "rewind" else 3)
        for _ in collector:
            pass
    with open_storage(path) as storage:
        found = storage[:]
        assert len(found) == 75
    assert not verify(path).findings
    drawn = found["collector", "policy_version"] == -1
    assert int(drawn.sum()) == 31
    last = found["collector", "policy_id"] == 0
    assert (found["low"][last][-3:] == 1).all(), "the weights of the checkpoint"
    newest = found["collector", "policy_version"][last][-1]
    assert newest not in (0, 2), "no number names two sets of weights"


def test_rows_are_kept_where_all_policies_are_random(tmp_path: Path) -> None:
    path, saved = tmp_path / "rows", tmp_path / "saved"
    policies = [([0], None), ("rest", None)]
    with sync_collector(DISABLED, policies, storage=path, **BUDGET) as collector:
        next(iter(collector))
        save_checkpoint(saved, collector=collector)
        next(iter(collector))
        before = collector.ledger.stored
    with sync_collector(DISABLED, policies, storage=path, resume=True, **BUDGET) as collector:
        load_checkpoint(saved, collector=collector, rows="keep")
        assert collector.ledger.stored == before
        assert before + sum(map(len, collector)) == 75
    assert not verify(path).findings


def test_a_ring_knows_that_openings_are_over(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    for frames in (60, 120):
        ring = MemmapStorage(path, max_size=20, mode="create" if frames == 60 else "append")
        with sync_collector(
            DISABLED,
            OPENED,
            frames_per_batch=10,
            total_frames=frames,
            seed=0,
            storage=ring,
            resume=frames == 120,
        ) as collector:
            for _ in collector:
                pass
            assert collector.ledger.random == 51
        ring.close()


def test_collect_and_episode_budgets(tmp_path: Path) -> None:
    with sync_collector(
        NEXT, TWO, frames_per_batch=10, total_episodes=12, seed=0, storage=tmp_path / "rows"
    ) as collector:
        while collector.collect(3):
            pass
        assert collector.ledger.episodes_complete == 12
        rows = collector.ledger.stored
    with open_storage(tmp_path / "rows") as storage:
        found = storage[:]
    assert len(found) == rows
    check_rows(found, LENGTHS, ends="mixed")
    assert torch.equal(found["collector", "policy_id"], POLICY_OF_LANE[found["collector", "lane"]])


def test_lanes_of_a_single_environment() -> None:
    rows = joined(collect(factory("single", 0, 1), [(0, linear(1))], **BUDGET)[0])
    alone = joined(collect(factory("single", 0, 1), linear(1), **BUDGET)[0])
    assert_same(rows.exclude(("collector", "policy_id")), alone)


def test_no_policy_is_asked_while_all_of_its_lanes_act_at_random() -> None:
    asked: list[int] = []

    def act(td: TensorDictBase) -> TensorDictBase:
        asked.append(len(td))
        return td.set("action", td["observation"].long().sum(-1) % 2)

    policies = [([0, 3], OnePolicy(act, init_random_frames=21)), ("rest", linear(2))]
    collect(factory(DISABLED, 0, LANES), policies, **BUDGET)
    tried = len(asked) - 5
    assert asked[tried:] == [2] * 5, "ten slots at random, one of both kinds, four of the policy"
    assert tried < 10


def test_a_command_takes_several_policies(tmp_path: Path) -> None:
    """The policies are a list in a file. Errors have the collector's messages."""
    code, out = tmp_path / "mine.py", tmp_path / "rows"
    code.write_text(
        "def act(td):\n    return td.set('action', td['observation'][..., 0].long() * 0)\n"
        "policies = [(0, act), ('rest', None)]\nwrong = [(0, act)]\n"
    )
    words = ["collect", "CartPole-v1", "--frames", "30", "--num-envs", "3", "--quiet"]
    assert main([*words, "--policy", f"{code}:policies", "--out", str(out)]) == 0
    with open_storage(out) as storage:
        rows = storage[:]
    assert set(rows["collector", "policy_id"].tolist()) == {0, 1}
    assert not rows["action"][rows["collector", "policy_id"] == 0].any()
    assert main([*words, "--policy", f"{code}:wrong", "--out", str(tmp_path / "more")]) == 1
    assert not (tmp_path / "more").exists()
