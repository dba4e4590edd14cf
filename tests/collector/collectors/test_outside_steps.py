"""A program that steps or resets environments between batches ends no trajectory unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torchrl.envs import SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.libs.gym import GymWrapper

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.envs.setup.outside_steps import state_names
from tallyroll.collector.errors import StateError
from tallyroll.storage import MemmapStorage

import toy_systems
from oracles import OracleEnv, OracleTorchEnv, check_rows, make_oracle_vec

LENGTHS = [[3, 5, 4], [7, 5], [9]]


def vector(**options: Any) -> Any:
    return make_oracle_vec(3, LENGTHS, **options)


def cartpoles() -> Any:
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3)


def serial() -> Any:
    return SerialEnv(3, lambda: GymWrapper(gym.make("CartPole-v1")))


MADE: dict[str, Callable[[], Any]] = {
    **{mode.name: lambda mode=mode: vector(mode=mode) for mode in AutoresetMode},
    "CartPole": cartpoles,
    "wrappers": lambda: RecordEpisodeStatistics(cartpoles()),
    "GymnasiumVectorEnv": lambda: GymnasiumVectorEnv(vector()),
    "TorchRL": lambda: OracleTorchEnv(3, LENGTHS),
    "GymWrapper": lambda: GymWrapper(gym.make("CartPole-v1")),
    "SerialEnv": serial,
    "TransformedEnv": lambda: TransformedEnv(serial(), StepCounter()),
    "System": lambda: toy_systems.Toy(3),
}
WAYS = "iterating", "few slots", "collect"


class Run:
    """Collector that continues in one of three ways."""

    def __init__(self, env: Any, way: str, **options: Any) -> None:
        storage = MemmapStorage(max_size=1000) if way != "iterating" else None
        size = 12 if way == "iterating" else 3
        options = {"frames_per_batch": size, "seed": 0, "total_frames": -1, **options}
        self.collector = SyncCollector(env, storage=storage, **options)
        self._batches, self._size = iter(self.collector), None if way != "collect" else size

    def go_on(self, batches: int = 6) -> list[Any]:
        if self._size is not None:
            return [self.collector.collect(self._size) for _ in range(batches)]
        return [next(self._batches).clone() for _ in range(batches)]


def reset(env: Any) -> None:
    env.reset(None, None) if isinstance(env, toy_systems.Toy) else env.reset()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_a_reset_by_the_program_is_an_error_that_set_seed_settles(name: str, way: str) -> None:
    env = MADE[name]()
    run = Run(env, way)
    run.go_on()
    reset(env)
    before = run.collector.ledger.stored
    for _ in range(2):
        with pytest.raises(StateError, match=r"the program stepped or reset .* Call set_seed\(\)"):
            run.go_on(1)
    assert run.collector.ledger.stored == before
    run.collector.set_seed(1)
    run.go_on()
    run.collector.env.reset()
    with pytest.raises(StateError, match="the program stepped or reset"):
        run.go_on(1)
    run.collector.shutdown()


def lane_of(env: Any) -> Any:
    return env.unwrapped.envs[1]


LANES = [name for name in MADE if name in AutoresetMode.__members__] + ["CartPole", "wrappers"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", ["reset", "step", "reset below wrappers", "step of all", "mask"])
@pytest.mark.parametrize("name", LANES)
def test_the_lane_that_was_stepped_or_reset_is_named(name: str, step: str, way: str) -> None:
    env = MADE[name]()
    run = Run(env, way)
    run.go_on()
    while env.unwrapped._autoreset_envs.any():
        run.go_on(1)
    if step == "step":
        lane_of(env).step(0)
    elif step == "step of all":
        env.step(np.zeros(3, np.int64))
    elif step == "mask":
        env.reset(options={"reset_mask": np.array([False, True, False])})
    else:
        each = lane_of(env)
        (each.unwrapped if step.endswith("wrappers") else each).reset()
    match = r"lane 0" if step == "step of all" else r"lane 1"
    with pytest.raises(StateError, match=match):
        run.go_on(1)
    run.collector.shutdown()


def test_a_lane_that_begins_an_episode_shows_another_reset_by_what_it_draws() -> None:
    class NextStarts(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 2, (1,), np.float64)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.t, self.at = 0, self.np_random.random(1)
            return self.at.copy(), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return self.at + self.t / 8, 0.0, self.t == 4, False, {}

    env = SyncVectorEnv([NextStarts] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    run = Run(env, "iterating", frames_per_batch=8)  # all lanes begin an episode after each batch
    run.go_on()
    lane_of(env).reset()
    with pytest.raises(StateError, match="lane 1"):
        run.go_on(1)
    run.collector.shutdown()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("way", WAYS)
def test_a_lane_whose_episodes_have_one_step_shows_another_reset(
    way: str, mode: AutoresetMode
) -> None:
    class Bandit(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 2, (1,), np.float64)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.pulls, self.arm = 0, self.np_random.random(1)
            return self.arm.copy(), {}

        def step(self, action: Any) -> Any:
            self.pulls += 1
            return self.arm + 1, 0.0, True, False, {}

    env = SyncVectorEnv([Bandit] * 3, autoreset_mode=mode)
    run = Run(env, way)
    run.go_on()
    lane_of(env).reset()
    with pytest.raises(StateError, match="lane 1"):
        run.go_on(1)
    run.collector.shutdown()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LANES)
def test_other_uses_of_environments_are_no_steps(name: str, way: str) -> None:
    env = MADE[name]()
    run = Run(env, way)
    for _ in range(5):
        run.go_on(1)
        for each in env.unwrapped.envs:
            each.action_space.seed(3)
            each.observation_space.sample()
            each.unwrapped.gravity = each.unwrapped.mine = 9.5
            _ = each.np_random if name == "CartPole" else None
            each.render() if each.render_mode else None
        run.collector.state_dict()
        run.collector.env_set("metadata", {})
        run.collector.env_get("metadata")
        assert run.collector.metrics()["frames"]
    run.go_on(20)
    run.collector.shutdown()


def test_reading_an_environment_does_not_hide_a_reset() -> None:
    env = vector()
    run = Run(env, "iterating")
    run.go_on()
    env.reset()
    run.collector.env_get("metadata")
    with pytest.raises(StateError, match="the program stepped or reset"):
        run.go_on(1)
    run.collector.shutdown()


def test_batches_that_begin_with_a_reset_may_be_reset_by_anyone() -> None:
    env = vector(mode=AutoresetMode.DISABLED)
    run = Run(env, "iterating", reset_at_each_iter=True)
    batches = []
    for _ in range(6):
        batches += run.go_on(1)
        env.envs[1].step(0)
    assert sum(map(len, batches)) == 72
    run.collector.shutdown()


def test_a_reset_before_the_first_batch_is_noticed_and_a_loaded_state_settles_it() -> None:
    env = vector()
    run = Run(env, "iterating")
    run.go_on()
    state = run.collector.state_dict()
    run.collector.shutdown()
    other = vector()
    later = Run(other, "iterating")
    other.reset()
    later.collector.load_state_dict(state)
    other.reset()
    later.go_on()
    later.collector.shutdown()
    third = Run(third_env := vector(), "iterating")
    third_env.envs[0].reset()
    with pytest.raises(StateError, match="lane 0"):
        third.go_on(1)
    third.collector.shutdown()


def test_rows_are_those_of_an_environment_that_was_left_alone() -> None:
    run = Run(vector(), "iterating")
    check_rows(torch.cat(run.go_on(10)), LENGTHS)
    run.collector.shutdown()


def test_attributes_that_steps_and_resets_assign() -> None:
    assert {"step_in_episode", "ticks"} <= set(state_names(OracleEnv)[0])
    assert "step_in_episode" in state_names(OracleTorchEnv)[1]
    assert "state" in state_names(type(gym.make("CartPole-v1").unwrapped))[0]
    assert state_names(SerialEnv) == ((), ())


class Counting(gym.Env[Any, Any]):
    """Environment that counts its steps and all its other calls."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 2000, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, length: int = 7) -> None:
        self.length, self.goal = length, 0.0
        self.moves, self.steps, self.total, self.frames, self.since, self.ticks = [0] * 6

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.moves = self.steps = self.frames = self.since = 0
        self.goal = self.np_random.random()
        return np.full(1, self.goal), {}

    def step(self, action: Any) -> Any:
        self.moves += 1
        self.steps += 1
        self.total += 1
        self.since += 1
        self.render()
        return np.full(1, self.goal + self.moves), 0.0, self.moves == self.length, False, {}

    def render(self) -> Any:
        self.frames += 1
        return np.full((2, 2, 3), self.np_random.integers(9), np.uint8)

    def draw_goal(self) -> None:
        self.goal, self.since = self.np_random.random(), 0


LONE: dict[str, Callable[[Any], Any]] = {
    "vector": lambda make: SyncVectorEnv([make]),
    "factory": lambda make: make,
    "GymWrapper": lambda make: GymWrapper(make()),
}
STEPS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda env: env.reset(),
    "step": lambda env: env.step(1),
    "unwrapped step": lambda env: env.unwrapped.step(1),
}


@pytest.mark.parametrize("way", ["iterating", "collect"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", LONE)
def test_a_step_of_the_only_lane_is_seen_by_its_own_counter(name: str, step: str, way: str) -> None:
    env = Counting(length=50)
    run = Run(LONE[name](lambda: env), way)
    run.go_on(1)
    STEPS[step](env)
    with pytest.raises(StateError, match="lane 0"):
        run.go_on(1)
    run.collector.shutdown()
