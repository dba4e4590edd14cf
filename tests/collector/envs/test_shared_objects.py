"""Lanes that share an environment object are refused, however wrappers hold it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torchrl.envs import SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.libs.gym import GymWrapper

from tallyroll.collector import (
    GymnasiumVectorEnv,
    MultiprocessCollector,
    SyncCollector,
    evaluate,
)
from tallyroll.collector.errors import EnvironmentRefused, StateError
from tallyroll.collector.ext.systems.pettingzoo import PettingZooSystem

from oracles import OracleEnv, check_rows, length_of

LENGTHS = [[3, 1, 4], [2, 5], [4], [2]]
BUDGET: dict[str, Any] = {"frames_per_batch": 24, "total_frames": 24, "seed": 0}


def single(lane: int = 0) -> OracleEnv:
    return OracleEnv(lane, LENGTHS[lane])


class Holder(gym.Env[Any, Any]):
    """Environment that holds another one under any name, and is not a `Wrapper`."""

    def __init__(self, env: gym.Env[Any, Any], name: str = "base_env") -> None:
        vars(self)[name], self._name = env, name
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, **options: Any) -> Any:
        return vars(self)[self._name].reset(**options)

    def step(self, action: Any) -> Any:
        return vars(self)[self._name].step(action)


class Slotted(Holder):
    """Environment that holds the other one in a slot."""

    __slots__ = ("kept",)

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.kept = vars(self).pop("base_env")

    def reset(self, **options: Any) -> Any:
        return self.kept.reset(**options)

    def step(self, action: Any) -> Any:
        return self.kept.step(action)


class Plain:
    """Environment without a base class, which vectors also accept."""

    metadata: ClassVar[dict[str, Any]] = {}
    render_mode = spec = None

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self._inner = env
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.reset, self.step = env.reset, env.step

    def close(self) -> None:
        """Do nothing."""


class Joined(VectorEnv[Any, Any, Any]):
    """Vector that concatenates other vectors."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, *parts: VectorEnv[Any, Any, Any]) -> None:
        self.parts, self.num_envs = parts, sum(each.num_envs for each in parts)
        self.single_observation_space = parts[0].single_observation_space
        self.single_action_space = parts[0].single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.concatenate([each.reset()[0] for each in self.parts]), {}

    def step(self, actions: Any) -> Any:
        parts = np.split(actions, np.cumsum([each.num_envs for each in self.parts])[:-1])
        results = [each.step(own) for each, own in zip(self.parts, parts, strict=True)]
        return (*map(np.concatenate, list(zip(*results, strict=True))[:4]), {})


class Herd:
    """PettingZoo environment of one agent that inherits from none of its classes."""

    possible_agents: ClassVar[list[str]] = ["agent_0"]
    metadata: ClassVar[dict[str, Any]] = {"name": "herd"}
    render_mode = None

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self._inner, self.agents = env, list(self.possible_agents)

    def observation_space(self, agent: str) -> Any:
        """Return the space of the agent."""
        return self._inner.observation_space

    def action_space(self, agent: str) -> Any:
        """Return the space of the agent."""
        return self._inner.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, ...]:
        """Begin an episode."""
        self.agents = list(self.possible_agents)
        return self._of_agent(*self._inner.reset(seed=seed))

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        """Step the agent."""
        found = self._inner.step(actions["agent_0"])
        if found[2] or found[3]:
            self.agents = []
        return self._of_agent(*found)

    def _of_agent(self, *values: Any) -> tuple[Any, ...]:
        return tuple({"agent_0": value} for value in values)

    def close(self) -> None:
        """Do nothing."""


class View(gym.Env[Any, Any]):
    """Environment that is one lane of a simulator; all views share the simulator."""

    def __init__(self, simulator: VectorEnv[Any, Any, Any], lane: int) -> None:
        self.simulator, self.own = simulator, single(lane)
        self.observation_space, self.action_space = (
            self.own.observation_space,
            gym.spaces.Discrete(
                int(self.own.action_space.n)  # type: ignore[attr-defined]
            ),
        )

    def reset(self, **options: Any) -> Any:
        return self.own.reset(**options)

    def step(self, action: Any) -> Any:
        return self.own.step(action)


def lanes_of(wrap: Callable[[Any], Any], **options: Any) -> Any:
    """Return a vector of three lanes, all of which wrap the same environment."""
    one = single()
    return SyncVectorEnv([lambda: wrap(one)] * 3, **options)


def in_serial(wrap: Callable[[Any], Any]) -> Any:
    one = single()
    return SerialEnv(3, [lambda: GymWrapper(wrap(one)) for _ in range(3)])


SHARED: dict[str, Callable[[], Any]] = {
    "one object": lambda: lanes_of(lambda one: one),
    "same step": lambda: lanes_of(lambda one: one, autoreset_mode=AutoresetMode.SAME_STEP),
    "wrappers": lambda: lanes_of(lambda one: TimeLimit(OrderEnforcing(one), 50)),
    "vector wrappers": lambda: RecordEpisodeStatistics(lanes_of(OrderEnforcing)),
    "GymnasiumVectorEnv": lambda: GymnasiumVectorEnv(lanes_of(OrderEnforcing)),
    "base_env": lambda: lanes_of(Holder),
    "_env": lambda: lanes_of(lambda one: TimeLimit(Holder(one, "_env"), 50)),
    "another name": lambda: lanes_of(partial(Holder, name="my_game")),
    "slots": lambda: lanes_of(Slotted),
    "no environment's class": lambda: lanes_of(Plain),
    "vectors of one vector": lambda: Joined(*[SyncVectorEnv([single] * 2)] * 2),
    "vectors of one lane": lambda: Joined(*_joined(single())),
    "agents of no class of PettingZoo": lambda: _herds(single()),
    "SerialEnv": lambda: in_serial(lambda one: one),
    "SerialEnv of wrappers": lambda: in_serial(lambda one: TimeLimit(one, 50)),
    "TransformedEnv": lambda: TransformedEnv(in_serial(lambda one: one), StepCounter()),
    "SerialEnv of one base": lambda: SerialEnv(
        2, [partial(TransformedEnv, base, StepCounter()) for base in [GymWrapper(single())] * 2]
    ),
    "GymWrapper": lambda: GymWrapper(lanes_of(Holder, autoreset_mode=AutoresetMode.DISABLED)),
}


