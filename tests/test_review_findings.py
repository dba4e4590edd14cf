"""What a review found: combinations of options that gave wrong rows, wrong counts, or no end."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymWrapper, SerialEnv

from tallyroll.collector import CollectorError, SyncCollector
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    PolicyError,
    StateError,
    TransitionError,
)
from tallyroll.storage import MemmapStorage

from oracles import OracleEnv, OracleTorchEnv, OracleVectorEnv, check_rows, make_oracle_vec
from test_collect_kit import LENGTHS, ByObservation, collect, joined

MODES = list(AutoresetMode)


# --- storing --------------------------------------------------------------------------------------


def test_a_buffer_over_the_storage_stores_each_row_once(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "runs")
    buffer = ReplayBuffer(storage=storage)
    _, collector = collect(
        make_oracle_vec(2, LENGTHS),
        frames_per_batch=4,
        total_frames=20,
        storage=storage,
        replay_buffer=buffer,
    )
    assert len(storage) == collector.ledger.stored == 20
    storage.close()


def test_a_failing_replay_buffer_leaves_storage_and_ledger_agreed(tmp_path: Path) -> None:
    class Failing(ReplayBuffer):
        batches = 0

        def extend(self, *args: Any, **kwargs: Any) -> Any:
            self.batches += 1
            if self.batches == 2:
                raise RuntimeError("no room")
            return super().extend(*args, **kwargs)

    storage = MemmapStorage(tmp_path / "runs")
    buffer = Failing(storage=LazyTensorStorage(100, compilable=True))
    with pytest.raises(RuntimeError, match="no room"):
        collect(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=4,
            total_frames=20,
            storage=storage,
            replay_buffer=buffer,
        )
    assert storage.record is not None
    assert json.loads(storage.record[1])["ledger"]["stored"] == len(storage)
    storage.close()


def test_a_run_that_went_on_from_a_state_is_resumed_to_the_exact_total(tmp_path: Path) -> None:
    def part(**kwargs: Any) -> SyncCollector:
        env = make_oracle_vec(2, LENGTHS, kind="seeded")
        return SyncCollector(env, frames_per_batch=5, total_frames=60, **kwargs)

    first = part(storage=tmp_path / "runs", seed=1)
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()
    first.shutdown()
    with MemmapStorage(tmp_path / "runs", mode="append") as storage:
        second = part(storage=storage, seed=1)
        second.load_state_dict(state)
        batches = iter(second)
        next(batches), next(batches)
        second.shutdown()
    with part(storage=tmp_path / "runs", resume=True) as third:
        assert third.ledger.stored == 20
        assert third.ledger.incarnation > second.ledger.incarnation
        list(third)
        assert third.ledger.stored == 60
    with MemmapStorage(tmp_path / "runs", mode="read") as storage:
        assert len(storage) == 60


def test_a_seed_set_in_mid_run_is_the_one_that_is_resumed(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 5, "total_frames": 20}
    with SyncCollector(
        make_oracle_vec(2, LENGTHS), storage=tmp_path / "runs", seed=1, **kwargs
    ) as collector:
        collector.set_seed(5)
        next(iter(collector))
    with SyncCollector(
        make_oracle_vec(2, LENGTHS), storage=tmp_path / "runs", resume=True, **kwargs
    ) as resumed:
        assert resumed.ledger.seed == 5


# --- rows -----------------------------------------------------------------------------------------


class NotANumberAtFirst(OracleEnv):
    """The first observation of the second episode is NaN."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        observation, info = super().reset(**kwargs)
        return (observation * np.nan if self.episode == 1 else observation), info


@pytest.mark.parametrize("mode", MODES)
def test_the_first_observation_of_an_episode_is_checked_too(mode: AutoresetMode) -> None:
    env = SyncVectorEnv([partial(NotANumberAtFirst, 0, (3,))], autoreset_mode=mode)
    with pytest.raises(TransitionError, match="observation lies outside its space"):
        collect(env, frames_per_batch=4, total_frames=12)


DRIVERS = {
    "vector": lambda: make_oracle_vec(3, LENGTHS),
    "torch": lambda: OracleTorchEnv(3, LENGTHS),
    "one lane": lambda: OracleTorchEnv(None, LENGTHS),
}
every_driver = pytest.mark.parametrize("driver", DRIVERS)


@every_driver
def test_what_a_policy_makes_of_its_observation_is_not_what_is_stored(driver: str) -> None:
    def normalising(td: TensorDictBase) -> TensorDictBase:
        td = ByObservation()(td)
        return td.set("observation", td["observation"] / 2)

    batches, _ = collect(DRIVERS[driver](), normalising, frames_per_batch=4, total_frames=24)
    check_rows(joined(batches), LENGTHS, from_start=True)


