"""Heartbeats of actors: a frozen node is silent for a minute before Ray takes it for dead."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError

from tallyroll.collector.ext.ray.links import RayLink

BEATS = 5
"""Heartbeats that an actor may miss, one after the other."""


class Heart:
    """Asks actors how far they are, and sends them orders, in a thread of its own.

    Args:
        seconds: between two heartbeats.
        links: returns the actors that there are now.
    """

    def __init__(self, seconds: float, links: Callable[[], Sequence[RayLink]]) -> None:
        self._seconds, self._links = seconds, links
        self._orders: SimpleQueue[int | None] = SimpleQueue()
        self._out: dict[RayLink, tuple[Any, int]] = {}
        """The heartbeat that an actor has not answered, and the beats since."""
        self.heard: dict[RayLink, list[int]] = {}
        """The last words of each actor, until they are taken."""

    def order(self, index: int) -> None:
        """Let a worker have the word on its board. Safe in a signal handler."""
        self._orders.put(index)

    def stop(self) -> None:
        """End the thread."""
        self._orders.put(None)

    def run(self) -> None:
        """Go on until :meth:`stop`."""
        due = time.monotonic() + self._seconds
        while True:
            try:
                index = self._orders.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                due = time.monotonic() + self._seconds
                with suppress(Exception):  # Ray was shut down: the others hear of it
                    self._beat()
                continue
            if index is None:
                return
            with suppress(Exception):
                self._links()[index].order()

    def _beat(self) -> None:
        links = dict.fromkeys(link for link in self._links() if link.beats)
        self._out = {link: out for link, out in self._out.items() if link in links}
        refs = [ref for ref, _ in self._out.values()]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        for link in links:
            ref, missed = self._out.pop(link, (None, 0))
            if ref in ready:
                with suppress(RayError):  # it is dead, which its answers say
                    self.heard[link] = ray.get(ref, timeout=self._seconds)
                ref = None
            if link.answered:  # which was a sign of life as well: it is not asked for another
                link.answered, missed = False, 0
            elif ref is None:
                ref, missed = link.actor.words.remote(), 0
            else:
                missed += 1
            if ref is not None:
                self._out[link] = ref, missed
            if missed >= BEATS:
                link.lose(
                    f"answered no heartbeat for {BEATS * self._seconds:g} seconds (its node is "
                    "frozen or cut off, or a step keeps the interpreter busy that long)"
                )
