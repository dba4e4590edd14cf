"""Out-of-box actions of exploration are stored with a single warning; NaN is always refused."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict.nn import TensorDictModule
from tensordict.nn import TensorDictSequential as Sequential
from torch import nn
from torchrl.data import Bounded
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import OrnsteinUhlenbeckProcessModule

from tallyroll.collector import SyncCollector
from tallyroll.collector.batches.checks.value_checks import OutOfRangeWarning
from tallyroll.collector.errors import PolicyError, TransitionError

from collect_kit import collect, joined
from theirs_kit import theirs
from worker_kit import collect_all, in_threads, start

if TYPE_CHECKING:
    from pathlib import Path

BUDGET: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 60}
BOX = spaces.Box(np.float32([-1, -1]), np.float32([1, np.inf]), dtype=np.float32)


class Counting(gym.Env[Any, Any]):
    """Environment that observes its step and whose reward is the action."""

    observation_space = spaces.Box(0, 8, (1,), np.float32)
    action_space = BOX

    def __init__(self, spoilt: int = -1) -> None:
        self.at, self.spoilt = 0, spoilt

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        seen = np.full(1, 9 if self.at == self.spoilt else self.at, np.float32)
        return seen, float(action[0]), self.at == 7, False, {}


def vec(lanes: int = 2, spoilt: int = -1) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Counting, spoilt if at else -1) for at in range(lanes)])


def acting(at_step: int, value: float, of: int = 0) -> Any:
    """Return a policy that acts with 0, and with ``value`` in entry ``of`` at step ``at_step``."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        action = torch.zeros(*observation.shape[:-1], 2)
        action[..., of] = torch.where(observation[..., 0] == at_step, value, 0.0)
        return action

    return TensorDictModule(act, ["observation"], ["action"])


@pytest.mark.parametrize("per_batch", [2, 20])
@pytest.mark.parametrize("value", [1.5, -7.0, 3e38])
def test_the_first_is_told_with_lane_and_step(value: float, per_batch: int) -> None:
    with pytest.warns(OutOfRangeWarning) as said:
        batches, _ = collect(vec(), acting(3, value), frames_per_batch=per_batch, total_frames=60)
    assert len(said) == 1
    message = str(said[0].message)
    assert (
        f"lane 0, step 3 of its trajectory: expected [-1, 1] and no NaN, got {value:g} at [0]"
        in message
    )
    rows = joined(batches)
    beyond = rows["action"][:, 0] != 0
    assert beyond.sum() >= 8
    assert (rows["action"][beyond, 0] == value).all()
    assert torch.equal(rows["next", "reward"][:, 0], rows["action"][:, 0])


def test_on_the_first_observation_too() -> None:
    with pytest.warns(OutOfRangeWarning, match="lane 0, step 0"):
        collect(vec(), acting(0, 4.0), **BUDGET)


def test_as_torchrls_own_collector_does() -> None:
    """The modules are those of a DDPG script, and the draws are equal."""

    def env() -> TransformedEnv:
        return TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())

    def policy() -> Sequential:
        torch.manual_seed(1)
        actor = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
        noise = {"spec": Bounded(-2, 2, (1,)), "sigma": 3.0, "theta": 0.01, "safe": False}
        return Sequential(actor, OrnsteinUhlenbeckProcessModule(**noise))

    wanted = theirs(env(), policy(), **BUDGET)
    with (
        pytest.warns(OutOfRangeWarning, match=r"expected \[-2, 2\]"),
        SyncCollector(env(), policy(), seed=0, **BUDGET) as collector,
    ):
        rows = joined(list(collector))
    assert (rows["action"].abs() > 2).any()
    for key in ("observation", "action", ("next", "reward"), ("next", "observation")):
        assert torch.equal(rows[key], wanted[key])
    assert "_ou_steps" not in rows.keys()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("validate", ["noise", "raise", "warn", "off"])
def test_what_is_no_number_is_refused_always(validate: str, value: float, tmp_path: Path) -> None:
    match = r"action lies outside the action space at lane 0, step 4 .*\. Correct the value\.$"
    with (
        SyncCollector(
            vec(), acting(4, value), **BUDGET, storage=tmp_path / "rows", validate=validate
        ) as collector,
        pytest.raises(PolicyError, match=match),
    ):
        collector.collect(60)
    assert collector.ledger.stored == 8


@pytest.mark.parametrize("order", [(2, 5), (2, 3), (3, 3)])
def test_nan_behind_noise(order: tuple[int, int]) -> None:
    noise, nan = order

    def act(observation: torch.Tensor) -> torch.Tensor:
        seen, action = observation[..., 0], torch.zeros(*observation.shape[:-1], 2)
        action[..., 0] = torch.where(seen == noise, 2.0, 0.0)
        action[..., 1] = torch.where(seen == nan, torch.nan, 0.0)
        return action

    policy = TensorDictModule(act, ["observation"], ["action"])
    with (
        pytest.warns(OutOfRangeWarning, match=rf"step {noise} .*got 2 at"),
        pytest.raises(
            PolicyError, match=rf"step {nan} .*got nan at \[1\].*\. Correct the value\.$"
        ),
    ):
        collect(vec(), policy, frames_per_batch=60, total_frames=60)


def test_noise_hides_nothing_of_the_environments() -> None:
    with (
        pytest.warns(OutOfRangeWarning, match="action lies outside"),
        pytest.raises(TransitionError, match=r"observation lies outside its space at lane 1, step"),
    ):
        collect(vec(spoilt=5), acting(2, 2.0), **BUDGET)


def test_an_end_that_is_open_stays_open() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(vec(), acting(2, 1e30, of=1), **BUDGET)
    with pytest.warns(OutOfRangeWarning, match=r"expected \[-1, inf\] and no NaN, got -2 at \[1\]"):
        collect(vec(), acting(2, -2.0, of=1), **BUDGET)


def test_strict_as_it_was() -> None:
    hint = r'Correct the value, or accept it with validate="noise", "warn" or "off"\.'
    with pytest.raises(PolicyError, match=rf"lane 0, step 3 .*got 1\.5 at .*\. {hint}$"):
        collect(vec(), acting(3, 1.5), **BUDGET, validate="raise")
    with pytest.raises(PolicyError, match="outside the action space at the first observation"):
        collect(vec(), acting(0, 1.5), **BUDGET, validate="raise")


def test_silence_where_nobody_looks(recwarn: Any) -> None:
    collect(vec(), acting(3, 1.5), **BUDGET, validate="off")
    assert not recwarn.list


@pytest.mark.parametrize("value", [2, -1])
def test_an_index_of_no_action_raises(value: int) -> None:
    def act(observation: torch.Tensor) -> torch.Tensor:
        late = observation[..., 0].abs() > 0.06
        return torch.where(late, value, 0)

    policy = TensorDictModule(act, ["observation"], ["action"])
    with pytest.raises(
        PolicyError, match=rf"action lies outside.*expected \[0, 1\] and .*, got {value}"
    ):
        collect("CartPole-v1", policy, num_envs=2, frames_per_batch=50, total_frames=500, seed=0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_once_for_all_workers(mode: str) -> None:
    makes = [partial(vec, 1), partial(vec, 2)]
    with in_threads(), pytest.warns(OutOfRangeWarning) as said:
        run = collect_all(start(makes, acting(3, 1.5), **BUDGET, mode=mode))
    assert len(said) == 1
    assert len(joined(run.batches)) == 60
