"""Networks are called without the TensorDicts around them where nobody could tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from tallyroll.collector import SyncCollector
from tallyroll.collector.errors import PolicyError
from tallyroll.collector.policies.bare_call import BareCall

if TYPE_CHECKING:
    from pathlib import Path

    from tensordict import TensorDictBase

FRAMES = 90


class Net(nn.Module):
    """Draws an action by what it sees, and returns what ``wrap`` makes of it."""

    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.wrap = wrap or (lambda action: action)
        self.calls = 0
        self.seen: list[torch.Tensor] = []

    def forward(self, observation: torch.Tensor) -> Any:
        self.calls += 1
        self.seen.append(observation)
        chance = self.layer(observation).softmax(-1)
        observation.zero_()  # what it is given is its own
        return self.wrap(torch.multinomial(chance, 1).squeeze(-1))


class Longer(TensorDictModule):
    """Not the class itself: it goes the way through TensorDicts."""


def collector(policy: Any, **options: Any) -> SyncCollector:
    torch.manual_seed(0)
    return SyncCollector(
        "CartPole-v1",
        policy,
        num_envs=3,
        frames_per_batch=30,
        total_frames=FRAMES,
        seed=5,
        **options,
    )


def module(kind: type[TensorDictModule] = TensorDictModule, wrap: Any = None) -> Any:
    torch.manual_seed(1)
    return kind(Net(wrap), in_keys=["observation"], out_keys=["action"])


def rows_of(policy: Any) -> TensorDictBase:
    with collector(policy) as made:
        return torch.cat([batch.clone() for batch in made])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots of the calls that were bare."""
    made: list[int] = []
    original = BareCall.__call__

    def counted(self: BareCall, at: int, *given: Any) -> Any:
        made.append(at)
        return original(self, at, *given)

    monkeypatch.setattr(BareCall, "__call__", counted)
    return made


@pytest.mark.parametrize(
    "wrap",
    [
        None,
        lambda action: (action,),
        lambda action: {"action": action},
        lambda action: action.numpy(),
        lambda action: action.tolist(),
    ],
    ids=["tensor", "tuple", "dict", "numpy", "list"],
)
def test_the_rows_are_those_of_the_way_through_tensordicts(wrap: Any, calls: list[int]) -> None:
    bare = rows_of(module(wrap=wrap))
    assert len(calls) == FRAMES // 3
    through = rows_of(module(Longer, wrap))
    assert len(calls) == FRAMES // 3, "the other class is not called so"
    assert (bare == through).all()


def test_observations_are_the_networks_to_write_to_and_to_keep() -> None:
    net = module()
    rows = rows_of(net)
    assert (rows["observation"] != 0).any()
    kept = net.module.seen[-5:]
    assert len({each.data_ptr() for each in kept}) == len(kept)


def test_hooks_of_the_module_are_called(calls: list[int]) -> None:
    policy, seen = module(), []
    policy.register_forward_hook(lambda *given: seen.append(given))
    rows_of(policy)
    assert not calls
    assert len(seen) >= FRAMES // 3


def test_a_hook_may_come_during_a_run(calls: list[int]) -> None:
    policy, seen = module(), []
    with collector(policy) as made:
        batches = iter(made)
        next(batches)
        assert len(calls) == 10
        policy.register_forward_pre_hook(lambda *given: seen.append(given))
        next(batches)
    assert (len(calls), len(seen)) == (10, 10)


def test_several_outputs_and_inputs(calls: list[int]) -> None:
    two = TensorDictModule(
        lambda seen: (seen.sum(-1).gt(0).long(), seen.sum(-1)),
        in_keys=["observation"],
        out_keys=["action", "sum"],
    )
    rows = rows_of(two)
    assert not calls, "what is written beside the action is a column"
    assert torch.equal(rows["sum"], rows["observation"].sum(-1))
    twice = TensorDictModule(
        lambda one, other: (one - other).sum(-1).ge(0).long(),
        in_keys=["observation", "observation"],
        out_keys=["action"],
    )
    assert (rows_of(twice)["action"] == 1).all()
    assert len(calls) == FRAMES // 3


class Always(nn.Module):
    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = action

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.full((len(observation),), self.action)


@pytest.mark.parametrize("first", [Always(0), Always(0).forward], ids=["module", "function"])
def test_what_is_around_may_be_replaced_during_a_run(first: Any, calls: list[int]) -> None:
    policy = TensorDictModule(first, ["observation"], ["action"])
    with collector(policy) as made:
        batches = iter(made)
        assert (next(batches)["action"] == 0).all()
        policy.module = Always(1)
        assert (next(batches)["action"] == 1).all()
    assert len(calls) == 20


class Acts(nn.Module):
    """What acts is another method than `forward`."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        raise AssertionError(observation)

    def act(self, observation: torch.Tensor, chosen: int = 0) -> torch.Tensor:
        return torch.full((len(observation),), chosen)


@pytest.mark.parametrize("chosen", [0, 1])
def test_another_method_is_called_with_its_arguments(chosen: int, calls: list[int]) -> None:
    more = {"method_kwargs": {"chosen": chosen}} if chosen else {}
    rows = rows_of(TensorDictModule(Acts(), ["observation"], ["action"], method="act", **more))
    assert (rows["action"] == chosen).all()
    assert not calls


@pytest.mark.parametrize(
    ("later", "error"),
    [
        (lambda action: action.float(), "action: got float32"),
        (lambda action: action[:2], "action: got int64"),
        (lambda action: (action, action), "action is missing"),
        (lambda action: {"other": action}, "action is missing"),
    ],
)
def test_what_changes_later_is_refused(later: Any, error: str, tmp_path: Path) -> None:
    policy = module()
    with collector(policy, storage=tmp_path / "rows") as made:
        made.collect(30)
        policy.module.wrap = later
        with pytest.raises(PolicyError, match=error):
            made.collect(30)
        assert made.ledger.stored == made.ledger.executed == 30


def test_new_weights_act_at_once(tmp_path: Path) -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([1.0, 0.0]))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.bias.expand(len(observation), 2).argmax(-1)

    policy = TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])
    with collector(policy, storage=tmp_path / "rows") as made:
        made.collect(30)
        made.update_policy_weights_({"module.bias": torch.tensor([0.0, 1.0])})
        made.collect(30)
        rows = made._writer.storage[:]
    assert rows["action"].tolist() == [0] * 30 + [1] * 30
    assert rows["collector", "policy_version"].tolist() == [0] * 30 + [1] * 30
