"""Step a batched environment until there are enough transitions, in slot order.

A driver fills slots of a slab. `SlabFiller` decides how many slots to fill, and counts their
transitions. `Rollout` delivers the transitions in blocks, and carries the surplus into the next
block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import Ledger, LedgerEntry
from tallyroll.collector.counting.transitions import Mask, in_lanes
from tallyroll.collector.options import Surplus
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.openings import Counts, Openings
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.rollout.few_slots import FewSlots, FewSlotsOfWorkers, HeldRows
from tallyroll.collector.rollout.slab_filler import SlabFiller, SlabFillerOfSeveral
from tallyroll.collector.rollout.source import (
    Block,
    DiscardedTransitions,
    UndeliveredTransitions,
    ValidSlots,
)
from tallyroll.collector.run_plan import counting
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import Key


class Slots(Enum):
    """The state of the filled slots of a slab, except for held transitions of the last slot."""

    QUEUED = "the next block"
    TAKEN = "in a block, or being filled for one"
    HANDED_OVER = "counted by the caller"


class Rollout:
    """Fills a slab, hands over its transitions in blocks, and carries the surplus.

    Args:
        driver: the driver that fills slots.
        policy: chooses actions; None if all actions are random.
        extra: keys that the policy writes in addition to the action.
        surplus: handling of transitions of the last step beyond the requested number.
        random_frames: number of transitions at the start that have random actions.
        gate: the episode budget; None if there is none.
        run_lanes: number of lanes of the run, if the driver has only a part of them; None if it has
            all.
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
        run_lanes: int | None = None,
    ) -> None:
        self.driver, self.policy, self.slab = driver, policy, driver.slab
        self._run_lanes = run_lanes
        self.slabs, self.lanes = (self.slab,), self.slab.lanes
        several = isinstance(policy, SeveralPolicies)
        self._filling = (SlabFillerOfSeveral if several else SlabFiller)(
            driver, policy, extra=extra, surplus=surplus, random_frames=random_frames, gate=gate
        )
        self.interruptible = self._filling.interruptible
        self._held = HeldRows(self.lanes)
        self._slots = Slots.HANDED_OVER
        self._left: Mask | None = None
        """Marks ``[used, lane]`` of transitions that the last block left in the queued slots."""
        self.counts = counting(
            ends_tell=driver.ends_tell, episodes=gate is not None, several=several
        )
        self.few: FewSlots | None = None
        if driver.board is not None:
            kind = FewSlotsOfWorkers if driver.in_workers else FewSlots
            self.few = kind(driver, policy, self._held)

    @property
    def boards(self) -> Sequence[Any]:
        """The boards of all processes that step lanes."""
        return self.driver.boards

    @property
    def random_frames(self) -> int:
        """Number of transitions that still have random actions."""
        return self._filling.random_frames

    @random_frames.setter
    def random_frames(self, count: int) -> None:
        self._filling.begin_at_random(count)

    # --- filling ----------------------------------------------------------------------------------

    def block(self, want: int) -> Block:
        """Step until the slab has ``want`` transitions or is full, or a lane was cut.

        If the environment or the policy raises, the driver's first ``used`` slots are complete.
        """
        if self._slots is Slots.QUEUED:
            return self._take_queued(want)
        driver, filling, most = self.driver, self._filling, self.slab.slots
        self.slab.keep_last(driver.used, self._held.lanes)
        driver.seek(1 if self.carried else 0)
        self._slots = Slots.TAKEN
        if filling.restarting and not filling.over:
            filling.begin()
        have = self.carried
        while have < want and driver.used < most and not filling.over:
            have += filling.advance(want - have, most)
            if filling.cuts is not None or driver.paused:
                break
        return self._take(want)

    def requeue(self) -> None:
        """Queue the slots that `few` filled as the next block.

        After an error, `recover` yields that block.
        """
        assert self.few is not None
        self.few.write_version()
        self._queue(self.few.first)

    def _queue(self, first: int) -> None:
        """Count the slots from ``first`` on, and make all filled slots the next block."""
        self._filling.count(first, self.driver.used, self.lanes)
        self._slots = Slots.QUEUED

    def make_ready(self) -> bool:
        """Let `few` continue after the last block; return False if the loop has to continue."""
        filling = self._filling
        more = self._slots is not Slots.HANDED_OVER or filling.restarting or filling.over
        draws = self.policy is not None and filling.random_frames > 0
        if more or draws or self.few is None or self.paused:
            return False
        return self.few.make_ready()

    def hand_over(self, block: Block) -> None:
        """Hand over the transitions of the last block, which the caller counts from here on."""
        if self._left is not None:
            self.slab.transitions[: len(self._left)] = self._left
            self._slots = Slots.QUEUED
            return
        self._slots = Slots.HANDED_OVER
        if self._filling.cuts is not None:
            self._filling.forget_cuts()

    @property
    def carried(self) -> int:
        """Number of transitions that wait for the next block."""
        return self._held.counts.rows if self._left is None else int(self._left.sum())

    @property
    def dry(self) -> bool:
        """True if no more blocks will come: the run is stopped, or its episodes are complete."""
        return not self.carried and self._slots is not Slots.QUEUED and self._filling.over

    @property
    def paused(self) -> bool:
        """True if the last block is shorter because a signal handler is waiting."""
        return self.driver.paused

    def go_on(self) -> None:
        """Continue after the signal handler was called."""
        self.driver.go_on()

    def undelivered_random(self, openings: Openings) -> Counts:
        """Return the number of random actions that are in no block; see `TransitionSource`."""
        at = slice(self.driver.used - 1, self.driver.used)
        held = self._held.lanes
        if held is None:
            return np.zeros_like(openings.left)
        return openings.counted(self.slab, at, held[None])

    @contextmanager
    def still(self) -> Iterator[Sequence[UndeliveredTransitions]]:
        """Pause stepping inside a ``with`` block; see `TransitionSource.still`."""
        used, held = self.driver.used, self._held.lanes
        first = used - 1 if self._slots is Slots.HANDED_OVER else 0
        marks = self.slab.transitions[first:used]
        if self._slots is Slots.HANDED_OVER:  # all but the surplus of the last slot
            marks = marks[:0] if held is None else held[None]
        if not marks.any():
            yield ()
            return
        yield (UndeliveredTransitions.of(self.slab, marks, self.driver.ended(first, used)),)

    def recover(self, valid_slots: ValidSlots, most: int) -> Iterator[Block]:
        """Yield at most ``most`` complete transitions after an error; see `TransitionSource`."""
        if self._slots is Slots.HANDED_OVER:
            return
        used = self.driver.used
        good = valid_slots(self.slab, used)
        self._filling.happened(LedgerEntry(discarded=int(self.slab.transitions[good:used].sum())))
        self.driver.seek(good)
        yield self._take(min(most, good * self.lanes))

    def refused(self) -> tuple[Slab, int, NDArray[np.bool_]] | None:
        """Return, after an error, the slot whose actions an environment may have refused.

        The flags ``[lane]`` mark the lanes whose actions would be executed. Return None if the slab
        is full.
        """
        at, driver = self.driver.used, self.driver
        if at >= self.slab.slots:
            return None
        if not at or driver.all_are_transitions:
            return self.slab, at, driver.upcoming()
        return self.slab, at, ~driver.ended(at - 1, at)[0]

    def restart_lanes(self, ledger: Ledger) -> None:
        """Reset every lane before the next slot; no transition may be carried at this time."""
        assert not self.carried
        self._filling.restart()
        if (gate := self._filling.gate) is not None:
            gate.restart(ledger.episodes_complete)

    @property
    def resets_first(self) -> bool:
        """True if all lanes are reset before the next step."""
        return self._filling.restarting and self.driver.resets_next

    def stop(self) -> None:
        """End the run after the step in progress."""
        self.driver.stop()

    def discard(self, rewards: Sequence[Key]) -> DiscardedTransitions:
        """Discard the transitions that are in no block, and count them."""
        lanes = self.driver.run_lanes
        reward, ended = np.zeros(lanes), np.zeros(lanes, np.bool_)
        if self.carried:
            reward, ended = _last_slot(self.driver, rewards)
        discarded = self.discard_carried()
        own, run = self.slab.first_lane, self._run_lanes
        arrays = (_over_run(each, own, run) for each in (discarded, reward, ended))
        return DiscardedTransitions(self._filling.take_entry(), *arrays)

    def discard_carried(self) -> NDArray[np.bool_]:
        """Discard and count transitions that were not handed over; return marks of their lanes."""
        # After an error, discard all slots not handed over; otherwise the surplus of the last slot.
        marks = self.slab.transitions[: self.driver.used]
        if self._slots is Slots.HANDED_OVER:
            marks = marks[:0] if self._held.lanes is None else self._held.lanes[None]
        at = slice(self.driver.used - len(marks), self.driver.used)
        if self.policy is not None:
            self._filling.take_back_drawn(at, marks)
        self._filling.happened(LedgerEntry(discarded=int(marks.sum())))
        if self.slab.lane is not None:
            marks = in_lanes(marks, self.slab.lane[at], self.driver.run_lanes)
        lanes: NDArray[np.bool_] = np.logical_or.reduce(marks, axis=0)
        self._held.hold(None)
        self._left, self._slots = None, Slots.HANDED_OVER
        return lanes

    def _take_queued(self, want: int) -> Block:
        """Return a block of the queued slots, which may have more than ``want`` transitions.

        They were filled for an earlier call, which a signal handler interrupted.
        """
        self._slots = Slots.TAKEN
        block = self._take(want)
        left = self.slab.transitions[: block.used] & ~block.taken
        if not left[:-1].any():
            return block
        self._left = left
        self._held.hold(None)
        return block.report(block.entry)  # lanes are cut after the transitions that are left

    def _take(self, want: int) -> Block:
        self._left = None
        used = self.driver.used
        transitions = self.slab.transitions[:used]
        block = Block.of(self.slab, transitions, want, owner=self)
        self._held.hold(None)
        if block.taken is not transitions and used:
            self._held.hold(transitions[-1] & ~block.taken[-1])
        filling = self._filling
        cuts = filling.cuts
        if cuts is not None:
            cuts = _over_run(cuts, self.slab.first_lane, self._run_lanes)
        return block.report(filling.take_entry(), cuts)


def _over_run(of_lanes: NDArray[Any], first: int, run_lanes: int | None) -> NDArray[Any]:
    """Return values of all lanes of the run: ``of_lanes`` from lane ``first`` on, otherwise 0."""
    if run_lanes is None:
        return of_lanes
    found = np.zeros(run_lanes, of_lanes.dtype)
    found[first : first + len(of_lanes)] = of_lanes
    return found


def _last_slot(
    driver: Driver, rewards: Sequence[Key]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the reward and the end flag of every lane ``[lane]`` in the last filled slot."""
    slab, at = driver.slab, driver.used - 1
    total = np.zeros(slab.lanes)
    for key in rewards:
        reward = slab.columns[key][at].to(torch.float64).cpu()
        with np.errstate(all="ignore"):  # infinite rewards of both signs
            total += reward.reshape(slab.lanes, -1).sum(dim=1).numpy()
    ended = driver.ended(at, at + 1)[0]
    if slab.lane is None:
        return total, ended
    lane = slab.lane[at]
    of_lanes = np.zeros(driver.run_lanes)
    of_lanes[lane] = total
    return of_lanes, in_lanes(ended[None], lane[None], driver.run_lanes)[0]
