"""Batches that the storing call lays out equal those of the slow path in all circumstances."""

from __future__ import annotations

import dis
import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import InitTracker, TransformedEnv

import tallyroll.storage
from tallyroll.collector import SyncCollector, interrupts
from tallyroll.collector.base import Collector
from tallyroll.collector.batches.batch_iterator import BatchIterator
from tallyroll.collector.batches.collect_guard import CollectGuard
from tallyroll.collector.batches.fast_collect import FastCollect, FastPath, PendingCall
from tallyroll.collector.batches.rows.slab_output import SmallBatches
from tallyroll.collector.errors import StateError
from tallyroll.collector.native.kernel import compiled
from tallyroll.collector.native.slot_rows import SlotRows
from tallyroll.storage import MemmapStorage, fast_paths, open_storage, verify
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.row_writer import RowWriter

from collect_kit import assert_same, balanced
from oracles import check_rows
from random_runs import flat, restored
from traced_code import Interruption, traced
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    RecordingPolicy,
    in_threads,
    make,
    sync_collector,
)

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no compiler")

PLACES = int(os.environ.get("TALLYROLL_INTERRUPTS", "3"))
PACKAGE = str(Path(tallyroll.storage.__file__).parents[1])


def tracked(**kwargs: Any) -> Collector:
    """Return a collector whose rows mark where a trajectory begins."""

    def made() -> TransformedEnv:
        return TransformedEnv(make("torch", 0, LANES), InitTracker())

    return SyncCollector(made, RecordingPolicy(), **kwargs)


RUNS: dict[str, Callable[..., Collector]] = {
    "random": partial(sync_collector, DISABLED, finals="kept"),
    "policy": partial(sync_collector, DISABLED, RecordingPolicy(), finals="kept"),
    "within": partial(sync_collector, SAME, RecordingPolicy()),
    "resets": partial(sync_collector, NEXT, finals="kept"),
    "resets, policy": partial(sync_collector, NEXT, RecordingPolicy(), finals="kept"),
    "one lane": partial(sync_collector, NEXT, RecordingPolicy(), 1, finals="kept"),
    "opening": partial(sync_collector, NEXT, RecordingPolicy(), init_random_frames=33),
    "lost": partial(sync_collector, SAME, finals="lost"),
    "tracked": tracked,
}
SIZES = [
    *((size, None) for size in (1, LANES - 2, LANES, 2 * LANES + 1, 4 * LANES)),
    *((LANES, 23), (2 * LANES + 1, 23)),
]
"""Rows of a batch, and of a ring."""
SOME = [
    pytest.param(
        *(name, *SIZES[(turn + more) % len(SIZES)]), marks=[pytest.mark.slow] * (more == 5)
    )
    for turn, name in enumerate(RUNS)
    for more in (0, 2, 5)
]
"""Each run with three sizes, two of them in the gate; each size with several runs."""


