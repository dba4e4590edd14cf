"""A handler may raise anywhere: stored rows have no gap, and the ledger balances.

``TALLYROLL_INTERRUPTS`` is the number of places in each run, 3 by default.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tallyroll import collector as package
from tallyroll.collector import interrupts
from tallyroll.collector.base import Collector
from tallyroll.collector.interrupts import allow_signals, defer_signals, pause_on_signal, until_exit
from tallyroll.collector.rollout.source import Block
from tallyroll.storage import open_storage

from collect_kit import balanced
from oracles import check_rows
from traced_code import Interruption, traced
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    RecordingPolicy,
    in_threads,
    sync_collector,
    worker_collector,
)

PLACES = int(os.environ.get("TALLYROLL_INTERRUPTS", "3"))
INSIDE = str(Path(package.__file__).parent)


@contextmanager
def at_instruction(number: int, sent: signal.Signals) -> Iterator[list[int]]:
    """Send this process a signal at one instruction of the collector's code.

    Yields a list whose only element counts the instructions.
    """
    count = [0]

    def look(_: Any) -> None:
        count[0] += 1
        if count[0] == number:
            signal.raise_signal(sent)

    with traced(INSIDE, look):
        yield count


@contextmanager
def handler(number: signal.Signals, error: type[BaseException]) -> Iterator[list[float]]:
    """Handle signals by raising ``error``, and yield a list of the times."""
    calls: list[float] = []

    def handle(*_: Any) -> None:
        calls.append(time.monotonic())
        raise error

    before = signal.signal(number, handle)
    try:
        yield calls
    finally:
        signal.signal(number, before)


FRAMES = 60
RUNS: dict[str, Callable[..., Collector]] = {
    "next": partial(sync_collector, NEXT, RecordingPolicy()),
    "same": partial(sync_collector, SAME, RecordingPolicy(), init_random_frames=33),
    "random": partial(sync_collector, "avoided"),
    "part": partial(sync_collector, DISABLED, surplus="never_step"),
    "torch": partial(sync_collector, "torch", RecordingPolicy()),
    "sync": partial(worker_collector, NEXT, 2, RecordingPolicy(), mode="sync"),
    "async": partial(worker_collector, NEXT, 2, RecordingPolicy(), mode="async"),
    "async part": partial(
        worker_collector, DISABLED, 1, RecordingPolicy(), mode="async", surplus="never_step"
    ),
}


def collected(name: str, path: Path, number: int, error: type[BaseException]) -> int:
    """Interrupt a run at an instruction, and return the number of instructions until then."""
    collector = None
    sent = signal.SIGINT if error is KeyboardInterrupt else signal.SIGTERM
    with in_threads(), handler(sent, error):
        try:
            collector = RUNS[name](frames_per_batch=8, total_frames=FRAMES, storage=path, seed=1)
            with at_instruction(number, sent) as count:
                for _ in collector:
                    pass
                collector.shutdown()
        except error:
            pass
        finally:
            if collector is not None:
                collector.shutdown()
    assert collector is not None
    ledger = collector.ledger
    ledger.check()
    assert balanced(ledger), ledger.counts()
    with open_storage(path) as storage:
        assert ledger.stored == storage.head <= FRAMES
        if storage.head:
            rows = storage.get(slice(0, storage.head))
            check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    return count[0]


@pytest.mark.parametrize(
    ("name", "error"),
    [(name, (KeyboardInterrupt, Interruption)[turn % 2]) for turn, name in enumerate(RUNS)],
)
def test_stored_rows_have_no_gap(name: str, error: type[BaseException], tmp_path: Path) -> None:
    count = collected(name, tmp_path / "whole", 0, error)
    assert count > 5000
    chance = random.Random(f"{name} {error}")
    for place in sorted(chance.sample(range(1, count), PLACES)):
        try:
            collected(name, tmp_path / str(place), place, error)
        except BaseException as failed:
            failed.add_note(f"interrupted at instruction {place} of {count}")
            raise


# --- deferred and admitted signals ----------------------------------------------------------------


def test_a_held_signal_waits_for_admitted_code() -> None:
    with handler(signal.SIGINT, Interruption) as calls:
        with pytest.raises(Interruption), defer_signals():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            assert not calls
            with allow_signals():
                pytest.fail("it waits no longer")
        with pytest.raises(Interruption), defer_signals(), allow_signals():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it did not wait")
        assert len(calls) == 2


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def test_at_the_end_every_signal_is_handled_and_its_handler_is_back() -> None:
    heard: list[int] = []
    before = [signal.signal(number, lambda number, _: heard.append(number)) for number in NUMBERS]
    try:
        ours = [signal.getsignal(number) for number in NUMBERS]
        with defer_signals(), defer_signals():
            for number in NUMBERS:
                signal.raise_signal(number)
            assert not heard
        assert sorted(heard) == sorted(NUMBERS)
        assert [signal.getsignal(number) for number in NUMBERS] == ours
    finally:
        for number, handle in zip(NUMBERS, before, strict=True):
            signal.signal(number, handle)


def test_a_signal_that_waited_for_a_second_is_heard_anywhere() -> None:
    began = time.monotonic()
    with handler(signal.SIGALRM, Interruption) as calls:
        with pytest.raises(Interruption), defer_signals():  # noqa: PT012
            signal.raise_signal(signal.SIGALRM)
            threading.Event().wait(30)
        assert 0.9 < calls[0] - began < 10


def test_a_signal_heard_in_time_is_not_heard_again() -> None:
    with handler(signal.SIGINT, Interruption) as calls:
        with pytest.raises(Interruption), defer_signals():
            signal.raise_signal(signal.SIGINT)
        time.sleep(1.2)
        assert len(calls) == 1


def test_other_threads_neither_hold_nor_admit() -> None:
    with handler(signal.SIGINT, Interruption) as calls:
        stopped, admitting = threading.Event(), threading.Event()

        def admit() -> None:
            with defer_signals(), allow_signals():
                admitting.set()
                stopped.wait()

        thread = threading.Thread(target=admit)
        with pytest.raises(Interruption), defer_signals():  # noqa: PT012
            thread.start()
            admitting.wait()
            signal.raise_signal(signal.SIGINT)
            assert not calls
            stopped.set()
            thread.join()


@pytest.mark.parametrize("where", ["policy", "postproc"])
def test_ctrl_c_ends_what_takes_for_ever(where: str, tmp_path: Path) -> None:
    """User code is interrupted immediately wherever the collector calls it."""

    def hang(td: Any) -> Any:
        if hanging:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(60)
        return RecordingPolicy()(td) if where == "policy" else td

    hanging = False
    policy = hang if where == "policy" else RecordingPolicy()
    began = time.monotonic()
    with (  # noqa: PT012
        handler(signal.SIGALRM, KeyboardInterrupt),
        sync_collector(
            NEXT,
            policy,
            frames_per_batch=8,
            total_frames=FRAMES,
            postproc=hang if where == "postproc" else None,
            storage=tmp_path / "data",
        ) as collector,
        pytest.raises(KeyboardInterrupt),
    ):
        for _ in collector:
            hanging = True
    assert time.monotonic() < began + 30
    assert collector.ledger.stored == 8


def test_an_environment_that_limits_its_own_steps() -> None:
    """The environment catches each exception of its handler."""
    caught = []

    def act(td: Any) -> Any:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(0.5)
        except Interruption:
            caught.append(time.monotonic())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return RecordingPolicy()(td)

    began = time.monotonic()
    with (
        handler(signal.SIGALRM, Interruption),
        sync_collector(DISABLED, act, frames_per_batch=10, total_frames=20) as collector,
    ):
        assert sum(len(batch) for batch in collector) == 20
    assert len(caught) > 3
    assert time.monotonic() - began < 0.4 * len(caught)


def test_a_handler_that_calls_the_one_that_it_found() -> None:
    with handler(signal.SIGINT, Interruption) as calls:
        with defer_signals(), allow_signals():
            found = signal.getsignal(signal.SIGINT)
            assert callable(found)

            def chained(number: int, frame: Any) -> None:
                found(number, frame)

            signal.signal(signal.SIGINT, chained)
        for _ in range(3):
            with pytest.raises(Interruption), defer_signals(), allow_signals():
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interruption):
            signal.raise_signal(signal.SIGINT)
        assert len(calls) == 4


@pytest.mark.parametrize("patient", [True, False])
def test_a_second_one_that_waits_calls_the_handler_again(patient: bool) -> None:
    """A handler may first ask to stop, and then interrupt."""
    calls: list[int] = []

    def handle(number: int, _: Any) -> None:
        calls.append(number)
        if len(calls) == 2:
            raise Interruption

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(Interruption), defer_signals(), pause_on_signal(until_exit):  # noqa: PT012
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert not calls
            if not patient:
                threading.Event().wait(10)
                pytest.fail("it waits no longer")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(calls) == 2


def test_two_that_wait_are_both_handled_once() -> None:
    with (
        handler(signal.SIGINT, Interruption) as one,
        handler(signal.SIGTERM, Interruption) as other,
    ):
        with pytest.raises(Interruption), defer_signals():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        assert (len(one), len(other)) == (1, 1)
        with pytest.raises(Interruption), defer_signals(), allow_signals():
            signal.raise_signal(signal.SIGTERM)
        assert (len(one), len(other)) == (1, 2)
        with pytest.raises(Interruption), defer_signals(), allow_signals(), defer_signals():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            assert len(one) == 1
        assert len(one) == 2


# --- between batches ------------------------------------------------------------------------------


def short(total_frames: int = 60) -> Collector:
    """Return a collector of twenty batches."""
    return sync_collector(DISABLED, frames_per_batch=3, total_frames=total_frames)


def test_handlers_are_put_in_place_once_a_run() -> None:
    puts: list[int] = []

    def put(number: int, handle: Any) -> None:
        puts.append(number)
        signal.signal(number, handle)

    with (
        handler(signal.SIGTERM, Interruption),
        handler(signal.SIGALRM, Interruption),
        handler(signal.SIGINT, Interruption),
        patch.object(interrupts, "set_handler", put),
    ):
        mine = [signal.getsignal(number) for number in NUMBERS]
        with short() as collector:
            assert len([len(batch) for batch in collector]) == 20
            assert sorted(puts) == sorted([*NUMBERS, *NUMBERS])
        assert [signal.getsignal(number) for number in NUMBERS] == mine


@pytest.mark.parametrize("end", ["over", "shut down", "dropped", "raised"])
def test_at_the_end_of_a_run_handlers_are_back(end: str) -> None:
    with handler(signal.SIGTERM, Interruption) as calls:
        mine = signal.getsignal(signal.SIGTERM)
        collector = short(total_frames=6)
        batches = iter(collector)
        next(batches)
        assert signal.getsignal(signal.SIGTERM) is not mine
        if end == "over":
            assert len(list(batches)) == 1
        elif end == "shut down":
            collector.shutdown()
        elif end == "raised":
            failing = patch.object(Block, "of", side_effect=ZeroDivisionError)
            with failing, pytest.raises(ZeroDivisionError):
                next(batches)
        else:
            del collector, batches
            gc.collect()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert not calls


def test_a_collector_dropped_in_another_thread_passes_a_signal_on() -> None:
    with handler(signal.SIGTERM, Interruption) as calls:
        mine = signal.getsignal(signal.SIGTERM)
        collectors = [short()]
        next(iter(collectors[0]))
        thread = threading.Thread(target=lambda: collectors.pop().shutdown())
        thread.start()
        thread.join()
        with pytest.raises(Interruption):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert len(calls) == 1


def test_of_two_runs_the_last_puts_handlers_back() -> None:
    with handler(signal.SIGTERM, Interruption):
        mine = signal.getsignal(signal.SIGTERM)
        with short() as one, short() as other:
            first, second = iter(one), iter(other)
            next(first)
            next(second)
            one.shutdown()
            assert signal.getsignal(signal.SIGTERM) is not mine
            with pytest.raises(Interruption):
                signal.raise_signal(signal.SIGTERM)
            next(second)
        assert signal.getsignal(signal.SIGTERM) is mine


def test_between_batches_ctrl_c_is_as_python_has_it() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with short() as collector:
            batches = iter(collector)
            for _ in range(3):
                next(batches)
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            asyncio.run(cancelled_by_ctrl_c())
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            next(batches)
    finally:
        signal.signal(signal.SIGINT, before)


async def cancelled_by_ctrl_c() -> None:
    """Check that Ctrl-C cancels the main task.

    The handler is Python's own, which asyncio therefore replaces.
    """
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(30)
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def test_between_batches_a_handler_may_be_interrupted_by_itself() -> None:
    depth: list[int] = []

    def twice(number: int, _: Any) -> None:
        depth.append(number)
        if len(depth) == 1:
            signal.raise_signal(number)
            assert len(depth) == 2

    before = signal.signal(signal.SIGTERM, twice)
    try:
        with short() as collector:
            next(iter(collector))
            signal.raise_signal(signal.SIGTERM)
            assert len(depth) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_that_is_put_there_between_batches_counts_from_then_on() -> None:
    """The new handler may call the previous one, which may also be restored."""
    heard: list[str] = []

    def first(*_: Any) -> None:
        heard.append("first")

    def act(td: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return RecordingPolicy()(td)

    before = signal.signal(signal.SIGTERM, first)
    try:
        with sync_collector(
            DISABLED, act, frames_per_batch=LANES, total_frames=9 * LANES
        ) as collector:
            batches = iter(collector)
            next(batches)
            heard.clear()
            found = signal.getsignal(signal.SIGTERM)
            assert callable(found)

            def chained(number: int, frame: Any) -> None:
                heard.append("chained")
                found(number, frame)

            for handle, expected in (
                (chained, ["chained", "first"]),
                (found, ["first"]),
                (first, ["first"]),
                (lambda *_: heard.append("other"), ["other"]),
                (found, ["first"]),
            ):
                signal.signal(signal.SIGTERM, handle)
                signal.raise_signal(signal.SIGTERM)
                assert heard == expected, "between batches"
                heard.clear()
                next(batches)
                assert heard == expected, "within one"
                heard.clear()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            next(batches)
            assert not heard
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_guard_costs_next_to_nothing() -> None:
    """Replacing handlers by ``signal.signal`` took 20 us."""

    def guard() -> None:
        with defer_signals():
            pass

    with short() as collector:
        next(iter(collector))
        # CPU time, because other processes may run at the same time.
        seconds = min(timeit.repeat(guard, timer=time.process_time, number=1000, repeat=20)) / 1000
    assert seconds < 10e-6
