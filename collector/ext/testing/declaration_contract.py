"""Contract tests that a system matches its declaration."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.stepping.arrays import as_flags, as_tensor
from tallyroll.collector.envs.system import require_consistent
from tallyroll.collector.ext.testing.hand import Values
from tallyroll.collector.ext.testing.system_case import SEED, SystemCase
from tallyroll.storage.rows.keys import (
    Key,
    format_key,
)


class DeclarationContract(SystemCase):
    """Tests that values, ends and final observations match the declaration."""

    def test_the_declaration_is_consistent(self) -> None:
        """Check that the declaration does not contradict itself."""
        system = self.make(self.lanes, lane_seeds(SEED, self.lanes, 0))
        require_consistent(system.declares)
        assert system.declares.lanes == self.lanes, (
            "make(lanes, …): expected as many lanes as requested"
        )
        self.close(system)

    def test_values_are_as_declared(self) -> None:
        """Check shapes, dtypes and ranges of the results of resets and steps."""
        hand = self.hand()
        d = hand.d
        self._require_declared(hand.seen, d.observation, d.lanes)
        for action in self.actions(hand.system, self.steps):
            out, after, _ = hand.step(action)
            self._require_declared(after, d.observation, d.lanes)
            self._require_declared(hand.seen, d.observation, d.lanes)
            for reward, spec in zip(out.reward, d.reward.values(), strict=True):
                shape = (d.lanes, *spec.shape)
                wanted = shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
                got = tuple(as_tensor(reward, torch.device("cpu")).shape)
                assert got == wanted, f"reward: declared {wanted}, got {got}"
            for flags in (out.terminated, out.truncated):
                assert as_flags(flags).shape == (d.lanes,), "expected flags [lane]"
        self.close(hand.system)

    def _require_declared(self, values: Values, specs: Mapping[Key, Any], lanes: int) -> None:
        assert len(values) == len(specs), f"declared {len(specs)} observations, got {len(values)}"
        for (key, spec), value in zip(specs.items(), values, strict=True):
            tensor = torch.from_numpy(value)
            wanted = (spec.dtype, (lanes, *spec.shape))
            got = (tensor.dtype, tuple(tensor.shape))
            assert got == wanted, f"{format_key(key)}: declared {wanted}, got {got}"
            grown = spec.cpu().expand(lanes, *spec.shape)
            assert grown.is_in(tensor), f"{format_key(key)}: {value!r:.200} is not in {spec}"

    def test_episodes_end_more_than_once(self) -> None:
        """Check that every lane ends and continues, and that truncation matches the declaration."""
        hand = self.hand()
        ends, truncated = np.zeros((2, hand.d.lanes), np.int64)
        runs = np.zeros(hand.d.lanes, np.int64)
        longest = np.zeros(hand.d.lanes, np.int64)
        for action in self.actions(hand.system, self.steps):
            out, _, executed = hand.step(action)
            ended = as_flags(out.terminated) | as_flags(out.truncated)
            ends += ended
            truncated += as_flags(out.truncated)
            runs = np.where(ended, runs + executed, 0)
            longest = np.maximum(longest, runs)
            assert not (ended & ~executed).any(), "an episode ended in the slot that resets it"
        assert (ends >= 2).all(), f"too few episodes ended in {self.steps} steps: {ends.tolist()}"
        assert (longest < ends).all() or (ends < 3).any(), (
            "a lane ends in every step after its first end, so it is not reset. Correct the "
            f'declared at_end="{hand.d.at_end}"'
        )
        assert hand.d.truncation or not truncated.any(), (
            "an episode was truncated, but truncation=False was declared"
        )
        self.close(hand.system)

    def test_a_final_observation_is_not_the_next_first_one(self) -> None:
        """Check that final observations are not the first observations of the next episodes."""
        hand = self.hand()
        if hand.d.finals == "lost":
            return self.close(hand.system)
        same = ends = 0
        starts = [value.copy() for value in hand.seen]
        varied = False
        for action in self.actions(hand.system, self.steps):
            out, after, _ = hand.step(action)
            ended = as_flags(out.terminated) | as_flags(out.truncated)
            valid = ended if out.final_valid is None else ended & as_flags(out.final_valid)
            for lane in np.flatnonzero(valid) if hand.d.at_end != "reset_slot" else ():
                ends += 1
                same += all(
                    np.array_equal(a[lane], s[lane]) for a, s in zip(after, hand.seen, strict=True)
                )
                varied |= any(
                    not np.array_equal(s[lane], first[lane])
                    for s, first in zip(hand.seen, starts, strict=True)
                )
        assert not (ends >= 3 and same == ends and varied), (
            f"each of {ends} final observations is the first one of the next episode, so the "
            f'system resets itself within its step. Correct the declared at_end="{hand.d.at_end}" '
            f'and finals="{hand.d.finals}"'
        )
        return self.close(hand.system)
