"""Links that Ray reports as ready are found at the cost of one, however many links exist."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from tallyroll.collector.ext.ray.ready_links import ReadyLinks
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.pool import WorkerPool
from tallyroll.collector.workers.transport import Gone
from tallyroll.collector.workers.worker_options import Supervision

MANY = 1_000


@dataclass(eq=False)
class Line:
    """Link that answers on request of a test."""

    due: ReadyLinks[Line]
    answers: list[object] = field(default_factory=list)
    looks: int = 0
    name = "line"
    pid = None
    alive = True

    @property
    def has_answer(self) -> bool:
        self.looks += 1
        return bool(self.answers)

    def say(self, answer: object = m.DONE) -> None:
        self.answers.append(answer)
        self.due.add(self)

    def hear(self) -> object:
        answer = self.answers.pop(0)
        self.due.mark_read(self)
        return answer

    def send(self, question: object) -> None:
        """Send nothing; the test sets the answer."""

    def kill(self) -> None: ...
    def end(self) -> None: ...


def lines(count: int) -> tuple[ReadyLinks[Line], list[Line]]:
    due = ReadyLinks[Line]()
    return due, [Line(due) for _ in range(count)]


def test_a_link_is_due_until_all_was_heard() -> None:
    due, links = lines(3)
    assert list(due.ready(links, 0.0)) == []
    links[1].say()
    links[1].say()
    for _ in range(3):  # reported until its answers are read
        assert list(due.ready(links, 5.0)) == [links[1]]
    assert list(due.ready(links[:1], 0.01)) == []
    assert list(due.ready(links, 5.0)) == [links[1]]
    links[1].hear()
    assert list(due.ready(links, 5.0)) == [links[1]]
    links[1].hear()
    began = time.monotonic()
    assert list(due.ready(links, 0.1)) == []
    assert time.monotonic() - began > 0.05
    links[2].say()
    due.forget(links[2])
    assert list(due.ready(links, 0.0)) == []


def test_what_is_said_in_another_thread_ends_the_wait() -> None:
    due, links = lines(2)
    thread = threading.Timer(0.05, links[0].say)
    thread.start()
    assert list(due.ready(links, 60.0)) == [links[0]]
    thread.join()


def test_an_exception_while_it_waits_loses_no_link() -> None:
    due, links = lines(2)

    def handler(*_: object) -> None:
        links[0].say()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            due.ready(links, 60.0)
        assert list(due.ready(links, 0.0)) == [links[0]]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_cost_of_an_answer_does_not_grow_with_the_links() -> None:
    due, links = lines(MANY)
    due.ready(links, 0.0)
    for link in links[:20]:
        link.say()
        assert list(due.ready(links, 5.0)) == [link]
        link.hear()
    assert sum(link.looks for link in links) <= 20 * 3


def test_links_that_are_heard_without_a_wait_leave_nothing_behind() -> None:
    due, links = lines(2)
    for link in links * 50:
        link.say()
        assert list(due.ready(links, 5.0)) == [link]
        link.hear()
    assert due._added.qsize() <= 1


class Said:
    """Transport whose links answer one after the other, each when it is waited for."""

    kills = True

    def __init__(self, answers: dict[int, object]) -> None:
        self.due, self.answers = ReadyLinks[Line](), answers
        self.lines: list[Line] = []
        self.lists: list[Any] = []
        """Lists of links in the requests."""
        self.left: list[int | None] = []
        """Indices of the links that answer next, in reverse order.

        None stands for a silent period.
        """

    def start(self, index: int) -> Line:
        self.lines.append(Line(self.due))
        return self.lines[index]

    def ready(self, links: Any, seconds: float) -> Any:
        if not self.lists or links is not self.lists[-1]:
            self.lists.append(links)
        index = self.left.pop() if self.left else None
        if index is not None:
            self.lines[index].say(self.answers.get(index, m.DONE))
        return self.due.ready(links, 0.01)


def pool_of(workers: int, answers: dict[int, object], **supervision: Any) -> tuple[Said, Any]:
    transport = Said(answers)
    pool = WorkerPool(transport, workers, Supervision(**supervision))
    for member in pool.members:
        member.asked, member.ready = 0, True
    transport.left = [*range(workers)]
    return transport, pool


def test_all_are_asked_and_heard_with_one_list() -> None:
    transport, pool = pool_of(MANY, {})
    assert pool.broadcast(m.whole_steps(0, 1, "policy"), nullcontext())
    assert not any(member.asked for member in pool.members)
    assert len(transport.lists) == 1
    # Two checks of an answer and one after it, and no checks of silent links.
    assert sum(line.looks for line in transport.lines) <= MANY * 3


def test_those_that_are_silent_for_a_while_are_waited_for() -> None:
    transport, pool = pool_of(2, {}, step_timeout=60.0)
    transport.left = [1, None, None, 0, None]
    assert pool.broadcast(m.whole_steps(0, 1, "policy"), nullcontext())
    assert len(transport.lists) == 1


def test_all_are_waited_for_until_one_hangs() -> None:
    transport, pool = pool_of(3, {}, step_timeout=0.2)
    transport.left = [0, 2]
    assert not pool.broadcast(m.whole_steps(0, 1, "policy"), nullcontext())
    assert [member.asked for member in pool.members] == [0, 1, 0]
    ((member, error),) = pool.events()
    assert member.index == 1
    assert "step_timeout" in str(error)


@pytest.mark.parametrize("again", [False, True])
def test_one_that_fails_is_left_to_events(again: bool) -> None:
    """With ``again``, the failed link had answered, but others had not."""
    transport, pool = pool_of(3, {} if again else {1: Gone("was killed")})
    if again:
        plain = transport.ready

        def ready(links: Any, seconds: float) -> Any:
            found = plain(links, seconds)
            if not pool.members[2].asked:  # like a process whose end was detected
                found = [*found, transport.lines[2]]
            return found

        transport.ready = ready  # type: ignore[method-assign]
    assert not pool.broadcast(m.whole_steps(0, 1, "policy"), nullcontext())
    assert pool.members[2].asked == 0
    if not again:
        assert [str(each) for _, each in pool.events() if isinstance(each, Exception)]
