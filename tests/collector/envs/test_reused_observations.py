"""Rows of environments that return the same memory from each call are correct, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensordict import TensorDictBase
from torchrl.data import Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymWrapper,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    default_info_dict_reader,
)
from torchrl.modules import GRUModule

from tallyroll.collector import GymnasiumVectorEnv
from tallyroll.collector.envs.gymnasium.lane_rows import vector_of_lanes
from tallyroll.collector.envs.probes.probe import refuse_reused
from tallyroll.collector.errors import EnvironmentRefused

from collect_kit import LENGTHS, ByObservation, assert_same, collect, joined
from oracles import Kind, OracleEnv, OracleVectorEnv, make_oracle_vec
from policies_kit import recurrent
from reusing_kit import HABITS, OneCall, Reusing, one, parallel, plain
from worker_kit import collect_all, start

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
WAYS = ("views", "in turn", "resets", "after resets", "nonsense")
"""Further habits of environments.

Views of one tensor, two tensors in turn, reuse in resets only, copies of memory that both resets
and steps write to, and nonsense for the lanes that a reset by mask excludes.
"""
EVERY = (*HABITS, *WAYS)


class Change(Transform):
    """Transform that computes the difference of an observation from the previous one."""

    def __init__(self, key: str) -> None:
        super().__init__(in_keys=[key], out_keys=["change"])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        before, after = (td.get(self.in_keys[0]) for td in (tensordict, next_tensordict))
        return next_tensordict.set("change", after.double() - before.double())

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> Any:
        first = tensordict_reset.get(self.in_keys[0])
        return tensordict_reset.set("change", torch.zeros_like(first, dtype=torch.float64))

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        shape = observation_spec[self.in_keys[0]].shape
        observation_spec["change"] = Unbounded(shape, dtype=torch.float64)
        return observation_spec


def transformed(habit: str | None, kind: Kind = "float") -> EnvBase:
    key = "pos" if kind == "dict" else "observation"
    frames = CatFrames(N=2, dim=-1, in_keys=[key], out_keys=["two"])
    transforms = Compose(InitTracker(), StepCounter(), RewardSum(), frames, Change(key))
    return TransformedEnv(plain(habit, kind), transforms)


def serial(habit: str | None, kind: Kind = "float", **kwargs: Any) -> EnvBase:
    return SerialEnv(3, [partial(one, habit, kind, lane) for lane in range(3)], **kwargs)


class Unseeded(GymWrapper):
    """TorchRL's wrapper without its seeding, which resets and would begin another episode."""

    def _set_seed(self, seed: int | None) -> None:
        pass


