"""Fill slots of a slab by stepping all lanes, and count their transitions."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import NOTHING, LedgerEntry
from tallyroll.collector.counting.transitions import Mask, in_columns, in_lanes
from tallyroll.collector.options import Surplus
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.actor import value_at_random
from tallyroll.collector.rollout.driver import Driver
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key

SLOTS_AT_ONCE = 8
"""Number of slots between two checks of an episode budget; small, because a check is cheap."""


def slots_until_check(gate: EpisodeBudget) -> int:
    """Return the number of slots to fill until the next check of an episode budget."""
    return SLOTS_AT_ONCE if 0 < gate.started < gate.total else 1


class SlabFiller:
    """Fills slots with actions of a policy or random ones; marks and counts their transitions.

    A `Rollout` makes blocks of the slots that its filler filled. A worker's filler fills the slots
    of a lease.

    Args:
        driver: the driver that fills slots.
        policy: chooses actions; None if all actions are random.
        extra: keys that the policy writes in addition to the action.
        surplus: handling of transitions of the last step beyond the requested number.
        random_frames: number of transitions at the start that have random actions.
        gate: the episode budget; None if there is none.
        at_once: returns the number of slots to fill until the next check of ``gate``.
        counted: a function that is called after each count with two numbers: the counted slots, and
            the executed transitions.
    """

    def __init__(
        self,
        driver: Driver,
        policy: Policy | None,
        *,
        extra: Sequence[Key],
        surplus: Surplus,
        random_frames: int,
        gate: EpisodeBudget | None,
        at_once: Callable[[EpisodeBudget], int] = slots_until_check,
        counted: Callable[[int, int], None] | None = None,
    ) -> None:
        self.driver, self.policy, self.slab = driver, policy, driver.slab
        self.lanes = self.slab.lanes
        self.gate, self.random_frames = gate, random_frames
        self.interruptible = driver.interruptible()
        """A context in which signal handlers are deferred while slots are filled."""
        self._at_once, self._counted = at_once, counted
        self._surplus, self._extra = surplus, tuple(extra)
        self.entry = NOTHING
        """Counts that no caller has taken yet."""
        self.cuts: NDArray[np.bool_] | None = None
        """Lanes that were cut in the last slot; None if no lane was."""
        self.restarting = True
        """True if all lanes have to begin new trajectories before the next slot."""

    @property
    def over(self) -> bool:
        """True if the run was stopped, or the episodes of its budget are complete."""
        return self.driver.stopping or (self.gate is not None and self.gate.finished)

    # --- beginnings, and counts -------------------------------------------------------------------

    def begin_at_random(self, count: int) -> None:
        """Draw the actions of the next ``count`` transitions at random."""
        self.random_frames = count

    def forget_cuts(self) -> None:
        """Forget the lanes that were cut in the last slot. A block has already reported them."""
        self.cuts = None

    def restart(self) -> None:
        """Reset every lane before the next slot."""
        self.restarting = True
        self.driver.restart()

    def begin(self) -> None:
        """Begin the trajectories of all lanes."""
        self.restarting = False
        with self.interruptible:
            self.driver.begin()

    def take_entry(self) -> LedgerEntry:
        """Return the counts since the last call."""
        entry, self.entry = self.entry, NOTHING
        return entry

    def happened(self, entry: LedgerEntry) -> None:
        """Add ``entry`` to the counts."""
        self.entry = entry if self.entry is NOTHING else self.entry.plus(entry)

    # --- how many slots, with actions of the policy or random ones --------------------------------

    def advance(self, missing: int, limit: int) -> int:
        """Step once, or as often as is certain to be needed; return the number of transitions.

        Args:
            missing: number of transitions that are wanted.
            limit: the slot at which filling ends.
        """
        start = self.driver.used
        steps = min(ceil(missing / self.lanes), limit - start)
        if self.gate is not None:
            # Steps beyond the last episode of the budget would be wasted.
            steps = min(steps, self._at_once(self.gate))
        stepped = self.lanes
        if self._surplus == "never_step":
            stepped = self._needed(missing)
            steps = 1 if stepped < self.lanes else max(1, min(steps, missing // self.lanes))
        try:
            with self.interruptible:
                if self.policy is None:
                    self._random_slots(start, start + steps, stepped)
                elif self._random_left > 0:
                    self._opening(start, steps, stepped)
                else:
                    self._policy_slots(start, start + steps, stepped)
        finally:
            marked = self.count(start, self.driver.used, stepped)
        return marked

    @property
    def _random_left(self) -> int:
        """Number of random actions still to be drawn, without those already in progress."""
        return self.random_frames - self.driver.random_under_way

    def _needed(self, missing: int) -> int:
        """Return how many lanes, from lane 0 on, have to step to make ``missing`` transitions."""
        if self.gate is None:
            return min(missing, self.lanes)
        made = np.cumsum(self.gate.upcoming(self.driver.upcoming()))
        return min(int(np.searchsorted(made, missing)) + 1, self.lanes)

    def _random_slots(self, start: int, stop: int, stepped: int) -> None:
        self.slab.version[start:stop] = RANDOM_VERSION
        if stepped < self.lanes:
            self.driver.part(start, stepped, None)
        else:
            self.driver.random_steps(start, stop)

    def _policy_slots(self, start: int, stop: int, stepped: int) -> None:
        assert self.policy is not None
        self.slab.version[start:stop] = self.policy.version
        if stepped < self.lanes:
            self.driver.part(start, stepped, None)
        else:
            self.driver.policy_steps(start, stop)

    def _opening(self, start: int, steps: int, stepped: int) -> None:
        """Fill slots with the remaining random actions, or one slot with actions of both kinds."""
        assert self.policy is not None
        left = self._random_left
        whole = min(steps, left // stepped)
        if whole:
            for key in self._extra:
                self.slab.columns[key][start : start + whole].fill_(value_at_random(key))
            self._random_slots(start, start + whole, stepped)
        else:
            upcoming = self.driver.upcoming()
            if self.gate is not None and self.slab.lane is None:
                upcoming = self.gate.upcoming(upcoming)
            drawn = upcoming & (np.cumsum(upcoming) <= left)
            self.slab.version[start] = np.where(drawn, RANDOM_VERSION, self.policy.version)
            if stepped < self.lanes:
                self.driver.part(start, stepped, drawn)
            else:
                self.driver.policy_steps(start, start + 1, drawn)

    def take_back_drawn(self, at: slice, marks: Mask) -> None:
        """Add discarded random transitions back to the random budget.

        ``marks`` ``[time, lane]`` marks the discarded transitions of slots ``at``.
        """
        drawn = marks & (self.slab.version[at] == RANDOM_VERSION)
        self.random_frames += int(np.count_nonzero(drawn))

    def count(self, start: int, stop: int, stepped: int) -> int:
        """Mark and count the transitions of slots ``[start, stop)``; return their number."""
        outcome = self.driver.outcome(start, stop, stepped)
        transitions, resets = outcome.transitions, outcome.slots - outcome.executed
        marked = int(np.count_nonzero(transitions))
        discarded, on_resets = outcome.beyond, 0
        drawing = self.policy is not None and self.random_frames > 0
        if drawing or (self.policy is not None and resets):
            by_policy = self.slab.version[start:stop] != RANDOM_VERSION
        if self.policy is not None and resets:
            chosen = (by_policy & ~transitions)[:, :stepped]
            if outcome.ran is not None:
                chosen &= outcome.ran[:, :stepped]
            on_resets = int(np.count_nonzero(chosen))
        if self.gate is not None and stop > start:
            before = marked
            transitions = self._wanted(self.gate, transitions, start, stop)
            marked = int(np.count_nonzero(transitions))
            discarded += before - marked
        if drawing:
            self.random_frames -= int(np.count_nonzero(transitions & ~by_policy))
        self.slab.transitions[start:stop] = transitions
        self.happened(
            LedgerEntry(outcome.slots, outcome.executed, resets, outcome.lost, discarded, on_resets)
        )
        self.cuts = self.driver.take_cuts()
        if self.cuts is not None and self.gate is not None:
            self.gate.cut(self.cuts)
        if self._counted is not None:
            self._counted(stop, self.entry.executed)
        return marked

    def _wanted(self, gate: EpisodeBudget, transitions: Mask, start: int, stop: int) -> Mask:
        """Return the marks of ``transitions`` that belong to the budget's episodes."""
        ended = self.driver.ended(start, stop)
        if self.slab.lane is None:
            return gate.wanted(transitions, ended)
        lane = self.slab.lane[start:stop]
        of_lanes = [in_lanes(flags, lane, gate.lanes) for flags in (transitions, ended)]
        return transitions & in_columns(gate.wanted(*of_lanes), lane)


