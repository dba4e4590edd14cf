"""Test `n_step` with several rewards, with agents that end one by one, and with narrow dtypes."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.objectives.value import TD0Estimator

from tallyroll.collector import SyncCollector
from tallyroll.storage import H5Storage, MemmapStorage, TrajectorySliceSampler, ZarrStorage, n_step
from tallyroll.storage.errors import ColumnsMissing, SumTooLarge

from agents_kit import AGENTS, DEEP, GROUP, RED, AgentsEnv
from collect_kit import LENGTHS

LANES, OBJECTIVES = 3, 2
GAMMA = Fraction(1, 2)
"""Its powers are exact, so that the model can be compared bit by bit."""
FLAGS = ("done", "terminated", "truncated")
SIZES: dict[tuple[str, ...], tuple[int, ...]] = {(): (), (GROUP,): (AGENTS,), DEEP: (RED,)}


def random_rows(seed: int, count: int) -> TensorDict:
    """Return rows [count] of lanes in random order, whose rewards are whole eighths.

    Agents of `GROUP` end and return individually. Agents of `DEEP` end with their episode because
    they have no flags. An observation is the number of its row.
    """
    rng = np.random.default_rng(seed)
    lane = rng.integers(LANES, size=count)
    ids, steps = np.zeros((2, count), np.int64)
    flags = rng.random((count, 2)) < 0.1
    newest: dict[int, tuple[int, int]] = {}
    for row in range(count):
        id, step = newest.get(int(lane[row]), (row, 0))
        if rng.random() < 0.05:  # cut
            id, step = row, 0
        ids[row], steps[row] = id, step
        newest[int(lane[row])] = (row + 1, 0) if flags[row].any() else (id, step + 1)
    for at in range(count):  # one id each
        ids[at] = ids[at] * LANES + lane[at]
    rows = TensorDict({"index_of_row": torch.arange(count)[:, None]}, [count])
    rows["next", "reward"] = eighths(rng, count, OBJECTIVES)
    rows["next", "cost"] = eighths(rng, count)
    for group, agents in SIZES.items():
        seen = torch.arange(count).reshape(-1, *(1 for _ in agents), 1).expand(count, *agents, 1)
        rows[(*group, "observation")] = seen.double()
        rows[("next", *group, "observation")] = seen + 0.5
        if group:
            rows[("next", *group, "reward")] = eighths(rng, count, *agents, 1)
    own = rng.random((2, count, AGENTS, 1)) < 0.2
    for name, root, agent in zip(FLAGS[1:], flags.T, own, strict=True):
        rows["next", name] = torch.from_numpy(root[:, None].copy())
        rows["next", GROUP, name] = torch.from_numpy(agent)
    for group in ((), (GROUP,)):
        done = rows[("next", *group, "terminated")] | rows[("next", *group, "truncated")]
        rows[("next", *group, "done")] = done
    rows["collector", "traj_ids"] = torch.from_numpy(ids)
    rows["collector", "step"] = torch.from_numpy(steps)
    rows["collector", "lane"] = torch.from_numpy(lane)
    rows["collector", "next_valid"] = torch.from_numpy(~(flags.any(1) & (rng.random(count) < 0.5)))
    return rows


def eighths(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-80, 80, shape) / 8)


def chains(rows: TensorDict, first: int, n: int) -> list[list[int]]:
    """Return the rows that each row from ``first`` on may use, judged by the root's flags."""
    ids, done = rows["collector", "traj_ids"].tolist(), rows["next", "done"][:, 0].tolist()
    found = []
    for row in range(first, len(ids)):
        chain = [row]
        while len(chain) < n and not done[chain[-1]]:
            later = [r for r in range(chain[-1] + 1, len(ids)) if ids[r] == ids[row]]
            if not later:
                break
            chain.append(later[0])
        found.append(chain)
    return found


