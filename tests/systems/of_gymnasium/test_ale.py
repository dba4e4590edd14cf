"""Test Atari's vector environment: both modes, seeds, masks and frame numbers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from reset_kit import trajectories

from tallyroll.collector import GymnasiumVectorEnv, Resets, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra
from tallyroll.collector.ext.systems.ale import AleSystem
from tallyroll.collector.testing import SystemContract

from arrays_kit import Stepped, by_workers_and_resumed, compare, rows_of

MODES = ("NextStep", "SameStep")
SMALL: dict[str, Any] = {
    "max_num_frames_per_episode": 40,
    "img_height": 20,
    "img_width": 20,
    "num_threads": 1,
    "noop_max": 5,
}


def made(mode: str = "NextStep", lanes: int = 2, game: str = "breakout", **kwargs: Any) -> Any:
    """Return a vector. Each creation or seeded reset costs 0.1 to 0.2 s per lane."""
    return AtariVectorEnv(game, lanes, autoreset_mode=mode, **{**SMALL, **kwargs})


class Contract(SystemContract):
    mode: ClassVar[str] = "NextStep"
    lanes = 2
    steps = 40
    frames = 60

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        return AleSystem(made(self.mode, lanes))


class TestNextStep(Contract):
    pass


@pytest.mark.slow
class TestSameStep(Contract):
    mode = "SameStep"
    lanes = 1


def test_each_episode_is_repeated_by_its_seed() -> None:
    """Lanes are reset by mask.

    Each seed starts a vector of one lane, which gets the same actions.
    """
    seeded: dict[str, Any] = {"resets": Resets(seeds=True), "frames_per_batch": 90, "seed": 3}
    rows = rows_of(made, reset_slots="avoid", total_frames=90, **seeded)
    parts, alone = trajectories(rows), made(lanes=1)
    for part in parts:
        (seed,) = part["collector", "reset_seed"].unique().tolist()
        seen, _ = alone.reset(seed=np.array([seed]))
        for row in part:
            assert np.array_equal(seen[0], row["observation"].numpy())
            seen, *_ = alone.step(row["action"].numpy()[None])
            assert np.array_equal(seen[0], row["next", "observation"].numpy())
    alone.close()
    assert len(parts) > 6
    with pytest.raises(
        EnvironmentRefused, match=r'accepts no seed .* reset_slots="avoid" lets each'
    ):
        rows_of(made, total_frames=90, **seeded)


@pytest.mark.parametrize(("mode", "wrap"), [*((mode, False) for mode in MODES), (MODES[0], True)])
def test_rows_are_what_the_vector_itself_returns(mode: str, wrap: bool) -> None:
    def make() -> Any:
        return RecordEpisodeStatistics(made(mode)) if wrap else made(mode)

    rows = rows_of(make, frames_per_batch=60, total_frames=120, seed=3)
    env = made(mode)
    first, _ = env.reset(seed=np.array(lane_seeds(3, 2, 0)))
    pending = np.zeros(2, bool)

    def step(action: Any) -> Stepped:
        nonlocal pending
        obs, reward, terminated, truncated, info = env.step(action)
        ended, after = terminated | truncated, obs.copy()
        if "final_obs" in info:
            after[ended] = info["final_obs"][ended]
        skipped, pending = pending, ended
        return Stepped(
            {"observation": after},
            {"observation": obs},
            reward,
            terminated,
            truncated,
            skipped if mode == "NextStep" else None,
        )

    assert compare(rows, 2, {"observation": first}, step) > 5
    assert rows["next", "truncated"].any()


def test_one_environment_does_not_change_anothers_mode() -> None:
    """The class has one mode for all of its environments, which the last one sets."""
    arguments: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 60, "seed": 1}
    alone = {mode: rows_of(lambda mode=mode: made(mode, 1), **arguments) for mode in MODES}
    envs = {mode: made(mode, 1) for mode in MODES}
    assert envs["NextStep"].metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    with (
        SyncCollector(envs["NextStep"], None, **arguments) as one,
        SyncCollector(envs["SameStep"], None, **arguments) as other,
    ):
        parts: dict[str, list[Any]] = {"NextStep": [], "SameStep": []}
        for first, second in zip(one, other, strict=True):
            parts["NextStep"].append(first.clone())
            parts["SameStep"].append(second.clone())
            made("SameStep" if len(parts["NextStep"]) % 2 else "NextStep", lanes=1)
        slots = one.ledger.reset_slots, other.ledger.reset_slots
    assert slots[0] > 0
    assert slots[1] == 0
    for mode in MODES:
        rows = torch.cat(parts[mode])
        for key in alone[mode].keys(True, True):
            assert torch.equal(rows[key], alone[mode][key]), (mode, key)
    later = made("NextStep", lanes=1)
    made("SameStep", lanes=1)
    assert GymnasiumVectorEnv(later).autoreset is AutoresetMode.NEXT_STEP


def test_frame_numbers_count_ticks() -> None:
    arguments: dict[str, Any] = {
        "info_keys": ["episode_frame_number", "lives"],
        "frame_skip": "episode_frame_number",
        "frames_per_batch": 40,
        "total_frames": 80,
        "seed": 1,
    }
    kwargs = {**SMALL, "frameskip": 3}
    for create, more in (
        (lambda: made(lanes=1, frameskip=3), {}),
        ("ale:breakout", {"num_envs": 1, "env_kwargs": kwargs}),
    ):
        with SyncCollector(create, None, **arguments, **more) as collector:
            rows = torch.cat([batch.clone() for batch in collector])
            ticks = collector.ledger.ticks
        frames, after = rows["episode_frame_number"], rows["next", "episode_frame_number"]
        gone = after - frames
        assert set(gone.unique().tolist()) <= {1, 2, 3}, "the last step of an episode may be cut"
        assert int(gone.sum()) == ticks
        assert rows["lives"].unique().tolist() == [5]


@pytest.mark.slow
def test_workers_and_a_resume_by_name(tmp_path: Path) -> None:
    _, resumed, made_of = by_workers_and_resumed(
        "ale:breakout", tmp_path / "run", 60, 40, num_envs=2, frames_per_batch=20, env_kwargs=SMALL
    )
    assert made_of["type"] == "AtariVectorEnv"
    again, _ = made(lanes=2).reset(seed=np.array(lane_seeds(2, 2, 1)))
    assert torch.equal(resumed["observation"][0], torch.from_numpy(again[0]))


def test_a_time_limit_of_the_collector() -> None:
    for mode in MODES:
        rows = rows_of(
            lambda mode=mode: made(mode, lanes=1),
            frames_per_batch=20,
            total_frames=20,
            seed=1,
            max_frames_per_traj=4,
        )
        assert int(rows["collector", "step"].max()) == 3


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("Pong", {}, "expected the name of a game, such as 'pong' or 'ms_pacman', got 'Pong'"),
        ("pong", {"shade": 1}, "unexpected keyword argument 'shade'"),
        ("pong", {"frameskip": 0}, "Invalid frameskip of 0"),
        ("pong", {"autoreset_mode": "Disabled"}, "Invalid autoreset_mode"),
    ],
)
def test_what_cannot_be_made(name: str, kwargs: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(f"ale:{name}", frames_per_batch=4, total_frames=4, env_kwargs=kwargs)


def test_what_is_not_driven_and_what_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ale:pong", made(batch_size=1)):
        arguments = {"env_kwargs": {"batch_size": 1}, "num_envs": 2} if name == "ale:pong" else {}
        with pytest.raises(EnvironmentRefused, match="is asynchronous"):
            SyncCollector(name, frames_per_batch=4, total_frames=4, **arguments)
    assert isinstance(registry.adopt(RecordEpisodeStatistics(made(lanes=1))), AleSystem)
    assert AleSystem.adopt(gymnasium.make_vec("CartPole-v1", 2)) is None
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.setitem(sys.modules, "ale_py.roms", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[atari\]"'):
        SyncCollector("ale:pong", frames_per_batch=4, total_frames=4)
