"""Compare recorded rows with those of a collector, and random loops with a plain model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase

from tallyroll.collector import (
    Recorder,
    StateError,
    SyncCollector,
)
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.storage import open_storage, verify

from collect_kit import ByObservation, act, assert_same, balanced
from oracles import KINDS, Kind, OracleEnv, OracleVectorEnv, make_oracle_vec

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]
VERSION = ("collector", "policy_version")


def rows_of(path: Path) -> TensorDictBase:
    """Return all rows of a storage, ordered by trajectory and step."""
    assert verify(path).sound
    with open_storage(path) as storage:
        rows: TensorDictBase = storage.get(slice(0, storage.head))
    order = np.lexsort((rows["collector", "step"], rows["collector", "traj_ids"]))
    return rows[torch.from_numpy(order)]


def leaves_of(obs: Any) -> list[torch.Tensor]:
    """Return the arrays of an observation, in the order of the columns."""
    if isinstance(obs, dict):
        return [leaf for part in obs.values() for leaf in leaves_of(part)]
    if isinstance(obs, tuple):
        return [leaf for part in obs for leaf in leaves_of(part)]
    return [torch.as_tensor(np.asarray(obs))]


def chosen(obs: Any, kind: Kind, lanes: int | None) -> Any:
    """Return the actions of `ByObservation`."""
    order = {"dict": ["pos", "img", "inner"]}.get(kind)
    obs = {name: obs[name] for name in order} if order else obs
    found = act(leaves_of(obs), "discrete", torch.Size(() if lanes is None else [lanes])).numpy()
    return found if lanes is not None else int(found)


def loop(envs: Any, kind: Kind = "float", seed: Any = None, *, steps: int = 10_000) -> None:
    """Step until the recorder is full. Reset lanes that do not reset themselves."""
    lanes = getattr(envs, "num_envs", None)
    waits = lanes is None or getattr(envs.unwrapped, "autoreset_mode", None) is MODES[2]
    obs, _ = envs.reset(seed=seed)
    for _ in range(steps):
        if envs.full:
            return
        obs, _, terminated, truncated, _ = envs.step(chosen(obs, kind, lanes))
        ended = np.logical_or(terminated, truncated)
        if waits and ended.any() and not envs.full:
            options = None if lanes is None else {"reset_mask": ended}
            obs, _ = envs.reset(options=options)


# --- the same rows as a collector -----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_gives_the_rows_that_a_collector_stores(
    mode: AutoresetMode, kind: Kind, tmp_path: Path
) -> None:
    make = partial(make_oracle_vec, 3, LENGTHS, mode=mode, kind=kind, ends="mixed")
    infos = {"info_keys": ["lives"]}
    with Recorder(
        make(), storage=tmp_path / "own", total_frames=50, commit_every=7, **infos
    ) as envs:
        envs.policy_version = 0
        loop(envs, kind, lane_seeds(5, 3, 0))
        recorded = envs.ledger
    collect = SyncCollector(
        make(),
        ByObservation(kind),
        frames_per_batch=21,
        total_frames=50,
        seed=5,
        storage=tmp_path / "collected",
        **infos,
    )
    with collect:
        collect.collect(50)
        counts = collect.ledger.counts()
    assert balanced(recorded)
    own = recorded.counts()
    # The collector stops a lane's autoreset at the last row, and knows what chose actions.
    for name in ("policy_calls_on_reset_slots",):
        own.pop(name), counts.pop(name)
    assert own == counts
    assert_same(rows_of(tmp_path / "own"), rows_of(tmp_path / "collected"))


@pytest.mark.parametrize("kind", ["float", "dict", "tuple", "seeded"])
def test_a_single_environment_gives_the_rows_that_a_collector_stores(
    kind: Kind, tmp_path: Path
) -> None:
    make = partial(OracleEnv, 0, [3, 1, 4], kind=kind, ends="mixed")
    with Recorder(
        make(), storage=tmp_path / "own", total_frames=31, commit_every=4, info_keys=["tick"]
    ) as env:
        env.policy_version = 0
        loop(env, kind, lane_seeds(5, 1, 0)[0])
        recorded = env.ledger
    with SyncCollector(
        make,
        ByObservation(kind),
        frames_per_batch=8,
        total_frames=31,
        seed=5,
        storage=tmp_path / "collected",
        info_keys=["tick"],
    ) as collector:
        collector.collect(31)
        assert recorded.counts() == collector.ledger.counts()
    assert_same(rows_of(tmp_path / "own"), rows_of(tmp_path / "collected"))


@pytest.mark.parametrize("mode", MODES)
def test_an_async_vector_and_wrappers_give_the_rows_of_a_collector(
    mode: AutoresetMode, tmp_path: Path
) -> None:
    def make() -> Any:
        inner = make_oracle_vec(2, LENGTHS, mode=mode, cls="async")
        return gym.wrappers.vector.ClipReward(inner, 0, 3)

    with Recorder(make(), storage=tmp_path / "own", total_frames=33, commit_every=5) as envs:
        envs.policy_version = 0
        loop(envs, "float", lane_seeds(5, 2, 0))
    env = make()
    with SyncCollector(
        env,
        ByObservation(),
        frames_per_batch=11,
        total_frames=33,
        seed=5,
        storage=tmp_path / "collected",
    ) as collector:
        collector.collect(33)
    env.close()
    assert_same(rows_of(tmp_path / "own"), rows_of(tmp_path / "collected"))
    with open_storage(tmp_path / "own") as storage:
        run = storage.manifest["runs"][-1]
    assert run["call"]["recorded"] == ["ClipReward", "AsyncVectorEnv"]
    assert run["environment"]["type"] == "AsyncVectorEnv"


def test_a_vector_of_its_own_that_reuses_its_arrays(tmp_path: Path) -> None:
    with Recorder(
        OracleVectorEnv(3, LENGTHS, kind="dict"), storage=tmp_path / "own", total_frames=40
    ) as envs:
        envs.policy_version = 0
        loop(envs, "dict", 5)
    with SyncCollector(
        OracleVectorEnv(3, LENGTHS, kind="dict"),
        ByObservation("dict"),
        frames_per_batch=10,
        total_frames=40,
        storage=tmp_path / "collected",
    ) as collector:
        collector.collect(40)
    assert_same(rows_of(tmp_path / "own"), rows_of(tmp_path / "collected"))


# --- random loops against a plain model -----------------------------------------------------------


class Failure(Exception):
    """Raised by an environment on request."""


class Failing(gym.vector.VectorWrapper):
    """A vector whose next call raises, after it stepped, if `fails` is True."""

    fails = False

    def step(self, actions: Any) -> Any:
        out = self.env.step(actions)
        self._raise()
        return out

    def reset(self, **kwargs: Any) -> Any:
        out = self.env.reset(**kwargs)
        self._raise()
        return out

    def _raise(self) -> None:
        if self.fails:
            self.fails = False
            raise Failure


class Model:
    """The rows of each lane, kept one by one."""

    def __init__(self, lanes: int, mode: AutoresetMode, total: int) -> None:
        self.lanes, self.mode, self.total = lanes, mode, total
        self.rows: list[tuple[Any, ...]] = []
        self.trajectory = [0] * lanes
        self.step = [0] * lanes
        self.obs: list[Any] = [None] * lanes
        self.pending = [False] * lanes
        self.discarded = 0

    @property
    def full(self) -> bool:
        return len(self.rows) >= self.total

    def reset(self, obs: Any, mask: Any) -> None:
        for lane in np.flatnonzero(mask):
            self.cut(lane)
            self.obs[lane], self.pending[lane] = np.array(obs[lane]), False

    def cut(self, lane: int) -> None:
        self.trajectory[lane] += self.step[lane] > 0
        self.step[lane] = 0

    def stepped(self, action: Any, version: int, mark: Any, out: Any) -> None:
        obs, reward, terminated, truncated, info = out
        for lane in range(self.lanes):
            last, ended = np.array(obs[lane]), bool(terminated[lane] or truncated[lane])
            final = last
            if ended and self.mode is AutoresetMode.SAME_STEP:
                final = np.array(info["final_obs"][lane])
            if self.pending[lane]:
                self.pending[lane] = False
            elif self.full:
                self.discarded += 1
            else:
                flags = bool(terminated[lane]), bool(truncated[lane])
                self.rows.append(
                    (
                        *(lane, self.trajectory[lane], self.step[lane]),
                        *(self.obs[lane].tolist(), int(action[lane]), float(reward[lane])),
                        *(final.tolist(), *flags, version, float(mark[lane])),
                    )
                )
                self.step[lane] += 1
                if ended:
                    self.cut(lane)
            self.obs[lane] = last
            self.pending[lane] = ended and self.mode is AutoresetMode.NEXT_STEP


def stored_rows(rows: Any) -> list[tuple[Any, ...]]:
    """Return rows in the form of the model, with trajectories counted by lane."""
    column = {
        name: rows[key].flatten(1).squeeze(-1).tolist()
        if rows[key].ndim > 1
        else rows[key].tolist()
        for name, key in {
            "lane": ("collector", "lane"),
            "id": ("collector", "traj_ids"),
            "step": ("collector", "step"),
            "obs": "observation",
            "action": "action",
            "reward": ("next", "reward"),
            "next": ("next", "observation"),
            "over": ("next", "terminated"),
            "cut": ("next", "truncated"),
            "version": VERSION,
            "mark": "mark",
        }.items()
    }
    numbers: dict[int, dict[int, int]] = {}
    for lane, number in zip(column["lane"], column["id"], strict=True):
        of_lane = numbers.setdefault(lane, {})
        of_lane.setdefault(number, len(of_lane))
    column["id"] = [
        numbers[lane][number] for lane, number in zip(column["lane"], column["id"], strict=True)
    ]
    return list(zip(*column.values(), strict=True))


OPERATIONS = st.sampled_from(
    ["step"] * 12
    + ["mask", "reset", "commit", "fail in step", "fail in reset", "resume", "version"]
)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    lanes=st.integers(1, 4),
    operations=st.lists(OPERATIONS, max_size=80),
    commit_every=st.integers(1, 9),
    total=st.integers(1, 120),
    seed=st.integers(0, 2**31),
)
def test_random_loops_store_what_a_plain_model_keeps(
    tmp_path_factory: pytest.TempPathFactory,
    mode: AutoresetMode,
    lanes: int,
    operations: list[str],
    commit_every: int,
    total: int,
    seed: int,
) -> None:
    path, rng = tmp_path_factory.mktemp("random") / "rows", np.random.default_rng(seed)
    inner = Failing(make_oracle_vec(lanes, LENGTHS, mode=mode, ends="mixed"))
    how: dict[str, Any] = {"total_frames": total, "commit_every": commit_every}
    how["columns"] = {"mark": np.float64}
    model, envs = Model(lanes, mode, total), Recorder(inner, storage=path, **how)
    everything = np.ones(lanes, np.bool_)
    waiting = np.zeros(lanes, np.bool_)

    def reset(mask: Any) -> None:
        options = (
            {"reset_mask": mask.copy()} if mask is not everything or rng.random() < 0.5 else {}
        )
        if mask is everything:
            options = {}
        obs, _ = envs.reset(options=options)
        waiting[mask] = False
        model.reset(obs, mask)

    reset(everything)
    for operation in operations:
        if operation == "step":
            if waiting.any():
                reset(waiting.copy())
            action, mark = rng.integers(0, 2, lanes), rng.random(lanes)
            envs.annotate(mark=mark)
            full, out = envs.full, envs.step(action)
            if not full:
                model.stepped(action, envs.policy_version, mark, out)
            if mode is AutoresetMode.DISABLED:
                waiting |= out[2] | out[3]
        elif operation == "mask":
            mask = rng.random(lanes) < 0.5
            if mask.any():
                reset(mask)
        elif operation == "reset":
            reset(everything)
        elif operation == "commit":
            envs.commit()
        elif operation == "version":
            envs.policy_version += 1
        elif operation == "resume":
            version = envs.policy_version
            envs._finish()  # leaves the environment open
            assert balanced(envs.ledger)
            envs = Recorder(inner, storage=path, resume=True, **how)
            envs.policy_version = version
            reset(everything)
        else:
            if waiting.any():
                reset(waiting.copy())
            inner.fails, was_full, in_step = True, envs.full, operation == "fail in step"
            envs.annotate(mark=rng.random(lanes))
            with pytest.raises(Failure):
                _ = envs.step(rng.integers(0, 2, lanes)) if in_step else envs.reset()
            if not was_full:
                with pytest.raises(StateError, match="reset of all lanes"):
                    envs.step(rng.integers(0, 2, lanes))
            reset(everything)
    envs.close()
    assert balanced(envs.ledger)
    assert envs.ledger.stored == len(model.rows)
    assert envs.ledger.discarded == model.discarded
    assert envs.full == model.full
    if not model.rows:
        return
    assert verify(path).sound
    with open_storage(path) as storage:
        found = stored_rows(storage.get(slice(0, storage.head)))
    key = lambda row: row[:3]  # noqa: E731
    assert sorted(found, key=key) == sorted(model.rows, key=key)
