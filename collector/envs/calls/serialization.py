"""Serialization of calls for workers, and of their outcomes, and replay of earlier calls."""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from torchrl.envs import EnvBase

from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.envs.calls.environments import reach_env
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused


@dataclass(frozen=True)
class PickledOutcome:
    """Outcome of a call in one lane, pickled as far as possible."""

    value: bytes | None = field(default=None, repr=False)
    error: bytes | None = field(default=None, repr=False)
    """The exception, if it can be pickled."""
    text: str = ""
    """Class and message of the exception; empty if there was none."""
    traceback: str = ""


def packed(asked: EnvCall, lanes: Sequence[int]) -> bytes:
    """Serialize a call of ``lanes``, which are numbered as in the worker.

    Raises:
        ArgumentError: an argument cannot be pickled.
    """
    try:
        content: bytes = cloudpickle.dumps((asked, list(lanes)))
    except Exception as error:
        raise ArgumentError(
            f"{asked}: expected arguments that can be pickled, because the environments are in "
            f"workers, got {type(error).__name__}: {error}"
        ) from error
    return content


def answers_of(env: EnvBase, content: bytes) -> list[PickledOutcome]:
    """Run a serialized call in a worker and return its outcome in each lane."""
    asked, lanes = pickle.loads(content)
    try:
        outcomes: Iterable[CallOutcome] = reach_env(env, asked, lanes)
    except Exception as error:  # noqa: BLE001  becomes the outcome of every lane
        outcomes = [CallOutcome(None, error)] * len(lanes)
    return [_answer(each) for each in outcomes]


def _answer(outcome: CallOutcome) -> PickledOutcome:
    if outcome.error is None:
        try:
            return PickledOutcome(cloudpickle.dumps(outcome.value))
        except Exception as error:  # noqa: BLE001  the collector raises it
            what = f"expected a result that can be pickled, got a {type(outcome.value).__name__}"
            outcome = CallOutcome(None, TypeError(f"{what}: {error}"))
    raised = outcome.error
    text = f"{type(raised).__name__}: {raised}"
    try:
        sent: bytes | None = cloudpickle.dumps(raised)
        pickle.loads(sent)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  fall back to its text
        sent = None
    return PickledOutcome(None, sent, text, outcome.traceback)


def outcome_of(answer: PickledOutcome) -> CallOutcome:
    """Deserialize, in the parent, the outcome that a worker sent."""
    if answer.value is not None:
        return CallOutcome.of(lambda: pickle.loads(answer.value))  # type: ignore[arg-type]
    error: Any = None
    if answer.error is not None:
        error = CallOutcome.of(lambda: pickle.loads(answer.error)).value  # type: ignore[arg-type]
    if not isinstance(error, BaseException):
        error = RuntimeError(answer.text)
    return CallOutcome(None, error, answer.traceback)


class Calls:
    """The calls that changed environments during a run, in order."""

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
