"""A format that a repair only reads, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tallyroll.storage.ext.dataset_checks.checker import CheckResults, DatasetFolder
from tallyroll.storage.ext.dataset_checks.disk import Ranges
from tallyroll.storage.ext.exchange.base import ExchangeFormat
from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.repair.losses import Losses


class RowsRepair(ExchangeFormat):
    """Reads what is readable; what is not goes into ``losses``.

    Args:
        losses: gets what is not read.
        unreadable: the ranges of files that the disk cannot read, by their paths.
    """

    def __init__(self, losses: Losses, unreadable: Mapping[Path, Ranges]) -> None:
        super().__init__()
        self._losses, self._unreadable = losses, unreadable

    def folder(self, root: Path) -> DatasetFolder:
        """Return the files below a folder that is repaired, or in which the source is."""
        return DatasetFolder(root, CheckResults(), self._unreadable)

    def write(self, rows: ExportRows, place: Path) -> NoReturn:
        """Refuse: a repair only reads."""
        raise NotImplementedError
