"""Calls of environments in this process: the rows before them and their return values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from level_kit import Inner, Levels, require_recorded, wrapped
from torchrl.data import Categorical, Unbounded
from torchrl.envs import GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv

from tallyroll.collector import SyncCollector
from tallyroll.collector.envs import Declares, Step, System
from tallyroll.collector.errors import ArgumentError, EnvCallError, EnvironmentRefused, StateError
from tallyroll.storage import MemmapStorage

RUN: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 84, "seed": 0}


# --- rows before and after ------------------------------------------------------------------------


def vector(mode: AutoresetMode, lanes: int = 5) -> Any:
    """Return a vector of environments."""
    return SyncVectorEnv([Levels] * lanes, autoreset_mode=mode)


ENVS: dict[str, dict[str, Any]] = {
    "lanes": {"create_env_fn": Levels, "num_envs": 5},
    "wrapped": {"create_env_fn": wrapped, "num_envs": 5},
    "reset slots": {"create_env_fn": partial(vector, AutoresetMode.NEXT_STEP)},
    "within a step": {"create_env_fn": partial(vector, AutoresetMode.SAME_STEP)},
    "statistics": {
        "create_env_fn": lambda: RecordEpisodeStatistics(vector(AutoresetMode.DISABLED))
    },
    "discarded": {"create_env_fn": Levels, "num_envs": 5, "surplus": "discard"},
    "never stepped": {"create_env_fn": Levels, "num_envs": 5, "surplus": "never_step"},
    "time limit": {"create_env_fn": Levels, "num_envs": 5, "max_frames_per_traj": 3},
    "TorchRL": {"create_env_fn": lambda: SerialEnv(5, lambda: GymWrapper(Levels()))},
}


@pytest.mark.parametrize("env", ENVS)
def test_rows_have_the_level_that_the_events_say(env: str) -> None:
    """Batches of seven rows over five lanes hold a surplus at most calls."""
    rng = np.random.default_rng(0)
    with MemmapStorage() as storage, SyncCollector(**RUN, **ENVS[env], storage=storage) as run:
        for number, _ in enumerate(run):
            lanes = None if number % 3 else sorted({*rng.integers(5, size=2).tolist()})
            if number % 2:
                assert len(run.env_call("raise_level", float(number), lanes=lanes)) in (1, 2, 5)
            else:
                run.env_set("level", float(number), lanes=lanes)
        held = sum("first" in event for event in run.events)
        assert (held > 5) is (run._options.surplus == "carry")
        assert storage.runs[0]["events"] == [{**event, "row": event["at"]} for event in run.events]
        assert require_recorded(storage[:], run.events) > 60


@pytest.mark.parametrize("seed", range(3))
def test_batches_and_commits_of_any_size_and_calls_mix(seed: int) -> None:
    """`collect` stores few rows in a single call, which holds the surplus elsewhere."""
    rng = np.random.default_rng(seed)
    options = {**RUN, "total_frames": -1, "frames_per_batch": 4}
    with (
        MemmapStorage() as storage,
        SyncCollector(Levels, num_envs=3, **options, storage=storage) as run,
    ):
        for number in range(60):
            match rng.integers(4):
                case 0:
                    run.env_set("level", [float(number)] * 2, lanes=[2, 0])
                case 1:
                    run.env_call("raise_level", by=0.5, lanes=int(rng.integers(3)))
                case 2:
                    next(iter(run))
                case _:
                    run.collect(int(rng.integers(1, 9)))
        run.collect(10)
        assert require_recorded(storage[:], run.events) > 60


def test_a_reset_that_discards_what_waits_leaves_events_right() -> None:
    """The discarded rows are missing, and the trajectories after the call are new."""
    with (
        MemmapStorage() as storage,
        SyncCollector(Levels, num_envs=5, **RUN, storage=storage) as run,
    ):
        waited = []
        for number, _ in enumerate(run):
            run.env_set("level", float(number))
            waited += [step for _, step in run.events[-1].get("first", ())]
            if number % 2:
                run.set_seed(number)
        assert run.ledger.discarded >= 6
        assert 1 in waited, "of a trajectory all that was executed was discarded"
        require_recorded(storage[:], run.events)


# --- results, in the order of lanes ---------------------------------------------------------------


def test_lanes_values_and_wrappers() -> None:
    with SyncCollector(wrapped, num_envs=3, **RUN) as run:
        assert run.env_set("level", (1.0, 2.0, 3.0)) is None  # type: ignore[func-returns-value]
        assert run.env_get("level") == [1.0, 2.0, 3.0]
        assert run.env_get("level", lanes=[2, 0]) == [3.0, 1.0]
        assert run.env_call("raise_level", 1, lanes=[2, 0]) == [4.0, 2.0]
        assert run.env_get("level", lanes=1) == run.env_get("level", np.array([1])) == [2.0]
        run.env_set("scale", 2.5)
        assert run.env_get("scale") == [2.5] * 3
        lanes = run.env.system.env.envs
        assert all(isinstance(env, Inner) and env.scale == 2.5 for env in lanes)
        assert all("level" not in vars(env) for env in lanes), "set where it is, not on a wrapper"
        assert [event["name"] for event in run.events] == ["level", "raise_level", "scale"]
        run.events.clear()
        assert len(run.events) == 3


VECTORS: dict[str, Callable[[], Any]] = {
    "AsyncVectorEnv": lambda: AsyncVectorEnv(
        [Levels] * 2, autoreset_mode=AutoresetMode.DISABLED, context="fork"
    ),
    "SerialEnv": lambda: TransformedEnv(
        SerialEnv(2, lambda: GymWrapper(Levels())), StepCounter(max_steps=3)
    ),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", VECTORS)
def test_vectors_that_are_handed_over(kind: str) -> None:
    with SyncCollector(VECTORS[kind], **RUN) as run:
        next(iter(run))
        run.env_set("level", [1.0, 2.0])
        assert run.env_call("raise_level", by=1.0, lanes=[1]) == [3.0]
        assert run.env_get("level") == [1.0, 3.0]
        with pytest.raises(EnvCallError, match="got 'levl'") as missing:
            run.env_set("levl", 1)
        assert isinstance(missing.value.__cause__, AttributeError)
        assert run.env_get("level") == [1.0, 3.0], "an unknown name ends no process"
        assert (next(iter(run))["next", "observation"][-2:, 0] >= 1.0).all()


def test_stable_baselines3() -> None:
    package = pytest.importorskip("stable_baselines3.common.vec_env")
    inner = package.DummyVecEnv([wrapped] * 3)
    with SyncCollector(package.VecMonitor(inner), **RUN) as run:
        run.env_set("level", [1.0, 2.0], lanes=[0, 2])
        assert run.env_call("raise_level", lanes=[2, 0]) == [3.0, 2.0]
        assert inner.get_attr("level") == run.env_get("level") == [2.0, 0.0, 3.0]
        assert all("level" not in vars(env) for env in inner.envs)


def test_a_single_environment_of_torchrl() -> None:
    with SyncCollector(lambda: GymWrapper(Levels()), **RUN) as run:
        run.env_set("level", 4.0)
        assert run.env_call("raise_level") == [5.0]
        assert run.env._env.level == 5.0


def made_for_torchrl() -> Any:
    return GymWrapper(Levels())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_parallel_env() -> None:
    env = ParallelEnv(2, made_for_torchrl, mp_start_method="fork")
    with SyncCollector(env, **RUN) as run:
        assert run.env_call("raise_level", lanes=[1]) == [1.0]
        assert run.env_get("level") == [0.0, 1.0]
        with pytest.raises(EnvironmentRefused, match="ParallelEnv cannot set attributes"):
            run.env_set("level", 1.0)
        assert len(next(iter(run))) == 7
    env.close()


# --- errors ---------------------------------------------------------------------------------------


def test_an_exception_says_its_lane_and_the_run_goes_on() -> None:
    with (
        MemmapStorage() as storage,
        SyncCollector(Levels, num_envs=5, **RUN, storage=storage) as run,
    ):
        next(iter(run))
        run.env_set("level", [0.0, 1.0, 2.0, 3.0, 0.0])
        with pytest.raises(
            EnvCallError, match=r"in lane 1 \(also in lanes 2, 3\) raised"
        ) as raised:
            run.env_call("refuse", above=0)
        assert (raised.value.lane, raised.value.failed) == (1, [1, 2, 3])
        assert raised.value.done == [0, 4]
        assert isinstance(raised.value.__cause__, ValueError)
        assert "in refuse" in raised.value.traceback
        assert run.events[1]["lanes"] == [0, 4]
        assert run.events[1]["failed"] == [1, 2, 3]
        assert sum(map(len, run)) == 77
        assert run.ledger.stored == 84


def test_names_that_are_not_there_are_no_events() -> None:
    with SyncCollector(Levels, num_envs=2, **RUN) as run:
        for call, cause in (
            (lambda: run.env_get("levl"), AttributeError),
            (lambda: run.env_set("levl", 1), AttributeError),
            (lambda: run.env_call("levl"), AttributeError),
            (lambda: run.env_call("level"), TypeError),
        ):
            with pytest.raises(EnvCallError, match="the call succeeded in no other lane") as raised:
                call()
            assert isinstance(raised.value.__cause__, cause)
        assert run.events == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.env_get(""), "env_get: expected the name"),
        (lambda run: run.env_get(3), "env_get: expected the name"),
        (lambda run: run.env_call("reset"), "only the collector may call 'reset'. Call set_seed"),
        (lambda run: run.env_call("step", 1), "only the collector may call 'step'. Iterate"),
        (
            lambda run: run.env_set("close", None),
            r"only the collector may call 'close'\. Call shutdown\(\)",
        ),
        (lambda run: run.env_get("level", lanes=[0, 2]), r"from 0 to 1, .* got \[0, 2\]"),
        (lambda run: run.env_get("level", lanes=[0, 0]), "expected distinct lane numbers"),
        (lambda run: run.env_get("level", lanes=[]), "expected distinct lane numbers"),
        (lambda run: run.env_get("level", lanes=-1), "got -1"),
        (lambda run: run.env_get("level", lanes=[True]), "expected distinct lane numbers"),
        (lambda run: run.env_get("level", lanes="01"), "got '01'"),
        (lambda run: run.env_get("level", lanes=[0.0]), "expected distinct lane numbers"),
        (
            lambda run: run.env_set("level", [1.0]),
            r"each of 2 lanes, got 1 values\. .* \[value\] \* 2",
        ),
    ],
)
def test_bad_arguments_call_nothing(call: Callable[[Any], Any], message: str) -> None:
    with SyncCollector(Levels, num_envs=2, **RUN) as run:
        with pytest.raises(ArgumentError, match=message):
            call(run)
        assert run.events == []
        assert len(next(iter(run))) == 7


class Plain(System):
    """System without environment objects."""

    def __init__(self, lanes: int) -> None:
        self.declares = Declares(
            lanes=lanes,
            observation={("seen",): Unbounded((1,))},
            action={("action",): Categorical(2)},
            at_end="final",
        )
        self.seen = np.zeros((lanes, 1), np.float32)

    def reset(self, lanes: Any, seeds: Any, **options: Any) -> Any:
        return [self.seen]

    def step(self, action: Any, lanes: Any = None) -> Step:
        none = np.zeros(len(self.seen), np.bool_)
        return Step([self.seen], [np.ones(len(none))], none, none)


def test_systems_without_objects_are_refused_with_the_reason() -> None:
    made = {
        "environments of Plain: its lanes have no Python objects of their own": lambda: Plain(2),
        "CartPoleVectorEnv: .*no Python objects": lambda: gymnasium.make_vec("CartPole-v1", 2),
    }
    for reason, make in made.items():
        with SyncCollector(make, **RUN, validate="off") as run:
            with pytest.raises(EnvironmentRefused, match=reason):
                run.env_get("level")
            assert len(next(iter(run))) == 7


def test_calls_from_within_a_call_and_after_the_end() -> None:
    """Environments and policies may not call during a batch. Calls after the run are not events."""
    calls: list[Any] = []
    runs: list[Any] = []

    def policy(td: Any) -> Any:
        for made in runs:
            with pytest.raises(StateError, match="is already collecting"):
                calls.append(made.env_get("level"))
        return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

    run = SyncCollector(Levels, policy, num_envs=2, frames_per_batch=4, total_frames=8)
    runs.append(run)
    with run:
        assert len(list(run)) == 2
        run.env_set("level", 9.0)
        assert (run.env_get("level"), run.events, calls) == ([9.0, 9.0], [], [])
    with pytest.raises(StateError, match=r"for example by shutdown\(\)"):
        run.env_get("level")


def test_a_run_that_an_error_ended_is_not_reached() -> None:
    def policy(td: Any) -> Any:
        raise ValueError("no action")

    with SyncCollector(Levels, num_envs=2, **RUN) as run:
        run.env_set("level", 1.0)
    run = SyncCollector(Levels, num_envs=2, **{**RUN, "total_frames": 4, "frames_per_batch": 2})
    with run:
        run.env.system.env.envs[1].step = policy
        with pytest.raises(ValueError, match="no action"):
            next(iter(run))
        with pytest.raises(StateError, match="the run ended when ValueError"):
            run.env_get("level")


def test_arguments_that_are_no_json_are_recorded_by_their_text() -> None:
    """Values that JSON would change, such as tuples and NumPy numbers, are marked as inexact."""
    loop: list[Any] = []
    loop.append(loop)
    values: list[Any] = [
        ([1, 2.5, "three", None, {"four": [True]}], True),
        ([(1, 2)], False),
        ([np.float64(0.5)], False),
        ([float("nan")], False),
        ([{1: 2}], False),
        ([threading.Lock()], False),
        (["x" * 5000], False),
        ([loop], False),
    ]
    with SyncCollector(Levels, num_envs=1, **RUN) as run:
        for args, whole in values:
            run.env_call("take", *args, by=args[0])
            event = run.events[-1]
            if whole:
                assert (event["args"], event["kwargs"]) == (args, {"by": args[0]})
                assert type(event["args"][0]) is type(args[0])
            else:
                assert (event["args"], event["kwargs"]) == (None, {})
                assert 0 < len(event["repr"]) <= 200
        with pytest.raises(EnvCallError):
            run.env_call("refuse", above=-1.0)
