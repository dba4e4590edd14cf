"""An environment that another collector takes over adds no false rows to the older collector."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torchrl.envs import Compose, TransformedEnv

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector, evaluate
from tallyroll.collector.envs.setup import instances
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, StateError

import toy_systems
from oracles import OracleTorchEnv, check_rows, make_oracle_vec

LENGTHS = [[3, 1, 4], [2, 5]]
BUDGET: dict[str, Any] = {"frames_per_batch": 6, "total_frames": 60, "seed": 3}


def torch_env() -> Any:
    return OracleTorchEnv(2, LENGTHS)


def vector() -> Any:
    return make_oracle_vec(2, LENGTHS)


def same(env: Any) -> Any:
    return env


def wrapped(env: Any) -> Any:
    return TransformedEnv(env, Compose())


def factory(env: Any) -> Callable[[], Any]:
    return lambda: env


def with_driver(vec: Any) -> Any:
    return GymnasiumVectorEnv(vec)


CASES = [
    (torch_env, same, same),
    (torch_env, wrapped, wrapped),
    (torch_env, wrapped, same),
    (torch_env, factory, same),
    (vector, same, same),
    (vector, with_driver, same),
    (vector, same, with_driver),
    (lambda: GymnasiumVectorEnv(vector()), same, wrapped),
    (partial(toy_systems.Toy, 2), same, same),
    (partial(toy_systems.Toy, 2), SystemEnv, same),
]


@pytest.mark.parametrize(("make", "older", "newer"), CASES)
def test_the_older_collector_raises_and_the_newer_goes_on(
    make: Callable[[], Any], older: Any, newer: Any
) -> None:
    env = make()
    first = SyncCollector(older(env), **BUDGET)
    batches = iter(first)
    assert len(next(batches)) == 6
    with SyncCollector(newer(env), **BUDGET) as second:
        assert len(next(iter(second))) == 6
        with pytest.raises(StateError, match="another collector has driven the environment since"):
            next(batches)
        with pytest.raises(StateError, match="Make an environment for each"):
            next(iter(first))
        rows = torch.cat([batch.clone() for batch in second])
        assert len(rows) == 54
    assert first.ledger.stored == 6
    first.shutdown()


def test_evaluating_on_the_instance_takes_it_over_too() -> None:
    env = vector()
    collector = SyncCollector(env, **BUDGET)
    next(iter(collector))
    evaluate(None, env, episodes=2, seed=0)
    with pytest.raises(StateError, match="another collector"):
        next(iter(collector))
    collector.shutdown()
    env.close()


def test_an_older_run_that_is_over_only_ends() -> None:
    env = torch_env()
    finished, closed = SyncCollector(env, **BUDGET), None
    assert sum(len(batch) for batch in finished) == 60
    closed = SyncCollector(env, **BUDGET)
    next(iter(closed))
    closed.shutdown()
    with SyncCollector(env, **BUDGET) as last:
        check_rows(torch.cat([batch.clone() for batch in last]), LENGTHS)
        assert list(finished) == list(closed) == []
    finished.shutdown()


@pytest.mark.parametrize("met", [True, False])
def test_an_older_run_that_is_over_touches_the_environment_no_more(met: bool) -> None:
    """The older run ended before or after it lost the environment."""
    env = vector()
    older = SyncCollector(env, **BUDGET)
    for _ in older:
        if not met:
            break
    with SyncCollector(env, **BUDGET) as newer:
        rows = [next(iter(newer)).clone()]
        if not met:
            older.shutdown()
        for touch in (partial(older.set_seed, 3), partial(older.env_get, "spec")):
            with pytest.raises(
                StateError, match="another collector has driven the environment since"
            ):
                touch()
        rows += [batch.clone() for batch in newer]
        check_rows(torch.cat(rows), LENGTHS)
    assert older.ledger.stored == (60 if met else 6)
    older.shutdown()


def test_a_newer_one_that_is_refused_takes_nothing() -> None:
    env = vector()
    collector = SyncCollector(env, **BUDGET)
    batches = iter(collector)
    next(batches)
    with pytest.raises(ArgumentError):
        SyncCollector(env, **BUDGET, env_device="meta")
    assert sum(len(batch) for batch in batches) == 54
    collector.shutdown()
    env.close()


def test_nobody_takes_an_environment_that_is_being_stepped() -> None:
    env, calls, caught = torch_env(), [], []

    def policy(td: Any) -> Any:
        calls.append(len(td))
        if len(calls) == 4:  # the first call is a trial before any step
            with pytest.raises(StateError, match="a collector is stepping this environment"):
                caught.append(SyncCollector(env, **BUDGET))
            caught.append(None)
        return td.set("action", env.action_spec.rand())

    with SyncCollector(env, policy, **BUDGET) as collector:
        assert sum(len(batch) for batch in collector) == 60
    assert caught == [None]


def test_what_is_gone_is_forgotten() -> None:
    gc.collect()
    before = len(instances._drivers)
    env = torch_env()
    SyncCollector(env, **BUDGET).shutdown()
    assert len(instances._drivers) > before
    del env
    gc.collect()
    assert len(instances._drivers) <= before
