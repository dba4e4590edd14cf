"""Rollout that fills segments of a worker's slab, one for each lease."""

from collections.abc import Sequence
from functools import partial

from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.options import Surplus
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.policies import SeveralPolicies, openings_of
from tallyroll.collector.rollout.driver import LocalDriver
from tallyroll.collector.rollout.slab_filler import SLOTS_AT_ONCE, SlabFiller, SlabFillerOfSeveral
from tallyroll.collector.slab.progress import COUNTED, LEASE, counted_word
from tallyroll.collector.workers.central import EndOfSteps
from tallyroll.collector.workers.messages import Lease, LeaseResult
from tallyroll.storage.rows.keys import Key


class LeasedRollout:
    """Fills segments of a slab.

    The parent owns a filled segment, and no transition is carried over.

    Args:
        driver: a driver in this process. The parent reads the board that it writes.
        policy: the policy; None draws random actions.
        extra: keys that the policy writes in addition to the action.
        surplus: the fate of transitions of the last step beyond those requested.
        episodes: True if the budget counts episodes. The budget begins with no episodes, and each
            lease adds some.
    """

    def __init__(
        self,
        driver: LocalDriver,
        policy: Policy | None,
        *,
        extra: Sequence[Key],
        surplus: Surplus,
        episodes: bool,
    ) -> None:
        self._driver, self._policy = driver, policy
        several = isinstance(policy, SeveralPolicies)
        self._openings = openings_of(policy)
        self._lease: Lease | None = None
        self._completed = 0
        """Episodes of the budget that were completed before the lease."""
        self._filling = (SlabFillerOfSeveral if several else SlabFiller)(
            driver,
            policy,
            extra=extra,
            surplus=surplus,
            random_frames=0,
            gate=EpisodeBudget(0, driver.run_lanes) if episodes else None,
            at_once=_with_tickets,
            counted=partial(_say_counted, driver.board),
        )

    @property
    def random_frames(self) -> Sequence[int]:
        """Transitions with random actions that the last lease requested but that were not made."""
        if self._openings is None:
            return [self._filling.random_frames]
        left: list[int] = self._openings.left.tolist()
        return left

    def _begin_at_random(self, frames: Sequence[int]) -> None:
        if self._openings is None:
            self._filling.begin_at_random(*frames)
        else:
            self._openings.continue_with(frames)

    def lease(self, lease: Lease, slots: int) -> None:
        """Fill a segment of at most ``slots`` slots."""
        driver, filling, base = self._driver, self._filling, lease.base
        driver.slab.carry_root(driver.used, base)
        driver.seek(base)
        driver.board[COUNTED] = counted_word(base, 0)
        driver.board[LEASE] = lease.number
        if lease.fresh:
            filling.restart()
            if filling.gate is not None:
                filling.gate.revoke()
        self._completed = 0 if filling.gate is None else filling.gate.completed
        self._begin_at_random(lease.random_frames)
        self._lease = lease
        if filling.restarting and not driver.stopping:
            filling.begin()
        if filling.gate is not None:
            filling.gate.grant(lease.tickets)
        self._fill(lease, base + slots)

    def take_filled(self) -> LeaseResult | None:
        """Return the result of the lease once; None if some of its filled slots are not counted.

        After an error the result covers the slots that were complete before it.
        """
        driver, filling, lease = self._driver, self._filling, self._lease
        entry, self._lease = filling.take_entry(), None
        if lease is None or driver.board[COUNTED] != counted_word(driver.used, entry.executed):
            return None
        completed = 0 if filling.gate is None else filling.gate.completed - self._completed
        return LeaseResult(driver.used - lease.base, entry, self.random_frames, completed)

    def _fill(self, lease: Lease, limit: int) -> None:
        """Fill slots up to ``limit``, until the lease has its number of transitions."""
        driver, filling, have = self._driver, self._filling, 0
        while have < lease.frames and driver.used < limit and not self._ends(lease):
            if self._policy is not None:  # even for slots in which only some lanes ask it
                self._policy.refresh()
            try:
                have += filling.advance(lease.frames - have, limit)
            except EndOfSteps:  # slots filled before are counted
                return

    def _ends(self, lease: Lease) -> bool:
        gate = self._filling.gate
        if self._filling.over:
            return True
        if gate is None or lease.last:
            return False
        # An episode that starts without a ticket would be wasted, and its lane out of order.
        return gate.starting(self._driver.upcoming()) > gate.total - gate.started


def _with_tickets(gate: EpisodeBudget) -> int:
    """Return a number of slots so small that no lane can start an episode without a ticket."""
    return max(1, min(SLOTS_AT_ONCE, (gate.total - gate.started) // gate.lanes))


def _say_counted(board: memoryview, slots: int, executed: int) -> None:
    board[COUNTED] = counted_word(slots, executed)