@contextmanager
def made_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the numbers of batches that the fast path stored, and that it did not."""
    store, counts = FastPath.store, [0, 0]

    def counted(self: FastPath, want: int, finals: Any, batch: Any = None) -> bool:
        stored = store(self, want, finals, batch)
        counts[not stored] += batch is not None
        return stored

    with monkeypatch.context() as patched:
        patched.setattr(FastPath, "store", counted)
        yield counts


def looks(batch: TensorDictBase, prefix: tuple[str, ...] = ()) -> dict[Any, Any]:
    """Return all observable properties of a batch except its values."""
    seen: dict[Any, Any] = {prefix: (type(batch), batch.batch_size, batch.device, batch.names)}
    seen[(*prefix, "locked")] = batch.is_locked, batch.is_shared(), batch.is_memmap()
    seen[(*prefix, "order")] = list(batch.keys())
    for key, leaf in batch.items():
        if isinstance(leaf, TensorDictBase):
            seen |= looks(leaf, (*prefix, key))
            continue
        kept = leaf.untyped_storage().nbytes(), leaf.storage_offset(), leaf.stride()
        seen[(*prefix, key)] = leaf.dtype, leaf.shape, leaf.device, leaf.requires_grad, kept
    return seen


def iterated(make: Callable[..., Collector], size: int, storage: DiskStorage, few: int) -> Any:
    """Iterate with occasional calls of `collect`, keep all batches, and return all results."""
    kept: list[tuple[TensorDictBase, TensorDictBase]] = []
    with make(frames_per_batch=size, total_frames=203, storage=storage, seed=1) as collector:
        batches = iter(collector)
        for call in count():
            if call % 5 == 4:
                collector.collect(min(few, size + call % 3))
            if call % 7 == 6 and collector._policy is not None:
                collector.update_policy_weights_()
            batch = next(batches, None)
            if batch is None:
                break
            kept.append((batch, batch.clone()))
            if call % 3 == 2:
                batch.apply(torch.Tensor.zero_, inplace=True)  # the batch belongs to the caller
                kept[-1] = batch, batch.clone()
        slots = storage.slots_of(np.array(storage.span, np.int64))
        rows = flat(storage.get(torch.from_numpy(slots)).clone())
        return kept, rows, storage.record, collector.ledger.counts(), [*collector.episodes]


@pytest.mark.parametrize(("name", "size", "ring"), SOME)
def test_batches_and_rows_are_those_of_the_longer_way(
    name: str, size: int, ring: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = 1 if name == "one lane" else LANES
    size = min(size, 4 * lanes)
    found = []
    for way in ("at once", "refused", "-fast-collect"):
        off = [way[1:]] if way.startswith("-") else []
        with monkeypatch.context() as patched, fast_paths.switched_off(*off):
            if way == "refused":
                patched.setattr(FastPath, "store", lambda *_: False)
            storage = MemmapStorage(tmp_path / way, max_size=ring)
            with made_at_once(patched) as counts, storage:
                found.append(iterated(RUNS[name], size, storage, 4 * lanes))
            if way == "at once" and ring is None:
                assert counts[0] > 0.5 * len(found[0][0]) - 4, counts
            elif way != "at once":
                assert not counts[0]
        assert verify(tmp_path / way).sound
    (kept, rows, *counted), *others = found
    for other_kept, other_rows, *other in others:
        assert counted == other
        assert_same(rows, other_rows)
        assert len(kept) == len(other_kept)
        for (batch, then), (another, _) in zip(kept, other_kept, strict=True):
            assert looks(batch) == looks(another)
            assert_same(batch, another)
            assert_same(batch, then)


def test_a_column_that_is_kept_keeps_no_other(tmp_path: Path) -> None:
    with RUNS["random"](
        frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "rows"
    ) as collector:
        batches, kept, memory = iter(collector), [], set()
        for _ in range(40):
            batch = next(batches)
            kept.append(batch["next", "reward"])
            memory.add(batch["observation"].data_ptr())
        assert len({each.data_ptr() for each in kept}) == 40
        assert {each.untyped_storage().nbytes() for each in kept} == {kept[0].nbytes}


# --- interruptions --------------------------------------------------------------------------------

RETURNS = (
    BatchIterator.__next__.__code__,
    next(
        each.positions.lineno
        for each in dis.get_instructions(BatchIterator.__next__)
        if each.opname == "RETURN_VALUE" and each.positions
    ),
)
"""The line on which an iterator returns a batch that it has taken from the list."""


def handled(
    name: str, path: Path, number: int, size: int, sent: signal.Signals
) -> tuple[int, list[TensorDictBase]]:
    """Send a signal at one instruction of a batch, and continue.

    Return the number of instructions and the batches.
    """
    count, got = [0], []

    def look(frame: Any) -> None:
        if (frame.f_code, frame.f_lineno) == RETURNS:
            return  # the interpreter calls no handler between these instructions
        count[0] += 1
        if count[0] == number:
            signal.raise_signal(sent)

    def handle(*_: Any) -> None:
        raise Interruption

    before = signal.signal(sent, handle)
    raised = 0
    with in_threads():
        collector = RUNS[name](frames_per_batch=size, total_frames=90, storage=path, seed=1)
    try:
        with collector:
            batches = iter(collector)
            got += (next(batches) for _ in range(6))
            gc.collect()
            try:
                with traced(PACKAGE, look):
                    got.append(next(batches))
            except Interruption:
                raised += 1
                collector.ledger.check()
            got += batches
        assert raised == bool(0 < number <= count[0])
    finally:
        signal.signal(sent, before)
    assert balanced(collector.ledger)
    assert len(collector.episodes) == collector.ledger.episodes_complete
    return count[0], got


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        pytest.param("random", signal.SIGTERM, marks=pytest.mark.slow),
        ("resets, policy", signal.SIGINT),
    ],
)
def test_what_a_handler_raises_loses_nothing_and_the_run_goes_on(
    name: str, sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(f"{name} {sent}")
    for size in (LANES, 2 * LANES + 1):
        with made_at_once(monkeypatch) as counts:
            places, whole = handled(name, tmp_path / f"{size}", 0, size, sent)
        assert counts[0] >= len(whole) // 2
        rows = torch.cat(whole)
        check_rows(restored(rows), LENGTHS, ends="mixed", from_start=True)
        for place in sorted(chance.sample(range(1, places + 1), 2 * PLACES)):
            path = tmp_path / f"{size} {place}"
            try:
                _, got = handled(name, path, place, size, sent)
                assert [len(each) for each in got] == [len(each) for each in whole]
                assert_same(torch.cat(got), rows)
                with open_storage(path) as storage:
                    assert_same(flat(storage.get(slice(None))), restored(rows))
            except BaseException as failed:
                failed.add_note(f"interrupted at place {place} of {places}")
                raise


@pytest.mark.parametrize("sent", [signal.SIGALRM, signal.SIGTERM])
def test_handlers_come_in_a_step_or_behind_it(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that limits time runs immediately.

    Others run after the step, not after the batch.
    """
    run = RUNS["random"](frames_per_batch=4 * LANES, total_frames=-1, storage=tmp_path / "rows")
    with run, made_at_once(monkeypatch) as counts:
        batches, came, calls = iter(run), [], count()
        for _ in range(4):
            next(batches)
        assert counts[0] == 3
        before = signal.signal(sent, lambda *_: came.append((steps, inside)))
        step, steps, inside = run.env.system.step, 0, False  # type: ignore[attr-defined]

        def signalled(*given: Any, **more: Any) -> Any:
            nonlocal steps, inside
            steps, inside = steps + 1, True
            if next(calls) == 1:
                signal.raise_signal(sent)
            out = step(*given, **more)
            inside = False
            return out

        run.env.system.step = signalled  # type: ignore[attr-defined]
        try:
            assert len(next(batches)) == 4 * LANES
        finally:
            signal.signal(sent, before)
        assert came == [(2, sent is signal.SIGALRM)]
        assert run.ledger.stored == 5 * 4 * LANES
        next(batches)
        next(batches)
        assert counts[0] > 4


