"""Gymnasium's vector wrappers that have a state, strings, and vector rewards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformObservation as OneTransform
from gymnasium.wrappers.utils import RunningMeanStd
from gymnasium.wrappers.vector import (
    DictInfoToList,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    RescaleAction,
    TransformObservation,
    TransformReward,
    VectorizeTransformObservation,
)
from tensordict import TensorDictBase
from torchrl.envs import RewardSum, TransformedEnv

from tallyroll.collector import GymnasiumVectorEnv, Info, SyncCollector
from tallyroll.collector.errors import EnvironmentRefused, SpaceError, TransitionError
from tallyroll.collector.native.kernel import compiled
from tallyroll.storage import MemmapStorage, fast_paths

from collect_kit import LENGTHS, collect, joined, stream
from oracles import check_rows, make_oracle_vec

MODES = list(AutoresetMode)
WAYS = [*((mode, "mask") for mode in MODES), (AutoresetMode.NEXT_STEP, "avoid")]
each_way = pytest.mark.parametrize(("mode", "slots"), WAYS)


def vec(mode: AutoresetMode, **kwargs: Any) -> Any:
    return make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed", **kwargs)


def run(env: Any, **kwargs: Any) -> TensorDictBase:
    kwargs = {"frames_per_batch": 17, "total_frames": 90, "seed": 0, **kwargs}
    return joined(collect(env, **kwargs)[0])


def slots_of(rows: TensorDictBase) -> list[list[int]]:
    """Return the rows of each lane in the order of its steps."""
    order = np.lexsort((rows["collector", "step"], rows["collector", "traj_ids"]))
    lanes = rows["collector", "lane"].numpy()[order]
    return [order[lanes == lane].tolist() for lane in range(3)]


@each_way
def test_statistics_of_episodes_are_each_lanes_own(mode: AutoresetMode, slots: Any) -> None:
    infos = [Info("episode/r", float, fill=0), Info(("episode", "l"), int, fill=0)]
    rows = run(RecordEpisodeStatistics(vec(mode)), info_keys=infos, reset_slots=slots)
    check_rows(rows.exclude("episode", ("next", "episode")), LENGTHS, ends="mixed", from_start=True)
    ends = rows["next", "done"].flatten()
    for lane in slots_of(rows):
        total = 0.0
        for row in lane:
            total += rows["next", "reward"][row].item()
            assert rows["next", "episode", "l"][row] == (
                rows["collector", "step"][row] + 1 if ends[row] else 0
            )
            if ends[row]:
                assert rows["next", "episode", "r"][row].item() == pytest.approx(total)
                total = 0.0


def test_rewards_are_normalised_by_each_lanes_own_return() -> None:
    """A reset by mask restarts the sum of its lanes and continues the others."""
    given = {"total_frames": 60, "frames_per_batch": 60}
    scaled = run(NormalizeReward(vec(AutoresetMode.DISABLED)), **given)
    plain = run(vec(AutoresetMode.DISABLED), **given)
    assert torch.equal(scaled["observation"], plain["observation"])
    sums, rms = np.zeros(3, np.float32), RunningMeanStd(shape=())
    for slot in zip(*slots_of(plain), strict=True):
        at = list(slot)
        reward = plain["next", "reward"][at, 0].double().numpy()
        ended = plain["next", "terminated"][at, 0].numpy()
        sums = (sums * 0.99 * (1 - ended) + reward).astype(np.float32)
        rms.update(sums)
        wanted = reward / np.sqrt(rms.var + 1e-8)
        assert np.allclose(scaled["next", "reward"][at, 0].numpy(), wanted, rtol=1e-5)
        sums[plain["next", "done"][at, 0].numpy()] = 0


@each_way
def test_normalised_rewards_in_every_mode(mode: AutoresetMode, slots: Any) -> None:
    """All columns except the reward are the environment's, wherever the wrapper keeps its sums."""
    rows = run(NormalizeReward(vec(mode)), reset_slots=slots)
    plain = run(vec(mode), reset_slots=slots)
    for key in plain.keys(True, True):
        assert key == ("next", "reward") or torch.equal(rows[key], plain[key]), key
    assert not torch.equal(rows["next", "reward"], plain["next", "reward"])


def test_normalised_observations_see_each_observation_once() -> None:
    mode = AutoresetMode.NEXT_STEP
    rows, plain = run(NormalizeObservation(vec(mode))), run(vec(mode))
    assert torch.equal(rows["collector", "traj_ids"], plain["collector", "traj_ids"])
    hand = NormalizeObservation(vec(mode))
    hand.reset()
    left = slots_of(rows)
    over = np.zeros(3, np.bool_)
    while all(left):
        at = [None if over[lane] else left[lane].pop(0) for lane in range(3)]
        action = np.array([0 if row is None else rows["action"][row].item() for row in at])
        obs, _, terminated, truncated, _ = hand.step(action)
        for lane, row in enumerate(at):
            if row is not None:
                assert np.array_equal(rows["next", "observation"][row].numpy(), obs[lane])
        over = terminated | truncated


