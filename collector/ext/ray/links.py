"""The way to one actor: questions are calls of its methods, answers are objects of the store."""

import pickle
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import count
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError

from tallyroll.collector.ext.far.far_place import FarPlace
from tallyroll.collector.ext.far.far_worker import Answer, Ended, Given
from tallyroll.collector.ext.ray.actor import Facts
from tallyroll.collector.ext.ray.ready_links import ReadyLinks
from tallyroll.collector.slab.progress import HALT
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.transport import Gone

_FETCH_SECONDS = 20.0
"""How long it may take to read where an actor is, once it has answered."""
_orders = count(1)


class RayLink:
    """An actor, and the questions that it was asked.

    Args:
        index: of the worker.
        start: starts an actor with the job of the worker; ``spare``: it may be one that waits.
        place: returns the memory, once there is one.
        weights: returns the version of the newest weights, and what was put.
        due: gets the link when there is something to be heard.
    """

    pid: int | None = None

    def __init__(
        self,
        index: int,
        start: Callable[[int, bool], tuple[Any, Any, Any]],
        place: Callable[[], FarPlace],
        weights: Callable[[], tuple[int, Any]],
        due: ReadyLinks[Any],
    ) -> None:
        self.index, self._start, self._place, self._weights = index, start, place, weights
        self._due = due
        self._asked: deque[tuple[Future[Any], object]] = deque()
        self._sent_weights = -1
        self._bound = self._made = self._ended = False
        self.facts: Facts | None = None
        """Where it is, once its environment was made."""
        self.lost = ""
        """Why it is given up although its actor may be alive."""
        self.answered = False
        """Whether an answer came since the last heartbeat, which it is not asked for then."""
        self._begin(spare=True)

    def _begin(self, spare: bool) -> None:
        self.actor, facts, made = self._start(self.index, spare)
        self._ask = self.actor.ask  # Ray makes another one each time
        self._facts = facts
        self._again = spare
        self._asked.clear()
        self._await(made, None)

    def _await(self, ref: Any, question: object) -> None:
        """Let Ray say when an answer has come, and read it: that costs the same for any number."""
        answer = ref.future()
        self._asked.append((answer, question))
        answer.add_done_callback(self._answers)

    def _answers(self, _: Future[Any]) -> None:
        self.answered = True
        self._due.add(self)
        if self._ended:  # by another thread: there is nothing more to be heard
            self._due.forget(self)

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
    def says(self) -> bool:
        """Whether there is something to be heard."""
        if self.lost or self._ended:
            return True
        return bool(self._asked) and self._asked[0][0].done()

    def lose(self, why: str) -> None:
        """Give it up, although its actor may be alive."""
        self.lost = why
        self._due.add(self)

    def send(self, question: object) -> None:
        """Send a question; one that is gone is heard of later."""
        if self._ended:
            self._due.add(self)
            return
        given, weights = Given(-1, (next(_orders), 0)), None
        self._bound = self._bound or isinstance(question, m.Bind)
        if self._bound:
            version, weights = self._newer_weights()
            place = self._place()
            number = next(_orders)  # first: an order of that number is not older than its word
            word = place.board(self.index)[HALT]
            given = Given(version, (number, word), *place.given(self.index, question))
        # Bytes, for Ray's own way of pickling arguments takes many times as long.
        content = pickle.dumps((question, given), pickle.HIGHEST_PROTOCOL)
        more = () if weights is None else (weights,)
        self._await(self._ask.remote(content, *more), question)

    def send_weights(self) -> None:
        """Send the newest weights, if it has not got them, while it may answer a question."""
        if self._bound and not self._ended:
            version, weights = self._newer_weights()
            if weights is not None:
                self.actor.weights.remote(version, weights)

    def _newer_weights(self) -> tuple[int, Any]:
        """The version of the newest weights, and these, if they are still to be sent."""
        version, put = self._weights()
        if version <= self._sent_weights:
            return version, None
        self._sent_weights = version
        return version, put

    def order(self) -> None:
        """Send the word that tells it to end, or to go on. Called by one thread alone."""
        if self._bound and not self._ended:
            number = next(_orders)
            self.actor.halt.remote(number, self._place().board(self.index)[HALT])

    def starts_again(self) -> bool:
        """Whether it was a spare that had died meanwhile, and a new actor is in its place."""
        if self._made or not self._again or self.lost or self._ended:
            return False
        if isinstance(self._asked[0][0].exception(), RayError):
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
        if not self.says or self.lost or self._ended:
            return self._gone(self.lost or "ended")
        came, question = self._asked.popleft()
        self._due.heard(self)
        try:
            answer: Answer = came.result()
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
        return bool(wait([self._asked[-1][0]], timeout=seconds).done)

    def kill(self) -> None:
        """Kill the actor, without waiting."""
        if not self._ended:
            self._ended = True
            self._due.forget(self)
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
