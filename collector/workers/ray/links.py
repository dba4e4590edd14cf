"""The way to one actor: questions are calls of its methods, answers are objects of the store."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError

from tallyroll.collector.slab.progress import HALT
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.far.far_place import FarPlace
from tallyroll.collector.workers.far.far_worker import Answer, Ended, Given
from tallyroll.collector.workers.ray.actor import Facts
from tallyroll.collector.workers.transport import Gone

_FETCH_SECONDS = 20.0
"""How long an answer that is there may take to be read."""
_orders = count(1)


class RayLink:
    """An actor, and the questions that it was asked.

    Args:
        index: of the worker.
        start: starts an actor with the job of the worker; ``spare``: it may be one that waits.
        place: returns the memory, once there is one.
        weights: returns the version of the newest weights, and what was put.
    """

    pid: int | None = None

    def __init__(
        self,
        index: int,
        start: Callable[[int, bool], tuple[Any, Any, Any]],
        place: Callable[[], FarPlace],
        weights: Callable[[], tuple[int, Any]],
    ) -> None:
        self.index, self._start, self._place, self._weights = index, start, place, weights
        self._asked: deque[tuple[Any, object]] = deque()
        self._sent_weights = -1
        self._bound = self._made = self._ended = False
        self.facts: Facts | None = None
        """Where it is, once its environment was made."""
        self.lost = ""
        """Why it is given up although its actor may be alive."""
        self._begin(spare=True)

    def _begin(self, spare: bool) -> None:
        self.actor, facts, made = self._start(self.index, spare)
        self._facts = facts
        self._again = spare
        self._asked.clear()
        self._asked.append((made, None))

    @property
    def name(self) -> str:
        """The thing that it is."""
        if self.facts is None:
            return "Ray actor"
        return f"Ray actor of process {self.facts.pid} on node {self.facts.host}"

    @property
    def alive(self) -> bool:
        """Whether it was not seen to end."""
        return not (self._ended or self.lost)

    @property
    def beats(self) -> bool:
        """Whether it has to answer heartbeats: until its environment was made it may be busy."""
        return self._made and self.alive

    @property
    def first(self) -> Any:
        """The answer that comes next; None: none will."""
        return None if self.lost or not self._asked else self._asked[0][0]

    def send(self, question: object) -> None:
        """Send a question; one that is gone is heard of later."""
        if self._ended:
            return
        given = Given(-1, (next(_orders), 0))
        self._bound = self._bound or isinstance(question, m.Bind)
        if self._bound:
            version = self.send_weights()
            place = self._place()
            number = next(_orders)  # first: an order of that number is not older than its word
            word = place.board(self.index)[HALT]
            given = Given(version, (number, word), *place.given(self.index, question))
        self._asked.append((self.actor.ask.remote(question, given), question))

    def send_weights(self) -> int:
        """Send the newest weights, if it has not got them; returns their version."""
        version, put = self._weights()
        if self._bound and version > self._sent_weights and not self._ended:
            self._sent_weights = version
            self.actor.weights.remote(version, put)
        return version

    def order(self) -> None:
        """Send the word that tells it to end, or to go on. Called by one thread alone."""
        if self._bound and not self._ended:
            number = next(_orders)
            self.actor.halt.remote(number, self._place().board(self.index)[HALT])

    def starts_again(self) -> bool:
        """Whether it was a spare that had died meanwhile, and a new actor is in its place."""
        if self._made or not self._again or self.first is None:
            return False
        try:
            ray.get(self.first, timeout=_FETCH_SECONDS)
        except RayError:
            with suppress(Exception):
                ray.kill(self.actor, no_restart=True)
            self._begin(spare=False)
            return True
        return False

    def hear(self) -> object:
        """The next answer, with its rows in place, or how it ended.

        Whatever became of an answer, it is not heard twice: an actor whose answer is lost is
        killed, and nothing that it filled counts.
        """
        if self.lost or not self._asked:
            return self._gone(self.lost or "ended")
        ref, question = self._asked.popleft()
        try:
            answer: Answer = ray.get(ref, timeout=_FETCH_SECONDS)
            if self.facts is None:
                self.facts = ray.get(self._facts, timeout=_FETCH_SECONDS)
                self.pid, self._made = self.facts.pid, True
        except RayError as error:
            return self._gone(*_how(error))
        if isinstance(answer.content, Ended):
            return self._gone(answer.content.how)
        if answer.words:
            self._place().land(self.index, question, answer)
        return answer.content

    def _gone(self, how: str, hint: str = "") -> Gone:
        self.end()
        return Gone(how, hint=hint)

    def over(self, seconds: float) -> bool:
        """Wait until it has answered the last question."""
        if self._ended or not self._asked:
            return True
        ready, _ = ray.wait([self._asked[-1][0]], timeout=seconds)
        return bool(ready)

    def kill(self) -> None:
        """Kill the actor, without waiting."""
        if not self._ended:
            self._ended = True
            with suppress(Exception):  # Ray may be gone before us
                ray.kill(self.actor, no_restart=True)

    def end(self) -> None:
        """Kill the actor; what it was asked is not heard any more."""
        self.kill()
        self._asked.clear()


def _how(error: RayError) -> tuple[str, str]:
    """The end of a sentence that says how an actor ended, and a hint."""
    said = " ".join(str(error).split())
    kind = type(error).__name__
    if isinstance(error, OutOfMemoryError):
        return "was killed by Ray, for its node was out of memory", f" ({said:.300})"
    return f"ended ({kind}: {said:.300})", ""
