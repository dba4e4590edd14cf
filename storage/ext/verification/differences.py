"""The `diff` function, which compares two storages by trajectory and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.ext.joined.members import PathLike
from tallyroll.storage.ext.verification.findings import PLACES
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.pages import Page, PageSource
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.storages import open_storage
from tallyroll.storage.trajectories.columns import floats_of
from tallyroll.storage.trajectories.content import (
    Content,
    Numbering,
    compared_columns,
)
from tallyroll.storage.user_code import user_callback

_MOST_NBYTES: Final = 16 << 20
"""Maximum size of a comparison block in bytes per storage, except for a single larger row."""
_NOT_COMPARED: Final = frozenset(
    {"at", "first_id", "first_row", "first_row_of_run", "incarnation", "respawned"}
)
"""Entries of a run that are not compared: its start time, row positions and resume count."""
_LONGEST: Final = 60


@dataclass(frozen=True, slots=True)
class DifferentRow:
    """A row that differs between the storages, or that only one of them has."""

    trajectory: int
    step: int
    column: str | None
    """The column's name in messages; None if only one storage has the row."""
    first: Any
    """The value in the first storage, as nested lists.

    For images and other large values, it is the first number that differs.

    If ``column`` is None, it is True if the first storage has the row.
    """
    second: Any
    at: tuple[int, ...] = ()
    """The index, in a large value, of the first number that differs."""

    def __str__(self) -> str:
        where = f"trajectory {self.trajectory}, step {self.step}"
        if self.column is None:
            return f"{where}: only in the {'first' if self.first else 'second'}"
        place = f"[{', '.join(map(str, self.at))}]" if self.at else ""
        return f"{where}, {self.column}{place}: {self.first}, {self.second}"


@dataclass(frozen=True, slots=True)
class Differences(PageSource):
    """The differences between two storages, as found by `diff`."""

    rows: tuple[int, int]
    """The number of rows in the first and the second storage."""
    equal: int
    """The number of rows in both storages with identical bits in all common columns."""
    changed: int
    """The number of rows in both storages with different bits."""
    only: tuple[int, int]
    """The number of rows in the first storage only, and in the second storage only."""
    columns: Mapping[str, int]
    """The number of changed rows by column, without unchanged columns."""
    places: tuple[DifferentRow, ...]
    """The first few differences of each kind."""
    schema: tuple[str, ...]
    """Columns that are not compared, because one storage lacks them, or dtype or shape differ."""
    provenance: tuple[str, ...]
    """Differences of formats and of run entries, which do not imply different rows."""

    @property
    def same(self) -> bool:
        """True if both storages have the same columns and the same rows."""
        return not (self.changed or any(self.only) or self.schema)

    def _show_on_(self, page: Page) -> None:
        show_differences(self, page)


def show_differences(found: Differences, page: Page, seconds: float | None = None) -> None:
    """Write differences to a page; ``seconds`` is the duration of the comparison."""
    both = found.equal + found.changed
    said = "the same" if found.same else "different"
    took = "" if seconds is None else f", {seconds:.1f} s"
    page.print(f"{said}: {found.equal:,} of {both:,} common rows are equal{took}")
    for count, which in zip(found.only, ("first", "second"), strict=True):
        if count:
            page.print(f"{count:,} rows are only in the {which}")
    changed = [f"{name}: {count:,} rows" for name, count in found.columns.items()]
    for head, lines in (
        ("Columns that are not compared (first, second)", found.schema),
        ("Columns with changed rows", changed),
        ("First differences (value in the first, in the second)", found.places),
        ("Made otherwise (first, second)", found.provenance),
    ):
        if lines:
            page.head(head)
            for line in lines:
                page.print(f"  {line}")


