"""Calls of environments between batches."""

from collections.abc import Sequence
from copy import deepcopy
from operator import index
from typing import Any

from tallyroll.collector.batches.collect_guard import CollectGuard
from tallyroll.collector.batches.state.events import event_of
from tallyroll.collector.batches.state.run_setup import RunSetup
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall, Way
from tallyroll.collector.errors import (
    ArgumentError,
    CollectorError,
    EnvCallError,
    EnvironmentRefused,
    WorkerError,
)
from tallyroll.collector.rollout.source import PendingTransitions, TransitionSource

_OURS = {
    "reset": "set_seed() starts new episodes, and reset_at_each_iter=True does in each batch",
    "step": "iterate, or call collect(n)",
    "close": "shutdown() closes what was made here",
}
"""Methods that would drive an environment without its collector, and the alternative."""
_SHOWN = 16


class EnvCalls:
    """Calls of a collector's environments, which do not step between batches."""

    _beginning: RunSetup
    _run: RunState
    _rollout: TransitionSource
    _guard: CollectGuard
    _own_lanes: range

    def env_call(
        self, name: str, /, *args: Any, lanes: Sequence[int] | int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of each lane's own environment, between batches; return what they return.

        In a wrapped environment the outermost wrapper that has the method is called, as by
        Gymnasium's ``get_wrapper_attr``. All lanes are called, even if some raise.

        The call comes between two steps of each lane, in workers too: with ``mode="async"`` it
        waits for the steps under way. The last observation of a lane was made before the call. A
        lane whose episode ended has already been reset, so that a value which only ``reset`` reads
        takes effect after the episode that has begun. Transitions that were executed before the
        call and wait for the next batch are stored after it; the event has the first transition
        after the call for each lane.

        Calls are recorded with the run, and listed in :attr:`events` and in ``storage.runs``,
        unless the run is over. A replacement worker repeats them in its new environments before
        their first reset; after a resume the caller has to repeat them. A call that changes the
        state within an episode breaks the sequence of its rows. Arguments and results are pickled
        for workers.

        Args:
            name: of the method; not ``reset``, ``step`` or ``close``.
            args: its arguments, the same for each lane.
            lanes: their numbers; None: all.
            kwargs: its arguments by name.

        Returns:
            What it returned in each lane, in the order of ``lanes``.

        Raises:
            EnvCallError: it raised in some lanes, or they have no such method; the run goes on.
            EnvironmentRefused: environments are no Python objects, one a lane; says why.
            WorkerError: a worker died or hung; the next batch replaces it, or ends the run.
            ArgumentError: an argument that cannot be right; nothing was called.

        Examples:
            >>> from tallyroll.collector import SyncCollector
            >>> collector = SyncCollector(
            ...     "CartPole-v1", num_envs=2, frames_per_batch=10, total_frames=20
            ... )
            >>> batch = next(iter(collector))
            >>> collector.env_set("gravity", 12.5, lanes=[1])
            >>> collector.env_get("gravity")
            [9.8, 12.5]
            >>> collector.events[0]["at"], collector.events[0]["lanes"]
            (10, [1])
            >>> collector.shutdown()
        """
        asked = EnvCall("env_call", _checked_name("env_call", name), args, kwargs)
        return self._reach(asked, self._checked_lanes(asked, lanes))

    def env_get(self, name: str, lanes: Sequence[int] | int | None = None) -> list[Any]:
        """Return an attribute of each lane's own environment; see :meth:`env_call`. No event."""
        asked = EnvCall("env_get", _checked_name("env_get", name))
        return self._reach(asked, self._checked_lanes(asked, lanes))

    def env_set(self, name: str, value: Any, lanes: Sequence[int] | int | None = None) -> None:
        """Set an attribute of each lane's own environment; see :meth:`env_call`.

        It has to be there: the outermost wrapper that has it gets the value.

        Args:
            name: of the attribute.
            value: a list or a tuple has a value for each of the lanes, in their order; anything
                else is the value of all.
            lanes: their numbers; None: all.
        """
        asked = EnvCall("env_set", _checked_name("env_set", name))
        of = self._checked_lanes(asked, lanes)
        if not isinstance(value, (list, tuple)):
            asked = EnvCall("env_set", name, (value,), values=[value] * len(of))
        elif len(value) == len(of):
            asked = EnvCall("env_set", name, values=list(value))
        else:
            raise ArgumentError(
                f"{asked}: a list or tuple has a value for each lane: expected {len(of)}, got "
                f"{len(value)}; to set a list itself, give [value] * {len(of)}"
            )
        self._reach(asked, of)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Calls of :meth:`env_call` and :meth:`env_set` since this collector was made.

        Each is a mapping: ``at``, the transitions of the whole run that were stored then;
        ``call``, ``name``, ``args``, ``kwargs`` and ``lanes`` (None: all), JSON values with which
        it can be made again. Arguments that are none, or have more than 4,096 bytes, make ``args``
        None, and ``repr`` a part of their text. Where transitions waited for the next batch,
        ``first`` has, for each of the lanes, the trajectory and the step of the first transition
        after the call; else all that is stored later is after it. ``failed`` are lanes in which it
        raised, which may have changed too.
        """
        return deepcopy(self._run.writer.stored_run.events.all)

    def _reach(self, asked: EnvCall, lanes: Sequence[int]) -> list[Any]:
        run, guard, refused = self._run, self._guard, self._guard.refuses
        run.refuse_ended()
        try:
            with guard, self._rollout.still() as held:
                try:
                    outcomes = _unless_refused(self._beginning.envs.reach(asked, lanes))
                except CollectorError:
                    run.reach_safe_point()  # nothing was called
                    raise
                if asked.way != "env_get" and not run.over:
                    _record(asked, run, held, lanes, outcomes)
        except BaseException as error:
            guard.leave(error, was_refused=refused)
            raise
        _raise_failed(asked, lanes, outcomes)
        return [each.value for each in outcomes]

    def _checked_lanes(self, asked: EnvCall, lanes: Sequence[int] | int | None) -> list[int]:
        if lanes is None:
            return list(self._own_lanes)
        try:
            given = [lanes] if not hasattr(lanes, "__iter__") else list(lanes)
            found = [index(each) for each in given if type(each) is not bool]
        except TypeError:
            given, found = [lanes], []
        own = self._own_lanes
        good = found and len(found) == len(given) == len({*found})
        if not good or min(found) < own.start or max(found) >= own.stop:
            raise ArgumentError(
                f"{asked}: lanes: expected different numbers from {own.start} to {own.stop - 1}, "
                f"or None for all, got {lanes!r:.200}"
            )
        return found


def _checked_name(way: Way, name: object) -> str:
    if type(name) is not str or not name:
        raise ArgumentError(f"{way}: expected the name of a method or an attribute, got {name!r}")
    if name in _OURS and way != "env_get":
        raise ArgumentError(f"{way}: {name!r} is called by the collector alone: {_OURS[name]}")
    return name


def _unless_refused(outcomes: list[CallOutcome]) -> list[CallOutcome]:
    """Return ``outcomes``, unless a worker refused the call before any environment was called."""
    for each in outcomes:
        if isinstance(each.error, EnvironmentRefused) and not each.traceback:
            raise each.error
    return outcomes


def _record(
    asked: EnvCall,
    run: RunState,
    held: Sequence[PendingTransitions],
    lanes: Sequence[int],
    outcomes: Sequence[CallOutcome],
) -> None:
    places = [at for at, each in enumerate(outcomes) if each.error is None]
    done = [lanes[at] for at in places]
    failed = [lanes[at] for at, each in enumerate(outcomes) if each.error and each.changed]
    if not (done or failed):
        return
    event = event_of(asked.of(places), run, held, done, failed)
    run.writer.stored_run.events.add(event, run.writer.storage)


def _raise_failed(asked: EnvCall, lanes: Sequence[int], outcomes: Sequence[CallOutcome]) -> None:
    """Raise for the first lane in which the call raised, if there is one."""
    failed = [lane for lane, each in zip(lanes, outcomes, strict=True) if each.error is not None]
    if not failed:
        return
    done = [lane for lane in lanes if lane not in failed]
    outcome = outcomes[lanes.index(failed[0])]
    error, others = outcome.error, f"; it was done in {_spoken(done)}"
    if isinstance(error, WorkerError):
        error.add_note(f"tallyroll: in the middle of {asked}{others}")
        raise error
    also = f", as in {_spoken(failed[1:])}" if failed[1:] else ""
    raised = f" raised {type(error).__name__}" if outcome.changed else ""
    raise EnvCallError(
        f"{asked} in lane {failed[0]}{also}{raised}: {error}{others}",
        lane=failed[0],
        failed=failed,
        done=done,
        traceback=outcome.traceback,
    ) from error


def _spoken(lanes: Sequence[int]) -> str:
    if not lanes:
        return "no other lane"
    more = f" and {len(lanes) - _SHOWN} more" if len(lanes) > _SHOWN else ""
    return f"lane{'s' * (len(lanes) > 1)} {', '.join(map(str, lanes[:_SHOWN]))}{more}"
