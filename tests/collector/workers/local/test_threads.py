"""Workers in threads: the rows of processes, reported errors, no leftover threads, and limits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type, set_interaction_type
from torchrl.envs.utils import ExplorationType

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.errors import ArgumentError, WorkerDied, WorkerHung, WorkerRaised
from tallyroll.collector.torchrl import MultiSyncCollector
from tallyroll.collector.workers.local import threads

from collect_kit import ByObservation, balanced
from oracles import OracleEnv, check_rows
from worker_kit import (
    DISABLED,
    LENGTHS,
    NEXT,
    RecordingPolicy,
    assert_alike,
    collect_all,
    factories,
    sync_collector,
    worker_collector,
)

BUDGET: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 120, "seed": 5}
MODES = ["sync", "async"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    after = [each for each in threading.enumerate() if each not in before]
    for each in after:  # a cancelled timer ends when its thread next runs
        each.join(5)
    assert not [each for each in after if each.is_alive()]


def threaded(create: Any, policy: Any = None, **kwargs: Any) -> MultiprocessCollector:
    return MultiprocessCollector(create, policy, transport="thread", **kwargs)


class Failing(OracleEnv):
    """Oracle that calls `fail` at step `at` of lane 1."""

    def __init__(self, *args: Any, at: int, fail: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at, self.fail = at, fail

    def step(self, action: Any) -> Any:
        """Step or fail."""
        if self.lane == 1 and self.steps_taken == self.at:
            self.fail()
        return super().step(action)


def failing(first: int, lanes: int, at: int, fail: Callable[[], None]) -> SyncVectorEnv:
    each = range(first, first + lanes)
    makes = [partial(Failing, lane, LENGTHS, ends="mixed", at=at, fail=fail) for lane in each]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)


def two(at: int, fail: Callable[[], None]) -> list[Any]:
    """Return factories of lane 0, and of lane 1, which fails."""
    return [partial(failing, lane, 1, at, fail) for lane in range(2)]


FAILURES = {"left": 0}


def raises() -> None:
    raise ValueError("the simulator fell over")


def raises_once() -> None:
    if FAILURES["left"]:
        FAILURES["left"] -= 1
        raise ValueError("the simulator fell over")


def exits() -> None:
    raise SystemExit(3)


RELEASE = threading.Event()


def hangs() -> None:
    RELEASE.wait(20)


@pytest.mark.parametrize("policy", [None, RecordingPolicy()], ids=["random", "policy"])
@pytest.mark.parametrize("source", [DISABLED, NEXT, "torch"])
def test_rows_ledger_and_episodes_are_those_of_one_process(source: str, policy: Any) -> None:
    one = collect_all(sync_collector(source, policy, **BUDGET))
    many = collect_all(threaded(factories(source, 2), policy, **BUDGET))
    assert_alike(one, many)


def test_rows_are_those_of_processes() -> None:
    apart = collect_all(worker_collector(DISABLED, 2, RecordingPolicy(), **BUDGET))
    assert_alike(apart, collect_all(threaded(factories(DISABLED, 2), RecordingPolicy(), **BUDGET)))


def test_async_counts_are_exact_and_lanes_in_order() -> None:
    run = collect_all(threaded(factories(DISABLED, 2), ByObservation(), mode="async", **BUDGET))
    assert sum(map(len, run.batches)) == run.collector.ledger.stored == 120
    assert balanced(run.collector.ledger)
    check_rows(torch.cat(run.batches), LENGTHS, ends="mixed")


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_is_raised_as_that_of_a_process(mode: Any) -> None:
    collector = threaded(two(7, raises), mode=mode, **BUDGET)
    with pytest.raises(WorkerRaised, match=r"worker 1 \(lane 1, thread tallyroll-wor") as caught:
        collect_all(collector)
    error = caught.value
    assert isinstance(error.__cause__, ValueError)
    assert (error.worker, error.lane) == (1, 1)
    assert "in raises" in error.worker_traceback
    assert balanced(collector.ledger)


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_raised_is_replaced(mode: Any) -> None:
    FAILURES["left"] = 1
    run = collect_all(threaded(two(7, raises_once), mode=mode, on_worker_death="respawn", **BUDGET))
    ledger = run.collector.ledger
    assert (ledger.respawned, ledger.stored) == (1, 120)
    assert balanced(ledger)


@pytest.mark.parametrize("mode", MODES)
def test_an_exit_ends_the_worker_alone(mode: Any) -> None:
    with pytest.raises(WorkerDied, match=r"ended with SystemExit\(3\)"):
        collect_all(threaded(two(7, exits), mode=mode, **BUDGET))


@pytest.mark.parametrize("mode", MODES)
def test_a_hang_ends_the_run_and_says_that_it_goes_on(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_END_SECONDS", 0.3)
    RELEASE.clear()
    collector = threaded(two(7, hangs), mode=mode, step_timeout=0.5, **BUDGET)
    began = time.monotonic()
    try:
        with (
            pytest.warns(RuntimeWarning, match=r"worker-1 is still in its environment after 0\.3"),
            pytest.raises(
                WorkerHung, match=r'continues in its environment[^!]*transport="process"'
            ),
        ):
            collect_all(collector)
        assert time.monotonic() - began < 15
        assert balanced(collector.ledger)
    finally:
        RELEASE.set()
    while any(each.name == "tallyroll-worker-1" for each in threading.enumerate()):
        time.sleep(0.01)


def test_a_hang_at_the_start_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_END_SECONDS", 0.3)
    RELEASE.clear()
    try:
        with (
            pytest.warns(RuntimeWarning, match="is still in its environment"),
            pytest.raises(WorkerHung, match=r"start_timeout=0\.3 seconds, and a thread cannot"),
        ):
            threaded([hangs] * 2, start_timeout=0.3, on_worker_death="respawn", **BUDGET).shutdown()
    finally:
        RELEASE.set()
    while any("tallyroll-worker" in each.name for each in threading.enumerate()):
        time.sleep(0.01)


@pytest.mark.parametrize("mode", MODES)
def test_close_in_the_middle_waits_for_the_step_under_way(mode: Any) -> None:
    with threaded(two(-1, raises), ByObservation(), mode=mode, **BUDGET) as collector:
        next(iter(collector))
    assert collector.worker_pids == []


def test_a_collector_that_is_dropped_leaves_no_thread() -> None:
    collector = threaded(factories(DISABLED, 2), mode="async", **BUDGET)
    next(iter(collector))
    del collector


class Closing(OracleEnv):
    """Oracle that cannot be closed."""

    def close(self) -> None:
        """Fail."""
        raise ValueError("still connected")


def test_what_closing_raises_is_said() -> None:
    def make() -> SyncVectorEnv:
        return SyncVectorEnv([partial(Closing, 0, LENGTHS)], autoreset_mode=AutoresetMode.DISABLED)

    with pytest.warns(RuntimeWarning, match="worker-0 ended with ValueError.'still connected'"):
        collect_all(threaded([make], **BUDGET))


class Exploring(ByObservation):
    """Policy that records the exploration type."""

    def __init__(self) -> None:
        super().__init__()
        self.out_keys = ["action", "seen"]

    def forward(self, td: Any) -> Any:
        """Write the action and a column of the type."""
        seen = float(interaction_type() is InteractionType.RANDOM)
        time.sleep(0.0005)
        return super().forward(td).set("seen", torch.full((*td.batch_size, 1), seen))


def test_the_exploration_type_of_workers_is_their_own() -> None:
    with threaded(
        factories(DISABLED, 2),
        Exploring(),
        mode="async",
        exploration_type=ExplorationType.RANDOM,
        **BUDGET,
    ) as collector:
        for number, batch in enumerate(collector):
            assert batch["seen"].all()
            assert interaction_type() is not InteractionType.RANDOM
            with set_interaction_type(InteractionType.DETERMINISTIC):
                time.sleep(0.005)
                assert interaction_type() is InteractionType.DETERMINISTIC
            if number > 3:
                break


def test_generators_of_the_program_are_left_alone() -> None:
    """Workers in threads have their own generators for random actions, and seed no shared ones."""
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    collect_all(threaded(factories(DISABLED, 2), **{**BUDGET, "seed": None}))
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), wanted)


def test_the_collectors_of_torchrls_names_have_them_too() -> None:
    collector = MultiSyncCollector(
        factories(DISABLED, 2), None, transport="thread", frames_per_batch=10, total_frames=20
    )
    with collector:
        assert sum(batch.numel() for batch in collector) == 20
        assert collector.stats()["workers_alive"] == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"transport": "fiber"},
            r"transport: expected one of \['process', 'thread'\], or a function .*, got 'fiber'",
        ),
        ({"threads_per_worker": 2}, 'threads_per_worker needs transport="process"'),
        ({"mp_start_method": "forkserver"}, "mp_start_method='forkserver' needs transport"),
        (
            {"step_timeout": 1.0, "on_worker_death": "respawn"},
            'step_timeout with on_worker_death="respawn" needs transport="process"',
        ),
    ],
)
def test_limits_are_refused_with_the_way_out(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        MultiprocessCollector(factories(DISABLED, 2), **{"transport": "thread", **BUDGET, **given})


BOTH = threading.Barrier(2, timeout=10)


class Meeting(OracleEnv):
    """Oracle that steps only together with the other lane."""

    def step(self, action: Any) -> Any:
        """Wait for the other lane and step."""
        BOTH.wait()
        return super().step(action)


def meeting(lane: int) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Meeting, lane, LENGTHS)], autoreset_mode=AutoresetMode.DISABLED)


def test_workers_wait_at_the_same_time() -> None:
    makes = [partial(meeting, lane) for lane in range(2)]
    run = collect_all(threaded(makes, frames_per_batch=10, total_frames=40))
    assert run.collector.ledger.stored == 40


# --- replacement of a worker ----------------------------------------------------------------------


MADE_LANES: list[int] = []
MAY_BE_MADE = threading.Event()
SECOND_MADE = threading.Barrier(2, timeout=10)


def late_again(lane: int) -> SyncVectorEnv:
    """Make a lane that fails once; its replacement waits for permission."""
    MADE_LANES.append(lane)
    if MADE_LANES.count(lane) > 1:
        assert MAY_BE_MADE.wait(20)
    return failing(lane, 1, 7, raises_once)


def both_again(lane: int) -> SyncVectorEnv:
    """Make a lane that fails at step 7; both replacements are made at the same time."""
    MADE_LANES.append(lane)
    again = MADE_LANES.count(lane) > 1
    if again:
        SECOND_MADE.wait()
    makes = partial(Failing, 1, LENGTHS, ends="mixed", at=-1 if again else 7, fail=raises)
    return SyncVectorEnv([makes], autoreset_mode=AutoresetMode.DISABLED)


@contextmanager
def one_being_replaced() -> Iterator[tuple[MultiprocessCollector, Iterator[TensorDictBase]]]:
    """Yield two workers, one of which failed and cannot be replaced until `MAY_BE_MADE` is set."""
    FAILURES["left"] = 1
    MADE_LANES.clear()
    MAY_BE_MADE.clear()
    makes = [partial(late_again, lane) for lane in range(2)]
    with threaded(
        makes,
        mode="async",
        on_worker_death="respawn",
        frames_per_batch=20,
        total_frames=-1,
        seed=5,
    ) as collector:
        batches = iter(collector)
        while collector.ledger.respawned == 0:
            next(batches)
        yield collector, batches


def test_others_go_on_while_one_is_replaced() -> None:
    """Worker 0 alone gives the batches until worker 1 is replaced; then both do."""
    with one_being_replaced() as (collector, batches):
        later = [next(batches) for _ in range(6)][2:]  # the first batches may hold earlier rows
        assert all((batch["collector", "lane"] == 0).all() for batch in later)
        MAY_BE_MADE.set()
        until = time.monotonic() + 10
        while not (next(batches)["collector", "lane"] == 1).any():
            assert time.monotonic() < until
        assert balanced(collector.ledger)


def test_several_are_replaced_at_the_same_time() -> None:
    MADE_LANES.clear()
    makes = [partial(both_again, lane) for lane in range(2)]
    run = collect_all(threaded(makes, on_worker_death="respawn", **BUDGET))
    assert (run.collector.ledger.respawned, run.collector.ledger.stored) == (2, 120)
    assert balanced(run.collector.ledger)


class Leisurely(ByObservation):
    """Policy that waits during the trial of a replacement worker."""

    acted = False

    def forward(self, td: Any) -> Any:
        """Wait at the first call, and write the action."""
        if not self.acted and MADE_LANES.count(1) > 1:
            time.sleep(0.3)
        self.acted = True
        return super().forward(td)


def test_the_program_draws_no_number_twice_while_one_is_replaced() -> None:
    """The trial of the policy in a new worker must not restore generators to earlier states."""
    FAILURES["left"] = 1
    MADE_LANES.clear()
    MAY_BE_MADE.clear()
    makes = [partial(late_again, lane) for lane in range(2)]
    with threaded(
        makes,
        Leisurely(),
        mode="async",
        on_worker_death="respawn",
        **{**BUDGET, "total_frames": -1},
    ) as collector:
        batches = iter(collector)
        while collector.ledger.respawned == 0:
            next(batches)
        MAY_BE_MADE.set()
        drawn: list[float] = []
        while collector._startup.replacements.under_way:
            next(batches)
            for _ in range(50):
                drawn.append(float(torch.rand((), dtype=torch.float64)))
                time.sleep(0.0005)
    assert len(set(drawn)) == len(drawn) > 0


def interrupts(lane: int) -> SyncVectorEnv:
    """Make a lane that fails once; Ctrl-C arrives while its replacement is made."""
    MADE_LANES.append(lane)
    if MADE_LANES.count(lane) == 2:
        os.kill(os.getpid(), signal.SIGINT)
        assert MAY_BE_MADE.wait(20)
    return failing(lane, 1, 7, raises_once)


def test_ctrl_c_while_one_is_replaced_is_raised_at_once() -> None:
    FAILURES["left"] = 1
    MADE_LANES.clear()
    MAY_BE_MADE.clear()
    makes = [partial(interrupts, lane) for lane in range(2)]
    with threaded(makes, on_worker_death="respawn", **BUDGET) as collector:
        with pytest.raises(KeyboardInterrupt):
            list(collector)
        MAY_BE_MADE.set()
        assert collector.ledger.respawned == 1
        assert balanced(collector.ledger)


@pytest.mark.parametrize("then", ["seed", "close"])
def test_what_comes_while_one_is_replaced(then: str) -> None:
    """A new seed waits for the replacement, but the end of the run does not."""
    with one_being_replaced() as (collector, batches):
        if then == "close":
            threading.Timer(0.2, MAY_BE_MADE.set).start()
        else:
            MAY_BE_MADE.set()
            collector.set_seed(7)
            for _ in range(4):
                next(batches)
            assert balanced(collector.ledger)
