"""Wait for links with available answers. Ray's callbacks report them, so there is no polling."""

import time
from collections.abc import Collection, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar


class AnsweringLink(Protocol):
    """A link that can report whether an answer is available."""

    @property
    def has_answer(self) -> bool:
        """True if an answer is available."""


L = TypeVar("L", bound=AnsweringLink)


class ReadyLinks(Generic[L]):
    """Set of links with answers. The cost of a wait does not depend on the number of links.

    Any thread may add links. One thread waits for them, and calls :meth:`mark_read` after it has
    read an answer. A link stays due until then, so that an exception during a wait loses nothing.
    """

    def __init__(self) -> None:
        self._links: set[L] = set()
        self._added: SimpleQueue[None] = SimpleQueue()
        """Receives an entry whenever a link is added, to wake :meth:`ready`."""
        self._asked_for: Sequence[L] = ()
        self._wanted: set[L] = set()
        """The links of the last call of :meth:`ready`."""

    def add(self, link: L) -> None:
        """Mark a link as due. Safe in any thread."""
        self._links.add(link)
        self._added.put(None)

    def mark_read(self, link: L) -> None:
        """Remove the due mark of a link, unless another answer is available."""
        self._links.discard(link)
        if link.has_answer:  # another answer may have marked the link before
            self._links.add(link)

    def forget(self, link: L) -> None:
        """Remove the due mark of a link in any case."""
        self._links.discard(link)

    def ready(self, links: Sequence[L], seconds: float) -> Collection[L]:
        """Return those of ``links`` that are due. Wait at most ``seconds`` for the first one.

        The set of links is cached by the identity of the list.
        """
        if links is not self._asked_for:
            self._asked_for, self._wanted = links, {*links}
        until = time.monotonic() + seconds
        while True:
            while not self._added.empty():  # before the search, so that later marks wake it
                self._added.get_nowait()
            found = [
                link for link in self._links.copy() if link in self._wanted and link.has_answer
            ]
            if found:
                return found
            try:
                self._added.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return found
