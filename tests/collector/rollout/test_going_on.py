"""After a caught exception, the same collector continues or reports that it cannot.

``TALLYROLL_INTERRUPTS`` is the number of places in each run, 1 by default.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.utils import ExplorationType, exploration_type

from tallyroll import collector as package
from tallyroll.collector import interrupts
from tallyroll.collector import torchrl as names
from tallyroll.collector.base import Collector
from tallyroll.collector.batches import batch_output
from tallyroll.collector.batches.batch_iterator import BatchIterator
from tallyroll.collector.batches.collect_guard import CollectGuard
from tallyroll.collector.batches.fast_collect import (
    FastCollect,
    FastCollectOfWorkers,
    FastPath,
    PendingCall,
)
from tallyroll.collector.batches.run_loop import RunLoop
from tallyroll.collector.counting.ledger import Ledger, LedgerEntry
from tallyroll.collector.errors import StateError
from tallyroll.collector.policies.action_context import ActionContext
from tallyroll.collector.slab.progress import FILLED
from tallyroll.collector.workers.leases.budget import LeaseBudget
from tallyroll.collector.workers.leases.segment_queue import SegmentQueue
from tallyroll.collector.workers.leases.source import Leases
from tallyroll.collector.workers.lockstep import LockstepFiller
from tallyroll.storage import open_storage, verify
from tallyroll.storage.engine.kernel import compiled
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
    factory,
    in_threads,
    sync_collector,
    worker_collector,
)

PLACES = int(os.environ.get("TALLYROLL_INTERRUPTS", "1"))
INSIDE = str(Path(package.__file__).parent)
GUARDED = [
    CollectGuard.__enter__,
    CollectGuard.__exit__,
    ActionContext.__enter__,
    ActionContext.__exit__,
    ActionContext.call,
    FastPath.fill,
    FastCollect.collect,
    FastCollect._store_batch,
    PendingCall.expect,
    PendingCall.fail,
    PendingCall.hand_over,
    RunLoop.batch,
    RunLoop.collect,
    CollectGuard.collect,
    CollectGuard.ready_batch,
    CollectGuard.make_ready,
    CollectGuard._make_at_once,
    Collector.collect,
]
"""The guards, and the functions that enter them."""


class AtEach:
    """Chooser of each instruction of some functions once, at its second execution in a run."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        self.codes = {each.__code__ for each in functions}  # type: ignore[attr-defined]
        self.chosen: set[tuple[Any, int]] = set()
        self.begin()

    def begin(self) -> None:
        """Begin a run, in which one more instruction is chosen."""
        self.came = False
        self._seen: set[tuple[Any, int]] = set()

    def __call__(self, frame: Any) -> bool:
        place = frame.f_code, frame.f_lasti
        if self.came or place in self.chosen:
            return False
        self.came = place in self._seen
        (self.chosen if self.came else self._seen).add(place)
        return self.came


FRAMES, BATCH = 72, 12
RUNS: dict[str, Callable[..., Collector]] = {
    "next": partial(sync_collector, NEXT, RecordingPolicy()),
    "same": partial(sync_collector, SAME, RecordingPolicy(), init_random_frames=33),
    "random": partial(sync_collector, "avoided"),
    "plain": partial(sync_collector, DISABLED, finals="kept"),
    "part": partial(sync_collector, DISABLED, surplus="never_step"),
    "torch": partial(sync_collector, "torch", RecordingPolicy()),
    "torch random": partial(sync_collector, "torch"),
    "lanes": partial(sync_collector, NEXT, RecordingPolicy(), layout="lanes"),
    "reset": partial(sync_collector, SAME, RecordingPolicy(), reset_at_each_iter=True),
    "discard": partial(sync_collector, SAME, surplus="discard"),
    "processed": partial(sync_collector, DISABLED, RecordingPolicy(), postproc=lambda rows: rows),
    "sync": partial(worker_collector, NEXT, 2, RecordingPolicy(), mode="sync"),
    "sync random": partial(worker_collector, DISABLED, 2, mode="sync"),
    "sync plain": partial(worker_collector, DISABLED, 2, mode="sync", finals="kept"),
    "async": partial(worker_collector, NEXT, 2, RecordingPolicy(), mode="async"),
}
CAUSES = {
    "Ctrl-C": (signal.SIGINT, KeyboardInterrupt),
    "SIGTERM": (signal.SIGTERM, Interruption),
    "SIGUSR1": (signal.SIGUSR1, StateError),
    "anything": (None, Interruption),
}