ON_THE_WAY: list[Callable[..., Any]] = [
    CollectGuard.make_ready,
    CollectGuard._make_at_once,
    CollectGuard.leave,
    FastCollect.collect,
    FastCollect._store_batch,
    PendingCall.expect,
    PendingCall.hand_over,
    PendingCall.settle,
    FastCollect.settle,
    FastPath.fill,
    FastPath.store,
    SmallBatches.empty,
    SlotRows.commit,
    RowWriter.append,
]
CODES = {each.__code__ for each in ON_THE_WAY}  # type: ignore[attr-defined]


def raised_at(path: Path, number: int) -> tuple[int, list[TensorDictBase], int, str]:
    """Raise at an instruction of a batch.

    Return the number of instructions, the batches, the number of stored rows and the message.
    """
    count, said = [0], ""

    def look(_: Any) -> None:
        count[0] += 1
        if count[0] == number:
            raise Interruption

    with RUNS["resets"](frames_per_batch=LANES, total_frames=60, storage=path, seed=1) as collector:
        batches = iter(collector)
        got = [next(batches) for _ in range(6)]
        with suppress(Interruption), traced(PACKAGE, look, only=CODES):
            got.append(next(batches))
        assert torch.is_grad_enabled()
        assert interrupts._holder is None
        try:
            for batch in batches:
                got.append(batch)
        except StateError as error:
            said = str(error)
    return count[0], got, collector.ledger.stored, said


