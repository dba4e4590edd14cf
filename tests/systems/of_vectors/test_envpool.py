"""Test EnvPool with both of its APIs: no rows for reset slots, and true final observations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import envpool
import gymnasium
import numpy as np
import pytest
import torch
from torchrl.data import Unbounded

from tallyroll.collector import (
    GymnasiumVectorEnv,
    Info,
    MultiprocessCollector,
    SyncCollector,
    replay,
)
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra
from tallyroll.collector.ext.systems.envpool import EnvPoolSystem
from tallyroll.collector.ext.systems.envpool.qt import LINKED, made_with_qt
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import open_storage, verify

from arrays_kit import Stepped, by_workers_and_resumed, compare, rows_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*precision lowered by casting to float32:UserWarning"
)
SHORT: dict[str, int] = {
    "CartPole-v1": 15,
    "Pendulum-v1": 7,
    "Taxi-v3": 9,
    "HalfCheetah-v4": 6,
    "CartpoleBalance-v1": 5,
    "Pong-v5": 4,
}
APIS = ("gymnasium", "dm")


def made(task: str, api: str, lanes: int = 3, seeds: Any = None) -> Any:
    seeds = lane_seeds(5, lanes, 0) if seeds is None else seeds
    return envpool.make(
        task, api, num_envs=lanes, seed=list(seeds), max_episode_steps=SHORT[task], num_threads=1
    )


def asynchronous(api: str, lanes: int = 6, batch: int = 2, seeds: Any = None) -> Any:
    seeds = lane_seeds(5, lanes, 0) if seeds is None else seeds
    sizes = {"num_envs": lanes, "batch_size": batch, "num_threads": 2}
    return envpool.make("CartPole-v1", api, seed=list(seeds), max_episode_steps=15, **sizes)


def factory(task: str, api: str) -> Callable[[], Any]:
    """Return a factory that always uses the same seeds."""
    return lambda: made(task, api)


class Contract(SystemContract):
    task: ClassVar[str] = "CartPole-v1"
    api: ClassVar[str] = "gymnasium"
    steps = 90

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        return EnvPoolSystem(made(self.task, self.api, lanes, seeds))


class TestGymnasiumApi(Contract):
    pass


class TestDmApi(Contract):
    api = "dm"


class TestParts(Contract):
    task = "CartpoleBalance-v1"


class TestPartsOfTheDmApi(TestParts):
    api = "dm"


class TestAsynchronous(Contract):
    lanes = 6

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        return EnvPoolSystem(asynchronous(self.api, lanes, lanes // 3, seeds))


class TestAsynchronousByTheDmApi(TestAsynchronous):
    api = "dm"


class TestIntegers(Contract):
    task = "Taxi-v3"


def by_hand(env: Any, task: str, api: str) -> Any:
    """Return first observations and a step function, with EnvPool's own interface."""
    names = ("position", "velocity") if task.startswith("CartpoleB") else None

    def keyed(obs: Any) -> dict[str, Any]:
        if names is None:
            return {"observation": np.array(obs.obs if api == "dm" else obs)}
        return {name: np.array(getattr(obs, name) if api == "dm" else obs[name]) for name in names}

    def gymnasium_step(action: Any) -> Stepped:
        obs, reward, terminated, truncated, info = env.step(action)
        seen = keyed(obs)
        return Stepped(seen, seen, reward, terminated, truncated, info["elapsed_step"] == 0)

    def dm_step(action: Any) -> Stepped:
        made = env.step(action)
        seen, last = keyed(made.observation), made.step_type == 2
        none = np.zeros_like(last)  # most tasks have discount 0 at a time limit, too
        return Stepped(seen, seen, made.reward, last, none, made.step_type == 0)

    if api == "dm":
        return keyed(env.reset().observation), dm_step
    return keyed(env.reset()[0]), gymnasium_step