@contextmanager
def interrupted_at(
    number: int | AtEach, sent: signal.Signals | None, error: type[BaseException]
) -> Iterator[list[int]]:
    """Raise ``error`` at one instruction of the collector's code, by number, or at each one.

    The handler of the signal ``sent`` raises it, or the instruction itself if ``sent`` is None.
    Yields a list whose only element counts the instructions.
    """
    count = [0]

    def look(frame: Any) -> None:
        if sent is None and frame.f_code.co_filename.endswith(("interrupts.py", "iterator.py")):
            return  # only the handler of a signal may raise there, at known places
        if frame.f_code is BatchIterator.__next__.__code__:
            return  # the interpreter runs no handler between taking a batch and returning it
        count[0] += 1
        if number(frame) if isinstance(number, AtEach) else count[0] == number:
            if sent is None:
                code = frame.f_code
                raise error(f"at an instruction of {code.co_qualname}, line {frame.f_lineno}")
            signal.raise_signal(sent)

    def handle(*_: Any) -> None:
        raise error("of a handler")

    before = None if sent is None else signal.signal(sent, handle)
    try:
        with traced(INSIDE, look, only=number.codes if isinstance(number, AtEach) else None):
            yield count
    finally:
        if sent is not None:
            signal.signal(sent, before)
    assert_let_go()


def assert_let_go() -> None:
    """Check that no guard is left on."""
    assert interrupts._holder is None, "no later handler would wait"
    assert torch.is_grad_enabled()


def taken(collector: Collector, way: str, got: list[TensorDictBase], same: bool) -> str:
    """Take all batches, continuing after exceptions, and return the message of a `StateError`."""
    batches = iter(collector)
    caught = 0
    while True:
        try:
            if way == "collect":
                while collector.ledger.stored < FRAMES:
                    assert collector.collect(2 * LANES if caught else 4 * LANES)
            else:
                for batch in batches:
                    got.append(batch)
            return ""
        except BaseException as error:
            if isinstance(error, StateError) and "the run ended when" in str(error):
                return str(error)
            if "instruction" not in str(error) and "handler" not in str(error):
                raise
            caught += 1
            assert caught < 4
            if "handler" in str(error):
                collector.ledger.check()
            batches = batches if same else iter(collector)


def run(
    name: str, way: str, path: Path, number: int | AtEach, cause: str, same: bool = False
) -> tuple[int, TensorDictBase | None]:
    """Interrupt a run once and continue it.

    Return the number of places, and the rows.
    """
    got: list[TensorDictBase] = []
    storage = path if way != "iterate" else None
    make = RUNS[name]
    with in_threads():
        collector = make(frames_per_batch=BATCH, total_frames=FRAMES, storage=storage, seed=1)
        gc.collect()  # or the finalizers of an earlier collector are interrupted
        with collector, interrupted_at(number, *CAUSES[cause]) as count:
            said = taken(collector, way, got, same)
        ledger = collector.ledger
    if cause != "anything":  # or the state is inconsistent, as a note of the exception reports
        ledger.check()
        assert balanced(ledger), ledger.counts()
    rows = flat(torch.cat([flat(batch) for batch in got])) if got else None
    if storage is not None:
        if not path.exists():
            assert said
            return count[0], None
        with open_storage(path) as stored:
            assert stored.head == ledger.stored
            if not stored.head:
                assert said
                return count[0], None
            every = stored.get(slice(None))
        if way == "store":
            missing = re.search(r"Rows ([\d,]+) to ([\d,]+) of these were not yielded", said)
            yielded = 0 if rows is None else len(rows)
            if missing:
                first, last = (int(each.replace(",", "")) for each in missing.groups())
                assert first == yielded
                assert last + 1 == len(every)
            else:
                assert yielded == len(every)
        rows = flat(every)
        assert verify(path).sound
    if not said:
        assert rows is not None
        assert len(rows) == ledger.stored == FRAMES
        assert name == "discard" or ledger.discarded < LANES + BATCH
    return count[0], rows