def check(found: TensorDict, rows: TensorDict, every: list[list[int]], gamma: Fraction) -> None:
    own, last = ([chain[at] for chain in every] for at in (0, -1))
    assert torch.equal(found["observation"], rows["observation"][own])
    assert torch.equal(found["next", "observation"], rows["next", "observation"][last])
    assert found["steps_to_next_obs"].tolist() == [[len(chain)] for chain in every]
    assert found["gamma"].tolist() == [[float(gamma ** len(chain))] for chain in every]
    key: Any
    for key in [("collector", "next_valid"), *(("next", name) for name in FLAGS)]:
        assert torch.equal(found[key], rows[key][last])
    for name in ("reward", "cost"):
        assert torch.equal(found["next", "original_" + name], rows["next", name][own])
        values = rows["next", name].reshape(len(rows), -1).T.tolist()
        wanted = [[total(objective, chain, gamma) for objective in values] for chain in every]
        assert found["next", name].reshape(len(every), -1).tolist() == wanted
    for group in ((GROUP,), DEEP):
        for agent in range(*SIZES[group]):
            check_agent(found, rows, every, group, agent, gamma)


def check_agent(
    found: TensorDict,
    rows: TensorDict,
    every: list[list[int]],
    group: tuple[str, ...],
    agent: int,
    gamma: Fraction,
) -> None:
    if group == (GROUP,):
        done = rows["next", GROUP, "done"][:, agent, 0].tolist()
        every = [until(chain, done) for chain in every]
    own, last = ([chain[at] for chain in every] for at in (0, -1))
    reward = rows[("next", *group, "reward")][:, agent, 0].tolist()
    wanted: dict[Any, Any] = {
        ("next", *group, "reward"): [total(reward, chain, gamma) for chain in every],
        ("next", *group, "original_reward"): [reward[row] for row in own],
        ("next", *group, "observation"): [row + 0.5 for row in last],
        (*group, "observation"): own,
        (*group, "steps_to_next_obs"): [len(chain) for chain in every],
        (*group, "gamma"): [float(gamma ** len(chain)) for chain in every],
    }
    for key, values in wanted.items():
        assert found[key][:, agent].tolist() == [[value] for value in values], key
    for name in FLAGS if group == (GROUP,) else ():
        key = ("next", GROUP, name)
        assert torch.equal(found[key][:, agent], rows[key][last, agent])


def until(chain: list[int], done: list[bool]) -> list[int]:
    """Return the rows up to the first one at which an agent is done."""
    return next((chain[: k + 1] for k, row in enumerate(chain) if done[row]), chain)


def total(rewards: list[float], chain: list[int], gamma: Fraction) -> float:
    return float(sum(gamma**k * Fraction(rewards[row]) for k, row in enumerate(chain)))


KEYS: Any = ["reward", "cost", (GROUP, "reward"), ("next", *DEEP, "reward")]


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 7),
    st.sampled_from([MemmapStorage, MemmapStorage, H5Storage, ZarrStorage]),
    st.booleans(),
)
def test_each_agent_is_summed_until_its_own_end(seed: int, n: int, kind: Any, ring: bool) -> None:
    rows, size = random_rows(seed, 60), 25 if ring and kind is MemmapStorage else None
    given = {"max_size": size} if kind is MemmapStorage else {"capacity": 60}
    ends = {H5Storage: "s.h5", ZarrStorage: "s.zarr"}
    with TemporaryDirectory() as folder, kind(Path(folder) / ends.get(kind, "s"), **given) as s:
        for at in range(0, 60, 20):
            s.extend(rows[at : at + 20])
        index = torch.arange(len(s))
        found = n_step(s, index, n, float(GAMMA), reward_key=KEYS)
        first = 60 - (size or 60)
        newest = s.get(index)["index_of_row"][:, 0].tolist()  # rows of a ring by slots
        every = chains(rows, first, n)
    check(found, rows, [every[row - first] for row in newest], GAMMA)


def test_rewards_that_are_not_named_are_those_of_the_last_row(tmp_path: Path) -> None:
    rows = random_rows(1, 60)
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(rows)
        found = n_step(storage, slice(None), 3, 0.5)
        root, other = (n_step(storage, slice(None), 3, 0.5, reward_key=key) for key in KEYS[:2])
    last = [chain[-1] for chain in chains(rows, 0, 3)]
    assert torch.equal(found["next", "cost"], rows["next", "cost"][last])
    assert torch.equal(root["next", "reward"], found["next", "reward"])
    assert torch.equal(root["next", GROUP, "reward"], rows["next", GROUP, "reward"][last])
    assert (GROUP, "gamma") not in root.keys(True)
    assert torch.equal(other["next", "reward"], rows["next", "reward"][last])
    assert ("next", "original_reward") not in other.keys(True)


