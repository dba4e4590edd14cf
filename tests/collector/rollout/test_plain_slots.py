"""Slots that one compiled call stores equal those of the slow path, whatever interrupts them."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs.utils import exploration_type

import tallyroll.storage
from tallyroll.collector import SyncCollector
from tallyroll.collector.base import Collector
from tallyroll.collector.batches import collect_guard
from tallyroll.collector.batches.checks.value_checks import OutOfRangeWarning
from tallyroll.collector.batches.fast_collect import FastPath
from tallyroll.collector.compat import use_own_exploration_type
from tallyroll.collector.errors import (
    LedgerError,
    PolicyError,
    SilentReset,
    StateError,
    TransitionError,
)
from tallyroll.collector.native.kernel import compiled
from tallyroll.storage import MemmapStorage, fast_paths, open_storage, verify
from tallyroll.storage.engine import writer_check
from tallyroll.storage.errors import StorageClosed, StorageLocked
from tallyroll.storage.replay import buffers
from tallyroll.storage.storages import DiskStorage

from collect_kit import ByObservation, assert_same, balanced
from oracles import check_rows
from pairs import each_pair
from random_runs import flat
from self_reset_kit import vector
from traced_code import Interruption, at_checks
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    RecordingPolicy,
    in_threads,
    sync_collector,
)

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no compiler")

FRAMES = 60
PLACES = int(os.environ.get("TALLYROLL_INTERRUPTS", "3"))
PACKAGE = str(Path(tallyroll.storage.__file__).parents[1])


def module() -> TensorDictModule:
    """Return a policy with one output, which is called without TensorDicts."""
    inner = ByObservation("float")

    def act(observation: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        from tensordict import TensorDict

        td = TensorDict({"observation": observation}, observation.shape[:1])
        action: torch.Tensor = inner(td)["action"]
        return action

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


RUNS: dict[str, Callable[..., Collector]] = {
    "random": partial(sync_collector, DISABLED, finals="kept"),
    "random, watched": partial(sync_collector, SAME),
    "policy": partial(sync_collector, DISABLED, RecordingPolicy(), finals="kept"),
    "module": partial(sync_collector, SAME, module(), finals="kept"),
    "torch": partial(sync_collector, "torch", RecordingPolicy(), finals="kept"),
    "resets": partial(sync_collector, NEXT, finals="kept"),
    "resets, policy": partial(sync_collector, NEXT, RecordingPolicy(), finals="kept"),
    "resets, watched": partial(sync_collector, NEXT, module()),
    "resets, one lane": partial(sync_collector, NEXT, RecordingPolicy(), 1, finals="kept"),
    "opening": partial(sync_collector, NEXT, RecordingPolicy(), init_random_frames=33),
}
CALLS = {"lanes": [LANES], "odd": [1, LANES, 2 * LANES + 1, 3, LANES - 1, 4 * LANES, LANES]}


@contextmanager
def stored_plainly(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the numbers of slots that the fast path stored, and that it did not."""
    store, counts = FastPath.store, [0, 0]

    def counted(self: FastPath, *given: Any) -> bool:
        stored = store(self, *given)
        counts[not stored] += 1
        return stored

    with monkeypatch.context() as patched:
        patched.setattr(FastPath, "store", counted)
        yield counts


def finish(collector: Collector, n: int = LANES) -> None:
    while collector.collect(n) == n:
        pass


# --- compared with the slow path ------------------------------------------------------------------


