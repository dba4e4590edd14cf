"""Networks are called without TensorDicts if no caller can notice the difference."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn.modules import module as of_all
from torch.nn.utils.parametrize import register_parametrization

from tallyroll.collector import SyncCollector
from tallyroll.collector.errors import PolicyError
from tallyroll.collector.policies.direct_forward import DirectForward
from tallyroll.storage import open_storage

if TYPE_CHECKING:
    from pathlib import Path

FRAMES = 90


class Net(nn.Module):
    """Network that draws an action by its observation and returns it through ``wrap``."""

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
        observation.zero_()  # may overwrite its own input
        return self.wrap(torch.multinomial(chance, 1).squeeze(-1))


class Longer(TensorDictModule):
    """Subclass, which is called through TensorDicts."""


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
    """Record the slots of direct calls."""
    made: list[int] = []
    original = DirectForward.__call__

    def counted(self: DirectForward, network: Any, at: int, *given: Any) -> Any:
        made.append(at)
        return original(self, network, at, *given)

    monkeypatch.setattr(DirectForward, "__call__", counted)
    return made


@pytest.mark.parametrize(
    "wrap",
    [
        None,
        lambda action: (action,),
        lambda action: {"action": action},
        lambda action: action.numpy(),
        lambda action: action.tolist(),
        lambda action: (action.numpy(),),
        lambda action: {"action": action.tolist()},
        lambda action: action.numpy()[:, None][:, 0],
    ],
    ids=["tensor", "tuple", "dict", "numpy", "list", "tuple of numpy", "dict of list", "strided"],
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
    """Module that acts by another method than `forward`."""

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
        (lambda action: action.float(), r"action: expected int64 \[3\] .* got float32"),
        (lambda action: action[:2], r"action: expected int64 \[3\] .* got int64 \[2\]"),
        (lambda action: (action, action), "action is missing"),
        (lambda action: {"other": action}, "action: expected .* got TensorDict"),
        (lambda action: [*action], "action: expected .* got NonTensorStack"),
        (lambda action: None, "action is missing"),
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


# --- changes during a run -------------------------------------------------------------------------


class Seen(gymnasium.Env[Any, Any]):
    """Environment of random observations of four numbers, independent of actions."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1e6, 1e6, (4,), np.float32)
    count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action: np.ndarray) -> Any:
        self.count += 1
        return self.seen(), 0.0, self.count % 7 == 0, False, {}

    def seen(self) -> Any:
        return self.np_random.random(4, np.float32)


class Pair(Seen):
    """Environment of two such observations, of which a policy reads one."""

    observation_space = gymnasium.spaces.Dict(
        dict.fromkeys(("observation", "other"), Seen.observation_space)
    )

    def seen(self) -> Any:
        return {name: super(Pair, self).seen() for name in self.observation_space}


class Duplicates(TensorDictModule):
    def forward(self, *given: Any, **more: Any) -> Any:
        td = super().forward(*given, **more)
        return td.set("action", 2 * td["action"])


