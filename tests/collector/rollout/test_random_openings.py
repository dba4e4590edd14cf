"""Exactly the first N transitions of a run are random, in whatever order lanes arrive."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.storage import open_storage, verify

from pairs import in_gate
from toy_systems import Arrivals, ArrivalsWithResetSlots, Toy, WithResetSlots
from worker_kit import in_threads


def policy(action: int = 2) -> TensorDictModule:
    """Return a policy that always chooses `action`."""

    def choose(observation: torch.Tensor) -> torch.Tensor:
        return torch.full(observation.shape[:-1], action)

    return TensorDictModule(choose, in_keys=["observation"], out_keys=["action"])


def shuffled(kind: type[Arrivals], lanes: int, arrivals: int, seed: int) -> SystemEnv:
    """Return a system whose lanes arrive in random order, `arrivals` per call."""
    rest = {**kind.rest, "arrivals": arrivals}
    system = type("Shuffled", (kind,), {"rest": rest})(lanes)
    system.order = np.random.default_rng(seed)
    return SystemEnv(system)


def check_opening(batches: Iterable[TensorDictBase], random: int) -> torch.Tensor:
    """Check that the first rows are random, and return all rows.

    Batches follow slot order: no row of the policy precedes the last random one.
    """
    rows = []
    for batch in batches:
        drawn = int((batch["collector", "policy_version"] == -1).sum())
        assert drawn == min(len(batch), random), "the first rows are random"
        random -= drawn
        rows.append(batch.clone())
    assert not random
    found = torch.cat(rows)
    by_policy = found["collector", "policy_version"] >= 0
    assert (found["action"][by_policy] == 2).all()
    before, after = found["observation"], found["next", "observation"]
    assert torch.equal(after[:, 3], before[:, 3] + found["action"]), "rows are of their actions"
    assert torch.equal(after[:, 2], before[:, 2] + 1)
    assert torch.equal(before[:, 0], found["collector", "lane"])
    return found


@pytest.mark.parametrize(
    ("kind", "surplus", "come"),
    in_gate(
        [Arrivals, ArrivalsWithResetSlots],
        ["carry", "discard"],
        [(5, 2), (7, 3), (4, 1), (3, 3)],
    ),
)
def test_lanes_that_come_back_in_any_order(
    kind: Any, surplus: Any, come: tuple[int, int], tmp_path: Path
) -> None:
    lanes, arrivals = come
    for seed in (0, 1, 3):
        random, frames = 1 + 12 * seed, 1 + seed
        path = tmp_path / str(seed)
        with SyncCollector(
            shuffled(kind, lanes, arrivals, seed),
            policy(),
            frames_per_batch=frames,
            total_frames=60,
            init_random_frames=random,
            surplus=surplus,
            seed=seed,
            storage=path,
        ) as collector:
            check_opening(collector, random)
            assert collector.ledger.random == random
        assert verify(path).sound, str(verify(path))


def test_collected_and_resumed(tmp_path: Path) -> None:
    """Rows come from `collect`, and a run is resumed within its opening."""
    arguments: dict[str, Any] = {"frames_per_batch": 8, "init_random_frames": 41, "seed": 1}
    arguments["storage"] = tmp_path / "run"
    for total, resume in ((30, False), (100, True)):
        env = shuffled(ArrivalsWithResetSlots, 6, 2, total)
        with SyncCollector(
            env, policy(), total_frames=total, resume=resume, **arguments
        ) as collector:
            collector.collect(13)
            list(collector)
            assert collector.ledger.random == min(41, total)
    rows = open_storage(tmp_path / "run")[:]
    assert (rows["collector", "policy_version"][:40] == -1).all()
    assert verify(tmp_path / "run").sound, str(verify(tmp_path / "run"))


def test_resets_of_all_lanes_in_an_opening() -> None:
    env = shuffled(ArrivalsWithResetSlots, 5, 2, 0)
    with SyncCollector(
        env,
        policy(),
        frames_per_batch=6,
        total_frames=60,
        init_random_frames=20,
        reset_at_each_iter=True,
        seed=0,
    ) as collector:
        check_opening(collector, 20)


def arriving() -> SystemEnv:
    return SystemEnv(Arrivals(4))


def with_reset_slots() -> SystemEnv:
    return SystemEnv(WithResetSlots(4))


def test_workers_whose_lanes_come_back_in_any_order_are_refused() -> None:
    with (
        in_threads(),
        pytest.raises(
            EnvironmentRefused,
            match="init_random_frames: expected 0, because with lanes that come back in",
        ),
    ):
        MultiprocessCollector(
            [arriving, arriving],
            policy(),
            frames_per_batch=8,
            total_frames=40,
            init_random_frames=8,
            mode="async",
        )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers(mode: Any) -> None:
    """The modes include reset slots."""
    with (
        in_threads(),
        MultiprocessCollector(
            [with_reset_slots, with_reset_slots],
            policy(),
            frames_per_batch=5,
            total_frames=120,
            init_random_frames=43,
            mode=mode,
            seed=0,
        ) as collector,
    ):
        check_opening(collector, 43)
        assert collector.ledger.random == 43


@pytest.mark.parametrize("kind", [Toy, WithResetSlots])
@pytest.mark.parametrize("surplus", ["carry", "discard"])
def test_lanes_in_step(kind: Any, surplus: Any) -> None:
    for seed in (0, 2, 5):
        with SyncCollector(
            SystemEnv(kind(5)),
            policy(),
            frames_per_batch=1 + seed,
            total_frames=60,
            init_random_frames=1 + 7 * seed,
            surplus=surplus,
            seed=seed,
        ) as collector:
            check_opening(collector, 1 + 7 * seed)