@each_pair(name=RUNS, calls=CALLS, ring=[None, 23, 40])
def test_what_is_stored_is_the_same(
    name: str, calls: str, ring: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for way in ("at once", "refused", "longer"):
        off = ("fast-collect",) if way == "longer" else ()
        with monkeypatch.context() as patched, fast_paths.switched_off(*off):
            if way == "refused":
                patched.setattr(FastPath, "store", lambda *_: False)
            storage = MemmapStorage(tmp_path / way, max_size=ring)
            with (
                stored_plainly(patched) as (counts),
                storage,
                RUNS[name](
                    frames_per_batch=LANES, total_frames=203, storage=storage, seed=1
                ) as collector,
            ):
                few = 4 * collector.lanes
                versions, wants = count(), cycle(min(n, few) for n in CALLS[calls])
                while collector.collect(want := next(wants)) == want:
                    if name != "random" and next(versions) % 3 == 0 and collector._policy:
                        collector.update_policy_weights_()
                at_once = way == "at once"
                if ring != 23:  # with this ring, most calls are split
                    assert (counts[0] > (15 if calls == "lanes" else 9)) is at_once, counts
                slots = storage.slots_of(np.array(storage.span, np.int64))
                rows = flat(storage.get(torch.from_numpy(slots)).clone())
                found.append((rows, storage.record, collector.ledger.counts(), collector.episodes))
        assert verify(tmp_path / way).sound
    (rows, record, ledger, episodes), *others = found
    assert ledger["stored"] == 203
    for other in others:
        assert_same(rows, other[0])
        assert (record, ledger) == other[1:3]
        assert [*episodes] == [*other[3]]


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_every_format_is_written(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"rows.{suffix}"
    with stored_plainly(monkeypatch) as counts:
        with RUNS["random"](frames_per_batch=LANES, total_frames=500, storage=path) as collector:
            finish(collector)
        assert counts[0] > 80
    assert verify(path).sound
    with open_storage(path) as storage:
        check_rows(storage.get(slice(None)), LENGTHS, ends="mixed", from_start=True)
        assert storage.head == 500


def test_the_header_says_after_each_call_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=path) as collector:
        for calls in range(1, 200):
            collector.collect(LANES)
            with open_storage(path) as reader:
                assert reader.head == LANES * calls
                at, record = reader.record or (0, b"")
                assert at == reader.head
                assert b'"stored": %d,' % at in record


# --- interruptions --------------------------------------------------------------------------------


@contextmanager
def at_check(number: int) -> Iterator[list[int]]:
    """Raise SIGTERM at one of the places in the package where Python checks for signals.

    Yields a list whose only element counts these places.
    """
    count = [0]

    def look(_: Any) -> None:
        count[0] += 1
        if count[0] == number:
            signal.raise_signal(signal.SIGTERM)

    with at_checks(PACKAGE, look):
        yield count


def interrupted(name: str, path: Path, number: int, calls: int) -> int:
    """Interrupt one of the calls and continue if the run can.

    Return the number of places in that call.
    """

    def handle(*_: Any) -> None:
        raise Interruption

    with in_threads():
        collector = RUNS[name](frames_per_batch=LANES, total_frames=FRAMES, storage=path, seed=1)
        before, explores = signal.signal(signal.SIGTERM, handle), exploration_type()
        try:
            for _ in range(calls):
                collector.collect(LANES)
            gc.collect()  # or the finalizers of an earlier collector are interrupted
            with suppress(Interruption), at_check(number) as count:
                collector.collect(LANES)
            assert torch.is_grad_enabled()
            assert exploration_type() is explores
            collector.ledger.check()
            with suppress(StateError):  # if the interruption was within a step
                finish(collector)
        finally:
            collector.shutdown()
            signal.signal(signal.SIGTERM, before)
    ledger = collector.ledger
    assert balanced(ledger), ledger.counts()
    with open_storage(path) as storage:
        assert ledger.stored == storage.head <= FRAMES
        assert ledger.lost == 0
        assert ledger.stored + ledger.discarded == ledger.executed
        rows = storage.get(slice(0, storage.head))
        check_rows(rows, LENGTHS, ends="mixed", from_start=True)
        ended = int(rows["next", "done"].sum())
    assert len(collector.episodes) == ledger.episodes_complete == ended
    return count[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "module", "resets", "resets, policy"])
