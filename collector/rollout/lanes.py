"""The lanes that a driver steps: their resets, observations and step results.

The actions are in the slab before a step. An environment over a `System` fills the slab itself: see
:class:`SystemLanes`, or `arriving_lanes.py` for lanes that return in any order. The results of any
other environment are copied to the slab: see `copied_lanes.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tallyroll.collector.counting.transitions import Mask, next_step_transitions
from tallyroll.collector.envs.failures import explain, lane_of
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import PolicyError, TransitionError, ValueRefused
from tallyroll.collector.rollout.reset_columns import ResetColumns
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.progress import HALT
from tallyroll.collector.slab.slab import Cursor, Slab, SlabColumn
from tallyroll.collector.user_code import ENDS, user_code
from tallyroll.storage.rows.keys import DONE, NEXT, TERMINATED, TRUNCATED, Key, format_key

LanesOfKey = Callable[[Key], torch.Tensor]
"""Takes the key of a column, and returns the lanes ``[lane]`` in which it has random actions."""


@dataclass(slots=True)  # one per slot; a frozen one takes 4 times as long to make
class SlotOutcome:
    """The outcome of slots ``[start, stop)`` that a driver filled."""

    slots: int
    """Number of slots in the step calls that were made."""
    executed: int
    """Number of the ``slots`` in which an environment executed an action."""
    transitions: Mask
    """Marks ``[time, lane]`` of the executed slots whose rows are complete."""
    ran: Mask | None = None
    """Marks ``[time, lane]`` of the slots that were stepped; None if all requested lanes were."""
    lost: int = 0
    """Number of transitions that were lost with a failed worker."""
    beyond: int = 0
    """Number of transitions by other workers after the last slot that all lanes completed.

    They are discarded.
    """


class Lanes(ABC):
    """The lanes of an environment, bound to the slab that they fill.

    Args:
        env: an environment of batch size ``[]`` (one lane) or ``[lanes]``.
        slab: the memory to fill.
    """

    fills_slab = False
    """True if the environment writes observations to the slab and reads actions there."""
    pending: NDArray[np.bool_] | None = None
    """Marks ``[lane]`` of lanes whose next slot is a reset slot.

    None if there are no reset slots, or if ends of episodes do not determine them.
    """

    def __init__(self, env: EnvBase, slab: Slab) -> None:
        self.env, self.slab = env, slab
        self.lanes = slab.lanes
        self.all_are_transitions = False

    def decisions(self) -> dict[str, Decision]:
        """Return the decisions of a `RunPlan` about steps."""
        other = "the environment is not a System, and returns TensorDicts"
        ways = {"steps": "environment", "writes": "tensors"}
        return {name: Decision(way, other) for name, way in ways.items()}

    @abstractmethod
    def begin(self, at: int, first: TensorDictBase) -> None:
        """Use ``first``, the result of a reset, as the observations of slot ``at``."""

    @abstractmethod
    def observations(self, at: int) -> TensorDictBase:
        """Return the observations that the policy sees in slot ``at``."""

    def acted(  # noqa: B027  if the slab is filled in place, there is nothing to carry
        self,
        out: TensorDictBase,
        writes: Sequence[Key],
        before: TensorDictBase | None = None,
        lanes: LanesOfKey | None = None,
    ) -> None:
        """Carry the policy's outputs to the next step.

        In ``lanes``, carry the values in ``before`` instead.
        """

    @abstractmethod
    def step(self, start: int, stop: int) -> None:
        """Step through slots ``[start, stop)``, whose actions are set."""

    @abstractmethod
    def step_part(self, at: int, lanes: int) -> None:
        """Step the first ``lanes`` lanes (perhaps none) in one slot."""

    @abstractmethod
    def transitions(self, start: int, stop: int, stepped: int) -> Mask:
        """Return marks ``[time, lane]`` of the slots in ``[start, stop)`` that are transitions.

        Call it once for each slot. Only the first ``stepped`` lanes are read.
        """

    def outcome(self, start: int, stop: int, stepped: int) -> SlotOutcome:
        """Return the outcome of the slots ``[start, stop)``, at least one."""
        transitions = self.transitions(start, stop, stepped)
        if stepped < self.lanes:
            transitions[:, stepped:] = False
        executed = int(np.count_nonzero(transitions))
        return SlotOutcome((stop - start) * stepped, executed, transitions)

    @property
    def random_under_way(self) -> int:
        """Number of steps in progress whose actions are random."""
        return 0

    def upcoming(self) -> NDArray[np.bool_]:
        """Return marks ``[lane]`` of lanes whose next slot will be a transition."""
        return np.ones(self.lanes, np.bool_)

    def ended(self, start: int, stop: int) -> Mask:
        """Return marks ``[time, lane]`` of slots in which the environment reported an end."""
        return ended_in(self.slab, start, stop)

    def rows(self, key: Key) -> Sequence[torch.Tensor]:
        """Return the slots of a column, in the shape that the policy and the environment see."""
        return self.slab.columns[key].unbind(0)

    def observation_rows(self, key: Key) -> Sequence[torch.Tensor] | None:
        """Return the slots of a column that the policy sees; None for other columns."""
        return self.rows(key) if key in self.slab.flowing else None


class SystemLanes(Lanes):
    """Lanes of a system, which fills the slab itself."""

    env: SystemEnv
    cursor: Cursor
    fills_slab = True

    def __init__(self, env: SystemEnv, slab: Slab, board: memoryview) -> None:
        super().__init__(env, slab)
        self.stepper = stepper = env.stepper
        self.cursor = stepper.cursor(slab, board)
        self.writes = stepper.writes_to(self.cursor)
        self._steps: list[Callable[[], None] | None] = [None] * slab.slots
        """For each slot, the function that steps it in one call, made at the slot's first step."""
        self._tds: list[TensorDictBase] = []
        self._resets = ResetColumns.of(env, slab, self.cursor)
        self.all_are_transitions = not stepper.declares.has_reset_slots
        if not self.all_are_transitions:
            self.pending = np.zeros(self.lanes, np.bool_)

    def decisions(self) -> dict[str, Decision]:
        """Return the decisions of a `RunPlan` about steps."""
        return {"steps": self.stepper.system.stepped_by, "writes": self.writes}

    def begin(self, at: int, first: TensorDictBase) -> None:
        """Begin every lane's trajectory in slot ``at``."""
        self.slab.set_root(at, first)
        if self.pending is not None:
            self.pending[:] = False

    def observations(self, at: int) -> TensorDictBase:
        """Return the observations of slot ``at`` as views of the slab."""
        if not self._tds:
            self._tds = self.slab.tensordicts(self.stepper.declares.groups)
        return self._tds[at]

    def step(self, start: int, stop: int) -> None:
        """Step through slots ``[start, stop)``, whose actions are set."""
        cursor = self.cursor
        if self._resets is not None:
            self._resets.fill(start, stop)
        try:
            if self.writes.way == "columns":
                self.stepper.step_block(cursor, start, stop)
                return
            for at in range(start, stop):
                step = self._steps[at]
                if step is None:
                    step = self._steps[at] = self.stepper.step_of(cursor, at)
                step()
                if cursor.board[HALT]:
                    break
        except BaseException as error:
            raised = self._noted(error)
            if raised is error:
                raise
            raise raised from error

    def step_part(self, at: int, lanes: int) -> None:
        """Step the first ``lanes`` lanes only, in one slot."""
        self.cursor.at = at
        if self._resets is not None:
            self._resets.fill(at, at + 1)
        try:
            self.stepper.step_part(self.cursor, lanes)
        except BaseException as error:
            raised = self._noted(error)
            if raised is error:
                raise
            raise raised from error

    def _noted(self, error: BaseException) -> BaseException:
        """Return the error to raise for a step's ``error``, with a note about the actions."""
        if isinstance(error, ENDS):
            error = stopped(error, self.stepper.system.first_lane)
        else:
            error = explain(error) or error
        self.note_actions(error)
        return error

    def note_actions(self, error: BaseException) -> None:
        """Add a note to ``error`` about the actions of the step that raised it."""
        at = self.cursor.at
        if isinstance(error, ValueRefused):
            error.locate(slot=at)
        actions = [column[at].tolist() for column in self.cursor.actions]
        said = actions[0] if len(actions) == 1 else actions
        error.add_note(f"tallyroll: raised by the step with the actions {said!r:.400}")

    def upcoming(self) -> NDArray[np.bool_]:
        """Return marks ``[lane]`` of lanes whose next slot will be a transition."""
        return super().upcoming() if self.pending is None else ~self.pending

    def ended(self, start: int, stop: int) -> Mask:
        """Return marks ``[time, lane]`` of slots in which the environment reported an end."""
        cursor = self.cursor
        ended: Mask = cursor.terminated[start:stop] | cursor.truncated[start:stop]
        return ended

    def transitions(self, start: int, stop: int, stepped: int) -> Mask:
        """Return marks of all slots except reset slots."""
        if self.pending is None:
            return np.ones((stop - start, self.lanes), np.bool_)
        ended = self.ended(start, stop)
        transitions = next_step_transitions(ended, self.pending)
        self.pending[:stepped] = ended[-1, :stepped]
        return transitions