@cache
def uninterrupted(
    name: str, way: str, raised: bool, folder: Path
) -> tuple[int, TensorDictBase | None]:
    """Return the number of places and the rows of the same run without an interruption."""
    path = folder / f"{name} {way} {raised}"
    return run(name, way, path, 0, "anything" if raised else "SIGTERM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


def cases() -> Iterator[Any]:
    """Yield the runs with alternating signals, except where calls change the sizes of batches.

    In the gate, each run uses one of the three ways in rotation.
    """
    turn = 0
    for number, name in enumerate(RUNS):
        for at, way in enumerate(("iterate", "store", "collect")):
            if way == "collect" and name in ("reset", "discard"):
                continue
            signal_ = ("Ctrl-C", "SIGTERM")[turn % 2]
            slow = [pytest.mark.slow] * ((number + at) % 3 > 0)
            yield pytest.param(name, way, signal_, marks=slow)
            for cause in ("SIGUSR1", "anything"):
                yield pytest.param(name, way, cause, marks=pytest.mark.slow)
            turn += 1


@pytest.mark.parametrize(("name", "way", "cause"), [*cases()])
def test_it_goes_on_or_says_why_not(
    name: str, way: str, cause: str, folder: Path, tmp_path: Path
) -> None:
    count, whole = uninterrupted(name, way, cause == "anything", folder)
    assert whole is not None and len(whole) == FRAMES  # noqa: PT018
    chance = random.Random(f"{name} {way} {cause}")
    for place in sorted(chance.sample(range(1, count), PLACES)):
        try:
            _, rows = run(name, way, tmp_path / str(place), place, cause, chance.random() < 0.5)
            if rows is None:
                continue
            if name != "discard":
                check_rows(rows, LENGTHS, ends="mixed", from_start=True, contiguous=name != "reset")
            if name not in ("async", "discard"):  # an error also saves rows that would be discarded
                assert_same(rows, those_of(whole, rows))
        except BaseException as failed:
            failed.add_note(f"interrupted at place {place} of {count}")
            raise


def numbers_of(td: TensorDictBase) -> dict[tuple[int, int], int]:
    """Return the index of each row by its trajectory and step."""
    ids, steps = td["collector", "traj_ids"], td["collector", "step"]
    numbers = zip(ids.reshape(-1).tolist(), steps.reshape(-1).tolist(), strict=True)
    return {number: index for index, number in enumerate(numbers)}


def those_of(whole: TensorDictBase, rows: TensorDictBase) -> TensorDictBase:
    """Return the rows of ``whole`` that ``rows`` should equal, with as many of each trajectory."""
    at = numbers_of(whole)
    return whole[torch.tensor([at[number] for number in numbers_of(rows)], dtype=torch.int64)]


# --- by TorchRL's names ---------------------------------------------------------------------------

NAMED: dict[str, dict[str, Any]] = {
    "batches": {},
    "next": {},
    "buffer": {"buffer": True},
    "items": {"buffer": True, "extend_buffer": False},
    "interruptor": {"interruptor": type("Never", (), {"collection_stopped": lambda self: False})()},
    "trajectories": {"trajs_per_batch": 3, "traj_format": "cat"},
    "written": {"trajs_per_batch": 3, "buffer": True},
    "hooked": {"post_collect_hook": lambda batch: batch["observation"].sum()},
}


def named(kind: str, number: int, cause: str) -> tuple[int, TensorDictBase | None, bool]:
    """Do as :func:`run` with TorchRL's names, and compare a replay buffer with the yielded rows."""
    given = dict(NAMED[kind])
    buffer = None
    if given.pop("buffer", False):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000))
        given["replay_buffer"] = buffer
    frames = {"frames_per_batch": 4 * LANES, "total_frames": 12 * LANES}
    collector = names.Collector(factory(DISABLED, 0, LANES), RecordingPolicy(), **frames, **given)
    got: list[TensorDictBase] = []
    said, caught = "", 0
    with collector, interrupted_at(number, *CAUSES[cause]) as count:
        while True:
            try:
                if kind == "next":
                    while (batch := collector.next()) is not None:
                        got.append(batch)
                else:
                    got += (batch for batch in collector if batch is not None)
                break
            except BaseException as error:
                if isinstance(error, StateError) and "the run ended when" in str(error):
                    said = str(error)
                    break
                if "of a handler" not in str(error):
                    raise
                caught += 1
                assert caught < 3
    if buffer is not None:
        got = [buffer[:]] if len(buffer) else []
    return count[0], torch.cat([each.reshape(-1) for each in got]) if got else None, bool(said)