def test_interrupted_anywhere_no_row_is_lost_or_doubled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(name)
    apart = threading.Thread(target=use_own_exploration_type)  # like workers in threads
    apart.start()
    apart.join()
    for calls in (4, 5, 7, 8):
        with stored_plainly(monkeypatch) as counts:
            count = interrupted(name, tmp_path / f"whole {calls}", 0, calls)
        assert counts[0] >= FRAMES // LANES // 2
        assert count > 20
        for place in sorted(chance.sample(range(1, count + 1), min(count, 4 * PLACES))):
            try:
                interrupted(name, tmp_path / f"{calls} {place}", place, calls)
            except BaseException as failed:
                failed.add_note(f"interrupted at place {place} of {count}")
                raise


@pytest.mark.parametrize("name", ["random", "module", "torch"])
def test_a_slot_that_was_left_is_the_next_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler raises between the filling of a slot and its storing on the slow path."""

    def interrupt(*_: Any) -> None:
        raise Interruption

    path = tmp_path / "rows"
    with RUNS[name](frames_per_batch=LANES, total_frames=100, storage=path) as collector:
        for _ in range(6):
            collector.collect(LANES)
        with monkeypatch.context() as patched:
            patched.setattr(FastPath, "store", lambda *_: False)
            patched.setattr(collect_guard.CollectGuard, "__enter__", interrupt)
            with pytest.raises(Interruption):
                collector.collect(LANES)
        assert collector.ledger.stored == 6 * LANES
        finish(collector)
    assert collector.ledger.discarded == 0
    with open_storage(path) as storage:
        assert storage.head == 100
        check_rows(storage.get(slice(None)), LENGTHS, ends="mixed", from_start=True)


@pytest.mark.parametrize("name", ["random", "module", "torch"])
def test_what_an_environment_raises_ends_the_run(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with RUNS[name](frames_per_batch=LANES, total_frames=-1, storage=path) as collector:
        for _ in range(10):
            collector.collect(LANES)
        env = collector.env if name == "torch" else collector.env.system  # type: ignore[attr-defined]
        step = env._step if name == "torch" else env.step

        def raising(*given: Any, **more: Any) -> Any:
            raise RuntimeError("broken")

        setattr(env, "_step" if name == "torch" else "step", raising)
        with pytest.raises(RuntimeError, match="broken"):
            collector.collect(LANES)
        assert step is not None
        with pytest.raises(StateError, match=r"RuntimeError.*\(broken\).*resume=True"):
            collector.collect(LANES)
        assert collector.last_rows == range(10 * LANES, 10 * LANES)
        assert collector.ledger.executed == collector.ledger.stored == 10 * LANES
    assert verify(path).sound


@pytest.mark.parametrize("failing_step", [1, 2])
def test_held_rows_and_whole_slots_are_stored_before_an_error(
    failing_step: int, tmp_path: Path
) -> None:
    path = tmp_path / "rows"
    with RUNS["resets, policy"](frames_per_batch=LANES, total_frames=-1, storage=path) as run:
        while run.collect(LANES - 2):
            if run.ledger.carried > 1 and run._loop.fast_collect and run._loop.fast_collect.ready:
                break
        stored, carried = run.ledger.stored, run.ledger.carried
        system, calls = run.env.system, count(1)  # type: ignore[attr-defined]
        step = system.step

        def failing(*given: Any, **more: Any) -> Any:
            if next(calls) == failing_step:
                raise RuntimeError("broken")
            return step(*given, **more)

        system.step = failing
        with pytest.raises(RuntimeError, match="broken"):
            run.collect(4 * LANES)
        ledger = run.ledger
        more = ledger.executed - stored - carried  # rows of the step before the failed one
        assert (more > 0) is (failing_step == 2)
        assert ledger.stored == stored + carried + more
        assert ledger.discarded == ledger.carried == 0
    assert verify(path).sound
    with open_storage(path) as storage:
        check_rows(storage.get(slice(None)), LENGTHS, ends="mixed", from_start=True)


def test_held_rows_with_random_actions_are_counted_as_such(tmp_path: Path) -> None:
    """Executing the held rows ends the opening, and the next call stores them."""
    run = sync_collector(
        DISABLED,
        RecordingPolicy(),
        init_random_frames=LANES,
        frames_per_batch=LANES,
        total_frames=-1,
        storage=tmp_path / "rows",
        finals="kept",
    )
    with run:
        run.collect(LANES - 2)
        assert (run.ledger.random, run.ledger.carried) == (LANES - 2, 2)
        for _ in range(5):
            run.collect(LANES - 2)
        assert run.ledger.random == LANES
        assert run._loop.fast_collect is not None
        assert run._loop.fast_collect.ready is not None


@pytest.mark.parametrize("closes", [False, True])
def test_what_is_raised_behind_a_stop_is_not_swallowed(closes: bool, tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows")
    run = RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=storage)
    for _ in range(6):
        run.collect(LANES)

    def raising(*given: Any, **more: Any) -> Any:
        run.stop()
        if closes:
            storage.close()
        raise RuntimeError("broken")

    run.env.system.step = raising  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="broken"):
        run.collect(LANES)
    with pytest.raises(StateError, match="the run ended when RuntimeError was raised"):
        run.collect(LANES)
    assert run.ledger.stored == 6 * LANES
    run.shutdown()
    storage.close()


def test_a_slot_whose_step_stopped_the_run_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in ("at once", "longer"):
        run = RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=tmp_path / way)
        for _ in range(6):
            run.collect(LANES)
        step = run.env.system.step  # type: ignore[attr-defined]

        def stopping(*given: Any, run: Any = run, step: Any = step, **more: Any) -> Any:
            run.stop()
            return step(*given, **more)

        run.env.system.step = stopping  # type: ignore[attr-defined]
        with monkeypatch.context() as patched:
            if way == "longer":
                patched.setattr(FastPath, "store", lambda *_: False)
            assert run.collect(LANES) == LANES
        assert run._run.over
        assert run.ledger.episodes_cut > 0
        assert run.collect(LANES) == 0
        run.shutdown()
        assert run.ledger.stored == run.ledger.executed == 7 * LANES


@pytest.mark.parametrize("phase", ["fill", "store"])
def test_an_action_is_blamed_where_the_step_raised(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUNS["module"](frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "r")
    with run:
        for _ in range(6):
            run.collect(LANES)

        def broken(*_: Any) -> Any:
            raise TimeoutError

        monkeypatch.setattr(FastPath, phase, broken)
        blamed = PolicyError("the action")
        monkeypatch.setattr(run._loop._checks, "bad_action", lambda *_, **__: blamed)
        with pytest.raises(PolicyError if phase == "fill" else TimeoutError):
            run.collect(LANES)


def test_a_ring_of_one_slot_is_filled_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a call of two slots, only the first one takes the fast path."""
    store, seen = FastPath.store, []
    for way in ("plain", "longer"):
        calls = count()

        def one_of_four(self: FastPath, *given: Any, calls: Any = calls, way: str = way) -> bool:
            return way == "plain" and next(calls) % 4 != 2 and store(self, *given)

        monkeypatch.setattr(FastPath, "store", one_of_four)
        storage = MemmapStorage(tmp_path / way, max_size=LANES)
        rows = []
        run = RUNS["policy"](frames_per_batch=LANES, total_frames=-1, storage=storage, seed=3)
        with storage, run:
            for n in 25 * [LANES, 2 * LANES, LANES]:
                run.collect(n)
                rows.append(flat(storage.get(slice(None)).clone()))
        seen.append(rows)
    for one, other in zip(*seen, strict=True):
        assert_same(one, other)


