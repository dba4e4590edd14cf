"""Lanes whose steps return in any order; each slot holds the lanes that arrived."""

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.envs.stepping.arrays import put_flags, reordered
from tallyroll.collector.envs.stepping.ends import put_finals
from tallyroll.collector.envs.system import Step
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.rollout.lanes import Lanes, SlotOutcome, stopped
from tallyroll.collector.rollout.reset_columns import ResetColumns
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.progress import FILLED, HALT
from tallyroll.collector.slab.slab import Array, Slab
from tallyroll.collector.user_code import ENDS
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key


class ArrivingLanes(Lanes):
    """Starts the step of each lane when its action is chosen, and records lanes as they arrive.

    The slab has a column for each arrival of a slot. A row is complete when its lane returns. Until
    then, this object keeps the row's observation, action and policy version. Rows are in order of
    arrival. The random actions at the start of a run must be the first rows. So while random
    actions are in progress, only as many lanes as a call needs step with actions of the policy.
    These lanes come last in their slot.

    Args:
        env: an environment over a system whose lanes return in any order.
        slab: the memory to fill, with the lane of each row.
        extra: keys that the policy writes in addition to the action.
        board: words that report progress; see :mod:`tallyroll.collector.slab.progress`.
        by_policy: True if a policy chooses actions, perhaps after random ones.
    """

    env: SystemEnv

    def __init__(
        self,
        env: SystemEnv,
        slab: Slab,
        extra: tuple[Key, ...],
        board: memoryview,
        by_policy: bool,
    ) -> None:
        super().__init__(env, slab)
        self._board, self._by_policy = board, by_policy
        self.stepper = stepper = env.stepper
        self._keys = stepper.observation_keys
        self._cursor = stepper.cursor(slab, board)
        total = env.batch_size[0]
        self._waiting: dict[Key, Array] = {
            key: np.zeros((total, *slab.array(key).shape[2:]), slab.array(key).dtype)
            for key in (*self._keys, *stepper.action_keys, *extra)
        }
        """The last observation and action of each lane ``[lane, ...]``."""
        self._version = np.zeros(total, np.int64)
        self._pending = np.zeros(total, np.bool_)
        """Marks ``[lane]`` of lanes whose next arrival is a reset slot."""
        self._away = np.zeros(total, np.bool_)
        self._random_away = 0
        """Number of transitions in progress whose actions are random."""
        self._ready = np.zeros(0, np.int32)
        """Lanes that wait for an action, in the order of their arrival."""
        self._arrived = np.zeros(slab.slots, np.bool_)
        """Marks ``[slot]`` of slots in which lanes arrived; in other slots, they were only sent."""
        self._resets = ResetColumns.of(env, slab, self._cursor)
        self._executed = np.zeros((slab.slots, slab.lanes), np.bool_)

    def begin(self, at: int, first: TensorDictBase) -> None:
        """Begin a trajectory in every lane with ``first``, the result of the reset."""
        for key in self._keys:
            self._waiting[key][:] = first.get(key).numpy()
        self._pending[:] = self._away[:] = False
        self._random_away = 0
        self._ready = np.arange(len(self._away), dtype=np.int32)

    def decisions(self) -> dict[str, Decision]:
        """Return the decisions of a `RunPlan` about steps."""
        why = "lanes come back in any order"
        ways = {"steps": "arriving", "writes": "columns"}
        return {name: Decision(way, why) for name, way in ways.items()}

    @property
    def random_under_way(self) -> int:
        """Number of steps in progress whose actions are random."""
        return self._random_away

    @property
    def _acting(self) -> NDArray[np.int32]:
        """The lanes that get the next actions; fewer than a slot holds if no more are ready."""
        return self._ready[: self.lanes]

    def acting(self) -> NDArray[np.int32]:
        """Return the lanes that act now, repeated to fill a slot."""
        return np.resize(self._acting, self.lanes)

    def observations(self, at: int) -> TensorDictBase:
        """Return the last observations of the lanes that act now, repeated to fill a slot."""
        acting = self.acting()
        td = TensorDict({}, [self.lanes])
        for group, size in self.stepper.declares.groups.items():
            td.set(group, TensorDict({}, [self.lanes, size]))
        for key in self._keys:
            td.set(key, torch.from_numpy(self._waiting[key][acting]))
        return td

    def upcoming(self) -> NDArray[np.bool_]:
        """Return marks of the columns whose actions will make transitions."""
        acting = self._acting
        found = np.zeros(self.lanes, np.bool_)
        found[: len(acting)] = ~self._pending[acting]
        return found

    def step(self, start: int, stop: int) -> None:
        """Start the lanes of each slot, and record the lanes that arrive meanwhile."""
        try:
            for at in range(start, stop):
                self._arrived[at] = self._send(at) or not len(self._ready)
                self._executed[at] = False
                if self._arrived[at]:
                    self._receive(at, self.stepper.system.recv())
                self._board[FILLED] = at + 1
                if self._board[HALT]:
                    break
        except ENDS as error:
            raise stopped(error) from error

    def step_part(self, at: int, lanes: int) -> None:
        """Raise, because no part can be stepped: the system chooses the lanes that return."""
        raise AssertionError("lanes that arrive are never stepped in part")

    def _send(self, at: int) -> bool:
        """Start the lanes of slot ``at``; return True if some have to wait for random actions."""
        acting, self._ready = self._acting, self._ready[self.lanes :]
        chosen: slice | NDArray[np.intp] = slice(len(acting))
        waits = False
        if self._by_policy and (self._random_away or self.slab.version[at].min() < 0):
            going = self._going(acting, self.slab.version[at, chosen] == RANDOM_VERSION)
            waits = not going.all()
            if waits:
                self._ready = np.concatenate([acting[~going], self._ready])
                chosen, acting = np.flatnonzero(going), acting[going]
                if not len(acting):
                    return True
        for key, waiting in self._waiting.items():
            if key not in self._keys:
                waiting[acting] = self.slab.array(key)[at, chosen]
        self._version[acting] = self.slab.version[at, chosen]
        actions = [self._waiting[key][acting] for key in self.stepper.action_keys]
        self.stepper.system.send(actions, acting)
        self._away[acting] = True
        return waits

    def _going(self, acting: NDArray[np.int32], drawn: Mask) -> Mask:
        """Return marks of the ``acting`` lanes to start now; ``drawn`` marks random actions.

        While random actions are in progress, start only as many lanes with actions of the policy as
        a call needs, so that all of them return.
        """
        resets = self._pending[acting]
        self._random_away += int(np.count_nonzero(drawn & ~resets))
        if not self._random_away:
            return np.ones_like(drawn)
        going: Mask = drawn | resets
        needed = self.lanes - np.count_nonzero(self._away) - np.count_nonzero(going)
        return going | (np.cumsum(~going) <= needed)

    def _receive(self, at: int, out: Step) -> None:
        slab, cursor = self.slab, self._cursor
        lanes = np.asarray(out.lanes, np.int32)
        self._require_away(lanes)
        if self._random_away:
            is_random = (self._version[lanes] == RANDOM_VERSION) & ~self._pending[lanes]
            self._random_away -= int(np.count_nonzero(is_random))
            order = np.argsort(~is_random, kind="stable")
            out, lanes = reordered(out, order), lanes[order]
        assert slab.lane is not None
        slab.lane[at] = lanes
        slab.version[at] = self._version[lanes]
        for key, waiting in self._waiting.items():
            slab.array(key)[at] = waiting[lanes]
        cursor.at = at
        if self._resets is not None:
            self._resets.put(at, lanes)
        ended = self._put(out, self._pending[lanes])
        self._executed[at] = ~self._pending[lanes]
        seen = self._following(lanes, ended, out)
        for key, values in zip(self._keys, seen, strict=True):
            self._waiting[key][lanes] = values
        self._pending[lanes] = ended if self.stepper.declares.has_reset_slots else False
        self._away[lanes] = False
        self._ready = np.concatenate([self._ready, lanes]) if len(self._ready) else lanes

    def _require_away(self, lanes: NDArray[np.int32]) -> None:
        known = len(lanes) == self.lanes and lanes.min() >= 0 and lanes.max() < len(self._away)
        if not known or len(np.unique(lanes)) < self.lanes or not self._away[lanes].all():
            raise self.stepper.results.wrong_arrivals(lanes)

    def _put(self, out: Step, pending: Mask) -> Mask:
        """Write the result of ``recv`` to the slot ``cursor.at``; return the marks of ended lanes.

        ``pending`` marks the arrivals that are reset slots.
        """
        stepper, cursor = self.stepper, self._cursor
        at, d = cursor.at, stepper.declares
        rows = [column[at] for column in cursor.next_obs]
        for index, (row, value) in enumerate(zip(rows, out.obs, strict=True)):
            row[...] = stepper.results.array(index, value, len(pending))
        stepper.put_values(cursor, out)
        ended: Mask = cursor.terminated[at] | cursor.truncated[at]
        for group, flags in cursor.agents.items():
            put_flags(flags, at, out.agents[group])
        stepper.put_valid(cursor, out)
        if d.at_end == "first":
            put_finals(stepper, cursor, ended, out, rows)
        stepper.results.require_skipped(out.skipped, pending, out.lanes)
        if d.has_reset_slots:
            stepper.contexts.draw(stepper.system, np.asarray(out.lanes)[pending])
        return ended

    def _following(self, lanes: NDArray[np.int32], ended: Mask, out: Step) -> list[Array]:
        """Return the next observations ``[arrival, ...]`` of the ``lanes`` that arrived."""
        stepper, count = self.stepper, len(lanes)
        array, at_end = stepper.results.array, stepper.declares.at_end
        seen = [array(index, value, count) for index, value in enumerate(out.obs)]
        if at_end == "final" and ended.any():
            asked = np.zeros(stepper.declares.lanes, np.bool_)
            asked[lanes[ended]] = True
            first = stepper.system.reset(asked, None)
            seen = [value.copy() for value in seen]
            for index, (_, value) in enumerate(zip(seen, first, strict=True)):
                seen[index][ended] = array(index, value)[lanes[ended]]
        if at_end != "reset_slot":
            stepper.contexts.draw(stepper.system, lanes[ended])
        return seen

    def ended(self, start: int, stop: int) -> Mask:
        """Return marks ``[time, arrival]`` of the ends of episodes that were reported."""
        cursor = self._cursor
        ended: Mask = cursor.terminated[start:stop] | cursor.truncated[start:stop]
        return ended

    def transitions(self, start: int, stop: int, stepped: int) -> Mask:
        """Return marks of all arrivals except reset slots."""
        return self._executed[start:stop].copy()

    def outcome(self, start: int, stop: int, stepped: int) -> SlotOutcome:
        """Return the outcome of the slots ``[start, stop)``."""
        ran = np.repeat(self._arrived[start:stop, None], self.lanes, axis=1)
        executed = self.transitions(start, stop, stepped)
        return SlotOutcome(int(ran.sum()), int(executed.sum()), executed, ran)
