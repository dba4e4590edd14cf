"""The worker processes as their parent sees them: asked, waited for, found dead, killed."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.compat import preloaded_modules
from tallyroll.collector.errors import WorkerError
from tallyroll.collector.rollout.os_signals import admitted
from tallyroll.collector.slab.progress import FILLED, HALT, PAUSE, STOP, new_board
from tallyroll.collector.workers import failures
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.lifetime import IGNORED, kill_group, kill_when_closed
from tallyroll.collector.workers.shared.memory import Arena
from tallyroll.collector.workers.supervision_options import Supervision
from tallyroll.collector.workers.unblocked_output import drops_output
from tallyroll.collector.workers.worker import main

_LOOK_SECONDS = 0.25
"""How often the progress of workers is looked at while nothing is heard of them."""
_CLOSE_SECONDS = 2.0
"""How long a worker may take to close its environment."""
_SETTLE_SECONDS = 1.0
"""How long a worker may take to end the step under way, when all is over."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(eq=False)
class Member:
    """One worker, and what was heard of it last."""

    index: int
    process: Any
    connection: Connection
    alive: Connection
    """A pipe that nobody writes to: the worker is killed when this process holds it no more."""
    lanes: range = range(0)
    board: memoryview = field(default_factory=new_board, repr=False)
    """One of its own until it has got that in shared memory."""
    actions: NDArray[Any] | None = field(default=None, repr=False)
    """``[slot, lane, ...]``, those of its slab."""
    seeds: Sequence[int] = ()
    state: bytes | None = None
    """Of its environment's transforms."""
    ended: bool = False
    """Its process is no more."""
    ready: bool = False
    """It has all it needs to step."""
    failed: Exception | None = None
    """Why it will never answer again."""
    asked: int = 0
    """Questions that it has not answered yet."""
    since: float = 0.0
    """When it was asked, or made progress last."""
    filled: int = field(default=0, repr=False)

    @property
    def who(self) -> str:
        """For messages."""
        lanes = self.lanes
        if not lanes:
            return f"worker {self.index}"
        several = f"lanes {lanes[0]} to {lanes[-1]}" if len(lanes) > 1 else f"lane {lanes[0]}"
        return f"worker {self.index} ({several}, process {self.process.pid})"

    @property
    def last_action(self) -> NDArray[Any] | None:
        """The last actions of its lanes, or the ones under way, ``[lane, ...]``."""
        if self.actions is None or not self.ready:
            return None
        last: NDArray[Any] = self.actions[min(self.board[FILLED], len(self.actions) - 1)]
        return last


Event = tuple[Member, Any]
"""A member, and its answer or the :class:`WorkerError` that says why none will come."""


