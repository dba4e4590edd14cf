"""Failures without an explanation: dead processes, and the API of gym before 0.26."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torchrl.envs import GymWrapper

from tallyroll.collector import MultiprocessCollector, SyncCollector, evaluate
from tallyroll.collector.errors import EnvironmentDied, EnvironmentRefused
from tallyroll.collector.torchrl import Collector as TorchrlCollector
from tallyroll.storage import open_storage

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning"),  # Gymnasium's logger
]
MAIN = os.getpid()


class Counts(gym.Env[Any, Any]):
    """Environment with episodes of five steps that observes (episode, step)."""

    observation_space: gym.Space[Any] = gym.spaces.Box(-1, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(3)
    episode, t = -1, 0

    def seen(self) -> Any:
        return np.array([self.episode, self.t], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.seen(), float(self.t), self.t >= 5, False, {}


class Dies(Counts):
    """Environment that ends its process by exit code ``how``, or by signal ``-how`` if negative."""

    def __init__(self, how: int, at: str) -> None:
        self._how, self._at = how, at
        self._die("construction")

    def _die(self, at: str) -> None:
        if at == self._at and os.getpid() != MAIN:
            if self._how >= 0:
                os._exit(self._how)
            os.kill(os.getpid(), -self._how)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed)
        self._die({0: "first reset", 1: "later reset"}.get(self.episode, ""))
        return found

    def step(self, action: Any) -> Any:
        if (self.episode, self.t) == (1, 2):
            self._die("step")
        return super().step(action)


# --- processes ------------------------------------------------------------------------------------


def asynchronous(*makers: Callable[[], Any], **options: Any) -> AsyncVectorEnv:
    return AsyncVectorEnv(makers, context="fork", **options)


def subprocesses(*makers: Callable[[], Any], start_method: str = "fork") -> Any:
    package = pytest.importorskip("stable_baselines3.common.vec_env")
    return package.SubprocVecEnv([*makers], start_method=start_method)


def monitored(*makers: Callable[[], Any]) -> Any:
    package = pytest.importorskip("stable_baselines3.common.vec_env")
    return package.VecMonitor(subprocesses(*makers))


VECTORS: dict[str, Callable[..., Any]] = {
    "shared": asynchronous,
    "pipes": partial(asynchronous, shared_memory=False),
    "same step": partial(asynchronous, autoreset_mode=AutoresetMode.SAME_STEP),
    "disabled": partial(asynchronous, autoreset_mode=AutoresetMode.DISABLED),
    "wrapped": lambda *makers: gym.wrappers.vector.RecordEpisodeStatistics(asynchronous(*makers)),
    "sb3": subprocesses,
    "sb3 monitor": monitored,
}
MOMENTS = ["construction", "first reset", "step", "later reset"]
KILLED = -signal.SIGKILL


def drain(collector: Any, n: int | None = None) -> None:
    with collector:
        if n is None:
            for _ in collector:
                pass
        while n is not None:
            collector.collect(n)


def require_none_left() -> None:
    until = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.01)
    assert not multiprocessing.active_children()


def made(vector: str, how: int = KILLED, at: str = "step") -> Any:
    return VECTORS[vector](Counts, partial(Dies, how, at), Counts)


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("at", MOMENTS)
def test_a_dead_process_is_named(vector: str, at: str, tmp_path: Path) -> None:
    """Codes and signals differ by moment, so that constants cannot pass."""
    how = {"construction": 1, "first reset": 3, "step": KILLED, "later reset": -signal.SIGSEGV}[at]
    says = {1: "exited with code 1", 3: "exited with code 3", KILLED: "was ended by SIGKILL"}
    with pytest.raises(EnvironmentDied, match=says.get(how, "by SIGSEGV .*native code")) as caught:
        drain(
            SyncCollector(
                lambda: made(vector, how, at),
                frames_per_batch=3,
                total_frames=200,
                storage=tmp_path / "rows",
                seed=0,
            )
        )
    died = caught.value
    assert (died.lanes, died.exitcodes) == ([1], [how])
    assert "lane 1" in str(died)
    assert isinstance(died.__cause__, (EOFError, OSError))
    require_none_left()
    if at == "step":
        with open_storage(tmp_path / "rows") as storage:
            assert len(storage) == 3 * (5 + 2)  # all lanes, up to the one that died
            assert set(storage.column("observation")[:, 0].tolist()) == {0, 1}


def test_all_that_die_in_one_step_are_named() -> None:
    makers = [Counts, partial(Dies, KILLED, "step"), partial(Dies, 4, "step")]
    with pytest.raises(EnvironmentDied) as caught:
        drain(SyncCollector(lambda: asynchronous(*makers), frames_per_batch=3, total_frames=99))
    assert (caught.value.lanes, caught.value.exitcodes) == ([1, 2], [KILLED, 4])


class Raises(Counts):
    def step(self, action: Any) -> Any:
        if (self.episode, self.t) == (1, 2):
            raise ZeroDivisionError("of its own")
        return super().step(action)


def test_an_exception_of_another_lane_is_a_note() -> None:
    """The exception also ends its process, with code 0. That lane did not die."""
    vector = partial(asynchronous, Raises, partial(Dies, KILLED, "step"))
    with pytest.raises(EnvironmentDied) as caught:
        drain(SyncCollector(vector, frames_per_batch=3, total_frames=99))
    assert caught.value.lanes == [1]
    notes = "".join(caught.value.__notes__)
    assert "the process of lane 0 raised" in notes
    assert "ZeroDivisionError: of its own" in notes


@pytest.mark.parametrize("vector", ["shared", "sb3"])
@pytest.mark.parametrize("kind", [SyncCollector, TorchrlCollector])
def test_by_collect_and_by_names_of_torchrl(vector: str, kind: Any, tmp_path: Path) -> None:
    storage = {"storage": tmp_path / "rows"} if kind is SyncCollector else {}
    n = 3 if storage else None
    with pytest.raises(EnvironmentDied) as caught:
        drain(kind(partial(made, vector), None, frames_per_batch=6, total_frames=99, **storage), n)
    assert (caught.value.lanes, caught.value.exitcodes) == ([1], [KILLED])


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("vector", "at"), [("shared", "step"), ("sb3", "first reset")])
def test_in_workers_the_lane_is_that_of_the_run(mode: Any, vector: str, at: str) -> None:
    makers = [partial(VECTORS[vector], Counts, Counts, Counts), partial(made, vector, at=at)]
    with pytest.raises(EnvironmentDied, match="lane 4") as caught:
        drain(
            MultiprocessCollector(
                makers, frames_per_batch=12, total_frames=240, mode=mode, transport="thread"
            )
        )
    assert (caught.value.lanes, caught.value.exitcodes) == ([4], [KILLED])
    require_none_left()


@pytest.mark.slow
def test_in_a_worker_process() -> None:
    makers = [partial(made, "shared")]
    with pytest.raises(EnvironmentDied, match="SIGKILL") as caught:
        drain(MultiprocessCollector(makers, frames_per_batch=6, total_frames=240))
    assert (caught.value.lanes, caught.value.exitcodes) == ([1], [KILLED])
    require_none_left()


@pytest.mark.parametrize("vector", ["shared", "sb3"])
@pytest.mark.parametrize("then", ["step", "shutdown"])
def test_a_process_that_is_killed_between_steps(vector: str, then: str) -> None:
    env = VECTORS[vector](Counts, Counts)
    collector = SyncCollector(lambda: env, frames_per_batch=4, total_frames=40)
    batches = iter(collector)
    next(batches)
    os.kill(env.processes[1].pid, signal.SIGTERM)
    env.processes[1].join()
    with pytest.raises(EnvironmentDied, match="SIGTERM") as caught:
        next(batches) if then == "step" else collector.shutdown()
    assert (caught.value.lanes, caught.value.exitcodes) == ([1], [-signal.SIGTERM])
    collector.shutdown()
    env.close()
    require_none_left()


class Forks(Dies):
    """Environment with a child process that keeps the lane's pipe open."""

    def __init__(self, pipe: Any, how: int, at: str) -> None:
        super().__init__(how, at)
        if os.getpid() != MAIN and os.fork() == 0:
            pipe.recv_bytes()  # returns when the test ends
            os._exit(0)


