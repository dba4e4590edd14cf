"""Statistics, overlays and priorities that are kept beside rows: what travels with an export."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from contextlib import closing
from dataclasses import fields
from typing import Any, Final

import numpy as np

from tallyroll.storage.ext.overlays.overlaid import OverlaidReader
from tallyroll.storage.ext.overlays.overlay_set import Overlays
from tallyroll.storage.ext.statistics.statistics import ColumnStatistics, as_shown
from tallyroll.storage.ext.statistics.statistics_file import place_of, read_kept
from tallyroll.storage.ext.storage_copy import sources_of
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Schema

_STATISTICS_NBYTES: Final = 2**18
"""Bytes of all statistics in a text, which may be in each file of an export."""
_QUANTILES: Final = "quantiles"


def statistics_kept(
    reader: RowReader, schema: Schema, rows: int, changed: Collection[Key]
) -> tuple[dict[str, Any], int]:
    """Return the kept statistics of columns as JSON, and how many of them are left out.

    Args:
        reader: of the rows.
        schema: the columns that are exported.
        rows: how many of the first rows are exported; -1 for a choice among them.
        changed: columns that are exported with other values.
    """
    place = place_of(reader)
    known = {} if place is None else read_kept(reader, place)
    found, room, left = dict[str, Any](), _STATISTICS_NBYTES, 0
    for column in schema.columns:
        if (counted := known.get(column.key)) is None:
            continue
        said = _as_json(as_shown(column, counted.total(), counted.quantiles))
        nbytes = len(json.dumps(said))
        if counted.stop != rows or column.key in changed or nbytes > room:
            left += 1
            continue
        found[format_key(column.key)] = said
        room -= nbytes
    return found, left


def _as_json(each: ColumnStatistics) -> dict[str, Any]:
    found = {field.name: getattr(each, field.name) for field in fields(each)}
    quantiles = found.pop(_QUANTILES)
    values = {name: _plain(array) for name, array in found.items()}
    return {**values, _QUANTILES: {str(share): _plain(a) for share, a in quantiles.items()}}


def _plain(values: Any) -> Any:
    """Return numbers as JSON has them: NaN and infinite ones as texts."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list):
        return [_plain(each) for each in values]
    return values if isinstance(values, int) or math.isfinite(values) else str(values)


def left_beside(reader: RowReader, schema: Schema) -> dict[str, int]:
    """Return how much storages keep beside their rows that no export has, by its name.

    Overlays that are read as columns are among those of ``schema``.
    """
    overlays, priorities = set[Key](), 0
    for each in sources_of(reader):
        files = each.rows if isinstance(each, OverlaidReader) else each
        if isinstance(files, FileReader):
            with closing(Overlays(files)) as beside:
                overlays |= {*beside.keys()}
            priorities += files.format.priorities_path.exists()
    return {"overlays": len(overlays - {*schema.keys}), "priorities": priorities}
