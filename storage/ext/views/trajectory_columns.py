"""Adapter that presents the table of trajectories as columns for expressions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.ext.views.expression import Column, Words
from tallyroll.storage.files.copied_runs import FIRST_ROW_OF_RUN
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import CONTEXT, POLICY_ID, POLICY_VERSION, REWARD
from tallyroll.storage.rows.schema import Column as StoredColumn
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.columns import floats_of
from tallyroll.storage.trajectories.episodes import END_NAMES

_FIELDS: Final = (
    "id",
    "lane",
    "length",
    "end",
    "reset_seed",
    "first_row",
    "first_step",
    "last_row",
)
_VERSIONS: Final = {
    "policy_version": "version_last",
    "version_first": "version_first",
    "version_last": "version_last",
}


class TrajectoryColumns(Mapping[str, Column]):
    """Columns [trajectories] by name, each computed on access.

    The names are ``id``, ``run`` (numbered as in `tallyroll inspect`), ``lane``, ``length``,
    ``return``, ``end`` (a word), ``whole``, ``first_row``, ``last_row``, ``first_step``,
    ``reset_seed`` (-1 if unknown), ``policy_version`` (at the last row, same as ``version_last``;
    ``version_first`` at the first row), ``policy_id``, and ``context.NAME`` for each number that
    was passed to resets. A name is absent if the rows lack the corresponding column.

    Args:
        reader: the reader of the rows.
        table: the trajectories of the rows; see `episodes`.
        flags: the flags of trajectories by id, for the column ``flag``, which is ``""`` for other
            trajectories; None: there is no such column.
    """

    def __init__(
        self, reader: RowReader, table: np.ndarray, flags: Mapping[int, str] | None = None
    ) -> None:
        self._reader, self._table, self._flags = reader, table, flags
        schema = reader.schema
        self._of_rows = {".".join(each.key[1:]): each for each in _constant(schema)}
        self._names = [*_FIELDS, "run", "whole"]
        if flags is not None:
            self._names.append("flag")
        if REWARD in schema:
            self._names.append("return")
        if POLICY_VERSION in schema:
            self._names += _VERSIONS
        self._names += self._of_rows

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Column:
        if name not in self._names:
            raise KeyError(name)
        table = self._table
        if name == "end":
            return Words(table["end"], END_NAMES)
        if name == "flag":
            return _words([(self._flags or {}).get(id, "") for id in table["id"].tolist()])
        if name == "run":
            return run_of(self._reader.runs, table["first_row"])
        if name == "whole":
            first = self._reader.span.start
            whole: np.ndarray = (table["first_step"] == 0) & (table["first_row"] >= first)
            return whole
        if (column := self._of_rows.get(name)) is not None:
            return self._at_last_rows(column)
        found: np.ndarray = table[_VERSIONS.get(name, name)]
        return found.reshape(len(found), -1) if found.ndim > 1 else found

    def _at_last_rows(self, column: StoredColumn) -> np.ndarray:
        """Return the values of a column that is constant in each trajectory, from the last rows."""
        found = self._reader.column(column.key).take(self._table["last_row"])
        if column.dtype is torch.bfloat16:
            found = floats_of(found)
        one_each = math.prod(column.shape) == 1
        return found.reshape(len(found)) if one_each else found.reshape(len(found), -1)


def _words(texts: Sequence[str]) -> Words:
    """Return the column with one of ``texts`` per line. Conditions may also name ``""``."""
    codes = {text: code for code, text in enumerate(dict.fromkeys(["", *texts]))}
    return Words(np.array([codes[text] for text in texts], np.int64), tuple(codes))


def _constant(schema: Schema) -> Iterator[StoredColumn]:
    for column in schema.columns:
        is_context = column.key[: len(CONTEXT)] == CONTEXT
        if column.numpy_dtype.kind in "biuf" and (is_context or column.key == POLICY_ID):
            yield column


def run_of(entries: Sequence[Mapping[str, Any]], rows: np.ndarray) -> np.ndarray:
    """Return the number of the run that wrote each of ``rows`` [n], or -1; int64 [n].

    A resumed run has several entries but a single number.
    """
    numbers: list[int] = []
    before = None
    for entry in entries:
        first = entry.get(FIRST_ROW_OF_RUN, entry["first_row"])
        incarnation = entry.get("incarnation", 0)
        goes_on = first == before and type(incarnation) is int and incarnation > 0
        numbers.append((numbers[-1] if numbers else -1) + (not goes_on))
        before = first
    begins = np.array([entry["first_row"] for entry in entries], np.int64)
    at = begins.searchsorted(rows, side="right") - 1
    return np.array([-1, *numbers], np.int64)[at + 1]
