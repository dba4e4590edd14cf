"""`StopIteration` from user code is one of our errors, and never the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.data import Categorical, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import GymWrapper, SerialEnv, Transform, TransformedEnv

from tallyroll import collector as package
from tallyroll.collector import (
    CollectorError,
    MultiprocessCollector,
    Resets,
    SyncCollector,
    evaluate,
    replay,
    save_checkpoint,
)
from tallyroll.collector import torchrl as names
from tallyroll.collector.envs import Declares, Step, System
from tallyroll.collector.errors import (
    EnvCallError,
    StateError,
    UserStopIteration,
    WorkerRaised,
)
from tallyroll.storage import MemmapStorage, fast_paths, open_storage

LANES, BATCH, FRAMES = 3, 7, 1000
Fault = Callable[[], Any]


def used_up() -> Any:
    """Raise as ``next`` does for an exhausted iterator."""
    return next(iter(()))


def other_error() -> Any:
    raise ValueError("another exception")


class After:
    """Function that calls ``fault`` from its call of number ``number`` on.

    Copies count on their own.
    """

    def __init__(self, fault: Fault, number: int) -> None:
        self.fault, self.left = fault, number

    def __call__(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.fault()


NEVER = After(used_up, 10**9)


class Lane(gym.Env[Any, Any]):
    """Environment that counts its steps, with five steps per episode."""

    observation_space = gym.spaces.Box(-1, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, step: After = NEVER, reset: After = NEVER) -> None:
        self.on_step, self.on_reset, self.t, self.episode = step, reset, 0, -1

    def seen(self) -> np.ndarray:
        return np.array([self.episode, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.on_reset()
        self.episode, self.t = self.episode + 1, 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.on_step()
        self.t += 1
        return self.seen(), 1.0, self.t == 5, False, {}

    def shout(self) -> None:
        used_up()


class Wrapped(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any, step: After) -> None:
        super().__init__(env)
        self.on_step = step

    def step(self, action: Any) -> Any:
        self.on_step()
        return super().step(action)


class Counting(Transform):
    """Transform that calls user code."""

    def __init__(self, call: After) -> None:
        super().__init__()
        self.on_call = call

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        self.on_call()
        return next_tensordict

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return tensordict_reset


class Buffer(ReplayBuffer):
    """Replay buffer that calls user code before it stores a batch."""

    def __init__(self, call: After) -> None:
        super().__init__(storage=LazyTensorStorage(2000))
        self.on_call = call

    def extend(self, *args: Any, **named: Any) -> Any:
        self.on_call()
        return super().extend(*args, **named)

    def add(self, *args: Any, **named: Any) -> Any:
        self.on_call()
        return super().add(*args, **named)


class Plain(System):
    """System of three lanes."""

    def __init__(self, step: After = NEVER, reset: After = NEVER) -> None:
        self.declares = Declares(
            lanes=LANES,
            observation={("observation",): Unbounded((1,))},
            action={("action",): Categorical(2)},
            at_end="final",
        )
        self.on_step, self.on_reset = step, reset
        self.count = np.zeros((LANES, 1), np.float32)

    def reset(self, lanes: Any, seeds: Any, **options: Any) -> Any:
        self.on_reset()
        self.count[... if lanes is None else lanes] = 0
        return [self.count.copy()]

    def step(self, action: Any, lanes: Any = None) -> Step:
        self.on_step()
        self.count += 1
        over = self.count[:, 0] == 5
        return Step([self.count.copy()], [np.ones(LANES)], over, np.zeros_like(over))


class Net(nn.Module):
    def __init__(self, call: After) -> None:
        super().__init__()
        self.on_call = call

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.on_call()
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class Writes(TensorDictModuleBase):
    in_keys, out_keys = ["observation"], ["action"]

    def __init__(self, call: After) -> None:
        super().__init__()
        self.net = Net(call)

    def forward(self, td: Any) -> Any:
        return td.set("action", self.net(td["observation"]))


def lanes_of(*faulty: Lane, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> SyncVectorEnv:
    makes = [*(partial(lambda e: e, each) for each in faulty)]
    makes += [Lane] * (LANES - len(faulty))
    return SyncVectorEnv(makes, autoreset_mode=mode)


def as_function(after: After) -> Callable[..., Any]:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        after()
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    return policy


def sampler(after: After, rng: np.random.Generator) -> dict[str, float]:
    after()
    return {"level": float(rng.random())}


def processed(after: After, batch: Any) -> Any:
    after()
    return batch


SAME, NEXT, OFF = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
PLACES: dict[str, Callable[[Fault], dict[str, Any]]] = {
    "step": lambda f: {"env": lambda: lanes_of(Lane(After(f, 13)))},
    "step of an episode": lambda f: {"env": lambda: lanes_of(Lane(After(f, 13)), mode=OFF)},
    "step in the step": lambda f: {"env": lambda: lanes_of(Lane(After(f, 13)), mode=SAME)},
    "reset": lambda f: {"env": lambda: lanes_of(Lane(reset=After(f, 4)))},
    "reset by mask": lambda f: {"env": lambda: lanes_of(Lane(reset=After(f, 4)), mode=OFF)},
    "reset in the step": lambda f: {"env": lambda: lanes_of(Lane(reset=After(f, 4)), mode=SAME)},
    "wrapper": lambda f: {"env": lambda: lanes_of(Wrapped(Lane(), After(f, 13)))},  # type: ignore[arg-type]
    "single": lambda f: {"env": lambda: Lane(After(f, 13))},
    "vector wrapper": lambda f: {
        "env": lambda: gym.wrappers.vector.RecordEpisodeStatistics(lanes_of(Lane(After(f, 13))))
    },
    "torch": lambda f: {"env": lambda: GymWrapper(Lane(After(f, 13)))},
    "torch reset": lambda f: {"env": lambda: GymWrapper(Lane(reset=After(f, 4)))},
    "torch, several": lambda f: {
        "env": lambda: SerialEnv(2, [lambda: GymWrapper(Lane(After(f, 13)))] * 2)
    },
    "transform": lambda f: {
        "env": lambda: TransformedEnv(GymWrapper(Lane()), Counting(After(f, 13)))
    },
    "system": lambda f: {"env": lambda: Plain(After(f, 13))},
    "system reset": lambda f: {"env": lambda: Plain(reset=After(f, 4))},
    "policy": lambda f: {"policy": as_function(After(f, 17))},
    "network": lambda f: {
        "policy": TensorDictModule(Net(After(f, 17)), ["observation"], ["action"])
    },
    "module": lambda f: {"policy": Writes(After(f, 17))},
    "sampler": lambda f: {
        "env": Lane,
        "num_envs": LANES,
        "resets": Resets(sampler=partial(sampler, After(f, 17))),
    },
}
OF_RUN: dict[str, Callable[[Fault], dict[str, Any]]] = {
    "postproc": lambda f: {"postproc": partial(processed, After(f, 3))},
    "buffer": lambda f: {"replay_buffer": Buffer(After(f, 3))},
}
MODES: dict[str, dict[str, Any]] = {
    "one process": {},
    "sync": {"mode": "sync"},
    "async": {"mode": "async"},
}


def made(given: dict[str, Any], mode: str, path: Path | None) -> Any:
    env = given.pop("env", lanes_of)
    policy = given.pop("policy", None)
    options: dict[str, Any] = {"frames_per_batch": BATCH, "total_frames": FRAMES, "seed": 0}
    options |= {"storage": path} | given
    if mode == "one process":
        return SyncCollector(env, policy, **options)
    workers = {"num_workers": 2, "transport": "thread"} | MODES[mode]
    return MultiprocessCollector(env, policy, **workers, **options)


def iterate(collector: Any) -> None:
    for _ in collector:
        pass


def take_next(collector: Any) -> None:
    batches = iter(collector)
    while next(batches, None) is not None:
        pass


def as_list(collector: Any) -> None:
    list(collector)


def collect(n: int, collector: Any) -> None:
    while collector.collect(n):
        pass


WAYS: dict[str, Callable[[Any], None]] = {
    "iterate": iterate,
    "next": take_next,
    "list": as_list,
    "collect": partial(collect, BATCH),
    "collect few": partial(collect, LANES),
    "collect 1": partial(collect, 1),
}


def ended(
    place: str, fault: Fault, mode: str, way: str, path: Path
) -> tuple[BaseException | None, int]:
    """Return the error that ended a run, and the number of stored rows."""
    given = (PLACES | OF_RUN)[place](fault)
    collector, error = made(given, mode, path), None
    with collector:
        try:
            WAYS[way](collector)
        except BaseException as raised:  # noqa: BLE001  it is compared
            error = raised
        with pytest.raises(StateError, match=rf"the run ended when {type(error).__name__}"):
            WAYS[way](collector)
    assert not collector.ledger.carried
    with open_storage(path) as storage:
        assert collector.ledger.stored == storage.head
        return error, storage.head


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [*PLACES, *OF_RUN])
def test_it_ends_the_run_as_another_exception_does(place: str, way: str, tmp_path: Path) -> None:
    error, rows = ended(place, used_up, "one process", way, tmp_path / "it")
    other, wanted = ended(place, other_error, "one process", way, tmp_path / "other")
    assert isinstance(other, ValueError)
    assert type(error) is UserStopIteration, repr(error)
    assert type(error.__cause__) is StopIteration
    assert rows == wanted < FRAMES


@pytest.mark.parametrize(
    "off", [("kernel",), ("fast-collect",), ("network",), ("kernel", "sequential")]
)
@pytest.mark.parametrize("place", ["step", "reset", "network", "system", "sampler"])
def test_without_faster_ways(place: str, off: tuple[str, ...], tmp_path: Path) -> None:
    with fast_paths.switched_off(*off):
        error, rows = ended(place, used_up, "one process", "collect few", tmp_path / "it")
        _, wanted = ended(place, other_error, "one process", "collect few", tmp_path / "other")
    assert type(error) is UserStopIteration
    assert type(error.__cause__) is StopIteration
    assert rows == wanted


@pytest.mark.parametrize("way", ["iterate", "collect few"])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("place", ["step", "reset", "torch", "system", "network", "sampler"])
def test_in_workers(place: str, mode: str, way: str, tmp_path: Path) -> None:
    error, rows = ended(place, used_up, mode, way, tmp_path / "it")
    assert type(error) is WorkerRaised, repr(error)
    assert type(error.__cause__) is StopIteration
    if place in ("step", "reset"):
        assert error.lane in (0, 3)
    if mode == "sync":
        _, wanted = ended(place, other_error, mode, way, tmp_path / "other")
        assert rows == wanted


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("place", [*OF_RUN])
def test_in_the_parent_of_workers(place: str, mode: str, tmp_path: Path) -> None:
    error, _ = ended(place, used_up, mode, "iterate", tmp_path / "it")
    assert type(error) is UserStopIteration
    assert type(error.__cause__) is StopIteration


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_policy_that_acts_for_workers(mode: str, tmp_path: Path) -> None:
    policy = TensorDictModule(Net(After(used_up, 17)), ["observation"], ["action"])
    collector = made({"policy": policy, "policy_placement": "central"}, mode, tmp_path / "rows")
    with collector, pytest.raises(UserStopIteration, match=r"^policy: ") as raised:
        iterate(collector)
    assert type(raised.value.__cause__) is StopIteration


def test_the_place_is_named(tmp_path: Path) -> None:
    found = {
        place: str(ended(place, used_up, "one process", "iterate", tmp_path / place)[0])
        for place in ("step", "reset in the step", "torch", "network", "sampler", "postproc")
    }
    begins = {
        "step": "a step of the environment of lane 0: expected",
        "reset in the step": "a step of the environment of lane 0: expected",
        "torch": "a step of the environment: expected",
        "network": "policy: expected",
        "sampler": "reset_sampler: expected",
        "postproc": "postproc: expected",
    }
    assert {place: text[: len(begins[place])] for place, text in found.items()} == begins


# --- other calls ----------------------------------------------------------------------------------


class NoFactory:
    def __call__(self) -> Any:
        return used_up()


class NoSeed(GymWrapper):
    def _set_seed(self, seed: Any) -> None:
        used_up()


class NoClose(Plain):
    def close(self) -> None:
        used_up()


class NoWeights(Net):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return used_up()


class Part:
    def state_dict(self) -> Any:
        return used_up()

    def load_state_dict(self, state: Any) -> None:
        used_up()


class Stops:
    def collection_stopped(self) -> bool:
        return bool(used_up())


def plain(**given: Any) -> Any:
    return made(given, "one process", None)


def named(**given: Any) -> Any:
    given = {"env": partial(GymWrapper, Lane())} | given
    env = given.pop("env")
    policy = given.pop("policy", None)
    return names.Collector(env, policy, frames_per_batch=6, total_frames=60, **given)


def shut_down() -> None:
    collector = plain(env=NoClose)
    next(iter(collector))
    collector.shutdown()


def updated() -> None:
    module = TensorDictModule(NoWeights(NEVER), ["observation"], ["action"])
    with plain(policy=module) as collector:
        collector.update_policy_weights_(module.state_dict())


def saved(folder: Path) -> None:
    with plain() as collector:
        save_checkpoint(folder, collector=collector, part=Part())


def added(folder: Path) -> None:
    iterate(named(replay_buffer=Buffer(After(used_up, 2)), extend_buffer=False))


def replayed(folder: Path) -> None:
    with SyncCollector(
        Lane, num_envs=2, frames_per_batch=20, total_frames=20, storage=folder / "rows", seed=0,
        resets=Resets(seeds=True),
    ) as collector:  # fmt: skip
        iterate(collector)
    replay(folder / "rows", "all", create_env_fn=lambda: Lane(After(used_up, 4)))


CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "factory": (lambda _: plain(env=NoFactory()), "create_env_fn"),
    "first reset": (lambda _: plain(env=lambda: Plain(reset=After(used_up, 1))), "the first reset"),
    "seed": (lambda _: plain(env=lambda: NoSeed(Lane())), "set_seed"),
    "trial of the policy": (lambda _: plain(policy=as_function(After(used_up, 1))), ""),
    "trial of the sampler": (
        lambda _: plain(
            env=Lane, num_envs=2, resets=Resets(sampler=partial(sampler, After(used_up, 1)))
        ),
        "reset_sampler",
    ),
    "shutdown": (lambda _: shut_down(), "closing the environment"),
    "weights": (lambda _: updated(), "update_policy_weights_"),
    "checkpoint": (saved, "save_checkpoint"),
    "evaluated policy": (lambda _: evaluate(Net(After(used_up, 9)), Lane, episodes=9), "policy"),
    "evaluated env": (
        lambda _: evaluate(None, lambda: Lane(After(used_up, 9)), episodes=9),
        "a step of the environment of lane 0",
    ),
    "replayed env": (replayed, "a step of the environment"),
    "policy_factory": (lambda _: named(policy_factory=used_up), "policy_factory"),
    "post hook": (
        lambda _: iterate(named(post_collect_hook=lambda batch: used_up())),
        "post_collect_hook",
    ),
    "pre hook": (lambda _: iterate(named(pre_collect_hook=used_up)), "pre_collect_hook"),
    "postproc by TorchRL's name": (
        lambda _: iterate(named(postproc=lambda batch: used_up())),
        "postproc",
    ),
    "interruptor": (lambda _: iterate(named(interruptor=Stops())), "interruptor"),
    "buffer, step by step": (added, "the replay buffer"),
    "step by TorchRL's name": (
        lambda _: iterate(named(env=lambda: GymWrapper(Lane(After(used_up, 9))))),
        "a step of the environment",
    ),
    "rollout by TorchRL's name": (
        lambda _: named(env=lambda: GymWrapper(Lane(After(used_up, 3)))).rollout(),
        "a step of the environment",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_any_other_call(name: str, tmp_path: Path) -> None:
    call, place = CALLS[name]
    with pytest.raises(UserStopIteration) as raised:
        call(tmp_path)
    assert type(raised.value.__cause__) is StopIteration
    assert str(raised.value).startswith(place)


def test_a_call_of_the_environment() -> None:
    with plain(env=Lane, num_envs=2) as collector:
        with pytest.raises(EnvCallError) as raised:
            collector.env_call("shout")
        assert type(raised.value.__cause__) is StopIteration
        iterate(collector)  # the run can continue
        assert collector.ledger.stored == FRAMES


def test_in_the_thread_of_start(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=MemmapStorage(tmp_path / "rows"))
    collector = named(env=lambda: GymWrapper(Lane(After(used_up, 20))), replay_buffer=buffer)
    collector.start()
    while collector.is_running():
        pass
    with pytest.raises(UserStopIteration, match="a step of the environment"):
        collector.shutdown()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, GeneratorExit, SystemExit, StopAsyncIteration]
)
def test_what_else_is_no_exception_of_loops(error: type[BaseException], tmp_path: Path) -> None:
    def fault() -> None:
        raise error("raised here")

    got, _ = ended("step", fault, "one process", "iterate", tmp_path / "it")
    if error is StopAsyncIteration:
        assert type(got) is UserStopIteration
        assert type(got.__cause__) is StopAsyncIteration
    else:
        assert type(got) is error


class Ended(StopIteration):
    """Subclass of a library."""


def test_a_subclass(tmp_path: Path) -> None:
    def fault() -> None:
        raise Ended("the data is over\nand more lines")

    got, _ = ended("reset", fault, "one process", "iterate", tmp_path / "it")
    assert type(got) is UserStopIteration
    assert type(got.__cause__) is Ended
    assert "got Ended (the data is over), which" in str(got)
    assert isinstance(got, CollectorError)
    assert package.__name__ in UserStopIteration.__module__


def test_a_generator_of_a_user_is_ended_by_the_error(tmp_path: Path) -> None:
    """A generator that yields the batches does not hide the error."""

    def batches(collector: Any) -> Iterator[Any]:
        yield from collector

    with plain(env=lambda: Plain(After(used_up, 9))) as collector, pytest.raises(UserStopIteration):
        for _ in batches(collector):
            pass
