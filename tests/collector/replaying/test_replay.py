"""Replay reproduces stored rows, and locates those that it does not reproduce."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from replay_kit import KINDS, ROWS, collect
from torchrl.envs import GymEnv

from tallyroll.collector import MultiprocessCollector, Resets, SyncCollector, replay
from tallyroll.collector.errors import ArgumentError, EnvironmentUnknown
from tallyroll.collector.ext.replay import stage
from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.errors import NotAStorage, StorageMissing, UnknownTrajectory

Stored = Callable[[str], Path]


def heavy_pole(gravity: float = 9.8) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.gravity = gravity  # type: ignore[attr-defined]
    return env


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_stored_comes_out_again(stored: Stored, kind: str) -> None:
    path = stored(kind)
    with open_storage(path) as storage:
        count = len(storage.trajectories)
    report = replay(path, "all")
    assert (report.same, report.status, report.replayed) == (True, 0, count), report
    assert report.rows == ROWS
    assert not report.versions
    assert {*report.largest.values()} == {0.0}
    assert {"observation", "next/observation", "next/reward", "next/done"} <= {*report.largest}
    assert report.not_compared == ()


def test_generators_are_as_before(stored: Stored) -> None:
    path = stored("plain")  # collecting seeds the generators
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    replay(path, 0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("kind", ["seeded", "plain"])
def test_another_environment_differs_at_the_first_step(stored: Stored, kind: str) -> None:
    # Gravity does not affect a reset, so the result of the first step is the first difference.
    report = replay(stored(kind), "all", create_env_fn=lambda: heavy_pole(20.0))
    first = report.first_difference
    assert first is not None
    assert (report.status, report.equal) == (1, 0)
    assert (first.trajectory, first.step, first.column) == (0, 0, "next/observation")
    assert report.largest["observation"] > 0
    assert report.differing["next/observation"] > report.differing["observation"]


def test_a_little_difference_is_within_a_tolerance(stored: Stored) -> None:
    def other() -> gymnasium.Env[Any, Any]:
        return heavy_pole(9.8 + 1e-4)

    report = replay(stored("seeded"), "all", create_env_fn=other, atol=1e-2)
    assert report.same
    assert 0 < max(report.largest.values()) < 1e-2
    assert replay(stored("seeded"), "all", create_env_fn=other).status == 1


FILES = {
    "observation": "observation.memmap",
    "next/observation": "next/observation.memmap",
    "next/reward": "next/reward.memmap",
    "next/truncated": "next/truncated.memmap",
}


@pytest.mark.parametrize("kind", ["seeded", "plain"])
@pytest.mark.parametrize("column", [*FILES, "action"])
def test_one_bit_is_found_where_it_changed(
    stored: Stored, kind: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_MOST_SLOTS", 2)  # makes many blocks per round
    copy = tmp_path / "copy"
    shutil.copytree(stored(kind), copy)
    with open_storage(copy) as storage:
        wanted = storage.trajectories.table[3]
        row = int(storage.trajectories.rows_of(int(wanted["id"]))[2])
        octets = storage.column(tuple(column.split("/")))[:1].nbytes
    with (copy / FILES.get(column, "action.memmap")).open("r+b") as file:
        file.seek(row * octets)
        (octet,) = file.read(1)
        file.seek(row * octets)
        file.write(bytes([octet ^ 1]))
    report = replay(copy, "all")
    first = report.first_difference
    assert first is not None
    assert report.status == 1
    assert (first.trajectory, first.step, first.row) == (wanted["id"], 2, row)
    assert first.column == ("next/observation" if column == "action" else column)
    if column not in ("action", "next/truncated"):  # the following values differ, too
        assert (report.differing, len(report.differences)) == ({column: 1}, 1)
        assert first.stored.tobytes() != first.replayed.tobytes()
        changed = np.frombuffer(first.stored.tobytes(), np.uint8)
        assert (changed ^ np.frombuffer(first.replayed.tobytes(), np.uint8)).sum() == 1


@pytest.mark.parametrize("transport", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_runs_of_workers(transport: Any, tmp_path: Path) -> None:
    for kind in ("seeded", "plain") if transport == "thread" else ("plain",):
        path = tmp_path / kind
        with MultiprocessCollector(
            "CartPole-v1",
            num_envs=5,
            num_workers=2,
            mode="async" if kind == "plain" else "sync",
            transport=transport,
            frames_per_batch=50,
            total_frames=ROWS,
            storage=path,
            **KINDS[kind],
        ) as collector:
            for _ in collector:
                pass
        report = replay(path, "all")
        assert (report.same, report.rows) == (True, ROWS)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_of_any_mode(mode: AutoresetMode, tmp_path: Path) -> None:
    def vector(lanes: int = 3) -> SyncVectorEnv:
        return SyncVectorEnv([heavy_pole] * lanes, autoreset_mode=mode)

    path = collect(tmp_path / "a", vector, num_envs=None)
    report = replay(path, "all", create_env_fn=vector)
    assert (report.same, report.rows) == (True, ROWS)
    with pytest.raises(ArgumentError, match="an environment with 3 lanes, as in the run, got 2"):
        replay(path, create_env_fn=lambda: vector(2))


def test_an_environment_of_torchrl(tmp_path: Path) -> None:
    def made() -> GymEnv:
        return GymEnv("CartPole-v1")

    path = collect(tmp_path / "a", made, num_envs=None, max_frames_per_traj=11)
    report = replay(path, "all", create_env_fn=made)
    assert (report.same, report.rows) == (True, ROWS)


@pytest.mark.parametrize("kind", ["seeded", "plain"])
def test_a_run_that_was_resumed(kind: str, tmp_path: Path) -> None:
    path = collect(tmp_path / "a", total_frames=100, **KINDS[kind])
    with MemmapStorage(path, mode="append") as storage:
        collect(storage, total_frames=ROWS, resume=True, seed=None, **KINDS[kind])  # type: ignore[arg-type]
        collect(storage, total_frames=60, num_envs=3, seed=8, **KINDS[kind])  # type: ignore[arg-type]
    report = replay(path, "all")
    assert (report.same, report.rows) == (True, ROWS + 60)


def test_a_ring_says_what_is_gone(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "a", max_size=150) as storage:
        collect(storage, **KINDS["seeded"])  # type: ignore[arg-type]
        gone = set(storage.trajectories.ids[~storage.trajectories.whole].tolist())
        count = len(storage.trajectories)
    report = replay(tmp_path / "a", "all")
    (why,) = report.not_replayed
    assert why.startswith("rows of the trajectory are missing")
    assert {*report.not_replayed[why]} == gone
    assert (report.status, report.equal) == (2, count - len(gone))
    sample = replay(tmp_path / "a")  # among those that can be replayed
    assert (sample.same, sample.left_out) == (True, {why: len(gone)})

    with MemmapStorage(tmp_path / "b", max_size=150) as storage:
        collect(storage)  # type: ignore[arg-type]
    report = replay(tmp_path / "b")
    assert (report.status, report.rows) == (2, 0)
    assert any(why.startswith("the lane has no rows left") for why in report.not_replayed)


def test_what_a_run_threw_away_is_no_difference(tmp_path: Path) -> None:
    for kind in ("seeded", "plain"):
        path = collect(tmp_path / kind, surplus="discard", frames_per_batch=51, **KINDS[kind])
        report = replay(path, "all")
        assert report.differences == ()
        assert report.status == 2
        with open_storage(path) as storage:
            left = sum(map(len, report.not_replayed.values()))
            assert report.equal + left == len(storage.trajectories)
            assert report.equal >= 8


class RandomEpisodes(gymnasium.Env[Any, Any]):
    """Environment that observes (number of the episode, step); numbers and lengths are random."""

    observation_space = gymnasium.spaces.Box(-1, 2.0**53, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number, self.left = (int(self.np_random.integers(n)) for n in (2**50, 5))
        self.at = 0
        return np.array([self.number, 0.0]), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        ended = self.at > self.left
        cut = ended and self.number % 2 == 0
        return np.array([self.number, self.at]), float(action), ended and not cut, cut, {}


class NumberedEpisodes(RandomEpisodes):
    """Environment that counts its resets, independent of seeds."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets += 1
        _, infos = super().reset(seed=seed)
        self.number, self.left = self.resets, self.resets % 4
        return np.array([self.number, 0.0]), infos


