"""Getting workers ready: environments, seeds, an agreed layout, memory; and getting new ones."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tallyroll.collector.batches.value_checks import Range
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import EnvironmentRefused, WorkerError, WorkerHung
from tallyroll.collector.slab.progress import FILLED
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.pool import Member, WorkerPool
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.transport import Place
from tallyroll.storage.rows.keys import spell


class WorkerStartup:
    """Leads workers from their start to their first step; a new one in the same way.

    Args:
        pool: workers that were started.
        respawns: how many workers may be replaced; 0: any that fails ends the run.
    """

    ledger: Ledger
    """Counts respawns, and has the seed of the run."""
    planned: m.Planned
    """The plan that the workers agreed on, when they were seeded."""
    ranges: Sequence[Range]
    """Values that any worker's environment may return."""
    _memory: tuple[Share, Place]

    def __init__(self, pool: WorkerPool, respawns: int) -> None:
        self._worker_pool = pool
        self._left = respawns
        self._limit = respawns
        self.apart: Sequence[str] = ()
        """Transforms that keep statistics of each worker's own lanes."""

    # --- all of them, once ------------------------------------------------------------------------

    def made(self) -> dict[str, Any]:
        """Hear that all environments stand, number their lanes, and return what they are."""
        answers: list[m.Made] = self._answers(self._worker_pool.hear)
        first = 0
        for member, answer in zip(self._worker_pool.members, answers, strict=True):
            member.lanes = range(first, first + answer.lanes)
            first += answer.lanes
        return answers[0].description

    @property
    def lanes(self) -> tuple[int, ...]:
        """Lanes of each worker."""
        return tuple(len(member.lanes) for member in self._worker_pool.members)

    def seed(self, seed: int, incarnation: int, asked: bool) -> list[int]:
        """Seed all lanes; returns their seeds, none where a system chooses some.

        ``asked``: somebody wants this very seed.

        Raises:
            EnvironmentRefused: the workers' environments or policies differ in their columns.
        """
        self._asked = asked
        pool = self._worker_pool
        for member in pool.members:
            pool.ask(member, self._seed(member, seed, incarnation))

        def made_and_seeded(member: Member) -> Any:
            self._hear_made(member)
            answer: m.Planned = pool.answer(member, self._seed(member, seed, incarnation))
            if hasattr(self, "_memory"):  # the run is seeded once more
                pool.answer(member, self._bind(member))
                member.ready = True
            return answer

        answers: list[m.Planned] = self._answers(made_and_seeded)
        for member, answer in zip(self._worker_pool.members, answers, strict=True):
            _require_same(answers[0], answer, member)
            member.seeds = answer.lane_seeds
        if len(answers) > 1:
            self.apart = sorted({name for answer in answers for name in answer.statistics})
        self.planned = replace(
            answers[0], drawn_ahead=all(answer.drawn_ahead for answer in answers)
        )
        self.ranges = _widest([answer.ranges for answer in answers])
        found = [seed for answer in answers for seed in answer.lane_seeds]
        return found if all(answer.lane_seeds for answer in answers) else []

    def _seed(self, member: Member, seed: int, incarnation: int) -> m.Seed:
        return m.Seed(seed, incarnation, member.lanes.start, member.index, self._asked)

    def bind(self, share: Share, place: Place) -> None:
        """Hand the memory to all."""
        self._memory = share, place
        for member in self._worker_pool.members:
            self._worker_pool.ask(member, self._bind(member))
        bound = self._answers(self._make_ready)
        self.decisions = bound[0].decisions
        for member in self._worker_pool.members:
            member.ready = True

    def _bind(self, member: Member) -> m.Bind:
        share, place = self._memory
        member.board, member.actions = place.board(member.index), place.actions(member.index)
        return m.Bind(share, member.index)

    def load(self, states: Sequence[bytes | None]) -> None:
        """Hand states to the environments' transforms, over again where they are fewer."""
        for member in self._worker_pool.members:
            state = states[member.index % len(states)] if states else None
            if state is not None:
                self._worker_pool.answer(member, m.Load(state))
                member.state = state

    def _answers(self, lead: Callable[[Member], Any]) -> list[Any]:
        """The answers of all members that were asked, in their order.

        ``lead`` brings one that was started in the place of another this far, and returns its
        answer.

        Raises:
            WorkerError: of a worker that may not be replaced.
        """
        found: dict[int, Any] = {}
        try:
            while len(found) < len(self._worker_pool.members):
                for member, answer in self._worker_pool.events():
                    if isinstance(answer, Exception):
                        answer = self._started_again(member, answer, lead)
                    found[member.index] = answer
        except BaseException:
            self._worker_pool.settle()
            raise
        return [found[index] for index in range(len(self._worker_pool.members))]

    def _started_again(
        self, member: Member, error: Exception, lead: Callable[[Member], Any]
    ) -> Any:
        """Its seeds are those of the worker that failed: no transition was made of them."""
        while True:
            failed = self.allowed(error)
            self._left -= 1
            warnings.warn(
                "a worker failed before it was ready, and is replaced: "
                f"{str(failed).splitlines()[0]}",
                stacklevel=2,
            )
            try:
                self._worker_pool.restart(member)
                return lead(member)
            except WorkerError as again:
                error = again

    # --- one in the place of another --------------------------------------------------------------

    def allowed(self, error: Exception) -> WorkerError:
        """``error``, if the worker that failed with it may be replaced; else it is raised."""
        if not isinstance(error, WorkerError) or not self._limit:
            raise error
        if isinstance(error, WorkerHung) and not self._worker_pool.transport.kills:
            raise error  # it is still there
        if not self._left:
            error.add_note(
                f"tallyroll: max_respawns={self._limit} workers were replaced before this one"
            )
            raise error
        return error

    def replace(self, member: Member, error: WorkerError, begin_at: int | None) -> None:
        """Put a new worker, its lanes with seeds of their own, in the place of ``member``.

        ``begin_at``: the slot at which its lanes begin; None leaves that to a lease.
        """
        while True:
            self.allowed(error)
            self._left -= 1
            self.ledger.respawned += 1
            self.ledger.incarnation += 1
            try:
                self._worker_pool.restart(member)
                self._make_ready(member)
                if begin_at is not None:
                    member.board[FILLED] = begin_at
                    self._worker_pool.answer(member, m.Begin(False))
                return
            except WorkerError as again:
                error = again

    def _make_ready(self, member: Member) -> m.Bound:
        assert self.ledger.seed is not None
        pool, state = self._worker_pool, member.state
        self._hear_made(member)
        seed = self._seed(member, self.ledger.seed, self.ledger.incarnation)
        planned: m.Planned = pool.answer(member, seed)
        _require_same(self.planned, planned, member)
        member.seeds = planned.lane_seeds
        if state is not None:
            pool.answer(member, m.Load(state))
            member.state = state
        bound: m.Bound = pool.answer(member, self._bind(member))
        member.ready = True
        return bound

    def _hear_made(self, member: Member) -> None:
        made: m.Made = self._worker_pool.hear(member)
        if made.lanes != len(member.lanes):
            raise EnvironmentRefused(
                f"{member.who} had {len(member.lanes)} lanes, and its factory made {made.lanes} "
                "when it was started again; let it make the same each time"
            )


