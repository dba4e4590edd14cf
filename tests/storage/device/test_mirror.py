"""A ring on a device with a mirror: the disk has its rows, in order, at most a lag later.

``TALLYROLL_CONFIGURATIONS`` is the number of random runs, 6 by default.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_runs_kit import collect, drawn
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tallyroll.collector import SyncCollector, load_checkpoint, save_checkpoint
from tallyroll.collector.batches.stored.writer import ClosedFirstWarning
from tallyroll.collector.errors import ArgumentError
from tallyroll.storage import (
    DeviceStorage,
    MemmapStorage,
    content_hash,
    open_storage,
    verify,
)
from tallyroll.storage.engine.columns import ArrayRows
from tallyroll.storage.errors import (
    NotAnAppend,
    NotEnoughMemory,
    NotPicklable,
    RowsMismatch,
    RunUnderWay,
    SchemaMismatch,
    StorageClosed,
    StorageFull,
    StorageLocked,
    WriteError,
)
from tallyroll.storage.ext.device.device_rows import DeviceRows
from tallyroll.storage.ext.device.mirror import Mirror
from tallyroll.storage.stores.row_writer import RowWriter

from devices_kit import ACCELERATOR, SIMULATED, here_and_there
from tensor_cartpole import Leaning, TensorCartPole
from worker_kit import NEXT, Versioned, sync_collector

if SIMULATED:
    import fakegpu

COUNT = int(os.environ.get("TALLYROLL_CONFIGURATIONS", "6"))


def rows(start: int, stop: int) -> TensorDict:
    numbers = torch.arange(start, stop)
    return TensorDict({"x": numbers, "half": numbers.bfloat16(), "small": numbers.to(torch.uint16)},
                      [stop - start])  # fmt: skip


def _others(count: int) -> list[np.ndarray]:
    """Return columns of `rows` other than x, as arrays."""
    return [np.zeros(count, np.uint16), np.zeros(count, np.uint16)]


def assert_mirrored(ring: DeviceStorage) -> None:
    """Check that the ring has the newest rows of its mirror, bit by bit."""
    disk = ring.mirror
    assert disk is not None
    assert ring.committed == ring.head == disk.head
    assert ring.span == range(max(disk.span.start, disk.head - ring.ring), disk.head)
    newest = disk.in_order()[-len(ring) :] if len(ring) else disk.in_order()[:0]
    there = ring.in_order().cpu()
    assert set(newest.keys(True, True)) == set(there.keys(True, True))
    for key, leaf in newest.items(True, True):
        assert torch.equal(leaf, there[key]), key


# --- rows -----------------------------------------------------------------------------------------


@here_and_there
@pytest.mark.parametrize("seed", range(COUNT))
def test_random_runs_are_mirrored(seed: int, device: str, tmp_path: Path) -> None:
    """Disk, record and entries are those of a run without a ring."""
    make, given, size = drawn(seed)
    rng = random.Random(seed)
    lag, is_ring = rng.choice([0, 0, 13, 1000]), rng.random() < 0.5
    paths = [tmp_path / "alone", tmp_path / "mirror"]
    options = {"max_size": size} if is_ring else {}
    with MemmapStorage(paths[0], **options) as disk:
        counts = collect(disk, partial(make, device), given, seed)
        record, entries = disk.record, disk.manifest["runs"]
    with (
        MemmapStorage(paths[1], **options) as mirror,
        DeviceStorage(max_size=size, device=device, mirror=mirror, mirror_lag=lag) as ring,
    ):
        spans = collect(ring, partial(make, device), given, seed)
        assert [each for each in spans if not isinstance(each, range)] == [
            each for each in counts if not isinstance(each, range)
        ]
        assert ring.reader.record == mirror.record == record
        assert [entry["first_row"] for entry in entries] == [
            entry["first_row"] for entry in ring.manifest["runs"]
        ]
        assert_mirrored(ring)
        head = ring.head
    assert content_hash(paths[0]) == content_hash(paths[1])
    assert not verify(paths[1]).findings
    with (
        MemmapStorage(paths[1], mode="append") as mirror,
        DeviceStorage(max_size=size, device=device, mirror=mirror) as again,
    ):
        assert again.head == head
        assert_mirrored(again)


@here_and_there
@pytest.mark.parametrize("lag", [0, 5])
def test_a_caller_and_a_buffer_write_to_the_disk_too(device: str, lag: int, tmp_path: Path) -> None:
    make = partial(DeviceStorage, max_size=7, device=device, mirror=tmp_path, mirror_lag=lag)
    with make() as ring:
        buffer = ReplayBuffer(storage=ring, batch_size=4)
        head = 0
        for count in (3, 1, 7, 0, 10):
            if count % 2 and count < 7:
                assert ring.extend(rows(head, head + count)) == range(head, head + count)
            elif count:
                buffer.extend(rows(head, head + count).to(device))
            head += count
            assert_mirrored(ring)
        ring._attached_entities_list.clear()
    with make() as ring:
        assert ring.extend(rows(21, 22)) == range(21, 22)
        assert_mirrored(ring)
        assert ring.in_order()["half"].float().tolist() == [*range(15, 22)]
    with open_storage(tmp_path) as disk:
        assert disk.column("x").tolist() == [*range(22)]


def test_the_mirror_of_a_run_takes_no_other_rows(tmp_path: Path) -> None:
    with (
        MemmapStorage(tmp_path / "mirror") as mirror,
        DeviceStorage(max_size=90, device="cpu", mirror=mirror) as ring,
        sync_collector(NEXT, frames_per_batch=10, total_frames=40, storage=ring) as collector,
    ):
        collector.collect(10)
        for storage in (ring, mirror):
            with pytest.raises(RunUnderWay):
                storage.extend(ring.in_order()[:1])
        collector.collect(30)
        assert_mirrored(ring)


def test_an_emptied_ring_empties_its_mirror(tmp_path: Path) -> None:
    with (
        MemmapStorage(tmp_path, max_size=7) as mirror,
        DeviceStorage(max_size=7, device="cpu", mirror=mirror) as ring,
    ):
        buffer = ReplayBuffer(storage=ring)
        buffer.extend(rows(0, 10))
        buffer.empty()
        assert (len(ring), len(mirror), ring.head) == (0, 0, 10)
        buffer.extend(rows(10, 13))
        again = DeviceStorage(max_size=7, device="cpu", mirror=mirror)
        for each in (ring, again):
            assert_mirrored(each)
            assert torch.equal(each.get([0, 1, 2])["x"], mirror.get([0, 1, 2])["x"])
        ring._attached_entities_list.clear()


# --- the lag --------------------------------------------------------------------------------------


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that commits nothing in the thread of a mirror until the event is set."""
    go, real = threading.Event(), RowWriter.append

    def append(self: RowWriter, *args: Any) -> range:
        if threading.current_thread().name == "tallyroll-mirror":
            assert go.wait(60)
        return real(self, *args)

    monkeypatch.setattr(RowWriter, "append", append)
    yield go
    go.set()


