"""The workers as their parent sees them: asked, waited for, found dead or hung, ended."""

import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.util import Finalize
from operator import attrgetter
from typing import Any

from tallyroll.collector.errors import WorkerError, WorkerHung
from tallyroll.collector.rollout.os_signals import admitted, are_deferred
from tallyroll.collector.slab.progress import (
    BOARD_WORDS,
    FILLED,
    HALT,
    PAUSE,
    STEPPED,
    STOP,
    new_board,
)
from tallyroll.collector.workers import failures
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.central import CentralPolicy
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.transport import Gone, Link, Transport
from tallyroll.collector.workers.worker_options import Supervision

_LOOK_SECONDS = 0.25
"""How often the progress of workers is looked at while nothing is heard of them."""
_CLOSE_SECONDS = 2.0
"""How long a worker may take to close its environment."""
_SETTLE_SECONDS = 1.0
"""How long a worker may take to end the step under way, when all is over."""
_BY_INDEX = attrgetter("index")


Event = tuple[Member, Any]
"""A member, and its answer or the :class:`WorkerError` that says why none will come."""


class WorkerPool:
    """Starts workers, asks them, and hears their answers or their end.

    Nothing here waits without a limit: ends are seen by the transport, steps by the boards that
    workers write. Whatever becomes of this process, its workers end with it.

    Args:
        transport: runs them.
        workers: how many.
        supervision: how long workers may take.
    """

    def __init__(self, transport: Transport[Any], workers: int, supervision: Supervision) -> None:
        self.transport, self._supervision = transport, supervision
        self.members: list[Member] = []
        self._owner = os.getpid()
        self._look_at = 0.0
        self._busy: dict[Any, Member] = {}
        """Members that owe answers, by their links; made again where others do."""
        self._links: list[Any] = []
        """These links: the same list for as long as they are the same, so a transport knows it."""
        self._changed = True
        """Whether other members may owe answers than these."""
        self.central: CentralPolicy | None = None
        """Acts for workers that want actions; None: each acts for itself."""
        self._settling = False
        # Called by us, or before multiprocessing waits for its children at the interpreter's exit.
        self._finalize = Finalize(self, _kill_all, (self.members,), exitpriority=100)
        try:
            for index in range(workers):
                link = transport.start(index)
                # What it says first is asked for by starting it.
                self.members.append(Member(index, link, asked=1, since=time.monotonic()))
        except BaseException:
            self._finalize()
            raise

    # --- asking and hearing -----------------------------------------------------------------------

    def ask(self, member: Member, message: object) -> None:
        """Ask; a worker that is dead is heard of by :meth:`events`."""
        if not member.asked:
            member.since, self._changed = time.monotonic(), True
        member.asked += 1
        if member.failed is None:
            member.link.send(message)

    def events(
        self,
        limit: float | None = None,
        of: Sequence[Member] | None = None,
        *,
        during: AbstractContextManager[None] | None = None,
    ) -> list[Event]:
        """The next events of members that were asked; waits for at least one.

        Args:
            limit: seconds, after which nothing was heard and the list is empty.
            of: only these are listened to; None: all.
            during: what it waits in; None: where signals' handlers may raise.
        """
        until = math.inf if limit is None else time.monotonic() + limit
        if self._changed or of is not None:
            self._listen(self.members if of is None else of)
            self._changed = of is not None
            for member in self._busy.values():
                if member.failed is not None:  # it was said before, and is again
                    self._changed, member.asked = True, 0
                    return [(member, member.failed)]
        busy, links = self._busy, self._links
        while busy:
            if self.central is not None:  # with no event in hand, which an error would lose
                links = self._act(self.central, [*busy.values()])
            patience = min(_LOOK_SECONDS, max(0.0, until - time.monotonic()))
            with admitted() if during is None else during:
                ready = self.transport.ready(links, patience)
            says = [busy[link] for link in ready if link in busy]
            heard = [self._heard(member) for member in sorted(says, key=_BY_INDEX)]
            events = [event for event in heard if event is not None]
            if not ready or time.monotonic() >= self._look_at:  # of a thousand that takes a while
                self._look_at = time.monotonic() + _LOOK_SECONDS
                every = self._supervision.step_timeout is not None  # else those that start
                silent = [
                    member
                    for link, member in busy.items()
                    if (every or not member.ready) and link not in ready
                ]
                events += [(member, self._hung(member)) for member in silent if self._hangs(member)]
            if events or time.monotonic() >= until:
                return events
        return []

    def _listen(self, members: Sequence[Member]) -> None:
        """Listen to those of some members that owe answers."""
        self._busy = {member.link: member for member in members if member.asked}
        self._links = [*self._busy]

    def all_do(self, message: object, during: AbstractContextManager[None]) -> bool:
        """Ask all the same, and hear all; what else may come up is left to :meth:`events`.

        That is so, and False is returned, once one failed or hangs.
        ``during``: what it waits in, if handlers of signals are deferred.
        """
        now, idle = time.monotonic(), True
        self._changed = True
        for member in self.members:
            if member.asked or member.failed is not None or self.central is not None:
                self.ask(member, message)
                idle = False
            else:
                member.since, member.asked = now, 1
                member.link.send(message)
        waiting = {member.link: member for member in self.members}
        links = [*waiting]  # one list throughout: the transport knows it
        while waiting and idle:
            if are_deferred():
                with during:
                    ready = self.transport.ready(links, _LOOK_SECONDS)
            else:
                ready = self.transport.ready(links, _LOOK_SECONDS)
            says = [waiting.pop(link) for link in ready if link in waiting]
            if len(says) > 1:
                says.sort(key=_BY_INDEX)
            for member in says:
                self._heard(member)
                if member.failed is not None:
                    member.asked = 1  # so that it is said again
                    return False
            if len(says) < len(ready):  # one that had answered is gone
                return False
            if not ready and any(map(self._hangs, waiting.values())):
                return False
        return idle

    def _act(self, central: CentralPolicy, busy: Sequence[Member]) -> list[Link]:
        """Act for members that wait, unless others are to come first; return links of the rest.

        While all settles, those that wait answer without another step.
        """
        waiting = [member for member in busy if member.wants is not None]
        if waiting and (self._settling or not central.in_step or len(waiting) == len(busy)):
            wanted = [member.wants for member in waiting if member.wants is not None]
            nothing = [m.NOTHING_CHOSEN] * len(waiting)
            chosen = nothing if self._settling else central.choose(wanted)
            for member, actions in zip(waiting, chosen, strict=True):
                member.wants, member.since = None, time.monotonic()
                member.link.send(actions)
        return [member.link for member in busy if member.wants is None]

    def _heard(self, member: Member) -> Event | None:
        """Hear a member; None: it wants actions, and will answer after that."""
        answer = member.link.hear()
        if isinstance(answer, Gone):
            self._changed = True
            _end(member)
            member.failed = failures.died(member, answer)
            return member, member.failed
        member.since = time.monotonic()
        if isinstance(answer, m.ActionRequest):
            member.wants = answer
            return None
        self._changed |= member.asked == 1
        member.asked -= 1
        if isinstance(answer, m.ExceptionReport):
            self._changed, member.asked = True, 0
            member.failed = failures.worker_error(member, answer)
            member.complete = answer.filled
            return member, member.failed
        member.state = getattr(answer, "state", None) or member.state
        return member, answer

    def _hangs(self, member: Member) -> bool:
        """Whether it made no progress for as long as it was given."""
        timeout = self._timeout(member)
        if timeout is None or member.wants is not None:
            return False
        now = time.monotonic()
        filled = member.board[FILLED], member.board[STEPPED]
        if filled != member.filled:
            member.filled, member.since = filled, now
        return now - member.since > timeout

    def _timeout(self, member: Member) -> float | None:
        limits = self._supervision
        return limits.step_timeout if member.ready else limits.start_seconds

    def _hung(self, member: Member) -> WorkerError:
        kills, self._changed = self.transport.kills, True
        if kills:
            _end(member)
        else:
            _leave(member)
        member.failed = error = failures.hung(member, self._timeout(member) or 0.0, kills)
        return error

    # --- ends and new beginnings ------------------------------------------------------------------

    def halt(self) -> None:
        """Let all end after the step under way. Safe in a signal handler."""
        for member in self.members:
            member.board[HALT] = STOP

    def pause(self) -> None:
        """Let all come to the end of the step under way. Safe in a signal handler."""
        for member in self.members:
            if not member.board[HALT]:
                member.board[HALT] = PAUSE

    def go_on(self) -> None:
        """Take :meth:`halt` and :meth:`pause` back."""
        for member in self.members:
            member.board[HALT] = 0

    def settle(self, *, patient: bool = False) -> list[Event]:
        """Halt, and hear all that were asked; one that does not answer soon is killed.

        ``patient``: they may take as long as for any step.
        """
        self.halt()
        heard: list[Event] = []
        until = time.monotonic() + _SETTLE_SECONDS
        self._settling = True
        try:
            while any(member.asked for member in self.members):
                limit = None if patient else max(0.0, until - time.monotonic())
                events = self.events(limit, during=None if patient else nullcontext())
                silent = [] if events else [member for member in self.members if member.asked]
                heard += events or [(member, self._hung(member)) for member in silent]
        finally:
            self._settling = False
        return heard

    def give_up(self, member: Member, why: Exception) -> None:
        """Wait no more for a worker; it counts as failed, and that is said once it is asked."""
        self._changed, member.asked, member.failed = True, 0, why

    def restart(self, member: Member) -> None:
        """Start another worker in the place of ``member``; its first answer is not heard yet."""
        self._changed = True
        _end(member)
        member.link = self.transport.start(member.index)
        member.asked, member.since = 1, time.monotonic()
        member.ended, member.ready, member.failed = False, False, None
        member.complete = None

    @property
    def is_closed(self) -> bool:
        """True once all workers were ended."""
        return not self._finalize.still_active()

    @property
    def has_stuck(self) -> bool:
        """True if a worker that cannot be killed is in a step that took too long."""
        hung = any(isinstance(member.failed, WorkerHung) for member in self.members)
        return hung and not self.transport.kills

    def close(self) -> None:
        """Let idle workers close their environments; end them all. Idempotent."""
        try:
            if self.is_closed or os.getpid() != self._owner:
                return
            idle = [member for member in self.members if not member.asked and not member.ended]
            for member in idle:
                member.link.send(m.Close())
            until = time.monotonic() + _CLOSE_SECONDS
            for member in idle:
                member.link.over(max(0.0, until - time.monotonic()))
        finally:
            self._finalize()


def _kill_all(members: list[Member]) -> None:
    for member in members:
        member.board[HALT] = STOP
        member.link.kill()
    for member in members:
        _end(member)


def _leave(member: Member) -> None:
    """Let a worker that cannot be ended stop after its step, which counts no more."""
    member.asked, member.wants = 0, None
    member.ended = True
    seen = [member.board[word] for word in range(BOARD_WORDS)]
    member.board[HALT] = STOP
    member.board = new_board()
    for word, value in enumerate(seen):
        member.board[word] = value
    member.link.kill()


def _end(member: Member) -> None:
    """End a worker, dead or not; only once."""
    member.asked, member.wants = 0, None
    member.ended = True
    member.link.end()
