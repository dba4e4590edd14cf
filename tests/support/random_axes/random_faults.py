"""Exceptions in user code during random runs, at a random call.

`StopIteration` must become one of our errors, and leave the same rows as any other exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tallyroll.collector.errors import UserStopIteration, WorkerRaised

from random_lanes import injected

Where = Literal["step", "reset", "policy", "postproc", "sampler"]


@dataclass(frozen=True)
class FaultKind:
    """An exception in user code."""

    where: Where
    at: int
    """The number of the call that raises. For steps and resets it counts the calls of one lane."""
    lane: int = 0
    stops: bool = True
    """True if the exception is `StopIteration`."""


class Counted:
    """A call counter that raises at the given call, from 1 on, and at all later ones."""

    def __init__(self, kind: FaultKind) -> None:
        self.kind, self.calls = kind, 0

    def call(self) -> None:
        """Count a call."""
        self.calls += 1
        if self.calls >= self.kind.at:
            raise injected(f"call {self.calls} of the {self.kind.where}", self.kind.stops)


class FaultyPostproc(Counted):
    """A postprocessing callback that returns batches unchanged."""

    def __call__(self, batch: Any) -> Any:
        """Return ``batch``."""
        self.call()
        return batch


class FaultySampler(Counted):
    """A sampler that draws an option for each reset."""

    def __call__(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the options."""
        self.call()
        return {"gravity": float(rng.uniform(-15, -5))}


def faults_of_error(kind: FaultKind, error: BaseException) -> list[str]:
    """Return the faults of the error that ended a run in which ``kind`` was raised."""
    if not kind.stops or not isinstance(error, (UserStopIteration, WorkerRaised, StopIteration)):
        return []
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, StopIteration):
        return [f"StopIteration was raised bare: {what}"]
    if type(error.__cause__) is not StopIteration:
        return [f"the cause is {error.__cause__!r}: {what}"]
    return []
