"""Replay of earlier calls in environments that were made again."""

import pickle
from collections.abc import Iterable, Iterator, Sequence

import cloudpickle

from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.errors import EnvironmentRefused


class Calls:
    """Calls of a run that changed environments, in order."""

    def __init__(self) -> None:
        self._made: list[tuple[EnvCall, list[int]]] = []
        """Each call, and the lanes in which it succeeded."""

    def note(self, asked: EnvCall, lanes: Sequence[int], outcomes: Sequence[CallOutcome]) -> None:
        """Record a call with the lanes in which it succeeded."""
        places = [at for at, each in enumerate(outcomes) if each.error is None]
        done = [lanes[at] for at in places]
        if not done:
            return
        if asked.way == "env_set":
            self._forget_sets(asked.name, set(done))
        # A copy, because the caller may change its arguments later.
        self._made.append((pickle.loads(cloudpickle.dumps(asked.of(places))), done))

    def _forget_sets(self, name: str, lanes: set[int]) -> None:
        """Drop values that a later call sets again, if no method was called in between."""
        at = len(self._made)
        while at and self._made[at - 1][0].way == "env_set":
            at -= 1
            if self._made[at][0].name == name and lanes.issuperset(self._made[at][1]):
                del self._made[at]

    def of(self, lanes: range) -> Iterator[tuple[EnvCall, list[int]]]:
        """Yield the calls of ``lanes``, with lane numbers relative to the first of them."""
        for asked, done in self._made:
            places = [at for at, lane in enumerate(done) if lane in lanes]
            if places:
                yield asked.of(places), [done[at] - lanes.start for at in places]


def require_repeated(asked: EnvCall, who: str, outcomes: Iterable[CallOutcome]) -> None:
    """Raise if replaying a call failed in any lane."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise EnvironmentRefused(
                f"{who} was restarted, and repeating {asked} in its new environment raised "
                f"{type(outcome.error).__name__}: {outcome.error}. Let the environment accept this "
                "call before the first reset, or make the environment with the changed setting."
            ) from outcome.error