class SlabFillerOfSeveral(SlabFiller):
    """A `SlabFiller` for several policies, some of which may act at random."""

    policy: SeveralPolicies

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._openings = self.policy.openings

    @property
    def _random_left(self) -> int:
        """Number of random actions still to be drawn for all policies.

        If there are none, but some policy still begins at random, the number is 1.
        """
        return super()._random_left or int(self._openings.under_way)

    def _policy_slots(self, start: int, stop: int, stepped: int) -> None:
        self.slab.version[start:stop] = self.policy.row_version
        if stepped < self.lanes:
            # Without marks, a driver decides by the version of the first lane, which may be -1.
            self.driver.part(start, stepped, np.zeros(self.lanes, np.bool_))
        else:
            self.driver.policy_steps(start, stop)

    def _opening(self, start: int, steps: int, stepped: int) -> None:
        """Fill a slot with actions of both kinds."""
        upcoming = self.driver.upcoming()
        if self.gate is not None:
            upcoming = self.gate.upcoming(upcoming)
        if (left := super()._random_left) > 0:
            drawn = upcoming & (np.cumsum(upcoming) <= left)
            version = np.where(drawn, RANDOM_VERSION, self.policy.row_version)
        else:
            drawn, version = self.policy.rows_of(self._openings.drawn(upcoming))
        self.slab.version[start] = version
        if stepped < self.lanes:
            self.driver.part(start, stepped, drawn)
        else:
            self.driver.policy_steps(start, start + 1, drawn)

    def take_back_drawn(self, at: slice, marks: Mask) -> None:
        """Add discarded random transitions back to the random budgets."""
        if not self.policy.draws:  # otherwise the random actions are not of all policies
            super().take_back_drawn(at, marks)
        self._openings.give_back(self._openings.counted(self.slab, at, marks))

    def count(self, start: int, stop: int, stepped: int) -> int:
        """Mark and count the transitions of slots ``[start, stop)``; return their number."""
        marked = super().count(start, stop, stepped)
        if self._openings.under_way:
            at = slice(start, stop)
            marks = self.slab.transitions[at]
            self._openings.draw(self._openings.counted(self.slab, at, marks))
        return marked
