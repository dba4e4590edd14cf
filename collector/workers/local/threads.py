"""Workers in threads of this process, for environments that wait and release the interpreter.

The same worker answers the same messages over a pipe, and fills the same kind of memory. No thread
can be killed: one that is in a step ends after it.
"""

import threading
import time
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from tallyroll.collector.compat import explore_apart
from tallyroll.collector.policies.trial import leave_generators
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.workers.local.limits import limits_named
from tallyroll.collector.workers.local.pipes import LinkPoller, PipeChannel, SharedPlace
from tallyroll.collector.workers.local.placement import Blocks
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.transport import Gone
from tallyroll.collector.workers.worker import work

_END_SECONDS = 10.0
"""How long a thread may take to end its step and to close its environment."""


class ThreadLink:
    """The pipe to a thread, and the thread.

    Args:
        index: of the worker.
        job: a pickled one.
        place: the memory of all workers.
        again: it is in the place of another, while the program may go on.
    """

    pid = None
    says = False

    def __init__(self, index: int, job: bytes, place: SharedPlace, again: bool) -> None:
        ours, theirs = Pipe()
        self.channel = PipeChannel(ours, place)
        self._raised: list[BaseException] = []
        self._until: float | None = None
        """When a thread that is to end should have done so."""
        self._said = False
        """A warning was given of it."""
        self._thread = threading.Thread(
            target=_serve,
            args=(PipeChannel(theirs), job, self._raised, again),
            name=f"tallyroll-worker-{index}",
            daemon=True,  # the program ends, whatever a step waits for
        )
        self.name = f"thread {self._thread.name}"
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def sources(self) -> list[Connection]:
        """Its end of the pipe, which is ready when there is something to hear."""
        return [self.channel.connection]

    def send(self, question: object) -> None:
        """Send a question; a thread that has ended is heard of later."""
        with suppress(OSError):
            self.channel.send(question)

    def hear(self) -> object:
        """Its answer, or how it ended."""
        try:
            return self.channel.receive()
        except (EOFError, ConnectionError):
            self.over(_END_SECONDS)
            raised, self._raised[:] = self._raised[:], []
            return Gone("ended" + "".join(f" by {error!r}" for error in raised))

    def over(self, seconds: float) -> bool:
        """Wait for its end."""
        if self._thread is not threading.current_thread():  # a collector is dropped anywhere
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Let it end after the step under way: it is asked nothing more."""
        if self._until is None:
            self._until = time.monotonic() + _END_SECONDS
            self.channel.close()

    def end(self) -> None:
        """Wait for its end, but not for ever."""
        self.kill()
        gone = self.over(max(0.0, (self._until or 0.0) - time.monotonic()))
        if not gone and not self._said:
            self._said = True
            warnings.warn(
                f"{self.name} is still in its environment after {_END_SECONDS:g} seconds; it ends "
                'when that returns. Let steps come to an end, or use transport="process"',
                RuntimeWarning,
                stacklevel=2,
            )
        while self._raised:
            error = self._raised.pop()
            warnings.warn(f"{self.name} ended by {error!r}", RuntimeWarning, stacklevel=2)


def _serve(channel: PipeChannel, job: bytes, raised: list[BaseException], again: bool) -> None:
    if again:  # to restore generators would let the program draw the same numbers twice
        leave_generators()
    explore_apart()
    try:
        work(channel, job)
    except (EOFError, OSError):
        pass  # the parent asks nothing more
    except BaseException as error:  # noqa: BLE001  the parent says it
        raised.append(error)
    finally:
        channel.close()


class ThreadTransport:
    """Starts threads.

    Args:
        jobs: one pickled job a worker.
    """

    kills = False

    def __init__(self, jobs: Sequence[bytes]) -> None:
        self._jobs, self._place = jobs, SharedPlace()
        self._waiting = LinkPoller[ThreadLink]()
        self._started: set[int] = set()

    def start(self, index: int) -> ThreadLink:
        """Start a thread with its job.

        Raises:
            ArgumentError: a limit of the system does not allow it.
        """
        self._waiting.forget()
        again = index in self._started
        self._started.add(index)
        with limits_named(len(self._jobs)):
            return ThreadLink(index, self._jobs[index], self._place, again)

    def ready(self, links: Sequence[ThreadLink], seconds: float) -> Collection[ThreadLink]:
        """Links that have something to be heard."""
        return self._waiting.ready(links, seconds)

    def place(self, share: Share, plan: SlabPlan, module: object) -> Blocks:
        """Memory for all."""
        return self._place.make(share, plan, module)

    def close(self) -> None:
        """Forget the links."""
        self._waiting.forget()
