"""Fill a few slots at a time for the C call that stores their rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.native.kernel import in_order
from tallyroll.collector.native.slot_rows import HeldCounts
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.slab.progress import FILLED, HALT, ROUNDED
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.rows.keys import RANDOM_VERSION


class HeldRows:
    """Transitions of the last slot that begin the next block.

    Both the extension and Python change this object; see `StepKernel.store_slots`.
    """

    # Hot path: `FewSlots.make_ready` assigns `counts.resets` after each call of the extension.

    def __init__(self, lanes: int) -> None:
        self.counts = HeldCounts()
        self.marks: NDArray[np.bool_] = np.zeros(lanes, np.bool_)

    @property
    def lanes(self) -> NDArray[np.bool_] | None:
        """Lanes ``[lane]`` with a held row; None if no row is held."""
        return self.marks if self.counts.rows else None

    def hold(self, lanes: NDArray[np.bool_] | None) -> None:
        """Hold the rows of ``lanes``; if None, hold no rows."""
        self.counts.rows = 0 if lanes is None else int(np.count_nonzero(lanes))
        if lanes is not None:
            self.marks[:] = lanes


class FewSlots:
    """Fills slots after the held rows; the caller counts and stores them.

    Args:
        driver: the driver that fills the slots.
        policy: chooses actions; None if all actions are random.
        held: the held rows, which are in slot 0.
    """

    sound = True
    """True if all rows of the slots of the last call are certain to be transitions."""

    def __init__(self, driver: Driver, policy: Policy | None, held: HeldRows) -> None:
        self._driver, self._policy, self.held = driver, policy, held
        assert driver.board is not None  # the caller has checked this
        self._slab, self._lanes, self.board = driver.slab, driver.slab.lanes, driver.board
        self.version = RANDOM_VERSION
        """The version of the policy that filled the last slot."""
        self._at: int | None = None
        """The last slot that the last call filled; None if it filled none."""

    @property
    def first(self) -> int:
        """The first slot that has not been counted."""
        return 1 if self.held.counts.rows else 0

    @property
    def has_rounded(self) -> bool:
        """True if a rounded reward has to be reported."""
        return self.board[ROUNDED] > 0

    def table(self) -> bytes:
        """Return the table of the slab (see `SlotRows.slab`), valid while this object lives."""
        slab, pending = self._slab, self._driver.pending
        words: list[Any] = in_order(
            "SLAB",
            used=self._driver.used_at,
            marks=self.held.marks,
            transitions=slab.transitions,
            pending=0 if pending is None else pending,
            by_policy=self._policy is not None,
            flowing=len(slab.flowing),
        )
        return table_of([*words, *slab.carry_words])

    def fill(self, want: int) -> None:
        """Step all lanes until there are ``want`` rows, the slab is full, or the run stops.

        The version of the last slot is in :attr:`version`, and not yet in the slab.
        """
        driver, policy, counts = self._driver, self._policy, self.held.counts
        have, resets, self._at = counts.rows, counts.resets, None
        at = 1 if have else 0
        while have < want:
            self._at = at
            if policy is None:
                driver.random_steps(at, at + 1)
            elif policy.refreshes:
                self._refresh(at)
            else:
                self.version = policy.version
                driver.policy_steps(at, at + 1)
            have += self._lanes - resets
            at += 1
            if have < want:
                if at == self._slab.slots or self.board[HALT]:
                    break
                self.write_version()
                resets = self._resets_after(at)

    def _refresh(self, at: int) -> None:
        """Fill slot ``at`` by a policy that may load newer weights before it acts."""
        assert self._policy is not None
        self.version = self._policy.version
        self._slab.version[at] = self.version
        self._driver.policy_steps(at, at + 1)  # loading newer weights writes their version
        self.version = int(self._slab.version[at, 0])

    def write_version(self) -> None:
        """Write the version of the last slot to the slab, if the slab lacks it."""
        if self._at is not None and (self._policy is None or not self._policy.refreshes):
            self._slab.version[self._at] = self.version

    def make_ready(self) -> bool:
        """Move the held rows to slot 0, and count the lanes that are reset next.

        The other rows were handed over. If a policy acts and a held row has random actions, do
        nothing and return False, because the loop has to count that row.
        """
        driver, lanes, slab = self._driver, self.held.lanes, self._slab
        if lanes is not None and self._policy is not None:
            last = slab.version[driver.used - 1]
            if np.any(last[lanes] == RANDOM_VERSION):
                return False
        slab.keep_last(driver.used, lanes)
        driver.seek(self.first)
        pending = driver.pending
        self.held.counts.resets = 0 if pending is None else int(np.count_nonzero(pending))
        return True

    def _resets_after(self, slots: int) -> int:
        """Return the number of lanes that are reset in the slot after the first ``slots`` slots."""
        if self._driver.pending is None:
            return 0
        return int(np.count_nonzero(self._driver.ended(slots - 1, slots)))


class FewSlotsOfWorkers(FewSlots):
    """A `FewSlots` over workers, with one request for all slots that are certain to be needed."""

    @property
    def has_rounded(self) -> bool:
        """True if a rounded reward has to be reported."""
        return any(board[ROUNDED] > 0 for board in self._driver.boards)

    def fill(self, want: int) -> None:
        """Step all lanes until there are ``want`` rows, the slab is full, or `sound` is False."""
        driver, policy, slab, lanes = self._driver, self._policy, self._slab, self._lanes
        have, resets, self._at = self.held.counts.rows, self.held.counts.resets, None
        at, self.sound = 1 if have else 0, True
        self.version = RANDOM_VERSION if policy is None else policy.version
        while have < want and at < slab.slots and self.sound:
            stop = min(at - (have - want) // lanes, slab.slots)
            if stop > at + 1:
                slab.version[at : stop - 1] = self.version
            self._at = stop - 1
            if policy is None:
                driver.random_steps(at, stop)
            else:
                driver.policy_steps(at, stop)
            self.sound = self.board[FILLED] == stop and not driver.mended
            have += (stop - at) * lanes - resets
            if stop > at + 1 and driver.pending is not None:
                have -= int(np.count_nonzero(driver.ended(at, stop - 1)))
            if have < want:
                self.write_version()
                resets = self._resets_after(stop)
            at = stop
