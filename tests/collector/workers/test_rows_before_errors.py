"""Transitions that a worker completed before it raised are stored once, also in async mode."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.errors import (
    UserStopIteration,
    ValueRefused,
    WorkerDied,
    WorkerRaised,
)
from tallyroll.storage import open_storage

from far_kit import FarThreads

LENGTH = 5
RESPAWN: dict[str, Any] = {"on_worker_death": "respawn", "max_respawns": 3}


class Fails(gymnasium.Env[Any, Any]):
    """Environment whose reward is the number of its step, and which fails at one step.

    It also writes the numbers to a file.
    """

    observation_space = spaces.Box(-1, 1e6, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, log: Path, at: int = -1, how: str = "raise") -> None:
        self.log, self.at, self.how = log, at, how
        self.steps = len(steps_in(log)) if how == "once" else 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.how == "reset" and self.steps == self.at:
            raise ValueError("broken")
        self.in_episode = 0
        return np.full(1, -0.5, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.steps == self.at and self.how != "reset":
            if self.how == "stop":
                raise StopIteration("broken")
            if self.how == "shape":
                return np.zeros(3, np.float32), 1.0, False, False, {}
            if self.how == "exit":
                os._exit(3)
            if self.how == "once":
                self.log.with_suffix(".failed").touch()
            raise ValueError("broken")
        if self.how == "slow":
            time.sleep(0.01)
        self.steps += 1
        self.in_episode += 1
        with self.log.open("a") as file:
            file.write(f"{self.steps}\n")
        shown = np.full(1, self.steps, np.float32)
        return shown, float(self.steps), self.in_episode == LENGTH, False, {}


class FailsOnce(Fails):
    """Environment that fails at step 13, unless an earlier instance failed."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, -1 if log.with_suffix(".failed").exists() else 13, "once")


def steps_in(log: Path) -> list[float]:
    return [float(line) for line in log.read_text().splitlines()] if log.exists() else []


def envs(folder: Path, *first: Any) -> list[Any]:
    """Return two workers with one lane each, of which the first fails."""
    return [partial(Fails, folder / "0", *first), partial(Fails, folder / "1")]


def collect(made: Sequence[Any], folder: Path, policy: Any = None, **more: Any) -> Any:
    kwargs: dict[str, Any] = {"total_frames": 400} if "total_episodes" not in more else {}
    kwargs |= {"mode": "async", "frames_per_batch": 10, "seed": 0, "transport": "thread"}
    kwargs |= {"num_workers": len(made), "storage": folder / "rows"}
    return MultiprocessCollector(list(made), policy, **(kwargs | more))


def stored(folder: Path, lane: int) -> list[float]:
    """Return the rewards of a lane in the order of its rows, and check the rows."""
    with open_storage(folder / "rows") as storage:
        if not len(storage):
            return []
        rows = storage[:]
    rows = rows[rows["collector", "lane"] == lane]
    rewards = rows["next", "reward"].flatten()
    assert torch.equal(rows["next", "observation"].flatten(), rewards)
    seen, step = rows["observation"].flatten(), rows["collector", "step"]
    assert torch.equal(seen, torch.where(step == 0, -0.5, rewards - 1))
    found: list[float] = rewards.tolist()
    return found


def check(made: Any, folder: Path, lanes: int = 2) -> None:
    """Check that rows and counts match the steps in the files."""
    made.shutdown()
    executed = [steps_in(folder / str(lane)) for lane in range(lanes)]
    assert [stored(folder, lane) for lane in range(lanes)] == executed
    ledger = made.ledger
    ledger.check()
    total = sum(map(len, executed))
    assert (ledger.executed, ledger.stored, ledger.lost, ledger.discarded) == (total, total, 0, 0)


@pytest.mark.parametrize("transport", ["thread", "process", FarThreads])
def test_rows_before_an_error_are_stored(tmp_path: Path, transport: Any) -> None:
    # 13 steps: one complete lease of ten, and three steps of the next.
    made = collect(envs(tmp_path, 13), tmp_path, transport=transport)
    with pytest.raises(WorkerRaised, match="broken") as raised:
        list(made)
    assert raised.value.lanes == range(1)
    check(made, tmp_path)
    assert len(stored(tmp_path, 0)) == 13


@pytest.mark.parametrize(
    ("at", "how", "error"),
    [
        (0, "raise", WorkerRaised),
        (1, "raise", WorkerRaised),
        (10, "raise", WorkerRaised),
        (53, "raise", WorkerRaised),
        (13, "stop", WorkerRaised),
        (13, "shape", ValueRefused),
    ],
)
@pytest.mark.parametrize("more", [{}, {"surplus": "never_step"}], ids=["carry", "never_step"])
def test_whatever_the_worker_raised(
    tmp_path: Path, at: int, how: str, error: type[Exception], more: dict[str, Any]
) -> None:
    made = collect(envs(tmp_path, at, how), tmp_path, **more)
    with pytest.raises(error) as raised:
        list(made)
    assert how != "stop" or isinstance(raised.value.__cause__, (StopIteration, UserStopIteration))
    check(made, tmp_path)
    assert len(stored(tmp_path, 0)) == at


def test_an_error_of_a_reset(tmp_path: Path) -> None:
    made = collect(envs(tmp_path, 15, "reset"), tmp_path)
    with pytest.raises(WorkerRaised, match="broken"):
        list(made)
    made.shutdown()
    made.ledger.check()
    # The reset belongs to the step of its slot, which is incomplete.
    assert stored(tmp_path, 0) == steps_in(tmp_path / "0")[:14]
    assert (made.ledger.lost, made.ledger.discarded) == (0, 0)