class Telling(OracleEnv):
    """Oracle whose infos hold an array, the same one each time if `reuse_info` is True."""

    def __init__(self, *args: Any, reuse_info: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told, self._reuse_info = np.zeros(2, np.float32), reuse_info

    def _info(self) -> dict[str, Any]:
        self._told = self._told if self._reuse_info else np.zeros(2, np.float32)
        self._told[:] = self.ticks, self.step_in_episode
        return {**super()._info(), "told": self._told}


def wrapped(habit: str | None, kind: Kind = "float") -> EnvBase:
    reuse = habit is not None
    lane = Telling(0, LENGTHS, kind=kind, ends="mixed", reuse_buffer=reuse, reuse_info=reuse)
    env = Unseeded(lane, categorical_action_encoding=True)
    spec = [Unbounded((2,), dtype=torch.float32)]
    env.set_info_dict_reader(default_info_dict_reader(["told"], spec=spec))
    lane.episode = -1  # the wrapper resets during its construction
    return env


def wrapped_vector(habit: str | None, kind: Kind = "float") -> EnvBase:
    kwargs: dict[str, Any] = {"mode": DISABLED, "kind": kind, "ends": "mixed"}
    kwargs |= {"reuse_buffer": habit is not None, "vec_kwargs": {"copy": habit is None}}
    vector = make_oracle_vec(3, LENGTHS, **kwargs)
    env = Unseeded(vector, categorical_action_encoding=True)
    for lane in vector.envs:
        lane.episode = -1
    return env


def rows(make: Callable[[], Any], kind: Kind = "float", **kwargs: Any) -> TensorDictBase:
    kwargs = {"frames_per_batch": 17, "total_frames": 60, "seed": 0, **kwargs}
    return joined(collect(make, kwargs.pop("policy", ByObservation(kind)), **kwargs)[0])


def assert_true(make: Any, habit: str, kind: Kind = "float", **kwargs: Any) -> None:
    """Compare the rows bit by bit with those of the same environment returning copies."""
    wanted = rows(partial(make, None, kind), kind, **kwargs)
    assert_same(wanted, rows(partial(make, habit, kind), kind, **kwargs))


# --- separate reset: correct ----------------------------------------------------------------------


@pytest.mark.parametrize("habit", EVERY)
def test_an_environment_of_torchrl(habit: str) -> None:
    assert_true(plain, habit, "dict")


@pytest.mark.parametrize("habit", ["all", "flags"])
def test_an_environment_of_one_lane(habit: str) -> None:
    assert_true(one, habit)


@pytest.mark.parametrize("habit", ["all", "flags", "in turn", "after resets", "nonsense"])
def test_transforms_compare_an_observation_with_the_one_before(habit: str) -> None:
    assert_true(transformed, habit)


@pytest.mark.parametrize("habit", ["all", "flags"])
@pytest.mark.parametrize(
    "make",
    [serial, partial(serial, use_buffers=False), partial(transformed, kind="dict")],
    ids=["serial", "without buffers", "transformed"],
)
def test_files_around_a_storage(make: Any, habit: str) -> None:
    kind: Kind = make.keywords.get("kind", "float") if isinstance(make, partial) else "float"
    reused, copied = (
        rows(lambda each=each: make(each), kind)  # type: ignore[misc]
        for each in (habit, None)
    )
    assert_same(reused, copied)


@pytest.mark.parametrize("habit", ["all", "after resets"])
def test_a_transformed_environment_of_one_lane(habit: str) -> None:
    def make(habit: str | None, kind: Kind) -> EnvBase:
        return TransformedEnv(one(habit, kind), Change("observation"))

    assert_true(make, habit)


@pytest.mark.parametrize("make", [wrapped, wrapped_vector])
def test_torchrls_wrapper_of_gymnasium(make: Any) -> None:
    assert_true(make, "all")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_frames_per_traj": 2},
        {"surplus": "discard"},
        {"surplus": "never_step"},
        {"init_random_frames": 20},
        {"reset_at_each_iter": True},
        {"layout": "trajectories"},
    ],
    ids=str,
)
def test_however_it_is_collected(kwargs: Any) -> None:
    kwargs = {"frames_per_batch": 10, "total_frames": 40, "seed": 0, **kwargs}
    wanted, got = (
        collect(partial(serial, habit), ByObservation(), **kwargs)[0] for habit in (None, "all")
    )
    for mine, theirs in zip(got, wanted, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("habit", ["all", "nonsense"])
def test_recurrent_states(habit: str) -> None:
    _, policy = recurrent(GRUModule)
    assert_true(plain, habit, policy=policy)


@pytest.mark.parametrize("mode", [NEXT, DISABLED])
def test_a_transformed_vector(mode: AutoresetMode) -> None:
    def make(habit: str | None, kind: Kind) -> EnvBase:
        kwargs: dict[str, Any] = {"mode": mode, "kind": kind, "ends": "mixed"}
        vector = make_oracle_vec(3, LENGTHS, reuse_buffer=habit is not None, **kwargs)
        return TransformedEnv(GymnasiumVectorEnv(vector), Compose(StepCounter(), Change("pos")))

    assert_true(make, "all", "dict")


def test_a_parallel_environment_whose_resets_are_calls_of_their_own() -> None:
    def make(habit: str | None, kind: Kind) -> EnvBase:
        return TransformedEnv(parallel(habit, kind), Change("observation"))

    assert_true(make, "all")


# --- one call for step and reset: refused ---------------------------------------------------------


@pytest.mark.parametrize("habit", ["all", "one key", "flags", "views", "in turn"])
def test_a_parallel_environment_is_refused(habit: str) -> None:
    with pytest.raises(
        EnvironmentRefused, match=r"Return copies from .*, or use SerialEnv, or Transformed"
    ):
        rows(partial(parallel, habit, "dict"), "dict")


def test_a_parallel_environment_whose_rows_are_true_is_not_refused() -> None:
    assert_true(parallel, "reward")
    refuse_reused(parallel("after resets"))


@pytest.mark.parametrize("habit", EVERY)
@pytest.mark.parametrize("owned", [False, True])
def test_an_own_step_and_reset_is_refused(habit: str, owned: bool) -> None:
    def make(habit: str | None, kind: Kind) -> Any:
        return OneCall(3, LENGTHS, kind=kind, habit=habit)

    create = partial(make, habit, "float") if owned else make(habit, "float")
    if habit == "reward":
        assert_true(make, habit)
        return
    with pytest.raises(EnvironmentRefused, match=r"of its own .*Return copies"):
        rows(lambda: create() if owned else create)


def same_step(reuse: bool, cls: Any = "sync", kind: Kind = "float", **kwargs: Any) -> VectorEnv:
    options = {"context": "fork"} if cls == "async" else {"copy": kwargs.pop("copy", True)}
    kwargs |= {"kind": kind, "ends": "mixed", "reuse_buffer": reuse, "vec_kwargs": options}
    return make_oracle_vec(2, LENGTHS, mode=SAME, cls=cls, **kwargs)


@pytest.mark.parametrize("kind", ["float", "dict", "tuple"])
@pytest.mark.parametrize("cls", ["sync", "async"])
def test_a_vector_in_same_step_mode_is_refused_before_it_steps(cls: str, kind: Kind) -> None:
    with pytest.raises(EnvironmentRefused, match=r"one array that it overwrites.*NEXT_STEP or DIS"):
        rows(partial(same_step, True, cls, kind), kind)
    wanted = rows(partial(same_step, False, "sync", kind), kind)
    assert_same(wanted, rows(partial(same_step, False, cls, kind), kind))


def test_infos_that_an_asynchronous_vector_sends_too_late() -> None:
    def make(cls: Any, reuse_info: bool) -> VectorEnv:
        lane = partial(Telling, 0, LENGTHS, ends="mixed", reuse_info=reuse_info)
        options = {"context": "fork"} if cls is AsyncVectorEnv else {}
        vector: VectorEnv = cls([lane] * 2, autoreset_mode=SAME, **options)
        return vector

    wanted = rows(partial(make, SyncVectorEnv, False), info_keys=["told"])
    assert_same(wanted, rows(partial(make, SyncVectorEnv, True), info_keys=["told"]))
    assert_same(wanted, rows(partial(make, AsyncVectorEnv, False), info_keys=["told"]))
    rows(partial(make, AsyncVectorEnv, True))  # none of its infos becomes a column
    with pytest.raises(EnvironmentRefused, match="AsyncVectorEnv"):
        rows(partial(make, AsyncVectorEnv, True), info_keys=["told"])


class Holding(VectorEnv[Any, Any, Any]):
    """Vector around another vector, without the attributes of a wrapper."""

    def __init__(self, inner: VectorEnv) -> None:
        self.inner = inner


def test_a_vector_is_looked_for_in_what_lies_around_it() -> None:
    made = same_step(True)
    recorded = RecordEpisodeStatistics(made)
    assert vector_of_lanes(recorded) is made
    assert vector_of_lanes(Holding(Holding(recorded))) is made
    assert vector_of_lanes(OracleVectorEnv(2)) is None
    with pytest.raises(EnvironmentRefused, match="one array that it overwrites"):
        refuse_reused(GymnasiumVectorEnv(recorded))


class SameStepVector(OracleVectorEnv):
    """Native vector in SAME_STEP mode, whose final observations are copies or views."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": SAME}  # type: ignore[misc]
    copies = True

    def step(self, actions: Any) -> Any:
        """Step and reset ended lanes."""
        obs, reward, terminated, truncated, info = super().step(actions)
        reward, terminated, truncated = reward.copy(), terminated.copy(), truncated.copy()
        ended = self._to_reset.copy()
        if ended.any():
            finals = np.full(self.num_envs, None, object)
            for lane in np.flatnonzero(ended):
                finals[lane] = obs[lane].copy() if self.copies else obs[lane]
                obs[lane] = self.lanes[lane].reset()[0]
            self._to_reset[:] = False
            info = {**info, "final_obs": finals, "_final_obs": ended}
        return obs, reward, terminated, truncated, info


class SameStepViews(SameStepVector):
    copies = False


def test_final_observations_that_are_views_of_the_first_ones_are_refused() -> None:
    lanes = (2, LENGTHS)
    wanted = rows(partial(same_step, False))
    assert_same(wanted, rows(partial(SameStepVector, *lanes, ends="mixed")))
    with pytest.raises(EnvironmentRefused, match=r"lane \d returns .* return copies"):
        rows(partial(SameStepViews, *lanes, ends="mixed"))


class Common(OracleEnv):
    """Oracle whose lanes all return the same array."""

    array: ClassVar[Any] = np.zeros(3, np.float32)

    def _observation(self) -> Any:
        self.array[:] = super()._observation()
        return self.array


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_lanes_that_overwrite_each_other_are_refused(mode: AutoresetMode) -> None:
    lanes = [partial(Common, lane, LENGTHS) for lane in range(3)]
    with pytest.raises(EnvironmentRefused, match=r"same array|one array"):
        rows(lambda: SyncVectorEnv(lanes, autoreset_mode=mode))


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_rows_are_true(mode: Any) -> None:
    def run(habit: str | None) -> Any:
        kwargs: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 60, "seed": 0}
        lanes = [partial(Reusing, 2, LENGTHS, habit=habit), partial(one, habit, "float", 2)]
        return collect_all(
            start([*lanes][: 1 + (mode == "sync")], ByObservation(), mode=mode, **kwargs)
        )

    wanted, got = run(None), run("all")
    for mine, theirs in zip(got.batches, wanted.batches, strict=True):
        assert_same(mine, theirs)


def test_workers_refuse() -> None:
    with pytest.raises(EnvironmentRefused, match="one array that it overwrites"):
        start(partial(same_step, True), num_workers=1, frames_per_batch=8, total_frames=8)
