"""Heartbeats of actors. Without them, Ray takes a minute to declare a frozen node dead."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError

from tallyroll.collector.ext.ray.links import RayLink

BEATS = 5
"""Number of consecutive missed heartbeats after which the link to an actor is given up."""


class Heart:
    """Thread that polls the progress of actors and sends them orders.

    Args:
        seconds: interval between two heartbeats.
        links: function that returns the current links.
    """

    def __init__(self, seconds: float, links: Callable[[], Sequence[RayLink]]) -> None:
        self._seconds, self._links = seconds, links
        self._orders: SimpleQueue[int | None] = SimpleQueue()
        self._out: dict[RayLink, tuple[Any, int]] = {}
        """The unanswered heartbeat of each actor, and the number of missed beats."""
        self.answers: dict[RayLink, list[int]] = {}
        """The last board words of each actor, until the transport takes them."""

    def order(self, index: int) -> None:
        """Queue the HALT word of a worker's board to be sent. Safe in a signal handler."""
        self._orders.put(index)

    def stop(self) -> None:
        """End the thread."""
        self._orders.put(None)

    def run(self) -> None:
        """Run until :meth:`stop`."""
        due = time.monotonic() + self._seconds
        while True:
            try:
                index = self._orders.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                due = time.monotonic() + self._seconds
                with suppress(Exception):  # Ray was shut down, which other calls report
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
                with suppress(RayError):  # the actor is dead, which its answers report
                    self.answers[link] = ray.get(ref, timeout=self._seconds)
                ref = None
            if link.answered:  # an answer is a sign of life too, so no heartbeat is needed
                link.answered, missed = False, 0
            elif ref is None:
                ref, missed = link.actor.words.remote(), 0
            else:
                missed += 1
            if ref is not None:
                self._out[link] = ref, missed
            if missed >= BEATS:
                link.lose(
                    f"did not answer a heartbeat for {BEATS * self._seconds:g} seconds (the node "
                    "is frozen or disconnected, or a step kept the interpreter busy that long)"
                )