def test_observations_that_are_normalised_together_are_not_reset_in_part() -> None:
    make = partial(NormalizeObservation, vec(AutoresetMode.NEXT_STEP))
    with pytest.raises(EnvironmentRefused, match=r"NormalizeObservation\(SyncVectorEnv\) ignores"):
        GymnasiumVectorEnv(make(), reset_slots="avoid")
    for env in (make, TransformedEnv(GymnasiumVectorEnv(make()), RewardSum())):
        kwargs = {"max_frames_per_traj": 2} if env is make else {}
        with pytest.raises(EnvironmentRefused, match=r"NormalizeObservation\(SyncVectorEnv\)"):
            run(env, **kwargs)


@each_way
@pytest.mark.parametrize("wrapper", ["rescale", "whole", "each", "reward"])
def test_wrappers_that_remember_nothing(mode: AutoresetMode, slots: Any, wrapper: str) -> None:
    made = vec(mode, action="box" if wrapper == "rescale" else "discrete")
    space = made.single_observation_space
    twice = {"func": lambda obs: obs * 2, "observation_space": space}
    wrap = {
        "rescale": lambda: RescaleAction(made, np.float32(0), np.float32(1)),
        "whole": lambda: TransformObservation(made, lambda obs: obs * 2),
        "each": lambda: VectorizeTransformObservation(made, OneTransform, **twice),
        "reward": lambda: TransformReward(made, lambda reward: reward * 2),
    }[wrapper]
    if wrapper in ("whole", "each") and mode is AutoresetMode.SAME_STEP:
        with pytest.raises(ValueError, match="Expected autoreset_mode to be NEXT_STEP or DISABLED"):
            wrap()
        return
    env = wrap()
    rows = run(env, reset_slots=slots, validate="off")
    if wrapper == "rescale":
        assert float(rows["action"].min()) >= 0
        assert float(rows["action"].max()) <= 1
        return
    if wrapper == "reward":
        rows["next", "reward"] /= 2
    else:
        for key in ("observation", ("next", "observation")):
            rows[key] = rows[key] / 2
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)


def test_infos_as_lists_are_refused_where_they_are_read() -> None:
    def env(mode: AutoresetMode) -> Any:
        return DictInfoToList(vec(mode))

    assert run(env(AutoresetMode.NEXT_STEP)).numel() == 90
    for kwargs in ({"mode": AutoresetMode.SAME_STEP}, {"mode": AutoresetMode.DISABLED, "info": 1}):
        infos = ["tick"] if kwargs.pop("info", 0) else []
        with pytest.raises(EnvironmentRefused, match="DictInfoToList converts infos to"):
            run(env(**kwargs), info_keys=infos)


# --- strings --------------------------------------------------------------------------------------


