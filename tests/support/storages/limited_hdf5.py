"""HDF5 files that exceed the file size limit (RLIMIT_FSIZE) during a write.

Each file is written once without a limit, and then under limits from zero to its size. Each attempt
runs in a forked process, which HDF5 may end.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit

ROWS, TRIES = 4000, 8


def rows() -> dict[Any, np.ndarray]:
    """Return rows of 8 trajectories whose values do not compress."""
    of_dice = np.random.default_rng(0).random((ROWS + 1, 8), np.float32)
    number = np.arange(ROWS)
    flag = np.zeros((ROWS, 1), bool)
    return {
        ("observation",): of_dice[:-1],
        ("action",): number,
        ("next", "observation"): of_dice[1:],
        ("next", "reward"): of_dice[:-1, :1],
        ("next", "done"): flag,
        ("next", "terminated"): flag,
        ("next", "truncated"): flag,
        ("collector", "traj_ids"): number // 500,
        ("collector", "step"): number % 500,
        ("collector", "lane"): np.zeros(ROWS, np.int32),
    }


def _pack(source: Path, path: Path, begin: Callable[[], None]) -> None:
    begin()
    with open_storage(source) as storage:
        storage.pack(path, format="hdf5")


def _export(kind: str, source: Path, path: Path, begin: Callable[[], None]) -> None:
    # Space is available when the export starts, and none when it writes its rows.
    with open_storage(source) as storage:
        storage.export(path, kind, progress=lambda *_: begin())


ACTS: dict[str, tuple[str, Callable[[Path, Path, Callable[[], None]], None]]] = {
    "pack": (".h5", _pack),
    "d4rl": (".hdf5", partial(_export, "d4rl")),
    "minari": ("", partial(_export, "minari")),
}


def _limits(path: Path) -> Iterator[int]:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    size = max(each.stat().st_size for each in files)
    yield from (size * number // TRIES for number in range(TRIES))
    yield size - 1


def _tried(act: Callable[..., None], source: Path, path: Path, limit: int) -> dict[str, Any]:
    out, into = os.pipe()
    child = os.fork()
    if not child:
        with ExitStack() as stack:
            try:
                act(source, path, lambda: stack.enter_context(file_size_limit(limit)))
                found = "ok"
            except Exception as error:  # noqa: BLE001  its name is the result
                found = f"{type(error).__name__}: {error}"
            gc.collect()
            os.write(into, found.encode()[:4000])
            os._exit(0)
    os.close(into)
    with open(out, "rb") as answer:
        error = answer.read().decode()
    _, status = os.waitpid(child, 0)
    return {
        "limit": limit,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "error": error,
        "there": path.exists(),
    }


def tries(folder: Path, what: str) -> Iterator[dict[str, Any]]:
    """Yield for each limit the error, the fatal signal, and whether the file exists."""
    source = folder / "source"
    with MemmapStorage(source) as storage:
        storage.extend(rows())
    suffix, act = ACTS[what]
    path = folder / "made" / f"it{suffix}"
    path.parent.mkdir()
    act(source, path, lambda: None)
    for limit in list(_limits(path)):
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        yield _tried(act, source, path, limit)
