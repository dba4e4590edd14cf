"""The status of a run: under way or over, and by what it was ended."""

from typing import Any

from tallyroll.collector.batches.writer import BatchWriter
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import StateError


class RunStatus:
    """Flags of a run that its loop, its guard and its owner share.

    Args:
        ledger: of the run.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.busy = self.over = False
        self.stopped = False
        """True if the run is to end, or an error ended it: only its last rows still come."""
        self.intact = False
        """True while an exception would leave nothing half done."""
        self.lost = False
        """True if another collector drives the environment; this one then stays ``busy``."""
        self.yields = False
        """True if the call under way is to yield the rows that it stores."""
        self.ready: list[Any] = []
        """Batches to be yielded next; more are made only when there are none."""
        self.given = ledger.stored
        """Transitions of the run that were stored before the call under way."""
        self._ended_by = ""
        """The exception that ended the run, what it left, and how to go on."""

    def ended_by(self, error: BaseException, left: int | None, writer: BatchWriter) -> None:
        """Note that ``error`` ended the run; ``left``: transitions that its budget has left."""
        if not self._ended_by:
            self._ended_by = self._said(error, left, writer)

    def refuse_ended(self) -> None:
        """Raise `StateError` if an exception ended the run."""
        if self._ended_by:
            raise StateError(self._ended_by)

    def _said(self, error: BaseException, left: int | None, writer: BatchWriter) -> str:
        stored = self.ledger.stored
        said = f"the run ended when {type(error).__name__} was raised within it"
        text = str(error).partition("\n")[0]
        said += f" ({text[:200]}). " if text else ". "
        rows = writer.rows_of(self.given, stored)
        said += f"{writer.committed}. "
        missing = self.yields and not self.ready
        if rows and missing:
            said += f"Rows {rows.start:,} to {rows.stop - 1:,} of these were not yielded. "
        elif stored > self.given and missing:
            said += f"The last {stored - self.given:,} of these were not yielded. "
        if writer.storage is not None:
            return said + (
                "To go on behind them, shut this collector down and give the storage to another "
                "one, with resume=True"
            )
        frames = "" if left is None else f" for the {left:,} transitions that are left"
        return said + (
            f"To go on, make another collector{frames}; given this one's state_dict() by "
            "load_state_dict(), it goes on with its counts, ids, seeds and policy"
        )
