"""Test SMAX: teams on a small map with deadly walls, in short battles."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDictBase

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import ArgumentError, MissingExtra
from tallyroll.collector.ext.systems.smax import SmaxSystem
from tallyroll.storage import open_storage, verify

from functional_kit import SharedContract, replay, shared

with warnings.catch_warnings():
    # Brax imports JAXopt, and JaxMARL imports Brax where it is installed.
    warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)
    import jaxmarl

SMALL = {"map_width": 8, "map_height": 8, "world_steps_per_env_step": 1, "time_per_step": 0.5}
SELF_PLAY = jaxmarl.make("SMAX", num_allies=2, num_enemies=3, max_steps=9, **SMALL)


def battle(lanes: int) -> System:
    return SmaxSystem(SELF_PLAY, lanes)


class TestSelfPlay(SharedContract):
    lanes = 4
    system = staticmethod(battle)


@pytest.mark.parametrize("self_play", [False, True])
def test_ticks_are_steps_of_the_world(self_play: bool) -> None:
    assert SmaxSystem.make("3m", 2, None, self_play=self_play).ticks == 8
    less = SmaxSystem.make("3m", 2, None, self_play=self_play, world_steps_per_env_step=3)
    assert less.ticks == 3


TEAMS = {"allies": "ally_", "enemies": "enemy_"}


def by_hand(rows: TensorDictBase, seed: int, lanes: int) -> tuple[int, int]:
    agents = {team: [a for a in SELF_PLAY.agents if a.startswith(p)] for team, p in TEAMS.items()}

    def columns(observation: Any, state: Any) -> dict[Any, Any]:
        legal = SELF_PLAY.get_avail_actions(state)
        found: dict[Any, Any] = {"world_state": observation["world_state"]}
        for team, names in agents.items():
            some = slice(0, 2) if team == "allies" else slice(2, 5)
            found[f"{team}/observation"] = jnp.stack([observation[name] for name in names])
            found[f"{team}/mask"] = state.unit_alive[some]
            found[f"{team}/action_mask"] = jnp.stack([legal[name] for name in names]) > 0
        return found

    @jax.jit
    def begin(key: Any) -> Any:
        observation, state = SELF_PLAY.reset(key)
        return state, columns(observation, state)

    @jax.jit
    def advance(key: Any, state: Any, allies: Any, enemies: Any) -> Any:
        chosen = dict(zip(SELF_PLAY.agents, [*allies, *enemies], strict=True))
        observation, after, reward, dones, _ = SELF_PLAY.step_env(key, state, chosen)
        over, alive, now = dones["__all__"], state.unit_alive, after.unit_alive
        lost = ~now[:2].any() | ~now[2:].any()
        more: dict[Any, Any] = {"terminated": over & lost, "truncated": over & ~lost}
        for team, names in agents.items():
            some = slice(0, 2) if team == "allies" else slice(2, 5)
            more[f"{team}/reward"] = jnp.stack([reward[name] for name in names])
            more[f"{team}/terminated"] = alive[some] & (~now[some] | (over & lost))
            more[f"{team}/truncated"] = alive[some] & now[some] & over & ~lost
        return after, columns(observation, after), more

    def reset(key: Any, lane: int) -> Any:
        return begin(key)

    def step(key: Any, state: Any, allies: Any, enemies: Any, lane: int) -> Any:
        return advance(key, state, allies, enemies)

    actions = [("allies", "action"), ("enemies", "action")]
    return replay(rows, seed, lanes, actions, reset, step)


def test_episodes_workers_and_resumed(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 60, "storage": tmp_path / "run"}
    with MultiprocessCollector(
        [lambda: SmaxSystem(SELF_PLAY, 2)] * 2, None, total_frames=120, seed=4, **arguments
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    terminated, truncated = by_hand(rows, 4, 4)
    assert terminated >= 1
    assert truncated >= 3
    died = rows["next", "allies", "terminated"].any(1) & ~rows["next", "terminated"]
    assert died.any(), "a lane goes on when an agent dies"
    for team in TEAMS:
        legal = rows[team, "action_mask"].gather(-1, rows[team, "action"][..., None])
        assert legal.all(), "the dead stop, and the living do what they may"
    with SyncCollector(
        lambda: shared(battle, 4), None, total_frames=240, resume=True, **arguments
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 120
    assert verify(tmp_path / "run").sound, str(verify(tmp_path / "run"))
    assert open_storage(tmp_path / "run")[:].numel() == 240


def test_by_name_against_the_heuristic() -> None:
    kwargs = {"max_steps": 10, **SMALL}
    with SyncCollector(
        "smax:3m", None, num_envs=2, frames_per_batch=60, total_frames=60, seed=0, env_kwargs=kwargs
    ) as collector:
        (rows,) = list(collector)
    assert rows["allies", "action"].shape == (60, 3)
    assert "enemies" not in rows.keys()
    assert int(rows["collector", "step"].max()) <= 10


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("smax:1000m", {}, "cannot make '1000m'"),
        ("smax:3m", {"speed": 1}, "cannot make 'HeuristicEnemySMAX' with.*speed"),
    ],
)
def test_misuse(name: str, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(name, None, num_envs=1, frames_per_batch=4, total_frames=4, env_kwargs=kwargs)


def test_a_bare_environment() -> None:
    for made in (SELF_PLAY, jaxmarl.make("HeuristicEnemySMAX", **SMALL)):
        with pytest.raises(ArgumentError, match=r"one lane\. Pass SmaxSystem\(env, lanes\)"):
            SyncCollector(made, None, frames_per_batch=4, total_frames=4)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxmarl", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[smax\]"'):
        SmaxSystem.make("3m", 1, None)
