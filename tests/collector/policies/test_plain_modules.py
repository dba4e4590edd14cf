"""Modules and functions of tensors are accepted as policies, as in TorchRL's own collector."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs import GymEnv, InitTracker, StepCounter, TransformedEnv

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.errors import ArgumentError, PolicyError
from tallyroll.collector.policies.direct_forward import DirectForward

from collect_kit import collect, joined
from theirs_kit import theirs
from worker_kit import in_threads, start

BUDGET: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 60}
pendulum = partial(GymEnv, "Pendulum-v1")


class Net(nn.Module):
    """Network with an argument named like the observation.

    It returns ``outputs`` values, the action first.
    """

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.outputs = nn.Linear(3, 1), outputs

    def forward(self, observation: Tensor) -> Any:
        action = self.layer(observation).tanh()
        values = [action, action + 1, observation.sum(-1)]
        return action if self.outputs == 1 else tuple(values[: self.outputs])


class Stepping(Net):
    """Network with a second observation as its first argument."""

    def forward(self, step_count: Tensor, observation: Tensor) -> Tensor:  # type: ignore[override]
        assert step_count.dtype is torch.int64
        return super().forward(observation) / (1 + step_count)


class Optional(Net):
    """Network with optional arguments, of which one is available."""

    def forward(  # type: ignore[override]
        self,
        observation: Tensor,
        scale: float = 0.5,
        step_count: Any = None,
        *,
        is_init: Any = None,
    ) -> Tensor:
        assert (step_count is None) == (is_init is None)
        by = scale if step_count is None else scale / (1 + step_count)
        return super().forward(observation) * by


def function(observation: Tensor) -> Tensor:
    return observation[..., :1] * 0.5


class Alone(Net):
    """Network that returns a tuple of only the action."""

    def forward(self, observation: Tensor) -> Any:
        return (super().forward(observation),)


class Calls:
    """Callable object that is not a module."""

    def __call__(self, observation: Tensor) -> Tensor:
        return function(observation)


POLICIES: dict[str, Any] = {
    "module": Net,
    "tuple of one": Alone,
    "two values": partial(Net, 2),
    "three values": partial(Net, 3),
    "two inputs": Stepping,
    "optional inputs": Optional,
    "function": lambda: function,
    "its own call": Calls,
}


def counted() -> TransformedEnv:
    return TransformedEnv(pendulum(), StepCounter())


@pytest.mark.parametrize("case", POLICIES)
def test_rows_are_those_of_torchrls_own_collector(case: str) -> None:
    make = POLICIES[case]
    # TorchRL's trial passes everything that is available
    env = counted if case == "two inputs" else pendulum
    wanted = theirs(env(), make(), **BUDGET)
    rows = joined(collect(env(), make(), **BUDGET, seed=0)[0])
    keys = {key for key in wanted.keys(True, True) if "done" not in key and "traj_ids" not in key}
    keys -= {"terminated", "truncated"}
    assert {
        "action",
        "observation",
        *(f"output{n}" for n in range(1, getattr(make(), "outputs", 1))),
    } <= keys
    for key in keys:
        assert torch.equal(rows[key], wanted[key]), key
    extra = {key for key in rows.keys() if key not in wanted.keys()}
    assert extra == set()


def test_an_argument_behind_a_gap_is_given_by_name() -> None:
    env = TransformedEnv(pendulum(), InitTracker())
    env.append_transform(StepCounter())
    rows = joined(collect(env, Optional(), **BUDGET)[0])
    with torch.no_grad():
        wanted = Net()(rows["observation"]) * 0.5 / (1 + rows["step_count"])
    assert torch.allclose(rows["action"], wanted)


class NamedColumn(Net):
    """Network whose argument is not named like any observation."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


