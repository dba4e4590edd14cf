"""Checks of TorchRL's memory-mapped storages: folders that `TensorDict.memmap` wrote."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.ext.dataset_checks.checker import (
    Checker,
    CheckResults,
    DatasetFolder,
    Where,
    declared_count,
    text_of,
)
from tallyroll.storage.ext.dataset_checks.transitions import Names, TransitionChecks
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.formats.memmap import META_FIELDS, place_of
from tallyroll.storage.rows.dtypes import NAMES, NUMPY
from tallyroll.storage.rows.keys import COLLECTOR, COUNTERS, NEXT, Key, format_key

_META, _LENGTH, _STORAGE = "meta.json", "storage_metadata.json", "storage"
_DEEPEST: Final = 32
_MOST_COLUMNS: Final = 2**14
_FLAGS: Final = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class _Column:
    file: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """The shape, including the batch dimensions."""


class TorchrlChecker(Checker):
    """Checks the columns of a TensorDict, or the filled rows of a replay buffer."""

    name = "torchrl"
    checks = (
        "files",
        "metadata",
        "columns",
        "rows",
        "ids",
        "steps",
        "ends",
        "observations",
        "nan",
        "zeros",
    )

    @classmethod
    def recognises(cls, place: Path) -> bool:
        """Look for the metadata of a TensorDict or for a file with the length of a buffer."""
        place = _folder(place)
        try:
            return (place / _LENGTH).is_file() or "_type" in json.loads(
                (place / _META).read_bytes()[: 2**20]
            )
        except (OSError, ValueError, TypeError, RecursionError):
            return False

    def check(self, place: Path, found: CheckResults) -> None:
        """Read all rows, one block at a time."""
        place = _folder(place)
        tree = _CheckedTree(DatasetFolder(place, found), found)
        tree.read(())
        if tree.batch is None:
            return
        _ReplayRows(place, tree, found).check()


def _folder(place: Path) -> Path:
    """Return the folder that holds the rows.

    ``place`` is this folder, or the folder of a replay buffer that was saved with all its parts.
    """
    return place / _STORAGE if (place / _STORAGE).is_dir() else place


class _CheckedTree:
    """The columns that the ``meta.json`` files name and whose files have the expected size."""

    def __init__(self, folder: DatasetFolder, found: CheckResults) -> None:
        self.folder, self._found = folder, found
        self.columns: dict[str, _Column] = {}
        self.batch: tuple[int, ...] | None = None
        """The batch dimensions of all columns, according to the root."""

    def read(self, above: Key) -> None:
        found = self._found
        name = str(place_of(above, leaf=False) / _META) if above else _META
        meta = self.folder.json(name)
        if meta is None:
            return
        shape = _shape(meta.get("shape")) if isinstance(meta, dict) else None
        if not shape:
            found.add("metadata", "a folder declares no shape of its rows", Where(name))
            return
        if self.batch is None:
            self.batch = shape
        if len(above) > _DEEPEST or len(self.columns) > _MOST_COLUMNS:
            found.add("files", "columns are nested too deep, or there are too many", Where(name))
            return
        for key, said in meta.items():
            if key not in META_FIELDS:
                self._entry((*above, key), said)

    def _entry(self, key: Key, said: Any) -> None:
        if key[-1] in ("", ".", ".."):
            self._found.add(
                "files", "a name leads out of the dataset", what=text_of(format_key(key))
            )
        elif isinstance(said, dict) and said.get("type") == "TensorDict":
            self.read(key)
        elif isinstance(said, dict) and "dtype" in said:
            self._leaf(key, said)

    def _leaf(self, key: Key, said: Mapping[str, Any]) -> None:
        found, name = self._found, format_key(key)
        dtype, shape = said.get("dtype"), _shape(said.get("shape"))
        kind = NAMES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
        if kind is None or not shape or self.batch is None:
            what = f"{text_of(dtype)}, {text_of(said.get('shape'))}"
            found.add(
                "columns", "a column has an unknown dtype or an invalid shape", None, what, name
            )
            return
        if said.get("is_nested"):
            return
        column = _Column(str(place_of(key, leaf=True)), NUMPY[kind], shape)
        if shape[: len(self.batch)] != self.batch:
            what = f"its shape is {list(shape)}, expected {list(self.batch)} first"
            found.add("rows", "a column has the wrong number of rows", None, what, name)
            return
        file = self.folder.opened(column.file)
        if file is None:
            return
        with file:
            size = os.fstat(file.fileno()).st_size
        wanted = math.prod(shape) * column.dtype.itemsize
        if size != wanted:
            what = f"it has {size:,} bytes, expected {wanted:,}"
            found.add("files", "a file has the wrong length", Where(column.file), what)
        else:
            self.columns[name] = column


def _shape(said: Any) -> tuple[int, ...] | None:
    if isinstance(said, list) and all(declared_count(each) is not None for each in said):
        return tuple(said)
    return None


class _ReplayRows:
    def __init__(self, place: Path, tree: _CheckedTree, found: CheckResults) -> None:
        assert tree.batch is not None
        self._tree, self._found, self._batch = tree, found, tree.batch
        self._columns = tree.columns
        self._rows = math.prod(tree.batch)
        self._full = True
        if (place / _LENGTH).exists():
            self._cut_to_length()

    def _cut_to_length(self) -> None:
        """Leave out rows that a buffer has not filled yet.

        The declared length of a buffer of trajectories counts trajectories. The declared length of
        any other buffer counts rows, even if the buffer has several dimensions.
        """
        said = self._tree.folder.json(_LENGTH)
        length = declared_count(said.get("len")) if isinstance(said, dict) else None
        if length is None or length > self._rows:
            what = f"its length is {text_of(length)}, expected at most {self._rows:,}"
            message = "a buffer declares more rows than its columns have"
            self._found.add("metadata", message, Where(_LENGTH), what)
            return
        each = math.prod(self._batch[1:])
        whole = length <= self._batch[0] and self._written(length, length * each)
        rows = length * each if whole else length
        self._full, self._rows = rows == self._rows, rows

    def _written(self, start: int, stop: int) -> bool:
        """Return True if a row from ``start`` up to ``stop`` is not zero, or if the range is empty.

        The method reads at most `BLOCK_NBYTES` of each column.
        """
        for name, column in self._columns.items():
            file = self._tree.folder.opened(column.file) if stop > start else None
            if file is not None:
                with file:
                    row = self._row_nbytes(name)
                    file.seek(start * row)
                    if file.read(min(BLOCK_NBYTES, (stop - start) * row)).strip(b"\0"):
                        return True
        return stop <= start

    def check(self) -> None:
        found, rows = self._found, self._rows
        found.rows = rows
        self._check_kinds()
        wanted = set(self._columns)
        row = sum(self._row_nbytes(name) for name in wanted)
        size = max(1, BLOCK_NBYTES // max(1, row))
        checks = TransitionChecks(found, self._names())
        if self._full:
            checks.ring_of(rows)
        with_files = {name: self._tree.folder.opened(self._columns[name].file) for name in wanted}
        try:
            files = {name: file for name, file in with_files.items() if file is not None}
            for start in range(0, rows, size):
                stop = min(start + size, rows)
                block = {name: self._read(name, file, stop - start) for name, file in files.items()}
                checks.advance(block, Where(start=start))
                found.tell(stop * row, rows * row)
        finally:
            for file in with_files.values():
                if file is not None:
                    file.close()
        checks.finish()

    def _row_nbytes(self, name: str) -> int:
        column = self._columns[name]
        return math.prod(column.shape[len(self._batch) :]) * column.dtype.itemsize

    def _read(self, name: str, file: Any, count: int) -> np.ndarray:
        column = self._columns[name]
        content = file.read(count * self._row_nbytes(name))
        shape = column.shape[len(self._batch) :]
        return np.frombuffer(content, column.dtype).reshape(count, *shape)

    def _check_kinds(self) -> None:
        """Compare each column with the column of its next values, and require a reward column."""
        found, depth = self._found, len(self._batch)
        for name, here in self._columns.items():
            after = self._columns.get(f"{NEXT}/{name}")
            if after is not None and (here.dtype, here.shape) != (after.dtype, after.shape):
                what = (
                    f"{list(after.shape[depth:])} of {after.dtype}, and {list(here.shape[depth:])}"
                )
                message = "the next values and the column differ in shape or dtype"
                found.add("columns", message, None, f"{what} of {here.dtype}", f"{NEXT}/{name}")
        above = any(name.startswith(f"{NEXT}/") for name in self._columns)
        if above and not any(name.split("/")[-1] == "reward" for name in self._columns):
            damaged = any(
                "reward" in (place.file or "") for each in found.findings for place in each.places
            )
            if not damaged:
                found.add("columns", "a column is missing", column=f"{NEXT}/reward")

    def _names(self) -> Names:
        columns, found = self._columns, self._found
        own = (*_FLAGS, "reward", "action", *COUNTERS)
        seen = {
            name: f"{NEXT}/{name}"
            for name in columns
            if name.split("/")[0] not in (NEXT, COLLECTOR)
            and f"{NEXT}/{name}" in columns
            and name.split("/")[-1] not in own
        }
        step, after = "step_count", f"{NEXT}/step_count"
        if step not in columns:
            step, after = f"{COLLECTOR}/step", ""
        ids, lost = f"{COLLECTOR}/traj_ids", f"{COLLECTOR}/next_valid"
        if ids not in columns and step not in columns:
            found.skipped["observations"] = "rows have no trajectory ids and no steps"
        if ids not in columns:
            found.skipped["ids"] = "rows have no trajectory ids"
        if step not in columns:
            found.skipped["steps"] = "rows have no steps"

        def there(name: str) -> str:
            return name if name in columns else ""

        return Names(
            seen,
            (),
            tuple(name for name in columns if name == "action"),
            there(f"{NEXT}/reward"),
            there(f"{NEXT}/terminated"),
            there(f"{NEXT}/truncated"),
            there(f"{NEXT}/done"),
            there("done"),
            there(ids),
            there(step),
            there(after),
            there(lost),
        )
