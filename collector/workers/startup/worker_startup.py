"""Startup of workers, and of their replacements.

A worker gets ready in steps: environment, seeds, a layout that all agree on, and memory.
"""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cloudpickle

from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.envs.calls.serialization import Calls, outcome_of, packed, require_repeated
from tallyroll.collector.envs.setup.make import CLASSES
from tallyroll.collector.envs.setup.spaces import joined
from tallyroll.collector.errors import EnvironmentRefused, StateError, WorkerError, WorkerHung
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.slab.progress import FILLED
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.pool import WorkerPool
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.transport import Place
from tallyroll.storage.rows.keys import format_key

Lead = Generator[object, Any, Any]
"""Startup procedure of one worker: yields questions and receives answers.

The first answer that it receives is the answer to the start of the worker.
"""


@dataclass(frozen=True)
class _Replacement:
    """A worker that is getting ready to replace one that failed."""

    why: Exception
    """Failure of the previous worker."""
    lead: Lead
    done: Callable[[Any], object]
    """Callback with the result of ``lead``."""
    again: Callable[[Exception], None]
    """Callback that starts another worker if this one fails too. It may raise instead."""


class Replacements:
    """Advances the startup of each replacement worker, by one answer at a time.

    No replacement blocks the answers of other workers.

    Args:
        pool: all workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._worker_pool = pool
        self._coming: dict[int, _Replacement] = {}
        """Workers that get ready, by their index."""

    def start(
        self,
        member: Member,
        why: Exception,
        lead: Lead,
        done: Callable[[Any], object],
        again: Callable[[Exception], None],
    ) -> None:
        """Start a worker to replace ``member``, which failed, and run its startup procedure.

        Args:
            member: the worker to replace.
            why: the failure of the worker.
            lead: the startup procedure of the new worker.
            done: callback with the result of ``lead``.
            again: callback that starts another worker if this one fails too. It may raise instead.
        """
        self._coming.pop(member.index, None)
        next(lead)  # advance it to the first answer of the worker
        self._worker_pool.restart(member)
        self._coming[member.index] = _Replacement(why, lead, done, again)

    @property
    def under_way(self) -> bool:
        """True if replacements are getting ready."""
        return bool(self._coming)

    def leads(self, member: Member) -> bool:
        """Return True if ``member`` is a replacement that is getting ready."""
        return member.index in self._coming

    def handle(self, member: Member, answer: Any) -> bool:
        """Handle an answer of a replacement that is getting ready; return False for other workers.

        Raises:
            WorkerError: the replacement failed, and may not be replaced.
            EnvironmentRefused: the worker differs from the one that it replaces.
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

    def _lead_on(self, member: Member, coming: _Replacement, answer: Any) -> None:
        try:
            self._worker_pool.ask(member, coming.lead.send(answer))
        except StopIteration as end:
            del self._coming[member.index]
            coming.done(end.value)
        except BaseException:
            del self._coming[member.index]
            raise

    def handle_settled(self, member: Member, answer: Any) -> None:
        """Handle an answer while all workers are halted.

        A worker that failed is handled when it is asked again.
        """
        if isinstance(answer, Exception):
            self._coming.pop(member.index, None)
        else:
            self.handle(member, answer)

    def give_up(self) -> None:
        """Abandon replacements that are getting ready.

        They count as failed, and are replaced when asked again.
        """
        for member in self._worker_pool.members:
            if coming := self._coming.pop(member.index, None):
                self._worker_pool.give_up(member, coming.why)

    def finish(self) -> None:
        """Wait until all replacements are ready.

        Raises:
            WorkerError, EnvironmentRefused: see :meth:`handle`.
        """
        pool = self._worker_pool
        while self._coming:
            coming = [member for member in pool.members if member.index in self._coming]
            for member, answer in pool.events(of=coming):
                self.handle(member, answer)


_ENDED = (
    "the workers ended, because the collector was shut down or an exception ended its run. Make "
    "another collector."
)


