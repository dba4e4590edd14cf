"""The ledger is compared with running counts: a lost or duplicated row is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tallyroll.collector import SyncCollector
from tallyroll.collector.base import Collector
from tallyroll.collector.batches import batch_output
from tallyroll.collector.batches.rows.rows import ArrayBatch
from tallyroll.collector.batches.rows.slab_rows import SlabBatch
from tallyroll.collector.batches.stored import writer
from tallyroll.collector.errors import LedgerError, StateError, TransitionError, WorkerRaised
from tallyroll.collector.rollout.driver import LocalDriver, SlotOutcome
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.workers.lockstep import LockstepDriver
from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.engine.columns import NewRows
from tallyroll.storage.rows.keys import LANE

from collect_kit import ByObservation, balanced
from oracles import OracleEnv, OracleTorchEnv
from pairs import in_gate
from worker_kit import (
    DISABLED,
    LENGTHS,
    NEXT,
    faulty_vec,
    in_threads,
    start,
    sync_collector,
    worker_collector,
)

BATCH, LANES = 10, 3
Change = Callable[[Any], Any]
Step = str


class Once:
    """Function that changes the next value after it is armed, and then no more."""

    def __init__(self, change: Change) -> None:
        self._change, self._armed, self._lock = change, False, threading.Lock()
        self.done = False

    def arm(self) -> None:
        """Arm the change of the next suitable value."""
        self._armed = not self.done

    def __call__(self, value: Any) -> Any:
        with self._lock:
            if not self._armed:
                return value
            changed = self._change(value)
            if changed is not None:
                self._armed, self.done = False, True
        return value if changed is None else changed


def outcome_without(outcome: SlotOutcome) -> SlotOutcome | None:
    """Unmark one executed transition."""
    at = np.argwhere(outcome.transitions)
    if not len(at):
        return None
    marks = outcome.transitions.copy()
    marks[tuple(at[0])] = False
    return replace(outcome, transitions=marks)


def outcome_twice(outcome: SlotOutcome) -> SlotOutcome | None:
    """Mark one reset slot as a transition."""
    at = np.argwhere(~outcome.transitions)
    if not len(at):
        return None
    marks = outcome.transitions.copy()
    marks[tuple(at[0])] = True
    return replace(outcome, transitions=marks)


def block_without(block: Block) -> Block | None:
    """Drop the last row."""
    if not len(block):
        return None
    return replace(block, index=block.index[:-1], lane=block.lane[:-1])


def block_twice(block: Block) -> Block | None:
    """Duplicate the last row."""
    if not len(block):
        return None
    index, lane = (np.append(each, each[-1:]) for each in (block.index, block.lane))
    return replace(block, index=index, lane=lane)


def part_of(rows: list[int], part: ArrayBatch) -> ArrayBatch:
    """Return some rows of a part."""
    at = torch.arange(len(part))[rows] if rows else torch.arange(len(part) - 1)
    return ArrayBatch({key: column[at] for key, column in part.rows.items()}, {})


def part_without(part: ArrayBatch | SlabBatch) -> ArrayBatch | SlabBatch:
    """Drop the last row."""
    if isinstance(part, SlabBatch):
        return replace(part, index=np.asarray(part.index)[:-1])
    return part_of([], part)


def part_twice(part: ArrayBatch | SlabBatch) -> ArrayBatch | SlabBatch:
    """Duplicate the last row."""
    if isinstance(part, SlabBatch):
        index = np.asarray(part.index)
        return replace(part, index=np.append(index, index[-1:]))
    return part_of([*range(len(part)), -1], part)


def pieces_without(pieces: list[Any]) -> list[Any]:
    """Drop the last row of each piece."""
    return [{key: column[:-1] for key, column in piece.items()} for piece in pieces]


def pieces_twice(pieces: list[Any]) -> list[Any]:
    """Duplicate the first piece."""
    return [pieces[0], *pieces]


CHANGES: dict[tuple[Step, str], Change] = {
    ("source", "lost"): outcome_without,
    ("source", "doubled"): outcome_twice,
    ("block", "lost"): block_without,
    ("block", "doubled"): block_twice,
    ("delivery", "lost"): part_without,
    ("delivery", "doubled"): part_twice,
    ("sink", "lost"): pieces_without,
    ("sink", "doubled"): pieces_twice,
}
changes = pytest.mark.parametrize(("step", "what"), CHANGES)


@contextmanager
def tampered(step: Step, what: str) -> Iterator[Once]:
    """Patch a step of the pipeline to lose or duplicate a row once it is armed."""
    once = Once(CHANGES[step, what])

    def wrapped(original: Callable[..., Any], collect: type = object) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            return once(list(value) if collect is list else value)

        return called

    with (
        patch.object(LocalDriver, "outcome", wrapped(LocalDriver.outcome))
        if step == "source"
        else patch.object(Block, "of", wrapped(Block.of))
        if step == "block"
        else patch.object(batch_output, "merge", wrapped(batch_output.merge))
        if step == "delivery"
        else patch.object(writer, "_pieces", wrapped(writer._pieces, list)),
        patch.object(LockstepDriver, "outcome", wrapped(LockstepDriver.outcome))
        if step == "source"
        else nullcontext(),
    ):
        yield once


RUNS: dict[str, Callable[..., Collector]] = {
    "alone": sync_collector,
    "sync": partial(worker_collector, workers=2, mode="sync"),
    "async": partial(worker_collector, workers=2, mode="async"),
}


def collect(run: str, once: Once, **kwargs: Any) -> tuple[int, Collector, pytest.ExceptionInfo]:
    """Collect until the error.

    Return the number of yielded rows, the collector and the error.
    """
    source = {"source": NEXT, "lanes": LANES, "frames_per_batch": BATCH, "total_frames": 200}
    with in_threads(), RUNS[run](policy=ByObservation(), **{**source, **kwargs}) as collector:
        rows: list[int] = []
        with pytest.raises(LedgerError) as raised:
            iterate(collector, rows, once)
        assert once.done
        with pytest.raises(StateError, match="the run ended when LedgerError was raised"):
            list(collector)
    return sum(rows), collector, raised


def iterate(collector: Collector, rows: list[int], once: Once, after: int = BATCH) -> None:
    """Record the lengths of yielded batches, and arm the change after `after` rows."""
    for batch in collector:
        rows.append(len(batch))
        if sum(rows) == after:
            once.arm()


@pytest.mark.parametrize(
    ("run", "step", "what"),
    in_gate(RUNS, ["source", "block", "delivery", "sink"], ["lost", "doubled"]),
)
def test_a_lost_or_doubled_row_is_an_error_before_it_is_stored(
    run: str, step: Step, what: str, tmp_path: Path
) -> None:
    with tampered(step, what) as once:
        rows, collector, raised = collect(run, once, storage=tmp_path / "rows")
    assert 0 < rows < 200
    message = str(raised.value)
    assert "expected executed = stored +" in message or "as many as were counted" in message
    with open_storage(tmp_path / "rows") as stored:
        assert stored.head == rows
    assert collector.ledger.stored == rows


@pytest.mark.parametrize("step", ["delivery", "sink"])
@pytest.mark.parametrize("what", ["lost", "doubled"])
def test_nothing_of_it_is_in_a_replay_buffer(step: Step, what: str) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(500), batch_size=4)
    with tampered(step, what) as once:
        rows, *_ = collect("alone", once, replay_buffer=buffer)
    assert len(buffer) == rows == BATCH


@pytest.mark.parametrize("lanes", [2, BATCH])
def test_a_storage_that_takes_fewer_rows_than_it_is_given(lanes: int, tmp_path: Path) -> None:
    with (
        tampered("sink", "lost"),
        SyncCollector(
            OracleTorchEnv(lanes, LENGTHS),
            frames_per_batch=BATCH,
            total_frames=50,
            storage=tmp_path / "rows",
        ) as collector,
    ):
        storage = collector._writer.target
        assert storage is not None
        original = storage.writer.append
        with (
            patch.object(storage.writer, "append", lambda *given: original(*given)[:-1]),
            pytest.raises(LedgerError, match="the storage"),
        ):
            next(iter(collector))


# --- after an error -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        ("alone", "source"),
        ("sync", "source"),
        ("async", "block"),
        *((mode, step) for mode in ("alone", "sync", "async") for step in ("delivery", "sink")),
    ],
)
def test_after_an_error_that_error_is_raised_and_the_other_is_its_note(
    mode: str, step: Step, tmp_path: Path
) -> None:
    # The tenth batch has the transitions 91 to 100. The fifth of them is bad.
    create = faulty_vec(0, LANES, what="nan", lane=1, at=31)
    kwargs = {"frames_per_batch": BATCH, "total_frames": 200, "storage": tmp_path / "rows"}
    with in_threads(), tampered(step, "lost") as once:
        made = (
            SyncCollector(create, ByObservation(), **kwargs)
            if mode == "alone"
            else start([create], ByObservation(), **kwargs, mode=mode)
        )
        with made as collector:
            rows: list[int] = []
            with pytest.raises(TransitionError, match="observation lies outside") as raised:
                # A lease has four slots, and one lease is ahead.
                iterate(collector, rows, once, after=80 if mode == "async" else 90)
    assert once.done
    assert any("transitions were not stored" in note for note in raised.value.__notes__)
    with open_storage(tmp_path / "rows") as stored:
        assert stored.head == sum(rows)


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("mode", ["alone", "sync", "async"])
def test_unsound_transitions_are_counted_as_discarded(
    mode: str, stores: bool, tmp_path: Path
) -> None:
    create = faulty_vec(0, LANES, what="nan", lane=1, at=40)
    kwargs: dict[str, Any] = {"frames_per_batch": 100, "total_frames": 300}
    kwargs |= {"storage": tmp_path / "rows"} if stores else {}
    with in_threads():
        made = (
            SyncCollector(create, ByObservation(), **kwargs)
            if mode == "alone"
            else start([create], ByObservation(), **kwargs, mode=mode)
        )
        with made as collector, pytest.raises(TransitionError):
            list(collector)
    ledger = collector.ledger
    # Slot 40 is bad. With a storage, the 40 slots before it are rescued.
    assert ledger.stored == (40 * LANES if stores else 100)
    assert balanced(ledger)
    assert ledger.discarded == ledger.executed - ledger.stored > 0
    assert (ledger.carried, ledger.lost) == (0, 0)


class Broken(OracleEnv):
    """Environment whose lane 1 raises in its tenth step, and lane 0 in its fourth.

    The two lanes wait for each other before they raise.
    """

    ahead, behind = threading.Event(), threading.Event()

    def step(self, action: Any) -> Any:
        """Step, or raise."""
        if self.lane == 1 and self.steps_taken == 9:
            Broken.ahead.set()
            assert Broken.behind.wait(20)
            raise RuntimeError("broken")
        if self.lane == 0 and self.steps_taken == 3:
            Broken.behind.set()
            assert Broken.ahead.wait(20)
            raise RuntimeError("broken")
        return super().step(action)


def broken(lane: int) -> Any:
    make = partial(Broken, lane, LENGTHS)
    return SyncVectorEnv([make], autoreset_mode=AutoresetMode.DISABLED)


def test_transitions_that_a_failed_worker_was_ahead_are_lost(tmp_path: Path) -> None:
    Broken.ahead.clear()
    Broken.behind.clear()
    with (
        in_threads(),
        start(
            [partial(broken, lane) for lane in range(2)],
            ByObservation(),
            frames_per_batch=40,
            total_frames=40,
            storage=tmp_path / "rows",
        ) as collector,
        pytest.raises(WorkerRaised, match="broken"),
    ):
        list(collector)
    counts = collector.ledger.counts()
    wanted = {"executed": 12, "stored": 6, "lost": 6, "discarded": 0}
    assert {name: counts[name] for name in wanted} == wanted


def test_of_a_batch_that_a_ring_took_half_the_half_is_counted(tmp_path: Path) -> None:
    ring = MemmapStorage(tmp_path / "rows", mode="create", max_size=50)
    with SyncCollector(
        sync_collector(DISABLED, lanes=LANES, frames_per_batch=50, total_frames=1).env,
        ByObservation(),
        frames_per_batch=50,
        total_frames=200,
        storage=ring,
    ) as collector:
        next(iter(collector))
        original, calls = ring.writer.append, []

        def full(rows: NewRows, record: bytes | None) -> range:
            calls.append(rows.count)
            if len(calls) == 2:
                raise OSError("the disk is full")
            return original(rows, record)

        two = partial(_in_twos, writer._pieces)
        with (
            patch.object(writer, "_pieces", two),
            patch.object(ring.writer, "append", full),
            pytest.raises(OSError, match="disk is full"),
        ):
            next(iter(collector))
    assert calls == [25, 25]
    assert collector.ledger.stored == ring.head == 75
    assert collector.ledger.discarded == collector.ledger.executed - 75
    assert balanced(collector.ledger)
    ring.close()


def _in_twos(original: Any, rows: Any, ring: int) -> list[Any]:
    halves = []
    for piece in original(rows, ring):
        half = len(piece[LANE]) // 2
        halves.append({key: column[:half] for key, column in piece.items()})
        halves.append({key: column[half:] for key, column in piece.items()})
    return halves