def test_a_pipe_that_another_process_keeps_open() -> None:
    ours, theirs = multiprocessing.Pipe()
    try:
        with pytest.raises(EnvironmentDied) as caught:
            drain(
                SyncCollector(
                    lambda: asynchronous(Counts, partial(Forks, theirs, KILLED, "step")),
                    frames_per_batch=4,
                    total_frames=99,
                )
            )
        assert (caught.value.lanes, caught.value.exitcodes) == ([1], [KILLED])
    finally:
        ours.send_bytes(b"")


# --- the API of gym before 0.26 -------------------------------------------------------------------


class Four(Counts):
    def step(self, action: Any) -> Any:
        seen, reward, ended, _, info = super().step(action)
        return seen, reward, ended, info


class Six(Counts):
    def step(self, action: Any) -> Any:
        return (*super().step(action), None)


class Nothing(Counts):
    def step(self, action: Any) -> Any:
        return None


class Bare(Counts):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.seen()


class BareOfThree(Bare):
    observation_space = gym.spaces.Box(-1, 1e9, (3,), np.float64)

    def seen(self) -> Any:
        return np.append(super().seen(), 0.0)


class BareDict(Bare):
    observation_space = gym.spaces.Dict({"a": Counts.observation_space, "b": Counts.action_space})

    def seen(self) -> Any:
        return {"a": super().seen(), "b": 0}


class BareNumber(Bare):
    observation_space = gym.spaces.Discrete(100)

    def seen(self) -> Any:
        return self.t


class NoSeed(Counts):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class OldSeed(Counts):
    """Environment with the API of gym before 0.26.

    It returns four values and a bare observation, and has a method for seeds.
    """

    def seed(self, seed: int | None = None) -> list[int | None]:
        return [seed]

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]

    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


