"""Compare the table of episodes with the rows."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.ext.verification.findings import Findings, Place
from tallyroll.storage.rows.keys import REWARD
from tallyroll.storage.trajectories.columns import RowOrder
from tallyroll.storage.trajectories.episodes import (
    END_CUT,
    END_NAMES,
    END_OPEN,
    Episodes,
    runs_of,
)

if TYPE_CHECKING:
    from tallyroll.storage.readers.row_reader import RowReader


_EXACT = ("lane", "first_row", "first_step", "length", "version_first")
_AT_THE_END = ("last_row", "version_last")
_RTOL = 1e-9
"""Returns are sums, and the order of adding is free."""


class EpisodeChecks:
    """A check that counts the trajectories again, up to a table's last row, and compares.

    A writer writes the table when it closes, so that later rows are not in it.

    Args:
        reader: the reader of the rows.
        table: the lines of the table.
        first: the lowest row that is valid.
    """

    def __init__(self, reader: RowReader, table: np.ndarray, first: int) -> None:
        self._table, self._first = table, first
        self._stop = int(table["last_row"].max(initial=-1)) + 1
        self._reader, self._order = reader, RowOrder(reader.schema)
        self._runs = runs_of(reader.runs)
        reward = next(each.shape for each in reader.schema.columns if each.key == REWARD)
        self._episodes: Episodes | None = Episodes(reader.ring, reward)

    def extend(self, start: int, stop: int) -> None:
        """Count the rows ``[start, stop)``, which follow those that were counted."""
        stop = min(stop, self._stop)
        if self._episodes is None or start >= stop:
            return
        try:
            rows = self._order.episode_rows(self._reader, start, stop)
            self._episodes.extend(rows, self._runs)
        except CorruptStorage:
            self._episodes = None  # a lane that cannot be, which another check names

    def finish(self, findings: Findings) -> None:
        """Compare the lines, trajectory by trajectory."""
        if self._episodes is None:
            return
        told, counted = self._table, self._episodes.table()
        told = told[told["last_row"] >= self._first]
        missing = np.setdiff1d(counted["id"], told["id"])
        extra = np.setdiff1d(told["id"], counted["id"])
        message = "a trajectory has rows, and no line in the table"
        findings.add_rows("episodes", message, missing, lambda i: Place(trajectory=int(missing[i])))
        message = "a line in the table has no rows"
        findings.add_rows("episodes", message, extra, lambda i: Place(trajectory=int(extra[i])))
        _, mine, theirs = np.intersect1d(counted["id"], told["id"], return_indices=True)
        self._compare(counted[mine], told[theirs], findings)

    def _compare(self, counted: np.ndarray, told: np.ndarray, findings: Findings) -> None:
        # Of a trajectory whose first rows are overwritten only the end can be compared.
        whole = (told["first_row"] >= self._first) & (counted["first_row"] >= self._first)
        whole &= counted["first_step"] == told["first_step"]
        wrong = {name: whole & (counted[name] != told[name]) for name in _EXACT}
        wrong |= {name: counted[name] != told[name] for name in _AT_THE_END}
        wrong["end"] = _ends(counted) != _ends(told)
        with np.errstate(all="ignore"):
            close = np.isclose(
                counted["return"], told["return"], rtol=_RTOL, atol=0, equal_nan=True
            )
        wrong["return"] = whole & ~close.reshape(len(close), math.prod(close.shape[1:])).all(axis=1)
        seeds = counted["reset_seed"], told["reset_seed"]
        wrong["reset_seed"] = whole & (seeds[0] != seeds[1]) & (seeds[0] >= 0) & (seeds[1] >= 0)
        for name, where in wrong.items():
            lines, rows = told[where], counted[where]
            message = f"the table gives another {name} than the rows"
            place = partial(_place_of, name, lines, rows)
            findings.add_rows("episodes", message, lines["first_row"], place)


def _place_of(name: str, told: np.ndarray, counted: np.ndarray, at: int) -> Place:
    line = told[at]
    says, are = line[name], counted[name][at]
    if name == "end":
        says, are = END_NAMES[says], END_NAMES[are]
    return Place(
        row=int(line["first_row"]),
        lane=int(line["lane"]),
        trajectory=int(line["id"]),
        column=name,
        what=f"{says}, and by the rows {are}",
    )


def _ends(table: np.ndarray) -> np.ndarray:
    """Ends of trajectories; no line knows whether an unfinished one goes on."""
    return np.where(table["end"] == END_CUT, END_OPEN, table["end"])
