"""An exception from a signal's handler, anywhere: stored rows have no gap, and the ledger balances.

``TALLYROLL_INTERRUPTS`` says at how many places of each run, 10 by default.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tallyroll import collector as package
from tallyroll.collector.batches.run_loop import Collector
from tallyroll.collector.rollout.os_signals import admitted, deferred
from tallyroll.storage import open_storage

from collect_kit import balanced
from oracles import check_rows
from worker_kit import DISABLED, LENGTHS, NEXT, SAME, Telling, alone, in_threads, spread

PLACES = int(os.environ.get("TALLYROLL_INTERRUPTS", "10"))
INSIDE = str(Path(package.__file__).parent)


class Interruption(Exception):
    """What a handler raises."""


@contextmanager
def at_instruction(number: int, sent: signal.Signals) -> Iterator[list[int]]:
    """Send this process a signal at the instruction of that number of the collector's code.

    Yields a list whose only element counts the instructions.
    """
    count = [0]

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "opcode":
            count[0] += 1
            if count[0] == number:
                signal.raise_signal(sent)
        return local

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(INSIDE):
            return None
        frame.f_trace_opcodes = True
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@contextmanager
def handler(number: signal.Signals, error: type[BaseException]) -> Iterator[list[float]]:
    """Handle signals by raising ``error``; yields a list of when that was."""
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
    "next": partial(alone, NEXT, Telling()),
    "same": partial(alone, SAME, Telling(), init_random_frames=33),
    "random": partial(alone, "avoided"),
    "part": partial(alone, DISABLED, surplus="never_step"),
    "torch": partial(alone, "torch", Telling()),
    "sync": partial(spread, NEXT, 2, Telling(), mode="sync"),
    "async": partial(spread, NEXT, 2, Telling(), mode="async"),
    "async part": partial(spread, DISABLED, 1, Telling(), mode="async", surplus="never_step"),
}


def collected(name: str, path: Path, number: int, error: type[BaseException]) -> int:
    """A run that is interrupted at an instruction; returns how many there were until then."""
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interruption])
@pytest.mark.parametrize("name", RUNS)
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


# --- held and admitted ----------------------------------------------------------------------------


def test_a_held_signal_waits_for_admitted_code() -> None:
    with handler(signal.SIGINT, Interruption) as calls:
        with pytest.raises(Interruption), deferred():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            assert not calls
            with admitted():
                pytest.fail("it waits no longer")
        with pytest.raises(Interruption), deferred(), admitted():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it did not wait")
        assert len(calls) == 2


def test_at_the_end_every_signal_is_handled_and_its_handler_is_back() -> None:
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.signal(number, lambda number, _: heard.append(number)) for number in numbers]
    try:
        ours = [signal.getsignal(number) for number in numbers]
        with deferred(), deferred():
            for number in numbers:
                signal.raise_signal(number)
            assert not heard
        assert sorted(heard) == sorted(numbers)
        assert [signal.getsignal(number) for number in numbers] == ours
    finally:
        for number, handle in zip(numbers, before, strict=True):
            signal.signal(number, handle)


def test_a_signal_that_waited_for_a_second_is_heard_anywhere() -> None:
    began = time.monotonic()
    with handler(signal.SIGALRM, Interruption) as calls:
        with pytest.raises(Interruption), deferred():  # noqa: PT012
            signal.raise_signal(signal.SIGALRM)
            threading.Event().wait(30)
        assert 0.9 < calls[0] - began < 10


def test_a_signal_heard_in_time_is_not_heard_again() -> None:
    with handler(signal.SIGINT, Interruption) as calls:
        with pytest.raises(Interruption), deferred():
            signal.raise_signal(signal.SIGINT)
        time.sleep(1.2)
        assert len(calls) == 1


def test_other_threads_neither_hold_nor_admit() -> None:
    with handler(signal.SIGINT, Interruption) as calls:
        stopped, admitting = threading.Event(), threading.Event()

        def admit() -> None:
            with deferred(), admitted():
                admitting.set()
                stopped.wait()

        thread = threading.Thread(target=admit)
        with pytest.raises(Interruption), deferred():  # noqa: PT012
            thread.start()
            admitting.wait()
            signal.raise_signal(signal.SIGINT)
            assert not calls
            stopped.set()
            thread.join()


@pytest.mark.parametrize("where", ["policy", "postproc"])
def test_ctrl_c_ends_what_takes_for_ever(where: str, tmp_path: Path) -> None:
    """Code of the user's is interrupted at once, wherever the collector calls it."""

    def hang(td: Any) -> Any:
        if hanging:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(60)
        return Telling()(td) if where == "policy" else td

    hanging = False
    policy = hang if where == "policy" else Telling()
    began = time.monotonic()
    with (  # noqa: PT012
        handler(signal.SIGALRM, KeyboardInterrupt),
        alone(
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
    """It catches what its handler raises, each time."""
    caught = []

    def act(td: Any) -> Any:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(0.5)
        except Interruption:
            caught.append(time.monotonic())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return Telling()(td)

    began = time.monotonic()
    with (
        handler(signal.SIGALRM, Interruption),
        alone(DISABLED, act, frames_per_batch=10, total_frames=20) as collector,
    ):
        assert sum(len(batch) for batch in collector) == 20
    assert len(caught) > 3
    assert time.monotonic() - began < 0.4 * len(caught)


def test_a_handler_that_calls_the_one_that_it_found() -> None:
    with handler(signal.SIGINT, Interruption) as calls:
        with deferred(), admitted():
            found = signal.getsignal(signal.SIGINT)
            assert callable(found)

            def chained(number: int, frame: Any) -> None:
                found(number, frame)

            signal.signal(signal.SIGINT, chained)
        for _ in range(3):
            with pytest.raises(Interruption), deferred(), admitted():
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interruption):
            signal.raise_signal(signal.SIGINT)
        assert len(calls) == 4


def test_two_that_wait_are_both_handled_once() -> None:
    with (
        handler(signal.SIGINT, Interruption) as one,
        handler(signal.SIGTERM, Interruption) as other,
    ):
        with pytest.raises(Interruption), deferred():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        assert (len(one), len(other)) == (1, 1)
        with pytest.raises(Interruption), deferred(), admitted():
            signal.raise_signal(signal.SIGTERM)
        assert (len(one), len(other)) == (1, 2)
        with pytest.raises(Interruption), deferred(), admitted(), deferred():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            assert len(one) == 1
        assert len(one) == 2
