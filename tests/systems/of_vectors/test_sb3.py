"""Test Stable-Baselines3: vectors and their wrappers, and trained models as policies."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from reset_kit import LEVELS, Weather, replay
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tallyroll.collector import (
    Info,
    MultiprocessCollector,
    Recorder,
    Resets,
    SyncCollector,
    choice,
    evaluate,
    uniform,
)
from tallyroll.collector.cli.plan import load_policy
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
    PolicyError,
    SilentReset,
    SpaceError,
    StateError,
    TransitionError,
)
from tallyroll.collector.ext.systems.sb3 import Sb3System
from tallyroll.collector.policies.sb3_models import Sb3Policy
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import open_storage, verify

from arrays_kit import Stepped, by_workers_and_resumed, compare, rows_of
from oracles import OracleEnv, check_rows

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]


def cartpole(**kwargs: Any) -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=15, **kwargs)


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=7)


class AsDict(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
    """Observations with two parts, one of them with another dtype."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict(
            {"state": env.observation_space, "sign": spaces.Box(0, 1, (4,), np.int8)}
        )

    def observation(self, observation: Any) -> Any:
        return {"state": observation, "sign": (observation > 0).astype(np.int8)}


def dicts() -> Any:
    return AsDict(cartpole())


class Doubles(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
    """Observations of float64."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-99, 99, (4,), np.float64)

    def observation(self, observation: Any) -> Any:
        return observation.astype(np.float64)


def doubles() -> Any:
    return Doubles(cartpole())


def normalized() -> Any:
    return VecNormalize(DummyVecEnv([cartpole] * 3))


MADE: dict[str, Callable[[], Any]] = {
    "plain": lambda: DummyVecEnv([cartpole] * 3),
    "continuous": lambda: DummyVecEnv([pendulum] * 3),
    "dict": lambda: DummyVecEnv([dicts] * 3),
    "frames": lambda: VecFrameStack(DummyVecEnv([cartpole] * 3), 2),
    "normalized": normalized,
    "normalized doubles": lambda: VecMonitor(VecNormalize(DummyVecEnv([doubles] * 3))),
    "normalized dicts": lambda: VecNormalize(DummyVecEnv([dicts] * 3), norm_obs_keys=["state"]),
    "normalized rewards": lambda: VecNormalize(DummyVecEnv([cartpole] * 3), norm_obs=False),
    "frames of normalized": lambda: VecFrameStack(VecNormalize(DummyVecEnv([doubles] * 3)), 2),
    "wrapped twice": lambda: VecMonitor(VecFrameStack(DummyVecEnv([dicts] * 3), 2)),
    "processes": lambda: SubprocVecEnv([cartpole] * 3, start_method="fork"),
}


class Contract(SystemContract):
    made: ClassVar[str] = "plain"

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        assert lanes == 3
        return Sb3System(MADE[self.made]())


class TestPlain(Contract):
    steps = 80


class TestDict(Contract):
    made = "wrapped twice"
    steps = 80


def keyed(observation: Any) -> dict[str, Any]:
    parts = observation if isinstance(observation, dict) else {"observation": observation}
    return {key: value.copy() for key, value in parts.items()}


@pytest.mark.parametrize("kind", MADE)
def test_rows_are_what_the_vector_itself_returns(kind: str) -> None:
    rows = rows_of(MADE[kind], frames_per_batch=50, total_frames=200, seed=5)
    env = MADE[kind]()
    env.unwrapped._seeds = lane_seeds(5, 3, 0)
    first = keyed(env.reset())
    gym_first = cartpole().reset(seed=lane_seeds(5, 3, 0)[0])[0]
    if kind in ("plain", "processes"):
        assert (first["observation"][0] == gym_first).all(), "seeds of lanes are Gymnasium's"

    def step(action: Any) -> Stepped:
        obs, reward, done, infos = env.step(action)
        seen, after = keyed(obs), keyed(obs)
        for lane in np.flatnonzero(done):
            for key, value in keyed(infos[lane]["terminal_observation"]).items():
                after[key][lane] = value
        cut = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        return Stepped(after, seen, reward, done & ~cut, done & cut)

    assert compare(rows, 3, first, step) >= 6
    env.close()
    if kind == "continuous":
        assert rows["next", "truncated"].any()
        assert not rows["next", "terminated"].any()


@pytest.mark.slow
def test_workers_and_a_resume_by_name(tmp_path: Path) -> None:
    options = {"max_episode_steps": 9}
    _, resumed, made_of = by_workers_and_resumed(
        "sb3:CartPole-v1",
        tmp_path / "run",
        120,
        80,
        num_envs=4,
        frames_per_batch=40,
        env_kwargs=options,
    )
    assert (made_of["id"], made_of["type"]) == ("sb3:CartPole-v1", "DummyVecEnv")
    again = cartpole().reset(seed=lane_seeds(2, 4, 1)[0])[0]
    assert torch.equal(resumed["observation"][0], torch.from_numpy(again))


class BothAtOnce(gymnasium.Env[Any, Any]):
    """Ends with both flags, and returns one array that it overwrites, or copies."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, copies: bool = True) -> None:
        self.state, self.copies = np.zeros(2, np.float32), copies

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state[:] = 0, self.np_random.random()
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.state[0] += 1
        over = self.state[0] >= 3
        return self._seen(), 1.0, bool(over), bool(over), {}

    def _seen(self) -> Any:
        return self.state.copy() if self.copies else self.state


def test_an_end_of_both_kinds_is_terminated_as_the_library_says() -> None:
    rows = rows_of(lambda: DummyVecEnv([BothAtOnce] * 2), frames_per_batch=30, total_frames=30)
    assert int(rows["next", "terminated"].sum()) == 10
    assert not rows["next", "truncated"].any()
    assert (rows["next", "observation"][rows["next", "terminated"][:, 0]][:, 0] == 3).all()


@pytest.mark.parametrize("kind", [DummyVecEnv, partial(SubprocVecEnv, start_method="fork")])
def test_an_environment_that_overwrites_its_observations_is_found_out(kind: Any) -> None:
    make = partial(BothAtOnce, copies=False)
    with pytest.raises(SilentReset, match="expected the final observation of each episode"):
        rows_of(lambda: kind([make, make]), frames_per_batch=30, total_frames=300)


class Forgets(VecEnvWrapper):
    """Changes observations, or drops data that belong to an end."""

    def __init__(self, env: Any, what: str) -> None:
        super().__init__(env)
        self.what = what
        if what == "shape":
            self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        if what == "dtype":
            self.observation_space = spaces.Box(0, 255, (4,), np.uint8)

    def reset(self) -> Any:
        return self._cut(self.venv.reset())

    def step_wait(self) -> Any:
        obs, reward, done, infos = self.venv.step_wait()
        for lane, info in enumerate(infos):
            if self.what == "final" or (self.what == "of lane 1" and lane == 1):
                info.pop("terminal_observation", None)
            elif self.what == "part" and "terminal_observation" in info:
                del info["terminal_observation"]["sign"]
            elif self.what == "array" and "terminal_observation" in info:
                info["terminal_observation"] = info["terminal_observation"]["state"]
        return self._cut(obs), reward, done, infos

    def _cut(self, obs: Any) -> Any:
        if self.what == "dtype":
            return (np.abs(obs) * 50).astype(np.uint8)
        return obs[:, :2] if self.what == "shape" else obs


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("shape", r"expected a terminal_observation of shape \[2\], got \[4\] in lane"),
        ("dtype", r"a terminal_observation of uint8 in lane \d, as the space declares, got"),
        ("final", "got none from the VecEnv at the end of an episode of lane"),
        ("of lane 1", "got none from the VecEnv at the end of an episode of lane 1"),
    ],
)
def test_a_wrapper_that_forgets_final_observations(what: str, match: str) -> None:
    with pytest.raises(TransitionError, match=match):
        rows_of(lambda: Forgets(MADE["plain"](), what), frames_per_batch=90, total_frames=90)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("final", "got none from the VecEnv at the end of an episode of lane"),
        ("of lane 1", "got none from the VecEnv at the end of an episode of lane 1"),
        ("part", "^sign: expected a terminal_observation with that part in lane .* got dict"),
        ("array", "^sign: expected a terminal_observation with that part in lane .* got ndarray"),
    ],
)
def test_a_wrapper_that_forgets_final_observations_of_parts(what: str, match: str) -> None:
    make = lambda: Forgets(DummyVecEnv([dicts] * 2), what)  # noqa: E731
    with pytest.raises(TransitionError, match=match):
        rows_of(make, frames_per_batch=90, total_frames=90)