@user_callback("diff")
def diff(
    first: PathLike | Sequence[PathLike],
    second: PathLike | Sequence[PathLike],
    *,
    ids: Numbering = "kept",
    progress: Progress | None = None,
    accept_copy: bool = False,
) -> Differences:
    """Compare the committed rows of two storages bit for bit, in any formats.

    Rows correspond if they have the same trajectory and step. The column ``collector/cut``, which
    records how rows were committed, is not compared.

    Args:
        first: the path of a storage, or any path argument of `open_storage` for several storages.
        second: the same for the other storage.
        ids: ``"relative"`` numbers trajectories 0, 1, 2 ... in the order of their ids, in each
            storage.
        progress: a callback that is called periodically with the number of bytes read and the total
            number of bytes.
        accept_copy: as in `open_storage`.

    Raises:
        ColumnsMissing: the rows have no trajectory ids or no steps.
        Overrun: a ring's writer overwrites rows while they are read.
        OpenError, CorruptStorage: a storage cannot be opened or read.
        ValueError: ``ids`` is invalid.
    """
    with (
        open_storage(first, accept_copy=accept_copy) as one,
        open_storage(second, accept_copy=accept_copy) as other,
    ):
        made = partial(_compared, one.reader, other.reader, ids, progress)
        return read_consistently(one.reader, lambda: read_consistently(other.reader, made))


def _compared(
    one: RowReader, other: RowReader, ids: Numbering, progress: Progress | None
) -> Differences:
    return _Comparison(one, other, ids).made(progress)