def test_an_error_of_the_policy(tmp_path: Path) -> None:
    class Refuses(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            if (observation == 13).any():
                raise ValueError("no action")
            return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    policy = TensorDictModule(Refuses(), ["observation"], ["action"])
    made = collect(envs(tmp_path), tmp_path, policy)
    with pytest.raises(WorkerRaised, match="no action"):
        list(made)
    check(made, tmp_path)


def test_several_lanes_keep_their_complete_slots(tmp_path: Path) -> None:
    def vector(first: int, at: int) -> Any:
        return SyncVectorEnv(
            [
                partial(Fails, tmp_path / str(first)),
                partial(Fails, tmp_path / str(first + 1), at),
            ],
            autoreset_mode=AutoresetMode.NEXT_STEP,
        )

    made = collect([partial(vector, 0, 13), partial(vector, 2, -1)], tmp_path)
    with pytest.raises(WorkerRaised, match="broken"):
        list(made)
    made.shutdown()
    made.ledger.check()
    rows = [stored(tmp_path, lane) for lane in range(4)]
    executed = [steps_in(tmp_path / str(lane)) for lane in range(4)]
    assert executed[0] == [*executed[1], 14.0], "lane 0 stepped once more, in a slot cut short"
    assert rows == [executed[0][:13], *executed[1:]]
    ledger = made.ledger
    assert (ledger.lost, ledger.discarded, ledger.stored) == (0, 0, sum(map(len, rows)))
    assert ledger.reset_slots > 0
    assert ledger.slots == ledger.executed + ledger.reset_slots


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_worker_in_its_place_doubles_no_row(tmp_path: Path, transport: Any) -> None:
    first = [partial(FailsOnce, tmp_path / "0"), partial(Fails, tmp_path / "1", -1, "slow")]
    with collect(first, tmp_path, transport=transport, total_frames=200, **RESPAWN) as made:
        assert sum(len(batch) for batch in made) == 200
        assert (made.ledger.respawned, made.ledger.lost, made.ledger.stored) == (1, 0, 200)
    # The stored rows of each lane are its first steps, including those of the failed worker.
    for lane in range(2):
        rows = stored(tmp_path, lane)
        assert rows == steps_in(tmp_path / str(lane))[: len(rows)]
    with open_storage(tmp_path / "rows") as storage:
        rows = storage[:]
    rows = rows[rows["collector", "lane"] == 0]
    assert not (rows["next", "terminated"] | rows["next", "truncated"])[12]
    if transport == "process" and len(rows) == 13:
        return  # the other worker finished before the new process was ready
    ids, step = rows["collector", "traj_ids"], rows["collector", "step"]
    assert step[13] == 0, "a new trajectory, from a reset"
    assert ids[12] != ids[13]


def test_episodes_of_a_budget_are_whole(tmp_path: Path) -> None:
    first = [partial(FailsOnce, tmp_path / "0"), partial(Fails, tmp_path / "1")]
    with collect(first, tmp_path, total_episodes=20, **RESPAWN) as made:
        list(made)
        ledger = made.ledger
        assert (ledger.episodes_complete, ledger.respawned, ledger.lost) == (20, 1, 0)
        assert ledger.stored == 20 * LENGTH + 3, "and three of the episode that was cut"


@pytest.mark.parametrize("openings", [7, 12, 40])
def test_random_actions_of_the_part_count(tmp_path: Path, openings: int) -> None:
    class Zeros(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    policy = TensorDictModule(Zeros(), ["observation"], ["action"])
    first = [partial(FailsOnce, tmp_path / "0"), partial(Fails, tmp_path / "1")]
    more: dict[str, Any] = {"total_frames": 200, "init_random_frames": openings, **RESPAWN}
    with collect(first, tmp_path, policy, **more) as made:
        assert sum(len(batch) for batch in made) == 200
        assert made.ledger.random == openings
    with open_storage(tmp_path / "rows") as storage:
        assert (storage[:]["collector", "policy_version"] == -1).sum() == openings


def test_a_central_policy(tmp_path: Path) -> None:
    class Zeros(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    policy = TensorDictModule(Zeros(), ["observation"], ["action"])
    made = collect(envs(tmp_path, 13), tmp_path, policy, policy_placement="central")
    with pytest.raises(WorkerRaised, match="broken"):
        list(made)
    check(made, tmp_path)


def test_a_run_is_resumed_after_them(tmp_path: Path) -> None:
    made = collect(envs(tmp_path, 13), tmp_path)
    with pytest.raises(WorkerRaised, match="broken"):
        list(made)
    check(made, tmp_path)
    before = made.ledger.stored
    other = tmp_path / "other"
    other.mkdir()
    with collect(envs(other), tmp_path, resume=True) as again:
        list(again)
        assert again.ledger.stored == 400 > before
        again.ledger.check()
    with open_storage(tmp_path / "rows") as storage:
        assert len(storage) == 400
        where = torch.stack([storage[:]["collector", "traj_ids"], storage[:]["collector", "step"]])
    assert len(where.unique(dim=1).T) == 400


def test_a_worker_that_died_loses_its_lease(tmp_path: Path) -> None:
    made = collect(envs(tmp_path, 13, "exit"), tmp_path, transport="process")
    with pytest.raises(WorkerDied):
        list(made)
    made.shutdown()
    made.ledger.check()
    assert len(stored(tmp_path, 0)) == 10
    assert made.ledger.lost == 3