def dummies(kind: Any) -> Any:
    package = pytest.importorskip("stable_baselines3.common.vec_env")
    return package.DummyVecEnv([kind, kind])


STEP = r"expected .*\(observation, reward, terminated, truncated, info\) from step.*, got"
RESET = r"expected .*\(observation, info\) from reset.*, got"
METHOD = r"expected a method reset\(seed=, options=\), got one without seed"
OLD: dict[type, str] = {
    Four: f"{STEP} 4 value",
    Six: f"{STEP} (more|6) value",
    Nothing: f"{STEP} NoneType",
    Bare: f"{RESET} (numpy.)?float64 as the info",
    BareOfThree: f"{RESET} (more|3) value",
    BareDict: f"{RESET} str as the (info|observation)",
    BareNumber: f"{RESET} int",
    NoSeed: METHOD,
    OldSeed: f"({METHOD}|{RESET})",
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "factory": lambda kind: kind,
    "limited": lambda kind: lambda: gym.wrappers.TimeLimit(kind(), 4),
    "next step": lambda kind: lambda: SyncVectorEnv([kind, kind]),
    "wrapped": lambda kind: (
        lambda: gym.wrappers.vector.RecordEpisodeStatistics(SyncVectorEnv([kind, kind]))
    ),
    "same step": lambda kind: (
        lambda: SyncVectorEnv([kind, kind], autoreset_mode=AutoresetMode.SAME_STEP)
    ),
    "async": lambda kind: lambda: asynchronous(kind, kind),
    "sb3": lambda kind: lambda: dummies(kind),
    "torchrl": lambda kind: lambda: GymWrapper(kind()),
}


def run(kind: type, way: str) -> None:
    options: Any = {"num_envs": 2} if way in ("factory", "limited") else {}
    drain(SyncCollector(WAYS[way](kind), frames_per_batch=10, total_frames=40, seed=0, **options))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OLD)
@pytest.mark.filterwarnings("ignore:reset with seed kwarg:UserWarning")
@pytest.mark.filterwarnings("ignore:.*made to check whether:UserWarning")
def test_the_old_api_is_named(kind: type, way: str) -> None:
    with pytest.raises(EnvironmentRefused, match=rf"^lane [01]: {OLD[kind]}") as caught:
        run(kind, way)
    assert "wrap the environment in shimmy.GymV21CompatibilityV0(env=env)" in str(caught.value)
    assert caught.value.__cause__ is not None or way == "sb3"
    require_none_left()


@pytest.mark.parametrize("vector", [SyncVectorEnv, partial(AsyncVectorEnv, context="fork")])
def test_the_lane_of_the_old_api(vector: Any) -> None:
    with pytest.raises(EnvironmentRefused, match=f"^lane 1: {STEP} 4 value"):
        drain(
            SyncCollector(
                lambda: vector([Counts, Four, Counts]), frames_per_batch=10, total_frames=40
            )
        )


def test_the_old_api_in_workers_and_evaluations() -> None:
    with pytest.raises(EnvironmentRefused, match=f"^lane 1: {STEP} 4 value"):
        drain(
            MultiprocessCollector(
                [Counts, Four], frames_per_batch=10, total_frames=40, transport="thread"
            )
        )
    with pytest.raises(EnvironmentRefused, match=f"^lane 0: {STEP} 4 value"):
        evaluate(None, Four, episodes=2)


def test_the_old_api_in_processes_that_send_no_exceptions() -> None:
    with pytest.raises(EnvironmentDied, match=r"lane 1 .*code 1 .*stderr.*GymV21Compat") as caught:
        drain(
            SyncCollector(lambda: subprocesses(Counts, Four), frames_per_batch=4, total_frames=40)
        )
    assert (caught.value.lanes, caught.value.exitcodes) == ([1], [1])


# --- exceptions of the environment itself ---------------------------------------------------------


class Unpacks(Counts):
    def step(self, action: Any) -> Any:
        one, two, three, four, five = np.zeros(4).tolist()
        return one, two, three, four, five


class CallsReset(Counts):
    def step(self, action: Any) -> Any:
        def reset() -> None: ...

        reset(seed=1)  # type: ignore[call-arg]


class Ends(Counts):
    def step(self, action: Any) -> Any:
        raise EOFError("the recording ends")


class Breaks(Counts):
    def step(self, action: Any) -> Any:
        raise BrokenPipeError("to a simulator of its own")


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Unpacks, ValueError), (CallsReset, TypeError), (Ends, EOFError), (Breaks, BrokenPipeError)],
)
@pytest.mark.parametrize("way", ["factory", "limited", "next step", "async", "sb3", "torchrl"])
def test_exceptions_of_the_environment_itself_stay(kind: type, error: type, way: str) -> None:
    with pytest.raises(error) as caught:
        run(kind, way)
    assert type(caught.value) is error
    require_none_left()
