"""`GymnasiumVectorEnv` is also a correct TorchRL environment, and each space has its column."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, Unbounded
from torchrl.envs import StepCounter, TransformedEnv, check_env_specs

from tallyroll.collector import GymnasiumVectorEnv, Recorder, SyncCollector
from tallyroll.collector.envs.gymnasium.vector import autoreset_mode
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused

from collect_kit import LENGTHS, ByObservation, assert_same, collect, joined
from oracles import (
    ACTIONS,
    ENDS,
    KINDS,
    OracleEnv,
    OracleVectorEnv,
    check_rows,
    make_oracle_vec,
)
from pairs import each_pair, in_gate

MODES = list(AutoresetMode)


def vec(mode: AutoresetMode, reset_slots: Any = "mask", **kwargs: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(
        make_oracle_vec(3, LENGTHS, mode=mode, **kwargs), reset_slots=reset_slots
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_specs_hold(mode: AutoresetMode, kind: Any) -> None:
    check_env_specs(vec(mode, kind=kind))
    check_env_specs(TransformedEnv(vec(mode, kind=kind), StepCounter()))


@pytest.mark.parametrize("action", ACTIONS)
def test_specs_of_actions_hold(action: Any) -> None:
    check_env_specs(vec(AutoresetMode.NEXT_STEP, action=action))


@pytest.mark.parametrize("kind", ["float", "dict"])
def test_specs_of_a_native_vector_hold(kind: Any) -> None:
    check_env_specs(GymnasiumVectorEnv(OracleVectorEnv(3, LENGTHS, kind=kind)))


@each_pair(
    mode=MODES, reset_slots=["mask", "avoid"], kind=["float", "uint8", "dict", "tuple"], ends=ENDS
)
def test_torchrls_own_rollout_holds_true_transitions_only(
    mode: AutoresetMode, reset_slots: Any, kind: Any, ends: Any
) -> None:
    env = vec(mode, reset_slots, kind=kind, ends=ends)
    rows = env.rollout(20, ByObservation(kind), break_when_any_done=False)
    check_rows(rows, LENGTHS, kind=kind, ends=ends)


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_under_transforms_holds_true_transitions_only(mode: AutoresetMode) -> None:
    env = TransformedEnv(vec(mode), StepCounter(max_steps=3))
    rows = env.rollout(20, ByObservation(), break_when_any_done=False)
    check_rows(rows, LENGTHS, time_limit=3)


def test_a_rollout_of_a_native_vector_marks_its_reset_slots() -> None:
    env = GymnasiumVectorEnv(OracleVectorEnv(3, LENGTHS))
    rows = env.rollout(20, ByObservation(), break_when_any_done=False)
    valid = rows["next", "collector", "valid"].squeeze(-1)
    assert 0 < int((~valid).sum()) < 30
    assert (rows["next", "reward"].squeeze(-1)[~valid] == 0).all()
    for lane in range(3):
        check_rows(rows[lane][valid[lane]].exclude("collector", ("next", "collector")), LENGTHS)


def test_lanes_are_reset_by_mask() -> None:
    env = vec(AutoresetMode.NEXT_STEP)
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[True], [False], [False]])
    after = env.reset(td)
    assert after["observation"][:, 1:].tolist() == [[1, 0], [0, 1], [0, 1]]
    after = env.rand_step(after)["next"]
    assert after["observation"][0].tolist() == [0, 1, 1]


def test_a_native_vector_is_never_reset_in_part() -> None:
    env = GymnasiumVectorEnv(OracleVectorEnv(3, LENGTHS))
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[True], [False], [False]])
    with pytest.raises(EnvironmentRefused, match="ignores reset masks and would reset every lane"):
        env.reset(td)


@pytest.mark.parametrize(
    ("space", "spec", "shape"),
    [
        (spaces.Box(-1, 2, (2,), np.float64), Bounded, (3, 2)),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), Unbounded, (3, 2)),
        (spaces.Box(0, 255, (2, 2), np.uint8), Bounded, (3, 2, 2)),
        (spaces.Box(0, 5, (1,), np.int16), Bounded, (3, 1)),
        (spaces.Discrete(4), Categorical, (3,)),
        (spaces.Discrete(4, start=-2), Bounded, (3,)),
        (spaces.MultiDiscrete([2, 3]), MultiCategorical, (3, 2)),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), Bounded, (3, 2, 2)),
        (spaces.MultiBinary(5), Binary, (3, 5)),
        (spaces.MultiBinary([2, 5]), Binary, (3, 2, 5)),
    ],
)
def test_each_space_has_its_spec_and_its_column(space: Any, spec: Any, shape: Any) -> None:
    class Sampling(gym.Env[Any, Any]):
        """Environment that samples its observations and actions from one space."""

        observation_space = action_space = space

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            """Return a sampled observation."""
            super().reset(seed=seed)
            return space.sample(), {}

        def step(self, action: Any) -> Any:
            """Return the action as the observation."""
            assert space.contains(action), action
            return action, 0.0, bool(self.np_random.random() < 0.3), False, {}

    env = GymnasiumVectorEnv(SyncVectorEnv([Sampling] * 3))
    declared = env.observation_spec["observation"]
    assert isinstance(declared, spec)
    assert declared.shape == shape
    rows = joined(collect(env, frames_per_batch=20, total_frames=60)[0])
    assert declared.is_in(rows["observation"][:3].reshape(shape))
    assert torch.equal(rows["next", "observation"], rows["action"])
    assert len(rows["action"].flatten().unique()) > 1


def test_the_mode_is_read_from_the_environment_then_from_its_metadata() -> None:
    assert [autoreset_mode(make_oracle_vec(1, mode=mode)) for mode in MODES] == MODES
    native = OracleVectorEnv(1)
    assert autoreset_mode(native) is AutoresetMode.NEXT_STEP
    native.metadata = {"autoreset_mode": "SameStep"}
    assert autoreset_mode(native) is AutoresetMode.SAME_STEP
    wrapped = gym.wrappers.vector.RecordEpisodeStatistics(
        make_oracle_vec(1, mode=AutoresetMode.DISABLED)
    )
    assert autoreset_mode(wrapped) is AutoresetMode.DISABLED


@pytest.mark.parametrize("mode", MODES)
def test_gymnasiums_vector_wrappers_go_underneath(mode: AutoresetMode) -> None:
    def make() -> Any:
        vector = make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed")
        return gym.wrappers.vector.RecordEpisodeStatistics(vector)

    batches, _ = collect(make, ByObservation(), frames_per_batch=9, total_frames=60)
    check_rows(joined(batches), LENGTHS, ends="mixed")


def test_a_subclass_of_a_sync_vector_is_one() -> None:
    class Own(SyncVectorEnv[Any, Any]):
        """Subclass in a user's code."""

    makes = [partial(OracleEnv, lane, LENGTHS) for lane in range(3)]
    batches, _ = collect(Own(makes), ByObservation(), frames_per_batch=9, total_frames=60)
    check_rows(joined(batches), LENGTHS, from_start=True)


