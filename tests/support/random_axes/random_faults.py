"""Exceptions of user code in random runs, at a drawn call of it.

`StopIteration` has to become an error of ours, and leave the rows that any other exception leaves.
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
    """An exception of user code."""

    where: Where
    at: int
    """The number of the call that raises; of steps and resets those of one lane."""
    lane: int = 0
    stops: bool = True
    """True if the exception is `StopIteration`."""


class Counted:
    """Raises at the call of that number, from 1 on, and at all later ones."""

    def __init__(self, kind: FaultKind) -> None:
        self.kind, self.calls = kind, 0

    def call(self) -> None:
        """Count a call."""
        self.calls += 1
        if self.calls >= self.kind.at:
            raise injected(f"call {self.calls} of the {self.kind.where}", self.kind.stops)


class FaultyPostproc(Counted):
    """Returns batches as they are."""

    def __call__(self, batch: Any) -> Any:
        """Return ``batch``."""
        self.call()
        return batch


class FaultySampler(Counted):
    """Draws an option of a reset."""

    def __call__(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the options."""
        self.call()
        return {"gravity": float(rng.uniform(-15, -5))}


def faults_of_error(kind: FaultKind, error: BaseException) -> list[str]:
    """Return what is wrong with the error that ended a run in which ``kind`` was raised."""
    if not kind.stops or not isinstance(error, (UserStopIteration, WorkerRaised, StopIteration)):
        return []
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, StopIteration):
        return [f"StopIteration was raised bare: {what}"]
    if type(error.__cause__) is not StopIteration:
        return [f"the cause is {error.__cause__!r}: {what}"]
    return []
