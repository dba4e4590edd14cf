"""Workers in processes: starting them, pipes to them, detecting their end, killing them."""

import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import numpy as np

from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.workers.local.fork_server import (
    PRELOADED,
    SERVER,
    ForkedProcess,
    State,
    default_start_method,
    modules_of_caller,
    signals_blocked,
)
from tallyroll.collector.workers.local.lifetime import kill_group, kill_when_closed
from tallyroll.collector.workers.local.limits import UNGUARDED, limits_named
from tallyroll.collector.workers.local.memory import Arena
from tallyroll.collector.workers.local.nonblocking_stdio import drops_output
from tallyroll.collector.workers.local.pipes import (
    PARTS_SECONDS,
    LinkPoller,
    PipeChannel,
    PipeStalled,
    SharedPlace,
)
from tallyroll.collector.workers.local.placement import SharedLayout
from tallyroll.collector.workers.local.process_main import main
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.transport import Gone

_END_SECONDS = 2.0
"""Seconds that a process that was killed may take to end."""
_STATUS_SECONDS = 1.0
"""Seconds that a process whose pipe is closed may take to report its exit status."""
_STALLED = f"was ended, because it stalled in the middle of a message for {PARTS_SECONDS:g} seconds"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MISTAKE = (
    'expected the collector to be made under `if __name__ == "__main__":`, because each worker '
    "imports the main module again, got a collector in {who} too. Write\n\n"
    '    if __name__ == "__main__":\n'
    "        with MultiprocessCollector(...) as collector:\n"
    "            ..."
)