@pytest.mark.parametrize("name", ["CartPole-v1"])
def test_gymnasiums_native_entry_point(name: str) -> None:
    def make() -> Any:
        return gym.make_vec(name, num_envs=4, vectorization_mode="vector_entry_point")

    batches, collector = collect(make, frames_per_batch=100, total_frames=400, seed=0)
    rows = joined(batches)
    assert collector.ledger.reset_slots > 0
    assert set(rows["next", "reward"].view(-1).tolist()) == {1.0}
    for ids in rows["collector", "traj_ids"].unique():
        own = rows[rows["collector", "traj_ids"] == ids]
        assert torch.equal(own["next", "observation"][:-1], own["observation"][1:])
        assert (own["observation"][0].abs() <= 0.05).all()


def test_an_id_and_a_vector_of_it_give_the_same_rows() -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 50, "total_frames": 200, "seed": 1}
    one, _ = collect("CartPole-v1", num_envs=3, **kwargs)
    makes = [partial(gym.make, "CartPole-v1")] * 3
    for cls, more in ((SyncVectorEnv, {}), (AsyncVectorEnv, {"context": "fork"})):
        other, _ = collect(
            partial(cls, makes, autoreset_mode=AutoresetMode.DISABLED, **more), **kwargs
        )
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)


def test_env_kwargs_reach_the_environment() -> None:
    batches, _ = collect(
        "CartPole-v1", env_kwargs={"max_episode_steps": 4}, frames_per_batch=20, total_frames=20
    )
    assert int(batches[0]["collector", "step"].max()) == 3
    assert batches[0]["next", "truncated"].any()


def test_seeds_are_one_a_lane() -> None:
    with pytest.raises(ArgumentError, match="expected 3 seeds, one per lane, got 2"):
        vec(AutoresetMode.DISABLED).seed_lanes([1, 2])


def test_closing_closes_the_vector() -> None:
    env = vec(AutoresetMode.NEXT_STEP)
    env.close()
    assert env.vector_env.closed


