"""Repair an HDF5 file in D4RL's layout: save the rows for which every column can be read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.dataset_checks import hdf5
from tallyroll.storage.ext.dataset_checks.checker import CheckResults, Where
from tallyroll.storage.ext.dataset_checks.values import LONG_RUN, zero_rows
from tallyroll.storage.ext.exchange.base import Block, Incoming
from tallyroll.storage.ext.exchange.d4rl import key_of
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.hdf5_files import column_of, read_rows
from tallyroll.storage.ext.exchange.numbering import numbered, numbers
from tallyroll.storage.ext.repair.hdf5 import (
    PaddedFile,
    cut_after,
    lose_gaps,
    opened_damaged,
    readable_rows,
    runs,
)
from tallyroll.storage.ext.repair.losses import Losses, RowsRepair
from tallyroll.storage.rows.keys import NEXT, NEXT_VALID, REWARD, TERMINATED, TRUNCATED, Key
from tallyroll.storage.rows.row_words import words
from tallyroll.storage.rows.schema import Column, Schema

_AFTER: Final = "next_observations"
_NEEDED: Final = ("observation", "action")


class D4rlRepair(RowsRepair):
    """Repair of a D4RL file. Rows after a gap form a separate trajectory."""

    name: ClassVar[str] = "d4rl"

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Find and yield the readable rows."""
        with opened_damaged(self.folder(place.parent), place.name) as (file, there):
            found = CheckResults(room=there.room)
            datasets = hdf5.datasets_in(file, found, Where(place.name))
            for each in found.findings:
                for where in each.places:
                    message = "a column cannot be read"
                    self._losses.add(message, 0, file=place.name, column=where.column)
            yield _D4rlRows(place, there, datasets, self._losses).incoming()


