"""A format that a repair only reads, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tallyroll.storage.ext.exchange.door import ExchangeFormat
from tallyroll.storage.ext.exchange.outgoing import Outgoing
from tallyroll.storage.ext.repair.losses import Losses
from tallyroll.storage.ext.soundness.checker import Folder, Gathered
from tallyroll.storage.ext.soundness.disk import Ranges


class RowsRepair(ExchangeFormat):
    """Reads what is readable; what is not goes into ``losses``.

    Args:
        losses: gets what is not read.
        unreadable: the ranges of files that the disk cannot read, by their paths.
    """

    def __init__(self, losses: Losses, unreadable: Mapping[Path, Ranges]) -> None:
        super().__init__()
        self._losses, self._unreadable = losses, unreadable

    def folder(self, root: Path) -> Folder:
        """Return the files below a folder that is repaired, or in which the source is."""
        return Folder(root, Gathered(), self._unreadable)

    def write(self, rows: Outgoing, place: Path) -> NoReturn:
        """Refuse: a repair only reads."""
        raise NotImplementedError