class WorkerPool:
    """Starts workers, asks them, and hears their answers or their end.

    Nothing here waits without a limit: processes are watched by their sentinels, steps by the
    boards that they write. Whatever becomes of this process, its workers end with it.

    Args:
        jobs: one pickled job a worker.
        start_method: of :mod:`multiprocessing`.
        threads: of each worker.
        supervision: how long workers may take.
    """

    def __init__(
        self,
        jobs: Sequence[bytes],
        *,
        start_method: str,
        threads: int,
        supervision: Supervision,
    ) -> None:
        self._jobs, self._threads = [_in_memory(job) for job in jobs], threads
        self._context: Any = get_context(start_method)
        if start_method == "forkserver":
            # What takes seconds to import the server imports once, beside what others asked for.
            # Not the main module: where it lacks a guard, the server itself would come to us.
            modules = dict.fromkeys([*preloaded_modules(), main.__module__])
            modules.pop("__main__", None)
            self._context.set_forkserver_preload([*modules])
        self._supervision = supervision
        self.members: list[Member] = []
        self._owner = os.getpid()
        # Called by us, or before multiprocessing waits for its children at the interpreter's exit.
        self._finalize = Finalize(self, _kill_all, (self.members,), exitpriority=100)
        try:
            for index in range(len(jobs)):
                self.members.append(self._started(index))
        except BaseException:
            self._finalize()
            raise

    def _started(self, index: int) -> Member:
        ours, theirs = self._context.Pipe()
        end, alive = self._context.Pipe(duplex=False)
        _held.add(alive)
        process = self._context.Process(
            target=main,
            args=(theirs, self._jobs[index], end, drops_output()),
            name=f"tallyroll-worker-{index}",
        )
        try:
            # Python's tracker of resources unblocks signals when it starts.
            resource_tracker.ensure_running()
            with _threads_limited(self._threads), _signals_blocked():
                process.start()
            with suppress(ProcessLookupError):  # it is gone already, of which `events` hears
                kill_when_closed(end.fileno(), process.pid)
        except BaseException:
            _let_go(alive)
            raise
        finally:
            end.close()
            theirs.close()
        # What it says first is asked for by starting it.
        return Member(index, process, ours, alive, asked=1, since=time.monotonic())

    # --- asking and hearing -----------------------------------------------------------------------

    def ask(self, member: Member, message: object) -> None:
        """Ask; a worker that is dead is heard of by :meth:`events`."""
        if not member.asked:
            member.since = time.monotonic()
        member.asked += 1
        if member.failed is not None:
            return
        with suppress(OSError):
            m.send(member.connection, message)

    def events(
        self,
        limit: float | None = None,
        of: Sequence[Member] | None = None,
        *,
        during: AbstractContextManager[None] | None = None,
    ) -> list[Event]:
        """The next events of members that were asked; waits for at least one.

        Args:
            limit: seconds, after which nothing was heard and the list is empty.
            of: only these are listened to; None: all.
            during: what it waits in; None: where signals' handlers may raise.
        """
        until = math.inf if limit is None else time.monotonic() + limit
        listened = self.members if of is None else of
        busy = [member for member in listened if member.asked]
        for member in busy:
            if member.failed is not None:  # it was told before, and is again
                member.asked = 0
                return [(member, member.failed)]
        sources: dict[Any, Member] = {member.connection: member for member in busy}
        sources |= {member.process.sentinel: member for member in busy}
        while busy:
            patience = min(_LOOK_SECONDS, max(0.0, until - time.monotonic()))
            with admitted() if during is None else during:
                heard = wait(list(sources), patience)
            ready = {sources[source].index for source in heard}
            events = [self._heard(member) for member in busy if member.index in ready]
            silent = [member for member in busy if member.index not in ready]
            events += [(member, self._hung(member)) for member in silent if self._hangs(member)]
            if events or time.monotonic() >= until:
                return events
        return []

    def _heard(self, member: Member) -> Event:
        """Its answer, for what it said before it died counts, or how it died."""
        try:
            if member.connection.poll():
                answer = m.receive(member.connection)
                member.asked -= 1
                member.since = time.monotonic()
                if isinstance(answer, m.Raised):
                    member.asked = 0
                    member.failed = failures.worker_error(member, answer)
                    return member, member.failed
                member.state = getattr(answer, "state", None) or member.state
                return member, answer
        except (EOFError, ConnectionError):
            pass
        wait([member.process.sentinel], _SETTLE_SECONDS)  # it may be about to say its status
        _end(member)
        member.failed = failures.died(member)
        return member, member.failed

    def _hangs(self, member: Member) -> bool:
        """It made no progress for as long as it was given."""
        now = time.monotonic()
        filled = member.board[FILLED]
        if filled != member.filled:
            member.filled, member.since = filled, now
        timeout = self._timeout(member)
        return timeout is not None and now - member.since > timeout

    def _timeout(self, member: Member) -> float | None:
        limits = self._supervision
        return limits.step_timeout if member.ready else limits.start_seconds

    def _hung(self, member: Member) -> WorkerError:
        _end(member)
        member.failed = error = failures.hung(member, self._timeout(member) or 0.0)
        return error

    def all(self, messages: Sequence[object]) -> list[Any]:
        """Ask every member its question, and return all answers.

        Raises:
            WorkerError: of the first one that failed.
        """
        for member, message in zip(self.members, messages, strict=True):
            self.ask(member, message)
        return self.answers()

    def answers(self) -> list[Any]:
        """The answers of all members, in their order.

        Raises:
            WorkerError: of the first one that failed.
        """
        found: dict[int, Any] = {}
        try:
            while len(found) < len(self.members):
                for member, answer in self.events():
                    if isinstance(answer, Exception):
                        raise answer
                    found[member.index] = answer
        except BaseException:
            self.settle()
            raise
        return [found[index] for index in range(len(self.members))]

    def answer(self, member: Member, message: object) -> Any:
        """Ask one member, and return its answer.

        Raises:
            WorkerError: it failed.
        """
        self.ask(member, message)
        return self.hear(member)

    def hear(self, member: Member) -> Any:
        """The answer of one member that was asked.

        Raises:
            WorkerError: it failed.
        """
        ((_, answer),) = self.events(of=[member])
        if isinstance(answer, Exception):
            raise answer
        return answer

    # --- ends and new beginnings ------------------------------------------------------------------

    def halt(self) -> None:
        """Let everybody end after the step under way. Safe in a signal handler."""
        for member in self.members:
            member.board[HALT] = STOP

    def pause(self) -> None:
        """Let everybody come to the end of the step under way. Safe in a signal handler."""
        for member in self.members:
            if not member.board[HALT]:
                member.board[HALT] = PAUSE

    def go_on(self) -> None:
        """Take :meth:`halt` and :meth:`pause` back."""
        for member in self.members:
            member.board[HALT] = 0

    def settle(self, *, patient: bool = False) -> list[Event]:
        """Halt, and hear everybody who was asked; who does not answer soon is killed.

        ``patient``: who may take as long as for any step.
        """
        self.halt()
        heard: list[Event] = []
        until = time.monotonic() + _SETTLE_SECONDS
        while any(member.asked for member in self.members):
            limit = None if patient else max(0.0, until - time.monotonic())
            events = self.events(limit, during=None if patient else nullcontext())
            silent = [] if events else [member for member in self.members if member.asked]
            heard += events or [(member, self._hung(member)) for member in silent]
        return heard

    def restart(self, member: Member) -> None:
        """A new process in the place of ``member``, which makes its environment; not heard yet."""
        _end(member)
        fresh = self._started(member.index)
        member.process, member.connection = fresh.process, fresh.connection
        member.alive, member.asked, member.since = fresh.alive, fresh.asked, fresh.since
        member.ended, member.ready, member.failed = False, False, None

    def close(self) -> None:
        """Let idle workers close their environments; end them all. Idempotent."""
        try:
            if not self._finalize.still_active() or os.getpid() != self._owner:
                return
            idle = [member for member in self.members if not member.asked and not member.ended]
            for member in idle:
                with suppress(OSError):
                    m.send(member.connection, m.Close())
            until = time.monotonic() + _CLOSE_SECONDS
            for member in idle:  # not joined: while it is a zombie, its number is nobody else's
                wait([member.process.sentinel], max(0.0, until - time.monotonic()))
        finally:
            self._finalize()


