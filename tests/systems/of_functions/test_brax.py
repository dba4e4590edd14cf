"""Test Brax with its smallest pendulum, and with a toy of the same interface that compiles fast."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import Bounded

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.system import System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra
from tallyroll.collector.ext.systems.brax import BraxSystem
from tallyroll.storage import open_storage, verify

from functional_kit import (
    AutoResetWrapper,
    Forgetful,
    SharedContract,
    ToyEnv,
    Wrapped,
    compilations,
    replay,
    shared,
)

GRAVITY = {"gravity": Bounded(0.0, 1.0, (), dtype=torch.float32)}
LENGTH = 7


def toy(lanes: int) -> System:
    return BraxSystem(ToyEnv(), lanes, episode_length=LENGTH)


def varied(lanes: int) -> System:
    return BraxSystem(Wrapped(ToyEnv(named=True)), lanes, episode_length=LENGTH, context=GRAVITY)


def drawn(rng: np.random.Generator) -> Mapping[str, Any]:
    return {"gravity": rng.uniform()}


class TestToy(SharedContract):
    system = staticmethod(toy)


class TestContext(SharedContract):
    system = staticmethod(varied)

    def draw(self, rng: np.random.Generator) -> Mapping[str, Any]:
        return drawn(rng)


def by_hand(env: Any, length: int, rows: TensorDictBase, seed: int, lanes: int) -> tuple[int, int]:
    begin, advance, steps = jax.jit(env.reset), jax.jit(env.step), [0] * lanes

    def reset(key: Any, lane: int) -> Any:
        state = begin(key)
        steps[lane] = 0
        return state, {"observation": state.obs}

    def step(key: Any, state: Any, action: Any, lane: int) -> Any:
        state = advance(state, action)
        steps[lane] += 1
        over = state.done > 0
        cut = not over and steps[lane] == length
        more = {"reward": state.reward, "terminated": over, "truncated": cut}
        return state, {"observation": state.obs}, more

    return replay(rows, seed, lanes, ["action"], reset, step)


def test_episodes_workers_and_resumed(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 60, "storage": tmp_path / "run"}
    with MultiprocessCollector(
        [lambda: BraxSystem(ToyEnv(), 2, episode_length=LENGTH)] * 2,
        None,
        total_frames=120,
        seed=4,
        **arguments,
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    terminated, truncated = by_hand(ToyEnv(), LENGTH, rows, 4, 4)
    assert terminated >= 3
    assert truncated >= 3
    with SyncCollector(
        lambda: shared(toy, 4), None, total_frames=240, resume=True, **arguments
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 120
    assert verify(tmp_path / "run").sound, str(verify(tmp_path / "run"))
    made = open_storage(tmp_path / "run").manifest["runs"][0]["environment"]
    assert (made["type"], made["id"]) == ("BraxSystem", "ToyEnv")


def test_a_gravity_a_reset_and_no_compilation() -> None:
    """The observation includes the gravity of its episode, also in a wrapped environment."""
    with SyncCollector(
        lambda: SystemEnv(varied(2), draw=drawn), None, frames_per_batch=2, total_frames=302, seed=3
    ) as collector:
        batches = iter(collector)
        rows = [next(batches).clone()]
        with compilations() as compiled:
            rows += [batch.clone() for batch in batches]
        assert compiled == []
    whole = torch.cat(rows)
    assert whole["privileged_state"].shape == (302, 2)
    lane, ids = whole["collector", "lane"], whole["collector", "traj_ids"]
    for each, seed in enumerate(lane_seeds(3, 2, 0)):
        rng = np.random.default_rng(seed)
        episodes = ids[lane == each].unique()
        assert len(episodes) > 20
        for episode in episodes:
            gravities = whole["state"][ids == episode][:, 2]
            after = whole["next", "state"][ids == episode][:, 2]
            wanted = torch.full_like(gravities, drawn(rng)["gravity"])
            assert torch.equal(gravities, wanted)
            assert torch.equal(after, wanted)


def test_nothing_is_compiled_for_a_full_reset_or_another_episode() -> None:
    system = toy(2)
    system.reset(None, [1, 2])
    action = np.zeros((2, 2), np.float32)
    system.step([action])
    system.reset(np.array([True, False]), None)
    with compilations() as compiled:
        for _ in range(3 * LENGTH):
            system.step([action])
        system.reset(None, [3, 4])
        system.reset(None, None)
        system.reset(np.array([False, True]), None)
        system.step([action])
    assert compiled == []


def test_refused() -> None:
    with pytest.raises(
        EnvironmentRefused, match=r"BraxSystem: .* got AutoResetWrapper\. .* env.unwrapped"
    ):
        BraxSystem(Wrapped(AutoResetWrapper(ToyEnv())), 2)
    with pytest.raises(ArgumentError, match="episode_length: expected at least 1"):
        BraxSystem(ToyEnv(), 2, episode_length=0)
    system = BraxSystem(Forgetful(), 2)
    system.reset(None, None)
    message = r"the state\[0\]\.done is float32\[\] after a reset and bool\[\] after a step"
    with pytest.raises(EnvironmentRefused, match=message):
        system.step([np.zeros((2, 2), np.float32)])
    with pytest.raises(
        ArgumentError,
        match=r"draw: expected a function .*, got None for the contexts \['gravity'\]",
    ):
        SyncCollector(varied(2), None, frames_per_batch=4, total_frames=4)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "brax", None)
    monkeypatch.setitem(sys.modules, "brax.envs", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[brax\]"'):
        BraxSystem.make("ant", 1, None)


@pytest.fixture
def envs() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)
        return import_module("brax.envs")


@pytest.mark.filterwarnings("ignore:Brax System, piplines and environments:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing `.*` directly from `.*` is deprecated")
def test_a_pendulum_of_brax(envs: Any) -> None:
    kwargs = {"backend": "spring", "episode_length": 12}
    with SyncCollector(
        "brax:inverted_pendulum",
        None,
        num_envs=2,
        frames_per_batch=80,
        total_frames=80,
        seed=1,
        env_kwargs=kwargs,
    ) as collector:
        (rows,) = list(collector)
    env = envs.get_environment("inverted_pendulum", backend="spring")
    terminated, truncated = by_hand(env, 12, rows, 1, 2)
    assert terminated >= 1
    assert truncated >= 1
    with pytest.raises(EnvironmentRefused, match="AutoResetWrapper, VmapWrapper"):
        BraxSystem(envs.training.wrap(env), 2)
    with pytest.raises(ArgumentError, match=r"InvertedPendulum.*Pass BraxSystem\(env, lanes\)"):
        SyncCollector(lambda: env, None, frames_per_batch=4, total_frames=4)
    for name, more, match in (
        ("brax:cat", {}, "cannot make 'cat'"),
        ("brax:ant", {"speed": 1}, "cannot make 'ant' with.*speed"),
    ):
        with pytest.raises(ArgumentError, match=match):
            SyncCollector(name, None, frames_per_batch=4, total_frames=4, env_kwargs=more)
