"""The state of a run that its parts share: counts, lanes, whether it is over, and why."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.batches.stored.writer import BatchWriter
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import Budget, Ledger
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.envs.driven.outside_steps import OutsideSteps
from tallyroll.collector.errors import StateError
from tallyroll.collector.options import Options

EPISODES_KEPT = 50_000
"""Least number of last episodes that ``collector.episodes`` keeps without total_episodes."""


class RunState:
    """The state of a run; its loop, its guard and its owner change it.

    Args:
        options: of the run.
        writer: where rows are stored before they are yielded.
        ledger: counted up with every batch.
        lanes: the trajectory and step of every lane.
        provenance: written with the schema.
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
        self.busy = self.over = False
        self.stopped = False
        """True if the run is to end, or an error ended it: only its last rows still come."""
        self.intact = False
        """True while an exception would leave nothing half done."""
        self.lost = False
        """True if another collector drives the environment; this one then stays ``busy``."""
        self.outside: OutsideSteps | None = None
        """Compares environments with what the last call left; None: they are not looked at."""
        self.moved = ""
        """The place where the program stepped or reset an environment since; empty: nowhere."""
        self.yields = False
        """True if the call under way is to yield the rows that it stores."""
        self.ready: list[Any] = []
        """Batches to be yielded next; more are made only when there are none."""
        self.waiting = 0
        """Number of batches that were ready when the call under way began."""
        self.foreseen: LaneState | None = None
        """The state of the lanes after the transitions that waited at the last recorded event."""
        self.slots_before = ledger.slots
        """Slots of the run before this collector."""
        self.given = ledger.stored
        """Transitions of the run that were stored before the call under way."""
        self._ended_by = ""
        """The exception that ended the run, what it left, and how to go on."""

    @property
    def counted(self) -> int:
        """Transitions that were stored, or agent transitions, in the unit of the budget."""
        by_agent = self.budget.agents is not None
        return self.ledger.agent_transitions if by_agent else self.ledger.stored

    @property
    def met(self) -> bool:
        """True if the run has as many transitions as it is to have."""
        return self.budget.remaining(self.counted) == 0

    def skip_foreseen(self, lanes: NDArray[np.bool_]) -> None:
        """Let trajectories in ``lanes``, which lost what waited, come after those foreseen."""
        if self.foreseen is not None:
            self.lanes.skip_to(self.foreseen, lanes)

    def committed(self) -> str:
        """Say in a sentence which rows of the run are stored, with how many ends of episodes."""
        ends = self.ledger.episodes_complete
        return f"{self.writer.stored_run.committed}, with {ends:,} ends of episodes"

    def ended_by(self, error: BaseException) -> None:
        """Note that ``error`` ended the run."""
        if not self._ended_by:
            self._ended_by = self._said(error)

    def look_outside(self) -> None:
        """Note an environment that the program stepped or reset since the last call."""
        if self.outside is not None and not self.moved:
            self.moved = self.outside.find()

    def refuse_moved(self, *, resets: bool) -> None:
        """Raise `StateError` if the next row would follow a step or reset of the program's.

        ``resets``: all lanes are reset before the next step, which settles it.
        """
        if self.moved and self.outside is not None and not (resets or self.outside.resets_first()):
            self.intact = True
            raise StateError(
                f"the program stepped or reset an environment of this collector ({self.moved}) "
                "since its last call, so the next row would join observations of different "
                "episodes or steps; call set_seed() to start new episodes in all lanes, pass "
                "reset_at_each_iter=True, or step another instance"
            )
        self.moved = ""

    def refuse_ended(self) -> None:
        """Raise `StateError` if an exception ended the run."""
        if self._ended_by:
            raise StateError(self._ended_by)

    def _said(self, error: BaseException) -> str:
        stored, writer = self.ledger.stored, self.writer
        said = f"the run ended when {type(error).__name__} was raised within it"
        text = str(error).partition("\n")[0]
        said += f" ({text[:200]}). " if text else ". "
        rows = writer.stored_run.rows_of(self.given, stored)
        said += f"{writer.stored_run.committed}. "
        missing = self.yields and len(self.ready) <= self.waiting
        if rows and missing:
            said += f"Rows {rows.start:,} to {rows.stop - 1:,} of these were not yielded. "
        elif stored > self.given and missing:
            said += f"The last {stored - self.given:,} of these were not yielded. "
        if writer.storage is not None:
            return said + (
                "To go on after them, shut this collector down and give the storage to another "
                "one, with resume=True"
            )
        total, unit = self.budget.total, "transitions"
        if self.budget.agents is not None:
            unit = "agent transitions"
        left = "" if total is None else f"{max(0, total - self.counted):,}"
        frames = f" for the {left} {unit} that are left" if left else ""
        return said + (
            f"To go on, make another collector{frames}; given this one's state_dict() by "
            "load_state_dict(), it goes on with its counts, ids, seeds and policy"
        )