def stopped(error: BaseException, first_lane: int = 0) -> Exception:
    """Return the error that replaces a ``StopIteration`` raised by a step of an environment."""
    lane = lane_of(error)
    place = "" if lane is None else f" of lane {first_lane + lane}"
    return user_code.error(f"a step of the environment{place}", error)


def ended_in(slab: Slab, start: int, stop: int) -> Mask:
    """Return marks ``[time, lane]`` of slots in which an end was reported."""
    terminated = slab.columns[TERMINATED][start:stop]
    other = slab.columns.get(TRUNCATED, slab.columns.get(DONE))
    assert other is not None
    flags = terminated | other[start:stop]
    ended: Mask = flags.reshape(stop - start, slab.lanes).cpu().numpy()
    return ended


def changed_error(key: Key, got: Any, wanted: torch.Tensor | None = None) -> Exception:
    """Return the error for a value whose shape, dtype or type differs from the first step."""
    kind = TransitionError if key[0] == NEXT else PolicyError
    if got is None or wanted is None:
        return kind(f"{format_key(key)} is missing, but the first step had it")
    is_tensor = isinstance(got, torch.Tensor)
    return kind(
        f"{format_key(key)}: expected {SlabColumn(wanted.dtype, tuple(wanted.shape))} as on the "
        "first step, got "
        f"{SlabColumn(got.dtype, tuple(got.shape)) if is_tensor else type(got).__name__}"
    )
