"""Workers that get ready in the place of others, fed by events of the pool."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.pool import WorkerPool

Lead = Generator[object, Any, Any]
"""The way of one worker: yields questions, is sent their answers, first that to its start."""


@dataclass(frozen=True)
class _Coming:
    """A worker that gets ready in the place of one that failed."""

    why: Exception
    """The failure of the one before it."""
    lead: Lead
    done: Callable[[Any], object]
    """Is called with what ``lead`` returns."""
    again: Callable[[Exception], None]
    """Starts another one, where this one fails too, or raises."""


class Replacements:
    """A state machine for each worker that gets ready in the place of another.

    None is waited for while others have something to say.

    Args:
        pool: all workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._worker_pool = pool
        self._coming: dict[int, _Coming] = {}
        """Workers that get ready, by their index."""

    def start(
        self,
        member: Member,
        why: Exception,
        lead: Lead,
        done: Callable[[Any], object],
        again: Callable[[Exception], None],
    ) -> None:
        """Start a worker in the place of ``member``, which failed, and lead it from then on.

        Args:
            member: whose place it is.
            why: the failure.
            lead: the way of the new one.
            done: is called with what ``lead`` returns.
            again: starts another one, where this one fails too, or raises.
        """
        self._coming.pop(member.index, None)
        next(lead)  # until it waits for what the worker says first
        self._worker_pool.restart(member)
        self._coming[member.index] = _Coming(why, lead, done, again)

    @property
    def under_way(self) -> bool:
        """Some workers get ready in the place of others."""
        return bool(self._coming)

    def leads(self, member: Member) -> bool:
        """``member`` is one of them."""
        return member.index in self._coming

    def hears(self, member: Member, answer: Any) -> bool:
        """Whether a worker that gets ready said this; leads it on.

        Raises:
            WorkerError: it failed, and may not be replaced.
            EnvironmentRefused: it differs from the one in whose place it is.
        """
        coming = self._coming.get(member.index)
        if coming is None:
            return False
        if isinstance(answer, Exception):
            del self._coming[member.index]
            coming.again(answer)
        else:
            self._lead_on(member, coming, answer)
        return True

    def _lead_on(self, member: Member, coming: _Coming, answer: Any) -> None:
        try:
            self._worker_pool.ask(member, coming.lead.send(answer))
        except StopIteration as end:
            del self._coming[member.index]
            coming.done(end.value)
        except BaseException:
            del self._coming[member.index]
            raise

    def hears_settled(self, member: Member, answer: Any) -> None:
        """Hear an answer where all is halted: a worker that failed is left until it is asked."""
        if isinstance(answer, Exception):
            self._coming.pop(member.index, None)
        else:
            self.hears(member, answer)

    def give_up(self) -> None:
        """Leave workers that get ready: they count as failed, and are replaced when asked again."""
        for member in self._worker_pool.members:
            if coming := self._coming.pop(member.index, None):
                self._worker_pool.give_up(member, coming.why)

    def finish(self) -> None:
        """Wait until all workers are ready.

        Raises:
            WorkerError, EnvironmentRefused: as of :meth:`hears`.
        """
        pool = self._worker_pool
        while self._coming:
            coming = [member for member in pool.members if member.index in self._coming]
            for member, answer in pool.events(of=coming):
                self.hears(member, answer)