class WorkerStartup:
    """Runs the startup of workers and of their replacements, up to the first step.

    Args:
        pool: the started workers.
        respawns: maximum number of replacements. With 0, any failure ends the run.
        part: the shard whose lanes the workers have; None if they have all lanes of the run.
    """

    ledger: Ledger
    """The ledger, which counts respawns and has the seed of the run."""
    planned: m.SlabRequest
    """The plan that the workers agreed on, when they were seeded."""
    ranges: Sequence[Range]
    """Ranges of the values that any worker's environment may return."""
    _memory: tuple[Share, Place]

    def __init__(self, pool: WorkerPool, respawns: int, part: ShardOfRun | None = None) -> None:
        self._worker_pool, self._part = pool, part
        self._left = respawns
        self._limit = respawns
        self.replacements = Replacements(pool)
        self._calls = Calls()
        self.apart: Sequence[str] = ()
        """Transforms that keep statistics of each worker's own lanes."""

    # --- startup of all workers -------------------------------------------------------------------

    def made(self) -> dict[str, Any]:
        """Wait for all environments, number their lanes, and return their description."""
        answers: list[m.EnvReady] = self._answers(_first_answer)
        first, before = 0, 0 if self._part is None else self._part.lanes.start
        for member, answer in zip(self._worker_pool.members, answers, strict=True):
            member.number_lanes(first, answer.lanes, before)
            first += answer.lanes
        classes = {name for each in answers for name in each.description.get(CLASSES, ())}
        return answers[0].description | {CLASSES: sorted(classes)}

    def count_in(self, ledger: Ledger) -> None:
        """Count respawns in ``ledger``, which also has the seed of the run."""
        self.ledger = ledger

    @property
    def lanes(self) -> tuple[int, ...]:
        """Number of lanes of each worker."""
        return tuple(len(member.lanes) for member in self._worker_pool.members)

    def seed(self, seed: int, incarnation: int, asked: bool) -> list[int]:
        """Seed all lanes; return their seeds, or an empty list if an environment chooses some.

        ``asked`` is True if a caller requested exactly this seed.

        Raises:
            EnvironmentRefused: the workers' environments or policies differ in their columns.
        """
        pool = self._worker_pool
        if pool.is_closed:
            failed = (member.failed for member in pool.members if member.failed is not None)
            raise next(failed, StateError(f"set_seed: {_ENDED}"))
        self._asked = asked
        self.replacements.finish()
        for member in pool.members:
            pool.ask(member, self._seed(member, seed, incarnation))

        def made_and_seeded(member: Member) -> Lead:
            yield from self._getting_made(member)
            answer = yield self._seed(member, seed, incarnation)
            if hasattr(self, "_memory"):  # the run is seeded again
                yield self._bind(member)
                member.mark_ready()
            return answer

        answers: list[m.SlabRequest] = self._answers(made_and_seeded)
        for member, answer in zip(self._worker_pool.members, answers, strict=True):
            _require_same(answers[0], answer, member)
            member.record_seeds(answer.lane_seeds)
        if len(answers) > 1:
            self.apart = sorted({name for answer in answers for name in answer.statistics})
        first, spaces = answers[0], joined([answer.plan.spaces for answer in answers], self.lanes)
        self.planned = replace(
            first,
            plan=replace(first.plan, spaces=spaces),
            drawn_ahead=all(answer.drawn_ahead for answer in answers),
        )
        self.ranges = _widest([answer.ranges for answer in answers], self.lanes)
        found = [seed for answer in answers for seed in answer.lane_seeds]
        return found if all(answer.lane_seeds for answer in answers) else []

    def _seed(self, member: Member, seed: int, incarnation: int) -> m.Seed:
        first, part = member.lanes.start, self._part
        run_lanes = sum(self.lanes) if part is None else part.run_lanes
        # The number differs between all workers of all shards, so that no two draw the same values.
        worker = member.index + (0 if part is None else part.lanes.start)
        return m.Seed(seed, incarnation, first, run_lanes, worker, self._asked)

    def bind(self, share: Share, place: Place) -> None:
        """Send the memory to all workers."""
        self._memory = share, place
        for member in self._worker_pool.members:
            self._worker_pool.ask(member, self._bind(member))
        bound = self._answers(self._make_ready)
        self.decisions = bound[0].decisions
        for member in self._worker_pool.members:
            member.mark_ready()

    def _bind(self, member: Member) -> m.Bind:
        share, place = self._memory
        member.bind(place.board(member.index), place.actions(member.index))
        return m.Bind(share, member.index)

    def state(self) -> Any:
        """Return the state of each worker's environment; None for environments without state."""
        states = [member.state for member in self._worker_pool.members]
        return [None if each is None else cloudpickle.loads(each) for each in states]

    def load(self, state: Any) -> None:
        """Send states to the environments' transforms; if there are too few, cycle through them."""
        given = state if isinstance(state, list) else [state]
        states = [cloudpickle.dumps(each) if each else None for each in given]
        self.replacements.finish()
        for member in self._worker_pool.members if states else ():
            state = states[member.index % len(states)]
            if state is not None:
                self._worker_pool.ask(member, m.Load(state))
                member.record_state(state)
        try:
            while any(member.asked for member in self._worker_pool.members):
                for _, answer in self._worker_pool.events():
                    if isinstance(answer, Exception):
                        raise answer
        except BaseException:
            self._worker_pool.settle()
            raise

    def ask_all(self, question: object) -> list[Any]:
        """Send a question to all workers once their environments exist; return their answers."""
        for member in self._worker_pool.members:
            self._worker_pool.ask(member, question)

        def seed_question(member: Member) -> Lead:
            yield from self._getting_made(member)
            return (yield question)

        return self._answers(seed_question)

    def reach(self, asked: EnvCall, lanes: Sequence[int]) -> list[CallOutcome]:
        """Call lanes' environments; see `Environments`. If a worker fails, so do its lanes."""
        pool = self._worker_pool
        if pool.is_closed:
            raise StateError(f"{asked}: {_ENDED}")
        self.replacements.finish()
        found, parts = [CallOutcome()] * len(lanes), {}
        for member in pool.members:
            places = [at for at, lane in enumerate(lanes) if lane in member.lanes]
            parts[member.index] = places, [lanes[at] - member.lanes.start for at in places]
        sent = {index: packed(asked.of(at), own) for index, (at, own) in parts.items() if at}
        for index, content in sent.items():
            pool.ask(pool.members[index], m.CallRequest(content))
        try:
            while any(member.asked for member in pool.members):
                for member, answer in pool.events(during=nullcontext()):
                    places, _ = parts[member.index]
                    outcomes = [CallOutcome(None, answer)] * len(places)
                    if isinstance(answer, m.CallReply):
                        outcomes = [outcome_of(each) for each in answer.answers]
                    for at, outcome in zip(places, outcomes, strict=True):
                        found[at] = outcome
        except BaseException:
            pool.settle()
            raise
        if asked.way != "env_get":
            self._calls.note(asked, lanes, found)
        return found

    def _answers(self, lead: Callable[[Member], Lead]) -> list[Any]:
        """Return the answers of all workers that were asked, in the order of workers.

        ``lead`` is the startup procedure of a replacement, up to and including this question. It
        returns the answer.

        Raises:
            WorkerError: a worker failed that may not be replaced.
        """
        found: dict[int, Any] = {}
        try:
            while len(found) < len(self._worker_pool.members):
                for member, answer in self._worker_pool.events():
                    if self.replacements.handle(member, answer):
                        continue
                    if isinstance(answer, Exception):
                        self._start_again(member, lead, found, answer)
                    else:
                        found[member.index] = answer
        except BaseException:
            self.replacements.give_up()
            self._worker_pool.settle()
            raise
        return [found[index] for index in range(len(self._worker_pool.members))]

    def _start_again(
        self,
        member: Member,
        lead: Callable[[Member], Lead],
        found: dict[int, Any],
        error: Exception,
    ) -> None:
        """Replace a worker that failed before the run.

        The replacement has the same seeds, because no transition was made from them.
        """
        failed = self.allowed(error)
        self._left -= 1
        warnings.warn(
            f"a worker failed before it was ready, and is replaced: {str(failed).splitlines()[0]}",
            stacklevel=2,
        )
        self.replacements.start(
            member,
            failed,
            lead(member),
            done=partial(found.__setitem__, member.index),
            again=partial(self._start_again, member, lead, found),
        )

    # --- replacements -----------------------------------------------------------------------------

    def allowed(self, error: Exception) -> WorkerError:
        """Return ``error`` if the worker that failed may be replaced; otherwise raise it."""
        if not isinstance(error, WorkerError) or not self._limit:
            raise error
        if isinstance(error, WorkerHung) and not self._worker_pool.transport.kills:
            raise error  # the worker still runs
        if not self._left:
            error.add_note(
                f"tallyroll: max_respawns={self._limit} workers were replaced before this one"
            )
            raise error
        return error

    def replace(self, member: Member, error: Exception, begin_at: int | None) -> None:
        """Start a worker to replace ``member``. Its lanes get new seeds.

        The new worker is ready after `Replacements.handle` was called with all of its answers, or
        after `Replacements.finish`. ``begin_at`` is the slot at which its lanes begin; None if a
        lease sets it.
        """
        self.allowed(error)
        self._left -= 1
        self.ledger.count_respawn()
        self.replacements.start(
            member,
            error,
            self._beginning(member, begin_at, self.ledger.incarnation),
            done=_nothing,
            again=partial(self.replace, member, begin_at=begin_at),
        )

    def _beginning(self, member: Member, begin_at: int | None, incarnation: int) -> Lead:
        yield from self._getting_ready(member, incarnation)
        if begin_at is not None:
            member.board[FILLED] = begin_at
            yield m.Begin(False)

    def _make_ready(self, member: Member) -> Lead:
        return (yield from self._getting_ready(member, self.ledger.incarnation))

    def _getting_ready(self, member: Member, incarnation: int) -> Lead:
        assert self.ledger.seed is not None
        state = member.state
        yield from self._getting_made(member)
        planned: m.SlabRequest = yield self._seed(member, self.ledger.seed, incarnation)
        _require_same(self.planned, planned, member)
        member.record_seeds(planned.lane_seeds)
        if state is not None:
            yield m.Load(state)
            member.record_state(state)
        bound = yield self._bind(member)
        member.mark_ready()
        return bound

    def _getting_made(self, member: Member) -> Lead:
        """Wait for a worker's environment, and repeat the earlier calls of its lanes."""
        self._check_made(member, (yield None))
        for asked, lanes in self._calls.of(member.lanes):
            reached = yield m.CallRequest(packed(asked, lanes))
            require_repeated(asked, member.who, map(outcome_of, reached.answers))

    def _check_made(self, member: Member, made: m.EnvReady) -> None:
        if made.lanes != len(member.lanes):
            raise EnvironmentRefused(
                f"{member.who} had {len(member.lanes)} lanes, but its factory made {made.lanes} "
                "after a restart. Make the factory return the same environment each time."
            )