class Layers(nn.Module):
    """Network with several methods that act."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, observation: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        return times * self.dropout(self.layer(observation))

    def thrice(self, observation: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        return 3 * self(observation, times)


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def negated(original: Any) -> Any:
    """Wrap ``original`` to negate the actions that it returns."""

    @wraps(original)
    def replaced(*given: Any, **more: Any) -> Any:
        return negate(None, None, original(*given, **more))

    return replaced


def negate(_module: Any, _given: Any, out: Any) -> Any:
    return out.set("action", -out["action"]) if isinstance(out, TensorDictBase) else out


def triple(_module: Any, given: Any) -> Any:
    (seen,) = given
    return (seen.apply(lambda each: 3 * each),) if isinstance(seen, TensorDictBase) else None


Change = Callable[[Any, pytest.MonkeyPatch], Any]


def on_class(kind: Any, name: str) -> Change:
    return lambda _, patch: patch.setattr(kind, name, negated(getattr(kind, name)))


def on_instance(name: str, to: Any = None) -> Change:
    def change(policy: Any, _: Any) -> None:
        setattr(policy, name, negated(getattr(policy, name)) if to is None else to)

    return change


def on_network(**values: Any) -> Change:
    return lambda policy, _: [setattr(policy.module, name, to) for name, to in values.items()]


def for_all(hooks: Any, hook: Any) -> Change:
    """Register a hook for all modules until the test ends.

    It acts like `register_module_forward_hook`.
    """
    return lambda _, patch: patch.setitem(hooks, 1_000_000, hook)


def two_outputs(policy: Any, _: Any) -> None:
    policy.module = nn.Module()
    policy.module.forward = lambda seen: (-seen, seen)
    policy.out_keys = ["more", "action"]


CHANGES: dict[str, Change] = {
    "forward of the instance": on_instance("forward"),
    "forward of the class": on_class(TensorDictModule, "forward"),
    "call of the class": on_class(TensorDictModule, "__call__"),
    "call of all modules": on_class(nn.Module, "__call__"),
    "inner call of the instance": on_instance("_call_impl"),
    "inner call of all modules": on_class(nn.Module, "_call_impl"),
    "calling": on_instance("_call_module", lambda tensors: tensors[0] + 1),
    "writing": on_instance("_write_to_tensordict"),
    "writing of the class": on_class(TensorDictModule, "_write_to_tensordict"),
    "in_keys of the class": lambda _, patch: patch.setattr(
        TensorDictModule, "in_keys", property(lambda self: self._in_keys[::-1])
    ),
    "compiled": lambda policy, _: policy.compile(backend="eager"),
    "hook": lambda policy, _: policy.register_forward_hook(negate),
    "earlier hook": lambda policy, _: policy.register_forward_pre_hook(triple),
    "hook for all": for_all(of_all._global_forward_hooks, negate),
    "earlier hook for all": for_all(of_all._global_forward_pre_hooks, triple),
    "other hooks": lambda policy, _: vars(policy).update(_forward_hooks=OrderedDict({0: negate})),
    "another class": on_instance("__class__", Duplicates),
    "other attributes": lambda policy, _: vars(policy).update(
        vars(TensorDictModule(nn.Linear(4, 4), ["observation"], ["action"], method="forward"))
    ),
    "another dictionary": lambda policy, _: setattr(
        policy, "__dict__", vars(TensorDictModule(Layers(), ["observation"], ["action"]))
    ),
    "another network": lambda policy, _: setattr(policy, "module", nn.Linear(4, 4)),
    "another method": on_instance("method", "thrice"),
    "other arguments": lambda policy, _: policy.method_kwargs.update(times=5.0),
    "names of arguments": on_instance("_kwargs", ["observation"]),
    "in_keys": on_instance("in_keys", ["observation", "other"]),
    "in_keys in place": lambda policy, _: policy.in_keys.append("other"),
    "out_keys": two_outputs,
    "no change": on_instance("in_keys", ["observation"]),
    "eval": lambda policy, _: policy.eval(),
    "an attribute": on_instance("remark", "new"),
    "a layer": on_network(layer=nn.Linear(4, 4)),
    "forward of the network": on_network(forward=lambda seen: seen - 1),
    "parametrized": lambda policy, _: register_parametrization(
        policy.module.layer, "weight", Half()
    ),
    "parametrized module": lambda policy, _: (
        policy.register_parameter("own", nn.Parameter(torch.ones(4))),
        register_parametrization(policy, "own", Half()),
    ),
}
STAYS_BARE = {
    "another network",
    "another dictionary",
    "no change",
    "eval",
    "an attribute",
    "a layer",
}
STAYS_BARE |= {"forward of the network", "parametrized"}
OF_A_PAIR = {"in_keys", "in_keys in place"}


def rows_with(change: Change, env: Any, wrap: Any, path: Path, once: int) -> TensorDictBase:
    """Return the rows of a run during which ``change`` is applied.

    Each call collects ``once`` rows.
    """
    torch.manual_seed(0)
    policy: Any = TensorDictModule(Layers(), ["observation"], ["action"])
    with (
        pytest.MonkeyPatch.context() as patch,
        SyncCollector(
            lambda: SyncVectorEnv([env] * 2, autoreset_mode=AutoresetMode.DISABLED),
            wrap(policy),
            frames_per_batch=6,
            total_frames=60,
            seed=3,
            storage=path,
        ) as made,
    ):
        for call in range(24 // once):
            if call == 12 // once:
                change(policy, patch)
            made.collect(once)
    with open_storage(path, mode="read") as storage:
        return storage[:].clone()


@pytest.mark.filterwarnings("ignore:policy. its parameters changed:UserWarning")
@pytest.mark.parametrize(
    ("name", "env", "once"),
    [
        *((name, Pair, 6) for name in CHANGES),
        *(
            pytest.param(name, Seen, 2, marks=[pytest.mark.slow] * (turn % 3 > 0))
            for turn, name in enumerate(each for each in CHANGES if each not in OF_A_PAIR)
        ),
    ],
)
def test_actions_are_those_of_the_module_itself(
    name: str, env: Any, once: int, tmp_path: Path, calls: list[int]
) -> None:
    change = CHANGES[name]
    wanted = rows_with(change, env, lambda policy: lambda td: policy(td), tmp_path / "a", once)
    assert not calls
    rows = rows_with(change, env, lambda policy: policy, tmp_path / "b", once)
    assert torch.equal(rows["action"], wanted["action"])
    assert torch.equal(rows["observation"], wanted["observation"])
    if env is Pair:
        assert len(calls) == (12 if name in STAYS_BARE else 6), "slots without tensordicts"
