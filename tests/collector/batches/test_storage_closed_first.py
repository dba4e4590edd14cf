"""Closing a storage before its collector gives one warning, leaves no worker and hides no error."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.base import Collector
from tallyroll.collector.batches.stored.writer import ClosedFirstWarning
from tallyroll.collector.errors import StateError
from tallyroll.storage import open_storage, verify
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.storages import DiskStorage

from formats_kit import KINDS
from worker_kit import QUICK, warm_fork_server

FRAMES, BATCH, LANES = 60, 10, 3
NOT_STORED = (
    "was closed before its collector, so the final ledger of the run and 2 transitions that waited "
    "for the next batch were not stored. Rows 0 to 9 of "
)
GOES_ON = "was closed before its collector, which cannot store more rows of the run"

Make = Callable[..., Collector]


def one_process(storage: DiskStorage | None, **more: Any) -> Collector:
    return SyncCollector("CartPole-v1", None, **options(storage), **more)


def workers(storage: DiskStorage | None, **more: Any) -> Collector:
    warm_fork_server()
    return MultiprocessCollector(
        "CartPole-v1", None, num_workers=2, **options(storage), **QUICK, **more
    )


def workers_async(storage: DiskStorage | None, **more: Any) -> Collector:
    return workers(storage, mode="async", **more)


def options(storage: DiskStorage | None) -> dict[str, Any]:
    return {
        "num_envs": LANES,
        "frames_per_batch": BATCH,
        "total_frames": FRAMES,
        "seed": 1,
        "storage": storage,
    }


def opened(folder: Path, kind: str) -> DiskStorage:
    return KINDS[kind](folder / kind, capacity=2 * FRAMES)


@contextlib.contextmanager
def one_warning(*parts: str) -> Iterator[None]:
    """Expect exactly one warning that contains all `parts`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [each.category for each in caught] == [ClosedFirstWarning], list(map(str, caught))
    assert all(part in str(caught[0].message) for part in parts), caught[0].message


def pids_of(collector: Collector) -> list[int]:
    return collector.worker_pids if isinstance(collector, MultiprocessCollector) else []


def assert_ended(pids: list[int]) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def assert_resumes(path: Path, stored: int) -> None:
    """Check that the stored rows are sound and that a resumed run completes."""
    assert verify(path).rows == stored
    assert verify(path).sound
    kind = KINDS[path.name]
    with (
        kind(path, mode="append", capacity=2 * FRAMES) as storage,
        one_process(storage, resume=True) as collector,
    ):
        for _ in collector:
            pass
        assert collector.ledger.stored == FRAMES
    report = verify(path)
    assert (report.rows, report.sound) == (FRAMES, True), report


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["close", "block", "finalize", "buffer", "buffer beside"])
def test_it_ends_with_one_warning(tmp_path: Path, kind: str, how: str) -> None:
    storage = opened(tmp_path, kind)
    buffer = None
    if how.startswith("buffer"):
        behind: Any = storage if how == "buffer" else LazyTensorStorage(100)
        buffer = ReplayBuffer(storage=behind, batch_size=4)
    collector = one_process(storage, replay_buffer=buffer)
    next(iter(collector))
    assert collector.ledger.stored == BATCH
    if how == "block":
        with storage:
            pass
    else:
        storage.finalize() if how == "finalize" else storage.close()
    with one_warning(NOT_STORED, str(tmp_path / kind), "with resume=True"):
        collector.shutdown()
    ledger = collector.ledger
    assert (ledger.stored, ledger.discarded, ledger.carried) == (BATCH, 2, 0)
    assert ledger.executed == BATCH + 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector.shutdown()  # A second call is harmless.
        assert list(collector) == []
    assert_resumes(tmp_path / kind, BATCH)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("make", "kind"), [(workers, "rows.zarr"), (workers_async, "rows.h5")])
