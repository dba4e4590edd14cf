"""Messages between a parent and its workers, and waiting for messages."""

from __future__ import annotations

import os
import pickle
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from multiprocessing import Pipe
from typing import Any

import pytest

from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.local import pipes
from tallyroll.collector.workers.local.pipes import LinkPoller, PipeChannel, SharedPlace


@pytest.fixture
def channels() -> Iterator[tuple[PipeChannel, PipeChannel]]:
    both = [PipeChannel(end) for end in Pipe()]
    yield both[0], both[1]
    for each in both:
        each.close()


def test_messages_arrive_in_order_once_each(channels: tuple[PipeChannel, PipeChannel]) -> None:
    ours, theirs = channels
    sent = [m.DONE, m.DONE, m.whole_steps(0, 1, "given"), m.DONE, m.Done(b"state"), m.DONE, None]
    sent += [None, m.whole_steps(0, 1, "given"), m.whole_steps(0, 2, "given")] * 2
    for message in sent:
        ours.send(message)
    assert [theirs.receive() for _ in sent] == sent
    theirs.send(m.DONE)
    assert ours.receive() == m.DONE


def test_a_message_that_is_sent_again_is_not_pickled_again(
    channels: tuple[PipeChannel, PipeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = channels
    pickled, plain = [], pickle.dumps

    def dumps(message: object, protocol: int) -> bytes:
        pickled.append(message)
        return plain(message, protocol)

    monkeypatch.setattr(pipes.pickle, "dumps", dumps)
    first, equal = m.Done(b"1"), m.Done(b"1")
    for message in (first, first, equal, equal, first):
        ours.send(message)
        assert theirs.receive() == first
    assert [each is first for each in pickled] == [True, False, True]


def test_a_large_message_comes_in_many_parts(channels: tuple[PipeChannel, PipeChannel]) -> None:
    ours, theirs = channels
    state = os.urandom(5 * 2**20)
    sender = threading.Thread(target=ours.send, args=(m.Done(state),))
    sender.start()
    assert theirs.receive() == m.Done(state)
    sender.join()


def test_a_length_that_comes_in_parts(channels: tuple[PipeChannel, PipeChannel]) -> None:
    ours, theirs = channels
    ours.send(m.DONE)
    assert theirs.receive() == m.DONE
    file = ours.connection.fileno()
    for part in (bytes(3), bytes(5)):  # a length of 0 stands for the previous message
        threading.Timer(0.05 if len(part) == 5 else 0.0, os.write, [file, part]).start()
    assert theirs.receive() == m.DONE


@pytest.mark.parametrize("nbytes", [0, 3, 8, 10])
def test_a_message_that_breaks_off_is_the_end(
    nbytes: int, channels: tuple[PipeChannel, PipeChannel]
) -> None:
    ours, theirs = channels
    os.write(ours.connection.fileno(), ((20).to_bytes(8, "little") + bytes(20))[:nbytes])
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()


def test_after_an_interruption_within_a_message_nothing_is_read(
    channels: tuple[PipeChannel, PipeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the message must not be read as the length of another one."""
    ours, theirs = channels
    read = pipes._read

    def interrupted(file: int, nbytes: int, *seconds: float) -> bytes:
        if nbytes:
            raise KeyboardInterrupt
        return read(file, nbytes)

    ours.send(m.whole_steps(0, 1, "given"))
    with monkeypatch.context() as patched:
        patched.setattr(pipes, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            theirs.receive()
    with pytest.raises(EOFError):
        theirs.receive()


def test_an_interruption_while_sending_lets_the_whole_message_be_sent(
    channels: tuple[PipeChannel, PipeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = channels

    def dumps(*_: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipes.pickle, "dumps", dumps)
        with pytest.raises(KeyboardInterrupt):
            ours.send(m.DONE)
    ours.send(m.DONE)
    assert theirs.receive() == m.DONE


def test_a_closed_channel_is_an_error(channels: tuple[PipeChannel, PipeChannel]) -> None:
    ours, _ = channels
    ours.send(m.DONE)
    ours.close()
    other = os.open(os.devnull, os.O_RDWR)  # may reuse the descriptor that is now free
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="Bad file descriptor"):
                ours.send(m.DONE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            ours.receive()
    finally:
        os.close(other)


def test_a_parent_does_not_wait_for_ever_for_the_rest_of_a_large_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that is stopped while it sends observations counts as ended."""
    monkeypatch.setattr(pipes, "PARTS_SECONDS", 0.1)
    (ours, theirs), content = Pipe(), pickle.dumps(bytes(pipes._LARGE_NBYTES))
    channel, length = PipeChannel(ours, SharedPlace()), len(content).to_bytes(8, "little")
    with theirs:
        os.write(theirs.fileno(), length + content)
        assert len(channel.receive()) == pipes._LARGE_NBYTES
        os.write(theirs.fileno(), length + content[:1000])
        for _ in range(2):
            with pytest.raises(EOFError):
                channel.receive()
    channel.close()


def test_a_parent_does_not_wait_for_ever_for_a_large_message_to_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that is stopped while it receives wide actions does not block the parent."""
    monkeypatch.setattr(pipes, "PARTS_SECONDS", 0.1)
    ours, theirs = Pipe()
    parent, worker = PipeChannel(ours, SharedPlace()), PipeChannel(theirs)
    wide = m.Done(os.urandom(2**21))
    taker = threading.Thread(target=worker.receive)
    taker.start()
    parent.send(wide)
    taker.join()
    parent.send(None)
    assert worker.receive() is None
    with pytest.raises(pipes.PipeStalled):
        parent.send(wide)
    worker.close()
    with pytest.raises(OSError, match="Broken pipe"):
        parent.send(wide)
    parent.close()


@dataclass(eq=False)
class Two:
    """Link of two pipes: one for messages, and one that becomes readable when it has ended."""

    has_answer: bool = False
    pipes: list[tuple[int, int]] = field(default_factory=lambda: [os.pipe(), os.pipe()])

    @property
    def sources(self) -> list[int]:
        return [read for read, _ in self.pipes]


def test_waiting_names_links_that_have_something_to_say() -> None:
    links, waiting = [Two(), Two(), Two()], LinkPoller[Two]()
    try:
        assert waiting.ready(links, 0.0) == set()
        os.write(links[1].pipes[0][1], b"1")
        os.write(links[2].pipes[1][1], b"1")
        assert waiting.ready(links, 5.0) == {links[1], links[2]}
        assert [link.has_answer for link in links] == [False, True, False]
        assert waiting.ready(links[:1], 0.01) == set()
        os.close(links[0].pipes[0][1])
        assert waiting.ready(links[:1], 5.0) == {links[0]}
        assert links[0].has_answer
    finally:
        for link in links:
            for file in (each for pair in link.pipes for each in pair):
                if (link, file) != (links[0], links[0].pipes[0][1]):
                    os.close(file)


def test_links_that_are_not_wanted_take_no_time_and_are_named_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[select.epoll] = []
    plain = select.epoll
    monkeypatch.setattr(select, "epoll", lambda: made.append(plain()) or made[-1])
    links, waiting = [Two() for _ in range(8)], LinkPoller[Two]()
    try:
        assert waiting.ready(links, 0.0) == set()
        os.write(links[0].pipes[0][1], b"1")
        for some in combinations(links[1:], 4):  # workers answer in any order
            assert waiting.ready(some, 0.0) == set()
        began = time.monotonic()
        assert waiting.ready(links[1:], 0.2) == set()
        assert time.monotonic() - began > 0.15
        assert waiting.ready(links, 5.0) == {links[0]}
        assert len(made) == 1  # combinations are not cached
    finally:
        for link in links:
            for file in (each for pair in link.pipes for each in pair):
                os.close(file)


def test_a_closed_end_that_a_forked_child_has_open_is_forgotten() -> None:
    gone, other, waiting = Two(), Two(), LinkPoller[Two]()
    copies = [os.dup(file) for pair in gone.pipes for file in pair]  # as in a child process
    try:
        assert waiting.ready([gone, other], 0.0) == set()
        os.write(gone.pipes[0][1], b"1")
        for pair in gone.pipes:
            for file in pair:
                os.close(file)
        assert waiting.ready([other], 0.01) == set()
        os.write(other.pipes[0][1], b"1")
        assert waiting.ready([other], 5.0) == {other}
    finally:
        for file in [*copies, *(each for pair in other.pipes for each in pair)]:
            os.close(file)
