"""The interface of drivers, which fill the slots of a slab, and the driver of this process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.envs.failures import env_code
from tallyroll.collector.interrupts import pause_on_signal
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import RandomActions
from tallyroll.collector.rollout.actor import Actor
from tallyroll.collector.rollout.lanes import Lanes, SlotOutcome, ended_in
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.progress import FILLED, HALT, PAUSE, STOP
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key


class Driver(ABC):
    """Fills the slots of a slab, and reports their outcome.

    ``used`` is the number of complete slots, even after an interrupt.
    """

    slab: Slab
    run_lanes: int
    """Number of lanes of the environment; a slot has fewer lanes if they return in any order."""
    in_workers = True
    """True if worker processes fill the slots."""
    all_are_transitions = False
    """True if every filled slot is a transition of its lane, and no lane is ever cut."""
    board: memoryview | None = None
    """Words that report progress and that only this process writes; None if there are none."""
    used_at = 0
    """The address of ``used``; 0 if this process does not write it."""
    ends_tell = False
    """True if the ends of episodes alone determine which slots are transitions."""
    pending: NDArray[np.bool_] | None = None
    """Marks ``[lane]`` of lanes whose next slot is a reset slot.

    None if there are no reset slots, or if ends of episodes do not determine them.
    """

    @property
    def boards(self) -> Sequence[Any]:
        """The boards of all processes that step lanes: of this process, or of each worker."""
        return () if self.board is None else (self.board,)

    @property
    @abstractmethod
    def used(self) -> int:
        """Number of complete slots of the slab."""

    @abstractmethod
    def seek(self, slots: int) -> None:
        """Continue after the first ``slots`` slots, and count these as complete."""

    @abstractmethod
    def stop(self) -> None:
        """End after the step in progress. Safe to call from a signal handler or another thread."""

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """True if :meth:`stop` was called."""

    @property
    @abstractmethod
    def paused(self) -> bool:
        """True if a signal handler is waiting for the step to end, so that filling pauses."""

    @abstractmethod
    def go_on(self) -> None:
        """Continue after the handler was called; this also undoes :meth:`stop`."""

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a reusable context that defers signal handlers while slots are filled."""
        return nullcontext()

    @abstractmethod
    def begin(self) -> None:
        """Start every lane's next trajectory; slot ``used`` gets the results of the reset."""

    @property
    def resets_next(self) -> bool:
        """True if the next :meth:`begin` resets; False if it does not reset or this is unknown."""
        return False

    @abstractmethod
    def restart(self) -> None:
        """Make the next :meth:`begin` reset, even after another reset."""

    @abstractmethod
    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""

    @abstractmethod
    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""

    @abstractmethod
    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only.

        Lanes in ``random_lanes`` act at random. If None, the version in the slot decides for all
        lanes.
        """

    @abstractmethod
    def outcome(self, start: int, stop: int, stepped: int) -> SlotOutcome:
        """Return the outcome of slots ``[start, stop)``, in which ``stepped`` lanes step."""

    @abstractmethod
    def upcoming(self) -> NDArray[np.bool_]:
        """Return marks ``[lane]`` of lanes whose next slot will be a transition."""

    @property
    def random_under_way(self) -> int:
        """Number of steps in progress whose actions are random."""
        return 0

    @property
    def mended(self) -> bool:
        """True if lanes had to be restarted the last time that slots were filled."""
        return False

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Return the lanes that had to be restarted since the last call, or None."""
        return None

    def ended(self, start: int, stop: int) -> Mask:
        """Return marks ``[time, lane]`` of slots in which the environment reported an end."""
        return ended_in(self.slab, start, stop)


