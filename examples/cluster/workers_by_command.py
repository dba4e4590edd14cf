"""Workers that your own command starts, locally or by ssh: a complete transport in one file.

    python examples/cluster/workers_by_command.py --frames 10000
    python examples/cluster/workers_by_command.py --command "ssh node7 python workers_by_command.py"

Each worker runs this file: the command is called with the additional argument `serve`. A worker
reads requests from its standard input and writes answers to its standard output as pickled
messages, so run it only on machines that you trust as your own. Processes share no memory, so rows
are sent with the answers. A worker exits when its parent has exited, because its input then ends.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.ext.far.far_place import FarPlace
from tallyroll.collector.ext.far.far_worker import Ended, FarWorker, Given
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import HALT
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.transport import Gone

HERE = [sys.executable, str(Path(__file__).resolve())]
BEAT_SECONDS = 0.2
"""Seconds between two progress reports of a worker."""


def send(file: BinaryIO, message: object) -> None:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    file.write(len(content).to_bytes(8, "little") + content)
    file.flush()


def received(file: BinaryIO) -> Iterator[Any]:
    """Yield messages until the other end closes the file."""
    while len(length := file.read(8)) == 8:
        content = file.read(size := int.from_bytes(length, "little"))
        if len(content) < size:
            return
        yield pickle.loads(content)


# --- parent process -------------------------------------------------------------------------------


class CommandLink:
    """A process, a thread that writes to it, and a thread that reads its answers."""

    def __init__(self, index: int, transport: CommandTransport) -> None:
        self.index, self.transport = index, transport
        self.process = subprocess.Popen(
            [*transport.command, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # keeps Ctrl-C from the worker, and makes a group to kill
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.pid = self.process.pid
        self.name = f"process {self.pid} of {transport.command[0]}"
        self.words: list[int] | None = None
        self.heard: deque[Any] = deque()
        self._asked: deque[object] = deque([None])
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._bound, self._version, self._ended = False, -1, False
        self._threads = [threading.Thread(target=each) for each in (self._write, self._read)]
        self._out.put(("start", transport.jobs[index]))
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError), self.process.stdin as file:
            while (message := self._out.get()) is not None:
                send(file, message)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as file:
            for kind, content in received(file):
                if kind == "words":
                    self.words = content
                else:
                    self._say(content)
        self._say(Ended(_how(self.process.wait())))
        self._out.put(None)

    def _say(self, answer: object) -> None:
        with self.transport.changed:
            self.heard.append(answer)
            self.transport.changed.notify_all()

    @property
    def alive(self) -> bool:
        return not self._ended and self.process.poll() is None

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
        """Tell the worker to stop or to continue. Safe in a signal handler."""
        if self._bound:
            word = self.transport.made.board(self.index)[HALT]
            self._out.put(("halt", (next(self.transport.orders), word)))

    def hear(self) -> object:
        answer, question = self.heard.popleft(), self._asked.popleft() if self._asked else None
        content = answer if isinstance(answer, Ended) else answer.content
        if isinstance(content, Ended):
            self.end()
            return Gone(content.how, self.process.returncode)
        if answer.words:
            self.transport.made.land(self.index, question, answer)
        return content

    def over(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def kill(self) -> None:
        if not self._ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._ended = True  # another process may get its pid soon
        self._out.put(None)
        for thread in self._threads:
            thread.join(2)


def _how(code: int) -> str:
    return f"exited with status {code}" if code >= 0 else f"was killed by signal {-code}"


class CommandTransport:
    """Transport that runs a command for each worker.

    Args:
        jobs: one pickled job per worker.
        command: the command that runs this file, on any machine.
    """

    kills = True

    def __init__(self, jobs: Sequence[bytes], command: Sequence[str] = HERE) -> None:
        self.jobs, self.command = jobs, command
        self.changed = threading.Condition()
        self.orders = count(1)
        self.weights: tuple[int, list[Any]] = (-1, [])
        self.links: dict[int, CommandLink] = {}

    def start(self, index: int) -> CommandLink:
        self.links[index] = CommandLink(index, self)
        return self.links[index]

    def ready(self, links: Sequence[CommandLink], seconds: float) -> set[CommandLink]:
        with self.changed:
            self.changed.wait_for(lambda: any(link.heard for link in links), seconds)
        for link in self.links.values():
            words, link.words = link.words, None
            if words is not None and hasattr(self, "made"):
                self.made.tell(link.index, words)
        return {link for link in links if link.heard}

    def place(self, share: Share, plan: SlabPlan, module: object) -> FarPlace:
        order: Callable[[int], None] = lambda index: self.links[index].order()  # noqa: E731
        self.made = FarPlace(share, plan, module, order, self._publish)
        return self.made

    def _publish(self, version: int, tensors: list[Any]) -> None:
        self.weights = version, [tensor.copy() for tensor in tensors]
        for link in self.links.values():
            link.send_weights()

    def close(self) -> None:
        self.links.clear()


# --- worker process -------------------------------------------------------------------------------


def serve() -> None:
    """Answer the parent until it closes the input."""
    out, lock = os.fdopen(os.dup(1), "wb"), threading.Lock()
    os.dup2(2, 1)  # keeps output of the environment out of the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker, questions = FarWorker(), SimpleQueue[Any]()

    def say(kind: str, content: object) -> None:
        with lock:
            send(out, (kind, content))

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
    for kind, content in received(sys.stdin.buffer):
        if kind == "weights":
            worker.take_weights(*content)
        elif kind == "halt":
            worker.halt(*content)
        else:
            questions.put(content)
    os._exit(0)  # exits even if the environment hangs


# --- main program ---------------------------------------------------------------------------------


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    env_id: str = option("CartPole-v1", "a Gymnasium id")
    num_envs: int = option(8, "lanes")
    num_workers: int = option(2, "workers")
    frames: int = option(10_000, "transitions to collect, exactly")
    frames_per_batch: int = option(1000, "transitions of a batch")
    mode: str = option("async", "sync or async")
    command: str = option(shlex.join(HERE), "runs this file, where a worker is to be")


def parse() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Args):
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            type=type(each.default),
            default=each.default,
            help=f"{each.metadata['help']} (default: {each.default})",
        )
    return Args(**vars(parser.parse_args()))


def main(args: Args) -> None:
    began = time.perf_counter()
    with MultiprocessCollector(
        args.env_id,
        num_envs=args.num_envs,
        num_workers=args.num_workers,
        mode=args.mode,  # type: ignore[arg-type]
        frames_per_batch=args.frames_per_batch,
        total_frames=args.frames,
        transport=partial(CommandTransport, command=shlex.split(args.command)),
    ) as collector:
        rows = sum(len(batch) for batch in collector)
    print(f"{rows} transitions in {time.perf_counter() - began:.1f} s")
    print(f"ledger: {collector.ledger}")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main(parse())
