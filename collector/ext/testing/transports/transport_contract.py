"""Contract tests that every transport of workers must pass."""

import inspect
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    WorkerDied,
    WorkerHung,
    WorkerRaised,
)
from tallyroll.collector.ext.testing.transports.numbered import (
    Fault,
    How,
    Versioned,
    check_rows,
    chosen,
    factories,
)
from tallyroll.collector.multiprocess import MultiprocessCollector
from tallyroll.collector.sync import SyncCollector
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.startup.jobs import pickled
from tallyroll.collector.workers.transport import Gone, Link, Transport
from tallyroll.collector.workers.worker_options import WorkerOptions
from tallyroll.storage import open_storage, verify

LANES = (2, 1, 2)
"""Number of lanes of each worker."""
MODES = ("sync", "async")
_RUN: dict[str, Any] = {"frames_per_batch": 23, "total_frames": 301, "seed": 7}
_SEED = m.Seed(seed=7, incarnation=0, first_lane=0, run_lanes=2, worker=0, asked=True)


class TransportContract:
    """Contract of a transport. Subclass it and define ``transport``."""

    processes: ClassVar[bool] = True
    """True if workers are processes of this machine, which can be killed."""
    threads: ClassVar[int | None] = 1
    """Threads of each worker's libraries; None if workers are threads of this process."""
    start_seconds: ClassVar[float] = 60.0
    """Time that a worker may take to start, in seconds."""
    notice_seconds: ClassVar[float] = 10.0
    """Longest time until the end of a worker is noticed, or until all workers are gone, in s."""

    def transport(self, jobs: Sequence[bytes]) -> Transport[Any]:
        """Return a transport for pickled jobs, one per worker."""
        raise NotImplementedError

    def collector(self, create: Any, policy: Any = None, **options: Any) -> MultiprocessCollector:
        """Return a collector that uses the transport."""
        return MultiprocessCollector(create, policy, transport=self.transport, **options)

    # --- one worker, asked by hand ----------------------------------------------------------------

    @contextmanager
    def worker(self, **environment: Any) -> Iterator[tuple[Transport[Any], Link]]:
        """Start a worker of two lanes, and yield it before its first message."""
        (create,) = factories([2], **environment)
        transport = self.transport([pickled(_job(create, self.threads))])
        link = transport.start(0)
        try:
            yield transport, link
        finally:
            link.end()
            transport.close()

    def heard(self, transport: Transport[Any], link: Link) -> Any:
        """Return the next message of a worker."""
        until = time.monotonic() + self.start_seconds
        while link not in transport.ready([link], 0.25):
            assert time.monotonic() < until, f"no message arrived within {self.start_seconds:g} s"
        return link.hear()

    def test_a_worker_says_what_it_made_and_answers_in_order(self) -> None:
        with self.worker() as (transport, link):
            made = self.heard(transport, link)
            assert isinstance(made, m.EnvReady) and made.lanes == 2
            assert link.alive and link.name
            for seed in (1, 2, 1):
                link.send(replace(_SEED, seed=seed))
            first, second, third = (self.heard(transport, link) for _ in range(3))
            assert first.lane_seeds == third.lane_seeds != second.lane_seeds

    def test_waiting_for_a_worker_that_is_silent_ends(self) -> None:
        with self.worker() as (transport, link):
            self.heard(transport, link)
            link.send(_SEED)
            self.heard(transport, link)
            link.send(m.CallRequest(b""))  # any request must be answered
            assert isinstance(self.heard(transport, link), (m.ExceptionReport, m.CallReply))
        create = _SlowFactory(2.0)
        transport = self.transport([pickled(_job(create, self.threads))])
        link = transport.start(0)
        try:
            began = time.monotonic()
            assert link not in transport.ready([link], 0.2)
            assert time.monotonic() - began < 1.5
            assert isinstance(self.heard(transport, link), m.EnvReady)
        finally:
            link.end()
            transport.close()

    def test_rows_are_in_the_place_before_their_answer_is_heard(self) -> None:
        with self.worker() as (transport, link):
            self.heard(transport, link)
            link.send(_SEED)
            planned = self.heard(transport, link)
            share = Share((2,), 5, 0)
            place = transport.place(share, planned.plan, None)
            place.weights.publish(None, 0)
            link.send(m.Bind(share, 0))
            assert isinstance(self.heard(transport, link), m.Bound)
            for question in (m.Begin(fresh=True), m.Steps(0, 3, "random")):
                link.send(question)
                assert isinstance(self.heard(transport, link), m.Done)
            board, slab = place.board(0), place.slab_of_all()
            assert board[0] == 3, "expected the board to report 3 filled slots"
            steps = slab.array(("next", "observation"))[:3, :, 2]
            assert steps.tolist() == [[1, 1], [2, 2], [3, 3]]

    def test_memory_that_is_not_there_is_refused(self) -> None:
        with self.worker() as (transport, link):
            self.heard(transport, link)
            link.send(_SEED)
            planned = self.heard(transport, link)
            with pytest.raises(ArgumentError, match="MiB"):
                transport.place(Share((2,), 2**40, 0), planned.plan, None)

    def test_what_raises_where_it_is_made_is_an_answer(self) -> None:
        transport = self.transport([pickled(_job(_refused, self.threads))])
        link = transport.start(0)
        try:
            raised = self.heard(transport, link)
            assert isinstance(raised, m.ExceptionReport) and raised.message == "no such simulator"
            assert "in _refused" in raised.traceback
        finally:
            link.end()
            transport.close()

    def test_the_end_of_a_worker_is_heard_once_it_is_asked(self) -> None:
        with self.worker() as (transport, link):
            self.heard(transport, link)
            link.send(_SEED)
            self.heard(transport, link)
            self._end_from_outside(link)
            link.send(_SEED)
            began = time.monotonic()
            gone = self.heard(transport, link)
            assert isinstance(gone, Gone) and gone.how
            assert time.monotonic() - began < self.notice_seconds
            link.send(_SEED)  # must not raise
            for _ in range(2):
                link.kill()
                link.end()
            assert not link.alive

    def _end_from_outside(self, link: Link) -> None:
        if self.processes:
            assert link.pid is not None
            os.kill(link.pid, signal.SIGKILL)
        else:
            link.send(m.Close())

    def test_another_one_takes_its_place(self) -> None:
        with self.worker() as (transport, link):
            self.heard(transport, link)
            link.end()
            assert not link.alive
            other = transport.start(0)
            try:
                assert isinstance(self.heard(transport, other), m.EnvReady)
                other.send(_SEED)
                assert isinstance(self.heard(transport, other), m.SlabRequest)
                assert other.alive
                other.send(m.Close())
                assert other.over(self.notice_seconds), (
                    "the worker does not end when it is asked to"
                )
            finally:
                other.end()

    # --- rows -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("acts", [False, True])
    def test_in_step_rows_are_those_of_one_process(self, acts: bool) -> None:
        policy = Versioned(10).set_to(3) if acts else None
        (whole,) = factories([sum(LANES)])
        with SyncCollector(whole, policy, **_RUN) as collector:
            one = list(collector)
        with self.collector(factories(LANES), policy, mode="sync", **_RUN) as collector:
            many = list(collector)
        assert [len(batch) for batch in many] == [len(batch) for batch in one]
        for mine, theirs in zip(one, many, strict=True):
            assert (mine == theirs).all(), "rows differ from those of one process"
        check_rows(_joined(many))

    def test_out_of_step_all_lanes_give_exactly_so_many(self) -> None:
        with self.collector(factories(LANES), mode="async", **_RUN) as collector:
            batches = list(collector)
            collector.ledger.check()
            assert collector.ledger.stored == 301
        assert [len(batch) for batch in batches] == [23] * 13 + [2]
        rows = _joined(batches)
        check_rows(rows)
        assert set(rows["collector", "lane"].tolist()) == set(range(sum(LANES)))

    @pytest.mark.parametrize("mode", MODES)
    def test_weights_are_whole_and_of_one_version(self, mode: Any) -> None:
        policy, batches = Versioned(), []
        options = {**_RUN, "total_frames": 21 * 23}
        with self.collector(factories(LANES), policy, mode=mode, **options) as collector:
            for batch in collector:
                batches.append(batch)
                collector.update_policy_weights_(policy.set_to(collector.policy_version + 1))
        rows = _joined(batches)
        version = rows["collector", "policy_version"]
        for name in ("low", "high"):
            assert torch.equal(rows[name], version.float()), "a row has weights of two versions"
        assert torch.equal(rows["action"], chosen(rows["observation"], version))
        newest = [int(batch["collector", "policy_version"].max()) for batch in batches]
        assert all(seen <= number for number, seen in enumerate(newest))
        if mode == "sync":
            assert newest == list(range(21)), "replaced weights chose an action"
        assert newest[-1] > 10, "new weights did not arrive"

    def test_in_step_the_parent_may_act(self) -> None:
        """Check that the parent acts in one call for all lanes.

        The weights then stay in the parent.
        """
        (whole,) = factories([sum(LANES)])
        with SyncCollector(whole, Versioned(10).set_to(3), **_RUN) as collector:
            one = _joined(list(collector))
        placed = {**_RUN, "policy_placement": "central"}
        with self.collector(factories(LANES), Versioned(10).set_to(3), **placed) as collector:
            many = _joined(list(collector))
        assert (many == one).all(), "rows differ from those of one process"

    def test_out_of_step_the_parent_acts_and_one_that_waits_may_end(self) -> None:
        policy, batches = _EndingPolicy(), []
        options = {**_RUN, "mode": "async", "policy_placement": "central"}
        with self.collector(
            factories(LANES), policy, on_worker_death="respawn", **options
        ) as collector:
            pids = collector.worker_pids
            _ends.extend(pids[:1])
            for batch in collector:
                batches.append(batch)
                collector.update_policy_weights_(policy.set_to(collector.policy_version + 1))
            collector.ledger.check()
            assert collector.ledger.respawned == len(pids[:1])
        rows = _joined(batches)
        assert len(rows) == 301
        version = rows["collector", "policy_version"]
        for name in ("low", "high"):
            assert torch.equal(rows[name], version.float()), "a row has another version"
        assert torch.equal(rows["action"], chosen(rows["observation"], version))
        assert version.max() > 5, "new weights chose no action"

    # --- failures ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", MODES)
    def test_exactly_so_many_whatever_dies(self, mode: Any, tmp_path: Path) -> None:
        faults = [
            Fault(how, lane, 6 + 4 * lane, tmp_path / f"fault-{lane}")
            for lane, how in enumerate(self._deaths())
        ]
        with self.collector(
            factories(LANES, faults=faults, seconds=0.002),
            mode=mode,
            storage=tmp_path / "rows",
            on_worker_death="respawn",
            **_RUN,
        ) as collector:
            assert sum(len(batch) for batch in collector) == 301
            ledger = collector.ledger
            ledger.check()
        came = [fault.file.exists() for fault in faults]
        # In async mode, other workers may finish before a restarted worker meets its next fault.
        assert all(came) or (mode == "async" and any(came)), "not all planned faults happened"
        assert ledger.stored == 301
        assert ledger.respawned == sum(came)
        with open_storage(tmp_path / "rows") as storage:
            assert len(storage) == 301
            check_rows(storage[:])
        assert verify(tmp_path / "rows").sound

    def _deaths(self) -> tuple[How, ...]:
        return ("kill", "raise", "exit", "kill") if self.processes else ("exit", "raise", "exit")

    def test_a_failure_says_what_it_was(self, tmp_path: Path) -> None:
        for how, error, said in (
            ("raise", WorkerRaised, "RuntimeError while stepping: as planned"),
            ("kill" if self.processes else "exit", WorkerDied, "worker 1 .*lane 2"),
        ):
            faults = [Fault(how, 2, 9, tmp_path / how)]  # type: ignore[arg-type]
            with (
                pytest.raises(error, match=said),
                self.collector(factories(LANES, faults=faults), **_RUN) as collector,
            ):
                list(collector)

    def test_a_worker_that_hangs_is_noticed(self, tmp_path: Path) -> None:
        if self.threads is None:
            pytest.skip("a thread that hangs cannot be ended")
        faults = [Fault("hang", 0, 9, tmp_path / "hang")]
        with (
            pytest.raises(WorkerHung, match="completed no step within step_timeout=3 seconds"),
            self.collector(factories(LANES, faults=faults), step_timeout=3, **_RUN) as collector,
        ):
            list(collector)

    def test_a_worker_that_hangs_is_replaced(self, tmp_path: Path) -> None:
        if self.threads is None:
            pytest.skip("a thread that hangs cannot be ended")
        faults = [Fault("hang", 2, 9, tmp_path / "hang")]
        with self.collector(
            factories(LANES, faults=faults), step_timeout=3, on_worker_death="respawn", **_RUN
        ) as collector:
            rows = sum(len(batch) for batch in collector)
            assert (rows, collector.ledger.respawned) == (301, 1)

    def test_environments_that_differ_are_refused(self) -> None:
        (one,), other = factories([1]), _other
        with pytest.raises(EnvironmentRefused, match="columns differ"):
            self.collector([one, other], **_RUN)

    # --- leftovers --------------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", MODES)
    def test_stopping_in_the_middle_leaves_nothing(self, mode: Any) -> None:
        before = {*threading.enumerate()}
        options = {**_RUN, "total_frames": -1}
        with self.collector(
            factories(LANES, seconds=0.001), None, mode=mode, **options
        ) as collector:
            pids = collector.worker_pids
            for number, _ in enumerate(collector):
                if number == 3:
                    break
        self._wait_until(lambda: not any(map(_alive, pids)), "workers are gone")
        collector.shutdown()
        ours = {each for each in threading.enumerate() if not each.daemon}
        self._wait_until(lambda: not {each for each in ours - before if each.is_alive()}, "threads")

    def test_workers_end_with_a_parent_that_is_killed(self, tmp_path: Path) -> None:
        if not self.processes:
            pytest.skip("workers are part of the parent process")
        parent = multiprocessing.get_context("spawn").Process(
            target=_collect_for_ever, args=(type(self), tmp_path)
        )
        parent.start()
        try:
            file = tmp_path / "pids"
            until = time.monotonic() + 2 * self.start_seconds
            while not file.exists():
                assert time.monotonic() < until and parent.is_alive(), "no rows arrived"
                time.sleep(0.05)
            pids = [int(word) for word in file.read_text().split()]
            assert pids and all(map(_alive, pids))
        finally:
            parent.kill()
            parent.join(self.notice_seconds)
        self._wait_until(lambda: not any(map(_alive, pids)), "workers end with their parent")

    def _wait_until(self, holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + self.notice_seconds
        while not holds():
            assert time.monotonic() < until, f"not true within {self.notice_seconds:g} s: {what}"
            time.sleep(0.02)


def _job(create: Any, threads: int | None) -> m.Job:
    parameters = inspect.signature(MultiprocessCollector.__init__).parameters
    arguments = {name: each.default for name, each in parameters.items()}
    asked = {"frames_per_batch": 5, "total_frames": 5, "more": {}}
    options = WorkerOptions.of({**arguments, **asked})
    return m.Job(create, None, options.for_worker(None), threads, frozenset())


_ends: list[int] = []
"""Processes to kill when the policy next acts in this process."""


class _EndingPolicy(Versioned):
    """Policy that kills processes that wait for its actions."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        while _ends:
            os.kill(_ends.pop(), signal.SIGKILL)
        return super().forward(td)


class _SlowFactory:
    """Slow factory of two lanes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> Any:
        time.sleep(self.seconds)
        return factories([2])[0]()


def _refused() -> Any:
    raise ValueError("no such simulator")


def _other() -> Any:
    return gymnasium.make_vec("MountainCar-v0", num_envs=1, vectorization_mode="sync")


def _joined(batches: Sequence[TensorDictBase]) -> TensorDict:
    joined = torch.cat(list(batches))
    assert isinstance(joined, TensorDict)
    return joined


def _alive(pid: int) -> bool:
    with suppress(OSError):
        status = Path(f"/proc/{pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] not in "ZX"
    return False


def _collect_for_ever(contract: type[TransportContract], folder: Path) -> None:
    options = {**_RUN, "total_frames": -1}
    with contract().collector(factories(LANES), mode="async", **options) as collector:
        for number, _ in enumerate(collector):
            if number == 2:
                (folder / "making").write_text(" ".join(map(str, collector.worker_pids)))
                (folder / "making").rename(folder / "pids")
