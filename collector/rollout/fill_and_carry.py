"""Stepping of a batched environment until enough transitions are there, in slot order.

A driver fills slots of a slab; :class:`Rollout` decides how many, counts their transitions, and
carries the surplus into the next block.
"""

from collections.abc import Iterator, Sequence
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import NOTHING, Ledger, LedgerEntry
from tallyroll.collector.counting.transitions import Mask, in_columns, in_lanes, whole_slots
from tallyroll.collector.options import Surplus
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.rollout.source import Block, Discarded, Sound
from tallyroll.collector.run_plan import counting
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key

SLOTS_AT_ONCE = 8
"""Slots between two looks at a budget of episodes: few, because a look costs little."""


class Rollout:
    """Fill a slab, count its transitions, carry the surplus, and give out blocks.

    Args:
        driver: fills slots.
        policy: None draws random actions.
        extra: keys that the policy writes beside the action.
        surplus: the fate of transitions of the last step beyond those asked for.
        random_frames: number of transitions at the start that have random actions.
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
        gate: EpisodeBudget | None,
    ) -> None:
        self.driver, self.policy, self.slab = driver, policy, driver.slab
        self.slabs = (self.slab,)
        self.lanes = self.slab.lanes
        self.gate = gate
        self.random_frames = random_frames
        self._surplus = surplus
        self._extra = tuple(extra)
        self._held: NDArray[np.bool_] | None = None
        self._given = True
        """True if all transitions in the slab, apart from held ones, were handed over."""
        self._entry = NOTHING
        """Counts since the last block."""
        self._cuts: NDArray[np.bool_] | None = None
        self._restarting = True
        self._limit = self.slab.slots
        self.counts = counting(
            workers=driver.in_workers,
            transitions=driver.all_are_transitions,
            episodes=gate is not None,
        )
        self._all_taken = self.counts.way == "whole"
        self._plain_block: Block | None = None
        """The block of one slot, used again for each: the one before is over by then."""
        self._put_back = False
        """True if the transitions in the slab are the next block."""
        self.version = RANDOM_VERSION
        """The policy's version when the one slot was filled."""
        self._of_one_slot = LedgerEntry(slots=self.lanes, executed=self.lanes)
        self.carry = table_of((driver.used_at, *self.slab.carry_words))

    # --- filling ----------------------------------------------------------------------------------

    def block(self, want: int) -> Block:
        """Step until ``want`` transitions are in the slab, it is full, or a lane was cut.

        If the environment or the policy raises, the complete slots are the driver's ``used`` ones.
        """
        if self._put_back:
            self._put_back = False
            return self._take(want)
        self._make_room()
        self._given = False
        if self._restarting:
            self._restarting = False
            with self.driver.interruptible():
                self.driver.begin()
        if want == self.lanes and self._all_taken and self._held is None:
            drawing = self.random_frames > 0 and self.policy is not None
            if not (drawing or self.driver.stopping):
                return self._one_slot()
        have = self.held
        while have < want and self.driver.used < self.slab.slots and not self._over:
            have += self._advance(want - have)
            if self._cuts is not None or self.driver.paused:
                break
        return self._take(want)

    def _one_slot(self) -> Block:
        """Fill one slot of all lanes and return it; only for slots that need no other counts."""
        slab = self.slab
        try:
            with self.driver.interruptible():
                self.fill()
        except BaseException:
            slab.version[0] = self.version
            self._count_filled()
            raise
        slab.transitions[0], slab.version[0] = True, self.version
        block = self._plain_block
        if block is None:
            index, lane = whole_slots(1, self.lanes)
            if slab.first_lane:
                lane += np.int32(slab.first_lane)
            block = Block(slab, 1, slab.transitions[:1], index, lane, giver=self, again=self)
            self._plain_block = block
        block.entry = self._of_one_slot
        if self._entry is not NOTHING:
            block.entry = self._take_entry().plus(self._of_one_slot)
        return block

    def fill(self) -> None:
        """Step all lanes once, into the first slot."""
        policy, self._given = self.policy, False
        if policy is None:
            self.driver.random_steps(0, 1)
            return
        self.version = policy.version
        if not policy.refreshes:
            self.driver.policy_steps(0, 1)
            return
        self.slab.version[0] = self.version
        self.driver.policy_steps(0, 1)  # newer weights write their version
        self.version = int(self.slab.version[0, 0])

    def put_back(self) -> None:
        """Make the filled slot the next block; after an error `salvage` returns it."""
        self._count_filled()
        self._put_back = True

    def _count_filled(self) -> None:
        if self.policy is None or not self.policy.refreshes:
            self.slab.version[0] = self.version
        self._count(0, self.driver.used, self.lanes)

    def keeps(self, more: bool) -> bool:
        """Return whether the slab stays as it is until delivery: until the next :meth:`block`."""
        return not more

    def given(self, block: Block) -> None:
        """Leave the last block's transitions to the caller, which counts them from here on."""
        self._given, self._cuts = True, None

    def released(self, block: Block) -> None:
        """Do nothing; see :meth:`keeps`."""

    @property
    def held(self) -> int:
        """Number of transitions that wait for the next block."""
        return 0 if self._held is None else int(np.count_nonzero(self._held))

    @property
    def dry(self) -> bool:
        """True if no more blocks will come: the run was stopped, or its episodes are complete."""
        return self._held is None and not self._put_back and self._over

    @property
    def paused(self) -> bool:
        """True if the last block is shorter because a signal's handler waits."""
        return self.driver.paused

    def go_on(self) -> None:
        """Go on after the signal's handler was called."""
        self.driver.go_on()

    @property
    def _over(self) -> bool:
        return self.driver.stopping or (self.gate is not None and self.gate.finished)

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """Yield, after an error, at most ``most`` complete transitions of the ``sound`` slots."""
        if self._given:
            return
        used = self.driver.used
        good = sound(self.slab, used)
        self._happened(LedgerEntry(discarded=int(self.slab.transitions[good:used].sum())))
        self.driver.used = good
        yield self._take(min(most, good * self.lanes))

    def refused(self) -> tuple[Slab, int, NDArray[np.bool_]] | None:
        """Return, after an error, the slot whose actions an environment may have refused.

        The flags ``[lane]`` mark the lanes whose actions count; None if the slab is full.
        """
        at, driver = self.driver.used, self.driver
        if at >= self.slab.slots:
            return None
        if not at or driver.all_are_transitions:
            return self.slab, at, driver.upcoming()
        return self.slab, at, ~driver.ended(at - 1, at)[0]

    def last_slot(self, rewards: Sequence[Key]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return reward and end of every lane ``[lane]`` in the last slot that was filled."""
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

    def restart_lanes(self, ledger: Ledger) -> None:
        """Reset every lane before the next slot; no transition may be carried then."""
        assert not self.held
        self._restarting = True
        self.driver.restart()
        if self.gate is not None:
            self.gate.restart(ledger.episodes_complete)

    def stop(self) -> None:
        """End the run after the step under way."""
        self.driver.stop()

    def discard(self, rewards: Sequence[Key]) -> Discarded:
        """Discard the transitions that are in no block, and count them."""
        lanes = self.driver.run_lanes
        reward, ended = np.zeros(lanes), np.zeros(lanes, np.bool_)
        if self.held:
            reward, ended = self.last_slot(rewards)
        discarded = self.discard_held()
        self._plain_block = None  # its reference cycle would keep memory until a collection
        return Discarded(self._take_entry(), discarded, reward, ended)

    def discard_held(self) -> NDArray[np.bool_]:
        """Discard and count the transitions that were not handed over; return their lanes."""
        marks = self._waiting()
        at = slice(self.driver.used - len(marks), self.driver.used)
        if self.policy is not None:
            drawn = marks & (self.slab.version[at] == RANDOM_VERSION)
            self.random_frames += int(drawn.sum())
        self._happened(LedgerEntry(discarded=int(marks.sum())))
        if self.slab.lane is not None:
            marks = in_lanes(marks, self.slab.lane[at], self.driver.run_lanes)
        lanes: NDArray[np.bool_] = np.logical_or.reduce(marks, axis=0)
        self._held, self._given, self._put_back = None, True, False
        return lanes

    def _waiting(self) -> Mask:
        """Return the marks ``[time, lane]`` of the last transitions, not handed over yet."""
        if not self._given:  # an error came before
            return self.slab.transitions[: self.driver.used]
        return np.zeros((0, self.lanes), np.bool_) if self._held is None else self._held[None]

    # --- how many slots, with actions of the policy or random ones --------------------------------

    def _make_room(self) -> None:
        self.slab.keep_last(self.driver.used, self._held)
        self.driver.used = 0 if self._held is None else 1

    def _take(self, want: int) -> Block:
        used = self.driver.used
        transitions = self.slab.transitions[:used]
        block = Block.of(self.slab, transitions, want)
        self._held = None
        if block.taken is not transitions and used:
            left = transitions[-1] & ~block.taken[-1]
            self._held = left if left.any() else None
        block.giver, block.entry, block.cuts = self, self._take_entry(), self._cuts
        return block

    def _take_entry(self) -> LedgerEntry:
        entry, self._entry = self._entry, NOTHING
        return entry

    def _happened(self, entry: LedgerEntry) -> None:
        self._entry = entry if self._entry is NOTHING else self._entry.plus(entry)

    def _advance(self, missing: int) -> int:
        """Step once, or as often as is surely needed; return the number of transitions."""
        start = self.driver.used
        steps = min(ceil(missing / self.lanes), self._limit - start)
        if self.gate is not None:
            # Steps beyond the last episode of the budget would be wasted.
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
            marked = self._count(start, self.driver.used, stepped)
        return marked

    @property
    def _random_left(self) -> int:
        """Number of random actions still to be drawn, without those of lanes under way."""
        return self.random_frames - self.driver.random_under_way

    def _slots_at_once(self, gate: EpisodeBudget) -> int:
        """Return the number of slots until the next look at an episode budget."""
        return SLOTS_AT_ONCE if 0 < gate.started < gate.total else 1

    def _needed(self, missing: int) -> int:
        """Return how many lanes, from the lowest on, have to step for ``missing`` transitions."""
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
        """Fill slots with random actions while these last, then one with actions of both kinds."""
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

    def _count(self, start: int, stop: int, stepped: int) -> int:
        """Mark and count the transitions of slots ``[start, stop)``; return their number."""
        account = self.driver.account(start, stop, stepped)
        transitions, resets = account.transitions, account.slots - account.executed
        marked = int(np.count_nonzero(transitions))
        discarded, on_resets = account.beyond, 0
        drawing = self.policy is not None and self.random_frames > 0
        if drawing or (self.policy is not None and resets):
            by_policy = self.slab.version[start:stop] != RANDOM_VERSION
        if self.policy is not None and resets:
            chosen = (by_policy & ~transitions)[:, :stepped]
            if account.ran is not None:
                chosen &= account.ran[:, :stepped]
            on_resets = int(np.count_nonzero(chosen))
        if self.gate is not None and stop > start:
            before = marked
            transitions = self._wanted(self.gate, transitions, start, stop)
            marked = int(np.count_nonzero(transitions))
            discarded += before - marked
        if drawing:
            self.random_frames -= int(np.count_nonzero(transitions & ~by_policy))
        self.slab.transitions[start:stop] = transitions
        self._happened(
            LedgerEntry(account.slots, account.executed, resets, account.lost, discarded, on_resets)
        )
        self._cuts = self.driver.take_cuts()
        if self._cuts is not None and self.gate is not None:
            self.gate.cut(self._cuts)
        return marked

    def _wanted(self, gate: EpisodeBudget, transitions: Mask, start: int, stop: int) -> Mask:
        """Return the marks of ``transitions`` that belong to the budget's episodes."""
        ended = self.driver.ended(start, stop)
        if self.slab.lane is None:
            return gate.wanted(transitions, ended)
        lane = self.slab.lane[start:stop]
        of_lanes = [in_lanes(flags, lane, gate.lanes) for flags in (transitions, ended)]
        return transitions & in_columns(gate.wanted(*of_lanes), lane)
