"""Checkpoints of a run that are saved now and then, and loaded when it goes on."""

from collections.abc import Callable
from pathlib import Path

from tallyroll.collector.base import Collector
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.checkpoints.checkpoint import (
    Rows,
    load_checkpoint,
    save_checkpoint,
)
from tallyroll.collector.ext.checkpoints.folder import entries_of

EVERY = 10_000
"""Transitions between two checkpoints, by default."""
_KEPT = 2


class RegularCheckpoints:
    """The checkpoints of a run; without a folder every method does nothing.

    Args:
        folder: where they are; None: there are none.
        every: transitions between two of them.
        resumes: whether a run is continued.

    Raises:
        ArgumentError: a new run, and the folder has checkpoints of another one.
    """

    def __init__(self, folder: Path | None, every: int | None, *, resumes: bool) -> None:
        self._folder, self._every = folder, every or EVERY
        self._there = [] if folder is None else entries_of(folder)
        if self._there and not resumes:
            raise ArgumentError(
                f"--checkpoint: {folder} has checkpoints of another run already; give another "
                "--checkpoint, or --resume that run"
            )

    def load(self, collector: Collector, rows: Rows, note: Callable[[str], None]) -> None:
        """Go back to the newest one, where there is one, and ``note`` what that did."""
        if self._there:
            note(str(load_checkpoint(self._there[-1].path, collector=collector, rows=rows)))

    def save(self, collector: Collector, *, last: bool = False) -> None:
        """Save one, if it is due or the ``last``."""
        if self._folder is not None:
            every = None if last else self._every
            save_checkpoint(self._folder, collector=collector, every=every, keep_last=_KEPT)
