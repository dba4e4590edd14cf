"""File that stores computed statistics next to the rows.

The file is a cache: losing it loses no rows. It begins with a line that contains a magic string
and the version, followed by a line of JSON. The JSON contains the ``id`` of the storage, the number
of its ``rewinds``, and ``columns``. Each column has its name, dtype and shape, the number of rows
counted, and the number of runs. The binary part contains for each column the moments [runs,
numbers] of `MOMENTS`, the histogram of bytes if the dtype has one byte, and the quantiles. The
SHA-256 of everything before it ends the file.

Rows never change or move while a storage exists. Statistics of the first rows therefore stay valid
when rows are added.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.ext.packed.archives import OURS
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.statistics.computation import (
    ColumnAccumulator,
    is_of_bytes,
    numbers_each,
    sampled,
)
from tallyroll.storage.ext.statistics.moments import BYTES, MOMENTS, QUANTILES
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.dtypes import in_float64
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.trajectories.columns import floats_of

_MAGIC: Final = b"tallyroll statistics 1\n"
_SUM_NBYTES: Final = 32
_MOST_NBYTES: Final = 2**28
_LOOKED_AT: Final = 64
_NAME: Final = "columns.statistics"


class Unusable(Exception):
    """The file is damaged, or describes other rows."""


class ForeignStatistics(Unusable):
    """The file describes another storage, or rows that were rewound."""


@dataclass(frozen=True, slots=True)
class StatisticsFile:
    """Location of the statistics file of a storage."""

    path: Path
    inside: Inside
    """Access to the files of the storage."""


def place_of(reader: RowReader) -> StatisticsFile | None:
    """Return the location of the statistics file of a reader; None if there is no such file.

    Statistics of rings are not stored, because their rows disappear. Views and unions have no
    location for a file.
    """
    if reader.ring or reader.span.start:
        return None
    if isinstance(reader, FileReader):
        return StatisticsFile(reader.format.statistics_path, reader.format.inside)
    if not isinstance(reader, PackedReader):
        return None
    path = reader.path
    if path.is_dir():
        return StatisticsFile(path / OURS / _NAME, Inside(path))
    return StatisticsFile(path.with_name(f"{path.name}.{_NAME}"), Inside(path.parent))


def read_saved(reader: RowReader, place: StatisticsFile) -> dict[Key, ColumnAccumulator]:
    """Return the stored statistics of columns; empty if there is no file.

    A file that is damaged or describes other rows is ignored, since the rows can be counted again.
    """
    with contextlib.suppress(Unusable, OSError):
        return read_whole(reader, place)
    return {}


def write_saved(
    reader: RowReader, place: StatisticsFile, found: Mapping[Key, ColumnAccumulator]
) -> None:
    """Replace the file atomically; keep the old file if the new one cannot be written."""
    columns = {column.key: column for column in reader.schema.columns}
    said = {
        **_owner(reader),
        "columns": [
            [*_about(columns[key]), each.stop, len(each.of_runs)] for key, each in found.items()
        ],
    }
    parts = [_MAGIC, json.dumps(said).encode(), b"\n"]
    for each in found.values():
        parts.append(each.of_runs.tobytes())
        if each.of_bytes is not None:
            parts.append(each.of_bytes.tobytes())
        assert each.quantiles is not None
        parts.append(each.quantiles.tobytes())
    body = b"".join(parts)
    if len(body) > _MOST_NBYTES:
        return
    with contextlib.suppress(OSError):
        content = body + hashlib.sha256(body).digest()
        place.inside.write_atomically(place.path, content)


def _owner(reader: RowReader) -> dict[str, Any]:
    return {"id": reader.id, "rewinds": reader.rewinds}


def _about(column: Column) -> list[Any]:
    return [format_key(column.key), column.dtype_name, list(column.shape)]


def read_whole(reader: RowReader, place: StatisticsFile) -> dict[Key, ColumnAccumulator]:
    """Return the stored statistics of columns.

    Raises:
        OSError: there is no file.
        Unusable: the file cannot be used.
    """
    content = place.inside.read(place.path, _MOST_NBYTES + _SUM_NBYTES)
    body, told = content[:-_SUM_NBYTES], content[-_SUM_NBYTES:]
    if not body.startswith(_MAGIC) or hashlib.sha256(body).digest() != told:
        raise Unusable
    line, _, rest = body[len(_MAGIC) :].partition(b"\n")
    try:
        said = json.loads(line)
        columns = said.pop("columns")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Unusable from error
    if said != _owner(reader):
        raise ForeignStatistics
    found, parts, head = {}, _Parts(rest), reader.head
    by_name = {format_key(column.key): column for column in reader.schema.columns}
    try:
        for *about, rows, runs in columns:
            column = by_name[about[0]]
            if about != _about(column) or not _is_count(rows, head) or not _is_count(runs, head):
                raise Unusable
            found[column.key] = parts.counted(column, rows, runs)
    except (ValueError, TypeError, LookupError) as error:
        raise Unusable from error
    if parts.left or not all(
        _fits(reader, by_name[format_key(k)], each) for k, each in found.items()
    ):
        raise Unusable
    return found


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


class _Parts:
    """Parser of the arrays in the binary part."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    @property
    def left(self) -> int:
        """The number of bytes that are left."""
        return len(self._content) - self._at

    def counted(self, column: Column, rows: int, runs: int) -> ColumnAccumulator:
        """Parse the statistics of a column; raise ValueError if bytes are missing."""
        each = numbers_each(column)
        moments = self._next(MOMENTS, runs, each)
        counts = self._next(np.dtype("<i8"), each, BYTES) if is_of_bytes(column) else None
        quantiles = self._next(np.dtype("<f8"), len(QUANTILES), each)
        return ColumnAccumulator(moments, counts, quantiles, rows)

    def _next(self, dtype: np.dtype[Any], *shape: int) -> np.ndarray:
        count = math.prod(shape)
        found = (
            np.frombuffer(self._content, dtype, count, self._at) if count else (np.empty(0, dtype))
        )
        self._at += found.nbytes
        return found.reshape(shape).copy()


def _fits(reader: RowReader, column: Column, counted: ColumnAccumulator) -> bool:
    """Return True if the statistics are plausible, given their counts and a sample of rows."""
    size, rows = math.prod(column.shape), counted.stop
    moments = counted.of_runs
    there = moments["count"].sum(axis=0) + moments["nans"].sum(axis=0)
    if (there != rows * (size // numbers_each(column))).any() or (moments["count"] < 0).any():
        return False
    if counted.of_bytes is not None and (
        (counted.of_bytes < 0).any() or (counted.of_bytes.sum(axis=1) != there).any()
    ):
        return False
    if not rows:
        return True
    some = reader.column(column.key).take(sampled(range(rows), _LOOKED_AT))
    values = floats_of(some) if column.dtype_name == "bfloat16" else some
    values = in_float64(values.reshape(-1, numbers_each(column)))
    total = counted.total()
    out = (values < total["least"]) | (values > total["most"])
    out |= np.isnan(values) & (total["nans"] == 0)
    return not out.any()
