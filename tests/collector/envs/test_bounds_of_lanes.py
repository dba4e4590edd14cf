"""Vectors whose lanes have different bounds are checked lane by lane."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from tallyroll.collector import MultiprocessCollector, SyncCollector, evaluate
from tallyroll.collector.errors import PolicyError, TransitionError
from tallyroll.storage import open_storage, verify
from tallyroll.storage.ext.verification import record_checks

LANES = 4
BUDGET: dict[str, Any] = {"frames_per_batch": 16, "total_frames": 160, "seed": 0}


class Wide(gym.Env[Any, Any]):
    """Environment that reaches both bounds of its space, which is ``k + 1`` times that of lane 0.

    Args:
        lane: k.
        wrong: passes a bound in the third step of an episode, by less than the next lane's.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, lane: int, kind: str = "box", *, wrong: bool = False) -> None:
        self.lane, self.kind, self.wrong, self.t = lane, kind, wrong, 0
        self.high, many = 10.0 * (lane + 1), 10 * (lane + 1)
        box = spaces.Box(-self.high, self.high, (2,), np.float64)
        self.observation_space = {
            "box": box,
            "discrete": spaces.Discrete(many),
            "dict": spaces.Dict(
                {"a": box, "n": spaces.Dict({"d": spaces.Discrete(many, start=lane)})}
            ),
            "tuple": spaces.Tuple((box, spaces.MultiDiscrete([many, 3]))),
        }[kind]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._seen(), 0.0, self.t == 5, False, {}

    def _seen(self) -> Any:
        over = int(self.wrong and self.t == 3)
        pair, top = np.array([self.high + over, -self.high]), int(self.high) - 1 + over
        return {
            "box": pair,
            "discrete": np.int64(top),
            "dict": {"a": pair, "n": {"d": np.int64(top + self.lane)}},
            "tuple": (pair, np.array([top, 2])),
        }[self.kind]


def vector(
    wrong: int | None = None, kind: str = "box", cls: Any = SyncVectorEnv, **more: Any
) -> Any:
    more |= {"context": "fork"} if cls is AsyncVectorEnv else {}
    lanes = [lambda k=k: Wide(k, kind, wrong=k == wrong) for k in range(LANES)]
    return cls(lanes, observation_mode="different", **more)


def rows_of(collector: Any) -> Any:
    with collector:
        return torch.cat([batch.clone() for batch in collector])


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("kind", ["box", "discrete", "dict", "tuple"])
@pytest.mark.parametrize("frames", [4, 160])
def test_each_lane_has_its_own_bounds(kind: str, mode: AutoresetMode, frames: int) -> None:
    options = BUDGET | {"frames_per_batch": frames}
    assert len(rows_of(SyncCollector(vector(kind=kind, autoreset_mode=mode), **options))) == 160
    wrong = vector(1, kind, autoreset_mode=mode)
    with pytest.raises(TransitionError, match=r"at lane 1, step 2 .* expected \["):
        rows_of(SyncCollector(wrong, **options))
    wrong = vector(1, kind, autoreset_mode=mode)
    kept = rows_of(SyncCollector(wrong, **options, validate="off"))
    assert len(kept) == 160


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_lanes_in_processes(mode: AutoresetMode) -> None:
    for wrong in (None, 2):
        env = vector(wrong, cls=AsyncVectorEnv, autoreset_mode=mode)
        if wrong is None:
            assert len(rows_of(SyncCollector(env, **BUDGET))) == 160
        else:
            with pytest.raises(
                TransitionError, match=r"at lane 2.* expected \[-30, 30\] .* got 31"
            ):
                rows_of(SyncCollector(env, **BUDGET))
        env.close()


def test_a_factory_and_an_evaluation() -> None:
    numbers = count()
    made = rows_of(SyncCollector(lambda: Wide(next(numbers)), num_envs=LANES, **BUDGET))
    wide = 10.0 * (made["collector", "lane"] + 1)
    assert torch.equal(made["observation"], torch.stack([wide, -wide], 1).double())
    assert len(evaluate(None, vector(), episodes=6).episodes) == 6


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_have_parts_of_the_lanes(mode: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_workers": 2, "mode": mode, "transport": "thread"}
    path = tmp_path / "rows"
    rows_of(MultiprocessCollector(vector, storage=path, **options, **BUDGET))
    assert verify(path).sound
    with open_storage(path) as storage:
        said = storage.manifest["runs"][0]["spaces"]["observation"]
    assert said["of_lanes"]["shape"] == [2 * LANES, 2]
    with pytest.raises(TransitionError, match=r"at lane [26].* expected \[-30, 30\] .* got 31"):
        rows_of(MultiprocessCollector(lambda: vector(2), **options, **BUDGET))


@pytest.mark.parametrize("kind", ["box", "discrete", "dict", "tuple"])
def test_verify_checks_each_row_against_its_lane(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    with SyncCollector(vector(kind=kind), storage=good, **BUDGET) as collector:
        collector.collect(160)
    assert verify(good).sound
    with SyncCollector(
        vector(kind=kind), storage=good, **(BUDGET | {"total_frames": 320}), resume=True
    ) as collector:
        assert sum(map(len, collector)) == 160
    assert verify(good).sound
    with SyncCollector(vector(1, kind), storage=bad, **BUDGET, validate="off") as c:
        c.collect(160)
    # Rows of a run that was not validated are skipped by default; this test includes them.
    monkeypatch.setattr(record_checks, "UNCHECKED", "")
    report = verify(bad)
    assert {each.check for each in report.findings} == {"spaces"}
    assert {place.lane for each in report.findings for place in each.places} == {1}


class Steered(VectorEnv[Any, Any, Any]):
    """Native vector environment whose lanes accept and return different numbers."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = LANES
    tops = np.arange(1, LANES + 1, dtype=np.float32)[:, None]
    single_observation_space = single_action_space = spaces.Box(-1, 1, (1,), np.float32)
    observation_space = action_space = spaces.Box(-tops, tops, (LANES, 1), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.tops.copy(), {}

    def step(self, actions: Any) -> Any:
        self.taken = actions
        no = np.zeros(LANES, np.bool_)
        return actions.copy(), np.zeros(LANES), no, no.copy(), {}


def test_actions_of_a_vector_keep_to_the_bounds_of_their_lane() -> None:
    rows = rows_of(SyncCollector(Steered(), **(BUDGET | {"total_frames": 1600})))
    tops, actions = rows["collector", "lane"] + 1.0, rows["action"][:, 0].abs()
    assert (actions <= tops).all()
    for lane in range(LANES):
        most = actions[rows["collector", "lane"] == lane].max()
        assert lane + 0.8 < most <= lane + 1
    assert len(rows_of(SyncCollector(Steered(), _all(0.9), **BUDGET))) == 160
    with pytest.raises(PolicyError, match=r"at lane 1.* expected \[-2, 2\] .* got 2.5"):
        rows_of(SyncCollector(Steered(), _all(1.25, lane=1), **BUDGET, validate="raise"))


def _all(share: float, lane: int | None = None) -> Any:
    tops = torch.arange(1.0, LANES + 1)[:, None]
    shares = torch.full((LANES, 1), 0.5 if lane is not None else share)
    if lane is not None:
        shares[lane] = share

    calls = count()

    def policy(td: Any) -> Any:
        later = next(calls) > 3  # the first values are checked before the run
        return td.set("action", tops * (shares if later else 0.5))

    return policy
