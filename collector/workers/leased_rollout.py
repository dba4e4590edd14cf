"""Fill a segment of a worker's slab, as a lease asks for."""

from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import LedgerEntry
from tallyroll.collector.rollout.driver import LocalDriver
from tallyroll.collector.rollout.fill_and_carry import SLOTS_AT_ONCE, Rollout
from tallyroll.collector.slab.progress import COUNTED, LEASE, counted_word
from tallyroll.collector.workers.messages import Lease


class LeasedRollout(Rollout):
    """Fills segments of a slab; what is in them is the parent's then, and nothing is carried.

    The driver is one of this process, so that others may read the board that it writes. A budget
    of episodes begins with none: each lease brings more.
    """

    driver: LocalDriver

    def lease(self, lease: Lease, slots: int) -> tuple[LedgerEntry, int, int]:
        """Fill a segment of at most ``slots`` slots.

        Returns:
            What happened, the slots that were filled, and the episodes completed.
        """
        driver, base = self.driver, lease.base
        self._take_entry()  # what a lease counted that raised is lost
        self.slab.carry_root(driver.used, base)
        driver.used = base
        driver.board[COUNTED] = counted_word(base, 0)
        driver.board[LEASE] = lease.number
        if lease.fresh:
            driver.restart()
            self._restarting = True
            if self.gate is not None:
                self.gate = EpisodeBudget(0, driver.run_lanes)
        if self._restarting and not driver.stopping:
            self._restarting = False
            driver.begin()
        self.random_frames = lease.random_frames
        self._limit = base + slots
        completed = 0
        if self.gate is not None:
            self.gate.total += lease.tickets
            completed = -self.gate.completed
        have = 0
        while have < lease.frames and driver.used < self._limit and not self._ends(lease):
            if self.policy is not None:  # also for slots in which only some lanes ask it
                self.policy.refresh()
            have += self._advance(lease.frames - have)
        if self.gate is not None:
            completed += self.gate.completed
        return self._take_entry(), driver.used - base, completed

    def _ends(self, lease: Lease) -> bool:
        if self._over:
            return True
        if self.gate is None or lease.last:
            return False
        # An episode that starts without a ticket would be for nothing, its lane out of turn.
        left = self.gate.total - self.gate.started
        return self.gate.starting(self.driver.upcoming()) > left

    def _slots_at_once(self, gate: EpisodeBudget) -> int:
        """So few that no lane can start an episode for which there is no ticket."""
        return max(1, min(SLOTS_AT_ONCE, (gate.total - gate.started) // self.lanes))

    def _count(self, start: int, stop: int, stepped: int) -> int:
        marked = super()._count(start, stop, stepped)
        self.driver.board[COUNTED] = counted_word(stop, self._entry.executed)
        return marked