def test_an_estimator_of_a_group_reads_its_steps(tmp_path: Path) -> None:
    """The estimator has the keys of its group's rewards, and a collector stepped the lanes."""
    gamma = 0.9
    env = AgentsEnv(3, LENGTHS)
    with SyncCollector(
        env, None, frames_per_batch=30, total_frames=120, seed=0, storage=tmp_path / "s"
    ) as collector:
        for _ in collector:
            pass
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        rows, found = storage.get(slice(None)), n_step(storage, slice(None), 4, gamma)
    estimator = TD0Estimator(gamma=gamma, value_network=None)
    names = ("reward", "done", "terminated", "value", "value_target", "steps_to_next_obs")
    estimator.set_keys(**{name: (GROUP, name) for name in names}, advantage=(GROUP, "advantage"))
    value = found["next", GROUP, "observation"].sum(-1, keepdim=True)
    targets = estimator.value_estimate(found, next_value=value)
    ids, steps = rows["collector", "traj_ids"].tolist(), rows["collector", "step"].tolist()
    reward, done, terminated = (
        rows["next", GROUP, name][..., 0].tolist() for name in ("reward", "done", "terminated")
    )
    over, following = rows["next", "done"][:, 0].tolist(), value_of_rows(rows)
    place = {pair: row for row, pair in enumerate(zip(ids, steps, strict=True))}
    for row in range(len(rows)):
        for agent in range(AGENTS):
            at, wanted, used = row, 0.0, 0
            while True:
                wanted += gamma**used * reward[at][agent]
                used += 1
                after = place.get((ids[row], steps[row] + used))
                if used == 4 or done[at][agent] or over[at] or after is None:
                    break
                at = after
            if not terminated[at][agent]:
                wanted += gamma**used * following[at][agent]
            assert targets[row, agent].item() == pytest.approx(wanted, rel=1e-5)


def value_of_rows(rows: TensorDict) -> list[list[float]]:
    found: list[list[float]] = rows["next", GROUP, "observation"].sum(-1).tolist()
    return found


@pytest.mark.parametrize("n", [1, 3, 30])
def test_torchrl_says_the_same_of_one_agent(tmp_path: Path, n: int) -> None:
    rng = np.random.default_rng(n)
    done = torch.from_numpy(rng.random((40, 1)) < 0.1)
    ends = torch.zeros_like(done)
    rows = TensorDict(
        {
            "observation": torch.arange(40.0)[:, None],
            "next": {
                "observation": torch.arange(40.0)[:, None] + 1,
                "reward": torch.from_numpy(rng.normal(size=(40, 1)).astype(np.float32)),
                "done": done,
                "terminated": done,
                "truncated": ends,
            },
        },
        [40],
    )
    begins = torch.cat([ends[:1], done[:-1]])[:, 0]
    id = begins.long().cumsum(0)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), begins.nonzero()[:, 0]])
    stored = rows.clone()
    stored["collector", "traj_ids"], stored["collector", "lane"] = id, torch.zeros(40).long()
    stored["collector", "step"] = torch.arange(40) - first[id]
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(stored)
        found = n_step(storage, slice(None), n, 0.9)
    theirs = MultiStep(0.9, n)(rows[None])[0]
    assert torch.equal(found["steps_to_next_obs"][:, 0], theirs["steps_to_next_obs"])
    torch.testing.assert_close(found["next", "reward"], theirs["next", "reward"])
    assert torch.equal(found["next", "observation"], theirs["next", "observation"])


def test_slices_of_agents_know_no_cuts(tmp_path: Path) -> None:
    rows = random_rows(3, 60)
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(rows)
        sampler = TrajectorySliceSampler(1)
        batch = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=16).sample()
        found = n_step(storage, batch, 3, 0.5, reward_key=KEYS)
    every = chains(rows, 0, 3)
    check(found, rows, [every[row] for row in batch["index_of_row"][:, 0].tolist()], GAMMA)


