"""Drivers, which fill the slots of a slab: their interface, and the one of this process."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.policies.bare_call import BareCall, traits_of
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import Ahead, RandomActions, action_keys
from tallyroll.collector.policies.trial import no_tensordict
from tallyroll.collector.rollout.lanes import Account, Lanes, changed, ended_in
from tallyroll.collector.rollout.os_signals import pausable
from tallyroll.collector.run_plan import Decision, acting
from tallyroll.collector.slab.progress import FILLED, HALT, PAUSE, STOP
from tallyroll.collector.slab.slab import Array, Slab
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key

WHILE_ACTING = "_tallyroll_while_acting"
"""The attribute by which an error of a worker says so to `raised_by_policy`."""


class Driver(ABC):
    """A filler of the slots of a slab; it says what is in them.

    ``used`` is the number of complete slots, even after an interrupt.
    """

    slab: Slab
    run_lanes: int
    """Lanes of the environment; as many as the slab's columns, unless lanes arrive."""
    in_workers = True
    """True if worker processes fill the slots."""
    all_are_transitions = False
    """True if every filled slot is a transition of its lane, and no lane is ever cut."""
    board: memoryview | None = None
    """Words of progress that this process alone writes; None: others do."""
    used_at = 0
    """The address of ``used``; 0 if it is no word of this process."""

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

    @property
    @abstractmethod
    def paused(self) -> bool:
        """True if a signal's handler waits for the step under way, and so for filling, to end."""

    @abstractmethod
    def go_on(self) -> None:
        """Go on after the handler was called; this takes :meth:`stop` back too."""

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context, for many uses, that defers signals' handlers while slots are filled."""
        return nullcontext()

    @abstractmethod
    def begin(self) -> None:
        """Start every lane's next trajectory: slot ``used`` sees the results of the reset."""

    @abstractmethod
    def restart(self) -> None:
        """Make the next :meth:`begin` reset, whatever was reset before."""

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
        """Return the outcome of slots ``[start, stop)``, stepped in the first ``stepped`` lanes."""

    @abstractmethod
    def upcoming(self) -> NDArray[np.bool_]:
        """Lanes whose next slot will be a transition."""

    @property
    def random_under_way(self) -> int:
        """Steps with random actions that have not come back."""
        return 0

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Return the lanes that had to begin again since the last call, or None."""
        return None

    def ended(self, start: int, stop: int) -> Mask:
        """``[time, lane]``, the environment reported an end in this slot."""
        return ended_in(self.slab, start, stop)


def raised_by_policy(error: BaseException) -> bool:
    """Whether ``error`` was raised while actions were chosen, so that the slot has none yet."""
    if getattr(error, WHILE_ACTING, False):  # in a worker
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in _ACTING:
        trace = trace.tb_next
    return trace is not None


class LocalDriver(Driver):
    """The driver that chooses actions, writes them to a slab, and steps lanes in this process.

    Args:
        lanes: the lanes to step, over the slab to fill.
        policy: None draws random actions.
        extra: keys that the policy writes beside the action.
        random: draws random actions.
        board: words for progress; see :mod:`tallyroll.collector.slab.progress`.
    """

    in_workers = False
    board: memoryview
    drawn: Mapping[Key, Array] | None = None
    """Random actions ``[lane, ...]`` that were drawn elsewhere, for a slot of both kinds."""

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
        self.all_are_transitions = lanes.all_are_transitions
        self.run_lanes = lanes.env.batch_size.numel()
        self.board = board
        self.used_at = np.frombuffer(board, np.int64)[FILLED:].ctypes.data
        self._extra = tuple(extra)
        self._random = random
        self._actions = action_keys(lanes.env)
        self._outputs = [(key, lanes.rows(key)) for key in (*self._actions, *self._extra)]
        traits = None if policy is None else traits_of(policy, self._actions, lanes.seen_rows)
        self.acts = acting(traits, fills_slab=lanes.fills_slab, extra=self._extra)
        self._bare: BareCall | None = None
        if policy is not None and self.acts.way == "network":
            self._bare = BareCall.of(policy, lanes.seen_rows)
        self._action_rows = dict(self._outputs[: len(self._actions)])
        self._masks = random.masks_in(self.slab.arrays) if lanes.fills_slab else None
        self._first: TensorDictBase | None = None

    def decisions(self) -> dict[str, Decision]:
        """Return the decisions of a `RunPlan` that are made here."""
        return {"acts": self.acts, **self.stepped.decisions()}

    # --- progress ---------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Number of slots of the slab that are complete."""
        return self.board[FILLED]

    @used.setter
    def used(self, slots: int) -> None:
        self.board[FILLED] = slots

    @property
    def stopping(self) -> bool:
        """:meth:`stop` was called."""
        return self.board[HALT] == STOP

    def stop(self) -> None:
        """End after the step under way."""
        self.board[HALT] = STOP

    @property
    def paused(self) -> bool:
        """True if a signal's handler waits."""
        return self.board[HALT] == PAUSE

    def go_on(self) -> None:
        """Go on after the signal's handler was called."""
        self.board[HALT] = 0

    def _pause(self) -> None:
        if not self.board[HALT]:
            self.board[HALT] = PAUSE

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context in which an interrupt never counts an incomplete slot as ``used``."""
        return pausable(self._pause)

    # --- beginnings -------------------------------------------------------------------------------

    def start_from(self, first: TensorDictBase) -> None:
        """Begin with ``first``, the result of a reset, instead of another reset."""
        self._first = first

    def restart(self) -> None:
        """Make the next :meth:`begin` reset the environment."""
        self._first = None

    def begin(self) -> None:
        """Start every lane's next trajectory."""
        first, self._first = self._first, None
        self.stepped.begin(self.used, self.stepped.env.reset() if first is None else first)

    # --- slots ------------------------------------------------------------------------------------

    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""
        place = self._random.place if stop > start + 1 else None
        if self._random.block_drawn:
            self._put_at_random(start, stop)
            self.stepped.step(start, stop)
        else:
            for at in self._acting_at_random(start, stop):
                self.stepped.step(at, at + 1)
                if self.board[HALT]:
                    break
        if place is not None and (filled := self.used) < stop:  # the rest is drawn again
            self._random.return_to(place, filled - start)

    def given_steps(self, start: int, stop: int, lanes: int) -> None:
        """Fill slots ``[start, stop)``, whose actions are there; or a part of a single slot."""
        if lanes < self.lanes:
            self.stepped.step_part(start, lanes)
        else:
            self.stepped.step(start, stop)

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""
        refreshes = self.policy is not None and self.policy.refreshes
        for at in range(start, stop):
            if random_lanes is None:
                if refreshes:
                    self._refresh(at, stop)
                self.act(at)
            else:
                self.act_both_ways(at, random_lanes)
            self.stepped.step(at, at + 1)
            if self.board[HALT]:
                break

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only."""
        if random_lanes is not None:
            self.act_both_ways(at, random_lanes, some=lanes > 0)
        elif self.policy is None or self.slab.version[at, 0] == RANDOM_VERSION:
            # Even if no lane is stepped, numbers are drawn, as other drivers do.
            ahead = self._random.ahead(1)
            if lanes:
                self._act_at_random(at, ahead, 0)
        elif lanes:
            self._refresh(at, at + 1)
            self.act(at)
        self.given_steps(at, at + 1, lanes)

    def _put_at_random(self, start: int, stop: int) -> None:
        for key, drawn in self._random.arrays(stop - start):
            array = self.slab.arrays.get(key)
            if array is not None:
                array[start:stop] = drawn
            else:
                self.slab.columns[key][start:stop].copy_(torch.from_numpy(drawn.copy()))

    # --- actions ----------------------------------------------------------------------------------

    def _acting_at_random(self, start: int, stop: int) -> Iterator[int]:
        """Yield slots ``[start, stop)``, each with random actions written to it."""
        if self._masks is not None:
            yield from self._random.put(self.slab.arrays, self._masks, start, stop)
            return
        ahead = self._random.ahead(stop - start)
        for at in range(start, stop):
            self._act_at_random(at, ahead, at - start)
            yield at

    def _act_at_random(self, at: int, ahead: Ahead, slot: int) -> None:
        drawn = self._random.act(self.stepped.seen(at).clone(False), ahead, slot)
        for key, rows in self._action_rows.items():
            rows[at].copy_(drawn.get(key))

    def act(self, at: int) -> None:
        """Copy the actions that the policy chooses to slot ``at``."""
        assert self.policy is not None
        bare = self._bare
        network = None if bare is None else bare.network()
        if bare is not None and network is not None:
            out, row = bare(network, at), self._outputs[0][1][at]
            if type(out) is torch.Tensor and out.shape == row.shape and out.dtype == row.dtype:
                row.copy_(out)
            else:
                self.put_column(0, out, at)
            return
        out = self._called(self.stepped.seen(at))
        self._put(out, at)
        self.stepped.acted(out, self.policy.writes)

    def act_both_ways(self, at: int, random_lanes: Mask, some: bool = True) -> None:
        """Act at random in ``random_lanes``, whose states stay; by the policy in the others."""
        if self.drawn is None:
            ahead = self._random.ahead(1)
        else:
            drawn = {key: torch.from_numpy(each)[None] for key, each in self.drawn.items()}
            ahead = self._random.of_lanes(drawn)
        if not some:
            return
        lanes = torch.from_numpy(random_lanes)
        if random_lanes.all():
            self._act_at_random(at, ahead, 0)
        elif not random_lanes.any():
            self.act(at)
        else:
            assert self.policy is not None
            seen = self.stepped.seen(at)
            before = seen.clone(False)
            out = self._called(seen)
            self._put(out, at)
            at_random = self._random.act(before.clone(False), ahead, 0)
            for key, rows in self._action_rows.items():
                row = rows[at]
                row[lanes] = at_random.get(key)[lanes].to(row.device)
            self.stepped.acted(out, self.policy.writes, before, lanes)
        for key in self._extra:
            self.slab.columns[key][at, lanes] = 0

    def _called(self, td: TensorDictBase) -> TensorDictBase:
        assert self.policy is not None
        out = self.policy(td)
        if not isinstance(out, TensorDictBase):
            raise no_tensordict(out)
        return out

    def _put(self, out: TensorDictBase, at: int) -> None:
        for index, (key, _) in enumerate(self._outputs):
            self.put_column(index, out.get(key, None), at)

    def put_column(self, index: int, value: Any, at: int) -> None:
        """Write a column of the policy's output to slot ``at``."""
        key, rows = self._outputs[index]
        row = rows[at]
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.shape != row.shape or value.dtype != row.dtype:
            form = self.policy.forms.get(key) if self.policy is not None and is_tensor else None
            if form is None or not form.takes(value):
                raise changed(key, value, row)
            value = form(value)
        row.copy_(value)

    def _refresh(self, start: int, stop: int) -> None:
        """Take newer weights, if there are any, for the actions of slots ``[start, stop)``."""
        if self.policy is not None and self.policy.refresh():
            self.slab.version[start:stop] = self.policy.version

    # --- outcomes ---------------------------------------------------------------------------------

    def upcoming(self) -> NDArray[np.bool_]:
        """Lanes whose next slot will be a transition."""
        return self.stepped.upcoming()

    @property
    def random_under_way(self) -> int:
        """Steps with random actions that have not come back."""
        return self.stepped.random_under_way

    def ended(self, start: int, stop: int) -> Mask:
        """``[time, lane]``, the environment reported an end in this slot."""
        return self.stepped.ended(start, stop)

    def account(self, start: int, stop: int, stepped: int) -> Account:
        """Return the outcome of the slots ``[start, stop)``."""
        if stop == start:
            return Account(0, 0, np.zeros((0, self.lanes), np.bool_))
        return self.stepped.account(start, stop, stepped)


_ACTING = {each.__code__ for each in (LocalDriver.act, LocalDriver.act_both_ways)}
