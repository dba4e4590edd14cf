"""A format that a repair only reads, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from tallyroll.storage.datasets.exchange.door import ExchangeFormat
from tallyroll.storage.datasets.exchange.outgoing import Outgoing
from tallyroll.storage.verification.soundness.repairing.losses import Losses


class RowsRepair(ExchangeFormat):
    """Reads what is readable; what is not goes into ``losses``."""

    def __init__(self, losses: Losses) -> None:
        super().__init__()
        self._losses = losses

    def write(self, rows: Outgoing, place: Path) -> NoReturn:
        """Refuse: a repair only reads."""
        raise NotImplementedError