@pytest.mark.parametrize(
    ("driver", "surplus"), [*((driver, "carry") for driver in DRIVERS), ("one lane", "never_step")]
)
def test_a_callable_may_return_another_tensordict(driver: str, surplus: str) -> None:
    def fresh(td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"action": ByObservation()(td.clone())["action"]}, td.batch_size)

    batches, _ = collect(
        DRIVERS[driver](), fresh, frames_per_batch=4, total_frames=24, surplus=surplus
    )
    check_rows(joined(batches), LENGTHS, from_start=True)


class NothingAllowedAtTheEnd(gym.Env[Any, Any]):
    """Two of three actions are legal in turn, and none in the final observation."""

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


# --- episodes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", range(1, 8))
def test_a_new_seed_in_between_leaves_a_budget_of_episodes_exact(frames: int) -> None:
    env = make_oracle_vec(4, [[3], [2], [1], [1]], mode=AutoresetMode.DISABLED)
    with SyncCollector(env, frames_per_batch=frames, total_episodes=9) as collector:
        batches = iter(collector)
        next(batches)
        collector.set_seed(3)
        for _ in batches:
            pass
    assert collector.ledger.episodes_complete == 9


@pytest.mark.timeout(20)
@pytest.mark.parametrize("frames", [1, 3, 7])
def test_a_budget_of_episodes_ends_where_lanes_are_stepped_in_part(frames: int) -> None:
    lengths = [[2, 2, 2, 2], [2, 7, 3, 3], [3], [1, 2], [2, 2, 2, 7]]
    env = make_oracle_vec(5, lengths, mode=AutoresetMode.DISABLED)
    seen = 0
    with SyncCollector(
        env, frames_per_batch=frames, total_episodes=5, surplus="never_step"
    ) as collector:
        for batch in collector:
            seen += len(batch)
            assert collector.ledger.slots < 500, "it does not end"
    assert collector.ledger.episodes_complete == 5


def test_carried_transitions_are_delivered_when_stopped_between_batches() -> None:
    with SyncCollector(make_oracle_vec(5, [[9]]), frames_per_batch=3, total_frames=-1) as collector:
        rows = 0
        for batch in collector:
            rows += len(batch)
            collector.stop()
    assert rows == collector.ledger.executed == 5


# --- policies -------------------------------------------------------------------------------------


