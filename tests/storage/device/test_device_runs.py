"""Runs that write to a `DeviceStorage` store the rows of the same run on disk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tallyroll.collector import MultiprocessCollector, save_checkpoint
from tallyroll.collector.base import Collector
from tallyroll.collector.errors import ArgumentError
from tallyroll.storage import (
    DeviceStorage,
    MemmapStorage,
    TrajectorySliceSampler,
    content_hash,
    n_step,
)
from tallyroll.storage.errors import NotPicklable, RunUnderWay, SchemaMismatch
from tallyroll.storage.stores.row_sink import BufferedWriter, RowSink, RunsOfSink, absent

from devices_kit import here_and_there
from worker_kit import DISABLED, LANES, NEXT, SAME, Versioned, sync_collector, worker_collector

FEW, MANY = 2 * LANES, 7 * LANES + 1
"""Rows of a batch: few slots stay in the slab, and many are gathered."""
KINDS: dict[str, Any] = {
    "few": partial(sync_collector, NEXT, frames_per_batch=FEW),
    "many": partial(sync_collector, NEXT, frames_per_batch=MANY),
    "same step": partial(sync_collector, SAME, frames_per_batch=FEW),
    "disabled": partial(sync_collector, DISABLED, frames_per_batch=MANY),
    "workers": partial(worker_collector, NEXT, 2, mode="sync", frames_per_batch=FEW),
}
SIZE = 90


def run(make: Any, frames: int, **given: Any) -> Collector:
    """Collect `frames` rows in all, first in batches and then in one call."""
    collector: Collector = make(Versioned().set_to(1), total_frames=frames, **given)
    with collector:
        for at, _ in enumerate(collector):
            collector.ledger.check()
            if at < 2:
                collector.update_policy_weights_()
            if at == 2:
                break
        collector.collect(frames - collector.ledger.stored)
    collector.ledger.check()
    return collector


def assert_equal(ring: DeviceStorage, disk: MemmapStorage) -> None:
    """Compare the numbers and contents of all rows, by index and in order."""
    assert (ring.head, ring.span, len(ring)) == (disk.head, disk.span, len(disk))
    assert ring.last_index == disk.last_index
    assert content_hash(ring) == content_hash(disk)
    for one, other in (
        (ring.get(slice(None)), disk.get(slice(None))),
        (ring.in_order(), disk.in_order()),
    ):
        assert one.device == ring.device
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key, leaf in other.items(True, True):
            assert torch.equal(one[key].cpu(), leaf), key
            assert one[key].dtype == leaf.dtype


@pytest.fixture
def rings(tmp_path: Path, device: str) -> Iterator[tuple[DeviceStorage, MemmapStorage]]:
    with (
        DeviceStorage(max_size=SIZE, device=device) as ring,
        MemmapStorage(tmp_path / "rows", max_size=SIZE) as disk,
    ):
        yield ring, disk
        for storage in (ring, disk):  # it would hold the semaphores of its buffers
            storage._attached_entities_list.clear()


Rings = tuple[DeviceStorage, MemmapStorage]


@here_and_there
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stores_the_rows_of_a_ring_on_disk(kind: str, rings: Rings, device: str) -> None:
    """The run, which wraps the ring, is then resumed in the same process."""
    ring, disk = rings
    for frames in (120, 260):
        for storage in rings:
            resumes = frames == 260
            collector = run(KINDS[kind], frames, storage=storage, seed=3, resume=resumes)
            assert collector.ledger.stored == storage.head == frames
        assert_equal(ring, disk)
        assert ring.reader.record == disk.record
    entries = [
        [{name: each for name, each in entry.items() if name != "made"} for entry in found]
        for found in (ring.manifest["runs"], disk.manifest["runs"])
    ]
    assert entries[0] == entries[1]


@here_and_there
def test_a_replay_buffer_gets_the_rows_of_a_ring_on_disk(rings: Rings, device: str) -> None:
    for storage in rings:
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        make = partial(sync_collector, NEXT, frames_per_batch=FEW)
        collector = run(make, 200, replay_buffer=buffer, seed=3)
        assert collector.ledger.stored == storage.head == 200
        assert len(buffer) == SIZE
        assert buffer.sample()["observation"].device.type == storage.device.type
    assert_equal(*rings)
    assert rings[0].reader.record == rings[1].record


@here_and_there
def test_async_workers_collect_exactly_as_many(rings: Rings, device: str) -> None:
    ring, _ = rings
    make = partial(worker_collector, DISABLED, 2, mode="async", frames_per_batch=FEW)
    collector = run(make, 123, storage=ring, seed=3)
    assert isinstance(collector, MultiprocessCollector)
    assert collector.ledger.stored == ring.head == 123
    rows = ring.in_order()
    assert (rows["low"] == rows["high"]).all()


# --- reading --------------------------------------------------------------------------------------


@here_and_there
def test_slices_and_n_step_returns_are_those_of_a_ring_on_disk(rings: Rings, device: str) -> None:
    found = []
    for storage in rings:
        run(KINDS["few"], 200, storage=storage, seed=3)
        buffer = TensorDictReplayBuffer(
            storage=storage,
            sampler=TrajectorySliceSampler(3, short="pad"),
            batch_size=30,
            generator=torch.Generator().manual_seed(1),
        )
        slices = buffer.sample()
        whole = storage.trajectories.sample_slices(8, 3, torch.Generator().manual_seed(2))
        found.append(
            [
                *(slices, n_step(storage, slices, 3, 0.9), whole),
                n_step(storage, np.arange(SIZE), 4, 0.5),
                TensorDict({"length": torch.from_numpy(storage.trajectories.lengths)}),
            ]
        )
    assert found[0][0].device == rings[0].device
    assert found[0][1].device == rings[0].device
    for one, other in zip(*found, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key, leaf in other.items(True, True):
            assert torch.equal(one[key].cpu(), leaf), key


@here_and_there
def test_the_trajectory_index_follows_a_ring_that_wraps_and_is_emptied(
    rings: Rings, device: str
) -> None:
    """The index is read first, so that it has to count rows before they are overwritten."""
    for frames in (80, 250, 430):
        tables = []
        for storage in rings:
            resume = frames > 80
            run(KINDS["few"], frames, storage=storage, seed=3, resume=resume)
            tables.append(storage.trajectories.table)
            if frames == 250:
                ReplayBuffer(storage=storage).empty()
                assert len(storage) == 0
        np.testing.assert_array_equal(*tables)
        assert rings[0].span == rings[1].span
    assert_equal(*rings)


# --- errors ---------------------------------------------------------------------------------------


def test_it_is_a_sink_of_runs() -> None:
    ring = DeviceStorage(max_size=3, device="cpu")
    assert not absent(RowSink, ring)
    assert not absent(BufferedWriter, ring.writer)
    assert not absent(RunsOfSink, ring.writer.runs)


def test_runs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    ring = DeviceStorage(max_size=20, device="cpu")
    make = partial(sync_collector, NEXT, total_frames=40, storage=ring)
    with pytest.raises(ArgumentError, match=r"at most the 20 rows of the ring .*, got 21"):
        make(frames_per_batch=21)
    with make(frames_per_batch=20) as collector:
        collector.collect(20)
        with pytest.raises(RunUnderWay):
            ring.extend(ring.get(slice(None)))
        with pytest.raises(RunUnderWay):
            ReplayBuffer(storage=ring).extend(ring.get(slice(None)))
        with pytest.raises(ArgumentError, match=r"on disk, .* got one with a DeviceStorage"):
            save_checkpoint(tmp_path / "state", collector=collector)
        buffer = ReplayBuffer(storage=ring)
        with pytest.raises(NotPicklable, match="only in the memory"):
            save_checkpoint(tmp_path / "state", buffer=buffer)
    with pytest.raises(SchemaMismatch, match=r"told is not a column here\. Make another"):
        sync_collector(NEXT, _with_a_column, total_frames=40, frames_per_batch=20, storage=ring)


def _with_a_column(td: Any) -> Any:
    td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))
    return td.set("told", torch.zeros(td.batch_size))


def test_rows_of_a_caller_after_a_run_are_not_rows_of_the_run() -> None:
    ring = DeviceStorage(max_size=50, device="cpu")
    run(KINDS["few"], 40, storage=ring)
    ring.extend(ring.get(slice(0, 3)))
    assert [entry["first_row"] for entry in ring.manifest["runs"]] == [0, 40]
    assert "seed" not in ring.manifest["runs"][-1]