class _D4rlRows:
    def __init__(
        self, place: Path, there: PaddedFile, datasets: Mapping[str, Any], losses: Losses
    ) -> None:
        self._place, self._there, self._losses = place, there, losses
        self._data: dict[Key, Any] = {}
        self._columns: dict[Key, Column] = {}
        self._after: dict[Key, Any] = {}
        for name, data in datasets.items():
            path = tuple(name.split("/"))
            key = ("observation", *path[1:]) if path[0] == _AFTER else key_of(path)
            column = None if key is None else column_of(key, data)
            if key is None or column is None:
                continue
            if path[0] == _AFTER:
                self._after[key] = data
            else:
                if key in (REWARD, TERMINATED, TRUNCATED):
                    column = Column(key, column.dtype, column.shape or (1,))
                self._data[key], self._columns[key] = data, column
        lacking = [name for name in _NEEDED if not any(key[0] == name for key in self._data)]
        lacking += [key[-1] for key in (REWARD, TERMINATED) if key not in self._data]
        if lacking:
            raise InvalidDataset(
                f"{place} cannot be repaired: it has no readable {', '.join(lacking)}."
            )

    def incoming(self) -> Incoming:
        pieces = self._pieces(self._good())
        if not pieces:
            raise InvalidDataset(f"{self._place} cannot be repaired: no row can be read.")
        schema, own = self._schema(), self._after
        observed = [key for key in self._columns if key[0] == "observation"]
        size = max(1, BLOCK_NBYTES // schema.row_nbytes)

        def blocks() -> Iterator[Block]:
            for number, (start, stop, seen) in enumerate(pieces):
                for begin in range(start, stop, size):
                    end = min(begin + size, stop)
                    block = {
                        key: read_rows(data, begin, end, self._columns[key], self._place)
                        for key, data in self._data.items()
                    }
                    for key in (TERMINATED, TRUNCATED):  # some writers store flags as numbers
                        if key in block:
                            block[key] = block[key].astype(bool)
                    for key in observed:
                        data = own.get(key)
                        block[(NEXT, *key)] = (
                            self._shifted(key, begin, end, seen)
                            if data is None
                            else read_rows(data, begin, end, self._columns[key], self._place)
                        )
                    if not own:
                        block[NEXT_VALID] = np.arange(begin, end) < seen - 1
                    ids = np.full(end - begin, number)
                    yield block | numbers(ids, np.arange(begin, end) - start)

        rows = sum(stop - start for start, stop, _ in pieces)
        return Incoming(schema, rows, blocks(), None, "d4rl")

    def _schema(self) -> Schema:
        columns = [
            Column(key, torch.bool, each.shape) if key in (TERMINATED, TRUNCATED) else each
            for key, each in self._columns.items()
        ]
        columns += [
            Column((NEXT, *key), each.dtype, each.shape)
            for key, each in self._columns.items()
            if key[0] == "observation"
        ]
        if not self._after:
            columns.append(Column(NEXT_VALID, torch.bool, ()))
        return numbered(Schema(tuple(columns)))

    def _shifted(self, key: Key, begin: int, end: int, seen: int) -> np.ndarray:
        """Return the observation of the row after each row.

        The last row of an episode has no row after it, so its own observation is repeated.
        """
        data, column = self._data[key], self._columns[key]
        values = read_rows(data, begin + 1, min(end + 1, seen), column, self._place)
        if len(values) < end - begin:
            last = read_rows(data, seen - 1, seen, column, self._place)
            values = np.concatenate([values, last])
        return values

    def _good(self) -> np.ndarray:
        """Return a mask of the rows that are readable in all columns.

        If an info has fewer readable rows than the reward, its column is left out instead.
        """
        name = self._place.name
        rows = max(data.shape[0] for key, data in self._data.items() if key[0] != "infos")
        of_each = {key: self._readable(data, rows) for key, data in self._data.items()}
        for key in [*self._data]:
            if key[0] == "infos" and of_each[key].sum() < of_each[REWARD].sum():
                message = "an info that has fewer readable rows"
                self._losses.add(message, 0, file=name, column="/".join(key))
                del self._data[key], self._columns[key], of_each[key]
        after = {key: self._readable(data, rows) for key, data in self._after.items()}
        base = np.logical_and.reduce([*of_each.values()])
        observed = {key for key in self._data if key[0] == "observation"}
        if self._after and (
            {*self._after} != observed
            or any((base & ~each).sum() > base.sum() / 2 for each in after.values())
            or any(
                (self._data[key].shape[1:], self._data[key].dtype) != (data.shape[1:], data.dtype)
                for key, data in self._after.items()
            )
        ):
            message = "next observations that have fewer readable rows"
            self._losses.add(message, 0, file=name, column=_AFTER)
            self._after, after = {}, {}
        good: np.ndarray = np.logical_and.reduce([base, *after.values()])
        lose_gaps(self._losses, good, "rows cannot be read", name)
        return self._without_zeros(good)

    def _readable(self, data: Any, rows: int) -> np.ndarray:
        good = readable_rows(data, self._there)
        return np.concatenate([good, np.zeros(rows, bool)])[:rows]

    def _without_zeros(self, good: np.ndarray) -> np.ndarray:
        """Leave out rows that were never written.

        Such rows are zero in all columns. They are at the end of the file, or form a long run.
        """
        zero = np.zeros(len(good), bool)
        compared = [data for key, data in self._data.items() if key[0] != "infos"]
        for start, stop in self._parts(good):
            zero[start:stop] = zero_rows([np.asarray(data[start:stop]) for data in compared])
        floats = any(data.dtype.kind == "f" for data in compared)
        where = np.flatnonzero(good)
        alike = runs(zero[where])  # gaps do not end a run
        for first, stop in alike:
            if stop < len(where) and not (floats and stop - first >= LONG_RUN):
                continue
            message, rows = "rows that were never written", where[first:stop]
            self._losses.add(message, len(rows), file=self._place.name, row=int(rows[0]))
            good = good.copy()
            good[rows] = False
        return good

    def _parts(self, good: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield runs of good rows that fit into a block."""
        nbytes = sum(
            math.prod(data.shape[1:]) * data.dtype.itemsize for data in self._data.values()
        )
        size = max(1, BLOCK_NBYTES // max(1, nbytes))
        for start, stop in runs(good):
            for begin in range(start, stop, size):
                yield begin, min(begin + size, stop)

    def _pieces(self, good: np.ndarray) -> list[tuple[int, int, int]]:
        """Return the rows of each trajectory: start, stop, and stop of the observations.

        Without a column of next observations, the row before a gap has no next observation. That
        row is lost unless it ends an episode.
        """
        ended = np.zeros(len(good), bool)
        for key in (TERMINATED, TRUNCATED):
            if key in self._data:
                for start, stop in runs(good):
                    values = np.asarray(self._data[key][start:stop])
                    ended[start:stop] |= values.reshape(stop - start).astype(bool)
        pieces = list[tuple[int, int, int]]()
        for start, seen in cut_after(runs(good), ended | self._contradicted(good, ended)):
            stop = seen if self._after or ended[seen - 1] else seen - 1
            if stop < seen:
                message = "a row without a next observation"
                self._losses.add(message, 1, file=self._place.name, row=stop)
            if stop > start:
                pieces.append((start, stop, seen))
        return pieces

    def _contradicted(self, good: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Return a mask of the rows whose next observation contradicts the following row.

        Rows that end an episode are not in the mask.
        """
        wrong = np.zeros(len(good), bool)
        for start, stop in self._parts(good):
            stop = min(stop + 1, len(good)) if good[stop : stop + 1].any() else stop
            for key, data in self._after.items():
                after, here = data[start : stop - 1], self._data[key][start + 1 : stop]
                differ = words(np.ascontiguousarray(after)) != words(np.ascontiguousarray(here))
                wrong[start : stop - 1] |= differ.any(1)
        wrong &= ~ended
        if wrong.any():
            message = "next observations contradict the rows that follow: trajectories are cut"
            what, row = f"{wrong.sum():,} places", int(np.flatnonzero(wrong)[0])
            self._losses.add(message, 0, file=self._place.name, row=row, what=what)
        return wrong
