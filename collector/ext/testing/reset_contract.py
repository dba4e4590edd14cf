"""Contract tests of resets and seeds."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.stepping.arrays import as_flags
from tallyroll.collector.envs.system import Mask
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.ext.testing.hand import Hand, SeededHand, Values
from tallyroll.collector.ext.testing.system_case import SEED, SystemCase


@dataclass
class Episode:
    """An episode of a lane: seed and context of its reset, observations and actions."""

    seed: int
    context: Mapping[str, Any]
    seen: list[Values] = field(default_factory=list)
    actions: list[Values] = field(default_factory=list)

    @classmethod
    def of(cls, hand: SeededHand, lane: int) -> Self:
        """Return the current episode of a lane, without steps."""
        return cls(int(hand.seeds[lane]), hand.contexts[lane])


class ResetContract(SystemCase):
    """Tests that resets restart only the intended lanes, and that seeds repeat a run."""

    def test_only_a_reset_slot_ignores_its_action(self) -> None:
        """Compare two instances whose actions differ only in the step after each end."""
        if not self.repeatable:
            return
        one, other = self.hand(), self.hand()
        differs, ends = False, 0
        for same, ended in self._twins(one, other):
            if not same:
                differs = True
                break
            ends += int(ended.sum())
        declared = one.d.at_end
        if declared == "reset_slot":
            assert not differs, (
                'declared at_end="reset_slot", but the action after an end had an effect'
            )
        else:
            assert differs or ends < 5 or not self._acts(one), (
                f'declared at_end="{declared}", but the actions after {ends} ends had no effect: '
                "is the step after an end a reset slot?"
            )
        self.close(one.system, other.system)

    def test_a_lane_that_was_reset_executes_its_next_action(self) -> None:
        """Check with ``resets="mask"`` that a lane that was reset does not reset itself again."""
        self._require_executed_after_resets("mask")

    def test_lanes_that_were_all_reset_execute_their_next_actions(self) -> None:
        """Check that a lane does not reset itself again after a reset of all lanes.

        The test ends early if the system refuses such a reset.
        """
        self._require_executed_after_resets("all")

    def _require_executed_after_resets(self, how: str) -> None:
        """Compare two instances that are reset after ends and then act differently for one step."""
        one, other = self.hand(), self.hand()
        whole, possible = how == "all", one.d.resets
        if not self.repeatable or possible == "none" or (possible == "all" and not whole):
            return self.close(one.system, other.system)
        differs, ends = False, 0
        for same, ended in self._twins(one, other):
            if not same:
                differs = True
                break
            ends += int(ended.sum())
            if ended.any():
                try:
                    one.reset(None if whole else ended)
                    other.reset(None if whole else ended)
                except EnvironmentRefused:
                    return self.close(one.system, other.system)
        assert differs or ends < 5 or not self._acts(one), (
            f"the actions that followed {ends} ends and resets had no effect: does the system "
            "reset such lanes once more?"
        )
        return self.close(one.system, other.system)

    def _twins(self, one: Hand, other: Hand) -> Iterator[tuple[bool, Mask]]:
        """Step two instances, with different actions after ends.

        Yield whether their observations agree, and a mask of the new ends.
        """
        after_end = np.zeros(one.d.lanes, np.bool_)
        others = self.actions(one.system, self.steps, seed=1)
        for action, another in zip(self.actions(one.system, self.steps), others, strict=True):
            changed = [value.copy() for value in action]
            for value, new in zip(changed, another, strict=True):
                value[after_end] = new[after_end]
            out, after, _ = one.step(action)
            after_other = other.step(changed)[1]
            same = all(np.array_equal(a, b) for a, b in zip(after, after_other, strict=True))
            after_end = as_flags(out.terminated) | as_flags(out.truncated)
            yield same, after_end

    def _acts(self, hand: Hand) -> bool:
        """Return True if actions change the results of this system."""
        one, other = self.hand(), self.hand()
        try:
            pairs = zip(
                self.actions(one.system, self.steps),
                self.actions(one.system, self.steps, seed=1),
                strict=True,
            )
            for action, another in pairs:
                after, after_other = one.step(action)[1], other.step(another)[1]
                if any(not np.array_equal(a, b) for a, b in zip(after, after_other, strict=True)):
                    return True
            return False
        finally:
            self.close(one.system, other.system)

    def test_seeds_repeat_a_run(self) -> None:
        """Check that the same seeds and actions give the same values."""
        if not self.repeatable:
            return None
        one, other = self.hand(), self.hand()
        if one.d.seeds == "none":
            return self.close(one.system, other.system)
        self.require_equal(one.seen, other.seen, "the first observations")
        for action in self.actions(one.system, self.steps):
            self.require_equal(one.step(action)[1], other.step(action)[1], "a step")
        return self.close(one.system, other.system)

    def test_an_episode_is_repeated_by_what_its_reset_was_given(self) -> None:
        """Check with ``reset_seeds`` that seed and context determine the start of an episode.

        The test replays the last complete episode of each lane, but never its first episode, as the
        first episode of a new instance.
        """
        seeds = lane_seeds(SEED, self.lanes, 0)
        hand = SeededHand(self.make(self.lanes, seeds), seeds, self.draw)
        if not hand.d.reset_seeds or not self.repeatable or self.counts_episodes:
            return self.close(hand.system)
        whole = self._last_whole_episodes(hand)
        assert whole, "expected a lane with three episodes; choose more steps, or shorter episodes"
        at = [whole.get(lane, next(iter(whole.values()))) for lane in range(self.lanes)]
        contexts = itertools.chain((each.context for each in at), itertools.repeat(at[0].context))
        again = SeededHand(
            self.make(self.lanes, seeds), [each.seed for each in at], lambda _: next(contexts)
        )
        for step in range(max(len(each.actions) for each in at)):
            for lane, each in whole.items():
                if step < len(each.actions):
                    found = [value[lane] for value in again.seen]
                    self.require_equal(each.seen[step], found, f"lane {lane}, step {step}")
            acts = zip(
                *(each.actions[min(step, len(each.actions) - 1)] for each in at), strict=True
            )
            again.step([np.stack(each) for each in acts])
        return self.close(hand.system, again.system)

    def _last_whole_episodes(self, hand: SeededHand) -> dict[int, "Episode"]:
        """Step the system, and return the last complete episode of each lane.

        The first episode of a lane does not count.
        """
        found: dict[int, Episode] = {}
        under_way, begun = [Episode.of(hand, lane) for lane in range(self.lanes)], [0] * self.lanes
        for action in self.actions(hand.system, self.steps):
            before = hand.seen
            _, _, executed = hand.step(action)
            for lane, episode in enumerate(under_way):
                if executed[lane]:
                    episode.seen.append([value[lane].copy() for value in before])
                    episode.actions.append([value[lane].copy() for value in action])
                if hand.seeds[lane] != episode.seed:
                    begun[lane] += 1
                    if begun[lane] > 1:
                        found[lane] = episode
                    under_way[lane] = Episode.of(hand, lane)
        return found

    def test_a_reset_by_mask_leaves_other_lanes_alone(self) -> None:
        """Check with ``resets="mask"`` that the other lanes continue undisturbed.

        If lanes draw from one generator, their next episodes may begin differently.
        """
        if not self.repeatable or self.lanes < 2:
            return None
        one, other = self.hand(), self.hand()
        if one.d.resets != "mask" or one.d.seeds == "none":
            return self.close(one.system, other.system)
        mask = np.zeros(self.lanes, np.bool_)
        mask[0] = True
        same = ~mask
        for at, action in enumerate(self.actions(one.system, self.steps)):
            if at % 3 == 1:
                one.system.reset(mask, None)
                one.pending[0] = False
            out, after, _ = one.step(action)
            after_other = other.step(action)[1]
            self.require_equal(
                [a[same] for a in after], [b[same] for b in after_other], "lane 0 was reset"
            )
            if one.d.seeds == "shared":
                same &= ~(as_flags(out.terminated) | as_flags(out.truncated))
        return self.close(one.system, other.system)