def run_at_random(path: Path, rng: random.Random) -> None:
    """Collect by random calls, in a run that may lose rows and reset lanes."""
    lanes, mode = rng.choice([1, 2, 3, 5, 8]), rng.choice([None, *AutoresetMode])
    options: dict[str, Any] = {"surplus": rng.choice(["discard", "discard", "carry"])}
    if rng.random() < 0.3:
        options["resets"] = Resets(seeds=True)
    if rng.random() < 0.2:
        options["reset_at_each_iter"] = True
    if rng.random() < 0.2:
        options["max_frames_per_traj"] = rng.choice([1, 2, 4])
    if rng.random() < 0.2:
        options["init_random_frames"] = 7
    if mode is AutoresetMode.NEXT_STEP and rng.random() < 0.4:
        options["reset_slots"] = "avoid"
    make: Any = RandomEpisodes
    if mode is None:
        options["num_envs"] = lanes
    else:

        def make() -> SyncVectorEnv:
            return SyncVectorEnv([RandomEpisodes] * lanes, autoreset_mode=mode)

    for part in (1, 2) if rng.random() < 0.3 else (1,):
        again: dict[str, Any] = {"resume": True, "seed": None} if part == 2 else {"seed": 3}
        frames = {"frames_per_batch": rng.choice([1, 3, 4, 5, 7, 12]), "total_frames": 25 * part}
        with SyncCollector(make, storage=path, **frames, **options, **again) as collector:
            if rng.random() < 0.1:
                collector.set_seed(11)
            for _ in range(40):
                what = rng.random()
                if what < 0.45:
                    collector.collect(rng.choice([1, 2, 5, 12]))
                elif what < 0.9:
                    next(iter(collector), None)
                else:
                    collector.set_seed(rng.randrange(9))