@pytest.mark.parametrize(
    ("kind", "cause"), [(kind, ("Ctrl-C", "SIGTERM")[turn % 2]) for turn, kind in enumerate(NAMED)]
)
def test_by_torchrl_s_names(kind: str, cause: str) -> None:
    count, whole, _ = named(kind, 0, cause)
    assert whole is not None
    chance = random.Random(f"{kind} {cause}")
    for place in sorted(chance.sample(range(1, count), 2 * PLACES)):
        try:
            _, rows, said = named(kind, place, cause)
            if not said:
                assert rows is not None
                assert_same(rows, whole)
            elif rows is not None:
                assert_same(rows, whole[: len(rows)])
        except BaseException as failed:
            failed.add_note(f"interrupted at place {place} of {count}")
            raise


@pytest.mark.parametrize("way", ["next", "iterate", "rollout", "trajectories"])
def test_an_ended_run_is_said_by_torchrl_s_names_too(way: str) -> None:
    policy, given = FailingPolicy(Failing(-1)), dict(NAMED["batches"])
    if way == "trajectories":
        given["trajs_per_batch"] = 2
    frames = {"frames_per_batch": 4 * LANES, "total_frames": 12 * LANES}
    with names.Collector(factory(DISABLED, 0, LANES), policy, **frames, **given) as collector:
        named_ways = {"next": collector.next, "rollout": collector.rollout}
        call = named_ways.get(way, lambda: next(iter(collector)))
        policy.fails.left = 3
        with pytest.raises(RuntimeError, match="broken"):
            call()
        with pytest.raises(StateError, match=r"was raised within it \(broken\)"):
            call()


# --- exceptions from within -----------------------------------------------------------------------