def test_what_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, error: type[Exception], match: str, **arguments: Any) -> None:
        with pytest.raises(error, match=match):
            SyncCollector(name, frames_per_batch=4, total_frames=4, **arguments)

    refused("sb3:Nothing-v0", ArgumentError, "gymnasium cannot make 'Nothing-v0'")
    refused("sb3:CartPole-v1", ArgumentError, "'shade': 1", env_kwargs={"shade": 1})
    refused("sb3:CartPole-v1", EnvironmentRefused, "reset masks|by mask", max_frames_per_traj=3)
    refused("sb3:CartPole-v1", ArgumentError, "never_step", surplus="never_step", num_envs=2)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env", None)
    refused("sb3:CartPole-v1", MissingExtra, r'pip install "tallyroll\[sb3\]"')


class Texts(BothAtOnce):
    observation_space = spaces.Text(4)


class Watched(BothAtOnce):
    action_space = spaces.Dict({"a": spaces.Discrete(2)})  # type: ignore[assignment]
    closed: ClassVar[int] = 0

    def close(self) -> None:
        Watched.closed += 1


def test_spaces_that_fit_no_column_are_refused_and_closed() -> None:
    gymnasium.register("Watched-v0", Watched)
    try:
        with pytest.raises(SpaceError, match="action space"):
            SyncCollector("sb3:Watched-v0", num_envs=2, frames_per_batch=4, total_frames=4)
    finally:
        gymnasium.registry.pop("Watched-v0")
    assert Watched.closed == 2