def test_a_gamma_for_each_objective_and_each_agent(tmp_path: Path) -> None:
    rows = random_rows(5, 60)
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(rows)
        both = n_step(storage, slice(None), 3, torch.tensor([0.5, 0.25]), reward_key="reward")
        half, quarter = (
            n_step(storage, slice(None), 3, torch.tensor([g]), reward_key="reward")
            for g in (0.5, 0.25)
        )
        agents = n_step(
            storage, slice(None), 3, torch.tensor([[0.5], [0.25]]), reward_key=(GROUP, "reward")
        )
        with pytest.raises(ValueError, match=r"broadcasts to \[2\], the shape of next/reward"):
            n_step(storage, slice(None), 3, torch.rand(3), reward_key="reward")
        with pytest.raises(ValueError, match="gamma: expected a discount from 0 to 1"):
            n_step(storage, slice(None), 3, torch.tensor([0.5, 1.5]))
    for at, one in enumerate((half, quarter)):
        assert torch.equal(both["next", "reward"][:, at], one["next", "reward"][:, at])
        assert torch.equal(both["gamma"][:, at], one["gamma"][:, 0])
    steps = agents[GROUP, "steps_to_next_obs"]
    assert torch.equal(agents[GROUP, "gamma"], torch.tensor([[0.5], [0.25]]).double() ** steps)


def one_episode(rewards: torch.Tensor) -> TensorDict:
    count = len(rewards)
    no = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict(
        {
            "next": {"reward": rewards, "done": no, "terminated": no, "truncated": no},
            "collector": {
                "traj_ids": torch.zeros(count, dtype=torch.int64),
                "step": torch.arange(count),
                "lane": torch.zeros(count, dtype=torch.int64),
            },
        },
        [count],
    )


@pytest.mark.parametrize(
    ("values", "dtype", "holds", "way_out"),
    [
        ([60000.0, 60000.0], torch.float16, torch.float32, "float32"),
        ([2e38, 2e38], torch.bfloat16, torch.float64, "float64"),
        ([3e38, 3e38], torch.float32, torch.float64, "float64"),
        ([2**24, 1], torch.int64, torch.float64, "float64"),
        ([2**24, 1], torch.int32, torch.float64, "float64"),
    ],
)
def test_a_sum_that_its_dtype_cannot_hold(
    tmp_path: Path, values: list[float], dtype: torch.dtype, holds: torch.dtype, way_out: str
) -> None:
    rewards = torch.tensor(values, dtype=dtype)[:, None]
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(one_episode(rewards))
        with pytest.raises(SumTooLarge, match=rf"next/reward .*dtype=torch.{way_out}"):
            n_step(storage, [0], 2, 1.0)
        assert n_step(storage, [0], 1, 1.0)["next", "reward"] == values[0]
        found = n_step(storage, [0], 2, 1.0, dtype=holds)["next", "reward"]
        with pytest.raises(ValueError, match="floating-point dtype"):
            n_step(storage, [0], 2, 1.0, dtype=torch.int64)
    assert found.dtype == holds
    assert found.item() == rewards.double().sum()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.bool])
def test_small_whole_numbers_and_a_whole_gamma(tmp_path: Path, dtype: torch.dtype) -> None:
    rewards = torch.full((300, 1), 1 if dtype is torch.bool else 100).to(dtype)
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(one_episode(rewards))
        found = n_step(storage, [0], 300, 1)
    assert found["next", "reward"].item() == rewards.double().sum()
    assert found["gamma"].tolist() == [[1.0]]


def test_rewards_that_are_infinite_stay_so(tmp_path: Path) -> None:
    rewards = torch.tensor([1.0, float("inf"), float("nan")])[:, None]
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(one_episode(rewards))
        found = n_step(storage, slice(None), 2, 0.5)["next", "reward"][:, 0]
    assert found[0] == float("inf")
    assert found[1:].isnan().all()


def test_whole_rewards_that_no_float_holds(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(one_episode(torch.tensor([[2**53 + 1], [-(2**53)]])))
        with pytest.raises(SumTooLarge, match="without rounding"):
            n_step(storage, [0], 2, 1.0, dtype=torch.float64)


def test_rewards_that_are_not_there(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(one_episode(torch.ones(3, 1)))
        with pytest.raises(ColumnsMissing, match="no next/agents/reward"):
            n_step(storage, [0], 2, 1.0, reward_key=[("agents", "reward")])