def test_a_seed_of_any_size_may_come_later(tmp_path: Path) -> None:
    run = RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "r")
    with run:
        for seed in (1, 2**63 + 5, 2**63 - 1, 2**70, 4):
            for _ in range(4):
                run.collect(LANES)
            run.set_seed(seed)
        run.collect(LANES)
        assert run.ledger.stored == 21 * LANES
    with open_storage(tmp_path / "r") as storage:
        assert b'"seed": 4,' in (storage.record or (0, b""))[1]


def test_buffers_are_told_before_a_handler_may_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(*_: Any) -> None:
        raise Interruption

    told: list[range] = []

    def telling(storage: Any, span: range) -> None:
        signal.raise_signal(signal.SIGTERM)
        told.append(span)

    storage = MemmapStorage(tmp_path / "rows")
    with storage, RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=storage) as run:
        for _ in range(6):
            run.collect(LANES)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
        before = signal.signal(signal.SIGTERM, handle)
        try:
            run.collect(LANES)  # installs the code that defers handlers
            monkeypatch.setattr(buffers, "notify_buffers", telling)
            with pytest.raises(Interruption):
                run.collect(LANES)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert told == [range(7 * LANES, 8 * LANES)]
        assert run.ledger.stored == 8 * LANES
        del buffer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "module"])