def _in_memory(job: bytes) -> Arena:
    """A job in shared memory: a pipe would block where the process does not read."""
    arena = Arena.create(len(job))
    arena.array((len(job),), np.uint8)[:] = np.frombuffer(job, np.uint8)
    return arena


def _kill_all(members: list[Member]) -> None:
    alive = [member for member in members if not member.ended]
    for member in alive:
        kill_group(member.process.pid)
    for member in alive:
        _end(member)


def _end(member: Member) -> None:
    """Kill a worker, dead or not, and what its environment started; only once.

    First the group, then the wait for its leader: until then nobody else can have its number.
    """
    member.asked = 0
    if not member.ended:
        member.ended = True
        kill_group(member.process.pid)
        member.process.join(_CLOSE_SECONDS)
        member.connection.close()
        _let_go(member.alive)


_held: set[Connection] = set()
"""Pipes whose closing ends a worker, those of all crews."""


def _let_go(alive: Connection) -> None:
    _held.discard(alive)
    alive.close()


def _forget() -> None:
    """In a forked child, or workers would live for as long as it."""
    for alive in _held:
        alive.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)


_environment = threading.Lock()
"""Held by the thread that changes the environment for the processes that it starts."""


@contextmanager
def _threads_limited(threads: int) -> Iterator[None]:
    """A process started inside has so many threads in its numerical libraries."""
    with _environment:
        before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started inside is not hit by a terminal's signals before it can say how."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
