"""Choice of the columns that are stored once: observations whose frames are in a pool. Pure.

An observation and its next observation mostly consist of frames that other rows have too. Such a
pair of columns is stored as positions in a pool of frames. In the schema of the files, both columns
are int32 [frames of a value].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from tallyroll.storage.engine.frame_layout import FrameLayout
from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.rows.batch_dims import fitting
from tallyroll.storage.rows.frame_stacks import FrameStack, frames_declared
from tallyroll.storage.rows.keys import COLLECTOR, NEXT, Key, format_key
from tallyroll.storage.rows.schema import Column, Schema

_LEAST_NBYTES: Final = 64
"""Minimum bytes of a value. For smaller values, the positions take the space that is saved."""
_LEAST_DELTA_NBYTES: Final = 1024
"""Minimum bytes of a frame that is stored as its difference from the frame before."""
_LEAST_AUTO_NBYTES: Final = 1024
"""Minimum bytes of a uint8 value that ``once="auto"`` stores once."""
_CHANNELS: Final = (1, 3)
"""Sizes of the first axis of an image that count as color channels, not as stacked frames."""
_MOST_GUESSED: Final = 16
"""Maximum size of the first axis of an image that counts as a stack of frames."""
_LEAST_SIDE: Final = 32
"""Minimum height and width of an image that counts as a stack of frames."""


@dataclass(frozen=True)
class OnceColumn:
    """A column that is stored once, together with its column in ``next``."""

    key: Key
    layout: FrameLayout

    @property
    def next_key(self) -> Key:
        """The key of the column in ``next``."""
        return (NEXT, *self.key)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `once_from_json` reads."""
        return {"key": list(self.key), **self.layout.to_json()}


def plan_once(schema: Schema, stacks: Sequence[FrameStack] = ()) -> tuple[OnceColumn, ...]:
    """Choose the columns that a new storage stores once.

    These are the columns of at least 64 bytes a row that have a column of the same dtype and shape
    in ``next``. A uint8 image of 32 x 32 pixels or more whose first axis has 2 or 4 to 16 entries
    counts as a stack of frames, unless ``stacks`` declares the frames. uint8 frames of 1 KiB or
    more, a multiple of 4 bytes, are stored as differences.

    Raises:
        InvalidSchema: no column can be stored once.
        ValueError: a declared stack does not fit its column, or is not along the first axis.
    """
    declared = frames_declared(schema, stacks)
    for key, (n, axis) in declared.items():
        shape = schema.columns[schema.keys.index(key)].shape
        if axis or shape[0] != n:
            raise ValueError(
                f"stacks: expected frames along the whole first axis of {format_key(key)}, whose "
                f"values have the shape {list(shape)}, got {n} frames along axis {axis}. Only "
                "such stacks can be stored once."
            )
    found = [
        OnceColumn(
            key, _layout(column, declared[key][0] if key in declared else guess_stack(column))
        )
        for key, column in _observations(schema).items()
        if column.row_nbytes >= _LEAST_NBYTES
    ]
    if not found:
        raise InvalidSchema(
            f"once=True: expected a column of {_LEAST_NBYTES} bytes or more a row with a column of "
            f"the same dtype and shape in next, got {', '.join(map(format_key, schema.keys))}. "
            "Leave once out."
        )
    return tuple(found)


def plan_once_auto(schema: Schema) -> tuple[OnceColumn, ...]:
    """Choose the columns that ``once="auto"`` stores once in a new ring.

    These are the columns that `plan_once` chooses, of uint8 and at least 1 KiB a row. Columns whose
    frames a pool cannot hold, or whose pool would have the path of a group, are left out.
    """
    groups = {key[:depth] for key in schema.keys for depth in range(1, len(key))}
    found = []
    for key, column in _observations(schema).items():
        free = (*key[:-1], f"{key[-1]}.frames") not in groups
        if free and column.dtype is torch.uint8 and column.row_nbytes >= _LEAST_AUTO_NBYTES:
            with suppress(InvalidSchema):
                found.append(OnceColumn(key, _layout(column, guess_stack(column))))
    return tuple(found)


