"""Messages and memory over a pipe, between a parent and a worker on one machine."""

import os
import pickle
import select
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Generic, Protocol, TypeVar

from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.local.memory import Arena, ArenaSizer, require
from tallyroll.collector.workers.local.placement import SharedLayout
from tallyroll.collector.workers.share import Share

_LENGTH_NBYTES = 8
_LARGE_NBYTES = 2**16
"""Size from which a message may arrive in parts, between which its sender may stop."""
PARTS_SECONDS = 10.0
"""Seconds that a parent waits for the next part to arrive or to be accepted."""
_AGAIN = bytes(_LENGTH_NBYTES)
"""Length of a message that is the same object as the previous message. No content follows."""


class PipeStalled(EOFError):
    """The other end stopped sending or receiving in the middle of a large message."""


class PipeChannel:
    """A pipe for messages. Shared memory follows the question :class:`~messages.Bind`.

    A message must not change after it was sent, because a repeated message is pickled only once.

    Args:
        connection: one end of the pipe.
        memory: the memory that the parent sends after ``Bind``; None in a worker.
    """

    def __init__(self, connection: Connection, memory: "SharedPlace | None" = None) -> None:
        self.connection, self._memory = connection, memory
        self._file = connection.fileno()
        # A worker waits without a limit.
        self._patience = () if memory is None else (PARTS_SECONDS,)
        self._sent: object = None
        self._received: Any = None
        self._torn = False
        """True while a message is read, and after an exception interrupted that."""

    def send(self, message: object) -> None:
        """Send a message, pickled without torch's reducers, which use named shared memory.

        Raises:
            PipeStalled: a worker did not accept the rest of a large message within the time limit.
        """
        if message is self._sent:
            os.write(self._file, _AGAIN)
            return
        self._sent = None
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        length = len(content).to_bytes(_LENGTH_NBYTES, "little")
        _write(self._file, length + content, *self._patience)
        self._sent = message
        if isinstance(message, m.Bind) and self._memory is not None:
            arena = self._memory.arena
            self.connection.send(arena.nbytes)
            # The receiver's number is only needed on Windows.
            send_handle(self.connection, arena.fd, 0)

    def receive(self) -> Any:
        """Wait for the next message and return it.

        Raises:
            EOFError: the other end is closed, or the last call was interrupted within a message.
            PipeStalled: the rest of a large message did not arrive at the parent within the limit.
        """
        if self._torn:
            raise EOFError
        file, self._torn = self._file, True
        length = os.read(file, _LENGTH_NBYTES)
        if length != _AGAIN:
            length += _read(file, _LENGTH_NBYTES - len(length))
            content = _read(file, int.from_bytes(length, "little"), *self._patience)
            if content:  # otherwise the length _AGAIN arrived in two parts
                self._received = pickle.loads(content)
        self._torn = False
        return self._received

    def close(self) -> None:
        """Close this end of the pipe."""
        self._file = -1
        self.connection.close()

    def place(self, share: Share, plan: SlabPlan, module: object) -> SharedLayout:
        """Receive the memory that follows ``Bind``, and lay it out as the parent does."""
        nbytes = self.connection.recv()
        return SharedLayout(Arena.attach(recv_handle(self.connection), nbytes), share, plan, module)


def _read(file: int, nbytes: int, seconds: float | None = None) -> bytes:
    """Read ``nbytes`` bytes; each part of a large message must arrive within ``seconds``."""
    parts, waits = [], select.poll() if seconds is not None and nbytes >= _LARGE_NBYTES else None
    if waits is not None:
        waits.register(file, select.POLLIN)
    while nbytes:
        if waits is not None and not waits.poll(1000 * (seconds or 0)):
            raise PipeStalled
        parts.append(part := os.read(file, min(nbytes, 2**20)))
        if not part:
            raise EOFError
        nbytes -= len(part)
    return b"".join(parts)


def _write(file: int, content: bytes, seconds: float | None = None) -> None:
    """Write all bytes; each part of a large message must be accepted within ``seconds``."""
    left = memoryview(content)
    if seconds is None or len(left) < _LARGE_NBYTES:
        while left:
            left = left[os.write(file, left) :]
        return
    waits = select.poll()
    waits.register(file, select.POLLOUT)
    os.set_blocking(file, False)
    try:
        while left:
            if not waits.poll(1000 * seconds):
                raise PipeStalled
            with suppress(BlockingIOError):
                left = left[os.write(file, left) :]
    finally:
        os.set_blocking(file, True)


class PollableLink(Protocol):
    """A link with the ends of pipes that are ready when it has a message."""

    has_answer: bool
    """True once the first source was ready: a message arrived, or the end of all messages."""

    @property
    def sources(self) -> Sequence[Any]:
        """The ends of pipes, or their file descriptors."""


L = TypeVar("L", bound=PollableLink)


class LinkPoller(Generic[L]):
    """Waits for links by epoll, at which each link is registered once."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all links, because some no longer exist."""
        self._links: Sequence[L] | None = None
        self._wanted: set[L] = set()
        """The links of the last call."""
        self._known: set[L] = set()
        self._of: dict[int, tuple[L, bool]] = {}
        """The link of each file, and True if the messages of the link arrive in this file."""
        self._aside: list[int] = []
        """Unregistered files of known links, which became ready while no call waited for them."""
        self._poll: select.epoll | None = None  # the last reference to one closes it

    def ready(self, links: Sequence[L], seconds: float) -> set[L]:
        """Return links that have a message, after at most ``seconds`` seconds.

        If the list is the same object as in the last call, its links must be the same.
        """
        if links is not self._links:
            self._listen(links)
        assert self._poll is not None
        found = set()
        for file, _ in self._poll.poll(seconds):
            link, says = self._of[file]
            if link in self._wanted:
                link.has_answer = link.has_answer or says  # hot path: for each message
                found.add(link)
            else:  # otherwise the file would be ready in each call
                try:
                    self._poll.unregister(file)
                except OSError:  # closed here, but a forked child still has it open
                    self.forget()
                    break
                self._aside.append(file)
        return found

    def _listen(self, links: Sequence[L]) -> None:
        poll = self._poll = self._poll or select.epoll()
        self._links, self._wanted = links, {*links}
        for link in links:
            if link not in self._known:
                self._known.add(link)
                for first, source in zip((True, False), link.sources, strict=False):
                    file = source if isinstance(source, int) else source.fileno()
                    poll.register(file, select.EPOLLIN)
                    self._of[file] = link, first
        aside, self._aside = self._aside, []
        for file in aside:
            if self._of[file][0] in self._wanted:
                poll.register(file, select.EPOLLIN)
            else:
                self._aside.append(file)


class SharedPlace:
    """Memory that the parent allocates once, for all of its workers."""

    arena: Arena

    def make(self, share: Share, plan: SlabPlan, module: object) -> SharedLayout:
        """Allocate the memory and lay it out.

        Raises:
            ArgumentError: less memory is available.
        """
        measure = ArenaSizer()
        SharedLayout(measure, share, plan, module)
        slabs = "a slab"
        if share.segments:
            slabs = f"{share.segments} slabs for each of {len(share.lanes)} workers"
        require(
            measure.end,
            f"{slabs} of {share.slots} slots of {share.total} lanes and the policy's weights",
        )
        self.arena = Arena.create(measure.end)
        return SharedLayout(self.arena, share, plan, module)
