"""Tallyroll's collector with worker processes on the same work."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from loops import Collecting, Work, make_vector_env, open_storage
from processes import START
from worker_peers import share

from tallyroll.collector import MultiprocessCollector

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tensordict.nn import TensorDictModule

MODES = ("sync", "async")
AHEAD = {"sync": 1, "async": 4}
"""Batches that may be ready after an idle time: there are two slabs per worker."""


def name_of(workers: int, mode: str) -> str:
    """Return the name for tables."""
    return f"tallyroll, {workers} workers, {mode}"


def workers_collecting(
    work: Work,
    policy: TensorDictModule | None,
    workers: int,
    mode: str,
    path: Path | None = None,
    make: Callable[[], Any] | None = None,
    *,
    ring: int | None = None,
    **options: Any,
) -> Collecting:
    """Start the workers. Each calls ``make``, by default for its share of the case's vector.

    ``path`` and ``ring`` are those of ``open_storage``, ``options`` the collector's.
    """
    written, storage = open_storage(work, path, ring)
    collector = MultiprocessCollector(
        make or partial(make_vector_env, share(work, workers).case),
        policy,
        num_workers=workers,
        mode=mode,
        frames_per_batch=work.case.frames,
        total_frames=-1,
        seed=0,
        storage=storage,
        mp_start_method=START,
        **options,
    )
    return Collecting(name_of(workers, mode) + written, work.case.lanes, collector, storage)
