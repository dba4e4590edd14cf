"""Workers in threads of this process, for environments that wait and release the interpreter.

They use the same worker, the same messages over a pipe, and the same kind of memory as processes.
A thread cannot be killed: if it is in a step, it ends after that step.
"""

import threading
import time
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from tallyroll.collector.compat import use_own_exploration_type
from tallyroll.collector.policies.trial import leave_generators
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.workers.local.limits import limits_named
from tallyroll.collector.workers.local.pipes import LinkPoller, PipeChannel, SharedPlace
from tallyroll.collector.workers.local.placement import SharedLayout
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.transport import Gone
from tallyroll.collector.workers.worker import work

_END_SECONDS = 10.0
"""Seconds that a thread may take to end its step and close its environment."""


class ThreadLink:
    """The pipe to a thread, and the thread.

    Args:
        index: number of the worker.
        job: a pickled job.
        place: the memory of all workers.
        again: True if the thread replaces another worker. The program may then draw random numbers
            while the thread starts.
    """

    pid = None
    has_answer = False

    def __init__(self, index: int, job: bytes, place: SharedPlace, again: bool) -> None:
        ours, theirs = Pipe()
        self.channel = PipeChannel(ours, place)
        self._raised: list[BaseException] = []
        self._until: float | None = None
        """Monotonic time until which a thread that is to end may run."""
        self._said = False
        """True if a warning about a thread that did not end in time was issued."""
        self._thread = threading.Thread(
            target=_serve,
            args=(PipeChannel(theirs), job, self._raised, again),
            name=f"tallyroll-worker-{index}",
            daemon=True,  # the program can end even if a step never returns
        )
        self.name = f"thread {self._thread.name}"
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread has not ended."""
        return self._thread.is_alive()

    @property
    def sources(self) -> list[Connection]:
        """Our end of the pipe, which is ready when a message arrived."""
        return [self.channel.connection]

    def send(self, question: object) -> None:
        """Send a question. If the thread has ended, :meth:`hear` reports it later."""
        with suppress(OSError):
            self.channel.send(question)

    def hear(self) -> object:
        """Return the next answer, or the reason why the thread ended."""
        try:
            return self.channel.receive()
        except (EOFError, ConnectionError):
            self.over(_END_SECONDS)
            raised, self._raised[:] = self._raised[:], []
            return Gone("ended" + "".join(f" with {error!r}" for error in raised))

    def over(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the thread to end; return True if it ended."""
        # The garbage collector may run this in the thread itself.
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Let the thread end after the step in progress; it receives no more questions."""
        if self._until is None:
            self._until = time.monotonic() + _END_SECONDS
            self.channel.close()

    def end(self) -> None:
        """Wait for the thread to end, with a time limit."""
        self.kill()
        gone = self.over(max(0.0, (self._until or 0.0) - time.monotonic()))
        if not gone and not self._said:
            self._said = True
            warnings.warn(
                f"{self.name} is still in its environment after {_END_SECONDS:g} seconds, and ends "
                'when the step returns. Make steps return, or use transport="process"',
                RuntimeWarning,
                stacklevel=2,
            )
        while self._raised:
            error = self._raised.pop()
            warnings.warn(f"{self.name} ended with {error!r}", RuntimeWarning, stacklevel=2)


def _serve(channel: PipeChannel, job: bytes, raised: list[BaseException], again: bool) -> None:
    if again:  # if the thread restored generators, the program could draw numbers twice
        leave_generators()
    use_own_exploration_type()
    try:
        work(channel, job)
    except (EOFError, OSError):
        pass  # the parent asks nothing more
    except BaseException as error:  # noqa: BLE001  the parent reports it
        raised.append(error)
    finally:
        channel.close()


class ThreadTransport:
    """Starts workers as threads.

    Args:
        jobs: one pickled job per worker.
    """

    kills = False

    def __init__(self, jobs: Sequence[bytes]) -> None:
        self._jobs, self._place = jobs, SharedPlace()
        self._waiting = LinkPoller[ThreadLink]()
        self._started: set[int] = set()

    def start(self, index: int) -> ThreadLink:
        """Start a thread with its job.

        Raises:
            ArgumentError: a limit of the system was reached.
        """
        self._waiting.forget()
        again = index in self._started
        self._started.add(index)
        with limits_named(len(self._jobs)):
            return ThreadLink(index, self._jobs[index], self._place, again)

    def ready(self, links: Sequence[ThreadLink], seconds: float) -> Collection[ThreadLink]:
        """Return the links that have a message."""
        return self._waiting.ready(links, seconds)

    def place(self, share: Share, plan: SlabPlan, module: object) -> SharedLayout:
        """Allocate the memory of all workers."""
        return self._place.make(share, plan, module)

    def close(self) -> None:
        """Drop the links."""
        self._waiting.forget()
