"""Schemas: the named, typed columns of a storage. Pure; independent of files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.rows.batch_dims import (
    BatchDims,
    batch_dims_of,
    fitting,
    from_counts,
    require_fitting,
    shapes_of,
)
from tallyroll.storage.rows.dtypes import NAMES, NUMPY, TORCH
from tallyroll.storage.rows.keys import Key, can_be_stored, format_key
from tallyroll.storage.rows.tensordict_builder import leaves, require_dense

_MOST_COLUMNS, _MOST_PARTS, _LONGEST_PART, _MOST_SIZES = 2**14, 32, 4096, 64
_MOST_ROW_NBYTES = 2**47
"""Maximum bytes of a row in one column, which is more than the address space of any machine."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: nested key, dtype, and the shape of one row's value.

    Raises:
        InvalidSchema: the dtype cannot be stored, a value has no bytes, or a part of the key cannot
            be a name.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_key(self.key)
        if self.dtype not in NUMPY:
            raise InvalidSchema(
                f"column {format_key(self.key)} has dtype {self.dtype}; a storage holds "
                f"{', '.join(NAMES)}. Convert it before writing."
            )
        if len(self.shape) > _MOST_SIZES:
            raise InvalidSchema(
                f"column {format_key(self.key)} has {len(self.shape)} dimensions per row, more "
                f"than the maximum of {_MOST_SIZES}. Flatten some."
            )
        if min(self.shape, default=1) >= 1 and self.row_nbytes > _MOST_ROW_NBYTES:
            raise InvalidSchema(
                f"column {format_key(self.key)} has shape {list(self.shape)}: a row would have "
                f"{self.row_nbytes} bytes, more than the maximum of {_MOST_ROW_NBYTES}."
            )
        if min(self.shape, default=1) < 1:
            raise InvalidSchema(
                f"column {format_key(self.key)} has shape {list(self.shape)}, which holds no "
                "values. Leave the column out."
            )

    @property
    def dtype_name(self) -> str:
        """The name of the dtype without ``torch.``: ``"float32"``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the column's arrays; ``uint16`` for bfloat16."""
        return NUMPY[self.dtype]

    @property
    def row_nbytes(self) -> int:
        """The bytes of one row in this column."""
        return self.numpy_dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Schema:
    """The ordered columns of a storage.

    Raises:
        InvalidSchema: there are no columns, a key occurs twice, a key is both a column and a group
            of columns, or columns lack the batch dimensions of their group.
    """

    columns: tuple[Column, ...]
    batch_dims: tuple[tuple[Key, int], ...] = ()
    """The groups of columns whose TensorDicts have batch dimensions after the rows, each with the
    number of these dimensions; ``()`` is the root. The shapes of the columns in a group begin with
    these dimensions."""

    def __post_init__(self) -> None:
        _check_count(self.columns)
        keys = self.keys
        if not keys:
            raise InvalidSchema("a storage needs at least one column and got none.")
        if len(set(keys)) < len(keys):
            twice = sorted(format_key(key) for key, count in Counter(keys).items() if count > 1)
            raise InvalidSchema(f"columns named twice: {', '.join(twice)}.")
        groups = {key[:depth] for key in keys for depth in range(1, len(key))}
        for key in keys:
            if key in groups:
                raise InvalidSchema(
                    f"{format_key(key)} is both a column and a group of columns. Rename one."
                )
        require_fitting(dict(self.batch_dims), self._shapes)

    @classmethod
    def of(cls, rows: TensorDictBase | Mapping[Key, np.ndarray]) -> Schema:
        """Return the schema of a batch ``rows`` [N, ...], whose first dimension is the rows.

        Raises:
            InvalidSchema: an entry cannot be a column.
        """
        if isinstance(rows, TensorDictBase):
            if not rows.batch_dims:
                raise InvalidSchema(
                    "a batch needs a batch size [N] and has []. Use unsqueeze(0) for one row."
                )
            return cls.of_leaves(leaves(rows), batch_dims_of(rows))
        return cls(tuple(_column_of_array(key, array) for key, array in rows.items()))

    @classmethod
    def of_leaves(cls, found: Mapping[Key, torch.Tensor], batch_dims: BatchDims) -> Schema:
        """Return the schema of tensors [N, ...], whose TensorDicts had these batch dimensions.

        Raises:
            InvalidSchema: an entry cannot be a column.
        """
        columns = tuple(_column_of_tensor(key, leaf) for key, leaf in found.items())
        kept = fitting(batch_dims, {column.key: column.shape for column in columns})
        return cls(columns, tuple(kept.items()))

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of the columns, in order."""
        return tuple(column.key for column in self.columns)

    @property
    def _shapes(self) -> dict[Key, tuple[int, ...]]:
        return {column.key: column.shape for column in self.columns}

    @property
    def batch_shapes(self) -> dict[Key, tuple[int, ...]]:
        """The batch size after the rows of each group in `batch_dims`."""
        return shapes_of(dict(self.batch_dims), self._shapes)

    @property
    def row_nbytes(self) -> int:
        """The bytes of one row in all columns."""
        return sum(column.row_nbytes for column in self.columns)

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def to_json(self) -> list[dict[str, Any]]:
        """Return a JSON value that `from_json` reads."""
        return [_column_to_json(column, dict(self.batch_dims)) for column in self.columns]

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """Return the schema from the result of `to_json`.

        Raises:
            InvalidSchema: ``value`` is something else.
        """
        if not isinstance(value, list):
            raise InvalidSchema(f"a schema is a list of columns, got {type(value).__name__}.")
        _check_count(value)
        columns = tuple(_column_from_json(item) for item in value)
        counts = [item.get("batch_dims") for item in value]
        dims = from_counts([(c.key, n) for c, n in zip(columns, counts, strict=True)])
        return cls(columns, tuple(dims.items()))

    def differences(self, other: Schema) -> list[str]:
        """Return the differences of ``other`` from this schema, one sentence each.

        The order of columns and batch dimensions are ignored, because they do not change the
        values.
        """
        wanted = {column.key: column for column in self.columns}
        got = {column.key: column for column in other.columns}
        found: list[str] = []
        for key, column in wanted.items():
            found += (
                [f"{format_key(key)} is missing"] if key not in got else _differ(column, got[key])
            )
        return found + [
            f"{format_key(key)} is not a column here" for key in got if key not in wanted
        ]


def _differ(wanted: Column, got: Column) -> Iterable[str]:
    if wanted.dtype != got.dtype:
        yield f"{format_key(wanted.key)} has dtype {got.dtype_name}, expected {wanted.dtype_name}"
    if wanted.shape != got.shape:
        shapes = f"{list(got.shape)} per row, expected {list(wanted.shape)}"
        yield f"{format_key(wanted.key)} has shape {shapes}"


def _check_count(columns: Sized) -> None:
    if len(columns) > _MOST_COLUMNS:
        raise InvalidSchema(f"a storage holds at most {_MOST_COLUMNS} columns, got {len(columns)}.")


def _check_key(key: Key) -> None:
    if not isinstance(key, tuple) or not key or not all(isinstance(part, str) for part in key):
        raise InvalidSchema(f"a column's key is a tuple of names, got {key!r:.200}.")
    if len(key) > _MOST_PARTS or max(map(len, key)) > _LONGEST_PART:
        raise InvalidSchema(
            f"a column's key has at most {_MOST_PARTS} names of {_LONGEST_PART} characters, got "
            f"{len(key)} of up to {max(map(len, key))}: {key!r:.200}. Make it shorter."
        )
    for part in key:
        if not can_be_stored(part):
            raise InvalidSchema(
                f"{part!r} in column {key!r} cannot be a name. A name must be valid Unicode, must "
                "not be empty, '.' or '..', and must not contain '/' or NUL. Rename the column."
            )


def _column_of_tensor(key: Key, leaf: torch.Tensor) -> Column:
    require_dense(key, leaf)
    return Column(key, leaf.dtype, tuple(leaf.shape[1:]))


def _column_of_array(key: Any, array: np.ndarray) -> Column:
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise InvalidSchema(
            f"column {key!r} must be an array [N, ...], got {type(array).__name__}."
        )
    dtype: Any = TORCH.get(array.dtype, array.dtype)
    return Column(key, dtype, tuple(array.shape[1:]))


def _column_to_json(column: Column, dims: BatchDims) -> dict[str, Any]:
    item = {"key": list(column.key), "dtype": column.dtype_name, "shape": list(column.shape)}
    along = [dims.get(column.key[:depth], 0) for depth in range(len(column.key))]
    return {**item, "batch_dims": along} if any(along) else item


def _column_from_json(item: Any) -> Column:
    try:
        key, dtype, shape = item["key"], NAMES[item["dtype"]], item["shape"]
    except (KeyError, TypeError) as error:
        raise InvalidSchema(
            f"expected a column with key, dtype and shape, got {item!r:.200}."
        ) from error
    if not isinstance(key, list) or not isinstance(shape, list):
        raise InvalidSchema(f"expected a column with lists for key and shape, got {item!r:.200}.")
    if not all(type(size) is int for size in shape):
        raise InvalidSchema(f"expected a shape of whole numbers, got {item!r:.200}.")
    return Column(tuple(key), dtype, tuple(shape))
