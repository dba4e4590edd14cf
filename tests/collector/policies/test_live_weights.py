"""Weights that change without update_policy_weights_() are noticed if the policy itself acts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from tallyroll.collector import MultiprocessCollector, OnePolicy, SyncCollector, report
from tallyroll.collector.cli import main
from tallyroll.collector.torchrl import Collector as NamedColumn
from tallyroll.storage import open_storage


class Numbers(gymnasium.Env[Any, Any]):
    """Environment that observes its step, with episodes of five steps."""

    observation_space = gymnasium.spaces.Box(0, 5, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 0.0, self.steps == 5, False, {}


class Net(nn.Module):
    """Network whose statistics change as it acts, with an annealed constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.epsilon = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.epsilon *= 0.9
        return self.layers(observation).argmax(-1)


def step(module: nn.Module) -> None:
    """Change all weights as an optimizer does."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def warned(
    policy: Any,
    between: Callable[[Any], object],
    *,
    calls: bool = False,
    kind: Any = SyncCollector,
    batches: int = 4,
    **options: Any,
) -> int:
    """Return the number of warnings of a run with ``between`` between its batches."""
    size = options.setdefault("frames_per_batch", 8)
    options = {"num_envs": 4, "total_frames": batches * size, "seed": 0, **options}
    with warnings.catch_warnings(record=True) as found, kind(Numbers, policy, **options) as made:
        warnings.simplefilter("always")
        steps = range(batches) if calls else made
        for _ in steps:
            if calls:
                made.collect(size)
            between(made)
    said = [each for each in found if "update_policy_weights_()" in str(each.message)]
    assert all(each.filename == __file__ for each in said)
    return len(said)


@pytest.mark.parametrize("calls", [False, True])
def test_a_forgotten_update_is_a_warning_and_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, calls: bool
) -> None:
    net = Net()
    assert warned(net, lambda _: step(net), calls=calls, storage=tmp_path / "run") == 1
    with open_storage(tmp_path / "run") as storage:
        (run,) = storage.runs
    assert run["unversioned_weights"] == {"at": 8, "policy_version": 0}
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "weights changed after 8 transitions without update_policy_weights_()" in (
        capsys.readouterr().out
    )
    (note,) = [each for each in report(tmp_path / "run").notes if "update_policy" in each.why]
    assert "policy_version 0" in note.why


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_other_formats_keep_the_note(tmp_path: Path, suffix: str) -> None:
    net, path = Net(), tmp_path / f"run{suffix}"
    warned(net, lambda _: step(net), storage=path)
    with open_storage(path) as storage:
        assert storage.runs[-1]["unversioned_weights"]["at"] == 8


def replace_weight(net: Net) -> None:
    net.layers[0].weight = nn.Parameter(net.layers[0].weight.detach() + 1)


def replace_layer(net: Net) -> None:
    net.layers[2] = nn.Linear(4, 3)


def assign_data(net: Net) -> None:
    net.layers[0].weight.data = net.layers[0].weight.data + 1


@pytest.mark.parametrize("change", [step, replace_weight, replace_layer, assign_data])
@pytest.mark.parametrize("frozen", [False, True])
def test_each_way_to_change_weights_is_noticed(
    change: Callable[[Net], None], *, frozen: bool
) -> None:
    net = Net()
    if frozen:  # a copy for acting, which loads a learner's weights
        net.requires_grad_(False)
        learner = copy.deepcopy(net).requires_grad_(True)

        def load(_: Any) -> None:
            change(learner)
            net.load_state_dict(learner.state_dict())

        assert warned(net, load) == 1
    else:
        assert warned(net, lambda _: change(net)) == 1


HARMLESS: dict[str, Callable[[Any, Net], object]] = {
    "nothing": lambda _, net: None,
    "an update": lambda made, net: (step(net), made.update_policy_weights_()),
    "an update with weights": lambda made, net: made.update_policy_weights_(
        {name: each + 1.0 for name, each in net.state_dict().items()}
    ),
    "another place": lambda _, net: net.to("cpu"),
    "another dtype and back": lambda _, net: (net.double(), net.float()),
    "shared memory": lambda _, net: net.share_memory(),
    "gradients": lambda _, net: (
        net.layers[0].weight.sum().backward(),
        net.zero_grad(set_to_none=True),
    ),
    "frozen and not": lambda _, net: net.layers.requires_grad_(
        not net.layers[0].weight.requires_grad
    ),
    "one layer frozen and not": lambda _, net: net.layers[2].requires_grad_(
        not net.layers[2].weight.requires_grad
    ),
    "train and eval": lambda _, net: net.train(not net.training),
    "the same values elsewhere": lambda _, net: setattr(
        net.layers[0], "weight", nn.Parameter(net.layers[0].weight.detach().clone())
    ),
}


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_is_said_of_what_changes_no_weights(
    tmp_path: Path, name: str, *, calls: bool
) -> None:
    net = Net()
    between = HARMLESS[name]
    found = warned(net, lambda made: between(made, net), calls=calls, storage=tmp_path / "run")
    assert found == 0
    with open_storage(tmp_path / "run") as storage:
        assert "unversioned_weights" not in storage.runs[-1]


def test_weights_may_change_until_the_policy_acts() -> None:
    net = Net()

    def before(made: SyncCollector) -> None:
        if made.ledger.stored <= 16:
            step(net)

    assert warned(net, before, init_random_frames=16) == 0
    assert warned(net, before, init_random_frames=12) == 1
    net = Net()
    with SyncCollector(Numbers, net, num_envs=2, frames_per_batch=4, total_frames=8) as made:
        step(net)
        net.load_state_dict(Net().state_dict())
        for _ in made:
            pass


def test_a_loaded_state_is_no_forgotten_update(tmp_path: Path) -> None:
    net = Net()
    given: dict[str, Any] = {"frames_per_batch": 4, "total_frames": 16, "num_envs": 2, "seed": 0}
    with SyncCollector(Numbers, net, **given) as made:
        next(iter(made))
        state = made.state_dict()
    step(net)
    with SyncCollector(Numbers, net, **given) as made:
        made.load_state_dict(state)
        net.load_state_dict(Net().state_dict())
        for _ in made:
            pass


def test_an_update_before_the_change_is_one_too_early() -> None:
    net = Net()
    assert warned(net, lambda made: (made.update_policy_weights_(), step(net))) == 1


def test_many_parameters_are_looked_at_in_turn() -> None:
    """A change in one of 60 layers is noticed within a few calls of four rows."""

    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.ModuleList([nn.Linear(1, 1) for _ in range(60)])

    net, calls = Deep(), []

    def between(made: SyncCollector) -> None:
        calls.append(0)
        if len(calls) == 3:
            with torch.no_grad():
                net.more[37].bias += 1  # type: ignore[operator]

    options = {
        "frames_per_batch": 4,
    }
    assert warned(net, between, batches=100, **options) == 1


class ActionContext:
    """Plain object with a method that acts by a network."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def __call__(self, td: Any) -> Any:
        return td.set("action", self.net(td["observation"]))