class Telling(gymnasium.Env[Any, Any]):
    """Observes (episode, step), and repeats it in its infos, some of them occasionally."""

    observation_space = spaces.Box(0, 1000, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._episode, self._step = 0, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._episode, self._step = self._episode + 1, 0
        return self._seen(), {"where": self._seen(), "start": self._episode}

    def step(self, action: Any) -> Any:
        self._step += 1
        infos = {"where": self._seen(), "deep": {"half": self._step / 2}}
        if self._step % 2:
            infos["odd"] = self._step
        return self._seen(), 1.0, self._step == 2 + self._episode % 3, False, infos

    def _seen(self) -> Any:
        return np.array([self._episode, self._step], np.float32)


TOLD = (
    "where",
    Info("start", int, fill=-1),
    Info("deep/half", float, fill=0),
    Info("odd", "int32", fill=0),
)


@pytest.mark.parametrize("kind", [DummyVecEnv, SubprocVecEnv])
def test_infos_are_columns(kind: Any) -> None:
    """Infos of the reset accompany a first observation.

    Infos of the last step accompany a final one.
    """
    names = {"start": "begun"}
    arguments: Any = {"frames_per_batch": 20, "total_frames": 60, "info_keys": TOLD}
    rows = rows_of(lambda: VecMonitor(kind([Telling] * 3)), rename=names, **arguments)
    seen, after = rows["observation"], rows["next", "observation"]
    step, ends = rows["collector", "step"], rows["next", "terminated"][:, 0]
    assert ends.sum() > 9
    assert torch.equal(rows["where"], seen)
    assert torch.equal(rows["next", "where"], after)
    assert torch.equal(rows["begun"], torch.where(step == 0, seen[:, 0].long(), -1))
    assert torch.equal(rows["start_given"], step == 0)
    assert not rows["next", "start_given"].any()
    assert torch.equal(rows["next", "deep", "half"], (step + 1) / 2)
    assert torch.equal(rows["deep", "half"], step / 2)
    odd = (step + 1) % 2 == 1
    assert rows["odd"].dtype is torch.int32
    assert torch.equal(rows["next", "odd"], torch.where(odd, step + 1, 0).int())
    assert torch.equal(rows["next", "odd_given"], odd)


@pytest.mark.slow
def test_infos_that_a_wrapper_adds_and_those_of_workers(tmp_path: Path) -> None:
    lengths = Info("episode/l", "int32", fill=0)
    arguments: Any = {"frames_per_batch": 24, "total_frames": 72, "info_keys": ["where", lengths]}

    def make() -> Any:
        return VecMonitor(DummyVecEnv([Telling] * 2))

    rows = rows_of(make, **arguments)
    ends = rows["next", "terminated"][:, 0]
    assert ends.sum() > 9
    assert torch.equal(rows["next", "episode", "l_given"], ends)
    step = rows["collector", "step"] + 1
    assert torch.equal(rows["next", "episode", "l"], torch.where(ends, step, 0).int())
    path = tmp_path / "run"
    with MultiprocessCollector(make, num_workers=2, storage=path, **arguments) as collector:
        list(collector)
    verify(path)
    with open_storage(path) as storage:
        stored = storage.get(slice(0, 72))
        assert torch.equal(stored["next", "where"], stored["next", "observation"])


def test_infos_that_cannot_be_columns() -> None:
    def refused(match: str, info: Any, error: Any = ArgumentError) -> None:
        make = partial(DummyVecEnv, [Telling] * 2)
        with pytest.raises(error, match=match):
            rows_of(make, frames_per_batch=20, total_frames=20, info_keys=[info])

    refused(
        r"info key 'odd' is not in the infos of the first reset. The known keys are \['start', ",
        "odd",
    )
    refused("'deep/half' is not in the infos of the first reset.*declare it", "deep/half")
    refused(r"got none at lane 0, step 0 of its trajectory.*fill=0", "start", TransitionError)
    refused("expected a value of shape", Info("where", float), TransitionError)
    refused("expected an entry in every step", Info(("odd", "deeper"), int), TransitionError)
    refused("int8 holds without loss", Info("deep/half", "int8", fill=0), TransitionError)


def test_only_its_own_kind_is_adopted() -> None:
    env = MADE["frames"]()
    system = registry.adopt(env)
    assert isinstance(system, Sb3System)
    assert system.describe() == {
        "id": "CartPole-v1",
        "type": "DummyVecEnv",
        "wrappers": ["VecFrameStack"],
    }
    env.close()
    assert Sb3System.adopt(OracleEnv(0, [3])) is None


def test_vectors_of_supersuit_are_refused() -> None:
    class Concat(DummyVecEnv):
        __module__ = "supersuit.vector"

    with pytest.raises(EnvironmentRefused, match="SuperSuit"):
        Sb3System(VecMonitor(Concat([cartpole])))


# --- models ---------------------------------------------------------------------------------------


def model(kind: Any = PPO, env: Any = cartpole, policy: str = "MlpPolicy", **kwargs: Any) -> Any:
    if kind is PPO:
        kwargs = {"n_steps": 16, "batch_size": 16, **kwargs}
    small = {"net_arch": [8]}
    return kind(policy, DummyVecEnv([env]), seed=0, policy_kwargs=small, device="cpu", **kwargs)


@pytest.mark.parametrize(
    ("kind", "env", "policy"),
    [
        (PPO, cartpole, "MlpPolicy"),
        (PPO, pendulum, "MlpPolicy"),
        (PPO, dicts, "MultiInputPolicy"),
        (DQN, cartpole, "MlpPolicy"),
    ],
)
def test_a_model_acts_by_predict(kind: Any, env: Any, policy: str) -> None:
    trained = model(kind, env, policy)
    rows = rows_of(
        lambda: DummyVecEnv([env] * 3),
        trained,
        frames_per_batch=30,
        total_frames=60,
        seed=1,
        exploration_type=ExplorationType.MODE,
    )
    seen = (
        rows["observation"].numpy()
        if env is not dicts
        else {name: rows[name].numpy() for name in ("state", "sign")}
    )
    wanted, _ = trained.predict(seen, deterministic=True)
    assert np.allclose(rows["action"].numpy(), wanted, atol=1e-6)


def test_a_model_explores_and_a_seed_repeats_it() -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 60, "total_frames": 60, "seed": 1}
    for kind in (PPO, DQN):
        trained = model(kind)
        trained.exploration_rate = 0.5 if kind is DQN else 0.0
        runs = [rows_of("CartPole-v1", trained, num_envs=3, **arguments) for _ in range(2)]
        assert torch.equal(runs[0]["action"], runs[1]["action"])
        greedy, _ = trained.predict(runs[0]["observation"].numpy(), deterministic=True)
        assert 0 < (runs[0]["action"].numpy() != greedy).sum() < 60


