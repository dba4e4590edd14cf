"""A run may end within an item of a TorchRL buffer: rows are not padded or counted twice."""

from __future__ import annotations

import threading
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

from tallyroll.collector.batches.stored.buffer_items import CutItemWarning
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.torchrl import Collector, MultiAsyncCollector

from oracles import OracleTorchEnv
from worker_kit import in_threads

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]


def items(kind: Any = LazyTensorStorage) -> ReplayBuffer:
    return ReplayBuffer(storage=kind(5000), batch_size=4)


class Stopping(OracleTorchEnv):
    """Oracle that calls `then` in its 21st step."""

    steps = 0
    then: Any = None

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        if self.steps == 21:
            self.then()
        return super()._step(tensordict)


def breaks() -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("way", ["async_shutdown", "stop", "error", "error in a thread", "budget"])
def test_the_rows_of_a_cut_item_are_discarded_with_a_warning(way: str) -> None:
    """A buffer's items have the length of its first batch, and TorchRL would pad with zeros."""
    kind = LazyMemmapStorage if way == "stop" else LazyTensorStorage
    # The third episode of lane 1 has rows in the item. It ends in the cut part, or it does not end.
    buffer, env = items(kind), Stopping(2, [[3, 1, 4], [5, 5, 30 if way == "stop" else 5]])
    options: dict[str, Any] = {"frames_per_batch": 24, "total_frames": -1, "replay_buffer": buffer}
    if way == "budget":  # the budget would otherwise be refused in advance
        options |= {"total_frames": 42, "postproc": lambda batch: batch}
    collector = Collector(env, None, **options)
    told = threading.Event()

    def tells() -> None:
        told.set()
        time.sleep(0.1)

    left = 16 if way.startswith("error") else 18
    env.then = {"stop": collector.stop, "budget": lambda: None, "async_shutdown": tells}.get(
        way, breaks
    )
    failed = pytest.raises(RuntimeError, match="on purpose") if "error" in way else nullcontext()

    def runs() -> None:
        if way == "async_shutdown":
            collector.start()
            assert told.wait(5)
        elif way == "error in a thread":
            collector.start()
            until = time.monotonic() + 5
            while collector.is_running() and time.monotonic() < until:
                time.sleep(0.01)
        else:
            list(collector)
        collector.async_shutdown()

    with pytest.warns(CutItemWarning, match=f"the last {left} transitions") as found, failed:
        runs()
    assert len(found) == 1
    assert len(buffer) == 2
    assert (collector.ledger.stored, collector.ledger.discarded) == (24, left)
    ids, ends = buffer[:]["collector", "traj_ids"], buffer[:]["next", "done"].squeeze(-1)
    assert collector.ledger.episodes_complete == int(ends.sum())
    unfinished = {*ids.flatten().tolist()} - {*ids[ends].tolist()}
    assert collector.ledger.episodes_cut == len(unfinished) == 1
    collector.ledger.check()
    collector.shutdown()


def test_workers_that_wait_for_nobody_warn_once_of_what_makes_no_items() -> None:
    buffer = items()
    makes = [partial(OracleTorchEnv, 2, LENGTHS, first_lane=at) for at in (0, 2)]
    options = {"frames_per_batch": 2000, "total_frames": -1, "replay_buffer": buffer}
    with in_threads(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        collector = MultiAsyncCollector(makes, None, **options)
        next(iter(collector))
        threading.Timer(0.05, collector.stop).start()
        list(collector)
        collector.shutdown()
    assert len(buffer) * 1000 == collector.ledger.stored
    cut = [each for each in found if each.category is CutItemWarning]
    assert len(cut) == (collector.ledger.discarded > 0)
    collector.ledger.check()


def test_what_would_end_within_an_item_is_refused() -> None:
    options: dict[str, Any] = {"replay_buffer": items(), "frames_per_batch": 24}
    make = partial(OracleTorchEnv, 2, LENGTHS)
    with pytest.raises(ArgumentError, match="multiple of frames_per_batch=24, got 36"):
        Collector(make(), None, total_frames=36, **options)
    with pytest.raises(ArgumentError, match="a multiple of 2 lanes, got 35"):
        Collector(make(), None, total_frames=35, extend_buffer=False, **options)
    with Collector(make(), None, total_frames=12, **options) as collector:
        assert list(collector) == [None]
        assert options["replay_buffer"][:].shape == (2, 6)
    with (
        Collector(make(), None, total_frames=24, **options) as collector,
        pytest.raises(
            StateError, match=r"items of length \[6\], like those in the buffer, got \[12\]"
        ),
    ):
        list(collector)
    assert len(options["replay_buffer"]) == 2


def test_rows_of_a_cut_item_are_kept_by_a_storage_beside_the_buffer(tmp_path: Path) -> None:
    buffer, env = items(), Stopping(2, LENGTHS)
    options = {"frames_per_batch": 24, "total_frames": -1, "replay_buffer": buffer}
    collector = Collector(env, None, **options, storage=tmp_path / "rows")
    env.then = collector.stop
    with pytest.warns(CutItemWarning, match="are in the storage but not"), collector:
        list(collector)
    assert (len(buffer), collector.ledger.stored, collector.ledger.discarded) == (2, 42, 0)