def test_workers_end(tmp_path: Path, make: Make, kind: str) -> None:
    storage = opened(tmp_path, kind)
    with one_warning("for the next batch were not stored. Rows 0 to 9 of "):
        with make(storage) as collector:
            pids = pids_of(collector)
            for _ in collector:
                storage.close()
                break
            assert len(pids) == 2
        assert_ended(pids)
    assert_resumes(tmp_path / kind, BATCH)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("make", "kind"),
    [*((one_process, kind) for kind in KINDS), (workers_async, "rows")],
)
def test_a_further_iteration_raises_one_clear_error(tmp_path: Path, make: Make, kind: str) -> None:
    storage = opened(tmp_path, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(storage) as collector:
            batches, pids = [], pids_of(collector)

            def run() -> None:
                for batch in collector:
                    batches.append(batch)
                    storage.close()

            with pytest.raises(StorageClosed, match=GOES_ON) as caught:
                run()
            assert [len(batch) for batch in batches] == [BATCH]
            assert caught.value.__cause__ is caught.value.__context__ is None
            (note,) = caught.value.__notes__
            assert "tallyroll: another error at the end of the run: StorageClosed: " in note
            assert "so the final ledger of the run and " in note
            ledger = collector.ledger
            assert (ledger.stored, ledger.carried) == (BATCH, 0)
            assert ledger.executed == BATCH + ledger.discarded
            with pytest.raises(StateError, match="the run ended when StorageClosed was raised"):
                list(collector)
        assert_ended(pids)
    assert_resumes(tmp_path / kind, BATCH)


class Mine(Exception):
    """Exception of the user's code."""


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_in_the_wrong_order_do_not_hide_an_error(tmp_path: Path, kind: str) -> None:
    storage = opened(tmp_path, kind)

    def run() -> None:
        with one_process(storage) as collector, storage:
            next(iter(collector))
            raise Mine

    with one_warning("was closed before its collector"), pytest.raises(Mine) as caught:
        run()
    assert caught.value.__context__ is None


def test_another_error_at_the_end_does_not_hide_it(tmp_path: Path) -> None:
    storage = opened(tmp_path, "rows")

    def run() -> None:
        with one_process(storage) as collector:
            next(iter(collector))
            storage.writer.files.lock_path.unlink()
            raise Mine

    with pytest.raises(Mine) as caught:
        run()
    (note,) = caught.value.__notes__
    assert "at the end of the run: StorageLocked: " in note
    storage.close()


@pytest.mark.parametrize("how", ["postproc", "policy error"])
@pytest.mark.parametrize("kind", KINDS)
def test_closed_while_a_batch_is_made(tmp_path: Path, kind: str, how: str) -> None:
    """The user's code closes the storage during a batch.

    All rows counted as stored are committed.
    """
    storage = opened(tmp_path, kind)
    batches = 0

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        nonlocal batches
        batches += 1
        if batches == 2:
            storage.close()
        return batch

    class Policy:
        calls = 0

        def __call__(self, td: TensorDictBase) -> TensorDictBase:
            self.calls += 1
            if self.calls == 6:
                storage.close()
                raise Mine
            return td.set("action", torch.zeros(td.batch_size, dtype=torch.long))

    wanted: type[Exception] = StorageClosed if how == "postproc" else Mine
    collector = (
        one_process(storage, postproc=postproc)
        if how == "postproc"
        else SyncCollector("CartPole-v1", Policy(), **options(storage))
    )
    with collector, pytest.raises(wanted) as caught:
        for _ in collector:
            pass
    assert caught.value.__notes__
    assert collector.ledger.stored == BATCH
    ledger = collector.ledger
    assert ledger.executed == ledger.stored + ledger.discarded
    with open_storage(tmp_path / kind) as found:
        assert len(found) == BATCH


def test_a_run_that_is_over_has_nothing_to_warn_of(tmp_path: Path) -> None:
    storage = opened(tmp_path, "rows")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with one_process(storage) as collector:
            for _ in collector:
                pass
            storage.close()
    with pytest.raises(StorageClosed):
        one_process(storage)
    assert_resumes(tmp_path / "rows", FRAMES)


def test_before_the_first_batch(tmp_path: Path) -> None:
    storage = opened(tmp_path, "rows")
    with (
        one_warning("and 0 transitions", "No rows of this run are committed"),
        one_process(storage),
    ):
        storage.close()
    assert_resumes(tmp_path / "rows", 0)


PROGRAM = """
import sys
from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.storage import MemmapStorage
if __name__ == "__main__":
    options = dict(num_envs=3, frames_per_batch=10, total_frames=60, seed=1)
    one, two = MemmapStorage(sys.argv[1]), MemmapStorage(sys.argv[2])
    collector = SyncCollector("CartPole-v1", None, storage=one, **options)
    other = MultiprocessCollector("CartPole-v1", None, num_workers=2, storage=two, **options)
    next(iter(collector)), next(iter(other))
    print(*other.worker_pids, flush=True)
    one.close()
    two.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_interpreters_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, tmp_path / "one", tmp_path / "two"],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=150,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2
    assert_ended(pids)
    for name in ("one", "two"):
        assert (verify(tmp_path / name).rows, verify(tmp_path / name).sound) == (BATCH, True)
