"""The ledger in a storage is that of the run at every moment: whatever ends there, goes on right.

Each leg of a run is a process of its own, which is killed or ends well. It goes on with what is in
the storage (``resume=True``), or with a state that an earlier one saved (``load_state_dict``).
``TALLYROLL_LEDGERS`` says how many random chains of legs, 2 by default.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ledger_legs import RUN, Leg, lead

from tallyroll.collector.last_run import record_of
from tallyroll.storage import open_storage, verify

from oracles import check_rows
from worker_kit import DISABLED, LENGTHS, NEXT, SAME, warm_fork_server

CHAINS = int(os.environ.get("TALLYROLL_LEDGERS", "2"))
Counts = dict[str, int]


@dataclass
class Model:
    """What a run has delivered, as far as it goes on from there."""

    spans: list[tuple[int, Path, int, int]] = field(default_factory=list)
    """Of each batch the leg, the storage, its first row and the one behind its last."""
    stored: int = 0
    complete: int = 0
    incarnation: int = 0

    def copy(self) -> Model:
        return Model(list(self.spans), self.stored, self.complete, self.incarnation)


def in_storage(path: Path) -> tuple[Counts | None, int]:
    """The ledger in a storage, and its rows."""
    with open_storage(path, mode="read") as storage:
        record = record_of(storage.record)
        return (None if record is None else record["ledger"]), storage.head


def require(counts: Counts, model: Model) -> None:
    assert counts["stored"] == model.stored
    assert counts["episodes_complete"] == model.complete
    assert counts["incarnation"] == model.incarnation
    assert counts["slots"] == counts["executed"] + counts["reset_slots"]
    parts = ("stored", "discarded", "carried", "lost")
    assert counts["executed"] == sum(counts[part] for part in parts)
    assert min(counts.values()) >= 0


class Chain:
    """Legs one after the other, and what they should have left."""

    def __init__(self, folder: Path, source: str) -> None:
        self.source, self.folder = source, folder
        self.path = folder / "0"
        self.model = Model()
        self.legs = 0
        self.saved: tuple[Any, Model] | None = None

    def run(self, leg: Leg) -> Counts:
        """The ledger that it left behind."""
        state, before = None, None
        self.legs += 1
        if leg.start in ("load", "elsewhere"):
            assert self.saved is not None
            state, model = self.saved
            self.model, before = model.copy(), state["ledger"]
        if leg.start == "elsewhere":
            self.path = self.folder / str(int(self.path.name) + 1)
        if leg.start != "new":
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
                    self.saved = state_now, self.model.copy()
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
        if rows:
            model.spans.append((self.legs, self.path, head - rows, head))
        if first and before is not None:
            assert counts["discarded"] == before["discarded"] + before["carried"]
        if not first or leg.start == "load":  # a new run, and one resumed, begin with its rows
            assert ledger == counts

    def check(self) -> None:
        """The rows that were delivered are all there, once, and trajectories are told right."""
        rows: dict[int, list[Any]] = {}
        for leg, path, start, stop in self.model.spans:
            with open_storage(path, mode="read") as storage:
                rows.setdefault(leg, []).append(storage.get(slice(start, stop)).clone())
        for each in rows.values():  # environments begin anew with every process
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
    """Processes that start quickly."""
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
    "never with a batch": [Leg("new", 0, "close"), Leg("resume", 0, "close"), Leg("load", 0)],
}


@pytest.mark.parametrize(
    ("case", "source"), [*zip(CASES, [DISABLED, NEXT, SAME] * 3, strict=False)]
)
def test_whatever_ends_there_goes_on_right(case: str, source: str, tmp_path: Path) -> None:
    through_all(tmp_path, source, CASES[case])


@pytest.mark.parametrize("seed", range(CHAINS))
def test_random_chains(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    legs = [Leg("new", draw.randint(1, 3), draw.choice(["kill", "close"]))]
    for _ in range(draw.randint(2, 5)):
        start = draw.choice(["resume", "resume", "load", "elsewhere"])
        legs.append(Leg(start, draw.randint(0, 2), draw.choice(["kill", "close"])))
    through_all(tmp_path, draw.choice([DISABLED, NEXT, SAME]), legs)
