"""Collecting in a thread: concurrent sampling, the end of the run, and errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)

from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.torchrl import Collector, MultiAsyncCollector, MultiSyncCollector
from tallyroll.storage import MemmapStorage

from collect_kit import ByObservation
from oracles import OracleTorchEnv
from worker_kit import in_threads

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]
STEP_SECONDS = 0.02
Make = Callable[[], Any]


class Slow(OracleTorchEnv):
    """Environment with slow steps."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(STEP_SECONDS)
        return super()._step(tensordict)


class Failing(OracleTorchEnv):
    """Environment whose tenth step raises."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.steps_taken[0] == 9:
            raise RuntimeError("the tenth step")
        return super()._step(tensordict)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    names = [each.name for each in threading.enumerate()]
    assert "tallyroll-collector" not in names


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.002)


def storages(path: Path) -> dict[str, Make]:
    return {
        "ours": lambda: MemmapStorage(path / "ours", max_size=100_000),
        "ring": lambda: MemmapStorage(path / "ring", max_size=500),
        "lazy": lambda: LazyTensorStorage(100_000),
        "lazy ring": lambda: LazyTensorStorage(500),
        "memmap": lambda: LazyMemmapStorage(100_000, scratch_dir=str(path / "theirs")),
    }


@pytest.mark.parametrize("kind", ["ours", "ring", "lazy", "lazy ring", "memmap"])
def test_what_is_sampled_meanwhile_is_whole_rows(kind: str, tmp_path: Path) -> None:
    storage = storages(tmp_path)[kind]()
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=64)
    env = OracleTorchEnv(None, LENGTHS, ends="mixed")
    collector = Collector(env, ByObservation(), frames_per_batch=50, replay_buffer=buffer)
    collector.start()
    assert collector.is_running()
    until(lambda: buffer.write_count >= 50)
    for _ in range(100):
        rows = buffer.sample()
        assert rows.shape == (64,)
        _check(rows)
    collector.async_shutdown()
    assert not collector.is_running()
    assert buffer.write_count == collector.ledger.stored
    if isinstance(storage, MemmapStorage):
        storage.close()


def _check(rows: TensorDictBase) -> None:
    """Check that each row's next observation follows its observation.

    An oracle's observations encode lane, episode and step.
    """
    now, following = rows["observation"], rows["next", "observation"]
    assert torch.equal(now[:, :2], following[:, :2])
    assert torch.equal(now[:, 2] + 1, following[:, 2])
    assert torch.equal(rows["collector", "step"].float(), now[:, 2])


@pytest.mark.filterwarnings("ignore:SliceSampler returned a short flat batch:UserWarning")
def test_slices_that_are_sampled_meanwhile_are_of_one_trajectory() -> None:
    sampler = SliceSampler(num_slices=4, traj_key=("collector", "traj_ids"), strict_length=False)
    storage = LazyTensorStorage(10_000)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=16)
    env = OracleTorchEnv(None, LENGTHS, ends="mixed")
    collector = Collector(env, ByObservation(), frames_per_batch=50, replay_buffer=buffer)
    collector.start()
    until(lambda: buffer.write_count >= 50)
    for _ in range(20):
        _check(buffer.sample())
    collector.async_shutdown()


def test_it_ends_after_the_step_under_way() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4)
    collector = Collector(Slow(), None, frames_per_batch=5_000, replay_buffer=buffer)
    collector.start()
    until(lambda: collector.env.steps_taken[0] > 3)
    begin = time.monotonic()
    collector.async_shutdown()
    assert time.monotonic() - begin < 250 * STEP_SECONDS  # a batch takes 5,000 steps
    assert buffer.write_count == collector.ledger.stored == collector.ledger.executed > 0
    collector.async_shutdown()


def test_what_the_thread_raised_is_raised_by_what_is_asked_next() -> None:
    asking: list[Callable[[Any], Any]] = [
        lambda c: c.async_shutdown(),
        lambda c: c.shutdown(),
        lambda c: c.getattr_rb("write_count"),
        lambda c: c.update_policy_weights_(),
        lambda c: c.start(),
    ]
    for ask in asking:
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        env = Failing(None, (50,))
        collector = Collector(env, ByObservation(), frames_per_batch=4, replay_buffer=buffer)
        collector.start()
        until(lambda c=collector: not c.is_running())
        with pytest.raises(RuntimeError, match="the tenth step"):
            ask(collector)
        collector.shutdown()
        assert len(buffer) == 9, "what was complete before"


def test_it_ends_with_the_budget() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    env = OracleTorchEnv(None, (5,))
    collector = Collector(env, None, frames_per_batch=8, total_frames=20, replay_buffer=buffer)
    collector.start()
    until(lambda: not collector.is_running())
    assert len(buffer) == 20
    collector.shutdown()


def test_without_a_buffer_there_is_nothing_to_start() -> None:
    with (
        Collector(OracleTorchEnv(), None, frames_per_batch=8) as collector,
        pytest.raises(ArgumentError, match="replay_buffer"),
    ):
        collector.start()


def test_into_a_storage_without_a_buffer(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows")
    given: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 20, "storage": storage}
    collector = Collector(OracleTorchEnv(), None, **given)
    collector.start()
    until(lambda: not collector.is_running())
    collector.shutdown()
    assert len(storage) == 20
    storage.close()


def test_nothing_is_begun_during_a_pause() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4)
    collector = Collector(OracleTorchEnv(), None, frames_per_batch=8, replay_buffer=buffer)
    with pytest.raises(StateError, match=r"start\(\)"), collector.pause():
        pass
    collector.start()
    until(lambda: buffer.write_count > 0)
    with collector.pause():
        before = buffer.write_count
        time.sleep(0.1)
        assert buffer.write_count == before
    until(lambda: buffer.write_count > before)
    collector.async_shutdown()


class Stuck(OracleTorchEnv):
    """Environment with a step that waits until it is released."""

    begun: threading.Event
    release: threading.Event

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.steps_taken[0] == 3:
            self.begun.set()
            self.release.wait(20)
        return super()._step(tensordict)


def test_a_step_that_does_not_return_is_an_error_in_time() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    env = Stuck(None, (50,))
    env.begun, env.release = threading.Event(), threading.Event()
    collector = Collector(env, None, frames_per_batch=8, replay_buffer=buffer)
    collector.start()
    assert env.begun.wait(20)
    with pytest.raises(StateError, match="timeout="):
        collector.async_shutdown(timeout=0.2)
    env.release.set()
    collector.async_shutdown()
    assert buffer.write_count == 4


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_are_collected_from_in_a_thread(kind: Any) -> None:
    with in_threads():
        buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)
        envs = [lambda lane=lane: OracleTorchEnv(None, LENGTHS, first_lane=lane) for lane in (0, 1)]
        collector = kind(envs, ByObservation(), frames_per_batch=20, replay_buffer=buffer)
        collector.start()
        until(lambda: buffer.write_count >= 40)
        for _ in range(10):
            _check(buffer.sample())
            assert collector.getattr_rb("write_count") >= 40
        collector.async_shutdown()
        assert buffer.write_count == collector.ledger.stored


@pytest.mark.slow
def test_a_forgotten_one_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        from torchrl.data import LazyTensorStorage, ReplayBuffer
        from tallyroll.collector.torchrl import Collector

        buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=4)
        collector = Collector("CartPole-v1", None, frames_per_batch=50, replay_buffer=buffer)
        collector.start()
        while buffer.write_count < 100:
            pass
        print("forgotten", flush=True)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "forgotten" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr
