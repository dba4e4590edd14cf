"""Members of a union: their paths, columns, rows and runs, and checks that they are compatible."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.errors import ColumnsMissing, RowsDoubled, SchemaMismatch, StorageMissing
from tallyroll.storage.ext.remote.address import s3_path
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.files.paths import is_pattern, user_path
from tallyroll.storage.files.run_events import EVENTS, events_of
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.batch_dims import fitting
from tallyroll.storage.rows.keys import Key, Keys, as_key, format_key
from tallyroll.storage.rows.schema import Column, Schema

PathLike = str | os.PathLike[str]

_ROWS_OF_RUN: Final = ("first_row", "first_row_of_run")
_OF_ITS_BEGINNING: Final = "lane_seeds"
_MOST_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class UnionMember:
    """One storage of a union."""

    reader: RowReader
    path: Path
    id: str
    format: str
    span: range
    """Row numbers within the storage when the union was opened."""
    rows: range
    """Row numbers within the union."""
    rewinds: int
    """The number of rewinds of the storage when the union was opened."""

    @property
    def moved_by(self) -> int:
        """The row number in the union minus the row number in the storage."""
        return self.rows.start - self.span.start


def expand_paths(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    """Return the paths of members in the given order; matches of a pattern are in natural order.

    Raises:
        StorageMissing: a pattern has no matches.
        RowsDoubled: a path is given twice.
        ValueError: there are no paths.
        TypeError: an item is not a path.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise ValueError("expected the paths of one or more storages, got none.")
    found: list[Path] = []
    for each in given:
        if not isinstance(each, str | os.PathLike):
            raise TypeError(f"expected the path of a storage, got {each!r:.200}.")
        if (address := s3_path(each)) is not None:
            found.append(address)
        else:
            found += _matched(each) if is_pattern(user_path(each)) else [user_path(each)]
    real: dict[str, Path] = {}
    for path in found:
        if (before := real.setdefault(os.path.realpath(path), path)) is not path:
            same = "" if before == path else f", which is {before}"
            raise RowsDoubled(
                f"{path}{same} is given twice, so each of its rows would occur twice. Leave "
                "one out."
            )
    return found


def _matched(pattern: PathLike) -> list[Path]:
    found = glob.glob(os.fspath(user_path(pattern)))
    # Skip the lock and the side files next to an HDF5 file.
    files = tuple(f"{each}." for each in found if os.path.isfile(each))
    found = [each for each in found if not each.startswith(files)]
    if not found:
        raise StorageMissing(
            f"{os.fspath(pattern)} matches no path. Check the pattern, and quote it so that "
            "the shell does not expand it."
        )
    return [Path(each) for each in sorted(found, key=_natural)]


def _natural(path: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", path)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


def joined_schema(readers: Sequence[RowReader], columns: Keys | None) -> Schema:
    """Return the schema of a union: the selected columns, or all columns.

    Each member must have every one of these columns.

    Raises:
        SchemaMismatch: a member lacks a column, or has it with another dtype or shape. The message
            names each such column.
        ColumnsMissing: no column is selected, or none of the members has a selected column.
    """
    first = readers[0].schema
    every: dict[Any, Column] = {}
    for reader in readers:
        for column in reader.schema.columns:
            every.setdefault(column.key, column)
    if columns is None:
        wanted = list(every)
    else:
        names = (columns,) if isinstance(columns, str) else columns
        wanted = [as_key(key) for key in dict.fromkeys(map(as_key, names))]
        if not wanted or (unknown := [key for key in wanted if key not in every]):
            got = ", ".join(map(format_key, unknown if wanted else [])) or "none"
            raise ColumnsMissing(
                f"columns: expected some of {', '.join(map(format_key, every))}, got {got}."
            )
        wanted.sort(key=list(every).index)
    by_key = [{each.key: each for each in reader.schema.columns} for reader in readers]
    lacking, absent, other = [], list[Key](), []
    for key in wanted:
        without = [
            reader.path for reader, own in zip(readers, by_key, strict=True) if key not in own
        ]
        if without:
            absent.append(key)
            lacking.append(f"{format_key(key)} is not in {_some(without)}")
        differ = [
            f"{reader.path} has {own[key].dtype_name} {list(own[key].shape)}"
            for reader, own in zip(readers, by_key, strict=True)
            if key in own and own[key] != every[key]
        ]
        if differ:
            told = f"{every[key].dtype_name} {list(every[key].shape)}"
            other.append(
                f"{format_key(key)} is {told} in the first storage that has it, but {_some(differ)}"
            )
    if lacking or other:
        common = [
            format_key(key) for key in every if all(own.get(key) == every[key] for own in by_key)
        ]
        raise SchemaMismatch(
            f"these storages have different columns: {'; '.join([*lacking, *other])}. Pass "
            f"columns= with some of the {len(common)} columns that all storages share: "
            f"{', '.join(common) or 'none'}. Use storages of different environments one by one."
            f"{excluded_note(chain.from_iterable(each.runs for each in readers), absent)}"
        )
    chosen = tuple(every[key] for key in wanted)
    dims = fitting(dict(first.batch_dims), {each.key: each.shape for each in chosen})
    return Schema(chosen, tuple(dims.items()))


def joined_runs(members: Iterable[UnionMember]) -> list[dict[str, Any]]:
    """Return the runs of all members, with row numbers of the union.

    A run whose first rows are gone from a ring begins with the member's first row.
    """
    found: list[dict[str, Any]] = []
    for member in members:
        own = [run for run in member.reader.runs if run["first_row"] < member.span.stop]
        stops = [*(run["first_row"] for run in own), member.span.stop][1:]
        for run, stop in zip(own, stops, strict=True):
            if stop > member.span.start:
                found.append(_moved(run, member))
    return found


def _moved(run: Mapping[str, Any], member: UnionMember) -> dict[str, Any]:
    entry, by, first = dict(run), member.moved_by, member.rows.start
    for name in _ROWS_OF_RUN:
        if type(entry.get(name)) is int:
            entry[name] = max(first, entry[name] + by)
    if run["first_row"] < member.span.start:
        entry.pop(_OF_ITS_BEGINNING, None)  # the trajectories that the entry describes are gone
    if EVENTS in entry:
        events = events_of(run, member.span.stop)
        entry[EVENTS] = [{**each, "row": max(0, each["row"] + by)} for each in events]
    return entry


def _some(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:_MOST_NAMED]))
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"
