"""The pool of workers in the parent: sends questions, waits for answers, detects failures."""

import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.util import Finalize
from operator import attrgetter
from typing import Any

from tallyroll.collector.errors import WorkerHung
from tallyroll.collector.interrupts import allow_signals, signals_are_deferred
from tallyroll.collector.slab.progress import HALT, PAUSE, STOP
from tallyroll.collector.workers import failures
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.central import CentralPolicy
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.transport import Gone, Link, Transport
from tallyroll.collector.workers.worker_options import Supervision

_LOOK_SECONDS = 0.25
"""Seconds between checks of the workers' progress while no message arrives."""
_CLOSE_SECONDS = 2.0
"""Seconds that a worker may take to close its environment."""
_SETTLE_SECONDS = 1.0
"""Seconds that a worker may take to finish the step in progress when the run ends."""
_BY_INDEX = attrgetter("index")


Event = tuple[Member, Any]
"""A member, and its answer or the exception that explains why no answer will come."""


class WorkerPool:
    """Starts workers, sends them questions, and receives their answers or detects their end.

    No method waits without a limit: the transport detects that a worker ended, and the boards that
    workers write show their steps. If this process ends for any reason, its workers end with it.

    Args:
        transport: the mechanism that runs the workers.
        workers: the number of workers.
        supervision: the time limits of workers.
    """

    def __init__(self, transport: Transport[Any], workers: int, supervision: Supervision) -> None:
        self.transport, self._supervision = transport, supervision
        self.members: list[Member] = []
        self._owner = os.getpid()
        self._look_at = 0.0
        self._busy: dict[Any, Member] = {}
        """Members that owe answers, by their links."""
        self._links: list[Any] = []
        """Keys of `_busy`: the same list object until they change, which a transport recognizes."""
        self._changed = True
        """True if `_busy` and `_links` may be out of date."""
        self.central: CentralPolicy | None = None
        """Policy that acts for workers that request actions; None if each acts for itself."""
        self._settling = False
        # Called by `close`, or at the interpreter's exit before multiprocessing waits for children.
        self._finalize = Finalize(self, _kill_all, (self.members,), exitpriority=100)
        try:
            for index in range(workers):
                link = transport.start(index)
                # Starting the worker already asks for its first answer.
                self.members.append(Member(index, link, asked=1, since=time.monotonic()))
        except BaseException:
            self._finalize()
            raise

    # --- questions and answers --------------------------------------------------------------------

    def set_central_policy(self, central: CentralPolicy) -> None:
        """Let ``central``, in this process, choose the actions of all workers."""
        self.central = central

    def ask(self, member: Member, message: object) -> None:
        """Send a question; :meth:`events` reports a worker that is dead."""
        if not member.asked:
            self._changed = True
        member.ask(message)

    def events(
        self,
        limit: float | None = None,
        of: Sequence[Member] | None = None,
        *,
        during: AbstractContextManager[None] | None = None,
    ) -> list[Event]:
        """Return the next events of members that were asked; wait for at least one.

        Args:
            limit: seconds after which an empty list is returned if there was no event.
            of: the members to listen to; None selects all.
            during: the context of the wait. None selects one in which signal handlers may raise.
        """
        until = math.inf if limit is None else time.monotonic() + limit
        if self._changed or of is not None:
            self._listen(self.members if of is None else of)
            self._changed = of is not None
            for member in self._busy.values():
                if (failure := member.take_failure()) is not None:  # report it again
                    self._changed = True
                    return [(member, failure)]
        busy, links = self._busy, self._links
        while busy:
            if self.central is not None:  # no event is pending here that an error would lose
                links = self._act(self.central, [*busy.values()])
            patience = min(_LOOK_SECONDS, max(0.0, until - time.monotonic()))
            with allow_signals() if during is None else during:
                ready = self.transport.ready(links, patience)
            says = [busy[link] for link in ready if link in busy]
            heard = [self._receive(member) for member in sorted(says, key=_BY_INDEX)]
            events = [event for event in heard if event is not None]
            # Not in every iteration, because the check of a thousand workers takes a while.
            if not ready or time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _LOOK_SECONDS
                # Without a step timeout only workers that start are checked.
                every = self._supervision.step_timeout is not None
                silent = [
                    member
                    for link, member in busy.items()
                    if (every or not member.ready) and link not in ready
                ]
                events += [self._hung(member) for member in silent if self._hangs(member)]
            if events or time.monotonic() >= until:
                return events
        return []

    def _listen(self, members: Sequence[Member]) -> None:
        """Rebuild the table of those members that owe answers."""
        self._busy = {member.link: member for member in members if member.asked}
        self._links = [*self._busy]

    def broadcast(self, message: object, during: AbstractContextManager[None]) -> bool:
        """Send one message to all members, and receive all answers; return True if all answered.

        If a member owes an answer already, fails or hangs, return False; :meth:`events` then
        handles the answers that are left. ``during`` is the context of the wait if signal handlers
        are deferred.
        """
        idle = self._changed = True
        for member in self.members:
            if member.asked or member.failed is not None or self.central is not None:
                self.ask(member, message)
                idle = False
            else:
                member.ask(message)
        waiting = {member.link: member for member in self.members}
        links = [*waiting]  # one list throughout, which the transport recognizes
        while waiting and idle:
            if signals_are_deferred():
                with during:
                    ready = self.transport.ready(links, _LOOK_SECONDS)
            else:
                ready = self.transport.ready(links, _LOOK_SECONDS)
            says = [waiting.pop(link) for link in ready if link in waiting]
            if len(says) > 1:
                says.sort(key=_BY_INDEX)
            for member in says:
                self._receive(member)
                if member.failed is not None:
                    member.postpone_failure()  # until `events` is called
                    return False
            if len(says) < len(ready):  # a member that had answered is gone
                return False
            if not ready and any(map(self._hangs, waiting.values())):
                return False
        return idle

    def _act(self, central: CentralPolicy, busy: Sequence[Member]) -> list[Link]:
        """Act for members that wait for actions; return the links of the other members.

        If ``central.in_step`` is True, no member gets actions until all busy members wait. During
        :meth:`settle`, waiting members get none, and answer their question without another step.
        """
        waiting = [member for member in busy if member.wants is not None]
        if waiting and (self._settling or not central.in_step or len(waiting) == len(busy)):
            wanted = [member.wants for member in waiting if member.wants is not None]
            nothing = [m.NOTHING_CHOSEN] * len(waiting)
            chosen = nothing if self._settling else central.choose(wanted)
            for member, actions in zip(waiting, chosen, strict=True):
                member.act(actions)
        return [member.link for member in busy if member.wants is None]

    def _receive(self, member: Member) -> Event | None:
        """Receive a member's message; return None if it is a request for actions."""
        answer = member.receive()
        if isinstance(answer, Gone):
            self._changed = True
            member.end()
            return self._failure(member, failures.died(member, answer))
        if isinstance(answer, m.ActionRequest):
            return None
        self._changed |= not member.asked
        if isinstance(answer, m.ExceptionReport):
            error = failures.worker_error(member, answer)
            return self._failure(member, error, answer.filled)
        return member, answer

    def _failure(
        self, member: Member, error: Exception, complete: m.LeaseResult | None = None
    ) -> Event:
        """Mark a worker as failed, and return that event."""
        self._changed = True
        member.fail(error, complete)
        return member, error

    def _hangs(self, member: Member) -> bool:
        """Return True if the member made no progress within its time limit."""
        timeout = self._timeout(member)
        if timeout is None or member.wants is not None:
            return False
        return member.idle_seconds() > timeout

    def _timeout(self, member: Member) -> float | None:
        limits = self._supervision
        return limits.step_timeout if member.ready else limits.start_seconds

    def _hung(self, member: Member) -> Event:
        kills, self._changed = self.transport.kills, True
        if kills:
            member.end()
        else:
            member.abandon()
        return self._failure(member, failures.hung(member, self._timeout(member) or 0.0, kills))

    # --- stopping and restarting ------------------------------------------------------------------

    def halt(self) -> None:
        """Ask all workers to end after the step in progress. Safe in a signal handler."""
        for member in self.members:
            member.board[HALT] = STOP

    def pause(self) -> None:
        """Ask all workers to pause after the step in progress. Safe in a signal handler."""
        for member in self.members:
            if not member.board[HALT]:
                member.board[HALT] = PAUSE

    def go_on(self) -> None:
        """Cancel :meth:`halt` and :meth:`pause`."""
        for member in self.members:
            member.board[HALT] = 0

    def settle(self, *, patient: bool = False) -> list[Event]:
        """Halt all workers, and receive the answers that they owe.

        Workers that do not answer soon are killed.
        If ``patient`` is True, they may take as long as for any other step.
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
                heard += events or [self._hung(member) for member in silent]
        finally:
            self._settling = False
        return heard

    def give_up(self, member: Member, why: Exception) -> None:
        """Stop waiting for a worker and mark it as failed.

        :meth:`events` reports ``why`` once the worker is asked again.
        """
        self._failure(member, why)

    def restart(self, member: Member) -> None:
        """Start another worker to replace ``member``, without waiting for its first answer."""
        self._changed = True
        member.end()
        member.restart(self.transport.start(member.index))

    @property
    def is_closed(self) -> bool:
        """True if all workers were ended."""
        return not self._finalize.still_active()

    @property
    def has_stuck(self) -> bool:
        """True if a worker that cannot be killed is still in a step that timed out."""
        hung = any(isinstance(member.failed, WorkerHung) for member in self.members)
        return hung and not self.transport.kills

    def close(self) -> None:
        """Let idle workers close their environments, then end all workers. Idempotent."""
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
        member.end()
