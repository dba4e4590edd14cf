"""Declarations of columns whose values are stacks of frames, such as the last four images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Schema


@dataclass(frozen=True)
class FrameStack:
    """Declaration that the values of a column are stacks of frames, the oldest frame first.

    Args:
        key: the key of the column, such as ``"observation"``. The corresponding column in ``next``
            has the same stacks.
        n: frames per stack; None: the length of the axis.
        axis: the axis of a row's value along which frames are stacked; -1 is the last.
    """

    key: str | Key
    n: int | None = None
    axis: int = 0


def frames_declared(schema: Schema, stacks: Sequence[FrameStack]) -> dict[Key, tuple[int, int]]:
    """Return the number of frames and the axis of each column in ``stacks``.

    Raises:
        ValueError: a column does not exist, or its shape does not allow the declared stack.
    """
    found: dict[Key, tuple[int, int]] = {}
    shapes = {each.key: each.shape for each in schema.columns}
    for each in stacks:
        key = (each.key,) if isinstance(each.key, str) else tuple(each.key)
        if key not in shapes:
            raise ValueError(
                f"stacks: expected some of {', '.join(map(format_key, shapes))}, got "
                f"{format_key(key)}."
            )
        shape, axis = shapes[key], each.axis
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"stacks: expected an axis of {format_key(key)}, whose values have the shape "
                f"{list(shape)}, got axis {axis}."
            )
        axis %= len(shape)
        n = shape[axis] if each.n is None else each.n
        if type(n) is not int or n < 2 or shape[axis] % n or n > 4096:
            raise ValueError(
                f"stacks: expected 2 to 4096 frames that divide the shape {list(shape)} of "
                f"{format_key(key)} along axis {axis}, got {n!r:.80}."
            )
        found[key] = n, axis
    return found