def run_of(ring: Any, frames: int = 60, **given: Any) -> SyncCollector:
    given = {"seed": 3, "frames_per_batch": 5, "total_frames": frames, "storage": ring, **given}
    return sync_collector(NEXT, Versioned().set_to(1), **given)


def test_the_run_waits_for_a_disk_that_is_slower(
    slow_disk: threading.Event, tmp_path: Path
) -> None:
    with (
        DeviceStorage(max_size=90, device="cpu", mirror=tmp_path, mirror_lag=12) as ring,
        run_of(ring) as collector,
    ):
        batches = iter(collector)
        next(batches), next(batches)
        assert (ring.head, ring.committed, len(ring)) == (10, 0, 10)
        late = threading.Thread(target=next, args=(batches,))
        late.start()
        late.join(0.2)
        assert late.is_alive(), "a third batch would be more than 12 rows ahead"
        slow_disk.set()
        late.join(60)
        assert not late.is_alive()
        assert ring.head == 15
        deque(batches, 0)
        assert ring.committed == 60, "the end of a run waits"
        assert_mirrored(ring)


def test_the_caller_may_reuse_the_memory_of_rows(
    slow_disk: threading.Event, tmp_path: Path
) -> None:
    with DeviceStorage(max_size=90, device="cpu", mirror=tmp_path, mirror_lag=12) as ring:
        ring.extend(TensorDict({"x": torch.arange(3)}, [3]))
        numbers = np.arange(3, 6)
        ring.writer.append(ArrayRows([numbers]))
        numbers[:] = -1
        tensors = torch.arange(6, 9)
        ring.writer.append_tensors({("x",): tensors}, 6)
        tensors.fill_(-1)
        slow_disk.set()
        ring.flush()
        assert ring.in_order()["x"].tolist() == [*range(9)]
        assert_mirrored(ring)