def _require_same(first: m.Planned, other: m.Planned, member: Member) -> None:
    """Raise unless a worker's columns and actions are those of the first."""
    wanted, got = first.plan, other.plan
    if got != wanted or list(got.layout) != list(wanted.layout):
        differing = [
            f"{spell(key)} is {got.layout.get(key)} and not {wanted.layout.get(key)}"
            for key in {*wanted.layout, *got.layout}
            if wanted.layout.get(key) != got.layout.get(key)
        ]
        said = "; ".join(sorted(differing))
        raise EnvironmentRefused(
            f"{member.who}: its columns differ from those of worker 0: "
            f"{said or 'environments of another kind, or in another autoreset mode'}; make the "
            "same environment in every worker"
        )
    for key, spec in first.actions.items():
        if other.actions[key] != spec:
            one, two = (" ".join(str(each).split()) for each in (spec, other.actions[key]))
            raise EnvironmentRefused(
                f"{member.who}: its action space differs from that of worker 0: {spell(key)} is "
                f"{two} and not {one}; make the same environment in every worker"
            )


def _widest(found: Sequence[Sequence[Range]]) -> list[Range]:
    """Ranges that hold what any worker's environment may return."""
    merged: dict[Any, Range] = {}
    for ranges in found:
        for each in ranges:
            merged[each.key] = merged[each.key].or_(each) if each.key in merged else each
    everywhere = [{each.key for each in ranges} for ranges in found]
    return [each for key, each in merged.items() if all(key in keys for keys in everywhere)]
