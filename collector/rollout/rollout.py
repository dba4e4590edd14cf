"""Rollouts: step a batched environment until enough transitions are there, in slot order.

A driver fills slots of a slab. `SlabFiller` decides how many, and counts their transitions.
`Rollout` hands them over in blocks, and carries the surplus into the next block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import Ledger, LedgerEntry
from tallyroll.collector.counting.transitions import in_lanes
from tallyroll.collector.options import Surplus
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.openings import Counts, Openings
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.rollout.few_slots import FewSlots, FewSlotsOfWorkers, PendingRows
from tallyroll.collector.rollout.slab_filler import SlabFiller, SlabFillerOfSeveral
from tallyroll.collector.rollout.source import (
    Block,
    DiscardedTransitions,
    PendingTransitions,
    Sound,
)
from tallyroll.collector.run_plan import counting
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import Key


class Rollout:
    """Fills a slab, hands over blocks of transitions, and carries the surplus.

    Args:
        driver: fills slots.
        policy: None draws random actions.
        extra: keys that the policy writes beside the action.
        surplus: the fate of transitions of the last step beyond those asked for.
        random_frames: number of transitions at the start that have random actions.
        gate: an episode budget, or None.
        run_lanes: lanes of the run, if the driver has a part of them; None if it has all.
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
        self._held = PendingRows(self.lanes)
        self._given = True
        """True if all transitions in the slab were handed over, except the held ones."""
        self.counts = counting(
            ends_tell=driver.ends_tell, episodes=gate is not None, several=several
        )
        self._put_back = False
        """True if the transitions in the slab are the next block."""
        self.few: FewSlots | None = None
        if driver.board is not None:
            kind = FewSlotsOfWorkers if driver.in_workers else FewSlots
            self.few = kind(driver, policy, self._held)

    @property
    def boards(self) -> Sequence[Any]:
        """The words of all that step lanes."""
        return self.driver.boards

    @property
    def random_frames(self) -> int:
        """Number of transitions that still have random actions."""
        return self._filling.random_frames

    @random_frames.setter
    def random_frames(self, count: int) -> None:
        self._filling.random_frames = count

    # --- filling ----------------------------------------------------------------------------------

    def block(self, want: int) -> Block:
        """Step until the slab has ``want`` transitions or is full, or a lane was cut.

        If the environment or the policy raises, the driver's first ``used`` slots are complete.
        """
        if self._put_back:
            self._put_back = False
            return self._take(want)
        driver, filling, most = self.driver, self._filling, self.slab.slots
        self.slab.keep_last(driver.used, self._held.lanes)
        driver.used = 1 if self.held else 0
        self._given = False
        if filling.restarting and not filling.over:
            filling.begin()
        have = self.held
        while have < want and driver.used < most and not filling.over:
            have += filling.advance(want - have, most)
            if filling.cuts is not None or driver.paused:
                break
        return self._take(want)

    def put_back(self) -> None:
        """Make the slots that `few` filled the next block; after an error, `salvage` yields it."""
        assert self.few is not None
        self.few.write_version()
        self._filling.count(self.few.first, self.driver.used, self.lanes)
        self._put_back, self._given = True, False

    def make_ready(self) -> bool:
        """Let `few` continue after the last block; return False if the loop has to."""
        filling = self._filling
        more = self._put_back or not self._given or filling.restarting or filling.over
        draws = self.policy is not None and filling.random_frames > 0
        if more or draws or self.few is None or self.paused:
            return False
        return self.few.make_ready()

    def given(self, block: Block) -> None:
        """Hand the last block's transitions over: from here on the caller counts them."""
        self._given, self._filling.cuts = True, None

    @property
    def held(self) -> int:
        """Number of transitions that wait for the next block."""
        return self._held.counts.rows

    @property
    def dry(self) -> bool:
        """True if no more blocks will come: the run was stopped, or its episodes are complete."""
        return not (self.held or self._put_back) and self._filling.over

    @property
    def paused(self) -> bool:
        """True if the last block is shorter because a signal handler waits."""
        return self.driver.paused

    def go_on(self) -> None:
        """Continue after the signal handler was called."""
        self.driver.go_on()

    def drawn_ahead(self, openings: Openings) -> Counts:
        """Return how many random actions are in no block; see `TransitionSource.drawn_ahead`."""
        at = slice(self.driver.used - 1, self.driver.used)
        held = self._held.lanes
        if held is None:
            return np.zeros_like(openings.left)
        return openings.counted(self.slab, at, held[None])

    @contextmanager
    def still(self) -> Iterator[Sequence[PendingTransitions]]:
        """Return a context without steps; see `TransitionSource.still`."""
        used, held = self.driver.used, self._held.lanes
        first = used - 1 if self._given else 0
        marks = self.slab.transitions[first:used]
        if self._given:  # all but the surplus of the last slot
            marks = marks[:0] if held is None else held[None]
        if not marks.any():
            yield ()
            return
        yield (PendingTransitions.of(self.slab, marks, self.driver.ended(first, used)),)

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """Yield at most ``most`` complete transitions after an error; see `TransitionSource`."""
        if self._given:
            return
        used = self.driver.used
        good = sound(self.slab, used)
        self._filling.happened(LedgerEntry(discarded=int(self.slab.transitions[good:used].sum())))
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

    def restart_lanes(self, ledger: Ledger) -> None:
        """Reset every lane before the next slot; no transition may be carried then."""
        assert not self.held
        self._filling.restart()
        if (gate := self._filling.gate) is not None:
            gate.restart(ledger.episodes_complete)

    @property
    def resets_first(self) -> bool:
        """True if all lanes are reset before the next step."""
        return self._filling.restarting and self.driver.resets_next

    def stop(self) -> None:
        """End the run after the step under way."""
        self.driver.stop()

    def discard(self, rewards: Sequence[Key]) -> DiscardedTransitions:
        """Discard the transitions that are in no block, and count them."""
        lanes = self.driver.run_lanes
        reward, ended = np.zeros(lanes), np.zeros(lanes, np.bool_)
        if self.held:
            reward, ended = _last_slot(self.driver, rewards)
        discarded = self.discard_held()
        own, run = self.slab.first_lane, self._run_lanes
        arrays = (_over_run(each, own, run) for each in (discarded, reward, ended))
        return DiscardedTransitions(self._filling.take_entry(), *arrays)

    def discard_held(self) -> NDArray[np.bool_]:
        """Discard and count transitions that were not handed over; return the driver's lanes."""
        # After an error, all that was not handed over; otherwise the surplus of the last slot.
        marks = self.slab.transitions[: self.driver.used]
        if self._given:
            marks = marks[:0] if self._held.lanes is None else self._held.lanes[None]
        at = slice(self.driver.used - len(marks), self.driver.used)
        if self.policy is not None:
            self._filling.take_back_drawn(at, marks)
        self._filling.happened(LedgerEntry(discarded=int(marks.sum())))
        if self.slab.lane is not None:
            marks = in_lanes(marks, self.slab.lane[at], self.driver.run_lanes)
        lanes: NDArray[np.bool_] = np.logical_or.reduce(marks, axis=0)
        self._held.hold(None)
        self._given, self._put_back = True, False
        return lanes

    def _take(self, want: int) -> Block:
        used = self.driver.used
        transitions = self.slab.transitions[:used]
        block = Block.of(self.slab, transitions, want)
        self._held.hold(None)
        if block.taken is not transitions and used:
            self._held.hold(transitions[-1] & ~block.taken[-1])
        filling = self._filling
        block.giver, block.entry = self, filling.take_entry()
        if filling.cuts is not None:
            block.cuts = _over_run(filling.cuts, self.slab.first_lane, self._run_lanes)
        return block


def _over_run(of_lanes: NDArray[Any], first: int, run_lanes: int | None) -> NDArray[Any]:
    """Return values ``[lane]`` of lanes from ``first`` on as those of all lanes of the run."""
    if run_lanes is None:
        return of_lanes
    found = np.zeros(run_lanes, of_lanes.dtype)
    found[first : first + len(of_lanes)] = of_lanes
    return found


def _last_slot(
    driver: Driver, rewards: Sequence[Key]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return reward and end of every lane ``[lane]`` in the last slot that was filled."""
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
