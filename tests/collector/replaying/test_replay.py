"""Replay: what is stored comes out again, and what does not is found where it is."""

from __future__ import annotations

import json
import shutil
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
from tallyroll.collector.evaluation.replaying import stage
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
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    replay(stored("plain"), 0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("kind", ["seeded", "plain"])
def test_another_environment_differs_at_the_first_step(stored: Stored, kind: str) -> None:
    # Gravity changes nothing in a reset: the first step's result is the first that differs.
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
    monkeypatch.setattr(stage, "_MOST_SLOTS", 2)  # so that a round has many blocks
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
    if column not in ("action", "next/truncated"):  # what follows from these is different, too
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
    with pytest.raises(ArgumentError, match="an environment with 3 lanes, as the run had, got 2"):
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
    assert why.startswith("rows of it are gone")
    assert {*report.not_replayed[why]} == gone
    assert (report.status, report.equal) == (2, count - len(gone))
    sample = replay(tmp_path / "a")  # of those that can be
    assert (sample.same, sample.left_out) == (True, {why: len(gone)})

    with MemmapStorage(tmp_path / "b", max_size=150) as storage:
        collect(storage)  # type: ignore[arg-type]
    report = replay(tmp_path / "b")
    assert (report.status, report.rows) == (2, 0)
    assert any(why.startswith("its lane has no rows left") for why in report.not_replayed)


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


def test_a_factory_is_needed_where_there_was_one(tmp_path: Path) -> None:
    path = collect(tmp_path / "a", heavy_pole)
    with pytest.raises(EnvironmentUnknown, match=r"came from a factory.*create_env_fn="):
        replay(path)
    with pytest.raises(ArgumentError, match="env_kwargs go with an id"):
        replay(path, create_env_fn=heavy_pole, env_kwargs={"render_mode": "rgb_array"})
    assert replay(path, "all", create_env_fn=heavy_pole).same
    assert replay(path, "all", create_env_fn="CartPole-v1").same
    with pytest.raises(ArgumentError, match=r"observation: stored as .*\[4\].*makes .*\[3\]"):
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
    assert "no collector's run made its rows" in why
    assert report.status == 2
