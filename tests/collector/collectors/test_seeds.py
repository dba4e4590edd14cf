"""A seed gives the same data from the first observation on; another seed gives other data."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torchrl.envs import GymEnv, SerialEnv

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector

from collect_kit import LENGTHS, Batches, assert_same, collect, joined
from oracles import OracleTorchEnv, OracleVectorEnv, make_oracle_vec


def stochastic(td: TensorDictBase) -> TensorDictBase:
    """Act by torch's generator."""
    return td.set("action", torch.randint(0, 2, td.batch_size))


def vec(mode: AutoresetMode, cls: Any = "sync") -> GymnasiumVectorEnv:
    kwargs = {"vec_kwargs": {"context": "fork"}} if cls == "async" else {}
    return GymnasiumVectorEnv(
        make_oracle_vec(3, LENGTHS, mode=mode, kind="seeded", cls=cls, **kwargs)
    )


def gym_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


DRIVERS: dict[str, Any] = {
    **{mode.value: partial(vec, mode) for mode in AutoresetMode},
    "async": partial(vec, AutoresetMode.NEXT_STEP, "async"),
    "native": partial(OracleVectorEnv, 3, LENGTHS, kind="seeded"),
    "torch": partial(OracleTorchEnv, 3, LENGTHS, kind="seeded"),
    "id": lambda: "CartPole-v1",
    "GymEnv": gym_env,
    "SerialEnv": partial(SerialEnv, 2, gym_env),
}
every_driver = pytest.mark.parametrize("driver", list(DRIVERS))


def run(driver: str, seed: int | None, policy: Any, **kwargs: Any) -> tuple[Batches, SyncCollector]:
    make = DRIVERS[driver]
    create = make() if driver == "id" else make
    return collect(create, policy, frames_per_batch=17, total_frames=60, seed=seed, **kwargs)


@every_driver
@pytest.mark.parametrize("policy", [stochastic, None])
def test_the_same_seed_gives_the_same_data(driver: str, policy: Any) -> None:
    one, _ = run(driver, 7, policy)
    torch.manual_seed(99)
    np.random.seed(99)
    other, _ = run(driver, 7, policy)
    for mine, theirs in zip(one, other, strict=True):
        assert_same(mine, theirs)


@every_driver
@pytest.mark.parametrize("policy", [stochastic, None])
def test_another_seed_gives_other_data_from_the_first_observation_on(
    driver: str, policy: Any
) -> None:
    one, other = (joined(run(driver, seed, policy)[0]) for seed in (7, 8))
    assert not torch.equal(one["observation"][:1], other["observation"][:1])
    assert not torch.equal(one["action"], other["action"])


@every_driver
def test_without_a_seed_one_is_drawn_and_told(driver: str) -> None:
    one, collector = run(driver, None, stochastic)
    again, _ = run(driver, collector.ledger.seed, stochastic)
    other, _ = run(driver, None, stochastic)
    assert torch.equal(one[0]["observation"][:1], again[0]["observation"][:1])
    assert not torch.equal(one[0]["observation"][:1], other[0]["observation"][:1])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_lane_has_a_seed_of_its_own(mode: AutoresetMode) -> None:
    vector = make_oracle_vec(4, LENGTHS, mode=mode)
    collect(vector, frames_per_batch=17, total_frames=60, seed=3)
    first = [seeds[0] for seeds in vector.get_attr("seeds")]
    assert len(set(first)) == 4
    assert None not in first
    assert all(set(seeds[1:]) <= {None} for seeds in vector.get_attr("seeds"))


def test_lanes_do_not_copy_each_other() -> None:
    rows = joined(run(AutoresetMode.DISABLED.value, 3, None)[0])
    noise = rows["observation"][:, 3]
    assert len(noise.unique()) == len(noise)


def test_setting_the_seed_again_begins_the_same_data_again() -> None:
    vector = make_oracle_vec(3, [[4]], mode=AutoresetMode.DISABLED, kind="seeded")
    with SyncCollector(
        vector, stochastic, frames_per_batch=15, total_frames=-1, seed=1
    ) as collector:
        batches = iter(collector)
        one = next(batches)
        collector.set_seed(1)
        other = next(batches)
        collector.stop()
    # The environment's episode counter continues. The noise, the actions and the rest are as
    # before.
    assert torch.equal(one["observation"][:, 3], other["observation"][:, 3])
    assert torch.equal(one["action"], other["action"])
    assert one["collector", "traj_ids"].max() < other["collector", "traj_ids"].min()


def test_a_static_seed_is_returned_as_it_is_and_another_otherwise() -> None:
    with SyncCollector(vec(AutoresetMode.DISABLED), frames_per_batch=15, total_frames=15) as run:
        assert run.set_seed(5, static_seed=True) == 5
        assert run.set_seed(5) != 5
