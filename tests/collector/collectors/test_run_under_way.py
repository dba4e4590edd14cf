"""While a collector writes a run, other writers cannot add rows, which would count as its own."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.errors import StateError
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import RunUnderWay, TrajectoryIdTaken
from tallyroll.storage.storages import DiskStorage

KINDS = {"sync": SyncCollector, "workers": MultiprocessCollector}
IDS = ("collector", "traj_ids")


def collector(kind: str, **to: Any) -> Any:
    more = {"num_workers": 2} if kind == "workers" else {}
    wanted = {"num_envs": 2, "frames_per_batch": 20, "total_frames": 80, "seed": 0, **more, **to}
    return KINDS[kind]("CartPole-v1", None, **wanted)


def elsewhere(storage: DiskStorage) -> TensorDictBase:
    """Return a row of a trajectory that is not in the storage."""
    rows = storage.get(np.arange(1))
    rows[IDS] = torch.tensor([1_000_000])
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("through", ["storage", "buffer"])
def test_rows_from_elsewhere_wait_for_the_end_of_a_run(
    tmp_path: Path, kind: str, through: str
) -> None:
    storage = MemmapStorage(tmp_path / "rows")
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    to = {"storage": storage} if through == "storage" else {"replay_buffer": buffer}
    with storage, collector(kind, **to) as run:
        for batch in itertools.islice(run, 2):
            del batch
            rows = elsewhere(storage)
            head = storage.head
            for add in (
                storage.extend,
                lambda given: storage.extend(given, ids="renumber"),
                lambda given: storage.set(range(storage.head, storage.head + 1), given),
                buffer.extend,
                lambda given: buffer.add(given[0]),
            ):
                with pytest.raises(RunUnderWay, match="a collector is writing a run"):
                    add(rows)
            assert storage.head == head
        for _ in run:
            pass
        assert run.ledger.stored == storage.head == 80
        storage.extend(elsewhere(storage))  # the run is over
        buffer.extend(elsewhere(storage).set(IDS, torch.tensor([2_000_000])))
        assert storage.head == 82
        runs = storage.manifest["runs"]
        assert [run["first_row"] for run in runs] == [0, 80]
    assert verify(tmp_path / "rows").sound
    with pytest.raises(StateError, match="its last run has no seed"):
        collector(kind, storage=tmp_path / "rows", resume=True)


@pytest.mark.parametrize("ends", ["shutdown", "left", "refused"])
def test_a_run_that_is_left_leaves_the_storage(tmp_path: Path, ends: str) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        with collector("sync", storage=storage) as run:
            for _ in run:
                pass
        if ends == "refused":
            with contextlib.suppress(Exception):
                SyncCollector(
                    "NoSuch-v0", None, frames_per_batch=1, total_frames=1, storage=storage
                )
        else:
            other = collector("sync", storage=storage, total_frames=-1)
            next(iter(other))
            if ends == "shutdown":
                other.shutdown()
            del other
            gc.collect()
        storage.extend(elsewhere(storage))


def test_a_run_that_is_over_takes_nothing_from_the_next(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        first = collector("sync", storage=storage)
        for _ in first:
            pass
        with collector("sync", storage=storage) as second:
            next(iter(second))
            first.shutdown()
            with pytest.raises(RunUnderWay):
                storage.extend(elsewhere(storage))
        storage.extend(elsewhere(storage))


def test_a_checkpoint_is_not_loaded_into_a_run(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage, collector("sync", storage=storage) as run:
        next(iter(run))
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        buffer.dumps(tmp_path / "dump")
        with pytest.raises(RunUnderWay):
            buffer.loads(tmp_path / "dump")
        for _ in run:
            pass
        assert storage.head == 80
    assert verify(tmp_path / "rows").sound


def test_ids_vouched_for_by_one_thread_are_checked_for_another(tmp_path: Path) -> None:
    """A collector writes through a buffer in one thread, and another writer uses another thread."""
    with MemmapStorage(tmp_path / "rows") as storage:
        with collector("sync", storage=storage) as run:
            for _ in run:
                pass
        rows, raised = storage.get(np.arange(4)), []

        def add() -> None:
            try:
                storage.set(range(storage.head, storage.head + 4), rows)
            except Exception as error:  # noqa: BLE001  it is looked at below
                raised.append(type(error).__name__)

        with storage.writer.fresh_ids():
            thread = threading.Thread(target=add)
            thread.start()
            thread.join(10)
        assert raised == ["TrajectoryIdTaken"]
        assert storage.head == 80


def test_a_resumed_run_counts_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with collector("sync", storage=path) as run:
        next(iter(run))
    with open_storage(path, "append") as storage:
        with pytest.raises(TrajectoryIdTaken):
            storage.extend(storage.get(np.arange(2)))
        assert len(storage.manifest["runs"]) == 1  # a refused write begins no run
        with collector("sync", storage=storage, resume=True, seed=None) as run:
            next(iter(run))
            with pytest.raises(RunUnderWay):
                storage.extend(elsewhere(storage))
            for _ in run:
                pass
            assert run.ledger.stored == storage.head == 80
    assert verify(path).sound