@pytest.mark.parametrize("wait", ["flush", "close", "checkpoint", "extend", "collect"])
def test_calls_that_wait_for_the_disk(
    wait: str, slow_disk: threading.Event, tmp_path: Path
) -> None:
    """A call with more rows than the lag also waits."""
    ring = DeviceStorage(max_size=90, device="cpu", mirror=tmp_path / "rows", mirror_lag=12)
    with run_of(ring, 100) as collector:
        next(iter(collector))
        assert (ring.head, ring.committed) == (5, 0)
        calls: dict[str, Callable[[], Any]] = {
            "flush": ring.flush,
            "close": ring.close,
            "checkpoint": lambda: save_checkpoint(tmp_path / "saved", collector=collector),
            "extend": lambda: ring.writer.put_record(b"record"),
            "collect": lambda: collector.collect(40),
        }
        threading.Timer(0.1, slow_disk.set).start()
        calls[wait]()
        assert ring.committed >= 5 + 28 * (wait == "collect")
        if wait == "close":
            with pytest.warns(ClosedFirstWarning):
                collector.shutdown()
    ring.close()


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    real, is_full = RowWriter.append, [False]

    def append(self: RowWriter, *args: Any) -> range:
        if is_full[0]:
            raise StorageFull("no space is left for 5 rows.")
        return real(self, *args)

    monkeypatch.setattr(RowWriter, "append", append)
    return is_full


@pytest.mark.parametrize("lag", [0, 12])
def test_a_disk_that_fails_raises_at_the_next_call(
    lag: int, full_disk: list[bool], tmp_path: Path
) -> None:
    ring = DeviceStorage(max_size=90, device="cpu", mirror=tmp_path, mirror_lag=lag)
    collector = run_of(ring)
    batches = iter(collector)
    next(batches)
    ring.flush()
    full_disk[0] = True
    with pytest.raises(WriteError, match="no space is left"):
        deque(batches, 0)
    assert ring.committed == 5
    if lag:
        for call in (ring.flush, partial(ring.writer.put_record, b""), ring.refill, ring.close):
            with pytest.raises(WriteError, match=r"mirror: .* has committed 5 rows and refused"):
                call()
    ring.close()
    assert ring.closed
    with open_storage(tmp_path) as disk:
        assert disk.head == 5
    full_disk[0] = False
    with (
        DeviceStorage(max_size=90, device="cpu", mirror=tmp_path, mirror_lag=lag) as again,
        run_of(again, resume=True) as collector,
    ):
        for _ in collector:
            pass
        assert collector.ledger.stored == again.committed == 60
        assert_mirrored(again)


def test_rows_are_not_called_durable_if_the_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Mirror, "_commit_queue", lambda self: None)
    monkeypatch.setattr("tallyroll.storage.ext.device.mirror._CHECK_SECONDS", 0.01)
    ring = DeviceStorage(max_size=90, device="cpu", mirror=tmp_path, mirror_lag=12)
    batches = iter(run_of(ring))
    for call in (partial(deque, batches, 0), ring.flush, ring.close):
        with pytest.raises(WriteError, match="the thread that writes has ended"):
            call()
    ring.close()
    with open_storage(tmp_path) as disk:
        assert disk.head == 0


