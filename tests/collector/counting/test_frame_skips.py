"""Simulator ticks of a transition, as environments and wrappers report them."""

import math
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from torchrl.envs import FrameSkipTransform, GymWrapper, SerialEnv, TransformedEnv

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.counting.ledger import known_ticks


class Plain(gymnasium.Env[Any, Any]):
    """Environment whose episodes have seven steps."""

    observation_space = spaces.Box(0, 999, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return np.full(1, float(self.at)), 1.0, self.at == 7, False, {}


class Simulated(Plain):
    """Environment that reports its physics steps as MuJoCo environments do."""

    def __init__(self, frame_skip: Any) -> None:
        self.frame_skip = frame_skip


class Skips(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that reports a number as `MaxAndSkipEnv` of Stable-Baselines3 does."""

    def __init__(self, env: Any, skip: Any) -> None:
        super().__init__(env)
        self._skip = skip


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that reports no number."""


class Repeats(Plain):
    """Environment with unrelated attributes of similar names, which cannot be pickled."""

    repeat = 3

    def __init__(self) -> None:
        self.unpicklable = lambda: None

    def skip(self) -> None:
        """Skip nothing."""


class Holder(gymnasium.Env[Any, Any]):
    """Wrapper of another library's environment, which hides it from other processes."""

    def __init__(self, env: Any) -> None:
        self._env, self.reset, self.step = env, env.reset, env.step
        self.observation_space, self.action_space = env.observation_space, env.action_space


class Worldly(Plain):
    """Environment with its simulator in an attribute, as in VMAS."""

    def __init__(self, substeps: int) -> None:
        self.world = SimpleNamespace(_substeps=substeps)


class Configured(Plain):
    """Environment with a configuration like Isaac Lab's."""

    def __init__(self, decimation: int) -> None:
        self.cfg = SimpleNamespace(decimation=decimation)


def processes(make: Any) -> Any:
    return lambda: AsyncVectorEnv([make] * 2, context="fork")


MADE: dict[str, tuple[Any, int | None]] = {
    "plain": (Plain, 1),
    "an environment": (lambda: Simulated(5), 5),
    "an environment that draws": (lambda: Simulated((2, 5)), None),
    "a wrapper": (lambda: Skips(Plain(), 4), 4),
    "a wrapper that draws": (lambda: Skips(Plain(), (2, 5)), None),
    "stacked": (lambda: Skips(Skips(Simulated(np.int64(2)), 3), 4), 24),
    "a wrapper without a number": (lambda: ActionRepeat(Plain()), None),
    "a flag": (lambda: Skips(Plain(), True), 1),
    "lanes": (lambda: SyncVectorEnv([lambda: Skips(Plain(), 4)] * 2), 4),
    "unequal lanes": (
        lambda: SyncVectorEnv([lambda: Skips(Plain(), 4), lambda: Skips(Plain(), 2)]),
        None,
    ),
    "a world": (lambda: Worldly(3), 3),
    "a configuration": (lambda: Configured(4), 4),
    "processes": (processes(lambda: Skips(Simulated(2), 4)), 8),
    "processes of a plain one": (processes(lambda: TimeLimit(Repeats(), 5)), 1),
    "processes of a registered one": (processes(lambda: gymnasium.make("CartPole-v1")), 1),
    "processes of two wrappers": (processes(lambda: Skips(Skips(Plain(), 4), 4)), None),
    "processes of a hidden number": (processes(lambda: ActionRepeat(Simulated(5))), None),
    "processes without a number": (processes(lambda: ActionRepeat(Plain())), None),
    "processes of another library's": (processes(lambda: Holder(Simulated(5))), None),
    "processes of a method": (processes(lambda: Skips(Repeats(), 4)), None),
    "TorchRL's wrapper": (lambda: GymWrapper(Skips(Plain(), 4)), 4),
    "TorchRL's own skip": (
        lambda: TransformedEnv(GymWrapper(Skips(Plain(), 4), frame_skip=2), FrameSkipTransform(3)),
        24,
    ),
    "TorchRL's lanes": (lambda: SerialEnv(2, lambda: GymWrapper(Skips(Plain(), 4))), 4),
}


@pytest.mark.parametrize("name", MADE)
def test_ticks_are_those_that_the_environment_reports(name: str) -> None:
    make, ticks = MADE[name]
    with SyncCollector(make, frames_per_batch=10, total_frames=20) as collector:
        list(collector)
        found, counts = collector.metrics()["ticks"], collector.ledger.counts()
        assert collector.frame_skip == ticks
    assert math.isnan(found) if ticks is None else found == 20 * ticks
    assert known_ticks(counts) == (None if ticks is None else 20 * ticks)


@pytest.mark.parametrize("name", ["plain", "stacked", "a wrapper that draws"])
def test_what_a_user_says_wins(name: str) -> None:
    with SyncCollector(
        MADE[name][0], frames_per_batch=10, total_frames=20, frame_skip=7
    ) as collector:
        list(collector)
        assert (collector.ledger.ticks, collector.frame_skip) == (140, 7)


def test_workers_report_them() -> None:
    with MultiprocessCollector(
        MADE["stacked"][0],
        frames_per_batch=10,
        total_frames=20,
        num_envs=2,
        num_workers=2,
        transport="thread",
    ) as collector:
        list(collector)
        assert collector.metrics()["ticks"] == 480
