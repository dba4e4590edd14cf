"""Detect environments that return the first observation of the next episode as the final one."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.batches.rows.rows import ArrayBatch
from tallyroll.collector.batches.rows.slab_rows import SlabBatch
from tallyroll.collector.errors import SilentReset
from tallyroll.storage.rows.keys import DONE, LANE, NEXT, NEXT_VALID, STEP, TERMINATED, Key
from tallyroll.storage.trajectories.self_resets import (
    Ends,
    SelfResets,
    Verdict,
)


class FinalsWarning(UserWarning):
    """The final observations suggest, but do not prove, that the environment resets itself."""


class FinalsWatch:
    """Compares rows of a run until they show whether the environment resets itself.

    Args:
        lanes: the lanes of this collector, numbered over the run.
        keys: keys of the observations, at the root and under ``"next"``, that distinguish states;
            without keys, nothing is compared.
        valid: keys of the columns that mark lost next observations of agents.
    """

    def __init__(self, lanes: range, keys: tuple[Key, ...], valid: Sequence[Key] = ()) -> None:
        self._keys, self._lanes, self._valid = keys, lanes, valid
        self._resets = SelfResets(len(lanes)) if keys else None
        self.looks = self._resets is not None
        """True until it is decided whether the environment resets itself."""
        self._warned = False

    @property
    def undecided(self) -> bool:
        """True if rows in mid-episode are compared too."""
        return self._resets is not None and self._resets.undecided

    def look(self, part: ArrayBatch | SlabBatch) -> None:
        """Compare the rows of ``part``, which follow the rows of the last call."""
        if self._resets is None:
            return
        step, ended = _flat(part, STEP), _flat(part, DONE)
        if not self._resets.undecided and step.all() and not ended.any():
            return
        self._resets.look(
            Ends(
                lane=_flat(part, LANE) - self._lanes.start,
                step=step,
                ended=ended,
                terminated=_flat(part, TERMINATED),
                first=[part.taker(key) for key in self._keys],
                next=[part.taker((NEXT, *key)) for key in self._keys],
                valid=self._valid_of(part),
            )
        )
        if self._resets.verdict is Verdict.FINE:
            self._resets, self.looks = None, False

    def _valid_of(self, part: ArrayBatch | SlabBatch) -> NDArray[np.bool_] | None:
        """Return a mask of the rows with a complete next observation; None if all have one."""
        found = [part.array(key) for key in (NEXT_VALID, *self._valid) if key in part]
        each = [column.reshape(len(column), -1).all(axis=1) for column in found]
        return np.logical_and.reduce(each) if each else None

    def forget(self, lanes: NDArray[np.bool_]) -> None:
        """Drop the last rows of ``lanes`` (marks of all lanes), which have no successor."""
        if self._resets is not None:
            self._resets.forget(lanes[self._lanes.start : self._lanes.stop])

    def require_true(self, committed: Callable[[], str]) -> None:
        """Raise if the environment resets itself; warn once if it may.

        ``committed`` returns a sentence about the rows of the run that are stored.

        Raises:
            SilentReset: the environment resets itself.
        """
        resets = self._resets
        if resets is None:
            return
        if resets.verdict is Verdict.SELF_RESET:
            raise SilentReset(f"{_describe_resets(resets)}. {_WAY_OUT}. {committed()}")
        if resets.verdict is Verdict.KNOWN_START and not self._warned:
            self._warned = True
            warnings.warn(f"{_describe_resets(resets)}. {_UNCERTAIN}", FinalsWarning, stacklevel=2)

    def warn_at_end(self, committed: Callable[[], str]) -> None:
        """Warn if all ends of episodes suggest a self-reset, but are too few to prove it."""
        resets, self._resets, self.looks = self._resets, None, False
        if resets is not None and resets.likely:
            found = _describe_resets(resets)
            text = f"{found}; these are too few to be certain. {_WAY_OUT}. {committed()}"
            warnings.warn(text, FinalsWarning, stacklevel=2)


def _describe_resets(resets: SelfResets) -> str:
    seen = resets.seen
    return (
        "expected the final observation of each episode, got the first observation of the next "
        f"one: {seen.equal} of {seen.ends} final observations equal the first one that follows in "
        f"their lane, and {seen.inner_equal} of {seen.inner} observations in mid-trajectory equal "
        "the first one of their own trajectory"
    )


_WAY_OUT = (
    "So the environment resets itself within step and does not declare this. Return the final "
    "observation from step and leave resets to the caller, such as a Gymnasium vector with "
    "AutoresetMode.DISABLED. An environment that has to reset itself can copy the observation "
    'before its reset. Otherwise pass finals="lost": it marks ends with collector/next_valid '
    "False, so that no learner bootstraps from them. If a reset of this task keeps the state, the "
    'final observations are right: pass finals="kept"'
)
_UNCERTAIN = (
    "Two kinds of environment look like this: a task whose episodes end in the state in which the "
    "next one begins, and an environment that resets itself within step. For the first, pass "
    'finals="kept". For the second, pass finals="lost", or return the final observation from step'
)


def _flat(part: ArrayBatch | SlabBatch, key: Key) -> NDArray[Any]:
    return part.array(key).reshape(-1)
