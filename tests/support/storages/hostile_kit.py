"""Storages filled by a collector, all ways to open them, and children with little memory."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.errors import CollectorError
from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.errors import StorageError
from tallyroll.storage.storages import DiskStorage

KINDS: dict[str, type[DiskStorage]] = {
    "rows": MemmapStorage,
    "rows.h5": H5Storage,
    "rows.zarr": ZarrStorage,
}
ROWS = 40
GIB = 2**30


def collect(path: Path, frames: int = ROWS, **options: Any) -> None:
    with SyncCollector(
        "CartPole-v1",
        num_envs=2,
        frames_per_batch=10,
        total_frames=frames,
        seed=0,
        storage=path,
        **options,
    ) as collector:
        for _ in collector:
            pass


# --- ways to open a storage -----------------------------------------------------------------------


def read(path: Path) -> None:
    with open_storage(path) as storage:
        storage.get(np.arange(len(storage)))
        len(storage.trajectories)
        storage.get(slice(None))
        storage.manifest["runs"]


def append(path: Path) -> None:
    with open_storage(path, "append", capacity=3 * ROWS) as storage:
        rows = storage.get(np.arange(min(5, len(storage))))
        with contextlib.suppress(StorageError):
            storage.extend(rows)
        storage.extend(rows, ids="renumber")
        storage.flush()


def resume(path: Path) -> None:
    collect(path, 2 * ROWS, resume=True)


def finalize(path: Path) -> None:
    with open_storage(path, "append") as storage:
        storage.finalize()


def look(path: Path) -> None:
    verify(path)


def inspect(path: Path) -> None:
    """Inspect by the command line, which prints one line and no traceback for every error."""
    for command in (["inspect", "--rows", "2"], ["inspect", "--json"], ["verify"]):
        said, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
            status = main([*command, str(path)])
        assert "Traceback" not in told.getvalue(), told.getvalue()
        lines = [line for line in told.getvalue().splitlines() if line.startswith("tallyroll: er")]
        if status == 0:
            assert not lines
        elif command[0] == "inspect":
            assert status == 1
            assert len(lines) == 1
            assert told.getvalue().count("\n") == 1, told.getvalue()
        else:
            assert status in (1, 2)
            assert len(lines) == (status == 2), told.getvalue()


WAYS: tuple[Callable[[Path], None], ...] = (read, look, inspect, append, resume, finalize)


def told_or_done(way: Callable[[Path], None], path: Path) -> str:
    """Return the unexpected error of a call, or "" for one of our errors or success."""
    try:
        way(path)
    except (StorageError, CollectorError):
        return ""
    except Exception as error:  # noqa: BLE001 - the test looks for such errors
        return "".join(traceback.format_exception(error))
    return ""


# --- children -------------------------------------------------------------------------------------


def in_a_child(
    act: Callable[[], Any], *, seconds: float = 60, nbytes: int = 0, user: int = 0
) -> Any:
    """Return the result of ``act`` in a forked child with a limit of ``nbytes`` more memory.

    ``user`` selects another user for the child.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reader)
            if nbytes:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                most = pages * resource.getpagesize() + nbytes
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            if user:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            try:
                answer = True, act()
            except BaseException:  # noqa: BLE001 - the parent raises it
                answer = False, traceback.format_exc()
            with open(writer, "wb") as file:
                pickle.dump(answer, file)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as file:
        content, deadline = b"", time.monotonic() + seconds
        while True:
            if not select.select([file], [], [], max(0, deadline - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail(f"not done within {seconds} s")
            part = os.read(file.fileno(), 2**16)
            if not part:
                break
            content += part
    _, status = os.waitpid(child, 0)
    assert not status, f"the child ended with status {status}"
    done, answer = pickle.loads(content)
    assert done, answer
    return answer