def test_a_handler_may_close_the_storage_anywhere(name: str, tmp_path: Path) -> None:
    def closed(path: Path, number: int) -> int:
        storage = MemmapStorage(path)
        run = RUNS[name](frames_per_batch=LANES, total_frames=-1, storage=storage, seed=1)
        before = signal.signal(signal.SIGTERM, lambda *_: storage.close())
        try:
            for _ in range(6):
                run.collect(LANES)
            gc.collect()
            with suppress(StorageClosed), at_check(number) as count:
                run.collect(LANES)
            with suppress(StorageClosed, StateError):
                run.collect(LANES)
        finally:
            signal.signal(signal.SIGTERM, before)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.shutdown()
            storage.close()
        with open_storage(path) as reader:
            assert reader.head == run.ledger.stored
            check_rows(reader.get(slice(None)), LENGTHS, ends="mixed", from_start=True)
        assert balanced(run.ledger)
        return count[0]

    with in_threads():
        places = closed(tmp_path / "whole", 0)
        for place in random.Random(name).sample(range(1, places + 1), min(places, 4 * PLACES)):
            closed(tmp_path / str(place), place)


def test_what_was_dropped_is_gone_at_once(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows", max_size=100)
    run = RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=storage)
    for _ in range(6):
        run.collect(LANES)
    run.shutdown()
    columns = weakref.ref(storage.writer.reader.engine.space.columns)  # type: ignore[union-attr]
    storage.close()
    slot = weakref.ref(run._loop.fast_collect._made.rows)
    gc.collect()
    gc.disable()
    try:
        run._loop.fast_collect._made = None
        assert slot() is None
        del storage, run
        gc.collect(0)
    finally:
        gc.enable()
    gc.collect()
    assert columns() is None


def lies_from_here_on(run: Collector) -> None:
    """Replace the observations of lane 2 by NaN from now on."""
    system = run.env.system  # type: ignore[attr-defined]
    step = system.step

    def lying(*given: Any, **more: Any) -> Any:
        out = step(*given, **more)
        out.obs[0][2] = np.nan
        return out

    system.step = lying


def test_a_value_that_lies_is_told_by_lane_and_step(tmp_path: Path) -> None:
    with RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "r") as run:
        for _ in range(6):
            run.collect(LANES)
        lies_from_here_on(run)
        with pytest.raises(TransitionError, match="lane 2, step"):
            run.collect(LANES)
        assert run.ledger.stored == 6 * LANES
        assert run.ledger.executed == 7 * LANES == run.ledger.stored + run.ledger.discarded


def test_values_that_may_lie_are_stored_at_once_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUNS["random"](
        frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "r", validate="warn"
    )
    with run:
        for _ in range(6):
            run.collect(LANES)
        lies_from_here_on(run)
        with pytest.warns(OutOfRangeWarning, match="lane 2, step"):
            run.collect(LANES)
        with stored_plainly(monkeypatch) as counts:
            for _ in range(10):
                run.collect(LANES)
        assert counts == [10, 0]
        assert run.ledger.stored == 17 * LANES


def test_a_record_that_waits_is_no_run_s(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows")
    with storage, RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=storage) as run:
        for _ in range(5):
            run.collect(LANES)
        storage.writer.stage_record(b"waiting")
        run.collect(LANES)
        assert b'"stored": 30' in (storage.record or (0, b""))[1]
        assert storage.writer._staged is None  # type: ignore[union-attr]


