"""Random runs of environments on a device, and runs with a mirrored ring in other processes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv

from tallyroll.collector import SyncCollector
from tallyroll.storage import DeviceStorage
from tallyroll.storage.stores.row_writer import RowWriter

from collect_kit import ByObservation
from tensor_cartpole import Leaning, TensorCartPole
from toy_systems import First, Groups, Lost, There, Toy, WithResetSlots
from worker_kit import sync_collector

LAYOUTS = ["rows", "lanes", "trajectories"]
TOYS: list[Any] = [Toy, WithResetSlots, WithResetSlots, First, Lost, Groups]


def transformed(lanes: int, device: str) -> TransformedEnv:
    return TransformedEnv(TensorCartPole(lanes, device), Compose(RewardSum(), StepCounter(20)))


def drawn(seed: int) -> tuple[Callable[[str], tuple[Any, Any]], dict[str, Any], int]:
    """Return a random environment with its policy, options of its run, and the size of a ring."""
    rng = random.Random(seed)
    lanes, frames = rng.randint(1, 9), rng.randint(1, 50)
    policy = rng.random() < 0.5
    kind = rng.choice([TensorCartPole, transformed, *TOYS])

    def make(device: str) -> tuple[Any, Any]:
        if kind in TOYS:
            return There(kind(lanes), device), None
        return kind(lanes, device), Leaning(device) if policy else None

    given: dict[str, Any] = {
        "frames_per_batch": frames,
        "surplus": rng.choice(["carry", "discard"]),
        "seed": seed,
        "layout": rng.choice(LAYOUTS),
        "storing_device": rng.choice([None, "cpu"]),
        "reset_at_each_iter": kind not in TOYS and rng.random() < 0.2,
    }
    if kind is TensorCartPole:
        given["max_frames_per_traj"] = rng.choice([None, 3, 30])
    return make, given, rng.choice([given["frames_per_batch"], 60, 1000])


def collect(storage: Any, make: Callable[[], Any], given: dict[str, Any], seed: int) -> list[Any]:
    """Collect and resume a run; return its counts."""
    rng, counts = random.Random(seed), []
    total = rng.randint(1, 150)
    episodes = given["surplus"] == "carry" and not given["reset_at_each_iter"]
    episodes &= rng.random() < 0.3
    for resume in (False, True):
        budget = {"total_frames": total * (1 + resume)}
        if episodes and not resume:
            budget = {"total_episodes": 1 + total // 15}
        with SyncCollector(*make(), storage=storage, resume=resume, **budget, **given) as collector:
            for _ in collector:
                if rng.random() < 0.3:
                    collector.collect(rng.randint(1, 70))
            collector.ledger.check()
            counts += [collector.ledger.values, storage.head, storage.span]
        if episodes:
            break
    return counts


def collect_mirrored(
    connection: Connection, path: Path, source: str, frames: int, lag: int, ring: int
) -> None:
    """Collect or resume a run of `frames` rows; send the head of the ring after each batch.

    With a lag, the disk is slow, so that the ring is ahead.
    """
    torch.set_num_threads(1)
    append = RowWriter.append

    def slow(self: RowWriter, rows: Any, record: bytes | None = None) -> range:
        time.sleep(0.003)
        return append(self, rows, record)

    if lag:
        RowWriter.append = slow  # type: ignore[method-assign]
    with (
        DeviceStorage(max_size=ring, device="cpu", mirror=path, mirror_lag=lag) as storage,
        sync_collector(
            source, ByObservation(), frames_per_batch=7, total_frames=frames, storage=storage,
            seed=5, resume="auto",
        ) as collector,
    ):  # fmt: skip
        for _ in collector:
            connection.send(storage.head)
    connection.send(frames)