@pytest.mark.slow
def test_raised_at_any_instruction_no_stored_batch_is_lost_or_yielded_twice(
    tmp_path: Path,
) -> None:
    places, *_ = raised_at(tmp_path / "whole", 0)
    assert places > 200
    for place in range(1, places + 1, 1 if PLACES > 6 else 3):
        path = tmp_path / f"{place}"
        _, batches, stored, said = raised_at(path, place)
        got = sum(map(len, batches))
        missing = stored - got
        assert (stored == 60) is not bool(said), place
        if missing:  # complete rows that were not yielded, as the message reports
            assert f"Rows {got:,} to {stored - 1:,} of these were not yielded" in said, place
        with open_storage(path) as storage:
            assert storage.head == stored
            rows = storage.get(slice(None))
            check_rows(rows, LENGTHS, ends="mixed", from_start=True)
            assert_same(restored(torch.cat(batches)), flat(rows[:got]))


@pytest.mark.parametrize("size", [LANES, 3 * LANES])
@pytest.mark.parametrize("name", ["random", "resets"])
def test_a_run_that_is_stopped_within_a_batch_ends_as_by_the_longer_way(
    name: str, size: int, tmp_path: Path
) -> None:
    found = []
    for off in ((), ("fast-collect",)):
        path, calls = tmp_path / f"{off}", count()
        with fast_paths.switched_off(*off):
            run = RUNS[name](frames_per_batch=size, total_frames=-1, storage=path, seed=1)
        step = run.env.system.step  # type: ignore[attr-defined]

        def stopping(*given: Any, run: Any = run, step: Any = step, calls: Any = calls) -> Any:
            if next(calls) == 20:
                run.stop()
            return step(*given)

        run.env.system.step = stopping  # type: ignore[attr-defined]
        with run:
            ends = [(len(batch), run._run.over, run.ledger.counts()) for batch in run]
        with open_storage(path) as storage:
            found.append((ends, storage.record, flat(storage.get(slice(None)).clone())))
    assert found[0][:2] == found[1][:2]
    assert found[0][0][-1][1]
    assert_same(found[0][2], found[1][2])


def test_what_an_environment_raises_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    run = RUNS["resets"](frames_per_batch=2 * LANES, total_frames=-1, storage=path, seed=1)
    batches = iter(run)
    got = sum(len(next(batches)) for _ in range(8))
    assert run._loop.fast_collect is not None
    assert run._loop.fast_collect.ready is not None
    system, calls = run.env.system, count()  # type: ignore[attr-defined]
    step = system.step

    def failing(*given: Any, **more: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("broken")
        return step(*given, **more)

    system.step = failing
    carried = run.ledger.carried
    with pytest.raises(RuntimeError, match="broken"):
        next(batches)
    stored = run.ledger.stored
    assert stored > got + carried
    with pytest.raises(StateError, match=f"Rows {got} to {stored - 1} of these were not yielded"):
        next(batches)
    run.shutdown()
    assert verify(path).sound
    with open_storage(path) as storage:
        assert storage.head == stored
        check_rows(storage.get(slice(None)), LENGTHS, ends="mixed", from_start=True)


def test_a_call_from_within_is_refused(tmp_path: Path) -> None:
    class Nested(RecordingPolicy):
        calls = 0

        def forward(self, td: TensorDictBase) -> TensorDictBase:
            self.calls += 1
            if self.calls == 9:
                with pytest.raises(StateError, match="already collecting"):
                    next(batches)
            return super().forward(td)

    policy = Nested()
    with sync_collector(
        DISABLED, policy, frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "rows"
    ) as run:
        batches = iter(run)
        rows = torch.cat([flat(next(batches)) for _ in range(20)])
        assert policy.calls > 9
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