@pytest.mark.parametrize("task", SHORT)
def test_rows_are_what_envpool_returns_by_either_api(task: str) -> None:
    many = 60 if task == "Pong-v5" else 160
    rows = {}
    for api in APIS:
        torch.manual_seed(0)  # the same random actions
        rows[api] = rows_of(factory(task, api), frames_per_batch=many // 2, total_frames=many)
    assert compare(rows["gymnasium"], 3, *by_hand(made(task, "gymnasium"), task, "gymnasium")) > 5
    for key in rows["dm"].keys(True, True):
        assert torch.equal(rows["dm"][key], rows["gymnasium"][key]), key
    ends = rows["dm"]["next", "truncated"]
    assert ends.any()
    assert (rows["dm"]["collector", "step"][ends[:, 0]] == SHORT[task] - 1).all()


def test_the_dm_api_is_not_taken_for_one_lane_of_dm_control() -> None:
    from tallyroll.collector.ext.systems.dm_control import DmControlSystem

    env = made("CartPole-v1", "dm")
    try:
        assert DmControlSystem.adopt(env) is None
        assert DmControlSystem.adopt([env]) is None
        assert isinstance(registry.adopt(env), EnvPoolSystem)
    finally:
        env.close()


def test_the_dm_api_by_hand() -> None:
    rows = rows_of(factory("CartPole-v1", "dm"), frames_per_batch=90, total_frames=90)
    rows["next", "terminated"] |= rows["next", "truncated"]
    rows["next", "truncated"][:] = False
    hand = by_hand(made("CartPole-v1", "dm"), "CartPole-v1", "dm")
    assert compare(rows, 3, *hand) > 3


def test_reset_slots_are_counted_apart() -> None:
    with SyncCollector(
        factory("CartPole-v1", "gymnasium"), None, frames_per_batch=90, total_frames=180
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
        ledger = collector.ledger
    ends = int((rows["next", "terminated"] | rows["next", "truncated"]).sum())
    assert ledger.executed - ledger.discarded == 180
    assert ends - 3 <= ledger.reset_slots <= ends


def test_workers_and_a_resume_by_name(tmp_path: Path) -> None:
    options = {"max_episode_steps": 9, "num_threads": 1}
    _, resumed, _ = by_workers_and_resumed(
        "envpool:CartPole-v1",
        tmp_path / "run",
        120,
        80,
        num_envs=4,
        frames_per_batch=40,
        env_kwargs=options,
    )
    again = made("CartPole-v1", "gymnasium", 4, lane_seeds(2, 4, 1)).reset()[0]
    assert torch.equal(resumed["observation"][0], torch.from_numpy(again[0]))


@pytest.mark.parametrize("limit", [None, 5])
def test_infos_are_columns(limit: int | None) -> None:
    """Infos of a reset by ids are columns, too. It returns rows of these lanes alone."""
    rows = rows_of(
        factory("CartPole-v1", "gymnasium"),
        frames_per_batch=45,
        total_frames=90,
        info_keys=["elapsed_step", "players/env_id"],
        max_frames_per_traj=limit,
    )
    step, lane = rows["collector", "step"], rows["collector", "lane"]
    assert rows["next", "done"].sum() > 5
    assert torch.equal(rows["elapsed_step"].long(), step)
    assert torch.equal(rows["next", "elapsed_step"].long(), step + 1)
    assert torch.equal(rows["players", "env_id"], lane)


def test_infos_by_either_api_and_in_workers(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 60, "total_frames": 60, "seed": 3}
    arguments |= {"num_envs": 2, "info_keys": ["lives", Info("ram", "uint8", shape=(128,))]}
    limit = {"max_episode_steps": 9, "num_threads": 1}
    rows = {
        api: rows_of("envpool:Breakout-v5", env_kwargs={**limit, "env_type": api}, **arguments)
        for api in APIS
    }
    assert rows["dm"]["lives"].unique().tolist() == [5]
    assert (rows["dm"]["ram"] != rows["dm"]["next", "ram"]).any()
    for key in rows["dm"].keys(True, True):
        assert torch.equal(rows["dm"][key], rows["gymnasium"][key]), key
    with MultiprocessCollector(
        "envpool:Breakout-v5", env_kwargs=limit, num_workers=2, **arguments
    ) as collector:
        together = torch.cat([batch.clone() for batch in collector])
    for key in ("lives", "ram", ("next", "ram")):
        assert torch.equal(together[key], rows["dm"][key]), key
    with pytest.raises(
        ArgumentError, match=r"'score' is not in the infos of the first reset\. The known"
    ):
        rows_of(
            factory("CartPole-v1", "dm"), info_keys=["score"], frames_per_batch=6, total_frames=6
        )


@pytest.mark.parametrize("api", APIS)
def test_lanes_in_any_order_have_the_rows_of_lanes_in_step(api: str) -> None:
    """Each lane's rows equal those of its actions replayed one by one, for all of its calls."""
    with SyncCollector(
        lambda: asynchronous(api), None, frames_per_batch=70, total_frames=700, seed=None
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
        ledger = collector.ledger
    assert len(rows) == ledger.stored == 700
    ends = rows["next", "done"] & ~rows["collector", "cut"][:, None]
    of_lane = [rows[rows["collector", "lane"] == lane] for lane in range(6)]
    assert min(map(len, of_lane)) > 20
    assert 0 < ledger.reset_slots <= int(ends.sum())
    in_step = made("CartPole-v1", "gymnasium", 6)
    calls = [
        [
            None if reset else row
            for row in each
            for reset in ([False, True] if over(row) else [False])
        ]
        for each in of_lane
    ]
    seen = in_step.reset()[0]
    for index in range(max(map(len, calls))):
        now = [each[index] if index < len(each) else None for each in calls]
        acts = np.array([0 if row is None else int(row["action"]) for row in now])
        after, reward, terminated, truncated, _ = in_step.step(acts)
        for lane, row in enumerate(now):
            if row is not None:
                assert np.array_equal(row["observation"].numpy(), seen[lane])
                assert np.array_equal(row["next", "observation"].numpy(), after[lane])
                assert row["next", "reward"].item() == reward[lane]
                assert row["next", "terminated"].item() == terminated[lane]
                assert row["next", "truncated"].item() == truncated[lane]
        seen = after


def over(row: Any) -> bool:
    return bool(row["next", "terminated"] | row["next", "truncated"])


def test_lanes_in_any_order_with_infos_workers_and_a_resume(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_envs": 8, "frames_per_batch": 50, "storage": tmp_path / "run"}
    arguments |= {"info_keys": ["elapsed_step", "env_id"]}
    arguments |= {"env_kwargs": {"batch_size": 2, "num_threads": 2, "max_episode_steps": 9}}
    rows_of("envpool:CartPole-v1", seed=2, total_frames=150, **arguments)
    rows_of("envpool:CartPole-v1", resume=True, total_frames=300, **arguments)
    with MultiprocessCollector(
        "envpool:CartPole-v1",
        num_workers=2,
        mode="async",
        resume=True,
        total_frames=500,
        **arguments,
    ) as collector:
        list(collector)
    assert verify(tmp_path / "run").sound
    with open_storage(tmp_path / "run") as storage:
        rows = storage.get(slice(0, 500))
    step, lane = rows["collector", "step"], rows["collector", "lane"]
    assert torch.equal(rows["elapsed_step"].long(), step)
    assert torch.equal(rows["next", "elapsed_step"].long(), step + 1)
    assert torch.equal(rows["env_id"][:300], lane[:300])
    assert torch.equal(rows["env_id"][300:], lane[300:] % 4)
    assert (rows["next", "truncated"][:, 0] == (step == 8)).all()
    with pytest.raises(EnvironmentRefused, match="max_frames_per_traj"):
        rows_of(
            lambda: asynchronous("dm"), max_frames_per_traj=4, frames_per_batch=6, total_frames=6
        )


def test_seeds_are_taken_when_it_is_made() -> None:
    env = made("CartPole-v1", "gymnasium")
    few: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 20}
    with pytest.raises(ArgumentError, match=r"accepts seeds only when it is made. Pass a factory"):
        SyncCollector(env, None, seed=1, **few)
    assert len(rows_of(env, **few)) == 20

    def make(seeds: Any = None) -> Any:
        return made("CartPole-v1", "gymnasium", 3, seeds)

    one, other = rows_of(make, seed=1, **few), rows_of(make, seed=1, **few)
    assert torch.equal(one["observation"], other["observation"])
    named = rows_of("envpool:CartPole-v1", num_envs=3, seed=1, **few)
    assert torch.equal(one["observation"][0], named["observation"][0])


def test_a_time_limit_of_the_collector() -> None:
    rows = rows_of(
        "envpool:CartPole-v1",
        num_envs=3,
        frames_per_batch=60,
        total_frames=60,
        seed=1,
        max_frames_per_traj=4,
    )
    assert int(rows["collector", "step"].max()) == 3
    assert (rows["next", "truncated"][:, 0] == (rows["collector", "step"] == 3)).all()


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("Nothing-v0", {}, "Nothing-v0 is not supported"),
        ("CartPole-v1", {"max_episode_steps": "a"}, "^envpool cannot make .*$"),
        ("CartPole-v1", {"shade": 1}, "unexpected keyword argument 'shade'"),
        ("CartPole-v1", {"env_type": "pong"}, "env_type should be one of"),
        ("CartPole-v1", {"seed": 3}, r"the collector sets .*, got \['seed'\]"),
        ("CartPole-v1", {"batch_size": -2}, "envpool cannot make 'CartPole-v1'"),
    ],
)
def test_what_cannot_be_made(name: str, kwargs: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(f"envpool:{name}", frames_per_batch=4, total_frames=4, env_kwargs=kwargs)


def test_what_is_not_driven(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(env: Any, match: str) -> None:
        with pytest.raises(EnvironmentRefused, match=match):
            SyncCollector(env, frames_per_batch=4, total_frames=4)

    refused(
        asynchronous("gymnasium", 4, 3), "multiple of batch_size, got num_envs=4 and batch_size=3"
    )
    used = asynchronous("gymnasium", 4)
    used.async_reset()
    for _ in range(2):
        ids = used.recv()[-1]["env_id"]
        used.send(np.zeros(2, int), ids)
    refused(used, "already stepped. Pass a new EnvPool, or a factory")
    env = made("CartPole-v1", "gymnasium")
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
    refused(wrapped, "Pass the result of envpool.make to the collector, or the id")
    with pytest.raises(EnvironmentRefused, match="wrappers hide EnvPool"):
        GymnasiumVectorEnv(env)
    assert isinstance(registry.adopt(env), EnvPoolSystem)
    assert EnvPoolSystem.adopt(wrapped) is None
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[envpool\]"'):
        SyncCollector("envpool:CartPole-v1", frames_per_batch=4, total_frames=4)


def test_bounds_that_nobody_knows_are_none() -> None:
    space = envpool.make_spec("CartpoleBalance-v1").gymnasium_observation_space
    assert space["velocity"].low.min() > 0, "EnvPool declares bounds; look whether they are right"
    found = EnvPoolSystem(made("CartpoleBalance-v1", "gymnasium")).declares.observation
    assert isinstance(found["velocity",], Unbounded)


def test_procgen_keeps_final_observations() -> None:
    task = "BossfightEasy-v0"
    arguments: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 150, "total_frames": 300}
    rows = rows_of(f"envpool:{task}", seed=1, **arguments)  # Qt is loaded from here on
    env = envpool.make(task, "gymnasium", num_envs=2, seed=lane_seeds(1, 2, 0))
    assert compare(rows, 2, *by_hand(env, task, "gymnasium")) >= 4
    ends = (rows["next", "terminated"] | rows["next", "truncated"])[:-1, 0]
    finals, firsts = rows["next", "observation"][:-1][ends], rows["observation"][1:][ends]
    assert all(not torch.equal(a, b) for a, b in zip(finals, firsts, strict=True))


class Broken(metadata.PackagePath):
    """A file of a wheel that is not a library."""

    def locate(self) -> Path:
        return Path(__file__)


@pytest.mark.parametrize("files", [None, [], [Broken(f"lib/{name}") for name in LINKED]])
@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (
            "requires the system Qt 5 runtime",
            r'Qt 5 runtime\. Run pip install "tallyroll\[envpool-pro',
        ),
        ("no module named b", "envpool cannot make 'a': no module named b$"),
    ],
)
def test_what_a_task_lacks_is_told(
    said: str, wanted: str, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> Any:
        if files is None:
            raise metadata.PackageNotFoundError(name)
        return files

    def make() -> None:
        raise ImportError(said)

    monkeypatch.setattr(metadata, "files", found)
    with pytest.raises(MissingExtra, match=wanted):
        made_with_qt("a", make)


@pytest.mark.parametrize("kwargs", [{}, {"batch_size": 2}])
def test_what_is_stored_comes_out_again(kwargs: dict[str, Any], tmp_path: Path) -> None:
    with SyncCollector(
        "envpool:CartPole-v1",
        num_envs=4,
        frames_per_batch=50,
        total_frames=200,
        seed=2,
        storage=tmp_path / "a",
        env_kwargs=kwargs,
    ) as collector:
        for _ in collector:
            pass
    report = replay(tmp_path / "a", "all")
    assert (report.same, report.rows) == (True, 200)
