"""Drivers fill the slots of a slab: their interface, and the base of local ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import PolicyError, TransitionError
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import RandomActions, action_keys
from tallyroll.collector.rollout.os_signals import admitted
from tallyroll.collector.slab.progress import FILLED, HALT
from tallyroll.collector.slab.slab import Array, Slab, SlabColumn
from tallyroll.storage.rows.keys import DONE, NEXT, TERMINATED, TRUNCATED, Key, spell


@dataclass(slots=True)  # one a slot is made: frozen ones would take four times as long
class Account:
    """The outcome of the slots ``[start, stop)`` that a driver was asked to fill."""

    slots: int
    """Lanes of step calls that were made."""
    executed: int
    """Of those, the ones in which an environment executed an action."""
    transitions: Mask
    """``[time, lane]``, of those, the ones whose rows are there to be taken."""
    ran: Mask | None = None
    """``[time, lane]``, the slots that were stepped; None: all of the lanes asked for."""
    lost: int = 0
    """Transitions that a worker which failed took with it."""
    beyond: int = 0
    """Those of others behind the last slot that every lane completed: they are in no batch."""


class Driver(ABC):
    """Fills slots of a slab, and says what is in them.

    ``used`` is the number of slots that are complete, also where filling was interrupted.
    """

    slab: Slab

    @property
    @abstractmethod
    def used(self) -> int:
        """Slots of the slab that are complete."""

    @used.setter
    @abstractmethod
    def used(self, slots: int) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """End after the step under way. Safe to call from a signal handler or another thread."""

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """:meth:`stop` was called."""

    def interruptible(self) -> AbstractContextManager[None]:
        """Signals' handlers may raise while slots are filled, or only where that waits."""
        return nullcontext()

    @abstractmethod
    def begin(self) -> None:
        """Start every lane's next trajectory: slot ``used`` sees what the reset returned."""

    @abstractmethod
    def restart(self) -> None:
        """The next :meth:`begin` resets, whatever was reset before."""

    @abstractmethod
    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""

    @abstractmethod
    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""

    @abstractmethod
    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only.

        Those in ``random_lanes`` act at random; None: all or none do, as the version says.
        """

    @abstractmethod
    def account(self, start: int, stop: int, stepped: int) -> Account:
        """The outcome of the slots ``[start, stop)``, of which ``stepped`` lanes were stepped."""

    @abstractmethod
    def upcoming(self) -> NDArray[np.bool_]:
        """Lanes whose next slot will be a transition."""

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Lanes that had to begin anew since this was last asked, or None."""
        return None

    def ended(self, start: int, stop: int) -> Mask:
        """``[time, lane]``, the environment reported an end in this slot."""
        return ended_in(self.slab, start, stop)


class LocalDriver(Driver):
    """The base of both drivers of this process.

    Args:
        env: batch size ``[]`` (one lane) or ``[lanes]``.
        policy: None draws random actions.
        extra: keys that the policy writes beside the action.
        slab: the memory that is filled.
        rng: draws random actions, where they are drawn in blocks.
        board: where progress is written; see :mod:`tallyroll.collector.slab.progress`.
        run_lanes: lanes of the run, for each of which ``rng`` draws, so that every process that
            has an equal one draws the same; None: only for those of ``env``.
    """

    drawn: Mapping[Key, Array] | None = None
    """Random actions ``[lane, ...]`` that were drawn elsewhere, for a slot of both kinds."""

    def __init__(
        self,
        env: EnvBase,
        policy: Policy | None,
        *,
        extra: Sequence[Key],
        slab: Slab,
        rng: np.random.Generator,
        board: memoryview,
        run_lanes: int | None = None,
    ) -> None:
        self.env, self.policy, self.slab, self.rng = env, policy, slab, rng
        self.lanes = slab.lanes
        self.board = board
        self._extra = tuple(extra)
        self._random = RandomActions(env, rng, run_lanes, slab.first_lane)
        self._actions = action_keys(env)
        self._first: TensorDictBase | None = None
        self.bind()

    @abstractmethod
    def bind(self) -> None:
        """Build views of the slab, once."""

    @abstractmethod
    def given_steps(self, start: int, stop: int, lanes: int) -> None:
        """Fill slots ``[start, stop)``, whose actions are there; of one slot, perhaps a part."""

    @abstractmethod
    def _begin(self, first: TensorDictBase) -> None:
        """Make ``first`` what the next slot's policy sees."""

    @abstractmethod
    def _transitions(self, start: int, stop: int) -> Mask:
        """Which slots in ``[start, stop)`` are transitions ``[time, lane]``."""

    @property
    def used(self) -> int:
        """Slots of the slab that are complete."""
        return self.board[FILLED]

    @used.setter
    def used(self, slots: int) -> None:
        self.board[FILLED] = slots

    @property
    def stopping(self) -> bool:
        """:meth:`stop` was called."""
        return self.board[HALT] != 0

    def stop(self) -> None:
        """End after the step under way."""
        self.board[HALT] = 1

    def interruptible(self) -> AbstractContextManager[None]:
        """Keep incomplete slots out of ``used``, wherever an interrupt comes."""
        return admitted()

    def start_from(self, first: TensorDictBase) -> None:
        """Use ``first``, what the environment's reset returned, instead of another reset."""
        self._first = first

    def restart(self) -> None:
        """The next :meth:`begin` resets the environment."""
        self._first = None

    def begin(self) -> None:
        """Start every lane's next trajectory."""
        first, self._first = self._first, None
        self._begin(self.env.reset() if first is None else first)

    def upcoming(self) -> NDArray[np.bool_]:
        """Lanes whose next slot will be a transition."""
        return np.ones(self.lanes, np.bool_)

    def account(self, start: int, stop: int, stepped: int) -> Account:
        """The outcome of the slots ``[start, stop)``."""
        if stop == start:
            return Account(0, 0, np.zeros((0, self.lanes), np.bool_))
        transitions = self._transitions(start, stop)
        if stepped < self.lanes:
            transitions[:, stepped:] = False
        executed = int(np.count_nonzero(transitions))
        return Account((stop - start) * stepped, executed, transitions)

    def _refresh(self, start: int, stop: int) -> None:
        """Newer weights, where there are any, choose the actions of slots ``[start, stop)``."""
        if self.policy is not None and self.policy.refresh():
            self.slab.version[start:stop] = self.policy.version


def ended_in(slab: Slab, start: int, stop: int) -> Mask:
    """``[time, lane]``, an end was reported in this slot of ``slab``."""
    terminated = slab.columns[TERMINATED][start:stop]
    other = slab.columns.get(TRUNCATED, slab.columns.get(DONE))
    assert other is not None
    flags = terminated | other[start:stop]
    ended: Mask = flags.reshape(stop - start, slab.lanes).cpu().numpy()
    return ended


def changed(key: Key, got: torch.Tensor | None, wanted: torch.Tensor | None = None) -> Exception:
    """The error for a value that is not what the first step gave."""
    kind = TransitionError if key[0] == NEXT else PolicyError
    if got is None or wanted is None:
        return kind(f"{spell(key)} is missing; it was there on the first step")
    return kind(
        f"{spell(key)}: got {SlabColumn(got.dtype, tuple(got.shape))}, expected "
        f"{SlabColumn(wanted.dtype, tuple(wanted.shape))} as on the first step"
    )
