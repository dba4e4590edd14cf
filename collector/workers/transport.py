"""Interface between the collector and its workers: how to reach them, and where rows are.

Pool, leases, lockstep, startup and supervision use workers only through this interface. A new
transport implements these protocols: ``MultiprocessCollector(transport=...)`` takes any callable
that makes one from jobs. ``local/`` has the transports of this machine, and ``collector/ext/ray/``
has the transport of a Ray cluster. ``collector/ext/far/`` has the memory of workers that share none
with their parent.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers.share import Share


@dataclass(frozen=True)
class Gone:
    """Record of a worker that has ended, with the cause. The worker sends nothing more."""

    how: str
    """End of a sentence, such as "was killed by SIGKILL"."""
    exitcode: int | None = None
    hint: str = ""
    """End of the message, if more is known about the cause."""
    mistake: str = ""
    """The whole message, with ``{who}`` in it, if the program has a mistake."""


class Link(Protocol):
    """The connection to one worker, which was started with its job."""

    name: str
    """Name of the worker for messages, such as "process 12"."""
    pid: int | None
    """Process id of the worker; None if it has no separate process."""

    @property
    def alive(self) -> bool:
        """True until the worker was observed to end."""

    def send(self, question: object) -> None:
        """Send a question without waiting. If the worker has ended, :meth:`hear` reports it."""

    def hear(self) -> object:
        """Return the next answer, or :class:`Gone`, once :meth:`Transport.ready` names this link.

        The rows that an answer refers to are in the place before this method returns it.
        """

    def over(self, seconds: float) -> bool:
        """Wait for the end of a worker that was asked to end; return True if it ended."""

    def kill(self) -> None:
        """Kill the worker, and all processes that it started, without waiting. Idempotent."""

    def end(self) -> None:
        """Kill the worker, wait until it is gone, and release its resources. Idempotent."""


class Channel(Protocol):
    """A worker's side of its link."""

    def receive(self) -> Any:
        """Wait for the next question and return it.

        Raises:
            EOFError: the parent is gone.
        """

    def send(self, answer: object) -> None:
        """Send an answer."""

    def place(self, share: Share, plan: SlabPlan, module: object) -> "Place":
        """Return the place that the parent made from the same arguments."""


class Board(Protocol):
    """Words of :mod:`tallyroll.collector.slab.progress`, read and written from both sides."""

    def __getitem__(self, word: int, /) -> int: ...

    def __setitem__(self, word: int, value: int, /) -> None: ...


class Weights(Protocol):
    """Transfer of the policy's weights from the parent to the workers."""

    @property
    def version(self) -> int:
        """Version of the last published weights; -1 before the first."""

    def load_into(self, module: object) -> int:
        """Copy the last published weights into ``module``; return their version.

        The copy never mixes two versions.
        """

    def publish(self, module: object, version: int) -> None:
        """Publish the tensors of ``module`` to all workers."""


class Place(Protocol):
    """The memory that the parent and its workers fill and read."""

    @property
    def weights(self) -> Weights:
        """The weights of the policy, which are empty if it is not a module."""

    def board(self, worker: int) -> Any:
        """Return the words of a worker, as a :class:`Board`. Safe to write in a signal handler."""

    def slab_of_all(self) -> Slab:
        """Return the slab of all lanes (``mode="sync"``)."""

    def slab_of(self, worker: int) -> Slab:
        """Return the slab that a worker fills.

        It holds the worker's lanes of the slab of all, or all of the worker's segments.
        """

    def segment(self, worker: int, index: int) -> Slab:
        """Return one segment of a worker, as a slab (``mode="async"``)."""

    def actions(self, worker: int) -> NDArray[Any] | None:
        """Return the actions ``[slot, lane, ...]`` in the slab of a worker.

        Return None if the slab does not have the actions in one array.
        """


L = TypeVar("L", bound=Link)


class Transport(Protocol[L]):
    """A mechanism that runs workers."""

    kills: bool
    """True if a worker that hangs can be ended and replaced."""

    def start(self, index: int) -> L:
        """Start a worker with its job."""

    def ready(self, links: Sequence[L], seconds: float) -> Collection[L]:
        """Wait at most ``seconds`` for at least one message; return the links that have one."""

    def place(self, share: Share, plan: SlabPlan, module: object) -> Place:
        """Allocate the memory; a worker gets it with the question :class:`~messages.Bind`.

        Raises:
            ArgumentError: not enough memory is available.
        """

    def close(self) -> None:
        """Release the transport's resources, after all links have ended. Idempotent."""