def _first_answer(member: Member) -> Lead:
    return (yield None)


def _nothing(answer: Any) -> None:
    """Do nothing when a replacement is ready."""


def _require_same(first: m.SlabRequest, other: m.SlabRequest, member: Member) -> None:
    """Raise an error unless a worker's columns and actions equal those of the first worker."""
    wanted, got = first.plan, other.plan
    if got != wanted or list(got.layout) != list(wanted.layout):
        differing = [
            f"{format_key(key)} is {got.layout.get(key)} and not {wanted.layout.get(key)}"
            for key in {*wanted.layout, *got.layout}
            if wanted.layout.get(key) != got.layout.get(key)
        ]
        said = "; ".join(sorted(differing))
        raise EnvironmentRefused(
            f"{member.who}: its columns differ from those of worker 0: "
            f"{said or 'environments of another kind, or in another autoreset mode'}. Make the "
            "same environment in every worker."
        )
    for key, spec in first.actions.items():
        if other.actions[key] != spec:
            one, two = (" ".join(str(each).split()) for each in (spec, other.actions[key]))
            raise EnvironmentRefused(
                f"{member.who}: its action space differs from that of worker 0: {format_key(key)} "
                f"is {two} and not {one}. Make the same environment in every worker."
            )


def _widest(found: Sequence[Sequence[Range]], lanes: Sequence[int]) -> list[Range]:
    """Merge the ranges of all workers. If a worker has a key's range by lane, so has the result."""
    merged: dict[Any, Range] = {}
    by_lane = {each.key for ranges in found for each in ranges if each.first_lane is not None}
    for ranges, count in zip(found, lanes, strict=True):
        for each in ranges:
            known, own = merged.get(each.key), each
            if each.key in by_lane:
                own = each.repeated(count)
                merged[each.key] = own if known is None else known.joined(own)
            else:
                merged[each.key] = own if known is None else known.or_(own)
    everywhere = [{each.key for each in ranges} for ranges in found]
    return [each for key, each in merged.items() if all(key in keys for keys in everywhere)]
