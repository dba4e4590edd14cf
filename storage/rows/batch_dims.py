"""Batch dimensions of TensorDicts after the rows, such as agents or steps of an item. Pure.

A level is a TensorDict in a batch, identified by its key: ``()`` is the root, and ``("next",
"agents")`` is a nested level. The first batch dimension is that of the rows. The count of a level
is the number of its other batch dimensions. These are the first dimensions of a row's value in
every column at or below that level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from tensordict import TensorDictBase, is_non_tensor

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.rows.keys import Key, format_key

BatchDims: TypeAlias = Mapping[Key, int]
"""Counts by level. Levels whose count is 0 are left out."""

Shapes: TypeAlias = Mapping[Key, tuple[int, ...]]
"""The shape of a row's value by column, or the batch size after the rows by level."""


def batch_dims_of(td: TensorDictBase, lead: int = 1, level: Key = ()) -> dict[Key, int]:
    """Return the counts of a TensorDict at ``level``; its first ``lead`` dimensions are rows."""
    found = {level: td.batch_dims - lead} if td.batch_dims > lead else {}
    for name, value in td.items():
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            found |= batch_dims_of(value, lead, (*level, name))
    return found


def levels_of(keys: Iterable[Key]) -> list[Key]:
    """Return every level that has some of the columns ``keys`` at or below it, parents first."""
    found = dict.fromkeys(key[:depth] for key in keys for depth in range(len(key)))
    return sorted(found, key=len)


def fitting(dims: BatchDims, shapes: Shapes) -> dict[Key, int]:
    """Return ``dims``, limited to the counts that columns of these shapes support.

    Every level has at least the count of its parent.
    """
    if not dims:
        return {}
    found: dict[Key, int] = {}
    common = _common(shapes)
    for level in sorted(common, key=len):
        count = max(dims.get(level, 0), found.get(level[:-1], 0))
        found[level] = min(count, len(common[level]))
    return {level: count for level, count in found.items() if count}


def _common(shapes: Shapes) -> dict[Key, tuple[int, ...]]:
    """Return the first dimensions that the columns at or below each level have in common."""
    found: dict[Key, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        for depth in range(len(key)):
            pairs = zip(found.get(key[:depth], shape), shape, strict=False)
            same = takewhile(lambda pair: pair[0] == pair[1], pairs)
            found[key[:depth]] = tuple(size for size, _ in same)
    return found


def require_fitting(dims: BatchDims, shapes: Shapes) -> None:
    """Raise if columns of these shapes cannot have these counts.

    Raises:
        InvalidSchema: a level has no columns, or its columns or its parent have other dimensions.
    """
    possible = fitting(dims, shapes)
    for level in [*dims, *possible]:
        if dims.get(level, 0) != possible.get(level, 0):
            raise InvalidSchema(
                f"{format_key(level) or 'the root'} has {dims.get(level, 0)} batch dimensions "
                "after the rows, which do not fit its columns or its parent."
            )


def shapes_of(dims: BatchDims, shapes: Shapes) -> dict[Key, tuple[int, ...]]:
    """Return the batch size after the rows of each level of ``dims``, which fits the columns."""
    common = _common(shapes) if dims else {}
    return {level: common[level][:count] for level, count in dims.items()}


def from_counts(columns: Sequence[tuple[Key, Sequence[int] | None]]) -> dict[Key, int]:
    """Return the count of each level. Each column has the counts of its levels, root first.

    None in place of the counts means that all of them are 0.

    Raises:
        InvalidSchema: columns contradict each other.
    """
    found: dict[Key, int] = {}
    for key, given in columns:
        counts = [0] * len(key) if given is None else given
        listed = isinstance(counts, list) and len(counts) == len(key)
        if not listed or not all(type(n) is int and n >= 0 for n in counts):
            raise InvalidSchema(
                f"{format_key(key)}: expected batch_dims with one count for each part of the "
                f"key, got {given!r:.100}."
            )
        for depth, count in enumerate(counts):
            if found.setdefault(key[:depth], count) != count:
                raise InvalidSchema(
                    f"{format_key(key)} has batch_dims that contradict those of other columns."
                )
    return {level: found[level] for level in sorted(found, key=len) if found[level]}
