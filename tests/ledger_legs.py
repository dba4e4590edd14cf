"""Legs of a run, each a process of its own; small enough for it to import."""

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

from test_collect_kit import ByObservation
from worker_kit import LANES, factory

RUN: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 90}


@dataclass(frozen=True)
class Leg:
    """So many batches, from the `start` to the `end`.

    `start`: "new", "resume", "load" (append, and load the state that was saved last), "elsewhere"
    (load it in a new storage). `end`: "kill" or "close"; None goes on to the last batch.
    """

    start: str
    batches: int | None
    end: str = "kill"


def lead(leg: Leg, source: str, path: Path, state: Any, connection: Connection) -> None:
    """In a process of its own: tell the ledger once it stands, and at every batch."""
    torch.set_num_threads(1)
    storage: Any = path if leg.start == "resume" else MemmapStorage(
        path, mode="append" if leg.start == "load" else "create"
    )  # fmt: skip
    collector = SyncCollector(
        factory(source, 0, LANES),
        ByObservation(),
        storage=storage,
        seed=None if leg.start == "resume" else 5,
        resume=leg.start == "resume",
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
    if leg.start != "resume":
        storage.close()