class ProcessLink:
    """The pipe to a process, and the process.

    Args:
        process: a process that was started.
        channel: our end of its pipe.
        held: a pipe without messages; the worker is killed when this process no longer holds it.
    """

    has_answer = False

    def __init__(self, process: Any, channel: PipeChannel, held: Connection) -> None:
        self.process, self.channel, self._held = process, channel, held
        self.pid: int = process.pid
        self.name = f"process {self.pid}"
        self._ended = self._stalled = False

    @property
    def alive(self) -> bool:
        """True until the process was observed to end."""
        return self.process.exitcode is None

    @property
    def sources(self) -> list[Any]:
        """Our end of the pipe, ready with a message, and a sentinel, ready at the process's end."""
        return [self.channel.connection, self.process.sentinel]

    def send(self, question: object) -> None:
        """Send a question. If the process has ended, :meth:`hear` reports it later."""
        try:
            self.channel.send(question)
        except PipeStalled:  # the process has part of a message, so no other can be sent
            self._stalled = True
            self.kill()
        except OSError:
            pass

    def hear(self) -> object:
        """Return the next answer, or the reason why the process died.

        Answers that it sent before it died are returned first.
        """
        says, self.has_answer = self.has_answer, False
        try:
            if says or self.channel.connection.poll():
                return self.channel.receive()
        except PipeStalled:
            self._stalled = True
        except (EOFError, ConnectionError):
            pass
        self.over(_STATUS_SECONDS)  # it may be about to report its status
        self.end()
        return Gone(_STALLED) if self._stalled else _gone(self.process.exitcode)

    def over(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the process to end; return True if it ended.

        The process is not joined: as long as it is a zombie, no other process can get its id.
        """
        return bool(wait([self.process.sentinel], seconds))

    def kill(self) -> None:
        """Kill the process and all that its environment started. Idempotent."""
        if not self._ended:
            kill_group(self.pid)

    def end(self) -> None:
        """Kill the process and wait for it. Idempotent.

        The group is killed before its leader is joined: until then no other process can get its id.
        """
        if not self._ended:
            self._ended = True
            kill_group(self.pid)
            self.process.join(_END_SECONDS)
            self.channel.close()
            _close_pipe(self._held)


def _gone(code: int | None) -> Gone:
    if code is None:
        return Gone("ended")
    if code == UNGUARDED:
        return Gone(f"exited with status {code}", code, mistake=_MISTAKE)
    if code >= 0:
        return Gone(f"exited with status {code}", code)
    hint = ". If no program killed it, the machine may be out of memory"
    return Gone(f"was killed by {_signal(-code)}", code, hint if code == -signal.SIGKILL else "")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ProcessTransport:
    """Starts workers as processes, which end when this process ends, for any reason.

    Args:
        jobs: one pickled job per worker.
        start_method: start method of :mod:`multiprocessing`. None selects the one that
            :func:`default_start_method` returns.
        threads: threads of each worker's numerical libraries.
    """

    kills = True

    def __init__(
        self, jobs: Sequence[bytes], *, start_method: str | None = None, threads: int
    ) -> None:
        with limits_named(len(jobs)):
            self._jobs = [_in_memory(job) for job in jobs]
        self._threads, self._place = threads, SharedPlace()
        self._waiting = LinkPoller[ProcessLink]()
        method = start_method or default_start_method()
        self._kind = process_kind(method)
        # A spawned process inherits the state, and a ForkedProcess sends it itself.
        others = method == "forkserver" and self._kind is not ForkedProcess
        self._state = State() if others else None

    def start(self, index: int) -> ProcessLink:
        """Start a process with its job.

        Raises:
            ArgumentError: a limit of the system was reached.
        """
        self._waiting.forget()
        with limits_named(len(self._jobs)):
            return self._started(index)

    def _started(self, index: int) -> ProcessLink:
        if self._kind is ForkedProcess:
            SERVER.start()
        ours, theirs = Pipe()
        end, held = Pipe(duplex=False)
        _held.add(held)
        process = self._kind(
            target=main,
            args=(theirs, self._jobs[index], end, drops_output(), self._state),
            name=f"tallyroll-worker-{index}",
        )
        try:
            # Python's tracker of resources unblocks signals when it starts.
            resource_tracker.ensure_running()
            with _threads_limited(self._threads), signals_blocked():
                process.start()
            with suppress(ProcessLookupError):  # the process has ended, which is reported later
                kill_when_closed(end.fileno(), process.pid)
        except BaseException:
            _close_pipe(held)
            raise
        finally:
            end.close()
            theirs.close()
        return ProcessLink(process, PipeChannel(ours, self._place), held)

    def ready(self, links: Sequence[ProcessLink], seconds: float) -> Collection[ProcessLink]:
        """Return the links that have a message."""
        return self._waiting.ready(links, seconds)

    def place(self, share: Share, plan: SlabPlan, module: object) -> SharedLayout:
        """Allocate the shared memory of all workers."""
        return self._place.make(share, plan, module)

    def close(self) -> None:
        """Release the jobs, and drop the links."""
        self._jobs.clear()
        self._waiting.forget()


def process_kind(start_method: str) -> Any:
    """Return the class of processes for a start method.

    If the program preloads modules, ``"forkserver"`` uses the server of multiprocessing.
    """
    context: Any = get_context(start_method)
    if start_method == "spawn":
        return context.Process
    modules = modules_of_caller()
    if not modules:
        return ForkedProcess
    # Do not preload the main module: without a guard, it would make a collector in the server.
    context.set_forkserver_preload([*modules, PRELOADED])
    return context.Process


def _in_memory(job: bytes) -> Arena:
    """Copy a job to shared memory, because a pipe would block until the process reads it."""
    arena = Arena.create(len(job))
    arena.array((len(job),), np.uint8)[:] = np.frombuffer(job, np.uint8)
    return arena


_held: set[Connection] = set()
"""Pipes of all pools. Closing one ends its worker."""


def _close_pipe(alive: Connection) -> None:
    _held.discard(alive)
    alive.close()


def _forget() -> None:
    """Close the pipes in a forked child, which would otherwise keep workers alive."""
    for alive in _held:
        alive.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)


_environment = threading.Lock()
"""Lock of the thread that changes the environment for the processes that it starts."""


@contextmanager
def _threads_limited(threads: int) -> Iterator[None]:
    """Set the number of threads of numerical libraries for processes that start inside."""
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