@pytest.mark.parametrize("lag", [0, 12])
def test_rows_on_disk_count_if_the_device_fails(
    lag: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a lag, rows go to the device first, so those that it refused are not on the disk."""

    def fails(self: DeviceRows, values: Any) -> range:
        raise RuntimeError("the device is gone")

    with DeviceStorage(max_size=90, device="cpu", mirror=tmp_path, mirror_lag=lag) as ring:
        collector = run_of(ring)
        batches = iter(collector)
        next(batches)
        monkeypatch.setattr(DeviceRows, "write", fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            next(batches)
        ring.flush()
        stored = 5 if lag else 10
        assert (ring.head, ring.committed, len(ring)) == (stored, stored, 5 if lag else 0)
        assert collector.ledger.stored == stored
        monkeypatch.undo()
        ring.refill()
        assert_mirrored(ring)


def test_a_mirrored_ring_names_its_mirror_instead_of_a_state(tmp_path: Path) -> None:
    with DeviceStorage(max_size=9, device="cpu", mirror=tmp_path) as ring:
        with pytest.raises(NotPicklable, match=rf"Use its mirror, {tmp_path}"):
            ring.state_dict()
        with pytest.raises(ValueError, match="refill: expected a storage with a mirror"):
            DeviceStorage(max_size=9, device="cpu").refill()


def test_a_mirror_that_something_else_wrote_to_is_refused(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path) as mirror:
        ring = DeviceStorage(max_size=9, device="cpu", mirror=mirror)
        ring.extend(rows(0, 3))
        mirror.extend(rows(3, 5))
        with pytest.raises(NotAnAppend, match=r"to have 3 rows, got 5, because something else"):
            ring.extend(rows(3, 4))
        assert (ring.head, mirror.head) == (3, 5)
        ring.refill()
        assert ring.extend(rows(5, 6)) == range(5, 6)
        assert_mirrored(ring)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 30])
def test_a_checkpoint_rewinds_both(lag: int, tmp_path: Path) -> None:
    make = partial(
        DeviceStorage, max_size=20, device="cpu", mirror=tmp_path / "rows", mirror_lag=lag
    )
    with make() as ring, run_of(ring) as collector:
        collector.collect(25)
        given = ring if lag else None
        saved = save_checkpoint(tmp_path / "saved", collector=collector, storage=given)
        collector.collect(15)
    with (
        make() as ring,
        sync_collector(
            NEXT, Versioned(), frames_per_batch=5, total_frames=60, storage=ring, resume=True
        ) as collector,
    ):
        assert ring.span == range(20, 40)
        given = ring if lag else ring.mirror
        report = load_checkpoint(saved, collector=collector, storage=given)
        assert report.rewound == 15
        assert_mirrored(ring)
        assert ring.span == range(5, 25)
        for _ in collector:
            pass
        assert ring.committed == 60
        assert_mirrored(ring)
        ids = np.asarray(ring.mirror.column(("collector", "traj_ids")))  # type: ignore[union-attr]
        assert not set(ids[:25]) & set(ids[25:])


@pytest.mark.parametrize("lag", [0, 30])
def test_the_ring_stands_for_its_mirror_in_checkpoints(lag: int, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with DeviceStorage(max_size=5, device="cpu", mirror=tmp_path / "rows", mirror_lag=lag) as ring:
        ring.extend(rows(0, 4))
        ring.writer.append(ArrayRows([np.array([4]), *_others(1)]))
        save_checkpoint(saved, storage=ring, copy_rows=True)
        ring.extend(rows(5, 9))
        assert load_checkpoint(saved, storage=ring).rewound == 4
        assert ring.in_order()["x"].tolist() == [*range(5)]
        assert_mirrored(ring)
        ring.extend(rows(5, 6))
        assert load_checkpoint(saved, storage=ring, rows="keep").kept == 1
        assert_mirrored(ring)
    with DeviceStorage(max_size=5, device="cpu", mirror=tmp_path / "copy") as ring:
        load_checkpoint(saved, storage=ring)
        assert ring.in_order()["x"].tolist() == [*range(5)]
        assert_mirrored(ring)
    with pytest.raises(ArgumentError, match="a storage on disk, got DeviceStorage"):
        load_checkpoint(saved, storage=DeviceStorage(max_size=5, device="cpu"))


# --- copies and waits -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not SIMULATED, reason="only the simulated GPU counts copies")
@pytest.mark.parametrize(("env", "lag"), [("there", 0), ("there", 2000), ("cpu", 0), ("cpu", 2000)])
def test_each_row_crosses_the_bus_once(env: str, lag: int, tmp_path: Path) -> None:
    """A row that the host computes goes to the device, and another one to the host."""
    place, frames, batches = ACCELERATOR if env == "there" else "cpu", 640, 4
    counts = []
    for mirror in (None, tmp_path):
        lag_of = lag if mirror else 0
        with (
            DeviceStorage(
                max_size=3000, device=ACCELERATOR, mirror=mirror, mirror_lag=lag_of
            ) as ring,
            SyncCollector(
                TensorCartPole(64, place), Leaning(place), frames_per_batch=frames,
                total_frames=frames * (batches + 3), seed=3, finals="kept", storage=ring,
                storing_device="cpu" if place == "cpu" else None,
            ) as collector,
        ):  # fmt: skip
            own = iter(collector)
            next(own)
            fakegpu.reset_counts()
            for _ in range(batches):
                next(own)
            counts.append(fakegpu.counts())
            nbytes = ring.schema.row_nbytes * frames * batches
    plain, mirrored = counts
    computed = 31 * frames * batches  # flags, ids, steps, versions and lanes come from the host
    assert mirrored["h2d_bytes"] == plain["h2d_bytes"]
    more = mirrored.get("d2h_bytes", 0) - plain.get("d2h_bytes", 0)
    assert more == (nbytes - computed if env == "there" else 0)
    waits = mirrored.get("waits", 0) - plain.get("waits", 0)
    assert waits == (batches if env == "there" else 0)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mirror_lag": 3}, "mirror_lag: expected 0 without a mirror, got 3"),
        ({"mirror": "x", "mirror_lag": -1}, "mirror_lag: expected a number of rows"),
        ({"mirror": "x", "mirror_lag": True}, "mirror_lag: expected a number of rows"),
        ({"mirror": 5}, "mirror: expected a path or a MemmapStorage, got int"),
    ],
)
def test_invalid_arguments_are_refused(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        DeviceStorage(max_size=5, device="cpu", **given)
    assert not [*tmp_path.iterdir()]


def test_storages_that_cannot_be_a_mirror_are_refused(tmp_path: Path) -> None:
    make = partial(DeviceStorage, device="cpu")
    with MemmapStorage(tmp_path / "ring", max_size=8) as mirror:
        mirror.extend(rows(0, 3))
        with pytest.raises(ValueError, match=r"a ring of max_size=9 rows, got .* of 8 rows"):
            make(max_size=9, mirror=mirror)
        with pytest.raises(StorageLocked):
            make(max_size=8, mirror=tmp_path / "ring")
    with pytest.raises(StorageClosed):
        make(max_size=8, mirror=mirror)
    with pytest.raises(ValueError, match="a ring of max_size=9 rows"):
        make(max_size=9, mirror=tmp_path / "ring")
    with make(max_size=8, mirror=tmp_path / "ring") as ring:  # it was closed again
        assert_mirrored(ring)
    with (
        MemmapStorage(tmp_path / "ring", mode="read") as mirror,
        pytest.raises(ValueError, match=r'got .* with mode="read"'),
    ):
        make(max_size=8, mirror=mirror)


def test_a_mirror_whose_rows_do_not_fit_on_the_device_is_closed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with MemmapStorage(tmp_path) as mirror:
        mirror.extend(rows(0, 3))
    with monkeypatch.context() as small:
        small.setattr("tallyroll.storage.ext.device.device_rows.free_bytes", lambda device: 100)
        with pytest.raises(NotEnoughMemory, match=r"at most 8 rows, .* got 9 rows"):
            DeviceStorage(max_size=9, device="cpu", mirror=tmp_path)
    with DeviceStorage(max_size=9, device="cpu", mirror=tmp_path) as ring:
        assert_mirrored(ring)


def test_a_mirror_with_other_columns_is_refused(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path) as mirror:
        run_of(mirror, 10).collect(10)
        ring = DeviceStorage(max_size=8, device="cpu", mirror=mirror)
        with pytest.raises(SchemaMismatch, match="low is missing; high is missing"):
            sync_collector(NEXT, frames_per_batch=5, total_frames=60, storage=ring)
        with pytest.raises(RowsMismatch, match="x is not a column here"):
            ring.extend(rows(0, 3))
        assert mirror.head == ring.head == 10
        assert_mirrored(ring)
