"""Factories of a single Gymnasium environment, with `num_envs` lanes."""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tallyroll.collector import (
    ArgumentError,
    GymnasiumVectorEnv,
    MultiprocessCollector,
    SyncCollector,
    evaluate,
)
from tallyroll.storage import open_storage

from collect_kit import assert_same
from oracles import OracleEnv

BUDGET: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 63, "seed": 3}


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def rows_of(collector: Any) -> Any:
    with collector:
        return torch.cat(list(collector))


@pytest.mark.parametrize("lanes", [None, 1, 5])
def test_lanes_are_those_of_an_id(lanes: int | None) -> None:
    wanted = rows_of(SyncCollector("CartPole-v1", num_envs=lanes, **BUDGET))
    assert_same(rows_of(SyncCollector(cartpole, num_envs=lanes, **BUDGET)), wanted)


def test_lanes_are_those_of_the_vector_that_a_user_would_make() -> None:
    numbers = count()

    def make() -> OracleEnv:
        return OracleEnv(next(numbers), (3, 4, 6))

    def vector() -> Any:
        lanes = [partial(OracleEnv, lane, (3, 4, 6)) for lane in range(4)]
        return GymnasiumVectorEnv(
            SyncVectorEnv(lanes, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        )

    wanted = rows_of(SyncCollector(vector, **BUDGET))
    assert_same(rows_of(SyncCollector(make, num_envs=4, **BUDGET)), wanted)
    assert next(numbers) == 4, "each is made once"


def test_workers_share_the_lanes_out() -> None:
    wanted = rows_of(SyncCollector("CartPole-v1", num_envs=5, **BUDGET))
    options: dict[str, Any] = {"num_workers": 2, "transport": "thread", **BUDGET}
    assert_same(rows_of(MultiprocessCollector(cartpole, num_envs=5, **options)), wanted)
    two = MultiprocessCollector(cartpole, **options)
    assert sorted(set(rows_of(two)["collector", "lane"].tolist())) == [0, 1]


def test_infos_resumes_and_evaluation(tmp_path: Path) -> None:
    make = partial(OracleEnv, 0, (4,))
    options: dict[str, Any] = {"num_envs": 3, "info_keys": ["lives"], "storage": tmp_path / "rows"}
    rows_of(SyncCollector(make, **(BUDGET | options)))
    with SyncCollector(make, **(BUDGET | options | {"total_frames": 99}), resume=True) as more:
        assert sum(len(batch) for batch in more) == 99 - 63
    with open_storage(tmp_path / "rows") as storage:
        assert len(storage) == 99
        assert set(storage[:]["lives"].flatten().tolist()) <= {1, 2, 3}
    lengths = [episode.length for episode in evaluate(None, make, episodes=6, num_envs=3).episodes]
    assert lengths == [4] * 6


class Closing(gym.Wrapper[Any, Any, Any, Any]):
    """Environment that counts its open instances."""

    open = 0

    def __init__(self) -> None:
        super().__init__(cartpole())
        Closing.open += 1

    def close(self) -> None:
        Closing.open -= 1
        super().close()


@pytest.mark.parametrize(
    ("later", "match"),
    [
        (lambda first: first, "a new Gymnasium environment from each call .* the same one again"),
        (lambda first: 7, "a new Gymnasium environment from each call of the factory, got int"),
        (lambda first: gym.make("Acrobot-v1"), None),
    ],
    ids=["the same", "a number", "of other spaces"],
)
def test_what_is_no_lane_beside_the_first_is_refused_and_all_are_closed(
    later: Callable[[Any], Any], match: str | None
) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(later(made[0]) if len(made) == 2 else Closing())
        return made[-1]

    Closing.open = 0
    with pytest.raises(Exception if match is None else ArgumentError, match=match):
        SyncCollector(make, num_envs=3, **BUDGET)
    assert Closing.open == 0


def test_environments_are_closed_with_the_collector() -> None:
    Closing.open = 0
    with SyncCollector(Closing, num_envs=3, **BUDGET) as collector:
        assert Closing.open == 3
        next(iter(collector))
    assert Closing.open == 0
