"""Action spaces up to the limits of their dtypes are drawn completely and stored unchanged."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from torchrl.data import Bounded

from tallyroll.collector import GymnasiumVectorEnv
from tallyroll.collector.errors import PolicyError, SpaceError
from tallyroll.collector.policies.random_actions import RandomActions, block_draw
from tallyroll.collector.policies.slot_rng import SlotRng

from collect_kit import collect, joined
from worker_kit import collect_all, in_threads, start

I64 = np.iinfo(np.int64)
F64 = np.finfo(np.float64)


def full(dtype: Any) -> spaces.Box:
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, (2,), dtype)


SPACES: dict[str, tuple[spaces.Space[Any], Any, Any]] = {
    **{
        name: (full(name), np.full(2, np.iinfo(name).min), np.full(2, np.iinfo(name).max))
        for name in ("uint8", "int8", "int16", "int32", "int64")
    },
    "int64 without bounds": (
        spaces.Box(-np.inf, np.inf, (2,), np.int64), np.full(2, I64.min), np.full(2, I64.max)
    ),
    "int64, some of it": (
        spaces.Box(np.array([I64.min, 0, I64.max - 1]), np.array([I64.max] * 3), (3,), np.int64),
        [I64.min, 0, I64.max - 1], [I64.max] * 3,
    ),
    "a number": (spaces.Box(I64.min, I64.max, (), np.int64), I64.min, I64.max),
    "start at the bottom": (spaces.Discrete(5, start=I64.min), I64.min, I64.min + 4),
    "start at the top": (spaces.Discrete(5, start=I64.max - 4), I64.max - 4, I64.max),
    "beyond what floats hold": (spaces.Discrete(3, start=2**62 + 1), 2**62 + 1, 2**62 + 3),
    "many": (spaces.Discrete(I64.max), 0, I64.max - 1),
    "several": (
        spaces.MultiDiscrete([3, 4], start=[I64.max - 2, I64.min]),
        [I64.max - 2, I64.min], [I64.max, I64.min + 3],
    ),
    "many of several": (spaces.MultiDiscrete([I64.max, 2]), [0, 0], [I64.max - 1, 1]),
    "several in rows": (
        spaces.MultiDiscrete(np.array([[3], [4]]), start=np.array([[I64.max - 2], [I64.min]])),
        [[I64.max - 2], [I64.min]], [[I64.max], [I64.min + 3]],
    ),
    "float64": (
        spaces.Box(F64.min, F64.max, (2,), np.float64), [F64.min] * 2, [F64.max] * 2
    ),
}  # fmt: skip


class Noting(gym.Env[Any, Any]):
    """Environment whose reward is -1 for the first action of the space, 1 for the last, else 0."""

    def __init__(self, space: spaces.Space[Any], low: Any, high: Any) -> None:
        self.action_space, self.low, self.high = space, np.asarray(low), np.asarray(high)
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        action = np.asarray(action)
        assert np.all(self.low <= action)
        assert np.all(action <= self.high)
        told = int(np.array_equal(action, self.high)) - int(np.array_equal(action, self.low))
        return np.zeros(1, np.float32), float(told), False, False, {}


def vec(case: str, lanes: int = 2) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Noting, *SPACES[case])] * lanes)


BUDGET = {"frames_per_batch": 100, "total_frames": 200, "seed": 0}


@pytest.mark.parametrize("by", ["blocks", "a policy"])
@pytest.mark.parametrize("case", SPACES)
def test_random_actions_cover_the_space(case: str, by: str) -> None:
    _, low, high = SPACES[case]
    env = GymnasiumVectorEnv(vec(case))
    policy = None if by == "blocks" else RandomActions(env, SlotRng(0))
    actions = joined(collect(env, policy, **BUDGET)[0])["action"].numpy().reshape(200, -1)
    low, high = (np.asarray(bound).reshape(-1).astype(object) for bound in (low, high))
    for column, least, most in zip(actions.T, low, high, strict=True):
        values = column.astype(object)
        span = most - least
        assert values.min() - least <= span * 0.05
        assert most - values.max() <= span * 0.05
        if span < 10:
            assert set(values) == set(range(least, most + 1))


@pytest.mark.parametrize("end", ["low", "high"])
@pytest.mark.parametrize("case", SPACES)
def test_a_policy_may_choose_the_ends(case: str, end: str) -> None:
    env = GymnasiumVectorEnv(vec(case))
    bound = SPACES[case][1 if end == "low" else 2]
    dtype = env.action_spec.dtype
    chosen = torch.as_tensor(np.stack([np.asarray(bound)] * 2)).to(dtype)
    rows = joined(collect(env, lambda td: td.set("action", chosen), **BUDGET)[0])
    assert torch.equal(rows["action"], chosen[:1].expand_as(rows["action"]))
    assert (rows["next", "reward"] == (1 if end == "high" else -1)).all()


def test_one_beyond_the_ends_is_refused_in_all_its_digits() -> None:
    calls = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        calls.append(1)
        return td.set("action", torch.full((2,), 2**62 + (1 if len(calls) < 4 else 4)))

    with pytest.raises(
        PolicyError, match=f"expected .{2**62 + 1}, {2**62 + 3}. and no NaN, got {2**62 + 4}"
    ):
        collect(vec("beyond what floats hold"), policy, **BUDGET)
    with pytest.raises(PolicyError, match=rf"expected {2**62 + 1}\.\.{2**62 + 3}"):
        collect(vec("beyond what floats hold"), policy, **BUDGET)


@pytest.mark.parametrize("case", ["int64", "start at the top", "float64"])
def test_workers_draw_what_one_process_draws(case: str) -> None:
    one = joined(collect(vec(case), **BUDGET)[0])
    with in_threads():
        many = joined(collect_all(start([partial(vec, case, 1)] * 2, **BUDGET)).batches)
    assert torch.equal(one["action"], many["action"])


def test_draws_of_ordinary_ranges_are_what_they_were() -> None:
    """Data of a seed do not change: the draws equal those with an open end."""
    spec = Bounded(torch.tensor([-3, 0]), torch.tensor([9, 255]), shape=(2,), dtype=torch.int64)
    draw = block_draw(spec)
    assert draw is not None
    wanted = np.random.default_rng(5).integers([-3, 0], [10, 256], size=(50, 2))
    assert np.array_equal(draw(np.random.default_rng(5), 50), wanted)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_dtypes_that_torch_hardly_has_are_refused(dtype: Any) -> None:
    space = full(dtype)
    env = SyncVectorEnv([partial(Noting, space, 0, np.iinfo(dtype).max)])
    with pytest.raises(SpaceError, match="at action"):
        collect(env, **BUDGET)


MODES = list(AutoresetMode)


class NothingAllowedAtTheEnd(gym.Env[Any, Any]):
    """Environment that allows two of three actions, and none in the final observation."""

    observation_space = gym.spaces.Dict(action_mask=gym.spaces.MultiBinary(3))
    action_space = gym.spaces.Discrete(3)
    step_in_episode = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        self.step_in_episode = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute one action, which must be legal."""
        assert self._observation()["action_mask"][action]
        self.step_in_episode += 1
        return self._observation(), 0.0, self.step_in_episode == 3, False, {}

    def _observation(self) -> dict[str, Any]:
        legal = np.roll([1, 1, 0], self.step_in_episode) * (self.step_in_episode < 3)
        return {"action_mask": legal.astype(np.int8)}


@pytest.mark.parametrize("mode", MODES)
def test_a_final_observation_may_allow_no_action(mode: AutoresetMode) -> None:
    env = SyncVectorEnv([NothingAllowedAtTheEnd] * 2, autoreset_mode=mode)
    _, collector = collect(env, frames_per_batch=4, total_frames=20)
    assert collector.ledger.stored == 20
