"""A third-party ring in memory gets the same rows as storages on disk."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ram_ring import RamRing
from torchrl.data import LazyTensorStorage

from tallyroll.collector import MultiprocessCollector, SyncCollector, save_checkpoint
from tallyroll.collector.base import Collector
from tallyroll.collector.batches.stored.sinks import accepts_rows
from tallyroll.collector.errors import ArgumentError, StateError, UserStopIteration
from tallyroll.collector.native.kernel import compiled
from tallyroll.storage import MemmapStorage
from tallyroll.storage.errors import RunUnderWay, SchemaMismatch, StorageClosed
from tallyroll.storage.stores.row_sink import BufferedWriter, RowSink, RunsOfSink, RunWriter, absent

from collect_kit import ByObservation
from worker_kit import DISABLED, LANES, NEXT, Versioned, sync_collector, worker_collector

FEW, MANY = 2 * LANES, 7 * LANES + 1
"""Rows of a batch: few slots stay in the slab, and many are gathered."""

KINDS: dict[str, Any] = {
    "few": partial(sync_collector, NEXT, frames_per_batch=FEW),
    "many": partial(sync_collector, DISABLED, frames_per_batch=MANY),
    "postproc": partial(sync_collector, NEXT, frames_per_batch=FEW, postproc=lambda rows: rows),
    "workers": partial(worker_collector, NEXT, 2, mode="sync", frames_per_batch=FEW),
}


def run(make: Any, storage: RowSink, frames: int, **given: Any) -> Collector:
    """Collect `frames` rows in all, first in batches and then in one call."""
    collector: Collector = make(
        Versioned().set_to(1), storage=storage, total_frames=frames, **given
    )
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


def rows_of(sink: RowSink) -> dict[Any, np.ndarray]:
    reader = sink.reader
    rows = np.arange(reader.span.start, reader.span.stop)
    return {key: reader.column(key).take(rows) for key in reader.keys}


def entries_of(sink: RowSink) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in run.items() if name != "made"}
        for run in sink.reader.manifest["runs"]
    ]


@pytest.mark.parametrize(("kind", "size"), [*((kind, 90) for kind in KINDS), ("few", 1000)])
def test_a_ring_in_memory_gets_the_rows_of_one_on_disk(
    kind: str, size: int, tmp_path: Path
) -> None:
    """Rows, counts, versions and the record are compared, also in a resumed run."""
    ring, path = RamRing(size), tmp_path / "rows"
    for storage in (ring, MemmapStorage(path, max_size=size)):
        with nullcontext(storage) if storage is ring else storage:
            assert run(KINDS[kind], storage, 150, seed=3).ledger.stored == 150
            assert storage.reader.head == 150
    with MemmapStorage(path, mode="append") as disk:
        for sink in (ring, disk):
            assert run(KINDS[kind], sink, 320, resume=True).ledger.stored == 320
        assert ring.reader.span == disk.span == range(max(0, 320 - size), 320)
        mine, wanted = rows_of(ring), rows_of(disk)
        assert mine.keys() == wanted.keys()
        assert all(np.array_equal(mine[key], wanted[key]) for key in wanted)
        assert ring.reader.record == disk.record
        assert entries_of(ring) == entries_of(disk)
    versions = mine["collector", "policy_version"]
    assert versions.max() == 5
    assert size == 90 or {*versions.tolist()} == {0, 1, 2, 3, 4, 5}
    assert ring.flushed == 2


@pytest.mark.skipif(compiled() is None, reason="without the extension, that is the reason")
def test_the_plan_says_why_rows_go_another_way() -> None:
    given: dict[str, Any] = {"frames_per_batch": FEW, "total_frames": FEW}
    with sync_collector(NEXT, storage=RamRing(50), **given) as collector:
        plan = str(collector.plan).splitlines()
    assert "rows       slab" in plan
    why = "because a RamRing has no files that the extension writes to"
    assert f"commits    rows, {why}" in plan


def test_async_workers_collect_exactly_as_many() -> None:
    ring = RamRing(40)
    make = partial(worker_collector, DISABLED, 2, mode="async", frames_per_batch=FEW)
    collector = run(make, ring, 123, seed=3)
    assert collector.ledger.stored == ring.reader.head == 123
    assert isinstance(collector, MultiprocessCollector)
    rows = rows_of(ring)
    assert (rows["low",] == rows["high",]).all()


def test_rows_before_an_error_are_counted_and_the_run_goes_on() -> None:
    """The errors come from the environment, from the sink, and from a closed sink."""
    ring, calls = RamRing(50), iter(range(1 + 12))

    def fails(td: Any) -> Any:
        next(calls)
        return ByObservation()(td)

    given: dict[str, Any] = {"frames_per_batch": FEW, "total_frames": 200, "seed": 0}
    with (
        sync_collector(DISABLED, fails, storage=ring, **given) as collector,
        pytest.raises(UserStopIteration),
    ):
        collector.collect(200)
    kept = ring.reader.head
    assert kept == collector.ledger.stored == 12 * LANES  # the first call is a trial
    ring.append, append = refuses, ring.append
    with (
        sync_collector(DISABLED, ByObservation(), storage=ring, resume=True, **given) as collector,
        pytest.raises(MemoryError, match="no room"),
    ):
        collector.collect(10)
    assert collector.ledger.stored == ring.reader.head == kept
    ring.append = append
    with sync_collector(DISABLED, ByObservation(), storage=ring, resume=True, **given) as collector:
        collector.collect(17)
        with pytest.raises(RunUnderWay):
            sync_collector(DISABLED, storage=ring, **given).collect(1)
        assert collector.ledger.stored == ring.reader.head == kept + 17
        ring.reader.close()
        with pytest.raises(
            StorageClosed, match="memory was closed before its collector, which cannot store"
        ):
            collector.collect(5)
    with pytest.raises(StorageClosed, match="Open it again"):
        sync_collector(DISABLED, ByObservation(), storage=ring, **given)


def refuses(*_: Any) -> range:
    raise MemoryError("no room")


def test_calls_of_environments_are_in_the_entry_of_their_run() -> None:
    ring = RamRing(50)
    with sync_collector(DISABLED, storage=ring, frames_per_batch=5, total_frames=20) as collector:
        collector.collect(5)
        collector.env_call("get_wrapper_attr", "lane")
        collector.collect(5)
    events = ring.reader.manifest["runs"][-1]["events"]
    assert [(each["name"], each["row"]) for each in events] == [("get_wrapper_attr", 5)]


# --- invalid sinks --------------------------------------------------------------------------------


def test_storages_on_disk_are_sinks_and_those_of_torchrl_are_not(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        assert not absent(RowSink, storage)
        assert not absent(BufferedWriter, storage.writer)
        assert not absent(RunsOfSink, storage.writer.runs)
        assert accepts_rows(storage)
    assert not absent(RunWriter, RamRing(3))
    assert not accepts_rows(LazyTensorStorage(3))


class Bare:
    """Sink with a part of the required members."""

    mode = "append"
    reader = writer = None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (object(), "expected a path or a tallyroll storage, got object"),
        (
            Bare(),
            r"got a Bare without reserve, flush, writer\.claim, writer\.runs, .* reader\.path",
        ),
    ],
)
def test_what_a_storage_lacks_is_named(given: Any, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        SyncCollector("CartPole-v1", frames_per_batch=5, total_frames=5, storage=given)


@pytest.mark.parametrize(
    ("name", "where"),
    [("flush", ""), ("append", "writer."), ("add_event", "writer.runs."), ("column", "reader.")],
)
def test_one_member_that_is_missing_is_named(name: str, where: str) -> None:
    ring = RamRing(9)
    found = {"": ring, "writer.": ring, "writer.runs.": ring, "reader.": ring.reader}[where]
    lacks = type("Lacks", (), {})()
    for each in dir(found):
        if each != name and not each.startswith("__"):
            setattr(lacks, each, getattr(type(found), each, None) or getattr(found, each))
    owner = {"": None, "writer.": "writer", "writer.runs.": "runs", "reader.": "reader"}[where]
    if owner is None:
        ring = lacks
    else:
        setattr(ring, owner, lacks)
    with pytest.raises(ArgumentError, match=rf"without (.*, )?{where}{name}(,|\. See)"):
        SyncCollector("CartPole-v1", frames_per_batch=5, total_frames=5, storage=ring)


def test_a_ring_in_memory_is_refused_as_a_storage_on_disk_is() -> None:
    given: dict[str, Any] = {"num_envs": 2, "total_frames": 20}
    ring = RamRing(9)
    with pytest.raises(ArgumentError, match=r"at most the 9 rows of the ring .*memory, got 10"):
        SyncCollector("CartPole-v1", frames_per_batch=10, storage=ring, **given)
    with pytest.raises(StateError, match="memory holds no run"):
        SyncCollector("CartPole-v1", frames_per_batch=5, storage=ring, resume=True, **given)
    with SyncCollector("CartPole-v1", frames_per_batch=5, storage=ring, **given) as collector:
        collector.collect(5)
        with pytest.raises(
            ArgumentError, match=r"got one with a RamRing\. Save its state_dict\(\)"
        ):
            save_checkpoint("unused", collector=collector)
    with pytest.raises(SchemaMismatch):
        SyncCollector("Acrobot-v1", frames_per_batch=5, storage=ring, **given)
    ring.mode = "read"
    with pytest.raises(ArgumentError, match=r'memory is open for reading\. Open it with mode="app'):
        SyncCollector("CartPole-v1", frames_per_batch=5, storage=ring, **given)
