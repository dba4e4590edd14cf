"""Test actors that keep their rows: exactly N count despite deaths, and lost shards return."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from loopback_kit import (
    KILLS,
    SECONDS_OF_ALL,
    SECONDS_OF_KILLS,
    SEED,
    folder_of_ray,
    inside,
    nothing_left_behind,
    run_inside,
)
from pixel_kit import assert_frames_show_their_place, stacked

from tallyroll.collector import MultiprocessCollector, RayCollector
from tallyroll.collector.cli import main
from tallyroll.storage import CorruptStorage, ShardedStorage, open_storage, verify
from tallyroll.storage.ext.sharded.acknowledged_rows import ShardRows
from tallyroll.storage.ext.sharded.files import ShardedFiles

from worker_faults_kit import Faults, check_lives
from worker_faults_kit import factories as faulty
from worker_kit import SAME, Versioned, chosen_by, factories

__all__ = ["nothing_left_behind"]

LANES = 6


@pytest.mark.timeout(SECONDS_OF_ALL + 100)
def test_in_a_network_namespace() -> None:
    run_inside(__file__)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    if not os.environ.get("TALLYROLL_LOOPBACK"):
        yield
        return
    with folder_of_ray() as folder:
        ray.init(
            address="local",
            num_cpus=12,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        yield
        ray.shutdown()


def rows_of(path: Path) -> Any:
    """Return all rows that count, after verifying them."""
    assert verify(path).sound
    with open_storage(path) as storage:
        return storage[:].clone()


def shards_of(path: Path) -> list[ShardRows]:
    """Return the shards with rows that count."""
    if not path.exists():
        return []
    return [each for each in ShardedFiles(path).acknowledged().shards if each.rows]


@inside
@pytest.mark.timeout(120 + SECONDS_OF_KILLS)
def test_actors_killed_at_random_and_a_shard_that_is_lost(tmp_path: Path) -> None:
    path, dice, killed = tmp_path / "rows", random.Random(SEED), 0
    run: dict[str, Any] = {"mode": "async", "sharded": True, "storage": path}
    with RayCollector(
        faulty(Faults(tmp_path), LANES, 3, slow=0.004),
        None,
        total_frames=-1,
        frames_per_batch=60,
        seed=1,
        on_worker_death="respawn",
        max_respawns=10_000,
        **run,
    ) as collector:
        while (shards := len(shards_of(path))) < 3 + KILLS:
            if killed < KILLS and shards == 3 + killed:  # each worker has rows by now
                os.kill(dice.choice(collector.worker_pids), signal.SIGKILL)
                killed += 1
                time.sleep(dice.choice((0, 0.01, 0.1)))
            assert collector.collect(100) == 100
            collector.ledger.check()
        stored = collector.ledger.stored
    rows = rows_of(path)
    assert len(rows) == stored
    assert sum(check_lives(rows, LANES)) >= LANES + KILLS
    shards = shards_of(path)
    assert {each.host for each in shards} == {socket.gethostname()}
    shutil.rmtree(path / "shards" / shards[0].name)
    with pytest.raises(CorruptStorage, match="resume the run"):
        open_storage(path)
    # Workers of any number and kind may continue.
    with (
        pytest.warns(UserWarning, match="shards are lost"),
        MultiprocessCollector(
            faulty(Faults(tmp_path), LANES, 2),
            None,
            total_frames=stored,
            frames_per_batch=60,
            resume=True,
            **run,
        ) as again,
    ):
        assert again.collect(10_000) == shards[0].rows
    rows = rows_of(path)
    assert len(rows) == stored
    check_lives(rows, LANES)


@inside
def test_each_row_says_which_weights_chose_its_action(tmp_path: Path) -> None:
    policy, path = Versioned(50_000), tmp_path / "rows"
    with RayCollector(
        factories(SAME, 2, LANES),
        policy,
        mode="async",
        sharded=True,
        storage=path,
        total_frames=-1,
        frames_per_batch=20,
        spares=0,
    ) as collector:
        for _ in range(30):
            collector.collect(30)
            collector.update_policy_weights_(policy.set_to(collector.policy_version + 1))
    rows = rows_of(path)
    version = rows["collector", "policy_version"]
    for name in ("low", "high"):
        assert torch.equal(rows[name], version.float())
    assert torch.equal(rows["action"], chosen_by(rows, version))
    assert version.unique().numel() > 10


@inside
def test_shards_of_actors_store_frames_once(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    run = {"num_envs": 4, "num_workers": 2, "frames_per_batch": 50, "total_frames": 400, "seed": 5}
    with (
        ShardedStorage(path, once=True) as storage,
        RayCollector(
            stacked, mode="async", sharded=True, storage=storage, spares=0, **run
        ) as collector,
    ):
        while collector.collect(100):
            pass
    assert len(rows_of(path)) == 400
    for each in shards_of(path):
        with open_storage(path / "shards" / each.name, accept_copy=True) as shard:
            assert shard.stores_once
    assert_frames_show_their_place(path)


@inside
def test_a_command_collects_into_shards(tmp_path: Path) -> None:
    out = str(tmp_path / "rows")
    run = ["collect", "CartPole-v1", "--frames", "501", "--num-envs", "4", "--workers", "2"]
    assert main([*run, "--transport", "ray", "--sharded", "--quiet", "--out", out]) == 0
    assert len(rows_of(Path(out))) == 501