def test_an_instance_is_not_closed_when_its_collector_is_gone() -> None:
    vector = make_oracle_vec(3, LENGTHS, mode=AutoresetMode.DISABLED)
    for limit in (None, 2):
        collect(vector, frames_per_batch=9, total_frames=9, max_frames_per_traj=limit)
        gc.collect()
        assert not vector.closed


# --- workers that reset a lane twice --------------------------------------------------------------


class Counting(gym.Env):
    """Environment that observes episode and step. Its episodes have 2, 3 or 4 steps."""

    observation_space = spaces.Box(-1, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)
    episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.at = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        over = self.at >= 2 + self.episode % 3
        return np.array([self.episode, self.at], np.float32), 1.0, over, False, {}


def unshared(mode: AutoresetMode = AutoresetMode.NEXT_STEP, **more: Any) -> AsyncVectorEnv:
    arguments = {"shared_memory": False, "context": "fork", "autoreset_mode": mode, **more}
    return AsyncVectorEnv([Counting] * 2, **arguments)


def check_counting(env: Any, frames: int = 48, **more: Any) -> None:
    with SyncCollector(
        env, None, frames_per_batch=4, total_frames=frames, seed=0, **more
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    before, after = rows["observation"], rows["next", "observation"]
    assert torch.equal(after[:, 0], before[:, 0]), "no row leads from one episode to the next"
    assert torch.equal(after[:, 1], before[:, 1] + 1)
    assert (rows["next", "reward"] == 1).all()


FORGETS = "may reset a lane again in the step after a reset, .*DISABLED or SAME_STEP"


@pytest.mark.parametrize(
    ("mode", "slots", "more"),
    in_gate(
        MODES,
        ["mask", "avoid"],
        [{}, {"max_frames_per_traj": 2}, {"reset_at_each_iter": True}],
    ),
)
def test_workers_without_shared_memory(mode: AutoresetMode, slots: Any, more: Any) -> None:
    """NEXT_STEP workers forget resets, so options that reset lanes are refused."""
    vector = unshared(mode)
    try:
        forgets = mode is AutoresetMode.NEXT_STEP and (slots == "avoid" or bool(more))
        if not forgets:
            check_counting(GymnasiumVectorEnv(vector, reset_slots=slots), **more)
            return
        said = (
            "resets lanes by mask" if "max_frames_per_traj" in more else "reset_at_each_iter: Asy"
        )
        with pytest.raises(EnvironmentRefused, match=FORGETS if slots == "avoid" else said):
            check_counting(GymnasiumVectorEnv(vector, reset_slots=slots), **more)
    finally:
        vector.close()


def test_a_vector_that_forgets_resets_is_not_collected_from_again() -> None:
    vector = unshared()
    try:
        check_counting(vector, 4)  # both lanes end with the last of these rows
        with pytest.raises(EnvironmentRefused, match=FORGETS):
            check_counting(GymnasiumVectorEnv(vector), 4)
    finally:
        vector.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_worker_function_may_forget_resets(shared: bool) -> None:
    """A user may declare that the function honors resets."""
    vector = unshared(worker=_async_worker, shared_memory=shared)
    try:
        with pytest.raises(EnvironmentRefused, match=FORGETS):
            GymnasiumVectorEnv(vector, reset_slots="avoid")
        if shared:
            check_counting(GymnasiumVectorEnv(vector, reset_slots="avoid", reset_masks=True))
        else:
            check_counting(GymnasiumVectorEnv(vector), 20)
    finally:
        vector.close()


@pytest.mark.parametrize("way", ["collected", "recorded", "recorded alone"])
def test_no_environment_gets_a_dictionary(way: str, tmp_path: Path) -> None:
    # Each step of a small environment would take longer from then on.
    lanes = [gym.make("CartPole-v1") for _ in range(2)]
    vector = SyncVectorEnv([partial(lanes.__getitem__, lane) for lane in range(2)])
    if way == "collected":
        collect(GymnasiumVectorEnv(vector), frames_per_batch=4, total_frames=8)
    else:
        env: Any = vector if way == "recorded" else lanes[0]
        with Recorder(env, storage=tmp_path / "rows") as recorder:
            recorder.reset()
            recorder.step(recorder.action_space.sample())
    layers: list[Any] = [*lanes, vector] if way == "recorded" else list(lanes)
    names = {"env", "gravity", "env_fns"}
    for layer in layers:
        held = gc.get_referents(layer)
        assert not any(type(value) is dict and names & value.keys() for value in held)
        layers += [layer.env] if isinstance(layer, gym.Wrapper) else []
    assert len(layers) > 4
