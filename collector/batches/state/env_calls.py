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
from tallyroll.collector.rollout.source import TransitionSource, UndeliveredTransitions

_OURS = {
    "reset": "Call set_seed() to start new episodes, or pass reset_at_each_iter=True.",
    "step": "Iterate over the collector, or call collect(n).",
    "close": "Call shutdown() to close the environments that the collector made.",
}
"""Methods that would drive an environment without its collector, and the alternative to each."""
_SHOWN = 16


class EnvCalls:
    """Mixin that calls methods of a collector's environments between batches."""

    _beginning: RunSetup
    _run: RunState
    _rollout: TransitionSource
    _guard: CollectGuard
    _own_lanes: range

    def env_call(
        self, name: str, /, *args: Any, lanes: Sequence[int] | int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of each lane's own environment between batches, and return the results.

        In a wrapped environment the outermost wrapper that has the method is called, as by
        Gymnasium's ``get_wrapper_attr``. All lanes are called, even if some raise.

        The call comes between two steps of each lane, in workers too: with ``mode="async"`` it
        waits for the steps in progress. The last observation of a lane was made before the call. A
        lane whose episode ended has already been reset, so a value that only ``reset`` reads takes
        effect at the reset after the present episode. Transitions that were executed before the
        call and wait for the next batch are stored after it; the event names the first transition
        of each lane after the call.

        Calls are recorded with the run, and listed in :attr:`events` and in ``storage.runs``,
        unless the run is over. A replacement worker repeats them in its new environments before
        their first reset; after a resume the caller has to repeat them. If a call changes the state
        within an episode, the next row does not follow from the previous one. Arguments and results
        are pickled for workers.

        Args:
            name: the name of the method; not ``reset``, ``step`` or ``close``.
            args: the arguments of the method, the same for each lane.
            lanes: the numbers of the lanes to call; None means all lanes.
            kwargs: the keyword arguments of the method.

        Returns:
            The result of the method in each lane, in the order of ``lanes``.

        Raises:
            EnvCallError: the method raised in some lanes, or the environment has no such method;
                the run continues.
            EnvironmentRefused: there is not one Python object per lane; the message gives the
                reason.
            WorkerError: a worker died or hung; the next batch replaces it, or ends the run.
            ArgumentError: an argument is invalid; no environment was called.

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
        """Return an attribute of each lane's own environment; see :meth:`env_call`.

        No event is recorded.
        """
        asked = EnvCall("env_get", _checked_name("env_get", name))
        return self._reach(asked, self._checked_lanes(asked, lanes))

    def env_set(self, name: str, value: Any, lanes: Sequence[int] | int | None = None) -> None:
        """Set an attribute of each lane's own environment; see :meth:`env_call`.

        The attribute must exist: the outermost wrapper that has it gets the value.

        Args:
            name: the name of the attribute.
            value: a list or tuple of one value per lane, in the order of ``lanes``; any other value
                is set in all lanes.
            lanes: the numbers of the lanes to call; None means all lanes.
        """
        asked = EnvCall("env_set", _checked_name("env_set", name))
        of = self._checked_lanes(asked, lanes)
        if not isinstance(value, (list, tuple)):
            asked = EnvCall("env_set", name, (value,), values=[value] * len(of))
        elif len(value) == len(of):
            asked = EnvCall("env_set", name, values=list(value))
        else:
            raise ArgumentError(
                f"{asked}: expected a list or tuple with a value for each of {len(of)} lanes, got "
                f"{len(value)} values. To set the list itself as the value, pass [value] * "
                f"{len(of)}."
            )
        self._reach(asked, of)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Calls of :meth:`env_call` and :meth:`env_set` since this collector was made.

        Each event is a mapping. ``at`` is the number of transitions that the whole run had stored
        at the time of the call. ``call``, ``name``, ``args``, ``kwargs`` and ``lanes`` (None: all
        lanes) are JSON values with which the call can be repeated. If the arguments are not JSON
        values, or have more than 4,096 bytes, ``args`` is None and ``repr`` is a part of their
        text. If transitions waited for the next batch, ``first`` has the trajectory and the step of
        the first transition after the call for each of the lanes. Otherwise, all transitions stored
        later come after the call. ``failed`` lists lanes in which the call raised; their
        environments may have changed too.
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
                f"{asked}: lanes: expected distinct lane numbers from {own.start} to "
                f"{own.stop - 1}, or None for all lanes, got {lanes!r:.200}"
            )
        return found


def _checked_name(way: Way, name: object) -> str:
    if type(name) is not str or not name:
        raise ArgumentError(f"{way}: expected the name of a method or an attribute, got {name!r}")
    if name in _OURS and way != "env_get":
        raise ArgumentError(f"{way}: only the collector may call {name!r}. {_OURS[name]}")
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
    held: Sequence[UndeliveredTransitions],
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
    error, others = outcome.error, f"; the call succeeded in {_spoken(done)}"
    if isinstance(error, WorkerError):
        error.add_note(f"tallyroll: raised during {asked}{others}")
        raise error
    also = f" (also in {_spoken(failed[1:])})" if failed[1:] else ""
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