def _observations(schema: Schema) -> dict[Key, Column]:
    """Return the columns that have a column of the same dtype and shape in ``next``."""
    columns = {column.key: column for column in schema.columns}
    return {
        key: column
        for key, column in columns.items()
        if key[0] not in (NEXT, COLLECTOR)
        and (after := columns.get((NEXT, *key))) is not None
        and (after.dtype, after.shape) == (column.dtype, column.shape)
    }


def row_nbytes_once(schema: Schema, once: Sequence[OnceColumn]) -> int:
    """Return the bytes of a row that adds one frame to each pool, if the frames do not shrink."""
    frames = 0
    for each in once:
        layout = each.layout
        whole = layout.frames_that_fit(0, layout.begin_of_frames)
        frames += -(-layout.segment_nbytes // whole)
    return stored_schema(schema, once).row_nbytes + frames


def guess_stack(column: Column) -> int:
    """Return the number of frames of a value, judged by its dtype and shape; see `plan_once`."""
    if column.dtype is not torch.uint8 or len(column.shape) != 3:
        return 1
    n, *sides = column.shape
    stacked = n not in _CHANNELS and n <= _MOST_GUESSED and min(sides) >= _LEAST_SIDE
    return n if stacked else 1


def _layout(column: Column, stack: int) -> FrameLayout:
    nbytes = column.row_nbytes // stack
    delta = column.dtype is torch.uint8 and nbytes >= _LEAST_DELTA_NBYTES and not nbytes % 4
    return FrameLayout.plan(column.numpy_dtype, column.shape, stack, delta=delta)


def stored_schema(schema: Schema, once: Sequence[OnceColumn]) -> Schema:
    """Return the schema of the files, in which columns that are stored once are positions."""
    if not once:
        return schema
    frames = {key: each.layout.stack for each in once for key in (each.key, each.next_key)}
    columns = tuple(
        Column(column.key, torch.int32, (frames[column.key],)) if column.key in frames else column
        for column in schema.columns
    )
    shapes = {column.key: column.shape for column in columns}
    return Schema(columns, tuple(fitting(dict(schema.batch_dims), shapes).items()))


def once_to_json(once: Sequence[OnceColumn]) -> list[dict[str, Any]]:
    """Return a JSON value that `once_from_json` reads."""
    return [each.to_json() for each in once]


def once_from_json(value: Any, schema: Schema) -> tuple[OnceColumn, ...]:
    """Read the columns of ``schema`` that are stored once from the result of `once_to_json`.

    Raises:
        InvalidSchema: ``value`` has another form, or does not fit the schema.
    """
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise InvalidSchema(f"once: expected a list of columns, got {value!r:.200}.")
    columns = {column.key: column for column in schema.columns}
    found: dict[Key, OnceColumn] = {}
    for item in value:
        rest = dict(item)
        key = rest.pop("key", None)
        named = isinstance(key, list) and all(type(part) is str for part in key)
        column = columns.get(tuple(key)) if named else None
        after = None if column is None else columns.get((NEXT, *column.key))
        if column is None or after is None or column.key in found:
            raise InvalidSchema(f"once: expected columns with a next column, got {key!r:.200}.")
        layout = FrameLayout.from_json(rest)
        shape = (layout.stack, *layout.shape) if layout.stack > 1 else layout.shape
        wanted = [(layout.dtype, shape)] * 2
        if wanted != [(each.numpy_dtype, each.shape) for each in (column, after)]:
            raise InvalidSchema(
                f"once: expected frames of column {format_key(column.key)}, got {item!r:.200}."
            )
        found[column.key] = OnceColumn(column.key, layout)
    return tuple(found.values())
