"""Test gym3's environments and Procgen's.

Lost observations are flagged, and all else is as the environments return it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # procgen leaks a file, and the old gym is out of date
    import gym3
    from procgen.env import ProcgenGym3Env

from tallyroll.collector import Info, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
    SpaceError,
)
from tallyroll.collector.ext.systems.procgen import ProcgenSystem
from tallyroll.collector.testing import SystemContract

from arrays_kit import Stepped, by_workers_and_resumed, compare, rows_of

EASY: dict[str, Any] = {"distribution_mode": "easy", "num_threads": 1}


def bossfight(lanes: int = 3, seeds: Any = None) -> Any:
    seed = 7 if seeds is None else seeds[0]
    return ProcgenGym3Env(lanes, "bossfight", rand_seed=seed, **EASY)


class Counts(gym3.Env):  # type: ignore[misc]
    """Observes nested parts. Lane ``l`` ends after ``2 + l`` steps."""

    def __init__(self, num: int = 3, action: Any = None) -> None:
        parts = {
            "step": gym3.types.TensorType(gym3.types.Discrete(9, "uint8"), ()),
            "far": gym3.types.TensorType(gym3.types.Real(), (2,)),
        }
        space = gym3.types.DictType(inner=gym3.types.DictType(**parts))
        super().__init__(space, action or gym3.types.discrete_scalar(3), num)
        self.steps, self.given = np.zeros(num, np.uint8), np.zeros(num)

    def observe(self) -> Any:
        far = np.stack([self.given, self.steps], -1).astype(np.float32)
        return self.given, {"inner": {"step": self.steps, "far": far}}, self.steps == 0

    def act(self, ac: Any) -> None:
        assert ac.dtype == np.int64
        self.given = ac.astype(np.float64)
        self.steps += 1
        self.steps[self.steps >= 2 + np.arange(self.num)] = 0


class Tells(Counts):
    """Infos describe the current observation."""

    def get_info(self) -> Any:
        def one(lane: int, step: int) -> Any:
            odd = {"odd": step} if step % 2 else {}
            return {
                "level_seed": step + 10 * lane,
                "prev_level": {"done": np.int32(not step)},
            } | odd

        return [one(lane, int(step)) for lane, step in enumerate(self.steps)]


class TestProcgen(SystemContract):
    steps = 250

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        return ProcgenSystem(bossfight(lanes, seeds))


class TestNested(SystemContract):
    steps = 30

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        return ProcgenSystem(Counts(lanes))


@pytest.mark.parametrize("wrap", [False, True])
def test_rows_are_what_procgen_returns_and_finals_are_flagged(wrap: bool) -> None:
    def make(seeds: Any = None) -> Any:
        made = bossfight(3, seeds)
        return gym3.ExtractDictObWrapper(made, "rgb") if wrap else made

    rows = rows_of(make, frames_per_batch=150, total_frames=450, seed=5)
    env = bossfight(3, lane_seeds(5, 3, 0))
    name = "observation" if wrap else "rgb"

    def step(action: Any) -> Stepped:
        env.act(action)
        reward, obs, first = env.observe()
        seen = {name: obs["rgb"].copy()}
        return Stepped(seen, seen, reward, first.copy(), np.zeros(3, bool))

    assert compare(rows, 3, {name: env.observe()[1]["rgb"].copy()}, step, lost=True) >= 3
    ends = rows["next", "terminated"][:, 0]
    assert torch.equal(rows["collector", "next_valid"].reshape(-1), ~ends)
    assert not rows["next", "truncated"].any()


def test_infos_are_columns() -> None:
    """Infos of a last step are lost with its observation. Infos of the first one are true."""
    names = ["level_seed", "prev_level/done", Info("odd", "int8", fill=-1)]
    rows = rows_of(lambda: Tells(3), frames_per_batch=30, total_frames=60, info_keys=names)
    seen, valid = rows["inner", "step"].long(), rows["collector", "next_valid"]
    ends = rows["next", "terminated"][:, 0]
    assert ends.sum() > 9
    assert torch.equal(valid, ~ends)
    assert torch.equal(rows["level_seed"], seen + 10 * rows["collector", "lane"])
    assert torch.equal(rows["prev_level", "done"], (seen == 0).int())
    assert torch.equal(rows["odd_given"], seen % 2 == 1)
    assert torch.equal(rows["odd"].long(), torch.where(seen % 2 == 1, seen, -1))
    after = rows["next", "inner", "step"].long()[valid]
    assert torch.equal(rows["next", "level_seed"][valid] % 10, after)


def test_infos_of_procgen_itself() -> None:
    names = ["level_seed", "prev_level_complete"]
    rows = rows_of(lambda: bossfight(), frames_per_batch=300, total_frames=600, info_keys=names)
    env = bossfight()
    told = [info["level_seed"] for info in env.get_info()]
    first = rows["collector", "step"] == 0
    assert rows["level_seed"][first].unique().numel() > 3
    for lane in range(3):
        assert rows["level_seed"][rows["collector", "lane"] == lane][0] == told[lane]
    ids = rows["collector", "traj_ids"]
    for each in ids.unique():
        assert rows["level_seed"][ids == each].unique().numel() == 1


def test_workers_and_a_resume_by_name(tmp_path: Path) -> None:
    rows, resumed, made_of = by_workers_and_resumed(
        "procgen:bossfight",
        tmp_path / "run",
        200,
        100,
        as_one=False,
        num_envs=4,
        frames_per_batch=100,
        env_kwargs=EASY,
    )
    seeds = lane_seeds(2, 4, 0)
    for worker in range(2):  # each makes its own two lanes, seeded by the first of them
        alone = bossfight(2, seeds[2 * worker :]).observe()[1]["rgb"]
        for lane in range(2):
            of_lane = rows[rows["collector", "lane"] == 2 * worker + lane]
            assert np.array_equal(of_lane["rgb"][0].numpy(), alone[lane])
    assert made_of["type"] == "ProcgenGym3Env"
    again = bossfight(4, lane_seeds(2, 4, 1)).observe()[1]["rgb"]
    assert np.array_equal(resumed["rgb"][0].numpy(), again[0])


def test_seeds_resets_and_instances() -> None:
    few: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 20}
    with pytest.raises(ArgumentError, match=r"accepts seeds only when it is made. Pass a factory"):
        SyncCollector(bossfight(), None, seed=1, **few)
    env = bossfight()
    assert len(rows_of(env, **few)) == 20
    with pytest.raises(EnvironmentRefused, match="this one was stepped already"):
        SyncCollector(env, None, **few)
    with pytest.raises(EnvironmentRefused, match="cannot be reset, and there is no factory"):
        rows_of(bossfight(), reset_at_each_iter=True, frames_per_batch=20, total_frames=40)
    one, other = (
        rows_of("procgen:bossfight", num_envs=2, seed=seed, env_kwargs=EASY, **few)
        for seed in (1, 2)
    )
    assert not torch.equal(one["rgb"], other["rgb"])


class Closed(Counts):
    closed: ClassVar[int] = 0

    def close(self) -> None:
        Closed.closed += 1


def test_what_is_adopted_and_described() -> None:
    system = registry.adopt(gym3.ExtractDictObWrapper(bossfight(), "rgb"))
    assert isinstance(system, ProcgenSystem)
    assert system.describe() == {"id": "bossfight", "type": "ProcgenGym3Env"}
    system.close()
    assert ProcgenSystem.adopt(object()) is None
    actions = gym3.types.DictType(a=gym3.types.discrete_scalar(3))
    with pytest.raises(SpaceError, match="action space"):
        SyncCollector(lambda: Closed(2, actions), frames_per_batch=4, total_frames=4)
    assert len(rows_of(lambda: Closed(2), frames_per_batch=4, total_frames=4)) == 4
    assert Closed.closed >= 1


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("nothing", {}, "expected one of .*'coinrun'.* got 'nothing'"),
        ("coinrun", {"shade": 1}, "unexpected keyword argument 'shade'"),
        ("coinrun", {"distribution_mode": "odd"}, "is not a valid distribution mode"),
        ("coinrun", {"num": 3}, "multiple values for argument 'num'"),
    ],
)
def test_what_cannot_be_made(name: str, kwargs: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(f"procgen:{name}", frames_per_batch=4, total_frames=4, env_kwargs=kwargs)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "procgen", None)
    monkeypatch.setitem(sys.modules, "procgen.env", None)
    with pytest.raises(MissingExtra, match="pip install --no-deps gym3 procgen-mirror"):
        SyncCollector("procgen:coinrun", frames_per_batch=4, total_frames=4)
