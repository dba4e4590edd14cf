"""Serialization of calls for workers, and of their outcomes."""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from torchrl.envs import EnvBase

from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.envs.calls.environments import reach_env
from tallyroll.collector.errors import ArgumentError


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
    return [_answer(each, asked) for each in outcomes]


def _answer(outcome: CallOutcome, asked: EnvCall) -> PickledOutcome:
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
