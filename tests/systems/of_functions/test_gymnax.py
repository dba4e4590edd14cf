"""Test gymnax: real CartPoles, and draws at their resets."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnax
import jax
import numpy as np
import pytest
import torch
from reset_kit import trajectories
from tensordict import TensorDictBase
from torchrl.data import Bounded

from tallyroll.collector import MultiprocessCollector, Resets, SyncCollector, uniform
from tallyroll.collector import replay as replay_stored
from tallyroll.collector.envs.system import System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, MissingExtra
from tallyroll.collector.ext.systems.gymnax import GymnaxSystem
from tallyroll.collector.ext.systems.kinds import functional
from tallyroll.storage import open_storage, verify

from functional_kit import SharedContract, compilations, replay, shared

CARTPOLE, PARAMS = gymnax.make("CartPole-v1")
SHORT = PARAMS.replace(max_steps_in_episode=12)
GRAVITY = {"gravity": Bounded(1.0, 20.0, (), dtype=torch.float32)}


def plain(lanes: int) -> System:
    return GymnaxSystem(CARTPOLE, lanes, SHORT)


def varied(lanes: int) -> System:
    return GymnaxSystem(CARTPOLE, lanes, SHORT, context=GRAVITY)


class TestCartPole(SharedContract):
    system = staticmethod(plain)


class TestContext(SharedContract):
    system = staticmethod(varied)

    def draw(self, rng: np.random.Generator) -> Mapping[str, Any]:
        return {"gravity": rng.uniform(1, 20)}


def collected(rows: TensorDictBase, seed: int, lanes: int, params: Any = SHORT) -> tuple[int, int]:
    begin, advance = jax.jit(CARTPOLE.reset_env), jax.jit(CARTPOLE.step_env)

    def reset(key: Any, lane: int) -> Any:
        observation, state = begin(key, params)
        return state, {"observation": observation}

    def step(key: Any, state: Any, action: Any, lane: int) -> Any:
        observation, state, reward, done, _ = advance(key, state, action, params)
        late = state.time >= params.max_steps_in_episode
        fell = (
            abs(state.x) > params.x_threshold or abs(state.theta) > params.theta_threshold_radians
        )
        assert bool(done) == bool(late or fell)
        flags = {"terminated": fell, "truncated": late and not fell}
        return state, {"observation": observation}, {"reward": reward, **flags}

    return replay(rows, seed, lanes, ["action"], reset, step)


def test_each_gravity_by_hand_and_nothing_compiled_for_it() -> None:
    resets = Resets(sampler={"gravity": uniform(1, 20)}, seeds=True)
    batches = []
    with SyncCollector(
        "gymnax:CartPole-v1",
        frames_per_batch=60,
        total_frames=180,
        num_envs=3,
        seed=0,
        env_kwargs={"params": {"max_steps_in_episode": 12}},
        resets=resets,
    ) as collector:
        batches.append(next(iter(collector)).clone())
        with compilations() as compiled:
            batches += [batch.clone() for batch in collector]
    assert compiled == []
    begin, advance = jax.jit(CARTPOLE.reset_env), jax.jit(CARTPOLE.step_env)
    gravities = set()
    for part in trajectories(torch.cat(batches)):
        began = part[0]["collector"]
        seed, gravity = began["reset_seed"].item(), began["context", "gravity"].item()
        assert np.float32(resets.options_of(seed)["gravity"]) == np.float32(gravity)
        params = SHORT.replace(gravity=np.float32(gravity))
        key, own = jax.random.split(jax.random.PRNGKey(seed))
        seen, state = begin(own, params)
        for step, row in enumerate(part):
            np.testing.assert_allclose(row["observation"], seen, rtol=2e-4, atol=2e-5)
            own = jax.random.fold_in(key, step)
            seen, state, *_ = advance(own, state, row["action"].numpy(), params)
            np.testing.assert_allclose(row["next", "observation"], seen, rtol=2e-4, atol=2e-5)
        gravities.add(gravity)
    assert len(gravities) > 12
    with pytest.raises(ArgumentError, match=r"parameters of CartPole-v1 .*gravity.* got 'mass'"):
        SyncCollector(
            "gymnax:CartPole-v1",
            frames_per_batch=4,
            total_frames=4,
            resets=Resets(sampler={"mass": 1.0}),
        )


def test_episodes_by_hand() -> None:
    with SyncCollector(
        lambda: shared(plain, 3), None, frames_per_batch=150, total_frames=450, seed=5
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    terminated, truncated = collected(rows, 5, 3)
    assert terminated >= 3
    assert truncated >= 10


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share compiled code between processes."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def test_by_name_workers_and_resumed(tmp_path: Path, cached: None) -> None:
    """JAX was used in this process, so forked workers would warn or hang."""
    arguments: dict[str, Any] = {
        "num_envs": 4,
        "frames_per_batch": 60,
        "env_kwargs": {"params": {"max_steps_in_episode": 12}},
    }
    path = tmp_path / "run"
    with MultiprocessCollector(
        "gymnax:CartPole-v1",
        None,
        num_workers=2,
        total_frames=120,
        seed=4,
        storage=path,
        **arguments,
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    collected(rows, 4, 4)
    with SyncCollector(
        "gymnax:CartPole-v1", None, total_frames=240, storage=path, resume=True, **arguments
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 120
    assert verify(path).sound, str(verify(path))
    made = open_storage(path).manifest["runs"][0]["environment"]
    assert made["id"] == "gymnax:CartPole-v1"
    assert open_storage(path)[:].numel() == 240


@pytest.mark.parametrize("large", [2**11, 1], ids=["one call", "two calls"])
def test_a_gravity_a_reset_and_no_compilation(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gravities are arguments of a function that is compiled once, before the second step."""
    monkeypatch.setattr(functional, "_LARGE_NBYTES", large)
    drawn: list[float] = []

    def draw(rng: np.random.Generator) -> Mapping[str, Any]:
        drawn.append(float(rng.uniform(1, 20)))
        return {"gravity": drawn[-1]}

    with SyncCollector(
        lambda: SystemEnv(varied(2), draw=draw), None, frames_per_batch=2, total_frames=402, seed=3
    ) as collector:
        batches = iter(collector)
        rows = [next(batches).clone()]
        with compilations() as compiled:
            rows += [batch.clone() for batch in batches]
        assert compiled == []
        system = collector.env.system
        called = [system._turned] if large > 1 else [system._moved, system._renewed]
        assert [each._cache_size() for each in (system._begun, *called)] == [1] * (1 + len(called))
    whole = torch.cat(rows)
    ends = int((whole["next", "terminated"] | whole["next", "truncated"]).sum())
    assert ends > 30
    assert len(drawn) == ends + 4, "one for each episode, and one ahead for each lane"
    # The change of the pole's speed reveals each row's gravity, which is that of its episode.
    ids = whole["collector", "traj_ids"]
    first = [int((ids == each).nonzero()[0]) for each in ids.unique()]
    rng = [np.random.default_rng(each) for each in _seeds(3, 2)]
    wanted = {lane: iter([each.uniform(1, 20) for _ in range(60)]) for lane, each in enumerate(rng)}
    for at in sorted(first, key=lambda row: int(ids[row])):
        lane = int(whole["collector", "lane"][at])
        gravity = next(wanted[lane])
        state = CARTPOLE.reset_env(jax.random.PRNGKey(0), PARAMS)[1]
        names = ("x", "x_dot", "theta", "theta_dot")
        values = dict(zip(names, whole["observation"][at].numpy(), strict=True))
        params = SHORT.replace(gravity=np.float32(gravity))
        after = CARTPOLE.step_env(
            None, state.replace(**values), whole["action"][at].numpy(), params
        )[0]
        got = whole["next", "observation"][at].numpy()
        np.testing.assert_allclose(got, after, rtol=2e-4, atol=2e-5)