ONE_ARGUMENT: dict[str, Any] = {
    "sequential": lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh()),
    "of another name": NamedColumn,
    "compiled": lambda: torch.compile(Net(), backend="eager"),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 1), nn.Tanh())),
}
ENVS: dict[str, Any] = {
    "id": lambda: ("Pendulum-v1", {"num_envs": 2}),
    "time limit": lambda: ("Pendulum-v1", {"num_envs": 2, "max_frames_per_traj": 7}),
    "tracked": lambda: (TransformedEnv(pendulum(), InitTracker()), {}),
    "infos": lambda: (
        GymnasiumVectorEnv(gym.make_vec("Pendulum-v1", 2), info_keys=[]), {},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("case", ONE_ARGUMENT)
def test_a_module_of_one_argument_takes_the_observation(case: str, env: str) -> None:
    torch.manual_seed(0)
    module = ONE_ARGUMENT[case]()
    create, options = ENVS[env]()
    rows = joined(collect(create, module, **BUDGET, **options)[0])
    with torch.no_grad():
        assert torch.allclose(rows["action"], module(rows["observation"]), atol=1e-6)
    assert rows["action"].unique().numel() > 20


def test_it_is_called_without_tensordicts_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = DirectForward.__call__
    monkeypatch.setattr(
        DirectForward,
        "__call__",
        lambda self, *given: calls.append(given) or original(self, *given),
    )
    collect("Pendulum-v1", Net(), **BUDGET)
    assert len(calls) == 60


def test_a_compiled_module_of_tensordicts() -> None:
    module = TensorDictModule(Net(), ["observation"], ["action"])
    compiled: Any = torch.compile(module, backend="eager")
    with SyncCollector("Pendulum-v1", compiled, **BUDGET) as collector:
        batches = iter(collector)
        next(batches)
        collector.update_policy_weights_({name: v * 0 for name, v in module.state_dict().items()})
        assert (next(batches)["action"] == 0).all()


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["state_dict", "tensordict", "module", "none"])
def test_weights_have_the_modules_own_names(form: str) -> None:
    module, other = Net(), Net()
    nn.init.zeros_(other.layer.weight)
    nn.init.zeros_(other.layer.bias)
    with SyncCollector("Pendulum-v1", module, **BUDGET) as collector:
        batches = iter(collector)
        assert (next(batches)["action"] != 0).any()
        if form == "none":
            module.load_state_dict(other.state_dict())
            collector.update_policy_weights_()
        else:
            given: Any = {
                "state_dict": other.state_dict(),
                "tensordict": TensorDict.from_module(other).data,
                "module": other,
            }[form]
            collector.update_policy_weights_(given)
        assert (next(batches)["action"] == 0).all()
        assert set(collector.state_dict()["policy"]["weights"]) == {"layer.weight", "layer.bias"}


def test_in_workers_and_their_weights() -> None:
    makes = [partial(gym.make_vec, "Pendulum-v1", 2)] * 2
    options = {"frames_per_batch": 20, "total_frames": 60, "seed": 4, "surplus": "discard"}
    module = Net()
    with in_threads():
        collector = start(makes, module, **options)
        batches = []
        for batch in collector:
            batches.append(batch.clone())
            with torch.no_grad():
                module.layer.weight.mul_(0.5)
            collector.update_policy_weights_()
        collector.shutdown()
    again = Net()
    for batch in batches:
        with torch.no_grad():
            assert torch.allclose(batch["action"], again(batch["observation"]), atol=1e-6)
            again.layer.weight.mul_(0.5)


# --- ambiguous inputs and outputs are errors ------------------------------------------------------


class Two(gym.Env[Any, Any]):
    observation_space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Box(-1, 1, (2,)))
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, **kwargs: Any) -> Any:
        return {"a": np.full(2, 0.25, np.float32), "b": np.full(2, 0.5, np.float32)}, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


def two() -> Any:
    return gym.vector.SyncVectorEnv([Two] * 2)


class Swapped(nn.Module):
    def forward(self, b: Tensor, a: Tensor) -> Tensor:
        return b - 2 * a + 0.125


def test_several_are_told_apart_by_name() -> None:
    rows = joined(collect(two(), Swapped(), **BUDGET)[0])
    assert (rows["action"] == 0.125).all()


