"""Test Jumanji: a small Snake, and a user's own environment that is truncated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import jumanji
import numpy as np
import pytest
import torch
from jumanji import specs
from jumanji.environments import Maze
from jumanji.environments.routing.maze.generator import ToyGenerator
from jumanji.types import restart, termination, transition, truncation
from tensordict import TensorDictBase
from torchrl.data import MultiCategorical

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.batches.checks.value_checks import OutOfRangeWarning
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
    SpaceError,
    TransitionError,
)
from tallyroll.collector.ext.systems.jumanji import JumanjiSystem
from tallyroll.collector.ext.systems.kinds import functional
from tallyroll.collector.policies.masked_actions import Choices
from tallyroll.storage import open_storage, verify

from functional_kit import SharedContract, replay, shared


class Seen(NamedTuple):
    """Observation that contains a tree."""

    total: Any
    clock: dict[str, Any]
    action_mask: Any


@chex.dataclass
class Sum:
    """State of a custom type."""

    total: Any
    time: Any
    key: Any


class Adding(jumanji.Environment):
    """Two adders: 32 or more terminates, and 8 steps truncate.

    0 is not a legal first action.
    """

    shape: tuple[int, ...] = ()
    steps = 9

    @property
    def observation_spec(self) -> Any:
        clock = specs.Spec(dict, "clock", time=specs.DiscreteArray(self.steps, name="time"))
        total = specs.BoundedArray((*self.shape, 2), jnp.float32, 0.0, 40.0, "total")
        mask = specs.BoundedArray((2, 4), bool, False, True, "action_mask")
        return specs.Spec(Seen, "Seen", total=total, clock=clock, action_mask=mask)

    @property
    def action_spec(self) -> Any:
        return specs.MultiDiscreteArray(jnp.array([4, 4]), name="action")

    @property
    def reward_spec(self) -> Any:
        return specs.Array((2,), float, "reward")

    def seen(self, state: Sum) -> Seen:
        mask = jnp.ones((2, 4), bool).at[:, 0].set(state.time > 0)
        return Seen(state.total, {"time": state.time}, mask)

    def reset(self, key: Any) -> Any:
        total = jax.random.uniform(key, (2,), maxval=9.0)
        state = Sum(total=total, time=jnp.int32(0), key=key)
        return state, restart(self.seen(state), shape=(2,))

    def step(self, state: Sum, action: Any) -> Any:
        state = Sum(total=state.total + action, time=state.time + 1, key=state.key)
        arguments = state.total / 10, self.seen(state)
        step = jax.lax.cond(
            state.total.sum() >= 32.0,
            lambda: termination(*arguments, shape=(2,)),
            lambda: jax.lax.cond(
                state.time >= 8,
                lambda: truncation(*arguments, shape=(2,)),
                lambda: transition(*arguments, shape=(2,)),
            ),
        )
        return state, step


class Lying(Adding):
    steps = 8


class Misshapen(Adding):
    shape = (1,)


class Changing(Adding):
    def step(self, state: Sum, action: Any) -> Any:
        after, step = super().step(state, action)
        return after.replace(time=after.time.astype(jnp.float32)), step


MAZE = Maze(ToyGenerator(), time_limit=9)


def maze(lanes: int) -> JumanjiSystem:
    return JumanjiSystem(MAZE, lanes)


def adding(lanes: int) -> System:
    return JumanjiSystem(Adding(), lanes)


class TestMaze(SharedContract):
    system = staticmethod(maze)


class TestAdding(SharedContract):
    system = staticmethod(adding)


def ends(step: Any) -> dict[str, Any]:
    dead = (step.discount == 0).all()
    return {"terminated": step.last() & dead, "truncated": step.last() & ~dead}


def by_hand(
    env: Any, columns: Callable[[Any], Any], rows: TensorDictBase, seed: int, lanes: int
) -> tuple[int, int]:
    begin, advance = jax.jit(env.reset), jax.jit(env.step)

    def reset(key: Any, lane: int) -> Any:
        state, step = begin(key)
        return state, columns(step.observation)

    def step(key: Any, state: Any, action: Any, lane: int) -> Any:
        state, step = advance(state, action)
        return state, columns(step.observation), {"reward": step.reward, **ends(step)}

    return replay(rows, seed, lanes, ["action"], reset, step)


def test_large_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call starts the next episodes, even if all lanes end in the same step.

    The rows are the same.
    """
    runs, snake = [], jumanji.make("Snake-v1", time_limit=13)
    for large in (2**11, 2**30):
        monkeypatch.setattr(functional, "_LARGE_NBYTES", large)
        with SyncCollector(
            lambda: JumanjiSystem(snake, 32, unbounded=["step_count"]),
            None,
            frames_per_batch=32 * 20,
            total_frames=32 * 60,
            seed=5,
        ) as collector:
            assert collector.env.system._apart == (large == 2**11)
            runs.append(torch.cat([batch.clone() for batch in collector]))
    rows, others = runs
    ends = rows["next", "terminated"] | rows["next", "truncated"]
    assert int(ends.sum()) >= 32 * 4
    for key in rows.keys(True, True):
        assert torch.equal(rows[key], others[key]), key


