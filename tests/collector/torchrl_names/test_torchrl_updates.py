"""Weights may arrive while a thread collects: each call sees a whole set, which rows identify."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.torchrl import Collector, MultiSyncCollector
from tallyroll.storage import MemmapStorage

from oracles import OracleTorchEnv
from worker_kit import in_threads

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]
make_env = partial(OracleTorchEnv, None, LENGTHS, action="box")
SCALE = 1e-6


class RecordingPolicy(nn.Module):
    """Policy whose action is its weights, read one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        first = self.first.clone()
        time.sleep(0.001)
        both = torch.cat([first, self.second])
        return (both * SCALE).expand(*observation.shape[:-1], 2)


def weights(number: int) -> dict[str, torch.Tensor]:
    value = torch.full((1,), float(number))
    return {"module.first": value, "module.second": value}


def policy() -> TensorDictModule:
    return TensorDictModule(RecordingPolicy(), ["observation"], ["action"])


BUFFERS: dict[str, Any] = {
    "torchrl": lambda: ReplayBuffer(storage=LazyTensorStorage(5000), batch_size=4),
    "ours": lambda: ReplayBuffer(storage=MemmapStorage(max_size=5000), batch_size=4),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_every_row_has_the_version_that_chose_it(buffer: str, workers: int) -> None:
    rows = BUFFERS[buffer]()
    options = {"frames_per_batch": 12, "total_frames": -1, "replay_buffer": rows}
    with in_threads():
        make: Any = MultiSyncCollector if workers else Collector
        collector = make([make_env] * workers if workers else make_env(), policy(), **options)
        collector.start()
        for given in range(1, 41):
            collector.update_policy_weights_(weights(given))
            assert collector.policy_version == given
            # Most updates arrive during a batch. Some weights serve a whole batch.
            enough = collector.ledger.stored + 24 * (given % 5 == 0)
            time.sleep(0.002)
            while collector.ledger.stored < enough:
                time.sleep(0.002)
        collector.async_shutdown()
    told = (rows[:]["action"] / SCALE).round().reshape(-1, 2)
    version = rows[:]["collector", "policy_version"].reshape(-1)
    assert torch.equal(told[:, 0], told[:, 1])
    assert torch.equal(told[:, 0].long(), version)
    assert len(version.unique()) >= 8


def test_weights_that_do_not_fit_are_refused_where_they_are_given() -> None:
    options = {"frames_per_batch": 12, "total_frames": -1, "replay_buffer": BUFFERS["ours"]()}
    collector = Collector(make_env(), policy(), **options)
    collector.start()
    with pytest.raises(ArgumentError, match="unknown are"):
        collector.update_policy_weights_({"nonsense": torch.zeros(1)})
    assert collector.is_running()
    collector.async_shutdown()
    assert collector.policy_version == 0
    collector.update_policy_weights_(weights(3))
    assert collector.policy_version == 1


@pytest.mark.parametrize("frames", [2, 40])
def test_whoever_waits_has_the_turn_after_the_batch_under_way(frames: int) -> None:
    options = {"frames_per_batch": frames, "total_frames": -1, "replay_buffer": BUFFERS["ours"]()}
    collector = Collector(make_env(), policy(), **options)
    collector.start()
    for _ in range(20):
        before = collector.ledger.stored
        with collector.pause():
            assert collector.ledger.stored - before <= 2 * frames
            held = collector.ledger.stored
            collector.update_policy_weights_()
            time.sleep(0.005)
            assert collector.ledger.stored == held
    with collector.pause():
        collector.async_shutdown()  # does not wait for itself, or the watchdog would report it
    assert collector.policy_version == 20


def test_a_hook_of_the_thread_may_give_weights() -> None:
    options = {"frames_per_batch": 12, "total_frames": 60, "replay_buffer": BUFFERS["torchrl"]()}
    collector = Collector(
        make_env(), policy(), **options, pre_collect_hook=lambda: collector.update_policy_weights_()
    )
    collector.start()
    while collector.is_running():
        time.sleep(0.01)
    collector.async_shutdown()
    assert (collector.policy_version, collector.ledger.stored) == (5, 60)


def test_what_is_refused_says_why() -> None:
    """The message does not complain about a missing attribute of an unfinished collector."""
    with pytest.raises(ArgumentError, match="expected a Gymnasium id"):
        Collector(object(), frames_per_batch=6, total_frames=12)
