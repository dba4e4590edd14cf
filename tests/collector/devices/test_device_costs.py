"""Waits for the device and copies of a run, counted by the simulated GPU.

The limits are the numbers of today's code. Lower them with each change that saves some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ram_ring import RamRing

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.storage import DeviceStorage

from devices_kit import SIMULATED, only_simulated
from tensor_cartpole import Leaning, TensorCartPole

if SIMULATED:
    import fakegpu

pytestmark = only_simulated
LANES, SLOTS, BATCHES = 64, 10, 10
DEVICE = "fakegpu"
COPIES = ("h2d_pageable", "h2d_pinned", "d2h_pageable", "d2h_pinned")


def cost(steps: Callable[[], Any]) -> dict[str, float]:
    """Return the waits and kernels of one step, and the copies and bytes of one batch."""
    fakegpu.reset_counts()
    steps()
    found = fakegpu.counts()
    copies = sum(number for name, number in found.items() if name.startswith(COPIES))
    moved = found.get("h2d_bytes", 0) + found.get("d2h_bytes", 0)
    return {
        "waits": found.get("waits", 0) / (SLOTS * BATCHES),
        "kernels": found.get("kernels", 0) / (SLOTS * BATCHES),
        "copies": copies / BATCHES,
        "bytes": moved / BATCHES,
    }


@pytest.fixture(scope="module")
def bare() -> dict[str, float]:
    """The cost of TorchRL's own loop."""
    env, policy = TensorCartPole(LANES, DEVICE), Leaning(DEVICE)
    td = env.reset()

    def steps() -> None:
        nonlocal td
        for _ in range(SLOTS * BATCHES):
            _, td = env.step_and_maybe_reset(policy(td))

    return cost(steps)


def cost_of_run(env: str = DEVICE, policy: str = DEVICE, **given: Any) -> dict[str, float]:
    """Return the cost of the batches after the first one."""
    frames = LANES * SLOTS
    with SyncCollector(
        TensorCartPole(LANES, env), Leaning(policy), frames_per_batch=frames,
        total_frames=frames * (BATCHES + 2), seed=3, **given,
    ) as collector:  # fmt: skip
        batches: Iterator[Any] = iter(collector)
        next(batches)
        return cost(lambda: [next(batches) for _ in range(BATCHES)])


LIMITS: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, float]]] = {
    "batches": (lambda path: {}, {"waits": -0.8, "kernels": 21, "copies": 3, "bytes": 26_000}),
    "batches on the host": (
        lambda path: {"storing_device": "cpu"},
        {"waits": -0.7, "kernels": 21, "copies": 3, "bytes": 47_000},
    ),
    "rows on disk": (
        lambda path: {"storage": path},
        {"waits": -0.7, "kernels": 21, "copies": 4, "bytes": 67_000},
    ),
    "rows in a ring there": (
        lambda path: {"storage": DeviceStorage(max_size=5000, device=DEVICE)},
        {"waits": -0.8, "kernels": 22.5, "copies": 4, "bytes": 46_000},
    ),
    "rows in a ring of arrays": (
        lambda path: {"storage": RamRing(5000, DEVICE)},
        {"waits": 1.0, "kernels": 22.5, "copies": 18, "bytes": 130_000},
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_waits_and_copies_stay_below_a_limit(
    case: str, bare: dict[str, float], tmp_path: Path
) -> None:
    """The limits are for what a run takes in addition to TorchRL's loop."""
    given, limits = LIMITS[case]
    found = cost_of_run(**given(tmp_path / "rows"))
    beyond = {name: round(found[name] - bare[name], 2) for name in limits}
    assert all(beyond[name] <= limit for name, limit in limits.items()), (beyond, limits)


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({"env": "cpu"}, {"waits": 1, "kernels": 5, "copies": 20, "bytes": 50_000}),
        (
            {"env": "cpu", "storing_device": DEVICE},
            {"waits": 1, "kernels": 5, "copies": 21, "bytes": 112_000},
        ),
        (
            {"env": "cpu", "policy": "cpu", "storing_device": DEVICE},
            {"waits": 0, "kernels": 0, "copies": 1, "bytes": 61_500},
        ),
        (
            {"policy": "cpu", "policy_device": "cpu"},
            {"waits": 2.4, "kernels": 63, "copies": 24, "bytes": 76_000},
        ),
    ],
    ids=["policy there", "policy and batches there", "batches there", "environment there"],
)
def test_a_step_takes_a_copy_each_way_between_two_devices(
    given: dict[str, Any], limits: dict[str, float]
) -> None:
    found = cost_of_run(**given)
    assert all(found[name] <= limit for name, limit in limits.items()), (found, limits)


def test_workers_copy_a_step_to_shared_memory_in_few_copies() -> None:
    """A step of a worker's lanes takes 4 copies to the host, and 2 to the device."""
    frames = LANES * SLOTS
    with MultiprocessCollector(
        [partial(TensorCartPole, LANES // 2, DEVICE)] * 2, Leaning(DEVICE),
        frames_per_batch=frames, total_frames=frames * (BATCHES + 2), seed=3, transport="thread",
    ) as collector:  # fmt: skip
        batches: Iterator[Any] = iter(collector)
        next(batches)
        found = cost(lambda: [next(batches) for _ in range(BATCHES)])
    assert found["waits"] <= 2 * 6.1
    assert found["copies"] <= 2 * 6 * SLOTS