@pytest.mark.parametrize(
    ("module", "arguments"),
    [(nn.Linear(2, 2), "['input']"), (nn.Bilinear(2, 2, 2), "['input1', 'input2']")],
)
def test_what_could_be_meant_by_nothing(module: nn.Module, arguments: str) -> None:
    with pytest.raises(ArgumentError) as found:
        collect(two(), module, **BUDGET)
    message = str(found.value)
    assert (
        f"arguments are {arguments}, but the observations are ['a', 'b']. Name the arg" in message
    )
    assert "\n" not in message


def of_two(a: Any, goal: Any) -> Any:
    raise AssertionError


def of_another(observation: Any) -> Any:
    return torch.nn.functional.linear(observation, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        (
            of_two,
            ArgumentError,
            "the arguments of of_two are ['a', 'goal'], but the observations are ['a', 'b']. Name",
        ),
        (
            of_another,
            TypeError,
            "argument 'observation' of of_another is none of the observations ['a', 'b'], so it is",
        ),
    ],
)
def test_a_function_whose_argument_is_no_observation(
    policy: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as found:
        SyncCollector(two(), policy, **BUDGET)
    assert text in "\n".join([str(found.value), *getattr(found.value, "__notes__", [])])


@pytest.mark.parametrize("kind", ["lambda", "named", "annotated", "text", "module"])
def test_what_takes_a_tensordict_goes_on_to(kind: str) -> None:
    def act(given: Any) -> Any:
        assert isinstance(given, TensorDictBase)
        return given.set("action", given["observation"][..., :1] * 0.5)

    class Module(nn.Module):
        def forward(self, tensordict: Any) -> Any:
            return act(tensordict)

    def annotated(observation: TensorDictBase) -> TensorDictBase:
        return act(observation)

    def text(observation: Any) -> Any:
        return act(observation)

    annotated.__annotations__ = {"observation": TensorDictBase}
    text.__annotations__ = {"observation": "TensorDict"}
    policy: Any = {
        "lambda": lambda whatever: act(whatever),
        "named": lambda td: act(td),
        "annotated": annotated,
        "text": text,
        "module": Module(),
    }[kind]
    rows = joined(collect("Pendulum-v1", policy, **BUDGET)[0])
    assert torch.equal(rows["action"], rows["observation"][:, :1] * 0.5)


def test_nothing_at_all_is_a_missing_action() -> None:
    class Silent(Net):
        def forward(self, observation: Tensor) -> Any:
            return ()

    with pytest.raises(PolicyError, match="expected values for action, got 0 values"):
        collect("Pendulum-v1", Silent(), **BUDGET)


def test_the_trial_leaves_no_trace() -> None:
    class Drawing(Net):
        calls = 0

        def forward(self, observation: Tensor) -> Any:
            self.calls += 1
            return torch.rand(*observation.shape[:-1], 1)

    def draws(module: Any) -> Tensor:
        torch.manual_seed(0)
        with SyncCollector("Pendulum-v1", module, **BUDGET, seed=2) as collector:
            assert getattr(module, "calls", 0) == 0
            return joined(list(collector))["action"]

    wrapped = TensorDictModule(Drawing(), ["observation"], ["action"])
    assert torch.equal(draws(Drawing()), draws(wrapped))


@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        (np.float64, "float64 [2, 3]; rows keep the environment's float64, so call .float() in th"),
        (np.float32, "float32 [2, 3]"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_the_policy_says_what_it_was_given(
    dtype: Any, note: str, *, wrapped: bool
) -> None:
    def make() -> gym.Env[Any, Any]:
        space = spaces.Box(-9.0, 9.0, (3,), dtype)
        return gym.wrappers.TransformObservation(
            gym.make("Pendulum-v1"), lambda seen: seen.astype(dtype), space
        )

    policy: nn.Module = nn.Linear(3 if dtype is np.float64 else 4, 1)
    if wrapped:
        policy = TensorDictModule(policy, ["observation"], ["action"])
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        SyncCollector(make, policy, num_envs=2, **BUDGET)
    assert f"raised by the policy, on the first observation {note}" in caught.value.__notes__[-1]
