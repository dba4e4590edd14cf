"""Link to one actor. Questions are method calls; answers are objects in Ray's store."""

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
"""Timeout for reading the location of an actor that has answered."""
_orders = count(1)


class RayLink:
    """Link to an actor, and the questions that it has not answered.

    Args:
        index: index of the worker.
        start: function that starts an actor with the job of the worker. If its second argument is
            True, it may use a spare actor.
        place: function that returns the parent's memory. It is called only after the memory exists.
        weights: function that returns the version of the newest weights and their object reference.
        due: collection to which the link adds itself when an answer is available.
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
        """Location of the actor, known once its environment was made."""
        self.lost = ""
        """Reason why the link was given up; empty if it was not. The actor may still be alive."""
        self.answered = False
        """True if an answer arrived since the last heartbeat.

        The actor then needs no heartbeat.
        """
        self._begin(spare=True)

    def _begin(self, spare: bool) -> None:
        self.actor, facts, made = self._start(self.index, spare)
        self._ask = self.actor.ask  # Ray makes a new object at each access
        self._facts = facts
        self._again = spare
        self._asked.clear()
        self._await(made, None)

    def _await(self, ref: Any, question: object) -> None:
        """Register a callback for an answer.

        The cost does not depend on the number of links.
        """
        answer = ref.future()
        self._asked.append((answer, question))
        answer.add_done_callback(self._answers)

    def _answers(self, _: Future[Any]) -> None:
        self.answered = True
        self._due.add(self)
        if self._ended:  # another thread ended the link, so no answer matters
            self._due.forget(self)

    @property
    def name(self) -> str:
        """Name of the actor in messages."""
        if self.facts is None:
            return "Ray actor"
        return f"Ray actor of process {self.facts.pid} on node {self.facts.host}"

    @property
    def alive(self) -> bool:
        """True until the link has ended or was given up."""
        return not (self._ended or self.lost)

    @property
    def beats(self) -> bool:
        """True if the actor must answer heartbeats.

        While the actor makes its environment, it may be too busy to answer.
        """
        return self._made and self.alive

    @property
    def has_answer(self) -> bool:
        """True if an answer, or the end of the actor, is available."""
        if self.lost or self._ended:
            return True
        return bool(self._asked) and self._asked[0][0].done()

    def lose(self, why: str) -> None:
        """Give up the link, although its actor may be alive."""
        self.lost = why
        self._due.add(self)

    def send(self, question: object) -> None:
        """Send a question. If the actor is gone, `hear` reports this later."""
        if self._ended:
            self._due.add(self)
            return
        given, weights = Given(-1, (next(_orders), 0)), None
        self._bound = self._bound or isinstance(question, m.Bind)
        if self._bound:
            version, weights = self._newer_weights()
            place = self._place()
            number = next(_orders)  # first, so that the word is never older than its number
            word = place.board(self.index)[HALT]
            given = Given(version, (number, word), *place.given(self.index, question))
        # Send bytes, because Ray's own pickling of arguments takes many times as long.
        content = pickle.dumps((question, given), pickle.HIGHEST_PROTOCOL)
        more = () if weights is None else (weights,)
        self._await(self._ask.remote(content, *more), question)

    def send_weights(self) -> None:
        """Send the newest weights if the actor lacks them, even while it answers a question."""
        if self._bound and not self._ended:
            version, weights = self._newer_weights()
            if weights is not None:
                self.actor.weights.remote(version, weights)

    def _newer_weights(self) -> tuple[int, Any]:
        """Return the version of the newest weights, and the weights if they were not sent yet."""
        version, put = self._weights()
        if version <= self._sent_weights:
            return version, None
        self._sent_weights = version
        return version, put

    def order(self) -> None:
        """Send the HALT word, which makes the worker stop or continue.

        Only one thread calls this.
        """
        if self._bound and not self._ended:
            number = next(_orders)
            self.actor.halt.remote(number, self._place().board(self.index)[HALT])

    def starts_again(self) -> bool:
        """Replace a spare actor that died before it started; return True if that happened."""
        if self._made or not self._again or self.lost or self._ended:
            return False
        if isinstance(self._asked[0][0].exception(), RayError):
            with suppress(Exception):
                ray.kill(self.actor, no_restart=True)
            self._begin(spare=False)
            return True
        return False

    def hear(self) -> object:
        """Store the rows of the next answer and return its content, or return how the actor ended.

        An answer is never returned twice. If an answer is lost, the link kills the actor, and none
        of the slots that the actor filled count.
        """
        if not self.has_answer or self.lost or self._ended:
            return self._gone(self.lost or "ended")
        came, question = self._asked.popleft()
        self._due.mark_read(self)
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
        """Wait for the last answer; return False if it does not arrive in time."""
        if self._ended or not self._asked:
            return True
        return bool(wait([self._asked[-1][0]], timeout=seconds).done)

    def kill(self) -> None:
        """Kill the actor, without waiting."""
        if not self._ended:
            self._ended = True
            self._due.forget(self)
            with suppress(Exception):  # Ray may have shut down before this process
                ray.kill(self.actor, no_restart=True)

    def end(self) -> None:
        """Kill the actor and drop its pending answers."""
        self.kill()
        self._asked.clear()


def _how(error: RayError) -> tuple[str, str]:
    """Return the end of a sentence about how an actor ended, and a hint."""
    said = " ".join(str(error).split())
    kind = type(error).__name__
    if isinstance(error, OutOfMemoryError):
        return "was killed by Ray because the node ran out of memory", f" ({said:.300})"
    return f"ended ({kind}: {said:.300})", ""
