"""The seam between the collector and its workers: how they are reached, and where rows lie.

Pool, leases, lockstep, start-up and supervision know workers by this alone. What brings a new
transport are these protocols: ``MultiprocessCollector(transport=...)`` takes whatever makes one of
jobs. ``local/`` has those of this machine, ``ray/`` those of a cluster; ``far/`` has the memory of
workers that share none with their parent.
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
    """A worker that will never answer again, and the cause."""

    how: str
    """The end of a sentence: "was killed by SIGKILL"."""
    exitcode: int | None = None
    hint: str = ""
    """The end of the message, where more is known of the cause."""
    mistake: str = ""
    """The whole message, with ``{who}`` in it, where the program is wrong."""


class Link(Protocol):
    """The way to one worker, which was started with its job."""

    name: str
    """The thing that it is, for messages: "process 12"."""
    pid: int | None
    """The number of its process, where it has one of its own."""

    @property
    def alive(self) -> bool:
        """Whether the worker was not seen to end."""

    def send(self, question: object) -> None:
        """Send a question without waiting; a worker that is gone is heard of later."""

    def hear(self) -> object:
        """The next answer, or :class:`Gone`, once :meth:`Transport.ready` names this link.

        Rows that an answer is about lie in the place before it is heard.
        """

    def over(self, seconds: float) -> bool:
        """Wait for the end of a worker that was asked to end; whether it came."""

    def kill(self) -> None:
        """End the worker, and all that it started, without waiting. Idempotent."""

    def end(self) -> None:
        """Kill it, wait until it is gone, and let its resources go. Idempotent."""


class Channel(Protocol):
    """A worker's side of its link."""

    def receive(self) -> Any:
        """The next question; waits for it. EOFError: the parent is gone."""

    def send(self, answer: object) -> None:
        """Send an answer."""

    def place(self, share: Share, plan: SlabPlan, module: object) -> "Place":
        """The place that the parent made of the same arguments."""


class Board(Protocol):
    """Words of :mod:`tallyroll.collector.slab.progress`, read and written from both sides."""

    def __getitem__(self, word: int, /) -> int: ...

    def __setitem__(self, word: int, value: int, /) -> None: ...


class Weights(Protocol):
    """The policy's weights, on their way from the parent to the workers."""

    @property
    def version(self) -> int:
        """The version of the weights that were published last; -1 before."""

    def load_into(self, module: object) -> int:
        """Copy the weights published last into ``module``, whole; returns their version."""

    def publish(self, module: object, version: int) -> None:
        """Hand the tensors of ``module`` to all workers."""


class Place(Protocol):
    """The memory that the parent and its workers fill and read."""

    @property
    def weights(self) -> Weights:
        """The weights of the policy; there are none where it is no module."""

    def board(self, worker: int) -> Any:
        """The words of a worker, as a :class:`Board`. Safe to write in a signal handler."""

    def slab_of_all(self) -> Slab:
        """The slab of all lanes (``mode="sync"``)."""

    def slab_of(self, worker: int) -> Slab:
        """The slab that a worker fills: its lanes of the slab of all, or all of its segments."""

    def segment(self, worker: int, index: int) -> Slab:
        """One segment of a worker, as a slab (``mode="async"``)."""

    def actions(self, worker: int) -> NDArray[Any] | None:
        """``[slot, lane, ...]``, where the slab of a worker has its actions in an array."""


L = TypeVar("L", bound=Link)


class Transport(Protocol[L]):
    """A mechanism that runs workers."""

    kills: bool
    """A worker that hangs can be ended, and replaced."""

    def start(self, index: int) -> L:
        """Start a worker with its job."""

    def ready(self, links: Sequence[L], seconds: float) -> Collection[L]:
        """Links that have something to be heard; waits for at least one, at most so long."""

    def place(self, share: Share, plan: SlabPlan, module: object) -> Place:
        """Make the memory; a worker gets it with the question :class:`~messages.Bind`.

        Raises:
            ArgumentError: there is not so much.
        """

    def close(self) -> None:
        """Let go of what it keeps, once all links have ended. Idempotent."""
