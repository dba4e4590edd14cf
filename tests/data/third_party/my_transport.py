"""A transport as a user writes one by docs/own_transport.md: far workers at the ends of pipes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import HALT
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.far.far_place import FarPlace
from tallyroll.collector.workers.far.far_worker import Ended, FarWorker, Given
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.transport import Gone

BEAT_SECONDS = 0.2
"""How often a worker says how far it is."""


class PipeLink:
    """A process, the pipe to it, and a thread that writes to that."""

    def __init__(self, index: int, transport: PipeTransport) -> None:
        self.index, self.transport = index, transport
        self.pipe, there = transport.context.Pipe()
        self.process = transport.context.Process(target=serve, args=(there,))
        self.process.start()
        there.close()
        self.pid = self.process.pid
        self.name = f"process {self.pid} at a pipe"
        self.heard: deque[Any] = deque()
        self._asked: deque[object] = deque([None])
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._bound, self._version, self._ended, self.cut = False, -1, False, False
        self._out.put(("start", transport.jobs[index]))
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def _write(self) -> None:
        with suppress(OSError, ValueError):
            while (message := self._out.get()) is not None:
                self.pipe.send(message)

    def read(self) -> None:
        """Take the messages of the worker."""
        try:
            while not self.cut and self.pipe.poll():
                kind, content = self.pipe.recv()
                if kind == "answer":
                    self.heard.append(content)
                elif hasattr(self.transport, "made"):
                    self.transport.made.tell(self.index, content)
        except (EOFError, OSError):
            self.cut = True
            self.process.join(5)
            self.heard.append(Ended(f"ended with {self.process.exitcode}"))

    @property
    def alive(self) -> bool:
        return not self._ended and self.process.is_alive()

    def send(self, question: object) -> None:
        given = Given(-1, (next(self.transport.orders), 0))
        if self._bound or isinstance(question, m.Bind):
            self._bound, place = True, self.transport.made
            self.send_weights()
            order = next(self.transport.orders), place.board(self.index)[HALT]
            given = Given(self._version, order, *place.given(self.index, question))
        self._asked.append(question)
        self._out.put(("ask", (question, given)))

    def send_weights(self) -> None:
        version, tensors = self.transport.weights
        if self._bound and version > self._version:
            self._version = version
            self._out.put(("weights", (version, tensors)))

    def order(self) -> None:
        if self._bound:
            word = self.transport.made.board(self.index)[HALT]
            self._out.put(("halt", (next(self.transport.orders), word)))

    def hear(self) -> object:
        answer, question = self.heard.popleft(), self._asked.popleft() if self._asked else None
        content = answer if isinstance(answer, Ended) else answer.content
        if isinstance(content, Ended):
            self.end()
            return Gone(content.how, self.process.exitcode)
        if answer.words:
            self.transport.made.land(self.index, question, answer)
        return content

    def over(self, seconds: float) -> bool:
        self.process.join(seconds)
        return self.process.exitcode is not None

    def kill(self) -> None:
        if not self._ended:
            self.process.kill()

    def end(self) -> None:
        self.kill()
        self._ended = True
        self.process.join()
        self._out.put(None)
        self._writer.join(2)


class PipeTransport:
    """Runs far workers in processes of this machine."""

    kills = True

    def __init__(self, jobs: Sequence[bytes], start_method: str = "spawn") -> None:
        self.jobs, self.context = jobs, multiprocessing.get_context(start_method)
        self.orders = count(1)
        self.weights: tuple[int, list[Any]] = (-1, [])
        self.links: dict[int, PipeLink] = {}

    def start(self, index: int) -> PipeLink:
        self.links[index] = PipeLink(index, self)
        return self.links[index]

    def ready(self, links: Sequence[PipeLink], seconds: float) -> set[PipeLink]:
        until = time.monotonic() + seconds
        while True:
            for link in links:
                link.read()
            found = {link for link in links if link.heard}
            left = until - time.monotonic()
            if found or left <= 0:
                return found
            wait([link.pipe for link in links if not link.cut], min(left, BEAT_SECONDS))

    def place(self, share: Share, plan: SlabPlan, module: object) -> FarPlace:
        self.made = FarPlace(share, plan, module, self._order, self._publish)
        return self.made

    def _order(self, index: int) -> None:
        self.links[index].order()

    def _publish(self, version: int, tensors: list[Any]) -> None:
        self.weights = version, [tensor.copy() for tensor in tensors]
        for link in self.links.values():
            link.send_weights()

    def close(self) -> None:
        self.links.clear()


def serve(pipe: Connection) -> None:
    """Answer the parent, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker, questions, turn = FarWorker(), SimpleQueue[Any](), threading.Lock()

    def say(kind: str, content: object) -> None:
        with turn:
            pipe.send((kind, content))

    def answer() -> None:
        answer = worker.start(questions.get())
        while not isinstance(answer.content, Ended):
            say("answer", answer)
            answer = worker.ask(*questions.get())
        say("answer", answer)
        os._exit(0)

    def beat() -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            say("words", worker.words)

    for target in (answer, beat):
        threading.Thread(target=target, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            kind, content = pipe.recv()
            if kind == "weights":
                worker.take_weights(*content)
            elif kind == "halt":
                worker.halt(*content)
            else:
                questions.put(content)
    os._exit(0)
