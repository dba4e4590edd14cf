"""Legs of a run, each in its own process. The module is small, so that it imports fast."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage

from collect_kit import ByObservation
from worker_kit import LANES, factory

RUN: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 90}


@dataclass(frozen=True)
class Leg:
    """A part of a run: `batches` batches, from the `start` to the `end`.

    `start` is "new", "append" (another run in the same storage), "resume", "load" (append, and load
    the last saved state) or "elsewhere" (load it in a new storage). `older` loads the state saved
    before the last one. `end` is "kill" or "close". With None batches the run continues to its end.
    """

    start: str
    batches: int | None
    end: str = "kill"
    older: bool = False


def lead(leg: Leg, source: str, path: Path, state: Any, connection: Connection) -> None:
    """Run a leg in its own process. Send the ledger at the start and at every batch."""
    torch.set_num_threads(1)
    resumes = leg.start == "resume"
    storage: Any = path if resumes else MemmapStorage(
        path, mode="append" if leg.start in ("load", "append") else "create"
    )  # fmt: skip
    collector = SyncCollector(
        factory(source, 0, LANES),
        ByObservation(),
        storage=storage,
        seed=None if resumes else 5,
        resume=resumes,
        **RUN,
    )
    if state is not None:
        collector.load_state_dict(state)

    def tell(rows: int, ends: int) -> None:
        connection.send((collector.ledger.counts(), rows, ends, collector.state_dict()))
        connection.recv()

    tell(0, 0)
    if leg.batches != 0:
        for number, batch in enumerate(collector, start=1):
            ends = batch["next", "done"].reshape(-1) & ~batch["collector", "cut"]
            tell(len(batch), int(ends.sum()))
            if number == leg.batches:
                break
    if leg.end == "kill" and leg.batches is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    collector.shutdown()
    connection.send(collector.ledger.counts())
    connection.recv()
    if not resumes:
        storage.close()
