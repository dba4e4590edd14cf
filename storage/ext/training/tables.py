"""Conversion of rows to pandas and Arrow tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from tallyroll.storage.engine.available_memory import library_memory, require_memory
from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.readers.row_reader import RowReader, columns_of
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import Keys
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.trajectories.columns import floats_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_MOST_NUMBERS: Final = 64
"""The most numbers per row that a stored column in a pandas table may have."""


def data_frame(reader: RowReader, keys: Keys | None) -> pd.DataFrame:
    """Convert rows to a pandas table; see `DiskStorage.to_pandas`."""
    pandas = needed("pandas", "pandas", "a table needs")
    columns = _columns(reader, keys)
    large = [each for each in columns if math.prod(each.shape) > _MOST_NUMBERS]
    if keys is not None and large:
        raise ValueError(
            f"{_name(large[0])}: expected at most {_MOST_NUMBERS} numbers per row for a pandas "
            f"table, got {math.prod(large[0].shape)}. Use to_arrow, or get."
        )
    found: dict[str, np.ndarray] = {}
    for column, values in _read(reader, [each for each in columns if each not in large]):
        flat = values.reshape(len(values), -1)
        names = [_name(column)]
        if column.shape and flat.shape[1] > 1:
            names = [f"{names[0]}.{number}" for number in range(flat.shape[1])]
        found |= {name: flat[:, place] for place, name in enumerate(names)}
    return pandas.DataFrame(found, copy=False)


def arrow_table(reader: RowReader, keys: Keys | None) -> pa.Table:
    """Convert rows to an Arrow table; see `DiskStorage.to_arrow`."""
    arrow = needed("pyarrow", "arrow", "a table needs")
    columns = _columns(reader, keys)
    for column in columns:
        if column.dtype.is_complex:
            raise ValueError(
                f"{_name(column)} has complex numbers, which Arrow does not support. Name "
                "only the other columns in columns=."
            )
    with library_memory(f"a table of {len(reader.span):,} rows"):
        return _table_of(arrow, reader, columns)


def _table_of(arrow: Any, reader: RowReader, columns: list[Column]) -> Any:
    arrays, fields = [], []
    for column, values in _read(reader, columns):
        size, numbers = math.prod(column.shape), arrow.array(values.reshape(-1))
        kind = numbers.type
        if column.shape:
            kind = arrow.list_(numbers.type, size)
            numbers = arrow.FixedSizeListArray.from_arrays(numbers, size)
        arrays.append(numbers)
        shape = {"shape": json.dumps(list(column.shape))} if column.shape else None
        fields.append(arrow.field(_name(column), kind, nullable=False, metadata=shape))
    return arrow.Table.from_arrays(arrays, schema=arrow.schema(fields))


def _columns(reader: RowReader, keys: Keys | None) -> list[Column]:
    columns = reader.schema.columns
    places, _ = columns_of(reader, keys)
    return list(columns) if places is None else [columns[place] for place in places]


def _read(reader: RowReader, columns: list[Column]) -> Iterator[tuple[Column, np.ndarray]]:
    """Yield columns with all their values [rows, ...], read consistently from the same rows."""
    keys = [each.key for each in columns]
    nbytes = len(reader.span) * sum(each.row_nbytes for each in columns)
    require_memory(nbytes, f"{len(reader.span):,} rows in a table", "Ask for fewer columns.")

    def copied() -> list[np.ndarray]:
        span = reader.span
        return reader.copies(np.arange(span.start, span.stop), keys)

    for column, values in zip(columns, read_consistently(reader, copied), strict=True):
        yield column, floats_of(values) if column.dtype is torch.bfloat16 else values


def _name(column: Column) -> str:
    return ".".join(column.key)
