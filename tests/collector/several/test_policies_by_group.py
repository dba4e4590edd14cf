"""Each group of agents has a policy, which sees the group's TensorDict or all of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_kit import GroupsEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from tallyroll.collector import OnePolicy, SyncCollector
from tallyroll.collector.errors import ArgumentError, PolicyError
from tallyroll.storage import open_storage, verify

from collect_kit import columns, joined, stream
from worker_kit import assert_alike, collect_all, in_threads, lanes_of_workers, start

LENGTHS = [[3, 1, 4], [2, 5], [6]]
BUDGET: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 48, "seed": 3}


class Net(nn.Module):
    """Network of the observations of a group's agents."""

    def __init__(self, *, index: bool, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = nn.Linear(4, 3 if index else 2)
        self.index = index

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return an index or two numbers per agent."""
        out = self.layer(observation)
        return out.argmax(-1) if self.index else out.tanh()


def whole(net: Net, group: str, **more: Any) -> TensorDictModule:
    """Return the network as a module that reads and writes the keys of the group."""
    keys = [(group, "observation")], [(group, "action")]
    return TensorDictModule(net, in_keys=keys[0], out_keys=keys[1], **more)


FLAGS = ("done", "terminated", "truncated")
RED, BLUE = Net(index=True, seed=1), Net(index=False, seed=2)


def env(lanes: int = 3, first: int = 0) -> GroupsEnv:
    return GroupsEnv(lanes, LENGTHS, first_lane=first)


def make(policy: Any, **more: Any) -> SyncCollector:
    return SyncCollector(env(), policy, **{**BUDGET, **more})


def by_hand(red: Any, blue: Any, steps: int) -> list[TensorDictBase]:
    """Return the slots of an environment that TorchRL's own functions step."""
    stepped = env()
    td, slots = stepped.reset(), []
    for _ in range(steps):
        with torch.no_grad():
            td["red", "action"] = red(td["red", "observation"])
            td["blue", "action"] = blue(td["blue", "observation"])
        slots.append(td.clone())
        after, td = stepped.step_and_maybe_reset(td)
        slots[-1]["next"] = after["next"]
    return slots


@pytest.mark.parametrize(
    "policies",
    [
        {"red": RED, "blue": BLUE},
        {"blue": whole(BLUE, "blue"), "red": whole(RED, "red")},
        {
            "red": TensorDictModule(RED, in_keys=["observation"], out_keys=["action"]),
            "blue": lambda td: td.set("action", BLUE(td["observation"])),
        },
    ],
    ids=["modules of tensors", "keys of the groups", "keys within a group"],
)
def test_rows_are_those_of_a_hand_loop(policies: Any) -> None:
    with make(policies) as collector:
        rows = joined([batch.clone() for batch in collector])
    wanted = by_hand(RED, BLUE, 16)
    for lane in range(3):
        own = stream(rows, lane, 16)
        for key in columns(wanted[0]):
            if key[-1] in FLAGS or key in FLAGS:  # the root has none, and cuts set more of them
                continue
            expected = torch.stack([slot[lane][key] for slot in wanted])
            assert own[key].numpy().tobytes() == expected.numpy().tobytes(), (lane, key)
    assert rows["red"].batch_size == (48, 3)
    assert ("collector", "policy_id") not in rows.keys(True)


def test_versions_are_those_of_each_group(tmp_path: Path) -> None:
    """The version of a row counts all updates, so that no number names two sets of weights."""
    red, path = Net(index=True), tmp_path / "rows"
    with make({"red": red, "blue": BLUE}, storage=path, init_random_frames=5) as collector:
        rows = []
        for number, batch in enumerate(collector):
            rows.append(batch.clone())
            collector.update_policy_weights_(policy_id=("red", "red", "blue")[number % 3])
        assert collector.policy_versions == {"red": 4, "blue": 2}
        state = collector.state_dict()
        assert collector.policy_version == 6
    found = joined(rows)["collector"]
    version, own = found["policy_version"], found["policy_versions"]
    drawn = version == -1
    assert int(drawn.sum()) == 5
    assert (own["red"][drawn] == -1).all()
    assert (own["blue"][drawn] == -1).all()
    acted = ~drawn
    assert torch.equal(own["red"][acted] + own["blue"][acted], version[acted])
    assert sorted(set(own["blue"][acted].tolist())) == [0, 1]
    with make({"red": red, "blue": BLUE}, total_frames=60) as collector:
        collector.load_state_dict(state)
        assert collector.policy_versions == {"red": 4, "blue": 2}
        assert sum(map(len, collector)) == 12
    with open_storage(path) as storage:
        told = storage.runs[0]["call"]["policies"]
        assert told == [{"id": "red", "policy": "Net"}, {"id": "blue", "policy": "Net"}]
        assert len(storage.runs[0]["made"]["policies"]) == 2
    assert not verify(path).findings
    with make({"red": red, "blue": BLUE}, storage=path, resume=True, total_frames=60) as collector:
        assert set(collector.policy_versions.values()) == {collector.policy_version} == {6}


def test_a_group_at_random_draws_what_it_draws_beside_others() -> None:
    def run(blue: Any) -> TensorDictBase:
        with make({"red": None, "blue": blue}) as collector:
            return joined([batch.clone() for batch in collector])

    one, two = run(BLUE), run(lambda td: td.set("action", torch.rand(*td.batch_size, 2)))
    assert torch.equal(one["red", "action"], two["red", "action"])
    assert len(set(one["red", "action"].flatten().tolist())) == 3
    own = one["collector", "policy_versions"]
    assert (own["red"] == -1).all()
    assert (own["blue"] == 0).all()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_give_the_rows_of_each_lane(mode: Any) -> None:
    policies = {"red": None, "blue": whole(BLUE, "blue")}
    alone = collect_all(make(policies))
    with in_threads():
        creates = [partial(env, lanes, first) for first, lanes in lanes_of_workers(3, 2)]
        many = collect_all(start(creates, policies, mode=mode, **BUDGET))
    for run in (alone, many):
        for batch in run.batches:
            batch["blue", "action"] = batch["blue", "action"].round(decimals=4)
            for key in ("reward",):
                reward = batch["next", "blue", key]
                batch["next", "blue", key] = reward.round(decimals=3)
    if mode == "sync":
        for run in (alone, many):
            run.episodes = [each.ended_at for each in run.episodes]
        assert_alike(alone, many)
        return
    one, other = joined(alone.batches), joined(many.batches)
    for lane in range(3):
        count = min(int((rows["collector", "lane"] == lane).sum()) for rows in (one, other))
        for key in columns(one, ("collector", "traj_ids"), ("collector", "cut")):
            if key[-1] in FLAGS:
                continue
            assert torch.equal(stream(one, lane, count)[key], stream(other, lane, count)[key]), key


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"red": RED, "bleu": BLUE}, r"groups \['blue', 'red'\], got 'bleu'; did you mean blue"),
        ({"red": RED}, "got none for 'blue'. Add a policy for this group, or None"),
        (
            {"red": RED, "blue": {"a": BLUE}},
            "expected one policy for the group 'blue', got several",
        ),
        ({"red": RED, "blue": 4}, "got int"),
    ],
)
def test_groups_that_cannot_be_are_refused(policy: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make(policy)


def test_a_policy_of_all_keys_may_write_beside_its_group() -> None:
    class More(TensorDictModule):
        def forward(self, td: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
            return super().forward(td).set("hidden", td["blue", "observation"].sum((1, 2)) + 1)

    more = More(BLUE, in_keys=[("blue", "observation")], out_keys=[("blue", "action")])
    opened = OnePolicy(more, init_random_frames=4)
    with make({"red": RED, "blue": opened}, total_frames=16) as collector:
        rows = joined([batch.clone() for batch in collector])
    acted = rows["collector", "policy_versions", "blue"] == 0
    wanted = rows["blue", "observation"].sum((1, 2)) + 1
    assert torch.equal(rows["hidden"], torch.where(acted, wanted, 0))
    assert int(acted.sum()) == 12


def test_a_policy_acts_for_its_group_alone() -> None:
    def both(td: TensorDictBase) -> TensorDictBase:
        return td.set("hidden", torch.zeros(td.batch_size[0]))

    both.in_keys, both.out_keys = [("red", "observation")], []  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match="expected the key red/action in the output") as got:
        make({"red": both, "blue": BLUE})
    assert "raised for the policy of the group 'red'" in str(got.value.__notes__)

    class Meddling(TensorDictModule):
        def forward(self, td: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
            return super().forward(td).set(("red", "action"), torch.zeros(3, 3).long())

    meddling = Meddling(BLUE, in_keys=[("blue", "observation")], out_keys=[("blue", "action")])
    with pytest.raises(
        PolicyError, match="the policy writes red/action, the action of another group"
    ):
        make({"red": RED, "blue": meddling})
