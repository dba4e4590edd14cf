"""The state that the parts of a run share: phase, counts, lanes, and why the run ended."""

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.batches.stored.writer import BatchWriter
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import Budget, Ledger, LedgerEntry, post
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.envs.setup.outside_steps import OutsideSteps
from tallyroll.collector.errors import StateError
from tallyroll.collector.options import Options

EPISODES_KEPT = 50_000
"""Minimum number of newest episodes in ``collector.episodes``, unless total_episodes is given."""


class Phase(Enum):
    """The phases of a run. A run may end in any phase, and does not begin again."""

    IDLE = "between two calls"
    COLLECTING = "within a call"
    ENDED = "over"


class RunState:
    """The state of a run, which its loop, its guard and its owner change.

    Args:
        options: the options of the run.
        writer: the writer, which stores rows before they are yielded.
        ledger: counts transitions.
        lanes: the trajectory and step of every lane.
        provenance: the run's entry in the manifest, written with the schema.
    """

    def __init__(
        self,
        options: Options,
        writer: BatchWriter,
        ledger: Ledger,
        lanes: LaneState,
        provenance: dict[str, Any],
    ) -> None:
        self.options, self.writer, self.ledger = options, writer, ledger
        self.lanes, self.provenance = lanes, provenance
        self.budget = Budget(options.total_frames)
        self.episodes = EpisodeLog(None if options.total_episodes is not None else EPISODES_KEPT)
        self.phase = Phase.IDLE
        self.lost = False
        """True if another collector drives the environment, also after the end of the run."""
        self.stopped = False
        """True if the run makes no more steps, on request or after an error.

        Rows that it already has may still be stored.
        """
        self.at_safe_point = False
        """True while nothing is half done, so that an exception does not end the run."""
        self.outside: OutsideSteps | None = None
        """Detects steps of environments outside of the collector; None if nothing does."""
        self.moved = ""
        """A text that names a step or reset outside of the collector; empty if there was none."""
        self._yields = False
        """True if the call in progress yields the rows that it stores."""
        self.ready: list[Any] = []
        """The batches to yield next; more are made when there are none."""
        self._ready_before = 0
        """Number of batches that were ready when the call in progress began."""
        self.foreseen: LaneState | None = None
        """The state of the lanes after the transitions that waited at the last recorded event."""
        self.slots_before = ledger.slots
        """Number of slots of the run before this collector."""
        self._stored_before = ledger.stored
        """Number of transitions of the run that were stored before the call in progress."""
        self._ended_by = ""
        """A text that names the exception that ended the run, the stored rows, and the way on."""

    @property
    def counted(self) -> int:
        """Number of stored transitions, or of agent transitions if the budget counts them."""
        by_agent = self.budget.agents is not None
        return self.ledger.agent_transitions if by_agent else self.ledger.stored

    @property
    def met(self) -> bool:
        """True if the run has all transitions of its budget."""
        return self.budget.remaining(self.counted) == 0

    # --- phases -----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True once the run has ended."""
        return self.phase is Phase.ENDED

    def begin_call(self) -> None:
        """Begin a collecting call; the phase of a run that has ended does not change."""
        if self.phase is Phase.IDLE:
            self.phase = Phase.COLLECTING

    def end_call(self) -> None:
        """End the current call, if there is one. Its steps do not count as steps of the program."""
        if self.outside is not None:
            self.outside.remember()
        if self.phase is Phase.COLLECTING:
            self.phase = Phase.IDLE

    def end(self) -> None:
        """End the run."""
        self.phase = Phase.ENDED

    def lose(self) -> None:
        """Refuse further collecting calls, because another collector drives the environment."""
        self.lost = True

    def stop(self) -> None:
        """End the run as soon as the rows that it already has are stored."""
        self.stopped = True

    def reach_safe_point(self) -> None:
        """Keep exceptions from ending the run until :meth:`leave_safe_point`."""
        self.at_safe_point = True

    def leave_safe_point(self) -> None:
        """Let exceptions end the run again."""
        self.at_safe_point = False

    def note_stored(self) -> None:
        """Remember the number of stored rows, so that an error message can name the later rows."""
        self._stored_before, self._yields = self.ledger.stored, False

    def expect_batch(self) -> None:
        """Record how many batches are ready before the current call adds one."""
        self._ready_before, self._yields = len(self.ready), True

    # --- trajectories, and why the run ended ------------------------------------------------------

    def number_from(self, first_id: int) -> None:
        """Begin a trajectory in every lane, with ids from ``first_id`` on."""
        self.lanes = LaneState.fresh(self.lanes.lanes, first_id)

    def replace_provenance(self, provenance: dict[str, Any]) -> None:
        """Replace the provenance, because the run continues another run."""
        self.provenance = provenance

    def count_agents(self, budget: Budget, counted: int | None) -> None:
        """Count the budget in agent transitions.

        ``counted`` is the number of agent transitions in earlier rows; None if the ledger already
        has it.
        """
        self.budget = budget
        # A field of the public record, which has no method for it.
        self.ledger.agent_budget = budget.total
        if counted is not None:
            behind = counted - self.ledger.agent_transitions
            post(self.ledger, LedgerEntry(agent_transitions=behind))

    def foresee(self, state: LaneState) -> None:
        """Record the state of the lanes after the waiting transitions, for an event to refer to."""
        self.foreseen = state

    def skip_foreseen(self, lanes: NDArray[np.bool_]) -> None:
        """Skip the foreseen trajectory ids in ``lanes``, whose waiting transitions were lost."""
        if self.foreseen is not None:
            self.lanes.skip_to(self.foreseen, lanes)

    def committed(self) -> str:
        """Return a sentence with the stored rows of the run and the number of complete episodes."""
        ends = self.ledger.episodes_complete
        return f"{self.writer.stored_run.committed}, with {ends:,} ends of episodes"

    def ended_by(self, error: BaseException) -> None:
        """Note that ``error`` ended the run."""
        if not self._ended_by:
            self._ended_by = self._describe_end(error)

    def watch(self, outside: OutsideSteps) -> None:
        """Detect steps of environments outside of the collector from now on."""
        self.outside = outside

    def forget_moved(self) -> None:
        """Forget steps outside of the collector, because all lanes are reset next."""
        self.moved = ""

    def look_outside(self) -> None:
        """Record an environment that the program itself stepped or reset since the last call."""
        if self.outside is not None and not self.moved:
            self.moved = self.outside.find()

    def refuse_moved(self, *, resets: bool) -> None:
        """Raise `StateError` if the program stepped or reset the environment since the last row.

        ``resets`` is True if all lanes are reset before the next step, so that there is nothing to
        refuse.
        """
        if self.moved and self.outside is not None and not (resets or self.outside.resets_first()):
            self.reach_safe_point()
            raise StateError(
                f"the program stepped or reset an environment of this collector ({self.moved}) "
                "since the last call, so the next row would join observations of different "
                "episodes or steps. Call set_seed() to start new episodes in all lanes, pass "
                "reset_at_each_iter=True, or step another instance."
            )
        self.forget_moved()

    def refuse_ended(self) -> None:
        """Raise `StateError` if an exception ended the run."""
        if self._ended_by:
            raise StateError(self._ended_by)

    def _describe_end(self, error: BaseException) -> str:
        stored, writer = self.ledger.stored, self.writer
        said = f"the run ended when {type(error).__name__} was raised within it"
        text = str(error).partition("\n")[0]
        said += f" ({text[:200]}). " if text else ". "
        rows = writer.stored_run.rows_of(self._stored_before, stored)
        said += f"{writer.stored_run.committed}. "
        missing = self._yields and len(self.ready) <= self._ready_before
        if rows and missing:
            said += f"Rows {rows.start:,} to {rows.stop - 1:,} of these were not yielded. "
        elif stored > self._stored_before and missing:
            said += f"The last {stored - self._stored_before:,} of these were not yielded. "
        if writer.storage is not None:
            return said + (
                "To continue after them, shut this collector down and give the storage to another "
                "collector, with resume=True"
            )
        total, unit = self.budget.total, "transitions"
        if self.budget.agents is not None:
            unit = "agent transitions"
        left = "" if total is None else f"{max(0, total - self.counted):,}"
        frames = f" for the {left} {unit} that are left" if left else ""
        return said + (
            f"To continue, make another collector{frames}. If its load_state_dict() gets the "
            "state_dict() of this collector, it continues with the same counts, ids, seeds and "
            "policy"
        )