def _herds(one: OracleEnv) -> Any:
    return PettingZooSystem([Herd(one) for _ in range(3)])


def _joined(one: OracleEnv) -> list[Any]:
    return [SyncVectorEnv([single, lambda: one]), SyncVectorEnv([lambda: one, single])]


@pytest.mark.parametrize("made", ["by a factory", "as an instance"])
@pytest.mark.parametrize("name", SHARED)
def test_lanes_of_one_object_are_refused(name: str, made: str) -> None:
    create = SHARED[name] if made == "by a factory" else SHARED[name]()
    with pytest.raises(EnvironmentRefused, match=r"lanes \d and \d: expected a separate enviro"):
        SyncCollector(create, **BUDGET)


def test_the_message_names_the_lanes() -> None:
    one = single()
    envs = [single, lambda: one, single, lambda: TimeLimit(one, 50)]
    with pytest.raises(
        EnvironmentRefused, match=r"lanes 1 and 3: .* got the same OracleEnv in both"
    ):
        SyncCollector(SyncVectorEnv(envs), **BUDGET)
    with pytest.raises(EnvironmentRefused, match="lanes 1 and 3"):
        evaluate(None, SyncVectorEnv(envs), episodes=2)


@pytest.mark.parametrize("wrap", [partial(TimeLimit, max_episode_steps=50), Holder])
def test_a_factory_that_wraps_one_object_is_refused(wrap: Callable[[Any], Any]) -> None:
    one = single()
    with pytest.raises(EnvironmentRefused, match="lanes 0 and 1"):
        SyncCollector(lambda: wrap(one), num_envs=4, **BUDGET)
    with pytest.raises(EnvironmentRefused, match="lanes 0 and 1"):
        evaluate(None, lambda: wrap(one), episodes=2, num_envs=2)
    threads: Any = {"num_workers": 2, "transport": "thread"}
    with pytest.raises(EnvironmentRefused, match="lanes 0 and 1"):
        MultiprocessCollector(lambda: wrap(one), num_envs=4, **threads, **BUDGET)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("wrap", ["same", "wrapped", "torchrl"])
def test_workers_in_threads_have_environments_of_their_own(
    mode: Any, wrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("module_of_one")  # pickle finds its functions by name
    one = module.one = single()  # type: ignore[attr-defined]
    ways: dict[str, Callable[[], Any]] = {
        "same": lambda: one,
        "wrapped": lambda: TimeLimit(one, 50),
        "torchrl": lambda: GymWrapper(one),
    }
    make: Any = ways[wrap]
    make.__module__, make.__qualname__, make.__name__ = "module_of_one", "make", "make"
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "module_of_one", module)
    options: dict[str, Any] = {"transport": "thread", "mode": mode, **BUDGET}
    with pytest.raises(EnvironmentRefused, match="separate environment for each worker"):
        MultiprocessCollector(make, num_workers=2, **options)
    for _ in range(2):  # a closed worker releases its environment
        with MultiprocessCollector(make, num_workers=1, **options) as collector:
            assert sum(len(batch) for batch in collector) == 24


def test_another_collector_of_wrapped_agents_is_noticed() -> None:
    """The lanes are objects without a library class, in the list of their system."""
    one = single()
    first = SyncCollector(PettingZooSystem([Herd(one)]), **BUDGET)
    with SyncCollector(PettingZooSystem([Herd(one)]), **BUDGET) as second:
        assert sum(len(batch) for batch in second) == 24
    with pytest.raises(StateError, match="another collector"):
        next(iter(first))
    first.shutdown()


def test_another_collector_of_wrapped_lanes_is_noticed() -> None:
    one = single()
    first = SyncCollector(SyncVectorEnv([lambda: OrderEnforcing(one)]), **BUDGET)
    with SyncCollector(SyncVectorEnv([lambda: TimeLimit(one, 50)]), **BUDGET) as second:
        assert sum(len(batch) for batch in second) == 24
    with pytest.raises(StateError, match="another collector"):
        next(iter(first))
    first.shutdown()


def test_lanes_that_share_nothing_with_a_state_are_taken() -> None:
    make = [partial(single, lane) for lane in range(4)]
    space = single().observation_space

    def stacked(lane: int) -> Any:
        env: Any = OrderEnforcing(TimeLimit(Holder(single(lane)), 50))
        env.layers, env.observation_space = [env.env, env.unwrapped], space
        return env

    simulator = SyncVectorEnv(make)
    for envs in (
        SyncVectorEnv(make),
        SyncVectorEnv([partial(stacked, lane) for lane in range(4)]),
        Joined(SyncVectorEnv(make[:2]), SyncVectorEnv(make[2:])),
        SyncVectorEnv([partial(View, simulator, lane) for lane in range(4)]),
    ):
        with SyncCollector(envs, **BUDGET) as collector:
            check_rows(torch.cat([batch.clone() for batch in collector]), LENGTHS)
    assert length_of(LENGTHS, 3, 0) == 2
