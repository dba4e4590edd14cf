"""The loop: step a batched environment until enough transitions are there, in slot order.

Two ways to drive an environment, one way to count: :class:`Rollout` fills the slab, counts and
carries; ``rollout_in_place`` hands the environment a tensordict of the slab, which it fills;
``rollout_copy`` drives any TorchRL environment and copies what it returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tallyroll.collector.episode_gate import EpisodeGate
from tallyroll.collector.errors import PolicyError, TransitionError
from tallyroll.collector.keys import (
    DONE,
    RANDOM_VERSION,
    TERMINATED,
    TRUNCATED,
    Key,
    dotted,
)
from tallyroll.collector.ledger import Ledger
from tallyroll.collector.policy import Policy
from tallyroll.collector.random_actions import RandomActions, action_keys
from tallyroll.collector.slab import Column, Slab
from tallyroll.collector.slots import Mask, first_in_slot_order, lane_major

_SLOTS_AT_ONCE = 8
"""With a budget of episodes: few, for each look at it costs little beside a step."""

Surplus = Literal["carry", "discard", "never_step"]


@dataclass(frozen=True)
class Block:
    """The transitions of one fill of the slab that enter the batch. Rows stand lane by lane."""

    used: int
    """Slots of the slab that were filled."""
    taken: Mask
    """``[used, lane]``, the transitions that are rows of this block."""
    index: NDArray[np.intp]
    """``[row]``, into the slots flattened to ``[used * lane]``."""
    lane: NDArray[np.int32]
    per_lane: NDArray[np.int64]

    @classmethod
    def of(cls, transitions: Mask, count: int) -> "Block":
        """The first ``count`` of ``transitions`` ``[used, lane]``."""
        taken = first_in_slot_order(transitions, count)
        return cls(len(transitions), taken, *lane_major(taken))

    def __len__(self) -> int:
        return len(self.index)


class Rollout(ABC):
    """What both ways of driving share: filling, counting, carrying, random frames.

    Args:
        env: batch size ``[]`` (one lane) or ``[lanes]``.
        policy: None draws random actions.
        extra: keys that the policy writes beside the action.
        slab: the memory that is filled.
        surplus: what happens to transitions of the last step beyond those asked for.
        random_frames: that many transitions at the start have random actions.
        ledger: counted up as slots are executed.
        gate: an episode budget, or None.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Policy | None,
        *,
        extra: Sequence[Key],
        slab: Slab,
        surplus: Surplus,
        random_frames: int,
        rng: np.random.Generator,
        ledger: Ledger,
        gate: EpisodeGate | None,
    ) -> None:
        self.env, self.policy, self.slab, self.rng = env, policy, slab, rng
        self.lanes = slab.lanes
        self.ledger, self.gate = ledger, gate
        self.random_frames = random_frames
        self.stopping = False
        self._surplus = surplus
        self._extra = tuple(extra)
        self._random = RandomActions(env)
        self._actions = action_keys(env)
        self._used = 0
        self._held: NDArray[np.bool_] | None = None
        self._restarting = True
        self._first: TensorDictBase | None = None
        self.bind()

    # --- what a way of driving supplies ---------------------------------------------------------

    @abstractmethod
    def bind(self) -> None:
        """Build views of the slab, once."""

    @abstractmethod
    def begin(self, first: TensorDictBase) -> None:
        """Make ``first`` what the next slot's policy sees: it begins every lane's trajectory."""

    @abstractmethod
    def _random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""

    @abstractmethod
    def _policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""

    @abstractmethod
    def _part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only.

        Those in ``random_lanes`` act at random; None: all or none do, as the version says.
        """

    @abstractmethod
    def _transitions(self, start: int, stop: int) -> Mask:
        """Which slots in ``[start, stop)`` are transitions ``[time, lane]``."""

    def _upcoming(self) -> NDArray[np.bool_]:
        """Lanes whose next slot will be a transition."""
        return np.ones(self.lanes, np.bool_)

    # --- filling ----------------------------------------------------------------------------------

    def fill(self, want: int) -> Block:
        """Step until ``want`` transitions are in the slab, or until it is full.

        What a raising environment or policy left complete is in the first :attr:`used` slots.
        """
        self._make_room()
        if self._restarting:
            self._restarting = False
            self.begin(self.env.reset() if self._first is None else self._first)
            self._first = None
        have = self.held
        while have < want and self._used < self.slab.slots and not self._over:
            before = self._used
            self._advance(want - have)
            have += int(self.slab.transitions[before : self._used].sum())
        return self._take(want)

    @property
    def held(self) -> int:
        """Transitions that wait for the next batch."""
        return 0 if self._held is None else int(self._held.sum())

    @property
    def used(self) -> int:
        """Slots of the slab that are complete."""
        return self._used

    def salvage(self, slots: int) -> Block:
        """The transitions of the first ``slots`` slots, all of them, after an error."""
        self._used = slots
        return self._take(slots * self.lanes)

    def last_slot(self, rewards: Sequence[Key]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Reward and end of every lane ``[lane]`` in the last slot that was filled."""
        at = self._used - 1
        total = np.zeros(self.lanes)
        for key in rewards:
            reward = self.slab.columns[key][at].to(torch.float64).cpu()
            total += reward.reshape(self.lanes, -1).sum(dim=1).numpy()
        return total, self.ended(at, at + 1)[0]

    def restart_lanes(self) -> None:
        """Reset every lane before the next slot; nothing may be carried then."""
        assert not self.held
        self._restarting, self._first = True, None
        if self.gate is not None:
            self.gate.restart(self.ledger.episodes_complete)

    def start_from(self, first: TensorDictBase) -> None:
        """Use ``first``, what the environment's reset returned, instead of another reset."""
        self._first = first

    def stop(self) -> None:
        """End the run after the step under way."""
        self.stopping = True

    @property
    def finished(self) -> bool:
        """An episode budget is fulfilled and nothing waits."""
        return self.gate is not None and self.gate.finished and self._held is None

    @property
    def _over(self) -> bool:
        return self.stopping or (self.gate is not None and self.gate.finished)

    def _make_room(self) -> None:
        self.slab.keep_last(self._used, self._held)
        self._used = 0 if self._held is None else 1

    def _take(self, want: int) -> Block:
        transitions = self.slab.transitions[: self._used]
        block = Block.of(transitions, want)
        left = transitions[-1] & ~block.taken[-1] if self._used else np.zeros(0, np.bool_)
        self._held = left if left.any() else None
        self.ledger.carried = int(left.sum())
        return block

    def discard_held(self) -> NDArray[np.bool_]:
        """Throw away the transitions that wait for the next batch; returns their lanes."""
        lanes = np.zeros(self.lanes, np.bool_) if self._held is None else self._held
        count = int(lanes.sum())
        if count and self.policy is not None:
            drawn = self.slab.version[self._used - 1, lanes] == RANDOM_VERSION
            self.random_frames += int(drawn.sum())
        self.ledger.discarded += count
        self.ledger.carried = 0
        self._held = None
        return lanes

    def _advance(self, missing: int) -> None:
        """Step at least once and at most as often as surely needed."""
        start = self._used
        steps = min(ceil(missing / self.lanes), self.slab.slots - start)
        if self.gate is not None:
            # What is stepped beyond the last episode of the budget would be wasted.
            more = 0 < self.gate.started < self.gate.total
            steps = min(steps, _SLOTS_AT_ONCE if more else 1)
        stepped = self.lanes
        if self._surplus == "never_step":
            stepped = self._needed(missing)
            steps = 1 if stepped < self.lanes else max(1, min(steps, missing // self.lanes))
        try:
            if self.policy is None:
                self._random_slots(start, start + steps, stepped)
            elif self.random_frames > 0:
                self._opening(start, steps, stepped)
            else:
                self._policy_slots(start, start + steps, stepped)
        finally:
            self._count(start, self._used, stepped)

    def _needed(self, missing: int) -> int:
        """Lanes to step, from the lowest on, for ``missing`` transitions; all where that is few."""
        if self.gate is None:
            return min(missing, self.lanes)
        made = np.cumsum(self.gate.upcoming(self._upcoming()))
        return min(int(np.searchsorted(made, missing)) + 1, self.lanes)

    def _random_slots(self, start: int, stop: int, stepped: int) -> None:
        self.slab.version[start:stop] = RANDOM_VERSION
        if stepped < self.lanes:
            self._part(start, stepped, None)
        else:
            self._random_steps(start, stop)

    def _policy_slots(self, start: int, stop: int, stepped: int) -> None:
        assert self.policy is not None
        self.slab.version[start:stop] = self.policy.version
        if stepped < self.lanes:
            self._part(start, stepped, None)
        else:
            self._policy_steps(start, stop)

    def _opening(self, start: int, steps: int, stepped: int) -> None:
        """Random frames: whole slots while they last, then one slot of both kinds."""
        assert self.policy is not None
        whole = min(steps, self.random_frames // stepped)
        if whole:
            for key in self._extra:
                self.slab.columns[key][start : start + whole].zero_()
            self._random_slots(start, start + whole, stepped)
        else:
            upcoming = self._upcoming()
            if self.gate is not None:
                upcoming = self.gate.upcoming(upcoming)
            drawn = upcoming & (np.cumsum(upcoming) <= self.random_frames)
            self.slab.version[start] = np.where(drawn, RANDOM_VERSION, self.policy.version)
            if stepped < self.lanes:
                self._part(start, stepped, drawn)
            else:
                self._policy_steps(start, start + 1, drawn)

    def _count(self, start: int, stop: int, stepped: int) -> None:
        """Mark and count the transitions of slots ``[start, stop)``."""
        if stop == start:
            return
        transitions = self._transitions(start, stop)
        if stepped < self.lanes:
            transitions[:, stepped:] = False
        executed = int(transitions.sum())
        slots = (stop - start) * stepped
        ledger = self.ledger
        ledger.slots += slots
        ledger.executed += executed
        ledger.reset_slots += slots - executed
        if self.policy is not None:
            by_policy = self.slab.version[start:stop] != RANDOM_VERSION
            ledger.policy_calls_on_reset_slots += int((by_policy & ~transitions)[:, :stepped].sum())
        if self.gate is not None:
            transitions = self.gate.wanted(transitions, self.ended(start, stop))
            ledger.discarded += executed - int(transitions.sum())
        if self.policy is not None and self.random_frames > 0:
            self.random_frames -= int((transitions & ~by_policy).sum())
        self.slab.transitions[start:stop] = transitions

    def ended(self, start: int, stop: int) -> Mask:
        """``[time, lane]``, the environment reported an end in this slot."""
        terminated = self.slab.columns[TERMINATED][start:stop]
        other = self.slab.columns.get(TRUNCATED, self.slab.columns.get(DONE))
        assert other is not None
        flags = terminated | other[start:stop]
        ended: Mask = flags.reshape(stop - start, self.lanes).cpu().numpy()
        return ended


def changed(key: Key, got: torch.Tensor | None, wanted: torch.Tensor | None = None) -> Exception:
    """The error for a value that is not what the first step gave."""
    kind = TransitionError if key[0] == "next" else PolicyError
    if got is None or wanted is None:
        return kind(f"{dotted(key)} is missing; it was there on the first step")
    return kind(
        f"{dotted(key)}: got {Column(got.dtype, tuple(got.shape))}, wanted "
        f"{Column(wanted.dtype, tuple(wanted.shape))} as on the first step"
    )