class Speaking(gym.Env[Any, Any]):
    """Environment that observes episode and step as a string; episodes have three steps."""

    observation_space = spaces.Dict(
        {"said": spaces.Text(9, charset="ep s0123456789é"), "x": spaces.Box(0, 99, (2,))}
    )
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.at = [-1, 0]

    def _seen(self) -> Any:
        return {"said": f"é{self.at[0]} s{self.at[1]}", "x": np.array(self.at, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.at = [self.at[0] + 1, 0]
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at[1] += 1
        return self._seen(), 0.0, self.at[1] == 3, False, {}


class Saying(Speaking):
    """Environment that observes only a string."""

    observation_space = Speaking.observation_space["said"]

    def _seen(self) -> Any:
        return super()._seen()["said"]


def told(column: torch.Tensor) -> list[str]:
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in column]


@pytest.mark.parametrize(
    "cls", [SyncVectorEnv, partial(AsyncVectorEnv, context="fork", shared_memory=False)]
)
@each_way
def test_a_string_is_a_column_of_bytes(cls: Any, mode: AutoresetMode, slots: Any) -> None:
    if cls is not SyncVectorEnv and slots == "avoid" and mode is AutoresetMode.NEXT_STEP:
        return  # this combination is refused
    make = partial(cls, [Speaking] * 3, autoreset_mode=mode)
    rows = run(make, reset_slots=slots, total_frames=30)
    assert rows["said"].dtype is torch.uint8
    assert rows["said"].shape == (30, 18)  # 9 characters of up to 2 bytes
    for key in ((), ("next",)):
        wanted = [f"é{int(e)} s{int(s)}" for e, s in rows[(*key, "x")].tolist()]
        assert told(rows[(*key, "said")]) == wanted
    assert (rows["next", "x"][rows["next", "done"][:, 0], 1] == 3).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_string_alone(mode: AutoresetMode) -> None:
    rows = run(SyncVectorEnv([Saying] * 2, copy=False, autoreset_mode=mode), total_frames=30)
    steps = rows["collector", "step"].tolist()
    assert [text[-2:] for text in told(rows["observation"])] == [f"s{step}" for step in steps]
    assert [text[-2:] for text in told(rows["next", "observation"])] == [f"s{s + 1}" for s in steps]


def test_strings_that_a_vector_loses() -> None:
    made = AsyncVectorEnv([Speaking], context="fork")
    try:
        with pytest.raises(EnvironmentRefused, match="Pass shared_memory=False"):
            GymnasiumVectorEnv(made)
    finally:
        made.close()


def test_strings_that_do_not_fit() -> None:
    class Long(Saying):
        observation_space = spaces.Text(3)

        def _seen(self) -> str:
            return "abcd" if self.at[1] == 2 else "abc"

    with pytest.raises(
        TransitionError, match=r"observation: .* at most 3 bytes .* returned 'abcd'"
    ):
        run(SyncVectorEnv([Long]))

    class ActionContext(Saying):
        action_space = spaces.Text(3)

    with pytest.raises(SpaceError, match="at action"):
        run(SyncVectorEnv([ActionContext]))


# --- vector rewards -------------------------------------------------------------------------------


class Objectives(Speaking):
    """Environment with a ``reward_space`` and a reward per objective, as in MO-Gymnasium."""

    observation_space = Speaking.observation_space["x"]

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.reward_space = spaces.Box(0, 9, (count,))

    def _seen(self) -> Any:
        return super()._seen()["x"]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, _, *rest = super().step(action)
        reward = np.array([self.at[1], action, 0.1 * action][: self.reward_space.shape[0]])
        reward = reward.astype(np.float32)
        return obs, reward, *rest  # type: ignore[return-value]


@each_way
@pytest.mark.parametrize("count", [1, 2])
def test_a_reward_for_each_objective(mode: AutoresetMode, slots: Any, count: int) -> None:
    made = SyncVectorEnv([partial(Objectives, count)] * 3, autoreset_mode=mode)
    rows = run(made, reset_slots=slots)
    assert rows["next", "reward"].shape == (90, count)
    assert torch.equal(rows["next", "reward"][:, 0], rows["collector", "step"] + 1.0)
    if count == 2:
        assert torch.equal(rows["next", "reward"][:, 1], rows["action"].float())


@pytest.mark.parametrize("mode", MODES)
def test_rewards_of_several_numbers_are_stored_in_one_call(
    mode: AutoresetMode, tmp_path: Path
) -> None:
    """The rows and the returns of episodes equal those of the slowest path, bit for bit."""

    def run(name: str) -> Any:
        made = SyncVectorEnv([partial(Objectives, 3)] * 3, autoreset_mode=mode)
        options: dict[str, Any] = {"frames_per_batch": 3, "total_frames": 100, "seed": 3}
        with MemmapStorage(tmp_path / name) as storage:
            with SyncCollector(made, storage=storage, **options) as collector:
                way = collector.plan.commits.way
                batches = [batch.clone() for batch, _ in zip(collector, range(5), strict=False)]
                while collector.collect(4):
                    pass
                returns = [each.total_return for each in collector.episodes]
            return way, storage.get(slice(None)).clone(), torch.cat(batches), returns

    way, *wanted = run("one")
    with fast_paths.switched_off("fast-collect", "kernel"):
        slow, *found = run("other")
    assert (way, slow) == ("one call" if compiled() else "rows", "rows")
    assert len(wanted[2]) > 5
    assert found[2] == wanted[2]
    for one, other in zip(wanted[:2], found[:2], strict=True):
        assert (one == other).all()


@pytest.mark.filterwarnings("ignore:.*The reward returned by `step:UserWarning")
def test_objectives_of_a_part_of_the_lanes_and_by_id() -> None:
    gym.register("Objectives-v0", entry_point=Objectives)
    try:
        with SyncCollector(
            "Objectives-v0",
            None,
            num_envs=3,
            frames_per_batch=7,
            total_frames=35,
            surplus="never_step",
            seed=0,
        ) as collector:
            rows = torch.cat([batch.clone() for batch in collector])
            returns = [each.total_return for each in collector.episodes]
    finally:
        gym.registry.pop("Objectives-v0")
    assert torch.equal(rows["next", "reward"][:, 1], rows["action"].float())
    done = rows["next", "terminated"][:, 0]
    assert len(returns) >= int(done.sum()) > 3
    assert stream(rows, 0, 3)["next", "reward"][:, 0].tolist() == [1.0, 2.0, 3.0]