def test_what_is_done_between_two_calls_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with RUNS["policy"](frames_per_batch=7, total_frames=400, storage=path) as collector:
        batches = iter(collector)
        for number in range(12):
            collector.collect(LANES)
            if number % 4 == 1:
                collector.collect(3)
            elif number % 4 == 2:
                next(batches)
            elif number % 4 == 3:
                collector.set_seed(number)
            collector.update_policy_weights_()
        assert collector.ledger.stored == 12 * LANES + 9 + 21
        collector.stop()
        assert collector.collect(LANES) < LANES
    with open_storage(path) as storage:
        rows = storage.get(slice(None))
        assert int(rows["collector", "policy_version"].max()) == 11
    assert verify(path).sound


def test_a_storage_that_is_closed_is_told_before_anything_is_stepped(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows")
    collector = RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=storage)
    for _ in range(5):
        collector.collect(LANES)
    storage.close()
    with pytest.raises(StorageClosed):
        collector.collect(LANES)
    assert collector.ledger.executed == collector.ledger.stored == 5 * LANES
    collector.shutdown()


def test_a_lock_file_that_is_gone_is_told(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows")
    collector = RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=storage)
    for _ in range(5):
        collector.collect(LANES)
    (lock,) = [each for each in (tmp_path / "rows").iterdir() if "lock" in each.name]
    lock.unlink()
    time.sleep(2 * writer_check.LOOK_SECONDS)
    with pytest.raises(StorageLocked):
        collector.collect(LANES)
    collector.ledger.check()
    with suppress(StorageLocked):
        collector.shutdown()
    with suppress(StorageLocked):
        storage.close()


def test_a_call_from_within_is_refused(tmp_path: Path) -> None:
    runs: list[Collector] = []

    def nested(observation: torch.Tensor) -> torch.Tensor:
        if len(runs) > 1:
            runs[0].collect(LANES)
        return torch.zeros(LANES, dtype=torch.int64)

    policy = TensorDictModule(nested, in_keys=["observation"], out_keys=["action"])
    collector = sync_collector(
        DISABLED,
        policy,
        frames_per_batch=LANES,
        total_frames=-1,
        storage=tmp_path / "r",
        finals="kept",
    )
    runs.append(collector)
    with collector:
        for _ in range(5):
            collector.collect(LANES)
        runs.append(collector)
        with pytest.raises(StateError, match="already collecting"):
            collector.collect(LANES)


def test_the_run_is_over_with_its_last_row(tmp_path: Path) -> None:
    with RUNS["random"](
        frames_per_batch=LANES, total_frames=10 * LANES, storage=tmp_path / "r"
    ) as run:
        for calls in range(1, 11):
            assert run.collect(LANES) == LANES
            assert run._run.over is (calls == 10)
        assert b'"open": 0' in (run._writer.storage.record or (0, b""))[1]  # type: ignore[union-attr]


def test_a_stopped_run_steps_no_more(tmp_path: Path) -> None:
    with RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "r") as run:
        for _ in range(5):
            run.collect(LANES)
        run.stop()
        assert run.collect(LANES) == 0
        assert run.ledger.executed == 5 * LANES


def test_every_call_resets_where_that_was_asked_for(tmp_path: Path) -> None:
    run = RUNS["random"](
        frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "r", reset_at_each_iter=True
    )
    with run:
        for _ in range(6):
            run.collect(LANES)
    with open_storage(tmp_path / "r") as storage:
        assert not storage.get(slice(None))["collector", "step"].any()


@pytest.mark.parametrize(("name", "wrong"), [("executed", 1), ("slots", 1), ("random", -9)])
def test_a_ledger_that_does_not_balance_is_told_and_nothing_is_stored(
    name: str, wrong: int, tmp_path: Path
) -> None:
    run = RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "r")
    for _ in range(5):
        run.collect(LANES)
    setattr(run._ledger, name, getattr(run.ledger, name) + wrong)
    with pytest.raises(LedgerError):
        run.collect(LANES)
    with open_storage(tmp_path / "r") as storage:
        assert storage.head == 5 * LANES
    with suppress(LedgerError):
        run.shutdown()
    run._writer.close()


