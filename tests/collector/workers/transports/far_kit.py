"""Workers in threads of this process that share no memory with their parent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import cloudpickle
import numpy as np

from tallyroll.collector.ext.far.far_place import FarPlace
from tallyroll.collector.ext.far.far_worker import Answer, Ended, FarWorker, Given
from tallyroll.collector.slab.progress import HALT
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.transport import Gone


class FarLink:
    """Remote worker in this process, and the thread that calls it."""

    pid = None

    def __init__(self, index: int, transport: FarThreads) -> None:
        self.index, self.transport, self.name = index, transport, f"far thread {index}"
        self.heard: deque[Any] = deque()
        self._asked: deque[Any] = deque([None])
        self._worker, self._bound, self.alive = FarWorker(), False, True
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._out.put(lambda: self._worker.start(transport.jobs[index]))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (call := self._out.get()) is not None:
            answer = call()
            with self.transport.changed:
                self.heard.append(answer)
                self.transport.changed.notify_all()

    def send(self, question: object) -> None:
        given = Given(-1, (self.transport.order(), 0))
        if self._bound or isinstance(question, m.Bind):
            self._bound, place = True, self.transport.made
            version, tensors = self.transport.weights
            self._worker.take_weights(version, tensors)
            given = Given(version, self.word(), *place.given(self.index, question))
        self._asked.append(question)
        self._out.put(lambda: self._worker.ask(question, given))

    def take_weights(self) -> None:
        if self._bound:
            self._worker.take_weights(*self.transport.weights)

    def word(self) -> tuple[int, int]:
        return self.transport.order(), self.transport.made.board(self.index)[HALT]

    def halt(self) -> None:
        self._worker.halt(*self.word())

    def hear(self) -> object:
        answer, question = self.heard.popleft(), self._asked.popleft()
        if isinstance(answer.content, Ended):
            return Gone(answer.content.how)
        if answer.words:
            self.transport.answers.append(answer)
            self.transport.made.land(self.index, question, answer)
        return answer.content

    def over(self, seconds: float) -> bool:
        with self.transport.changed:
            return self.transport.changed.wait_for(
                lambda: len(self.heard) == len(self._asked), seconds
            )

    def kill(self) -> None:
        self.alive = False
        self._out.put(None)

    def end(self) -> None:
        self.kill()


class FarThreads:
    """Remote workers whose answers include their rows."""

    kills = False

    def __init__(self, jobs: Sequence[bytes]) -> None:
        plain = [replace(cloudpickle.loads(job), threads=None) for job in jobs]
        self.jobs = [cloudpickle.dumps(job) for job in plain]
        self.changed, self._orders = threading.Condition(), 0
        self.links: dict[int, FarLink] = {}
        self.weights: tuple[int, list[Any]] = (-1, [])
        self.answers: deque[Answer] = deque(maxlen=50)
        """Latest answers with rows."""

    def order(self) -> int:
        self._orders += 1
        return self._orders

    def start(self, index: int) -> FarLink:
        self.links[index] = FarLink(index, self)
        return self.links[index]

    def ready(self, links: Sequence[FarLink], seconds: float) -> set[FarLink]:
        with self.changed:
            self.changed.wait_for(lambda: any(link.heard for link in links), seconds)
        return {link for link in links if link.heard}

    def place(self, share: Any, plan: Any, module: object) -> FarPlace:
        self._leased = share.segments > 0
        self.made = FarPlace(share, plan, module, lambda at: self.links[at].halt(), self.publish)
        return self.made

    def publish(self, version: int, tensors: list[Any]) -> None:
        """Send weights to workers, immediately within a lease, else with the next request."""
        self.weights = version, [np.array(tensor) for tensor in tensors]
        if self._leased:
            for link in self.links.values():
                link.take_weights()

    def close(self) -> None:
        self.links.clear()