def _seeds(seed: int, lanes: int) -> list[int]:
    from tallyroll.collector.counting.numbering import lane_seeds

    return lane_seeds(seed, lanes, 0)


def test_a_time_limit_of_the_collector() -> None:
    with SyncCollector(
        lambda: shared(plain, 3),
        None,
        frames_per_batch=90,
        total_frames=90,
        seed=1,
        max_frames_per_traj=5,
    ) as collector:
        (rows,) = list(collector)
    assert int(rows["collector", "step"].max()) == 4
    assert int(rows["next", "truncated"].sum()) >= 15


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("gymnax:NoSuch-v0", {}, "cannot make 'NoSuch-v0'.*not in registered"),
        ("gymnax:CartPole-v1", {"speed": 1}, "cannot make 'CartPole-v1' with.*speed"),
        (
            "gymnax:CartPole-v1",
            {"params": {"speed": 1}},
            r"params: .* of CartPole-v1, got \['speed'\]",
        ),
        ("gymnax:CartPole-v1", {"unbounded": ["speed"]}, r"unbounded: .*, got \['speed'\]"),
    ],
)
def test_misuse(name: str, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(name, None, num_envs=1, frames_per_batch=4, total_frames=4, env_kwargs=kwargs)


def test_a_bare_environment() -> None:
    for made in (CARTPOLE, lambda: CARTPOLE, lambda: (CARTPOLE, PARAMS)):
        with pytest.raises(ArgumentError, match=r"one lane\. Pass GymnaxSystem\(env, lanes\)"):
            SyncCollector(made, None, frames_per_batch=4, total_frames=4)
    with pytest.raises(
        ArgumentError, match=r"context: expected some of the parameters .*, got \['speed'\]"
    ):
        GymnaxSystem(CARTPOLE, 1, context={"speed": GRAVITY["gravity"]})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[gymnax\]"'):
        GymnaxSystem.make("CartPole-v1", 1, None)


@functools.cache
def _catch(lanes: int) -> System:
    return GymnaxSystem.make("Catch-bsuite", lanes, None)


def test_an_end_of_the_task_is_terminated() -> None:
    """Catch ends when the ball is down, long before its limit of 1000 steps."""
    with SyncCollector(
        lambda: _catch(2), None, frames_per_batch=60, total_frames=60, seed=0
    ) as collector:
        (rows,) = list(collector)
    assert int(rows["next", "terminated"].sum()) >= 4
    assert not rows["next", "truncated"].any()


@pytest.mark.parametrize("gravity", [True, False])
def test_what_is_stored_comes_out_again(gravity: bool, tmp_path: Path) -> None:
    resets = Resets(sampler={"gravity": uniform(5, 15)}, seeds=True) if gravity else None
    with SyncCollector(
        "gymnax:CartPole-v1",
        num_envs=3,
        frames_per_batch=50,
        total_frames=100,
        seed=2,
        storage=tmp_path / "a",
        resets=resets,
    ) as collector:
        for _ in collector:
            pass
    report = replay_stored(tmp_path / "a", "all")
    assert (report.same, report.rows) == (True, 100)
