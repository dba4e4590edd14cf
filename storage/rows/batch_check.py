"""Validation of callers' batches against a schema, column by column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from tallyroll.storage.compat import entries_of, tensor_guards
from tallyroll.storage.errors import RowsMismatch
from tallyroll.storage.rows.batch_dims import levels_of
from tallyroll.storage.rows.keys import TRAJ_IDS, Key, format_key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.rows.tensordict_builder import require_dense, require_rows

_IS_NESTED = attrgetter("is_nested")


TensorGuards = tensor_guards()


class TensorGuard:
    """Guard that recognises tensors with the same layout as those of an earlier batch."""

    def __init__(self) -> None:
        self._same: Callable[..., bool] | None = None

    def remember(self, leaves: Sequence[torch.Tensor], arrays: Sequence[np.ndarray]) -> None:
        """Record tensors, and the arrays that share their memory."""
        self._same = None
        # Tensor subclasses may behave arbitrarily when NumPy makes an array of them.
        plain = all(type(leaf) is torch.Tensor for leaf in leaves)
        if TensorGuards is not None and plain and all(a.flags.c_contiguous for a in arrays):
            guards = TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._same = guards.check

    def addresses(self, leaves: Sequence[torch.Tensor]) -> list[int] | None:
        """Return the addresses of the values of ``leaves`` if they match the recorded tensors.

        Return None otherwise. Tensors match if they have the same class, dtype, device, shape,
        strides and gradients, and agree in everything else that determines the meaning of the
        memory.
        """
        if self._same is None:
            return None
        try:
            # Torch crashes the process if it is asked for the strides of a nested tensor.
            if any(map(_IS_NESTED, leaves)) or not self._same(*leaves):
                return None
        except AttributeError:  # not all leaves are tensors
            return None
        found = list(map(torch.Tensor.data_ptr, leaves))
        return found if all(found) else None  # address 0: the tensor has no memory


_LOOKS = attrgetter("dtype", "shape", "requires_grad")
"""Getter of the properties of a tensor that must fit its column."""


class _BatchLevel(NamedTuple):
    """One level of a nested TensorDict: the index of its parent, its name there, and its leaves."""

    parent: int
    name: str
    leaves: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    entries: int


class BatchCheck:
    """Validator of batches for a storage of ``schema`` at ``path``."""

    def __init__(self, schema: Schema, path: Path) -> None:
        self._schema, self._path = schema, path
        self._keys = list(schema.keys)
        self._one_id = any(c.key == TRAJ_IDS and math.prod(c.shape) == 1 for c in schema.columns)
        self._numpy_dtypes = [column.numpy_dtype for column in schema.columns]
        self._bits = [i for i, c in enumerate(schema.columns) if c.dtype is torch.bfloat16]
        self._levels, self._places = _levels_of(schema.keys)
        self.count = -1
        """The number of rows of the batch that was checked last."""
        self._shapes: list[tuple[int, ...]] = []
        self._looks: list[tuple[torch.dtype, tuple[int, ...], bool]] = []
        self.seen = TensorGuard()
        """The guard that recognises batches like the last one that was converted to arrays."""

    def arrays(self, rows: Mapping[Key, np.ndarray]) -> list[np.ndarray]:
        """Return the arrays of a batch in the order of the columns, each [count, ...].

        Raises:
            RowsMismatch: the columns, dtypes or shapes differ from the schema.
        """
        try:
            # Most batches are in the order of the columns, so that no key has to be looked up.
            in_order = list(rows) == self._keys
            found = list(rows.values() if in_order else map(rows.__getitem__, self._keys))
            if len(found[0]) != self.count:
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
        """Return the unchecked tensors of a TensorDict [count, ...], in the order of the columns.

        The TensorDict may also have an entry ``without``, which is ignored. The result is None if
        the TensorDict has any other entry or lacks a column.
        """
        # Most of the time of a small append is spent here and in `tensors`. Keep this fast.
        found: list[Any] = []
        levels: list[Mapping[str, Any]] = []
        try:
            if rows.batch_size[0] != self.count:
                self._prepare(rows.batch_size[0])
            for parent, name, leaves, wanted in self._levels:
                level = levels[parent][name] if levels else rows
                plain = type(level) is TensorDict
                if not plain and isinstance(level, LazyStackedTensorDict):
                    return None  # its items omit keys that only some of its rows have
                entries = entries_of(level) if plain else dict(level.items())
                if len(entries) != wanted and not _extra(entries, wanted, without, levels):
                    return None
                levels.append(entries)
                found += leaves(entries)
        except (KeyError, IndexError, AttributeError, RuntimeError, TypeError):
            return None
        return [found[place] for place in self._places] if self._places else found

    def tensors(self, leaves: list[torch.Tensor]) -> list[np.ndarray] | None:
        """Return arrays [count, ...] that share the memory of ``leaves``; bfloat16 gives uint16.

        All leaves must be dense CPU tensors of the columns' dtypes and shapes, without gradients.
        Otherwise the result is None, and the caller converts the leaves or reports the fault.
        """
        try:
            if list(map(_LOOKS, leaves)) != self._looks:
                return None
            values = leaves.copy()
            for index in self._bits:
                values[index] = values[index].view(torch.uint16)
            arrays = list(map(torch.Tensor.numpy, values))
            if self.count and not all(map(torch.Tensor.data_ptr, leaves)):
                return None
        except (AttributeError, RuntimeError, TypeError):
            return None
        self.seen.remember(leaves, arrays)
        return arrays

    def _prepare(self, count: int) -> None:
        """Prepare to check batches of ``count`` rows."""
        self.count = -1  # if interrupted, the next call prepares again
        columns = self._schema.columns
        self._shapes = [(count, *column.shape) for column in columns]
        self._looks = [
            (c.dtype, shape, False) for c, shape in zip(columns, self._shapes, strict=True)
        ]
        self.seen = TensorGuard()
        self.count = count

    def _refuse(self, rows: Mapping[Key, Any]) -> NoReturn:
        found = [f"{key!r} is not a column here" for key in rows if key not in self._keys]
        count = next((len(a) for a in rows.values() if isinstance(a, np.ndarray) and a.ndim), 0)
        for column in self._schema.columns:
            got = rows.get(column.key)
            wanted = f"an array of {column.numpy_dtype}, shape {[count, *column.shape]}"
            if got is None:
                found.append(f"{format_key(column.key)} is missing")
            elif not isinstance(got, np.ndarray):
                found.append(f"{format_key(column.key)} is {type(got).__name__}, expected {wanted}")
            elif got.dtype != column.numpy_dtype or got.shape != (count, *column.shape):
                found.append(
                    f"{format_key(column.key)} has {got.dtype}, shape {list(got.shape)}, expected "
                    f"{wanted}"
                )
        if _has_several_ids(rows) and self._one_id:
            found = [_NOT_FLAT]
        raise RowsMismatch(
            f"these rows do not fit {self._path}: {'; '.join(found)}. Nothing was written. Give "
            "exactly the columns of its schema."
        ) from None


def fitting_tensors(
    columns: Mapping[Key, torch.Tensor], schema: Schema, path: Path
) -> list[torch.Tensor]:
    """Return the columns [n, ...], on any device, in the order of the schema.

    Raises:
        RowsMismatch: the columns, dtypes or shapes differ from the schema.
    """
    wrong = [f"{format_key(key)} is not a column here" for key in columns.keys() - {*schema.keys}]
    values = []
    for column in schema.columns:
        leaf = columns.get(column.key)
        if leaf is None or leaf.dtype is not column.dtype or leaf.shape[1:] != column.shape:
            got = "missing" if leaf is None else f"{leaf.dtype} {list(leaf.shape[1:])}"
            wanted = f"{column.dtype} {list(column.shape)}"
            wrong.append(f"{format_key(column.key)} is {got}, expected {wanted}")
            continue
        require_dense(column.key, leaf)
        values.append(leaf.detach().resolve_conj().resolve_neg())
    if wrong:
        raise RowsMismatch(
            f"these rows do not fit {path}: {'; '.join(wrong)}. Nothing was written. Give "
            "exactly the columns of its schema."
        )
    require_rows(columns, len(values[0]))
    return values


_NOT_FLAT = (
    "each has several trajectory ids, as in a batch [lanes, time]. Give batch.reshape(-1) or, for "
    'a padded batch, batch[batch["collector", "mask"]]'
)


def require_flat(rows: Mapping[Key, Any]) -> None:
    """Raise `RowsMismatch` if a row consists of several transitions of a collector."""
    if _has_several_ids(rows):
        raise RowsMismatch(f"each row must be one transition, but {_NOT_FLAT}.")


def _has_several_ids(rows: Mapping[Key, Any]) -> bool:
    # A single id may have a dimension of its own, [n, 1].
    shape: tuple[int, ...] = getattr(rows.get(TRAJ_IDS), "shape", ())
    return math.prod(shape[1:]) > 1


def _levels_of(keys: Sequence[Key]) -> tuple[list[_BatchLevel], list[int]]:
    """Return the levels of nested keys, parents first, and each key's index among the leaves.

    The indices are empty if the leaves come in the order of the keys.
    """
    groups = levels_of(keys)
    levels: list[_BatchLevel] = []
    order: list[Key] = []
    for group in groups:
        inside = [key for key in keys if key[:-1] == group]
        below = sum(other[:-1] == group for other in groups if other)
        parent, name = (groups.index(group[:-1]), group[-1]) if group else (0, "")
        leaves = _getter([key[-1] for key in inside])
        levels.append(_BatchLevel(parent, name, leaves, len(inside) + below))
        order += inside
    return levels, [] if order == list(keys) else [order.index(key) for key in keys]


def _getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:  # with one name, `itemgetter` returns the value itself
        return itemgetter(*names)
    return lambda entries: tuple(entries[name] for name in names)


def _extra(
    entries: Mapping[str, Any], wanted: int, without: Key | None, levels: list[Mapping[str, Any]]
) -> bool:
    """Return True if the level is the root and ``without`` is its only extra entry."""
    return (
        without is not None
        and not levels
        and len(without) == 1
        and without[0] in entries
        and len(entries) == wanted + 1
    )
