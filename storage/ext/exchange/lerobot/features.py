"""Map each column to a feature of LeRobot: its name, shape and encoding. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from tallyroll.storage.ext.exchange.pictures import Picture
from tallyroll.storage.rows.keys import COLLECTOR, NEXT, Key
from tallyroll.storage.rows.schema import Column, Schema

Kind = Literal["numbers", "image", "video", "following"]
"""Encodings of a column: numbers, PNG, video frames, or next frames of another column's video."""

OWN: Final = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""The features that every LeRobot dataset has, and their dtypes."""

_RESERVED: Final = {*OWN, "task", "subtask", "subtask_index"}
_FLAGS: Final = {"done", "terminated", "truncated", "reward"}
_MOST_DIMS: Final = 5
_VIDEO_CHANNELS: Final = (1, 3)


@dataclass(frozen=True)
class LeRobotFeature:
    """A column as LeRobot stores it."""

    name: str
    column: Column
    kind: Kind
    picture: Picture | None = None
    source: Key | None = None
    """For the kind "following", the key of the column whose video holds the frames."""

    @property
    def number_column(self) -> Column:
        """The column of plain numbers that a table stores for this column.

        A complex number becomes two numbers, and bfloat16 becomes float32.
        """
        column, shape = self.column, self.column.shape
        if column.dtype is torch.bfloat16:
            return Column(column.key, torch.float32, self._flat(shape))
        if column.dtype.is_complex:
            half = torch.float32 if column.dtype is torch.complex64 else torch.float64
            return Column(column.key, half, self._flat((*shape, 2)))
        return Column(column.key, column.dtype, self._flat(shape))

    @staticmethod
    def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if 0 < len(shape) <= _MOST_DIMS else (math.prod(shape),)

    @property
    def info_entry(self) -> dict[str, Any]:
        """The entry in ``info.json``, without the video information."""
        if self.picture is None:
            number_column = self.number_column
            return {
                "dtype": number_column.dtype_name,
                "shape": list(number_column.shape),
                "names": None,
            }
        channels = 3 if self.kind == "video" else self.picture.channels
        return {
            "dtype": self.kind,
            "shape": [self.picture.height, self.picture.width, channels],
            "names": ["height", "width", "channels"],
        }


def to_numbers(values: np.ndarray, feature: LeRobotFeature) -> np.ndarray:
    """Convert a column's values to the values of its `LeRobotFeature.number_column`."""
    number_column = feature.number_column
    flat = np.ascontiguousarray(values).reshape(-1)
    if feature.column.dtype is torch.bfloat16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.view(number_column.numpy_dtype).reshape(len(values), *number_column.shape)


def from_numbers(values: np.ndarray, feature: LeRobotFeature) -> np.ndarray:
    """Convert the values of a `LeRobotFeature.number_column` back to the values of the column."""
    column, flat = feature.column, np.ascontiguousarray(values).reshape(-1)
    if column.dtype is torch.bfloat16:
        flat = (flat.view(np.uint32) >> 16).astype(np.uint16)
    return flat.view(column.numpy_dtype).reshape(len(values), *column.shape)


def features_of(schema: Schema, *, video: bool, even: bool = False) -> list[LeRobotFeature]:
    """Return the features of columns, in order.

    Args:
        schema: the columns.
        video: True to store images as videos where possible.
        even: True to store images of an odd height or width as PNG.
    """
    columns = {each.key: each for each in schema.columns}
    filmed = {
        each.key for each in schema.columns if video and _can_be_filmed(each, columns, even=even)
    }
    found, used = list[LeRobotFeature](), set(_RESERVED)
    for column in schema.columns:
        key, picture = column.key, Picture.of(column)
        source = key[1:] if key[0] == NEXT and key[1:] in filmed else None
        if source is not None:
            found.append(LeRobotFeature("", column, "following", picture, source))
            continue
        name = _name(key, columns, picture)
        while name in used:
            name += "_"
        used.add(name)
        kind: Kind = "numbers" if picture is None else "video" if key in filmed else "image"
        found.append(LeRobotFeature(name, column, kind, picture))
    return found


def _can_be_filmed(column: Column, columns: Mapping[Key, Column], *, even: bool) -> bool:
    picture = Picture.of(column)
    if picture is None or picture.channels not in _VIDEO_CHANNELS or column.key[0] == NEXT:
        return False
    after = columns.get((NEXT, *column.key))
    alike = after is None or (after.dtype, after.shape) == (column.dtype, column.shape)
    return alike and not (even and (picture.height % 2 or picture.width % 2))


def _name(key: Key, columns: Mapping[Key, Column], picture: Picture | None) -> str:
    """Return a name in LeRobot's style: ``observation.state``, ``action``, ``next.reward``."""
    if key[0] == COLLECTOR:
        return ".".join(key)
    begin, rest = ("next.", key[1:]) if key[0] == NEXT and len(key) > 1 else ("", key)
    observed = rest in columns and (NEXT, *rest) in columns
    if not observed or rest[-1] == "action" or rest[-1] in _FLAGS:
        return begin + ".".join(rest)
    words = rest[1:] if rest[0] == "observation" else rest
    if picture is not None and picture.channels in _VIDEO_CHANNELS:
        return f"{begin}observation.images.{'.'.join(words) or 'pixels'}"
    return f"{begin}observation.{'.'.join(words) or 'state'}"
