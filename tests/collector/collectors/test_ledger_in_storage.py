"""The ledger in a storage is that of the run at every moment, so that each run continues exactly.

Each leg of a run is a process of its own, which ends normally or is killed. It continues from the
storage (``resume=True``) or from a state that an earlier leg saved (``load_state_dict``).
``TALLYROLL_LEDGERS`` is the number of random chains of legs, 2 by default.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.files.run_record import RunRecord

from collect_kit import ByObservation
from ledger_legs import RUN, Leg, lead
from oracles import check_rows
from worker_kit import (
    DISABLED,
    LENGTHS,
    NEXT,
    SAME,
    collect_all,
    sync_collector,
    warm_fork_server,
    worker_collector,
)

CHAINS = int(os.environ.get("TALLYROLL_LEDGERS", "2"))
Counts = dict[str, int]


@dataclass
class Model:
    """Rows that a run has delivered and that its next leg continues."""

    spans: list[tuple[int, Path, int, int]] = field(default_factory=list)
    """Leg, storage, first row and end of each batch."""
    stored: int = 0
    complete: int = 0
    incarnation: int = 0

    def copy(self) -> Model:
        return Model(list(self.spans), self.stored, self.complete, self.incarnation)


def in_storage(path: Path) -> tuple[Counts | None, int]:
    """Return the ledger in a storage and the number of its rows."""
    with open_storage(path, mode="read") as storage:
        record = RunRecord.parse(storage.record)
        return (None if record is None else record.ledger), storage.head


def require(counts: Counts, model: Model) -> None:
    assert counts["stored"] == model.stored
    assert counts["episodes_complete"] == model.complete
    assert counts["incarnation"] == model.incarnation
    assert counts["slots"] == counts["executed"] + counts["reset_slots"]
    parts = ("stored", "discarded", "carried", "lost")
    assert counts["executed"] == sum(counts[part] for part in parts)
    assert min(counts.values()) >= 0


class Chain:
    """Consecutive legs of a run, and the rows that they should have stored."""

    def __init__(self, folder: Path, source: str) -> None:
        self.source, self.folder = source, folder
        self.path = folder / "0"
        self.model = Model()
        self.legs = 0
        self.saved: list[tuple[Any, Model]] = []

    def run(self, leg: Leg) -> Counts:
        """Run a leg and return the ledger that it left."""
        state, before = None, None
        self.legs += 1
        if leg.start in ("load", "elsewhere"):
            state, model = self.saved[-2 if leg.older else -1]
            self.model, before = model.copy(), state["ledger"]
        if leg.start == "elsewhere":
            self.path = self.folder / str(int(self.path.name) + 1)
        if leg.start == "append":
            self.model = Model()
        elif leg.start != "new":
            self.model.incarnation += 1
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("forkserver").Process(
            target=lead, args=(leg, self.source, self.path, state, theirs)
        )
        process.start()
        theirs.close()
        counts: Counts = {}
        try:
            first = True
            while True:
                try:
                    said = ours.recv()
                except EOFError:
                    break
                if isinstance(said, dict):
                    counts = said
                    require(counts, self.model)
                    assert in_storage(self.path)[0] == counts
                else:
                    counts, rows, ends, state_now = said
                    self._hear(leg, counts, rows, ends, first, before)
                    self.saved.append((state_now, self.model.copy()))
                    first = False
                ours.send(None)
        finally:
            process.join(20)
            ours.close()
        killed = leg.end == "kill" and leg.batches is not None
        assert process.exitcode == (-signal.SIGKILL if killed else 0)
        return counts

    def _hear(
        self, leg: Leg, counts: Counts, rows: int, ends: int, first: bool, before: Counts | None
    ) -> None:
        model = self.model
        model.stored += rows
        model.complete += ends
        require(counts, model)
        ledger, head = in_storage(self.path)
        state = leg.start in ("load", "elsewhere")
        with open_storage(self.path, mode="read") as storage:
            run = storage.manifest["runs"][-1]
        if rows:
            model.spans.append((self.legs, self.path, head - rows, head))
        if first and before is not None:
            assert counts["discarded"] == before["discarded"] + before["carried"]
        if not first or state:  # a new run and a resumed one begin with their rows
            assert ledger == counts
        assert (run["seed"], run["incarnation"]) == (5, counts["incarnation"])
        assert run["first_row"] <= head

    def check(self) -> None:
        """Check that each delivered row exists once, and that its trajectory is correct."""
        rows: dict[int, list[Any]] = {}
        for leg, path, start, stop in self.model.spans:
            with open_storage(path, mode="read") as storage:
                rows.setdefault(leg, []).append(storage.get(slice(start, stop)).clone())
        for each in rows.values():  # each process creates its environments again
            check_rows(torch.cat(each), LENGTHS, ends="mixed")
        every = torch.cat([batch for each in rows.values() for batch in each])
        assert len(every) == RUN["total_frames"] == self.model.stored
        ids, done = every["collector", "traj_ids"], every["next", "done"].reshape(-1)
        ended = ids[done]
        assert len(ended.unique()) == len(ended) == self.model.complete
        ledger, _ = in_storage(self.path)
        assert ledger is not None
        require(ledger, self.model)
        assert ledger["episodes_cut"] == len(ids.unique()) - len(ended)
        assert ledger["carried"] == 0
        for path in {span[1] for span in self.model.spans}:
            assert verify(path).sound


@pytest.fixture(autouse=True, scope="module")
def server() -> None:
    """Start the fork server, so that processes start quickly."""
    warm_fork_server()


def through_all(folder: Path, source: str, legs: Sequence[Leg]) -> Counts:
    chain = Chain(folder, source)
    for leg in (*legs, Leg("resume", None)):
        counts = chain.run(leg)
    chain.check()
    return counts


CASES = {
    "killed before a batch": [Leg("new", 1), Leg("resume", 0), Leg("resume", 2)],
    "closed before a batch": [Leg("new", 2, "close"), Leg("resume", 0, "close")],
    "loaded, and killed before a batch": [Leg("new", 3, "close"), Leg("load", 0)],
    "loaded, and closed before a batch": [Leg("new", 3), Leg("load", 0, "close")],
    "loaded, then killed": [Leg("new", 2), Leg("load", 2), Leg("resume", 1), Leg("resume", 0)],
    "loaded twice": [Leg("new", 2), Leg("load", 0), Leg("load", 1), Leg("resume", 1, "close")],
    "loaded elsewhere": [Leg("new", 3), Leg("elsewhere", 1), Leg("resume", 0), Leg("resume", 2)],
    "loaded elsewhere, and killed": [Leg("new", 2), Leg("elsewhere", 0), Leg("resume", 1)],
    "another run, killed before a batch": [Leg("new", 2, "close"), Leg("append", 0)],
    "another run": [Leg("new", 2), Leg("append", 1), Leg("resume", 0), Leg("append", 0, "close")],
    "an older one loaded": [Leg("new", 3), Leg("load", 1, older=True), Leg("resume", 1)],
    "never with a batch": [Leg("new", 0, "close"), Leg("resume", 0, "close"), Leg("load", 0)],
}


@pytest.mark.parametrize(
    ("case", "source"), [*zip(CASES, [DISABLED, NEXT, SAME] * 5, strict=False)]
)
def test_lanes_that_end_there_go_on_right(case: str, source: str, tmp_path: Path) -> None:
    through_all(tmp_path, source, CASES[case])


@pytest.mark.parametrize("seed", range(CHAINS))
def test_random_chains(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    legs = [Leg("new", draw.randint(1, 3), draw.choice(["kill", "close"]))]
    for _ in range(draw.randint(2, 5)):
        start = draw.choice(["resume", "resume", "load", "elsewhere", "append"])
        end = draw.choice(["kill", "close"])
        legs.append(Leg(start, draw.randint(0, 2), end, older=draw.random() < 0.3))
    through_all(tmp_path, draw.choice([DISABLED, NEXT, SAME]), legs)


# --- a storage without the run's record ---------------------------------------------------------


@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("record", [b"of another program", b"{}", b'{"ledger": {"stored": -1}}'])
def test_without_a_record_the_rows_are_counted(
    record: bytes, size: int | None, tmp_path: Path
) -> None:
    """The ring no longer holds some episode ends, which are not counted.

    Existing ends are counted once.
    """
    options = {**RUN, "oracle": {}}
    with MemmapStorage(tmp_path / "s", max_size=size) as storage:
        collect_all(
            sync_collector(NEXT, ByObservation(), storage=storage, seed=5, **options), batches=5
        )
        storage.writer.put_record(record)
        at = storage.slots_of(np.array(storage.span))
        ends = int(storage.get(torch.from_numpy(at))["next", "done"].sum())
        assert 0 < ends < 35
    with MemmapStorage(tmp_path / "s", mode="append") as storage:
        collector = sync_collector(NEXT, ByObservation(), storage=storage, resume=True, **options)
        counts = collector.ledger.counts()
        collector.ledger.check()
        assert (counts["stored"], counts["episodes_complete"]) == (35, ends)
        assert (counts["slots"], counts["executed"], counts["lost"]) == (35, 35, 0)
        run = collect_all(collector)
        assert sum(map(len, run.batches)) == RUN["total_frames"] - 35
        assert storage.head == RUN["total_frames"]
    assert in_storage(tmp_path / "s")[0] == collector.ledger.counts()


def test_starts_of_workers_count_where_a_run_is_resumed(tmp_path: Path) -> None:
    """The replaced worker used seeds of the next incarnation, of which there may be no row."""
    options = {**RUN, "storage": tmp_path / "s", "on_worker_death": "respawn"}
    with worker_collector(DISABLED, 2, ByObservation(), seed=5, **options) as collector:
        batches = iter(collector)
        next(batches)
        os.kill(collector.worker_pids[0], signal.SIGKILL)
        next(batches)
        assert (collector.ledger.incarnation, collector.ledger.respawned) == (1, 1)
    with sync_collector(
        DISABLED, ByObservation(), resume=True, storage=tmp_path / "s", **RUN
    ) as collector:
        assert (collector.ledger.incarnation, collector.ledger.seed) == (2, 5)
        list(collector)
        assert collector.ledger.stored == RUN["total_frames"]


def test_rows_that_a_record_counts_and_that_are_gone_are_lost(tmp_path: Path) -> None:
    """After a power cut, the record may have reached the disk without the last rows."""
    with MemmapStorage(tmp_path / "s") as storage:
        collect_all(
            sync_collector(NEXT, ByObservation(), storage=storage, seed=5, **RUN), batches=3
        )
        assert storage.record is not None
        record = json.loads(storage.record[1])
        lost = record["ledger"]["lost"]
        for name in ("slots", "executed", "stored"):
            record["ledger"][name] += 4
        storage.writer.put_record(json.dumps(record).encode())
    with sync_collector(
        NEXT, ByObservation(), resume=True, storage=tmp_path / "s", **RUN
    ) as collector:
        collector.ledger.check()
        counts = collector.ledger.counts()
        assert (counts["stored"], counts["lost"]) == (21, lost + 4)
        assert counts["slots"] == record["ledger"]["slots"]
        assert sum(map(len, collector)) == RUN["total_frames"] - 21