def test_episodes_workers_and_resumed(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 60, "storage": tmp_path / "run"}
    with MultiprocessCollector(
        [lambda: JumanjiSystem(MAZE, 2)] * 2, None, total_frames=120, seed=4, **arguments
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])

    def columns(seen: Any) -> Any:
        row, column = seen.agent_position.row, seen.agent_position.col
        position = {("agent_position", "row"): row, ("agent_position", "col"): column}
        return {**position, "walls": seen.walls, "step_count": seen.step_count}

    terminated, _ = by_hand(MAZE, columns, rows, 4, 4)
    assert terminated >= 8
    assert rows["action_mask"].gather(1, rows["action"][:, None]).all(), "actions are legal"
    with SyncCollector(
        lambda: shared(maze, 4), None, total_frames=240, resume=True, **arguments
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 120
    assert verify(tmp_path / "run").sound, str(verify(tmp_path / "run"))
    assert open_storage(tmp_path / "run")[:].numel() == 240


def test_episodes_of_an_own_environment() -> None:
    with SyncCollector(
        lambda: shared(adding, 3), None, frames_per_batch=150, total_frames=300, seed=2
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])

    def columns(seen: Seen) -> Any:
        return {"total": seen.total, ("clock", "time"): seen.clock["time"]}

    terminated, truncated = by_hand(Adding(), columns, rows, 2, 3)
    assert terminated >= 5
    assert truncated >= 5
    assert (rows["action"][rows["clock", "time"] == 0] > 0).all(), "the mask is honoured"


@pytest.mark.parametrize("shape", [(3, 5), (5, 5, 2)])
def test_a_mask_of_combinations(shape: tuple[int, ...]) -> None:
    legal = torch.zeros(64, *shape, dtype=torch.bool)
    some = torch.rand(64, *shape, generator=torch.Generator().manual_seed(0)) < 0.2
    legal[:63] = some[:63]
    choices = Choices.of(MultiCategorical(list(shape), shape=(64, len(shape))), 1)
    assert choices is not None
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(50):
        drawn = choices.draw(legal.numpy(), rng.random((64, len(shape))))
        action = torch.from_numpy(drawn)
        assert legal[(torch.arange(64), *action.T)][legal.flatten(1).any(1)].all()
        seen.add(tuple(action[-1].tolist()))
    assert len(seen) > 8, "where nothing is legal, everything is"


def test_a_spec_that_lies() -> None:
    """The error gives key, expected and actual value, lane, step, and a remedy."""
    match = (
        r"step_count lies outside its space at lane \d, step 1 of its trajectory: "
        r'expected \[0, 1\] and no NaN, got 2.*validate="warn" or "off"'
    )
    kwargs = {"num_rows": 3, "num_cols": 3, "time_limit": 2}
    with (
        pytest.raises(TransitionError, match=match),
        SyncCollector(
            "jumanji:Snake-v1",
            None,
            num_envs=2,
            frames_per_batch=9,
            total_frames=90,
            seed=0,
            env_kwargs=kwargs,
        ) as collector,
    ):
        list(collector)
    with SyncCollector(
        lambda: JumanjiSystem(Lying(), 2, unbounded=["clock/time"]),
        None,
        frames_per_batch=90,
        total_frames=90,
        seed=0,
    ) as collector:
        (rows,) = list(collector)
    assert int(rows["next", "clock", "time"].max()) == 8


def test_a_trapped_snake_has_no_legal_move() -> None:
    """By default, a mask without legal moves is refused.

    If accepted, the episode ends in that step.
    """
    kwargs: dict[str, Any] = {"num_rows": 3, "num_cols": 3, "unbounded": ["step_count"]}
    options: dict[str, Any] = {"num_envs": 8, "frames_per_batch": 800, "total_frames": 800}
    options |= {"seed": 0, "env_kwargs": kwargs}
    with (
        pytest.raises(TransitionError, match=r'one value that is legal.* validate="warn"'),
        SyncCollector("jumanji:Snake-v1", None, **options) as collector,
    ):
        list(collector)
    with (
        pytest.warns(OutOfRangeWarning, match="at least one value that is legal"),
        SyncCollector("jumanji:Snake-v1", None, validate="warn", **options) as collector,
    ):
        (rows,) = list(collector)
    trapped = ~rows["action_mask"].any(-1)
    assert len(rows) == 800
    assert trapped.any()
    assert rows["next", "terminated"][trapped].all()
    assert (rows["action_mask"].gather(-1, rows["action"][:, None])[:, 0] | trapped).all()


def test_specs_that_cannot_be() -> None:
    with pytest.raises(
        SpaceError, match=r'total: .* \[1, 2\] .*, got \[2\]\. .*unbounded=\["total"\]'
    ):
        JumanjiSystem(Misshapen(), 2)
    system = JumanjiSystem(Changing(), 2)
    system.reset(None, [1, 2])
    message = r"JumanjiSystem: the state\.time is int32\[\] after a reset and float32\[\] after"
    with pytest.raises(EnvironmentRefused, match=message):
        system.step([torch.zeros(2, 2, dtype=torch.int64).numpy()])


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("jumanji:NoSuch-v0", {}, "cannot make 'NoSuch-v0'.*Unregistered"),
        ("jumanji:Snake-v1", {"speed": 1}, "cannot make 'Snake-v1' with.*speed"),
    ],
)
def test_misuse(name: str, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(name, None, num_envs=1, frames_per_batch=4, total_frames=4, env_kwargs=kwargs)


def test_a_bare_environment() -> None:
    with pytest.raises(ArgumentError, match=r"one lane\. Pass JumanjiSystem\(env, lanes\)"):
        SyncCollector(Adding(), None, frames_per_batch=4, total_frames=4)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jumanji", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[jumanji\]"'):
        JumanjiSystem.make("Snake-v1", 1, None)