@pytest.mark.parametrize("seed", range(16))
def test_random_runs_that_lose_rows_or_reset_lanes(seed: int, tmp_path: Path) -> None:
    """No correct row is reported as different, and every wrong row that was compared is found."""
    rng, path = random.Random(seed), tmp_path / "a"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_at_random(path, rng)
    report = replay(path, "all", create_env_fn=RandomEpisodes)
    assert report.differences == ()
    left = {id for ids in report.not_replayed.values() for id in ids}
    with open_storage(path) as storage:
        assert report.equal + len(left) == len(storage.trajectories)
        row = rng.randrange(storage.head)
        id = int(storage.get(row)["collector", "traj_ids"])
        octets = storage.column(("next", "reward"))[:1].nbytes
    with (path / "next" / "reward.memmap").open("r+b") as file:
        file.seek(row * octets)
        file.write(b"\x77")
    report = replay(path, "all", create_env_fn=RandomEpisodes)
    doubted = {id for why, ids in report.not_replayed.items() if "mid-episode" in why for id in ids}
    if id in left | doubted:
        assert report.differences == ()
    else:
        assert (report.status, [each.row for each in report.differences]) == (1, [row])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_first_transition_of_a_lane_that_was_thrown_away(
    mode: AutoresetMode, tmp_path: Path
) -> None:
    """The first slot stores four of eight lanes, so the others begin in mid-episode."""
    path = tmp_path / "a"
    with SyncCollector(
        lambda: SyncVectorEnv([RandomEpisodes] * 8, autoreset_mode=mode),
        frames_per_batch=4,
        total_frames=44,
        seed=3,
        surplus="discard",
        storage=path,
    ) as collector:
        collector.collect(4)
        collector.collect(16)
        while collector.collect(5):
            pass
    with open_storage(path) as storage:
        middle = {
            int(id)
            for id in storage.trajectories
            if storage.trajectories[int(id)]["observation"][0, 1] > 0
        }
    report = replay(path, "all", create_env_fn=RandomEpisodes)
    left = {id for ids in report.not_replayed.values() for id in ids}
    assert (report.status, report.differences) == (2, ())
    assert middle <= left
    assert report.equal >= 4


