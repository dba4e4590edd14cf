"""The claim of a collector's run on the storage to which the run is written."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Protocol

from tallyroll.storage.errors import RunUnderWay


class Claimable(Protocol):
    """A storage that a run can claim, or the files of one."""

    path: Path
    turn: threading.RLock
    """Lock that is held while rows are written."""


class RunClaim:
    """Claim that restricts writes to ``ids="fresh"`` until a run is over.

    A collector's run numbers its trajectories and counts its rows. Rows of another writer in
    between would be counted as rows of the run. A claim also ends when its run is
    garbage-collected.
    """

    def __init__(self, claimed: Claimable) -> None:
        self._claimed = claimed
        self._run: weakref.ref[object] | None = None
        self._run_begun = False

    def take(self, run: object, *, begins: bool = True) -> bool:
        """Claim the storage for ``run``.

        With ``begins``, the run takes the claim even from another run, if that run has not begun.
        Otherwise, the run gets the claim only if no other run has the claim.

        Returns:
            True if ``run`` has the claim now.

        Raises:
            RunUnderWay: another run has begun and is not over.
        """
        with self._claimed.turn:
            other = self._other_than(run)
            if other and self._run_begun and begins:
                gc.collect()  # a dropped run may be part of a reference cycle
                if self._other_than(run):
                    raise RunUnderWay(
                        f"another collector is writing a run to {self._claimed.path}, and rows of "
                        "two runs must not mix. Nothing was written. Let that run end or call the "
                        "shutdown() of that collector first, or give this collector a storage of "
                        "its own."
                    )
            if other and not begins:
                return False
            self._run, self._run_begun = weakref.ref(run), begins
            return True

    def _other_than(self, run: object) -> bool:
        return self._run is not None and self._run() not in (None, run)

    def is_of(self, run: object) -> bool:
        """Return True if ``run`` has the claim."""
        return self._run is not None and self._run() is run

    def end(self, run: object) -> None:
        """Release the claim of ``run``; do nothing if another run has taken it."""
        if self.is_of(run):
            self._run = None

    @property
    def is_taken(self) -> bool:
        """True while a run has the claim."""
        return self._run is not None and self._run() is not None

    def require_none(self) -> None:
        """Raise `RunUnderWay` if a run has the claim."""
        if self._run is not None and self._run() is not None:
            raise RunUnderWay(
                f"a collector is writing a run to {self._claimed.path}, and rows that are added "
                "meanwhile would be counted as rows of that run. Nothing was written. Add them "
                "when the run is over, or after the shutdown() of the collector."
            )
