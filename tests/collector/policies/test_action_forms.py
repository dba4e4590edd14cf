"""Actions in another form than the declared one are converted if nothing is lost."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch.nn.functional import one_hot
from torchrl.data import Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded
from torchrl.envs import GymEnv

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.errors import PolicyError
from tallyroll.collector.policies.action_forms import form_of

from collect_kit import collect, joined
from pairs import in_gate
from worker_kit import collect_all, in_threads, start

if TYPE_CHECKING:
    from tensordict import TensorDictBase

FRAMES = 60
A = torch.arange


def choice(observation: torch.Tensor) -> torch.Tensor:
    """Choose 0 or 1 by the observation, so that both occur."""
    return (observation[..., 1] > 0).long()


def hot(observation: torch.Tensor) -> torch.Tensor:
    return one_hot(choice(observation), 2)


FORMS: dict[str, Any] = {
    "bool": lambda seen: choice(seen).bool(),
    "bool, an axis more": lambda seen: choice(seen).bool().unsqueeze(-1),
    "int32": lambda seen: choice(seen).int(),
    "uint8": lambda seen: choice(seen).to(torch.uint8),
    "float": lambda seen: choice(seen).float(),
    "an axis more": lambda seen: choice(seen).unsqueeze(-1),
    "one-hot": hot,
    "bool one-hot": lambda seen: hot(seen).bool(),
    "float one-hot": lambda seen: hot(seen).float(),
}
ENVS: dict[str, Any] = {
    "an id": lambda: "CartPole-v1",
    "lanes": lambda: GymnasiumVectorEnv(SyncVectorEnv([cart] * 3)),
    "reset slots": lambda: GymnasiumVectorEnv(
        SyncVectorEnv([cart] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    ),
    "TorchRL, index": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "TorchRL, one-hot": lambda: GymEnv("CartPole-v1", categorical_action_encoding=False),
}


def cart() -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")


def rows_of(env: Any, act: Any, **options: Any) -> TensorDictBase:
    policy = TensorDictModule(act, ["observation"], ["action"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "action is stored as")
        return joined(
            collect(env, policy, frames_per_batch=20, total_frames=FRAMES, seed=3, **options)[0]
        )


@pytest.mark.parametrize(("env", "form"), in_gate(ENVS, FORMS))
def test_rows_are_those_of_the_form_that_is_declared(env: str, form: str) -> None:
    declared = hot if env == "TorchRL, one-hot" else choice
    wanted = rows_of(ENVS[env](), declared)
    rows = rows_of(ENVS[env](), FORMS[form])
    assert (rows == wanted).all()
    assert rows["action"].dtype == wanted["action"].dtype
    assert len(rows["action"].unique()) == 2
    assert torch.equal(declared(rows["observation"]), rows["action"])


def test_the_same_in_random_frames_and_workers() -> None:
    makes = [partial(SyncVectorEnv, [cart] * 2)] * 2
    budget = {"frames_per_batch": 20, "total_frames": FRAMES, "seed": 3, "init_random_frames": 10}
    found = []
    for act in (choice, FORMS["bool, an axis more"]):
        policy = TensorDictModule(act, ["observation"], ["action"])
        with in_threads():
            found.append(joined(collect_all(start(makes, policy, **budget)).batches))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize(
    ("env", "act", "stored"),
    [("lanes", hot, "an index"), ("TorchRL, one-hot", choice, "a one-hot")],
)
def test_what_a_loss_has_to_know_is_said_once(env: str, act: Any, stored: str) -> None:
    policy = TensorDictModule(act, ["observation"], ["action"])
    with pytest.warns(UserWarning, match=f"action is stored as {stored}, which the") as said:
        collect(ENVS[env](), policy, frames_per_batch=20, total_frames=FRAMES)
    assert len(said) == 1


def test_the_shape_that_a_box_wants(recwarn: Any) -> None:
    act = lambda seen: seen[..., 1].clamp(-1, 1)  # noqa: E731
    env = lambda: "Pendulum-v1"  # noqa: E731
    wanted = rows_of(env(), lambda seen: act(seen).unsqueeze(-1), num_envs=2)
    rows = rows_of(env(), act, num_envs=2)
    assert (rows == wanted).all()
    assert not recwarn.list


def test_a_value_that_would_be_lost_later_is_refused(tmp_path: Any) -> None:
    calls = []

    def act(seen: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return choice(seen).float() + (0.25 if len(calls) > 12 else 0)

    policy = TensorDictModule(act, ["observation"], ["action"])
    with (
        SyncCollector(
            "CartPole-v1", policy, frames_per_batch=5, total_frames=50, storage=tmp_path / "rows"
        ) as collector,
        pytest.raises(
            PolicyError, match=r"action: expected a number that int64 can hold, got [01]\.25"
        ),
    ):
        list(collector)
    assert 5 <= collector.ledger.stored <= 12
    collector.ledger.check()


# --- the arithmetic -------------------------------------------------------------------------------


def changed(value: torch.Tensor, spec: Any, lead: int = 1) -> torch.Tensor | None:
    form = form_of(("action",), value, spec, lead)
    return None if form is None else form(value)


TOP = 2**53
INT = {name: torch.iinfo(getattr(torch, name)) for name in ("int8", "uint8", "int32", "int64")}


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor([True, False]), torch.float32),
        (torch.tensor([-128, 127]), torch.int8),
        (torch.tensor([-128, 127], dtype=torch.int8), torch.int64),
        (torch.tensor([255], dtype=torch.uint8), torch.int32),
        (torch.tensor([2**24, -(2**24)]), torch.float32),
        (torch.tensor([float(TOP)], dtype=torch.float64), torch.int64),
        (torch.tensor([0.1, float("inf")]), torch.float64),
        (torch.tensor([0, 1]), torch.bool),
    ],
)
def test_dtypes_that_hold_what_is_given(value: torch.Tensor, dtype: torch.dtype) -> None:
    found = changed(value, Unbounded(value.shape, dtype=dtype))
    assert found is not None
    assert found.dtype == dtype
    assert torch.allclose(found.double(), value.double())


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor([0, 128]), torch.int8),
        (torch.tensor([200], dtype=torch.uint8), torch.int8),
        (torch.tensor([-1], dtype=torch.int8), torch.uint8),
        (torch.tensor([2**24 + 1]), torch.float32),
        (torch.tensor([INT["int64"].max]), torch.float32),
        (torch.tensor([2.0**63], dtype=torch.float64), torch.int64),
        (torch.tensor([0.5]), torch.int64),
        (torch.tensor([float("nan")]), torch.int64),
        (torch.tensor([float("inf")]), torch.int64),
        (torch.tensor([0, 2]), torch.bool),
    ],
)
def test_dtypes_that_do_not(value: torch.Tensor, dtype: torch.dtype) -> None:
    with pytest.raises(PolicyError, match=r"expected a number that .* can hold, got"):
        changed(value, Unbounded(value.shape, dtype=dtype))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.zeros(2, dtype=torch.float64), torch.float32),
        (torch.zeros(2), torch.float16),
        (torch.zeros(2, dtype=torch.bfloat16), torch.float16),
        (torch.zeros(2, dtype=torch.complex64), torch.float32),
    ],
)
def test_narrower_floats_are_refused_at_once(value: torch.Tensor, dtype: torch.dtype) -> None:
    """The refusal precedes the run, instead of the first number that does not fit."""
    assert changed(value, Unbounded(value.shape, dtype=dtype)) is None


CASES: dict[str, tuple[Any, Any, Any]] = {
    "index": (one_hot(A(3), 3), Categorical(3, shape=(3,)), A(3)),
    "index of an axis more": (one_hot(A(3), 3), Categorical(3, shape=(3, 1)), A(3)[:, None]),
    "of two axes": (one_hot(A(3), 3)[:, None], Categorical(3, shape=(3, 1)), A(3)[:, None]),
    "one lane": (one_hot(A(1), 3), Categorical(3, shape=(1,)), A(1)),
    "a lane of one value": (torch.zeros(2, 1).long(), Categorical(1, shape=(2,)), torch.zeros(2)),
    "one-hot": (A(3), OneHot(3, shape=(3, 3)), one_hot(A(3), 3)),
    "one-hot, an axis more": (A(3)[:, None], OneHot(3, shape=(3, 3)), one_hot(A(3), 3)),
    "agents": (A(6).view(2, 3) % 4, OneHot(4, shape=(2, 3, 4)), one_hot(A(6).view(2, 3) % 4, 4)),
    "indices": (
        torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]),
        MultiCategorical([2, 3], shape=(2, 2)), torch.tensor([[1, 2], [0, 0]]),
    ),
    "one-hots": (
        torch.tensor([[1, 2], [0, 0]]),
        MultiOneHot([2, 3], shape=(2, 5)), torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_hots_and_indices(case: str) -> None:
    value, spec, wanted = CASES[case]
    found = changed(value, spec)
    assert found is not None
    assert found.dtype == spec.dtype
    assert torch.equal(found, wanted.to(spec.dtype))
    assert spec.is_in(found)


@pytest.mark.parametrize(
    ("value", "spec", "lead"),
    [
        # not a one-hot of the only lane, because the lane axis is missing
        (A(3), Categorical(3, shape=(1,)), 1),
        (A(2), Unbounded((2, 2), dtype=torch.int64), 1),
        (torch.zeros(2, 4), Categorical(3, shape=(2,)), 1),
        (torch.zeros(2, 2), OneHot(3, shape=(2, 3)), 1),
        (torch.zeros(2, 2, 1, 1), Categorical(3, shape=(2, 2)), 1),
        (torch.zeros(3), Categorical(2, shape=(2,)), 1),
    ],
)
def test_shapes_that_could_mean_anything_are_refused(value: Any, spec: Any, lead: int) -> None:
    assert form_of(("action",), value, spec, lead) is None


@pytest.mark.parametrize("value", [[[0, 0, 0]], [[1, 1, 0]], [[0.5, 0.5, 0]], [[0, 2, 0]]])
def test_what_is_no_one_hot(value: Any) -> None:
    with pytest.raises(PolicyError, match="expected an index or a one-hot vector"):
        changed(torch.tensor(value), Categorical(3, shape=(1,)))


@pytest.mark.parametrize("value", [3, -1, 7])
def test_an_index_of_no_value(value: int) -> None:
    with pytest.raises(PolicyError, match=rf"expected indices 0\.\.2, got {value}"):
        changed(torch.tensor([0, value]), OneHot(3, shape=(2, 3)))


def test_what_an_environment_is_handed() -> None:
    """A Gymnasium vector receives exactly the dtype and shape of its space."""
    got: list[Any] = []
    kind = spaces.MultiDiscrete([2, 3])

    import gymnasium

    class Telling(gymnasium.Env[Any, Any]):
        observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), kind

        def reset(self, **kwargs: Any) -> Any:
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action)
            got.append(action.copy())
            return np.zeros(2, np.float32), 0.0, False, False, {}

    def act(seen: torch.Tensor) -> torch.Tensor:
        row = torch.tensor([0.0, 1, 0, 0, 1])
        return row.expand(*seen.shape[:-1], 5)

    rows = rows_of(SyncVectorEnv([Telling] * 2), act)
    assert (rows["action"] == torch.tensor([1, 2])).all()
    assert np.array_equal(np.unique(np.stack(got), axis=0), [[1, 2]])
