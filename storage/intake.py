"""Batches that are handed over, checked against a schema column by column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from .errors import RowsMismatch
from .looks import Looks
from .rows import Key, spell
from .schema import Schema

__all__ = ["Intake"]

_LOOKS = attrgetter("dtype", "shape", "requires_grad")
"""What a tensor looks like."""


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of a nested TensorDict: which level holds it, and the columns in it."""

    parent: int
    name: str
    leaves: tuple[tuple[str, int], ...]
    entries: int


class Intake:
    """Checks batches for a storage of ``schema`` at ``path``."""

    def __init__(self, schema: Schema, path: Path) -> None:
        self._schema, self._path = schema, path
        self._keys = list(schema.keys)
        self._numpy_dtypes = [column.numpy_dtype for column in schema.columns]
        self._bits = [i for i, c in enumerate(schema.columns) if c.dtype is torch.bfloat16]
        self._levels = _levels_of(schema)
        self.count = -1
        """Rows of the batch that was looked at last."""
        self._shapes: list[tuple[int, ...]] = []
        self._looks: list[tuple[torch.dtype, tuple[int, ...], bool]] = []
        self._seen = Looks()

    def arrays(self, rows: Mapping[Key, np.ndarray]) -> list[np.ndarray]:
        """The arrays of a batch in the order of the columns, each [count, ...].

        Raises:
            RowsMismatch: not exactly the schema's columns, or another dtype or shape.
        """
        try:
            # In the order of the columns, as most are, they need not be looked up one by one.
            in_order = list(rows) == self._keys
            found = list(rows.values() if in_order else map(rows.__getitem__, self._keys))
            self._prepare(len(found[0]))
            if [array.dtype for array in found] != self._numpy_dtypes:
                self._refuse(rows)
            if [array.shape for array in found] != self._shapes:
                self._refuse(rows)
        except (KeyError, TypeError, AttributeError):
            self._refuse(rows)
        if len(rows) != len(found):
            self._refuse(rows)
        return found

    def leaves(self, rows: TensorDictBase, without: Key | None) -> list[torch.Tensor] | None:
        """What a TensorDict [count, ...] holds, in the order of the columns, unchecked.

        None where it holds something else than the columns, and perhaps ``without``.
        """
        try:
            self._prepare(rows.batch_size[0])
            return self._leaves(rows, without)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None

    def addresses(self, leaves: list[torch.Tensor]) -> list[int] | None:
        """Where the values of ``leaves`` lie, if they look like those before that became arrays."""
        return self._seen.addresses(leaves)

    def tensors(self, leaves: list[torch.Tensor]) -> list[np.ndarray] | None:
        """Arrays [count, ...] over the memory of ``leaves``, if that is simple; bfloat16 as bits.

        It is if all leaves are dense tensors of the columns' dtypes and shapes that autograd
        does not follow, in the memory of the CPU. None where one is not: whoever takes the longer
        way converts it, or finds out what is wrong.
        """
        try:
            if list(map(_LOOKS, leaves)) != self._looks:
                return None
            values = leaves.copy()
            for index in self._bits:
                values[index] = values[index].view(torch.uint16)
            arrays = list(map(torch.Tensor.numpy, values))
        except (AttributeError, RuntimeError, TypeError):
            return None
        self._seen.remember(leaves, arrays)
        return arrays

    def _leaves(self, rows: TensorDictBase, without: Key | None) -> list[torch.Tensor] | None:
        """The leaves in the order of the columns, None if there are other ones too."""
        found: list[Any] = [None] * len(self._keys)
        levels: list[Mapping[str, Any]] = []
        for level in self._levels:
            entries = _entries(levels[level.parent][level.name] if levels else rows)
            if len(entries) != level.entries and not _extra(entries, level, without, levels):
                return None
            levels.append(entries)
            for name, column in level.leaves:
                found[column] = entries[name]
        return found

    def _prepare(self, count: int) -> None:
        """Know what batches of ``count`` rows look like."""
        if count == self.count:
            return
        columns = self._schema.columns
        self._shapes = [(count, *column.shape) for column in columns]
        self._looks = [
            (c.dtype, shape, False) for c, shape in zip(columns, self._shapes, strict=True)
        ]
        self.count, self._seen = count, Looks()

    def _refuse(self, rows: Mapping[Key, Any]) -> NoReturn:
        found = [f"{key!r} is not a column here" for key in rows if key not in self._keys]
        count = next((len(a) for a in rows.values() if isinstance(a, np.ndarray) and a.ndim), 0)
        for column in self._schema.columns:
            got = rows.get(column.key)
            wanted = f"an array of {column.numpy_dtype}, shape {[count, *column.shape]}"
            if got is None:
                found.append(f"{spell(column.key)} is missing")
            elif not isinstance(got, np.ndarray):
                found.append(f"{spell(column.key)} is {type(got).__name__}, wanted {wanted}")
            elif got.dtype != column.numpy_dtype or got.shape != (count, *column.shape):
                found.append(
                    f"{spell(column.key)} has {got.dtype}, shape {list(got.shape)}, wanted {wanted}"
                )
        raise RowsMismatch(
            f"these rows do not fit {self._path}: {'; '.join(found)}. Nothing was written; "
            "give exactly the columns of its schema."
        ) from None


def _entries(level: Any) -> Mapping[str, Any]:
    # A plain TensorDict's own dictionary: making another one costs as much as ten lookups.
    return level._tensordict if type(level) is TensorDict else dict(level.items())


def _levels_of(schema: Schema) -> list[_Level]:
    """The levels of nested keys, parents first."""
    keys = schema.keys
    groups = sorted({key[:depth] for key in keys for depth in range(len(key))}, key=len)
    levels = []
    for group in groups:
        leaves = tuple(
            (column.key[-1], i)
            for i, column in enumerate(schema.columns)
            if column.key[:-1] == group
        )
        below = sum(other[:-1] == group for other in groups if other)
        parent = groups.index(group[:-1]) if group else 0
        levels.append(_Level(parent, group[-1] if group else "", leaves, len(leaves) + below))
    return levels


def _extra(
    entries: Mapping[str, Any], level: _Level, without: Key | None, levels: list[Mapping[str, Any]]
) -> bool:
    """Whether ``without``, at the root, is all that the level has too much."""
    return (
        without is not None
        and not levels
        and len(without) == 1
        and without[0] in entries
        and len(entries) == level.entries + 1
    )