def test_records_are_written_in_turn(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "r")
    with storage, RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=storage) as run:
        run.collect(LANES)
        for _ in range(9):
            run.collect(LANES)
            header = storage.writer.reader.engine._header  # type: ignore[union-attr]
            slots = [header.records.read(index) for index in (0, 1)]
            assert sorted(slot[1] for slot in slots) == [storage.head - LANES, storage.head]
            assert abs(slots[0][0] - slots[1][0]) == 1


def test_weights_that_come_between_steps_are_those_of_the_row(tmp_path: Path) -> None:
    run = RUNS["policy"](frames_per_batch=LANES, total_frames=-1, storage=tmp_path / "r")
    policy = run._policy
    assert policy is not None

    def serve() -> None:
        policy.version += 3

    policy.serve_between_steps(serve)
    with run:
        batches = iter(run)
        for calls in range(1, 9):
            if calls % 3:
                run.collect(LANES)
            else:
                next(batches)
    with open_storage(tmp_path / "r") as storage:
        versions = storage.get(slice(None))["collector", "policy_version"].reshape(-1, LANES)
        assert (versions == 3 * torch.arange(1, 9)[:, None]).all()


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("length", [3, 50])
def test_an_environment_that_resets_itself_is_found(
    lanes: int, length: int, tmp_path: Path
) -> None:
    env = vector(lanes, length=length)
    run = SyncCollector(
        env, None, frames_per_batch=lanes, total_frames=-1, storage=tmp_path / "rows"
    )

    def for_long() -> None:
        for _ in range(25 * (length + 2)):
            run.collect(lanes)

    with pytest.raises(SilentReset):
        for_long()
    run.shutdown()


def test_whoever_wants_to_know_of_rows_is_told(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows", max_size=40)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
    with storage, RUNS["random"](frames_per_batch=LANES, total_frames=300, storage=storage) as run:
        run.collect(LANES)
        storage.trajectories.table  # noqa: B018 - it is counted from here on
        for _ in range(40):
            run.collect(LANES)
        assert len(buffer) == 40
        table = storage.trajectories.table
        ended = {each.traj_id: each.length for each in run.episodes}
        whole = [line for line in table if int(line["id"]) in ended]
        assert len(whole) > 5
        assert all(ended[int(line["id"])] == int(line["length"]) for line in whole)
    assert verify(tmp_path / "rows").sound


@pytest.mark.parametrize("given", [{"seed": 2**63 + 5}, {"seed": 2**63 - 1}, {"seed": 0}])
def test_seeds_of_any_size_are_recorded(given: dict[str, int], tmp_path: Path) -> None:
    run = RUNS["random"](frames_per_batch=LANES, total_frames=50, storage=tmp_path / "r", **given)
    with run:
        finish(run)
    with open_storage(tmp_path / "r") as storage:
        assert b'"seed": %d,' % given["seed"] in (storage.record or (0, b""))[1]


@pytest.mark.parametrize("rows", [2**31 - 7, 2**40 + 3, 2**46])
def test_counts_of_any_size_are_spelled(rows: int, tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows", max_size=40)
    with storage, RUNS["random"](frames_per_batch=LANES, total_frames=-1, storage=storage) as run:
        for _ in range(20):
            run.collect(LANES)
        engine = storage.writer.reader.engine  # type: ignore[union-attr]
        header = engine._header
        header.set_reserve(rows - rows % 40)
        header.set_head(rows - rows % 40)
        before, commits = header.head, engine.known.commits
        for call in range(1, 8):
            run.collect(LANES)
            with open_storage(storage.path) as reader:
                assert reader.head == before + call * LANES
                assert (reader.record or (0, b""))[0] == reader.head
        assert engine.known.commits == commits + 7


def test_with_durability_of_power_each_call_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage: DiskStorage = MemmapStorage(tmp_path / "rows", durability="power")
    with stored_plainly(monkeypatch) as counts, storage:
        with RUNS["random"](frames_per_batch=LANES, total_frames=60, storage=storage) as run:
            finish(run)
        assert counts[0] == 0