def test_a_model_is_evaluated_as_the_library_evaluates_it() -> None:
    trained = model().learn(64)
    found = evaluate(trained, "sb3:CartPole-v1", episodes=5, num_envs=1, seed=3)
    env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")])
    env._seeds = lane_seeds(3, 1, 0)
    returns, _ = evaluate_policy(
        trained, env, 5, deterministic=True, return_episode_rewards=True, warn=False
    )
    assert found.returns.tolist() == returns


def test_an_instance_stays_open_whatever_was_collected_from_it() -> None:
    env = SubprocVecEnv([cartpole] * 2, start_method="fork")
    for _ in range(2):
        evaluate(model(), env, episodes=3)
        rows_of(env, frames_per_batch=8, total_frames=8)
        gc.collect()
        assert not env.closed
    env.close()


@pytest.mark.slow
def test_workers_have_the_model_and_its_new_weights() -> None:
    trained = model()
    arguments: dict[str, Any] = {
        "num_envs": 4,
        "frames_per_batch": 40,
        "seed": 2,
        "total_frames": 80,
        "exploration_type": ExplorationType.DETERMINISTIC,
    }
    with MultiprocessCollector("CartPole-v1", trained, num_workers=2, **arguments) as collector:
        for version, batch in enumerate(collector):
            wanted, _ = trained.predict(batch["observation"].numpy(), deterministic=True)
            assert (batch["action"].numpy() == wanted).all()
            assert (batch["collector", "policy_version"] == version).all()
            with torch.no_grad():
                for weights in trained.policy.parameters():
                    weights.mul_(-1)
            collector.update_policy_weights_()


