"""Columns of a policy with many outputs equal those that TorchRL's own collector keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from tensordict.nn import TensorDictModule as Module
from tensordict.nn import TensorDictSequential as Sequential
from torch import nn
from torchrl.envs import EnvBase, GymEnv, InitTracker, TransformedEnv
from torchrl.modules import (
    ActorValueOperator,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    RandomPolicy,
    TanhNormal,
    ValueOperator,
)

from tallyroll.collector import SyncCollector

from collect_kit import joined
from theirs_kit import theirs

BUDGET: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 60}
OBS = ["observation"]

cart = partial(GymEnv, "CartPole-v1")
index = partial(cart, categorical_action_encoding=True)
pendulum = partial(GymEnv, "Pendulum-v1")


def tracked(make: Callable[[], EnvBase]) -> Callable[[], EnvBase]:
    return lambda: TransformedEnv(make(), InitTracker())


def q_values(env: EnvBase, **options: Any) -> QValueActor:
    return QValueActor(nn.Linear(4, 2), in_keys=OBS, spec=env.action_spec, **options)


def greedy(env: EnvBase) -> Sequential:
    explore = EGreedyModule(spec=env.action_spec, eps_init=0.5, annealing_num_steps=100)
    return Sequential(q_values(env), explore)


def logits(env: EnvBase, kind: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        Module(nn.Linear(4, 2), OBS, ["logits"]),
        in_keys=["logits"],
        distribution_class=kind,
        return_log_prob=True,
        spec=env.action_spec,
    )


def normal(seen: str = "observation") -> ProbabilisticActor:
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        Module(net, [seen], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def actor_and_critic(_: EnvBase) -> ActorValueOperator:
    common = Module(nn.Linear(3, 3), OBS, ["hidden"])
    return ActorValueOperator(
        common, normal("hidden"), ValueOperator(nn.Linear(3, 1), in_keys=["hidden"])
    )


def lstm(env: Any) -> Sequential:
    memory = LSTMModule(4, 8, device="cpu", in_key="observation", out_key="embed")
    env.append_transform(memory.make_tensordict_primer())
    head = QValueActor(nn.Linear(8, 2), in_keys=["embed"], spec=env.action_spec)
    return Sequential(memory, head)


def gru(env: Any) -> Sequential:
    memory = GRUModule(3, 8, device="cpu", in_key="observation", out_key="embed")
    env.append_transform(memory.make_tensordict_primer())
    return Sequential(memory, Module(nn.Linear(8, 1), ["embed"], ["action"]))


def noise(env: EnvBase) -> Sequential:
    """Return a policy with noise, whose states have names that begin with an underscore."""
    explore = OrnsteinUhlenbeckProcessModule(spec=env.action_spec, annealing_num_steps=100)
    return Sequential(Module(nn.Linear(3, 1), OBS, ["action"]), explore)


def composite(_: EnvBase) -> ProbabilisticTensorDictSequential:
    split = Module(
        lambda raw: (raw[..., :1], raw[..., 1:].exp()),
        ["raw"],
        [("params", "action", "loc"), ("params", "action", "scale")],
    )
    draw = ProbabilisticTensorDictModule(
        in_keys=["params"],
        out_keys=["action"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"action": torch.distributions.Normal}},
        return_log_prob=True,
    )
    return ProbabilisticTensorDictSequential(Module(nn.Linear(3, 2), OBS, ["raw"]), split, draw)


def beside(out_keys: list[Any]) -> Callable[[EnvBase], Sequential]:
    """Return a policy that writes the action and values of many dtypes and keys."""

    def make(env: EnvBase) -> Sequential:
        values = (torch.double, torch.bool, torch.half, torch.int32, torch.uint8)
        write = Module(
            lambda seen: tuple(seen[..., :2].to(dtype) for dtype in values[: len(out_keys)]),
            OBS,
            out_keys,
        )
        return Sequential(q_values(env), write)

    return make


CASES: dict[str, tuple[Callable[[], EnvBase], Callable[[EnvBase], Any]]] = {
    "values": (cart, q_values),
    "values, index": (index, partial(q_values, action_space="categorical")),
    "epsilon-greedy": (cart, greedy),
    "drawn one-hot": (cart, partial(logits, kind=OneHotCategorical)),
    "drawn index": (index, partial(logits, kind=torch.distributions.Categorical)),
    "normal": (pendulum, lambda _: normal()),
    "actor and critic": (pendulum, actor_and_critic),
    "lstm": (tracked(cart), lstm),
    "gru": (tracked(pendulum), gru),
    "noise with states": (tracked(pendulum), noise),
    "composite": (pendulum, composite),
    "selected": (cart, lambda env: Sequential(q_values(env), selected_out_keys=["action"])),
    "random": (cart, lambda env: RandomPolicy(env.full_action_spec)),
    "many dtypes": (cart, beside(["a", "b", "c", "d", "e"])),
    "nested": (cart, beside([("mine", "a"), ("mine", "deep", "b"), "c"])),
    "under next": (cart, beside([("next", "hint")])),
    "its own": (cart, beside(["_a", ("mine", "_b"), ("_mine", "c"), "d"])),
}
OURS = {("collector", name) for name in ("step", "policy_version", "lane")}
ROOT = {("done",), ("terminated",), ("truncated",)}


@pytest.mark.filterwarnings(
    "ignore::tallyroll.collector.batches.checks.value_checks.OutOfRangeWarning"
)
@pytest.mark.parametrize("case", CASES)
def test_columns_are_those_that_torchrl_keeps(case: str) -> None:
    make, policy_of = CASES[case]

    def pair() -> tuple[EnvBase, Any]:
        env = make()
        torch.manual_seed(5)
        return env, policy_of(env)

    wanted = theirs(*pair(), **BUDGET)
    with SyncCollector(*pair(), **BUDGET, seed=0) as collector:
        rows = joined(list(collector))
    mine, other = (
        {key if isinstance(key, tuple) else (key,) for key in each.keys(True, True)}
        for each in (rows, wanted)
    )
    assert mine - OURS == other - ROOT
    for key in mine & other - {("collector", "traj_ids")}:
        wanted_column = wanted[key]
        assert rows[key].dtype == wanted_column.dtype, key
        if key == ("is_init",):  # a batch may begin within a trajectory
            ids = rows["collector", "traj_ids"]
            batch = torch.arange(len(ids)) // BUDGET["frames_per_batch"]
            begins = (ids.diff(prepend=ids[:1] - 1) != 0) | (batch.diff(prepend=batch[:1]) != 0)
            wanted_column = wanted_column | begins.reshape(wanted_column.shape)
        assert torch.equal(rows[key], wanted_column), key


def test_what_is_no_tensor_is_told() -> None:
    policy = Sequential(q_values(cart()), Module(lambda seen: "why", OBS, ["reason"]))
    with (
        pytest.warns(
            UserWarning, match="the policy writes reason as NonTensorData, which no column"
        ),
        SyncCollector(cart(), policy, **BUDGET) as collector,
    ):
        assert "reason" not in joined(list(collector)).keys()
