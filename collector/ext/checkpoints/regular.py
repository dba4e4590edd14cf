"""Save checkpoints of a run at regular intervals, and load the newest when it resumes."""

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
"""Default number of transitions between two checkpoints."""
_KEPT = 2


class RegularCheckpoints:
    """The checkpoints of a run. Without a folder, every method does nothing.

    Args:
        folder: the folder of checkpoints. None saves no checkpoints.
        every: number of transitions between two checkpoints. None selects the default.
        resumes: True if the run continues an earlier run.

    Raises:
        ArgumentError: the run is new, and the folder has checkpoints of another run.
    """

    def __init__(self, folder: Path | None, every: int | None, *, resumes: bool) -> None:
        self._folder, self._every = folder, every or EVERY
        self._there = [] if folder is None else entries_of(folder)
        if self._there and not resumes:
            raise ArgumentError(
                f"--checkpoint: {folder} already has checkpoints of another run. Give another "
                "--checkpoint, or --resume that run."
            )

    def load(self, collector: Collector, rows: Rows, note: Callable[[str], None]) -> None:
        """Load the newest checkpoint, if there is one, and pass the report to ``note``."""
        if self._there:
            note(str(load_checkpoint(self._there[-1].path, collector=collector, rows=rows)))

    def save(self, collector: Collector, *, last: bool = False) -> None:
        """Save a checkpoint if one is due, or if it is the ``last``."""
        if self._folder is not None:
            every = None if last else self._every
            save_checkpoint(self._folder, collector=collector, every=every, keep_last=_KEPT)