def test_an_environment_that_begins_otherwise_with_the_same_seed(tmp_path: Path) -> None:
    for kind in ("seeded", "plain"):
        path = collect(tmp_path / kind, NumberedEpisodes, total_frames=60, **KINDS[kind])
        report = replay(path, "all", create_env_fn=NumberedEpisodes)
        assert report.differences == ()
        assert report.status == (2 if kind == "seeded" else 0)
        assert all(
            "two resets of the environment with the same seed give different" in why
            for why in report.not_replayed
        )


def test_a_factory_is_needed_where_there_was_one(tmp_path: Path) -> None:
    path = collect(tmp_path / "a", heavy_pole)
    with pytest.raises(EnvironmentUnknown, match=r"came from a factory.*create_env_fn="):
        replay(path)
    with pytest.raises(ArgumentError, match="env_kwargs: expected the id of"):
        replay(path, create_env_fn=heavy_pole, env_kwargs={"render_mode": "rgb_array"})
    assert replay(path, "all", create_env_fn=heavy_pole).same
    assert replay(path, "all", create_env_fn="CartPole-v1").same
    with pytest.raises(
        ArgumentError, match=r"observation: expected .*\[4\] as stored, got .*\[3\]"
    ):
        replay(path, create_env_fn="Pendulum-v1")


def test_a_function_that_drew_resets(tmp_path: Path) -> None:
    def sampler(rng: np.random.Generator) -> dict[str, Any]:
        return {"low": rng.uniform(-0.1, -0.05), "high": 0.05}

    path = collect(tmp_path / "a", resets=Resets(sampler=sampler, seeds=True))
    report = replay(path, "all")
    assert report.same
    assert "sampler" in report.notes[0]
    path = collect(tmp_path / "b", resets=Resets(sampler=sampler))
    with pytest.raises(ArgumentError, match=r"resets=Resets\(sampler="):
        replay(path)
    assert replay(path, "all", resets=Resets(sampler=sampler)).same


def test_other_versions_are_named(stored: Stored, tmp_path: Path) -> None:
    shutil.copytree(stored("seeded"), tmp_path / "a")
    file = tmp_path / "a/manifest.json"
    manifest = json.loads(file.read_text())
    manifest["runs"][0]["versions"]["numpy"] = "1.0.0"
    del manifest["crc32"]
    file.write_text(json.dumps(manifest))
    report = replay(tmp_path / "a")
    assert report.versions == {"numpy": ("1.0.0", np.__version__)}
    assert "numpy" in repr(report)


def test_arguments_that_cannot_be_right(stored: Stored, tmp_path: Path) -> None:
    path = stored("seeded")
    with pytest.raises(UnknownTrajectory, match="no rows of trajectory 10000000"):
        replay(path, 10_000_000)
    with pytest.raises(ArgumentError, match="expected whole numbers, got 'x'"):
        replay(path, ["x"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r'expected ids or "all", got \'some\''):
        replay(path, "some")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="at least one id"):
        replay(path, [])
    with pytest.raises(ArgumentError, match="sample: expected a whole number above 0, got 0"):
        replay(path, sample=0)
    with pytest.raises(ArgumentError, match="atol: expected a finite number"):
        replay(path, atol=float("nan"))
    vector = SyncVectorEnv([heavy_pole])
    with pytest.raises(ArgumentError, match="makes the environment, got SyncVectorEnv"):
        replay(path, create_env_fn=vector)
    vector.close()
    with pytest.raises(StorageMissing):
        replay(tmp_path / "none")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(NotAStorage):
        replay(tmp_path / "other")
    with MemmapStorage(tmp_path / "empty") as storage, open_storage(path) as full:
        storage.initialise(full.schema)
    with pytest.raises(ArgumentError, match="no rows yet"):
        replay(tmp_path / "empty")


def test_rows_of_no_run_cannot_be_replayed(tmp_path: Path) -> None:
    with SyncCollector("CartPole-v1", frames_per_batch=50, total_frames=50) as collector:
        rows = next(iter(collector))
    with MemmapStorage(tmp_path / "a") as storage:
        storage.extend(rows)
    report = replay(tmp_path / "a")
    (why,) = report.not_replayed
    assert "no run of a collector made the rows" in why
    assert report.status == 2
