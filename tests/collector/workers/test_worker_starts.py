"""A worker that cannot be started leaves no process, pipe or file."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.errors import ArgumentError, StateError, WorkerRaised
from tallyroll.collector.workers.local import processes
from tallyroll.storage import open_storage, verify

from collect_kit import ByObservation
from fork_server import warm_fork_server
from oracles import check_rows
from pairs import each_pair
from worker_kit import (
    DISABLED,
    LENGTHS,
    QUICK,
    assert_gone,
    factories,
    start,
)

RUN: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 200, "seed": 1}
ERRORS = [OSError(errno.EIO, "no luck"), KeyboardInterrupt(), OSError(errno.EAGAIN, "too many")]


def hang() -> Any:
    """Never return, so that a test that waits for this factory, or leaks its process, fails."""
    time.sleep(600)


class Failing:
    """Stand-in for `real` that raises from call `at` on, counted from 0.

    It raises instead of the call, or `after` it.
    """

    def __init__(
        self, real: Callable[..., Any], at: int, error: BaseException, after: bool
    ) -> None:
        self.real, self.at, self.error, self.after = real, at, error, after
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        """Make the call or raise."""
        fails, self.calls = self.calls >= self.at, self.calls + 1
        if fails and not self.after:
            raise self.error
        done = self.real(*args)
        if fails:
            raise self.error
        return done


@contextmanager
def failing(stage: str, at: int, error: BaseException) -> Iterator[list[int]]:
    """Make workers from `at` on fail to start, and yield the ids of those that started."""
    pids: list[int] = []
    process = processes.process_kind(QUICK["mp_start_method"])
    begin = process.start

    def started(self: Any) -> None:
        begin(self)
        pids.append(self.pid)

    watch: Any = started
    if stage in ("start", "started"):
        fails = Failing(started, at, error, after=stage == "started")
        watch = lambda self: fails(self)  # noqa: E731  a function is bound, an object is not
    with patch.object(process, "start", watch):
        if stage == "watch":
            with patch.object(
                processes, "kill_when_closed", Failing(processes.kill_when_closed, at, error, False)
            ):
                yield pids
        else:
            yield pids


def open_files() -> int:
    multiprocessing.active_children()  # releases the processes that have ended
    gc.collect()
    return psutil.Process().num_fds()


def assert_as_before(files: int, held: set[int]) -> None:
    """Check for no additional open files.

    The fork server may report an end with a delay.
    """
    assert processes._held == held
    until = time.monotonic() + 5
    while open_files() != files:
        assert time.monotonic() < until, f"{open_files()} open files, {files} before"
        time.sleep(0.01)


@each_pair(stage=["start", "started", "watch"], at=[0, 2], error=ERRORS)
def test_nothing_is_left_of_a_crew_that_cannot_be_started(
    stage: str, at: int, error: BaseException, tmp_path: Path
) -> None:
    warm_fork_server()
    files, held = open_files(), set(processes._held)
    wanted = ArgumentError if getattr(error, "errno", 0) == errno.EAGAIN else type(error)
    with failing(stage, at, error) as pids, pytest.raises(wanted):
        MultiprocessCollector([hang] * 4, storage=tmp_path / "s", **QUICK, **RUN)
    assert len(pids) == at + (stage != "start")
    assert_gone(pids)
    error.__traceback__ = None  # its traceback keeps references to local variables
    assert_as_before(files, held)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("stage", ["start", "watch"])
def test_a_worker_that_cannot_be_replaced_ends_the_run(
    stage: str, mode: Any, tmp_path: Path
) -> None:
    """Complete rows are stored, and the replacement process is gone."""
    warm_fork_server()
    files, held = open_files(), set(processes._held)
    error = OSError(errno.EIO, "no luck")
    options = {**RUN, "storage": tmp_path / "s", "mode": mode, "on_worker_death": "respawn"}
    with failing(stage, 3, error) as pids:
        makes = factories(DISABLED, 3, 6)
        with start(makes, ByObservation(), **options) as collector:
            batches = iter(collector)
            next(batches)
            os.kill(collector.worker_pids[1], signal.SIGKILL)
            with pytest.raises(OSError, match="no luck") as raised:
                list(batches)
            with pytest.raises(StateError, match=r"OSError was raised within it.*no luck"):
                list(batches)
            collector.ledger.check()
        counts = collector.ledger.counts()
    assert raised.value is error
    assert_gone(pids)
    with open_storage(tmp_path / "s") as storage:
        rows = storage.get(slice(None)).clone()
    assert len(rows) == counts["stored"] >= 10
    assert counts["carried"] == 0
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert verify(tmp_path / "s").sound
    error.__traceback__ = None
    del collector, batches, raised, storage
    assert_as_before(files, held)


@pytest.mark.parametrize("at", [0, 1])
def test_a_crew_can_be_started_after_one_that_could_not(at: int, tmp_path: Path) -> None:
    make = partial(start, factories(DISABLED, 2, 4), ByObservation(), **RUN, storage=tmp_path / "s")
    with failing("watch", at, OSError(errno.EIO, "no luck")), pytest.raises(OSError, match="luck"):
        make()
    with make() as collector:
        assert sum(map(len, collector)) == 200
    assert_gone(collector.worker_pids)


class FailsOnce:
    """Factory that fails in the first worker that starts, and creates ``mark``."""

    def __init__(self, real: Any, mark: Path, how: str) -> None:
        self.real, self.mark, self.how = real, mark, how

    def __call__(self) -> Any:
        first = not self.mark.exists()
        self.mark.touch()
        if first and self.how == "raises":
            raise ValueError("no luck")
        env = self.real()
        if first:
            env.reset = partial(os._exit, 3)  # called with arguments: an exit, or a TypeError
        return env


@pytest.mark.parametrize(
    ("mode", "how"),
    [("sync", "raises"), pytest.param("async", "resets", marks=pytest.mark.slow)],
)
def test_a_worker_that_fails_once_while_it_starts(tmp_path: Path, mode: str, how: str) -> None:
    """The replacement has the same seeds, so the rows equal those of a run without failures."""
    sound = factories(DISABLED, 2)
    found = []
    for create in (sound, [sound[0], FailsOnce(sound[1], tmp_path / "mark", how)]):
        options = {"on_worker_death": "respawn", "max_respawns": 1, "mode": mode}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with start(create, **RUN, **options) as collector:
                rows = [batch["observation"].clone() for batch in collector]
        found.append((rows, [str(each.message) for each in warned]))
    assert not [text for text in found[0][1] if "before it was ready" in text]
    (said,) = (text for text in found[1][1] if "before it was ready" in text)
    assert "worker 1" in said
    assert sum(map(len, found[1][0])) == 200
    if mode == "sync":
        assert all(map(torch.equal, found[0][0], found[1][0]))


def test_a_worker_that_fails_at_each_start(tmp_path: Path) -> None:
    class Never(FailsOnce):
        def __call__(self) -> Any:
            raise ValueError("no luck")

    sound = factories(DISABLED, 2)
    create = [sound[0], Never(sound[1], tmp_path / "mark", "")]
    with pytest.warns(UserWarning, match="before it was ready"), pytest.raises(WorkerRaised) as end:
        start(create, **RUN, on_worker_death="respawn", max_respawns=2)
    assert "max_respawns=2 workers were replaced before" in end.value.__notes__[0]
