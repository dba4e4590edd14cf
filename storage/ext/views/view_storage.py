"""Storage that contains the rows of selected trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np

from tallyroll.storage.ext.views.chosen_rows import ChosenRows
from tallyroll.storage.ext.views.view_reader import ViewReader
from tallyroll.storage.replay.disk_storage import DiskStorage, WritesElsewhere
from tallyroll.storage.replay.tensor_storage import AsTensorStorage


class ViewStorage(DiskStorage):
    """Rows of selected trajectories of a storage. The storage has to stay open."""

    reader: ViewReader

    def __init__(self, rows: DiskStorage, reader: ViewReader) -> None:
        AsTensorStorage.__init__(self)
        self.of_rows = rows
        self.path, self.mode, self.reader = reader.path, "read", reader
        self.writer = WritesElsewhere(reader, "as a view", "from which the view was made")

    def close(self) -> None:
        """Do nothing: the underlying storage closes the files."""

    @property
    def closed(self) -> bool:
        """True if the underlying storage has been closed."""
        return self.of_rows.closed

    def _over(self, reader: ViewReader) -> DiskStorage:
        return ViewStorage(self.of_rows, reader)

    def __reduce__(self) -> tuple[Any, ...]:
        return _view_of, (self.of_rows, self.reader.picked, self.reader.lines)


def _view_of(rows: DiskStorage, picked: ChosenRows, lines: np.ndarray | None) -> DiskStorage:
    return ViewStorage(rows, ViewReader(rows.reader, picked, lines))
