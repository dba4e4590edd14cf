"""Convert rows to Arrow batches and back, bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import Block
from tallyroll.storage.rows.dtypes import TORCH
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Column, Schema

ABOUT = b"tallyroll"
"""The key of Tallyroll's entry in the metadata of a table."""


def names_of(schema: Schema) -> list[str]:
    """Return the names of columns in a table: keys joined by dots.

    If two names would be equal, all keys are joined by slashes instead.
    """
    names = [".".join(each.key) for each in schema.columns]
    if len({*names}) < len(names):
        names = ["/".join(each.key) for each in schema.columns]
    return names


def arrow_schema(arrow: Any, schema: Schema, about: Mapping[str, Any]) -> Any:
    """Return the Arrow schema of a table that holds the columns of ``schema``."""
    fields = []
    for name, column in zip(names_of(schema), schema.columns, strict=True):
        kind, size = arrow.from_numpy_dtype(_part(column)), _size(column)
        if column.shape or column.dtype.is_complex:
            kind = arrow.list_(arrow.field("element", kind, nullable=False), size)
        said = {"shape": json.dumps(list(column.shape)), "dtype": column.dtype_name}
        fields.append(arrow.field(name, kind, nullable=False, metadata=said))
    return arrow.schema(fields, metadata={ABOUT: json.dumps(about)})


def to_batch(arrow: Any, kinds: Any, schema: Schema, block: Block) -> Any:
    """Convert a block of rows to a record batch."""
    arrays = []
    for kind, column in zip(kinds.types, schema.columns, strict=True):
        numbers = np.ascontiguousarray(block[column.key]).reshape(-1).view(_part(column))
        values = arrow.array(numbers)
        if column.shape or column.dtype.is_complex:
            values = arrow.FixedSizeListArray.from_arrays(values, type=kind)
        arrays.append(values)
    return arrow.RecordBatch.from_arrays(arrays, schema=kinds)


def _part(column: Column) -> np.dtype[Any]:
    """Return the dtype of a column's numbers. A complex number has two parts of a real dtype."""
    parts: dict[torch.dtype, np.dtype[Any]] = {
        torch.complex64: np.dtype(np.float32),
        torch.complex128: np.dtype(np.float64),
    }
    return parts.get(column.dtype, column.numpy_dtype)


def _size(column: Column) -> int:
    return math.prod(column.shape) * (2 if column.dtype.is_complex else 1)


@dataclass(frozen=True)
class ArrowColumn:
    """A column of a table, mapped to a column of a storage."""

    name: str
    column: Column

    def of(self, arrow: Any, batch: Any) -> np.ndarray:
        """Return the column's values from a batch.

        Raises:
            InvalidDataset: the values do not match the column's dtype or shape.
        """
        column, values, count = self.column, batch.column(self.name), batch.num_rows
        size = _size(column)
        kind = values.type
        if arrow.types.is_fixed_size_list(kind) or is_list(arrow, kind):
            values = self._flat(arrow, values)
        elif size != 1:
            raise InvalidDataset(f"{self.name} has one number per row, expected {size}")
        if values.null_count:
            raise InvalidDataset(f"{self.name} has rows without a value")
        wanted = _part(column)
        if values.type != arrow.from_numpy_dtype(wanted) or len(values) != count * size:
            raise InvalidDataset(
                f"{self.name}: expected {size} x {wanted} per row, got rows of {values.type}"
            )
        flat = values.to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(flat).view(column.numpy_dtype).reshape(count, *column.shape)

    def _flat(self, arrow: Any, values: Any) -> Any:
        while arrow.types.is_fixed_size_list(values.type) or is_list(arrow, values.type):
            if values.null_count:
                raise InvalidDataset(f"{self.name} has rows without a value")
            if is_list(arrow, values.type):
                lengths = np.diff(values.offsets.to_numpy())
                if len(lengths) and (lengths != lengths[0]).any():
                    raise InvalidDataset(f"{self.name} has rows of different lengths")
            values = values.flatten()
        return values


def is_list(arrow: Any, kind: Any) -> bool:
    """Return True if a column's values are lists of variable length."""
    return bool(arrow.types.is_list(kind) or arrow.types.is_large_list(kind))


def columns_of(arrow: Any, found: Any, said: Schema | None, first: Any) -> list[ArrowColumn]:
    """Return the columns of a table that a storage can hold.

    Args:
        arrow: the ``pyarrow`` module.
        found: the table's schema.
        said: the columns that the export recorded, or None if another program wrote the table.
        first: a batch with the first row, or None if there are no rows.
    """
    if said is not None:
        names = names_of(said)
        if lacking := [name for name in names if found.get_field_index(name) < 0]:
            raise InvalidDataset(f"it has no column {', '.join(lacking)!s:.300}")
        return [ArrowColumn(n, c) for n, c in zip(names, said.columns, strict=True)]
    columns = []
    for field in found:
        shape, kind = _shape(arrow, field, first)
        dtype = _dtype(kind)
        if dtype is not None and shape is not None:
            columns.append(ArrowColumn(field.name, Column(_key(field.name), dtype, shape)))
    return columns


def _shape(arrow: Any, field: Any, first: Any) -> tuple[tuple[int, ...] | None, Any]:
    """Return the shape of a value and the type of its numbers. The shape is None if unknown."""
    kind, sizes = field.type, list[int]()
    values = None if first is None else first.column(field.name)
    while arrow.types.is_fixed_size_list(kind) or is_list(arrow, kind):
        if arrow.types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
        elif values is None or not len(values) or not values[0].is_valid:
            return None, kind
        else:
            sizes.append(len(values[0]))
        values = None if values is None or not len(values) else values.flatten()
        kind = kind.value_type
    return (tuple(sizes) if all(sizes) else None), kind


def _dtype(kind: Any) -> torch.dtype | None:
    try:
        return TORCH.get(np.dtype(kind.to_pandas_dtype()))
    except (NotImplementedError, TypeError):
        return None


def _key(name: str) -> Key:
    return tuple(name.split("/" if "/" in name else "."))
