"""Links that have something to be heard; Ray says so of each, so that none is looked at in vain."""

import time
from collections.abc import Collection, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar


class Says(Protocol):
    """A link."""

    @property
    def says(self) -> bool:
        """Whether it has something to be heard."""


L = TypeVar("L", bound=Says)


class ReadyLinks(Generic[L]):
    """Waits for links, at the same cost for any number of them.

    Threads add links; one thread waits, and says what it has heard. A link stays due until then,
    so that an exception while it waits loses nothing.
    """

    def __init__(self) -> None:
        self._links: set[L] = set()
        self._added: SimpleQueue[None] = SimpleQueue()
        """Has an entry once a link was added since :meth:`ready` looked."""
        self._asked_for: Sequence[L] = ()
        self._wanted: set[L] = set()
        """The links of the last call of :meth:`ready`."""

    def add(self, link: L) -> None:
        """Let a link be due. Safe in any thread."""
        self._links.add(link)
        self._added.put(None)

    def heard(self, link: L) -> None:
        """Let a link be due no more, unless it has more to be heard."""
        self._links.discard(link)
        if link.says:  # it may have been added since
            self._links.add(link)

    def forget(self, link: L) -> None:
        """Let a link be due no more, whatever it says."""
        self._links.discard(link)

    def ready(self, links: Sequence[L], seconds: float) -> Collection[L]:
        """Return those of ``links`` that are due; waits for one, at most so many ``seconds``.

        The list of the call before is known to have the same links.
        """
        if links is not self._asked_for:
            self._asked_for, self._wanted = links, {*links}
        until = time.monotonic() + seconds
        while True:
            while not self._added.empty():  # before it looks: what comes later has an entry
                self._added.get_nowait()
            found = [link for link in self._links.copy() if link in self._wanted and link.says]
            if found:
                return found
            try:
                self._added.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return found