class LocalDriver(Driver):
    """Chooses actions, writes them to a slab, and steps lanes in this process.

    Args:
        lanes: the lanes to step, bound to the slab that they fill.
        policy: chooses actions; None if all actions are random.
        extra: keys that the policy writes in addition to the action.
        random: the source of random actions.
        board: words that report progress; see :mod:`tallyroll.collector.slab.progress`.
    """

    in_workers = False
    board: memoryview

    def __init__(
        self,
        lanes: Lanes,
        policy: Policy | None,
        *,
        extra: Sequence[Key],
        random: RandomActions,
        board: memoryview,
    ) -> None:
        self.stepped, self.policy, self.slab = lanes, policy, lanes.slab
        self.lanes = self.slab.lanes
        self.all_are_transitions, self.pending = lanes.all_are_transitions, lanes.pending
        self.ends_tell = lanes.all_are_transitions or lanes.pending is not None
        self.run_lanes = lanes.env.batch_size.numel()
        self.board = board
        self.used_at = np.frombuffer(board, np.int64)[FILLED:].ctypes.data
        self.actor, self._random = Actor(lanes, policy, extra, random), random
        self._first: TensorDictBase | None = None

    def decisions(self) -> dict[str, Decision]:
        """Return the decisions of a `RunPlan` about acting and stepping."""
        actor, masks = self.actor.decision, self._random.masking
        return {"acts": actor, "masks": masks, **self.stepped.decisions()}

    # --- progress ---------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Number of slots of the slab that are complete."""
        return self.board[FILLED]

    def seek(self, slots: int) -> None:
        """Continue after the first ``slots`` slots."""
        self.board[FILLED] = slots

    @property
    def stopping(self) -> bool:
        """True if :meth:`stop` was called."""
        return self.board[HALT] == STOP

    def stop(self) -> None:
        """End after the step in progress."""
        self.board[HALT] = STOP

    @property
    def paused(self) -> bool:
        """True if a signal handler is waiting for the step to end."""
        return self.board[HALT] == PAUSE

    def go_on(self) -> None:
        """Continue after the signal handler was called."""
        self.board[HALT] = 0

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context in which an interrupt never counts an incomplete slot as ``used``."""
        return pause_on_signal(partial(_pause, self.board))

    # --- beginnings -------------------------------------------------------------------------------

    def start_from(self, first: TensorDictBase) -> None:
        """Begin the trajectories with ``first``, the result of a reset, without another reset."""
        self._first = first

    @property
    def resets_next(self) -> bool:
        """True if the next :meth:`begin` resets the environment."""
        return self._first is None

    def restart(self) -> None:
        """Make the next :meth:`begin` reset the environment."""
        self._first = None

    def begin(self) -> None:
        """Start every lane's next trajectory."""
        first, self._first = self._first, None
        if first is None:
            lane = self.slab.first_lane if self.lanes == 1 else None
            with env_code("a reset of the environment", lane):
                first = self.stepped.env.reset()
        self.stepped.begin(self.used, first)

    # --- slots ------------------------------------------------------------------------------------

    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""
        place = self._random.place if stop > start + 1 else None
        if self._random.block_drawn:
            self.actor.put_at_random(start, stop)
            self.stepped.step(start, stop)
        else:
            for at in self.actor.each_at_random(start, stop):
                self.stepped.step(at, at + 1)
                if self.board[HALT]:
                    break
        if place is not None and (filled := self.used) < stop:  # unused actions are drawn again
            self._random.return_to(place, filled - start)

    def step_with_actions(self, start: int, stop: int, lanes: int) -> None:
        """Fill slots ``[start, stop)``, whose actions are set, or a part of a single slot."""
        if lanes < self.lanes:
            self.stepped.step_part(start, lanes)
        else:
            self.stepped.step(start, stop)

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""
        actor, refreshes = self.actor, self.policy is not None and self.policy.refreshes
        for at in range(start, stop):
            if random_lanes is None:
                if refreshes:
                    actor.refresh(at, stop)
                actor.act(at)
            else:
                actor.act_mixed(at, random_lanes)
            self.stepped.step(at, at + 1)
            if self.board[HALT]:
                break

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only."""
        actor = self.actor
        if random_lanes is not None:
            actor.act_mixed(at, random_lanes, some=lanes > 0)
        elif self.policy is None or self.slab.version[at, 0] == RANDOM_VERSION:
            # Draw numbers even if no lane is stepped, as other drivers do.
            ahead = self._random.draw_slots(1)
            if lanes:
                actor.act_at_random(at, ahead, 0)
        elif lanes:
            actor.refresh(at, at + 1)
            actor.act(at)
        self.step_with_actions(at, at + 1, lanes)

    # --- outcomes ---------------------------------------------------------------------------------

    def upcoming(self) -> NDArray[np.bool_]:
        """Return marks ``[lane]`` of lanes whose next slot will be a transition."""
        return self.stepped.upcoming()

    @property
    def random_under_way(self) -> int:
        """Number of steps in progress whose actions are random."""
        return self.stepped.random_under_way

    def ended(self, start: int, stop: int) -> Mask:
        """Return marks ``[time, lane]`` of slots in which the environment reported an end."""
        return self.stepped.ended(start, stop)

    def outcome(self, start: int, stop: int, stepped: int) -> SlotOutcome:
        """Return the outcome of the slots ``[start, stop)``."""
        if stop == start:
            return SlotOutcome(0, 0, np.zeros((0, self.lanes), np.bool_))
        return self.stepped.outcome(start, stop, stepped)


def _pause(board: memoryview) -> None:
    """Make filling pause after the step in progress, unless it stops there anyway."""
    if not board[HALT]:
        board[HALT] = PAUSE