class Failing:
    """Function that raises once, at its call of number ``at``."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        """Count down."""
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("broken\nat that")


class FailingPolicy(RecordingPolicy):
    def __init__(self, fails: Failing) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self.fails()
        return super().forward(td)


def failing(where: str, fails: Failing, patched: pytest.MonkeyPatch, **kwargs: Any) -> Collector:
    """Return a collector with a part that raises once."""
    if where == "policy":
        return sync_collector(DISABLED, FailingPolicy(fails), **kwargs)
    if where == "postproc":
        return sync_collector(DISABLED, postproc=lambda rows: (fails(), rows)[1], **kwargs)
    if where.startswith("worker"):
        patched.setattr(RecordingPolicy, "forward", broken_at(fails, RecordingPolicy.forward))
        return worker_collector(DISABLED, 2, RecordingPolicy(), mode=where.split()[1], **kwargs)
    collector = sync_collector(DISABLED, **kwargs)
    if where == "disk":
        patched.setattr(RowWriter, "append", broken_at(fails, RowWriter.append))
    else:
        system = collector.env.system  # type: ignore[attr-defined]
        patched.setattr(system, where, broken_at(fails, getattr(system, where)))
    return collector


def broken_at(fails: Failing, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*given: Any, **more: Any) -> Any:
        fails()
        return function(*given, **more)

    return called


@pytest.mark.parametrize("way", ["iterate", "store", "collect"])
@pytest.mark.parametrize(
    "where", ["policy", "postproc", "step", "reset", "disk", "worker sync", "worker async"]
)
def test_what_is_raised_within_ends_the_run_and_is_said(
    where: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "disk" and way == "iterate":
        return  # no disk is involved
    path, got = tmp_path / "rows", 0
    fails = Failing({"disk": 3, "postproc": 3, "reset": 4}.get(where, 10))
    kwargs = {"frames_per_batch": BATCH, "total_frames": FRAMES, "seed": 1}
    if way != "iterate":
        kwargs["storage"] = path
    with in_threads(), monkeypatch.context() as patched:
        collector = failing(where, fails, patched, **kwargs)
        with collector:
            with pytest.raises(Exception, match="broken"):  # noqa: PT012
                for batch in collector if way != "collect" else iter(lambda: 0, 1):
                    got += len(batch) if way != "collect" else 0
                    if way == "collect":
                        collector.collect(BATCH)
            for again in (lambda: next(iter(collector)), lambda: list(collector)):
                with pytest.raises(StateError, match=r"was raised within it \(.*broken") as said:
                    again()
            if way != "iterate":
                missing = re.search(r"Rows (\d+) to (\d+) of these were not", str(said.value))
                with pytest.raises(StateError, match="resume=True"):
                    collector.collect(1)
                assert not (missing and way == "collect")
                rows = range(int(missing[1]), int(missing[2]) + 1) if missing else range(0)
                if way == "store":
                    assert rows == range(got, collector.ledger.stored)
                    assert rows or where != "policy"
            else:
                assert "load_state_dict" in str(said.value)
        collector.ledger.check()
        assert collector.ledger.stored < FRAMES
        if way == "iterate":
            return
        kwargs.pop("seed")
        with open_storage(path) as stored:
            assert stored.head == collector.ledger.stored
        fails.left = 0
        again = failing(where, Failing(-1), patched, resume=True, **kwargs)
        with again:
            assert sum(len(batch) for batch in again) == FRAMES - collector.ledger.stored
    assert verify(path).sound
    with open_storage(path) as stored:
        assert stored.head == FRAMES


@pytest.mark.slow
@pytest.mark.timeout(900)  # one run per instruction
@pytest.mark.parametrize("way", ["iterate", "store", "collect"])
def test_no_guard_is_left_on_at_any_instruction(way: str, folder: Path, tmp_path: Path) -> None:
    _, whole = uninterrupted("plain", way, True, folder)
    assert whole is not None
    explores, each = exploration_type(), AtEach(GUARDED)
    each.came = True
    while each.came:
        each.begin()
        _, rows = run("plain", way, tmp_path / str(len(each.chosen)), each, "anything")
        assert exploration_type() is explores
        if rows is not None:
            assert_same(rows, those_of(whole, rows))
    assert len(each.chosen) > 100


@pytest.mark.slow
def test_no_guard_is_left_on_while_workers_fill_few_slots(folder: Path, tmp_path: Path) -> None:
    _, whole = uninterrupted("sync plain", "collect", True, folder)
    assert whole is not None
    each = AtEach([FastCollectOfWorkers.collect])
    each.came = True
    while each.came:
        each.begin()
        _, rows = run("sync plain", "collect", tmp_path / str(len(each.chosen)), each, "anything")
        if rows is not None:
            assert_same(rows, those_of(whole, rows))
    assert len(each.chosen) > 30


@pytest.mark.parametrize("after", [1, LANES, 2 * LANES + 1])
def test_a_smaller_call_takes_a_part_of_the_slots_that_workers_filled(
    after: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = uninterrupted("sync plain", "collect", False, folder)
    assert whole is not None
    make, path = RUNS["sync plain"], tmp_path / "rows"
    signals = [signal.SIGUSR1]

    def fill(turns: LockstepFiller, start: int, stop: int, by: Any) -> None:
        """Fill the slots, and let a signal arrive that makes the workers look interrupted."""
        original(turns, start, stop, by)
        if signals and stop - start > 1 and turns.used == stop:
            signal.raise_signal(signals.pop())
            turns.board[FILLED], turns._by_workers = start, True

    def handle(*_: Any) -> None:
        raise StateError("of a handler")

    original, before = LockstepFiller.fill, signal.signal(signal.SIGUSR1, handle)
    try:
        with in_threads():
            collector = make(frames_per_batch=BATCH, total_frames=FRAMES, storage=path, seed=1)
            with collector:
                collector.collect(2 * LANES)
                monkeypatch.setattr(LockstepFiller, "fill", fill)
                with pytest.raises(StateError, match="of a handler"):
                    collector.collect(4 * LANES)
                # Without the extension, the call stores its rows before it raises.
                waits = 4 * LANES if compiled() is not None else 0
                assert collector.ledger.stored == 6 * LANES - waits
                assert collector.collect(after) == after
                assert not waits or collector.ledger.carried == waits - after
                while collector.ledger.stored < FRAMES:
                    assert collector.collect(after)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with open_storage(path) as stored:
        assert_same(flat(stored.get(slice(None))), whole)


@pytest.mark.slow
def test_rows_after_a_missed_answer_of_a_worker_are_not_stored(tmp_path: Path) -> None:
    """If stored, they would follow a gap within a trajectory."""
    each = AtEach([Leases._counted, LeaseBudget.return_lease, SegmentQueue.add])
    each.came = True
    while each.came:
        each.begin()
        run("async", "collect", tmp_path / str(len(each.chosen)), each, "anything")
    assert len(each.chosen) > 50


def test_no_guard_is_left_on_where_its_end_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    policy = FailingPolicy(Failing(-1))
    with sync_collector(DISABLED, policy, frames_per_batch=BATCH, total_frames=BATCH) as collector:
        policy.fails.left = 1
        monkeypatch.setattr(CollectGuard, "_end_run", broken)
        with pytest.raises(KeyboardInterrupt):
            next(iter(collector))
        assert_let_go()


def test_gradients_are_as_they_were_where_the_end_of_acting_raises() -> None:
    acting = ActionContext(ExplorationType.RANDOM)

    def broken(_: Any) -> None:
        raise Interruption

    before, put = acting.place.get(), acting.place.put
    try:
        with pytest.raises(Interruption), acting:  # noqa: PT012
            assert not torch.is_grad_enabled()
            acting.place.put = broken
        assert torch.is_grad_enabled()
    finally:
        put(before)


# --- exceptions from outside ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["alone", "sync", "async"])
def test_a_loop_that_was_left_goes_on(kind: str) -> None:
    """The loop is left by ``break``, by an exception in its body, by ``close`` and by ``throw``."""
    with in_threads():
        make = (
            partial(sync_collector, NEXT)
            if kind == "alone"
            else partial(worker_collector, NEXT, 2, mode=kind)
        )
        with make(frames_per_batch=BATCH, total_frames=FRAMES, seed=1) as collector:
            got = [next(iter(collector))]
            for batch in collector:
                got.append(batch)
                break
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                for batch in collector:
                    got.append(batch)
                    raise KeyboardInterrupt
            batches: Any = iter(collector)
            got.append(next(batches))
            with pytest.raises(Interruption):
                batches.throw(Interruption())
            got.append(next(batches))
            batches.close()
            assert list(batches) == []
            got += collector
            assert list(collector) == []
    check_rows(torch.cat(got), LENGTHS, ends="mixed", from_start=True, contiguous=kind != "async")
    assert sum(map(len, got)) == FRAMES


class Interrupting(Failing):
    """Function that sends a signal instead."""

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def interrupt(*_: Any) -> None:
    """Raise in the handler of a signal."""
    raise Interruption


@pytest.mark.parametrize("way", ["next", "loop", "again"])
@pytest.mark.parametrize("kind", ["alone", "sync"])
def test_a_batch_that_is_made_when_a_handler_raises_comes_next(
    kind: str, way: str, tmp_path: Path
) -> None:
    """The signal arrives while a batch is assembled, and waits until the batch is stored."""
    sends = Interrupting(2)
    kwargs: dict[str, Any] = {"frames_per_batch": BATCH, "total_frames": FRAMES, "seed": 1}
    kwargs |= {"postproc": lambda rows: (sends(), rows)[1], "storage": tmp_path / "rows"}
    make = (
        partial(sync_collector, NEXT)
        if kind == "alone"
        else partial(worker_collector, NEXT, 2, mode=kind)
    )
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with in_threads(), make(**kwargs) as collector:
            batches = iter(collector)
            got = [next(batches)]
            with pytest.raises(Interruption):
                next(batches)
            assert collector.ledger.stored == 2 * BATCH
            got += [next(batches)] if way == "next" else []
            got += batches if way == "loop" else collector
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [len(batch) for batch in got] == [BATCH] * (FRAMES // BATCH)
    with open_storage(tmp_path / "rows") as stored:
        assert_same(restored(torch.cat(got)), flat(stored.get(slice(None))))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_signal_while_workers_step_loses_nothing(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sends = tmp_path / "rows", Interrupting(-1)

    def sends_and_waits() -> None:
        sends()
        if sends.left == 0:  # lets the collector wait, too
            time.sleep(0.05)

    monkeypatch.setattr(
        RecordingPolicy, "forward", broken_at(sends_and_waits, RecordingPolicy.forward)
    )
    kwargs: dict[str, Any] = {"frames_per_batch": 60, "total_frames": 90, "storage": path}
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with (
            in_threads(),
            worker_collector(DISABLED, 2, RecordingPolicy(), mode=mode, **kwargs) as collector,
        ):
            sends.left = 9
            with pytest.raises(Interruption):
                next(iter(collector))
            assert [len(batch) for batch in collector] == [60, 30]
    finally:
        signal.signal(signal.SIGTERM, before)
    with open_storage(path) as stored:
        rows = flat(stored.get(slice(None)))
    check_rows(rows, LENGTHS, ends="mixed", from_start=True, contiguous=mode == "sync")
    assert verify(path).sound


@contextmanager
def parted(at: int, path: Path, source: str = DISABLED, **kwargs: Any) -> Iterator[Collector]:
    """Yield a collector whose first batch is interrupted in slot ``at``."""

    fails = Interrupting(-1)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with sync_collector(
            source,
            FailingPolicy(fails),
            frames_per_batch=60,
            total_frames=90,
            storage=path,
            **kwargs,
        ) as collector:
            fails.left = at
            with pytest.raises(Interruption):
                next(iter(collector))
            yield collector
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("layout", ["rows", "lanes"])
def test_what_a_smaller_call_finds_of_a_larger_one(layout: str, tmp_path: Path) -> None:
    """Rows of an interrupted batch fill the batches of later, smaller calls."""
    path = tmp_path / "rows"
    with parted(7, path, layout=layout) as collector:
        assert collector.ledger.stored == 0
        assert collector.ledger.carried == 7 * LANES
        assert [collector.collect(n) for n in (3, 4, 8)] == [3, 4, 8]
        assert collector.last_rows == range(7, 15)
        assert collector.ledger.carried == 4 * LANES
        assert sum(len(flat(batch)) for batch in collector) == 75
    with open_storage(path) as stored:
        check_rows(stored.get(slice(None)), LENGTHS, ends="mixed", from_start=True)
    assert verify(path).sound


def test_what_is_in_hand_is_stored_at_the_end(tmp_path: Path) -> None:
    with parted(6, tmp_path / "rows", NEXT) as collector:
        assert collector.ledger.stored == 0
    ledger = collector.ledger
    assert ledger.stored == ledger.executed > 3 * LANES
    assert verify(tmp_path / "rows").sound


def test_new_trajectories_in_a_parted_batch(tmp_path: Path) -> None:
    with parted(6, tmp_path / "rows") as collector:
        collector.set_seed(7)
        assert [len(batch) for batch in collector] == [60, 30]
    assert collector.ledger.stored == 90
    assert verify(tmp_path / "rows").sound


def test_a_parted_batch_begins_once(tmp_path: Path) -> None:
    """Lanes are reset only at its beginning."""
    given: dict[str, Any] = {"reset_at_each_iter": True, "seed": 1}
    with sync_collector(
        DISABLED, RecordingPolicy(), frames_per_batch=60, total_frames=90, **given
    ) as collector:
        whole = [*collector]
    with parted(7, tmp_path / "rows", **given) as collector:
        for batch, wanted in zip(collector, whole, strict=True):
            assert_same(batch, wanted)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("way", ["iterated", "collected"])
def test_rows_that_were_counted_and_not_stored_are_not_counted(
    way: str, counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception occurs as the count is added, before or after the addition."""
    real = batch_output.post

    def raising(ledger: Ledger, entry: LedgerEntry) -> None:
        if ledger.stored >= 2 * BATCH and entry.stored > 0:
            monkeypatch.setattr(batch_output, "post", real)
            if counted:
                real(ledger, entry)
            raise Interruption
        real(ledger, entry)

    def collect_all(collector: Collector) -> None:
        if way == "iterated":
            list(collector)
        while collector.collect(BATCH):
            pass

    make = RUNS["torch"]
    with make(frames_per_batch=BATCH, total_frames=FRAMES, storage=tmp_path / "r") as collector:
        monkeypatch.setattr(batch_output, "post", raising)
        with pytest.raises(Interruption):
            collect_all(collector)
    collector.ledger.check()
    with open_storage(tmp_path / "r") as stored:
        assert stored.head == collector.ledger.stored


@pytest.mark.parametrize("stored", [False, True])
def test_rows_of_the_call_before_are_not_said_to_be_missing(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ends a call that yields nothing."""
    storage = tmp_path / "rows" if stored else None
    with sync_collector(
        DISABLED, frames_per_batch=BATCH, total_frames=FRAMES, storage=storage
    ) as collector:
        assert len(next(iter(collector))) == BATCH

        def broken(*_: Any) -> Any:
            raise Interruption

        monkeypatch.setattr(collector._beginning.seeds, "seed", broken)
        with pytest.raises(Interruption):
            collector.set_seed(1)
        with pytest.raises(StateError, match="the run ended when Interruption") as caught:
            next(iter(collector))
        assert "not yielded" not in str(caught.value)
