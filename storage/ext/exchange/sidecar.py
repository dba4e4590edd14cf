"""Export the saved statistics of a storage, and count the overlays and priorities left out."""

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
from tallyroll.storage.ext.statistics.statistics_file import place_of, read_saved
from tallyroll.storage.ext.storage_copy import sources_of
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Schema

_STATISTICS_NBYTES: Final = 2**18
"""The maximum size in bytes of all statistics in the metadata.

Each file of an export may repeat the metadata.
"""
_QUANTILES: Final = "quantiles"


def saved_statistics(
    reader: RowReader, schema: Schema, rows: int, changed: Collection[Key]
) -> tuple[dict[str, Any], int]:
    """Return the saved statistics of columns as JSON, and the number of omitted statistics.

    Args:
        reader: the reader of the rows.
        schema: the columns to export.
        rows: the number of leading rows that are exported; -1 for a selection of rows.
        changed: the columns whose values the export changes.
    """
    place = place_of(reader)
    known = {} if place is None else read_saved(reader, place)
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
    """Convert numbers to JSON values. NaN and infinite numbers become strings."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list):
        return [_plain(each) for each in values]
    return values if isinstance(values, int) or math.isfinite(values) else str(values)


def omitted_sidecars(reader: RowReader, schema: Schema) -> dict[str, int]:
    """Count the overlays and priorities that the export leaves out.

    Overlays that are read as columns are part of ``schema`` and do not count.
    """
    overlays, priorities = set[Key](), 0
    for each in sources_of(reader):
        files = each.rows if isinstance(each, OverlaidReader) else each
        if isinstance(files, FileReader):
            with closing(Overlays(files)) as beside:
                overlays |= {*beside.keys()}
            priorities += files.format.priorities_path.exists()
    return {"overlays": len(overlays - {*schema.keys}), "priorities": priorities}
