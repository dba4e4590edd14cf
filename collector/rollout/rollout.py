"""Step a batched environment until enough transitions are there, in slot order.

A driver fills slots of a slab; :class:`Rollout` decides how many, counts what they hold, and
carries what is left over into the next block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.counting.transitions import (
    Mask,
    by_lane,
    first_in_slot_order,
    in_columns,
    in_lanes,
    lane_major,
)
from tallyroll.collector.options import Surplus
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key

SLOTS_AT_ONCE = 8
"""With a budget of episodes: few, for each look at it costs little beside a step."""


@dataclass(frozen=True)
class Block:
    """The transitions of a slab that enter the batch. Rows stand lane by lane."""

    slab: Slab
    used: int
    """Slots of the slab that were filled."""
    taken: Mask
    """``[used, lane]``, the transitions that are rows of this block."""
    index: NDArray[np.intp]
    """``[row]``, into the slots flattened to ``[used * lane]``."""
    lane: NDArray[np.int32]
    """``[row]``, numbered over the whole run."""

    @classmethod
    def of(cls, slab: Slab, transitions: Mask, count: int) -> "Block":
        """The first ``count`` of ``transitions`` ``[used, lane]``."""
        taken = first_in_slot_order(transitions, count)
        if slab.lane is None:
            index, lane = lane_major(taken)
        else:
            index, lane = by_lane(taken, slab.lane[: len(taken)])
        if slab.first_lane:
            lane += np.int32(slab.first_lane)
        return cls(slab, len(transitions), taken, index, lane)

    def __len__(self) -> int:
        return len(self.index)


Sound = Callable[[Slab, int], int]
"""How many of the first slots of a slab, of so many that were filled, are as declared."""


class Source(Protocol):
    """A source of blocks of transitions for a collector, until it is dry."""

    random_frames: int
    """That many transitions still have random actions."""

    def fill(self, want: int) -> Block:
        """At most ``want`` transitions that follow those of the last block; perhaps none yet.

        Say :meth:`copied` before the next call: until then they are the source's to count.
        """

    def keeps(self, more: bool) -> bool:
        """The last block's slots may stay as they are until :meth:`delivered`.

        ``more``: another block will be asked for before.
        """

    def copied(self, kept: bool) -> None:
        """The rows of the last block were copied, but for what is ``kept`` where it is."""

    def delivered(self) -> None:
        """Nothing of what was kept is needed any more."""

    @property
    def held(self) -> int:
        """Transitions that were counted as executed, and that wait for the next block."""

    @property
    def dry(self) -> bool:
        """No more will come: the run was stopped, or its episodes are complete."""

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Lanes whose trajectories ended, unfinished, with the last block; None where none did."""

    def last_slot(self, rewards: Sequence[Key]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Reward and end of every lane ``[lane]`` in the last slot that was filled."""

    def discard_held(self) -> NDArray[np.bool_]:
        """Throw away and count all that :meth:`copied` was not said of; returns their lanes."""

    def restart_lanes(self) -> None:
        """Every lane begins anew before its next slot; nothing may be held then."""

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """After an error: what is complete, as far as it is ``sound``; at most ``most`` of it.

        The rest is thrown away, and counted. Say :meth:`copied` after each.
        """

    def refused(self) -> tuple[Slab, int] | None:
        """After an error: the slot whose actions an environment may have refused."""

    def stop(self) -> None:
        """End after the step under way. Safe to call from a signal handler or another thread."""


class Rollout:
    """Fills a slab, counts, carries, and says which transitions come next.

    Args:
        driver: fills slots.
        policy: None draws random actions.
        extra: keys that the policy writes beside the action.
        surplus: what happens to transitions of the last step beyond those asked for.
        random_frames: that many transitions at the start have random actions.
        ledger: counted up as slots are executed.
        gate: an episode budget, or None.
    """

    def __init__(
        self,
        driver: Driver,
        policy: Policy | None,
        *,
        extra: Sequence[Key],
        surplus: Surplus,
        random_frames: int,
        ledger: Ledger,
        gate: EpisodeBudget | None,
    ) -> None:
        self.driver, self.policy, self.slab = driver, policy, driver.slab
        self.lanes = self.slab.lanes
        self.ledger, self.gate = ledger, gate
        self.random_frames = random_frames
        self._surplus = surplus
        self._extra = tuple(extra)
        self._held: NDArray[np.bool_] | None = None
        self._given = True
        """What is in the slab was handed over, but for what is held."""
        self._cuts: NDArray[np.bool_] | None = None
        self._restarting = True
        self._limit = self.slab.slots

    # --- filling ----------------------------------------------------------------------------------

    def fill(self, want: int) -> Block:
        """Step until ``want`` transitions are in the slab, it is full, or a lane was cut.

        What a raising environment or policy left complete is in the driver's ``used`` slots.
        """
        self._make_room()
        self._given = False
        if self._restarting:
            self._restarting = False
            with self.driver.interruptible():
                self.driver.begin()
        have = self.held
        while have < want and self.driver.used < self.slab.slots and not self._over:
            before = self.driver.used
            self._advance(want - have)
            have += int(self.slab.transitions[before : self.driver.used].sum())
            if self._cuts is not None:
                break
        return self._take(want)

    def keeps(self, more: bool) -> bool:
        """The slab stays as it is until the next :meth:`fill`."""
        return not more

    def copied(self, kept: bool) -> None:
        """The last block's transitions are the caller's to count from here on."""
        self._given = True

    def delivered(self) -> None:
        """See :meth:`keeps`."""

    @property
    def held(self) -> int:
        """Transitions that wait for the next block."""
        return 0 if self._held is None else int(self._held.sum())

    @property
    def dry(self) -> bool:
        """No more will come: the run was stopped, or its episodes are complete."""
        return self._held is None and self._over

    @property
    def _over(self) -> bool:
        return self.driver.stopping or (self.gate is not None and self.gate.finished)

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Lanes whose trajectories ended, unfinished, with the last block."""
        cuts, self._cuts = self._cuts, None
        return cuts

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """After an error: what is complete, as far as it is ``sound``; at most ``most`` of it."""
        used = self.driver.used
        good = sound(self.slab, used)
        self.ledger.discarded += int(self.slab.transitions[good:used].sum())
        self.driver.used = good
        yield self._take(min(most, good * self.lanes))

    def refused(self) -> tuple[Slab, int] | None:
        """After an error: the slot whose actions an environment may have refused."""
        at = self.driver.used
        return (self.slab, at) if at < self.slab.slots else None

    def last_slot(self, rewards: Sequence[Key]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Reward and end of every lane ``[lane]`` in the last slot that was filled."""
        at = self.driver.used - 1
        total = np.zeros(self.lanes)
        for key in rewards:
            reward = self.slab.columns[key][at].to(torch.float64).cpu()
            total += reward.reshape(self.lanes, -1).sum(dim=1).numpy()
        ended = self.driver.ended(at, at + 1)[0]
        if self.slab.lane is None:
            return total, ended
        lane = self.slab.lane[at]
        of_lanes = np.zeros(self.driver.run_lanes)
        of_lanes[lane] = total
        return of_lanes, in_lanes(ended[None], lane[None], self.driver.run_lanes)[0]

    def restart_lanes(self) -> None:
        """Reset every lane before the next slot; nothing may be carried then."""
        assert not self.held
        self._restarting = True
        self.driver.restart()
        if self.gate is not None:
            self.gate.restart(self.ledger.episodes_complete)

    def stop(self) -> None:
        """End the run after the step under way."""
        self.driver.stop()

    def discard_held(self) -> NDArray[np.bool_]:
        """Throw away and count all that :meth:`copied` was not said of; returns their lanes."""
        marks = self._waiting()
        at = slice(self.driver.used - len(marks), self.driver.used)
        if self.policy is not None:
            drawn = marks & (self.slab.version[at] == RANDOM_VERSION)
            self.random_frames += int(drawn.sum())
        self.ledger.discarded += int(marks.sum())
        if self.slab.lane is not None:
            marks = in_lanes(marks, self.slab.lane[at], self.driver.run_lanes)
        lanes: NDArray[np.bool_] = np.logical_or.reduce(marks, axis=0)
        self._held, self._given = None, True
        return lanes

    def _waiting(self) -> Mask:
        """``[time, lane]``, those of the last slots whose transitions were not handed over."""
        if not self._given:  # an error came before
            return self.slab.transitions[: self.driver.used]
        return np.zeros((0, self.lanes), np.bool_) if self._held is None else self._held[None]

    # --- how many slots, and who acts in them -----------------------------------------------------

    def _make_room(self) -> None:
        self.slab.keep_last(self.driver.used, self._held)
        self.driver.used = 0 if self._held is None else 1

    def _take(self, want: int) -> Block:
        used = self.driver.used
        transitions = self.slab.transitions[:used]
        block = Block.of(self.slab, transitions, want)
        left = transitions[-1] & ~block.taken[-1] if used else np.zeros(0, np.bool_)
        self._held = left if left.any() else None
        return block

    def _advance(self, missing: int) -> None:
        """Step at least once and at most as often as surely needed."""
        start = self.driver.used
        steps = min(ceil(missing / self.lanes), self._limit - start)
        if self.gate is not None:
            # What is stepped beyond the last episode of the budget would be wasted.
            steps = min(steps, self._slots_at_once(self.gate))
        stepped = self.lanes
        if self._surplus == "never_step":
            stepped = self._needed(missing)
            steps = 1 if stepped < self.lanes else max(1, min(steps, missing // self.lanes))
        try:
            with self.driver.interruptible():
                if self.policy is None:
                    self._random_slots(start, start + steps, stepped)
                elif self._random_left > 0:
                    self._opening(start, steps, stepped)
                else:
                    self._policy_slots(start, start + steps, stepped)
        finally:
            self._count(start, self.driver.used, stepped)

    @property
    def _random_left(self) -> int:
        """Actions that are still to be drawn: those of lanes under way have been."""
        return self.random_frames - self.driver.random_under_way

    def _slots_at_once(self, gate: EpisodeBudget) -> int:
        """Slots until an episode budget is looked at again."""
        return SLOTS_AT_ONCE if 0 < gate.started < gate.total else 1

    def _needed(self, missing: int) -> int:
        """Lanes to step, from the lowest on, for ``missing`` transitions; all where that is few."""
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
        """Random frames: whole slots while they last, then one slot of both kinds."""
        assert self.policy is not None
        left = self._random_left
        whole = min(steps, left // stepped)
        if whole:
            for key in self._extra:
                self.slab.columns[key][start : start + whole].zero_()
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

    def _count(self, start: int, stop: int, stepped: int) -> None:
        """Mark and count the transitions of slots ``[start, stop)``."""
        account = self.driver.account(start, stop, stepped)
        transitions, ledger = account.transitions, self.ledger
        ledger.slots += account.slots
        ledger.executed += account.executed
        ledger.reset_slots += account.slots - account.executed
        ledger.lost += account.lost
        ledger.discarded += account.beyond
        by_policy = self.slab.version[start:stop] != RANDOM_VERSION
        if self.policy is not None and account.slots > account.executed:
            on_resets = (by_policy & ~transitions)[:, :stepped]
            if account.ran is not None:
                on_resets &= account.ran[:, :stepped]
            ledger.policy_calls_on_reset_slots += int(on_resets.sum())
        if self.gate is not None and stop > start:
            before = int(transitions.sum())
            transitions = self._wanted(self.gate, transitions, start, stop)
            ledger.discarded += before - int(transitions.sum())
        if self.policy is not None and self.random_frames > 0:
            self.random_frames -= int((transitions & ~by_policy).sum())
        self.slab.transitions[start:stop] = transitions
        self._cuts = self.driver.take_cuts()
        if self._cuts is not None and self.gate is not None:
            self.gate.cut(self._cuts)

    def _wanted(self, gate: EpisodeBudget, transitions: Mask, start: int, stop: int) -> Mask:
        """Those of ``transitions`` that belong to the budget's episodes."""
        ended = self.driver.ended(start, stop)
        if self.slab.lane is None:
            return gate.wanted(transitions, ended)
        lane = self.slab.lane[start:stop]
        of_lanes = [in_lanes(flags, lane, gate.lanes) for flags in (transitions, ended)]
        return transitions & in_columns(gate.wanted(*of_lanes), lane)