class _Comparison:
    """One comparison of two readers."""

    def __init__(self, one: RowReader, other: RowReader, ids: Numbering) -> None:
        self._readers = one, other
        self._contents = Content(one, ids), Content(other, ids)
        columns = [{each.key: each for each in compared_columns(r.schema)} for r in self._readers]
        self._columns = [each for key, each in columns[0].items() if columns[1].get(key) == each]
        self._schema = tuple(_schema_lines(*columns))
        self._counts: Counter[str] = Counter()
        self._places: list[DifferentRow] = []

    def made(self, progress: Progress | None) -> Differences:
        """Compare all rows."""
        one, other = self._contents
        both, alone = _matched(one, other)
        row_nbytes = sum(column.row_nbytes for column in self._columns)
        size = max(1, _MOST_NBYTES // max(1, row_nbytes))
        changed, total = 0, len(both[0])
        for start in range(0, total, size):
            at = tuple(each[start : start + size] for each in both)
            changed += self._compare(at[0], at[1])
            if progress is not None:
                progress(min(total, start + size) * row_nbytes, total * row_nbytes)
        for content, places, is_first in zip(self._contents, alone, (True, False), strict=True):
            for place in places[:PLACES].tolist():
                id, step = int(content.ids[place]), int(content.steps[place])
                self._places.append(DifferentRow(id, step, None, is_first, not is_first))
        return Differences(
            (len(one.rows), len(other.rows)),
            total - changed,
            changed,
            (len(alone[0]), len(alone[1])),
            {format_key(c.key): n for c in self._columns if (n := self._counts[format_key(c.key)])},
            tuple(self._places),
            self._schema,
            tuple(_provenance_lines(*self._readers)),
        )

    def _compare(self, at: np.ndarray, others: np.ndarray) -> int:
        """Compare the rows at positions in both contents; return the number of different rows."""
        differs = np.zeros(len(at), np.bool_)
        for column in self._columns:
            one = self._contents[0].bytes_at(column, at)
            other = self._contents[1].bytes_at(column, others)
            if np.array_equal(one, other):
                continue
            wrong = (one != other).any(1)
            name = format_key(column.key)
            for row in np.flatnonzero(wrong)[: max(0, PLACES - self._counts[name])].tolist():
                self._places.append(self._place(column, int(at[row]), one[row], other[row]))
            self._counts[name] += int(wrong.sum())
            differs |= wrong
        return int(differs.sum())

    def _place(self, column: Column, at: int, one: np.ndarray, other: np.ndarray) -> DifferentRow:
        content = self._contents[0]
        values = [_value(column, each) for each in (one, other)]
        where: tuple[int, ...] = ()
        if values[0].size > 8:
            width = column.numpy_dtype.itemsize
            number = int(np.flatnonzero(one != other)[0]) // width
            where = tuple(int(each) for each in np.unravel_index(number, column.shape))
            values = [each[where] for each in values]
        first, second = (each.tolist() for each in values)
        id, step = int(content.ids[at]), int(content.steps[at])
        return DifferentRow(id, step, format_key(column.key), first, second, where)


def _value(column: Column, found: np.ndarray) -> np.ndarray:
    """Convert bytes to a value [*shape]; bfloat16 becomes a float."""
    value = found.view(column.numpy_dtype).reshape(column.shape)
    return floats_of(value) if column.dtype is torch.bfloat16 else value


def _matched(
    one: Content, other: Content
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the positions of rows that both storages have, and of rows that only one has.

    If several rows claim to be the same step of a trajectory, they are paired one by one.
    """
    sizes = len(one.rows), len(other.rows)
    if sizes[0] == sizes[1] and all(
        np.array_equal(mine, theirs)
        for mine, theirs in ((one.ids, other.ids), (one.steps, other.steps))
    ):
        every, none = np.arange(sizes[0]), np.empty(0, np.int64)
        return (every, every), (none, none)
    ids, steps = (np.concatenate(each) for each in ((one.ids, other.ids), (one.steps, other.steps)))
    # Number the rows with equal id and step within each storage, in storage order.
    order = np.lexsort((np.arange(len(ids)), steps, ids))
    nth = np.empty(len(ids), np.int64)
    nth[order] = _repeats(ids[order], steps[order], order < sizes[0])
    order = np.lexsort((np.arange(len(ids)), nth, steps, ids))
    same = np.ones(max(0, len(ids) - 1), np.bool_)
    for each in (ids, steps, nth):
        same &= each[order][1:] == each[order][:-1]
    pairs = np.flatnonzero(same)
    both = order[pairs], order[pairs + 1] - sizes[0]
    alone = np.ones(len(ids), np.bool_)
    alone[both[0]] = alone[both[1] + sizes[0]] = False
    places = np.flatnonzero(alone)
    split = np.searchsorted(places, sizes[0])
    return both, (places[:split], places[split:] - sizes[0])


def _repeats(ids: np.ndarray, steps: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Count for each row the earlier rows of its storage that have the same id and step."""
    new = np.ones(len(ids), np.bool_)
    new[1:] = (ids[1:] != ids[:-1]) | (steps[1:] != steps[:-1])
    begins = np.maximum.accumulate(np.where(new, np.arange(len(ids)), 0))
    nth = np.empty(len(ids), np.int64)
    for mine in (is_first, ~is_first):
        count = np.cumsum(mine)
        before = count[begins] - mine[begins]
        nth[mine] = (count - before - 1)[mine]
    return nth


def _schema_lines(one: Mapping[Any, Column], other: Mapping[Any, Column]) -> Iterator[str]:
    for key in sorted({*one, *other}):
        mine, theirs = one.get(key), other.get(key)
        if mine is None or theirs is None:
            yield f"{format_key(key)}: only in the {'second' if mine is None else 'first'}"
        elif mine != theirs:
            yield f"{format_key(key)}: {_describe(mine)}, {_describe(theirs)}"


def _describe(column: Column) -> str:
    return f"{column.dtype_name} {list(column.shape)}"


def _provenance_lines(one: RowReader, other: RowReader) -> Iterator[str]:
    """Yield the differences between the manifests."""
    mine, theirs = one.manifest, other.manifest
    if mine["format"] != theirs["format"]:
        yield f"format: {mine['format']}, {theirs['format']}"
    runs = mine["runs"], theirs["runs"]
    if len(runs[0]) != len(runs[1]):
        yield f"runs: {len(runs[0])}, {len(runs[1])}"
    for number, (run, its) in enumerate(zip(*runs, strict=False)):
        for name, values in _different(run, its, f"run {number}"):
            yield f"{name}: {_short(values[0])}, {_short(values[1])}"


def _different(one: Any, other: Any, name: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the differences of two JSON values with their path."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other} - _NOT_COMPARED, key=str):
            yield from _different(one.get(key), other.get(key), f"{name}, {key}")
    elif one != other:
        yield name, (one, other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
