"""The base class of formats that a repair reads row by row."""

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
    """Base class of formats that yield the readable rows and report the others to ``losses``.

    Args:
        losses: the list to which losses are added.
        unreadable: the ranges of files that the disk cannot read, by path.
    """

    def __init__(self, losses: Losses, unreadable: Mapping[Path, Ranges]) -> None:
        super().__init__()
        self._losses, self._unreadable = losses, unreadable

    def folder(self, root: Path) -> DatasetFolder:
        """Return the files below the folder of the source."""
        return DatasetFolder(root, CheckResults(), self._unreadable)

    def write(self, rows: ExportRows, place: Path) -> NoReturn:
        """Raise `NotImplementedError`: a repair only reads."""
        raise NotImplementedError