def by_function(net: Net) -> Any:
    def act(observation: torch.Tensor) -> torch.Tensor:
        return net(observation)

    return act


def test_kinds_of_policies_that_show_their_weights() -> None:
    for make in (
        lambda net: TensorDictModule(net, ["observation"], ["action"]),
        lambda net: torch.compile(net, backend="eager"),
        by_function,
        lambda net: {0: 0} and [([0, 1], net), ([2, 3], OnePolicy(None))],
    ):
        net = Net()
        assert warned(make(net), lambda _, net=net: step(net)) == 1  # type: ignore[misc]
        net = Net()
        assert warned(make(net), lambda _: None) == 0


def test_kinds_of_policies_that_show_none_are_let_be() -> None:
    net = Net()
    assert warned(ActionContext(net), lambda _: step(net)) == 0  # no cheap check detects it
    lazy = nn.Sequential(nn.LazyLinear(3))
    module = TensorDictModule(lambda seen: lazy(seen).argmax(-1), ["observation"], ["action"])
    assert warned(module, lambda _: None) == 0
    with torch.inference_mode():
        made = Net()
    made.forward = lambda observation: made.layers(observation).argmax(-1)  # type: ignore[method-assign]
    assert warned(made.eval(), lambda _: None) == 0


def test_one_of_several_policies_in_its_opening_has_not_acted() -> None:
    first, second = Net(), Net()
    policies = [([0, 1], first), ([2, 3], OnePolicy(second, init_random_frames=12))]

    def between(made: SyncCollector) -> None:
        if made.ledger.stored <= 24:
            step(second)

    assert warned(policies, between, batches=6) == 0
    assert warned(policies, lambda _: step(second), batches=6) == 1


def test_copies_that_act_are_no_live_weights() -> None:
    for options in ({}, {"policy_placement": "central"}):
        net = Net()
        found = warned(
            net,
            lambda _, net=net: step(net),  # type: ignore[misc]
            kind=MultiprocessCollector,
            num_workers=2,
            transport="thread",
            **options,
        )
        assert found == 0


def test_a_function_that_acts_centrally_has_live_weights() -> None:
    net = Net()
    more = {"num_workers": 2, "transport": "thread", "policy_placement": "central"}
    assert warned(by_function(net), lambda _: step(net), kind=MultiprocessCollector, **more) == 1


def test_a_collector_by_torchrls_name_warns_too() -> None:
    net = TensorDictModule(Net(), ["observation"], ["action"])
    made = NamedColumn(Numbers, net, num_envs=2, frames_per_batch=8, total_frames=32)
    next(batches := iter(made))
    step(net)
    with pytest.warns(UserWarning, match="update_policy_weights_"):
        next(batches)
    made.shutdown()


def test_a_warning_that_is_an_error_costs_nothing() -> None:
    net = Net()
    with SyncCollector(Numbers, net, num_envs=2, frames_per_batch=4, total_frames=12) as made:
        batches = iter(made)
        next(batches)
        step(net)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning):
                next(batches)
        assert len(list(batches)) == 2
