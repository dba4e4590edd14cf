"""Detect environments that return the first observation of the next episode as the final one."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.batches.rows.rows import Part
from tallyroll.collector.batches.rows.slab_rows import SlabPart
from tallyroll.collector.errors import SilentReset
from tallyroll.storage.rows.keys import DONE, LANE, NEXT, NEXT_VALID, STEP, TERMINATED, Key
from tallyroll.storage.trajectories.self_resets import (
    Ends,
    SelfResets,
    Verdict,
)


class FinalsWarning(UserWarning):
    """Final observations look as if the environment reset itself; this is not certain."""


class FinalsWatch:
    """Compares rows of a run until it is decided whether the environment resets itself.

    Args:
        lanes: the lanes of this collector, numbered over the run.
        keys: observations, at the root and under ``"next"``, that distinguish states; if there
            are none, nothing is compared.
        valid: columns that mark lost next observations of agents.
    """

    def __init__(self, lanes: range, keys: tuple[Key, ...], valid: Sequence[Key] = ()) -> None:
        self._keys, self._lanes, self._valid = keys, lanes, valid
        self._resets = SelfResets(len(lanes)) if keys else None
        self.looks = self._resets is not None
        """True until it is decided whether the environment resets itself."""
        self._warned = False

    @property
    def undecided(self) -> bool:
        """True if rows between the ends of episodes are compared, too."""
        return self._resets is not None and self._resets.undecided

    def look(self, part: Part | SlabPart) -> None:
        """Compare the rows of ``part``, which follow those of the last call."""
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

    def _valid_of(self, part: Part | SlabPart) -> NDArray[np.bool_] | None:
        """Return the rows with a complete next observation; None if all have one."""
        found = [part.array(key) for key in (NEXT_VALID, *self._valid) if key in part]
        each = [column.reshape(len(column), -1).all(axis=1) for column in found]
        return np.logical_and.reduce(each) if each else None

    def forget(self, lanes: NDArray[np.bool_]) -> None:
        """Drop the last rows of ``lanes`` (marks of all lanes), which have no successor."""
        if self._resets is not None:
            self._resets.forget(lanes[self._lanes.start : self._lanes.stop])

    def require_true(self, committed: Callable[[], str]) -> None:
        """Raise if the environment resets itself; warn once if it may.

        ``committed`` returns a sentence that says which rows of the run are stored.

        Raises:
            SilentReset: it resets itself.
        """
        resets = self._resets
        if resets is None:
            return
        if resets.verdict is Verdict.SELF_RESET:
            raise SilentReset(f"{_seen(resets)}. {_WAY_OUT}. {committed()}")
        if resets.verdict is Verdict.KNOWN_START and not self._warned:
            self._warned = True
            warnings.warn(f"{_seen(resets)}. {_UNCERTAIN}", FinalsWarning, stacklevel=2)

    def warn_at_end(self, committed: Callable[[], str]) -> None:
        """Warn if all ends of episodes point to a self-reset, but are too few to be certain."""
        resets, self._resets, self.looks = self._resets, None, False
        if resets is not None and resets.likely:
            text = f"{_seen(resets)}; these are too few to be certain. {_WAY_OUT}. {committed()}"
            warnings.warn(text, FinalsWarning, stacklevel=2)


def _seen(resets: SelfResets) -> str:
    seen = resets.seen
    return (
        "expected the final observation of each episode, got the first observation of the next "
        f"one: {seen.equal} of {seen.ends} final observations equal the first one that follows in "
        f"their lane, and {seen.inner_equal} of {seen.inner} observations in mid-trajectory equal "
        "the first one of their own trajectory"
    )


_WAY_OUT = (
    "So the environment resets itself within step, without saying so. Return the final "
    "observation from step and leave resets to the caller (with an environment that resets "
    "itself, copy the observation before its reset), or let Gymnasium do it: a vector with "
    'AutoresetMode.DISABLED over an environment that does not reset itself; or pass finals="lost", '
    "which stores collector/next_valid False at ends, so that no learner bootstraps from them. If "
    'a reset of this task keeps the state, these are right: pass finals="kept"'
)
_UNCERTAIN = (
    "As far as was seen, it may be known beforehand where episodes begin: a task that ends where "
    "the next one begins looks like this, and so does an environment that resets itself within "
    'step. If it is such a task, pass finals="kept"; if it resets itself, pass finals="lost", or '
    "return the final observation from step"
)


def _flat(part: Part | SlabPart, key: Key) -> NDArray[Any]:
    return part.array(key).reshape(-1)
