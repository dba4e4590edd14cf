"""Batches that are handed over, checked against a schema column by column. Copies nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase

from .errors import RowsMismatch
from .rows import Key, spell
from .schema import Schema

__all__ = ["Intake"]


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of a nested TensorDict: which level holds it, and the columns in it."""

    parent: int
    name: str
    leaves: tuple[tuple[str, int, torch.dtype], ...]
    entries: int


class Intake:
    """Checks batches for a storage of ``schema`` at ``path``."""

    def __init__(self, schema: Schema, path: Path) -> None:
        self._schema, self._path = schema, path
        self._keys = schema.keys
        self._numpy_dtypes = [column.numpy_dtype for column in schema.columns]
        self._levels = _levels_of(schema)
        self._count = -1
        self._shapes: list[tuple[int, ...]] = []

    def arrays(self, rows: Mapping[Key, np.ndarray]) -> list[np.ndarray]:
        """The arrays of a batch in the order of the columns, each [count, ...].

        Raises:
            RowsMismatch: not exactly the schema's columns, or another dtype or shape.
        """
        try:
            found: list[np.ndarray] = [rows[key] for key in self._keys]
            shapes = self._shapes_of(len(found[0]))
            if [array.dtype for array in found] != self._numpy_dtypes:
                self._refuse(rows)
            if [array.shape for array in found] != shapes:
                self._refuse(rows)
        except (KeyError, TypeError, AttributeError):
            self._refuse(rows)
        if len(rows) != len(found):
            self._refuse(rows)
        return found

    def tensors(self, rows: TensorDictBase, without: Key | None) -> list[np.ndarray] | None:
        """The leaves of a batch as arrays in the order of the columns, if that is simple.

        It is if all leaves are dense tensors in the memory of the CPU, of the columns'
        dtypes and shapes. None where one is not: whoever takes the longer way converts
        it, or finds out what is wrong.

        Args:
            rows: a TensorDict [count, ...].
            without: a column that may be there and is left out.
        """
        found = [_NOTHING] * len(self._keys)
        levels: list[dict[str, Any]] = []
        try:
            shapes = self._shapes_of(rows.batch_size[0])
            for level in self._levels:
                entries = dict((levels[level.parent][level.name] if levels else rows).items())
                if len(entries) != level.entries and not _extra(entries, level, without, levels):
                    return None
                levels.append(entries)
                for name, column, dtype in level.leaves:
                    leaf = entries[name]
                    # Most of the time of a small append is spent here: no check too many.
                    if leaf.dtype is not dtype:
                        return None
                    array = leaf.numpy()
                    if array.shape != shapes[column]:
                        return None
                    found[column] = array
        except (KeyError, IndexError, AttributeError, RuntimeError, TypeError):
            return None
        return found

    def _shapes_of(self, count: int) -> list[tuple[int, ...]]:
        if count != self._count:
            self._shapes = [(count, *column.shape) for column in self._schema.columns]
            self._count = count
        return self._shapes

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


_NOTHING = np.empty(0)


def _levels_of(schema: Schema) -> list[_Level]:
    """The levels of nested keys, parents first."""
    keys = schema.keys
    groups = sorted({key[:depth] for key in keys for depth in range(len(key))}, key=len)
    levels = []
    for group in groups:
        leaves = tuple(
            (column.key[-1], i, column.dtype)
            for i, column in enumerate(schema.columns)
            if column.key[:-1] == group
        )
        below = sum(other[:-1] == group for other in groups if other)
        parent = groups.index(group[:-1]) if group else 0
        levels.append(_Level(parent, group[-1] if group else "", leaves, len(leaves) + below))
    return levels


def _extra(
    entries: dict[str, Any], level: _Level, without: Key | None, levels: list[dict[str, Any]]
) -> bool:
    """Whether ``without``, at the root, is all that the level has too much."""
    return (
        without is not None
        and not levels
        and len(without) == 1
        and without[0] in entries
        and len(entries) == level.entries + 1
    )