def test_a_policy_alone_a_mask_and_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = model().policy
    rows = rows_of("CartPole-v1", policy, frames_per_batch=8, total_frames=8, seed=0)
    assert rows["collector", "policy_version"].eq(0).all()

    class Masks(type(policy)):  # type: ignore[misc]
        def predict(self, observation: Any, action_masks: Any = None, **kwargs: Any) -> Any:
            return action_masks.argmax(-1), None

    policy.__class__ = Masks
    td = TensorDict(
        {"observation": torch.zeros(2, 4), "action_mask": torch.tensor([[0, 1], [1, 0]]).bool()},
        [2],
    )
    with set_exploration_type(ExplorationType.MODE):
        assert Sb3Policy(policy)(td)["action"].tolist() == [1, 0]
    policy.lstm_actor = torch.nn.LSTM(2, 2)
    with pytest.raises(PolicyError, match="is recurrent"):
        SyncCollector("CartPole-v1", policy, frames_per_batch=4, total_frames=4)
    (tmp_path / "my_models.py").write_text(
        "from stable_baselines3 import PPO\nmodel = PPO('MlpPolicy', 'CartPole-v1', device='cpu')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(load_policy("my_models:model"), Sb3Policy)


class Uncopied:
    """Counts its copies."""

    def __init__(self) -> None:
        self.copies = 0

    def __deepcopy__(self, memo: Any) -> Any:
        self.copies += 1
        return self


class Told(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Puts an `Uncopied` into each info, and optionally fails at an action of 1."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(cartpole())
        self.told, self.fails = Uncopied(), fails

    def step(self, action: Any) -> Any:
        if self.fails and action == 1:
            raise RuntimeError("no")
        *rest, info = self.env.step(action)
        return *rest, info | {"told": self.told}


def test_infos_of_a_bare_vector_are_read_without_copies_and_it_is_left_as_it_was() -> None:
    vector, beside = (DummyVecEnv([Told] * 2) for _ in range(2))
    system, own, arrays = Sb3System(vector), vector.buf_infos, vector.buf_obs
    system.reset(None, [3, 4])
    beside.seed(3)
    beside._seeds = [3, 4]
    beside.reset()
    kept = []
    for _ in range(40):
        action = np.array([0, 1])
        out, (obs, reward, done, _) = system.step([action]), beside.step(action)
        np.testing.assert_array_equal(out.obs[0], obs)
        np.testing.assert_array_equal(out.reward[0], reward)
        np.testing.assert_array_equal(out.terminated | out.truncated, done)
        kept.append((out.obs[0], obs))
        assert vector.buf_infos is own
        assert vector.buf_obs is arrays
        assert [*own[0]] == [*beside.buf_infos[0]]
    for mine, theirs in kept:  # later steps did not change them
        np.testing.assert_array_equal(mine, theirs)
    assert [each.told.copies for each in vector.envs] == [0, 0]
    assert [each.told.copies for each in beside.envs] == [40, 40]
    obs, *_, infos = vector.step(np.array([0, 1]))
    assert infos is not vector.buf_infos
    assert obs is not vector.buf_obs[None]
    assert [each.told.copies for each in vector.envs] == [1, 1]


def test_a_bare_vector_keeps_its_list_of_infos_when_a_lane_fails() -> None:
    vector = DummyVecEnv([Told, partial(Told, fails=True)])
    system, own = Sb3System(vector), vector.buf_infos
    system.reset(None, None)
    system.step([np.array([0, 0])])
    before = own[1]
    with pytest.raises(RuntimeError, match="no"):
        system.step([np.array([0, 1])])
    assert vector.buf_infos is own
    assert type(own) is list
    assert own[1] is before
    vector.buf_infos, vector.buf_obs = system._lent, system._lent_obs  # as by an interrupt
    obs = system.step([np.array([0, 0])]).obs[0]
    assert type(vector.buf_infos) is list
    assert type(vector.buf_obs) is OrderedDict
    np.testing.assert_array_equal(vector.buf_obs[None], obs)


def test_wrappers_of_a_vector_get_infos_of_their_own() -> None:
    system = Sb3System(VecMonitor(DummyVecEnv([Told] * 2)))
    system.reset(None, None)
    system.step([np.array([0, 0])])
    assert [each.told.copies for each in system.env.venv.envs] == [1, 1]


# --- varying resets -------------------------------------------------------------------------------

RESETS = Resets(sampler={"gravity": uniform(-15, -5), "level": choice(LEVELS)}, seeds=True)


@pytest.mark.parametrize("wrap", [lambda env: env, VecMonitor], ids=["bare", "wrapped"])
def test_a_hand_loop_repeats_the_episodes_of_resets_that_vary(wrap: Any) -> None:
    """A lane gets its seed and options within the step that ends an episode."""
    rows = rows_of(
        lambda: wrap(DummyVecEnv([Weather] * 3)),
        frames_per_batch=37,
        total_frames=150,
        resets=RESETS,
    )
    assert replay(rows, Weather, RESETS.options_of, ("gravity",)) > 20


class OwnSteps(DummyVecEnv):
    """Overrides the step, so that it may step its lanes differently."""

    def step_wait(self) -> Any:
        return super().step_wait()


@pytest.mark.parametrize("kind", [OwnSteps, partial(SubprocVecEnv, start_method="fork")])
def test_lanes_that_another_class_resets_take_no_seeds(kind: Any) -> None:
    with pytest.raises(
        EnvironmentRefused, match=r"accepts no seed .* in a DummyVecEnv whose class"
    ):
        rows_of(lambda: kind([Weather]), frames_per_batch=3, total_frames=3, resets=RESETS)


class MaskedSteps(gymnasium.Env[Any, Any]):
    """Infos have a mask except at each fourth step. Rewards are 1 if the action was legal."""

    observation_space = spaces.Box(-1, 100, (1,), np.float32)
    action_space = spaces.Discrete(4)
    time = 0

    def _info(self) -> dict[str, Any]:
        if self.time % 4 == 3:
            self.mask = np.ones(4, np.int8)
            return {}
        self.mask = np.eye(4, dtype=np.int8)[(self.time + self.first) % 4]
        return {"action_mask": self.mask.copy()}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.first = 0, int(self.np_random.integers(4))
        return np.zeros(1, np.float32), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        legal = float(self.mask[int(action)])
        self.time += 1
        return np.full(1, self.time, np.float32), legal, self.time == 6, False, self._info()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("column", [False, True])
def test_random_actions_keep_to_masks_in_infos(*, column: bool, wrapped: bool) -> None:
    def make() -> Any:
        vector = DummyVecEnv([MaskedSteps] * 3)
        return VecMonitor(vector) if wrapped else vector

    more: dict[str, Any] = {"frames_per_batch": 30, "total_frames": 90, "seed": 0}
    if column:
        more["info_keys"] = (Info("action_mask", np.int8, (4,), fill=1),)
    with SyncCollector(make, **more) as collector:
        assert collector.plan.masks.way == "infos"
        batch = torch.cat(list(collector))
    assert bool((batch["next", "reward"] == 1).all())
    assert ("action_mask" in batch.keys()) is column


# --- loops of their own, recorded -----------------------------------------------------------------


def oracle_lanes(kind: Any = "float") -> list[Callable[[], Any]]:
    return [partial(OracleEnv, lane, LENGTHS, kind=kind, ends="mixed") for lane in range(3)]


@pytest.mark.parametrize("kind", [DummyVecEnv, SubprocVecEnv])
def test_a_recorder_stores_the_rows_of_a_loop(kind: Any, tmp_path: Path) -> None:
    how = {"start_method": "fork"} if kind is SubprocVecEnv else {}
    inner = kind(oracle_lanes("images"), **how)
    with Recorder(
        VecMonitor(inner),
        storage=tmp_path / "own",
        total_frames=50,
        commit_every=7,
        info_keys=["lives"],
    ) as envs:
        envs.policy_version = 0
        envs.reset()
        while not envs.full:
            out = envs.step(np.ones(3, np.int64))
        assert envs.step(np.ones(3, np.int64))[0].keys() == out[0].keys()
        assert isinstance(envs, VecEnvWrapper)
        own = envs.ledger.counts()
    collected = VecMonitor(DummyVecEnv(oracle_lanes("images")))
    with SyncCollector(
        collected,
        lambda td: td.set("action", torch.ones(3, dtype=torch.int64)),
        frames_per_batch=10,
        total_frames=50,
        info_keys=["lives"],
        storage=tmp_path / "collected",
    ) as collector:
        collector.collect(50)
        assert own == collector.ledger.counts()
    with open_storage(tmp_path / "own") as one, open_storage(tmp_path / "collected") as other:
        left, right = (each.get(slice(0, 50)) for each in (one, other))
        run = one.manifest["runs"][-1]
    check_rows(left, LENGTHS, kind="images", ends="mixed", from_start=True)
    order = [
        np.lexsort((rows["collector", "step"], rows["collector", "traj_ids"]))
        for rows in (left, right)
    ]
    for key in left.keys(True, True):
        one, other = (rows[key][at] for rows, at in zip((left, right), order, strict=True))
        assert torch.equal(one, other), key
    assert run["call"]["recorded"] == ["VecMonitor", kind.__name__]
    assert verify(tmp_path / "own").sound


class WithoutFinals(VecEnvWrapper):
    """A vector that returns no final observations."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        *results, infos = self.venv.step_wait()
        for info in infos:
            info.pop("terminal_observation", None)
        return *results, infos


@pytest.mark.parametrize("kind", ["float", "images"])
def test_a_recorder_refuses_or_marks_lost_final_observations(kind: Any, tmp_path: Path) -> None:
    found = {}
    for name, wrap in (("true", VecMonitor), ("lost", WithoutFinals)):
        envs = Recorder(
            wrap(DummyVecEnv(oracle_lanes(kind))),
            storage=tmp_path / name,
            total_frames=40,
            finals="lost",
        )
        envs.reset()
        while not envs.full:
            *_, infos = envs.step(np.ones(3, np.int64))
            assert name == "true" or not any("terminal_observation" in info for info in infos)
        envs.close()
        assert verify(tmp_path / name).sound
        with open_storage(tmp_path / name) as storage:
            found[name] = storage.get(slice(0, 40))
    ended = found["lost"]["next", "done"][:, 0]
    assert torch.equal(found["lost"]["collector", "next_valid"], ~ended)
    for key in found["true"].keys(True, True):
        assert torch.equal(found["true"][key], found["lost"][key]), key
    column = "observation" if kind == "float" else "pos"
    rows = found["lost"][found["lost"]["collector", "lane"] == 1]
    assert torch.equal(rows["next", column][:-1], rows[column][1:])
    with Recorder(
        WithoutFinals(DummyVecEnv(oracle_lanes(kind))), storage=tmp_path / "refused"
    ) as envs:
        envs.reset()
        with pytest.raises(TransitionError, match="expected the final observation, got none"):
            envs.step(np.ones(3, np.int64))


def test_a_recorder_stores_what_learn_steps(tmp_path: Path) -> None:
    env = Recorder(DummyVecEnv([cartpole] * 2), storage=tmp_path / "rows")
    ppo = PPO("MlpPolicy", VecNormalize(env), n_steps=16, batch_size=16, n_epochs=1, device="cpu")
    ppo.learn(64)
    ppo.learn(32)  # resets all lanes, and cuts their episodes
    env.commit()
    counts = env.ledger.counts()
    assert (counts["stored"], counts["episodes_cut"]) == (96, 2)
    env.close()
    with open_storage(tmp_path / "rows") as storage:
        rows = storage.get(slice(0, 96))
    assert rows["observation"].abs().max() < 5  # not normalized: that wrapper is outside
    assert verify(tmp_path / "rows").sound


def test_a_recorded_step_that_raises_keeps_the_rows_before_it(tmp_path: Path) -> None:
    envs = Recorder(DummyVecEnv(oracle_lanes()), storage=tmp_path / "rows")
    envs.reset()
    envs.step(np.ones(3, np.int64))
    with pytest.raises(AssertionError, match="is not in"):
        envs.step(np.full(3, 2))
    assert envs.ledger.stored == 3
    with pytest.raises(StateError, match="the last step or reset raised"):
        envs.step(np.ones(3, np.int64))
    envs.reset()
    envs.step(np.ones(3, np.int64))
    envs.close()
    assert envs.ledger.stored == 6
    assert verify(tmp_path / "rows").sound
