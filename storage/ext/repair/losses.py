"""The losses of a repair, and the base class of the formats that report them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tallyroll.storage.ext.dataset_checks.checker import CheckResults, DatasetFolder
from tallyroll.storage.ext.dataset_checks.disk import Ranges
from tallyroll.storage.ext.exchange.base import ExchangeFormat
from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.verification.findings import Place


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of a dataset that could not be read."""

    message: str
    """The lost part and the reason, in one sentence."""
    place: Place
    rows: int | None
    """The number of lost rows; 0 if only other data was lost; None if unknown."""

    def __str__(self) -> str:
        count = "" if self.rows is None else f" ({self.rows:,} row{'s' * (self.rows != 1)})"
        where = str(self.place)
        return f"{where}: {self.message}{count}" if where else f"{self.message}{count}"


class Losses:
    """A list of losses, in the order of the source."""

    def __init__(self) -> None:
        self._found: list[Loss] = []

    def __iter__(self) -> Iterator[Loss]:
        return iter(self._found)

    def add(
        self,
        message: str,
        rows: int | None,
        *,
        file: str | None = None,
        episode: int | None = None,
        row: int | None = None,
        column: str | None = None,
        what: str = "",
    ) -> None:
        """Add a loss at a place."""
        place = Place(row=row, column=column, what=what, file=file, episode=episode)
        self._found.append(Loss(message, place, rows))


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