def linear() -> TensorDictModule:
    """A policy that has weights, its actions within the box."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


def test_weights_that_fit_nothing_are_refused() -> None:
    env = make_oracle_vec(2, LENGTHS, action="box")
    with SyncCollector(env, linear(), frames_per_batch=4, total_frames=8) as collector:
        with pytest.raises(CollectorError, match="nonsense"):
            collector.update_policy_weights_(TensorDict({"nonsense": torch.zeros(3)}))
        assert collector.policy_version == 0


def test_weights_may_be_a_module() -> None:
    policy, other = linear(), linear()
    env = make_oracle_vec(2, LENGTHS, action="box")
    with SyncCollector(env, policy, frames_per_batch=4, total_frames=8) as collector:
        collector.update_policy_weights_(other)
    for one, two in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@every_driver
def test_an_action_of_another_dtype_later_is_refused(driver: str) -> None:
    calls = 0

    def policy(td: TensorDictBase) -> TensorDictBase:
        nonlocal calls
        calls += 1
        action = torch.ones(td.batch_size, dtype=torch.int64)
        return td.set("action", action if calls < 4 else action * 0.7)

    with pytest.raises(PolicyError, match=r"action: got float32.*wanted int64"):
        collect(DRIVERS[driver](), policy, frames_per_batch=4, total_frames=24)


def test_a_multibinary_action_outside_its_space_is_refused() -> None:
    class Lenient(OracleEnv):
        def step(self, action: Any) -> Any:
            return super().step(np.minimum(action, 1))

    calls = 0

    def policy(td: TensorDictBase) -> TensorDictBase:
        nonlocal calls
        calls += 1
        value = 7 if calls > 3 else 1
        return td.set("action", torch.full((*td.batch_size, 3), value, dtype=torch.int8))

    env = SyncVectorEnv([partial(Lenient, 0, (5,), action="multibinary")])
    with pytest.raises(PolicyError, match="outside the action space"):
        collect(env, policy, frames_per_batch=4, total_frames=12)


def test_a_policy_may_hold_a_storage(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "runs") as storage:

        class Holding:
            def __init__(self) -> None:
                self.storage = storage

            def __call__(self, td: TensorDictBase) -> TensorDictBase:
                return ByObservation()(td)

        _, collector = collect(
            make_oracle_vec(2, LENGTHS), Holding(), frames_per_batch=4, total_frames=8
        )
    assert collector.ledger.stored == 8


# --- clear errors ---------------------------------------------------------------------------------


class TwoObjectives(OracleVectorEnv):
    """Rewards are vectors."""

    def step(self, actions: Any) -> Any:
        """Step, with each reward twice."""
        obs, reward, *rest = super().step(actions)
        return obs, np.stack([reward, reward], 1), *rest


def test_vector_rewards_are_told_by_name() -> None:
    with pytest.raises(TransitionError, match="reward"):
        collect(TwoObjectives(2, LENGTHS), frames_per_batch=4, total_frames=12)


@pytest.mark.parametrize("column", ["cut", "lane", "traj_ids"])
def test_a_postproc_that_drops_what_batches_need_is_told_so(column: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"collector.{column}"):
        collect(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=4,
            total_frames=8,
            layout="lanes",
            storage=tmp_path / "runs",
            postproc=lambda td: td.exclude(("collector", column)),
        )
    assert not (tmp_path / "runs" / "manifest.json").exists()


def test_a_state_without_its_parts_is_refused() -> None:
    made = SyncCollector(make_oracle_vec(2, LENGTHS), frames_per_batch=4, total_frames=8)
    with made, pytest.raises(StateError, match="policy"):
        made.load_state_dict({})


def test_a_new_storage_has_nothing_to_resume(tmp_path: Path) -> None:
    with (
        MemmapStorage(tmp_path / "runs") as storage,
        pytest.raises(StateError, match=r"no run yet|begins a storage"),
    ):
        SyncCollector(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=4,
            total_frames=8,
            storage=storage,
            resume=True,
        )


def test_two_layouts_at_once_are_refused() -> None:
    with pytest.raises(ArgumentError, match="split_trajs"):
        SyncCollector(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=4,
            total_frames=8,
            layout="lanes",
            split_trajs=True,
        )


# --- what the first fixes left open ---------------------------------------------------------------


def test_all_that_is_carried_is_delivered_when_stopped_between_batches() -> None:
    with SyncCollector(make_oracle_vec(9, [[9]]), frames_per_batch=2, total_frames=-1) as collector:
        rows = 0
        for batch in collector:
            rows += len(batch)
            collector.stop()
    assert rows == collector.ledger.executed == 9


def test_a_policy_is_not_copied_to_where_it_is_already() -> None:
    policy = linear()
    env = make_oracle_vec(2, LENGTHS, action="box")
    with SyncCollector(
        env, policy, frames_per_batch=4, total_frames=8, surplus="discard", policy_device="cpu:0"
    ) as collector:
        batches = iter(collector)
        next(batches)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
        assert not next(batches)["action"].any()


def test_a_postproc_does_not_lose_what_was_stored_before_a_state(tmp_path: Path) -> None:
    def part(**kwargs: Any) -> SyncCollector:
        return SyncCollector(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=5,
            total_frames=60,
            postproc=lambda td: td,
            **kwargs,
        )

    with part(storage=tmp_path / "runs", seed=1) as first:
        next(iter(first))
        state = first.state_dict()
    with (
        MemmapStorage(tmp_path / "runs", mode="append") as storage,
        part(storage=storage) as second,
    ):
        second.load_state_dict(state)
        next(iter(second))
    with part(storage=tmp_path / "runs", resume=True) as third:
        assert third.ledger.stored == 10


def test_a_storage_that_this_process_created_is_resumed(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "runs") as storage:
        for resume in (False, True):
            with SyncCollector(
                make_oracle_vec(2, LENGTHS),
                frames_per_batch=5,
                total_frames=20,
                storage=storage,
                resume=resume,
            ) as collector:
                batches = iter(collector)
                next(batches), next(batches)
        assert len(storage) == 20


@pytest.mark.filterwarnings("ignore")
def test_lost_final_observations_of_a_serial_environment_are_marked_or_refused() -> None:
    class AutoReset(OracleEnv):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            if terminated or truncated:
                observation, _ = self.reset()
            return observation, reward, terminated, truncated, info

    def make() -> Any:
        return GymWrapper(AutoReset(0, LENGTHS), auto_reset=True, categorical_action_encoding=True)

    try:
        batches, _ = collect(
            SerialEnv(2, make), frames_per_batch=6, total_frames=24, validate="off"
        )
    except EnvironmentRefused:
        return
    rows = joined(batches)
    assert torch.equal(~rows["collector", "next_valid"], rows["next", "done"].view(-1))
