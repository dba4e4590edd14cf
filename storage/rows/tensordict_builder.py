"""Conversion between TensorDicts and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor

from tallyroll.storage.compat import plain_tensordict
from tallyroll.storage.errors import InvalidSchema, RowsMismatch
from tallyroll.storage.rows.keys import Key, format_key


def leaves(rows: Any, prefix: Key = ()) -> dict[Key, torch.Tensor]:
    """Return the tensors of a nested TensorDict by key, depth first.

    Raises:
        InvalidSchema: a leaf is not a tensor.
    """
    found: dict[Key, torch.Tensor] = {}
    if isinstance(rows, LazyStackedTensorDict):
        _require_same_keys(rows)
    try:
        items = list(rows.items())
    except RuntimeError as error:  # a lazy stack of tensors that do not fit together
        raise InvalidSchema(f"these rows cannot be read as one batch: {error}") from error
    for name, value in items:
        # Tensors first: the test for a collection takes ten times as long.
        if isinstance(value, torch.Tensor):
            found[(*prefix, name)] = value
        elif isinstance(value, TensorDictBase) and not is_non_tensor(value):
            found |= leaves(value, (*prefix, name))
        else:
            raise InvalidSchema(
                f"column {format_key((*prefix, name))} is {type(value).__name__}, and a storage "
                "holds tensors only. Leave it out, or encode it as a tensor."
            )
    return found


def _require_same_keys(stack: LazyStackedTensorDict) -> None:
    keys = [set(each.keys()) for each in stack.tensordicts]
    if keys and (some := set.union(*keys) - set.intersection(*keys)):
        raise InvalidSchema(
            f"only some of the TensorDicts of a lazy stack have {', '.join(sorted(some))}, but "
            "every row needs all columns. Give each TensorDict the same keys."
        )


def array_of(key: Key, leaf: torch.Tensor) -> np.ndarray:
    """Return the leaf as an array, without a copy if it is on the CPU; bfloat16 gives uint16.

    Raises:
        InvalidSchema: the tensor is not dense, has no values, or has a dtype that NumPy lacks.
    """
    try:
        if leaf.dtype is torch.bfloat16:
            leaf = leaf.detach().view(torch.uint16)
        array: np.ndarray = leaf.numpy()
    except (RuntimeError, TypeError):
        # The tensor is on another device, tracked by autograd, lazily conjugated or not dense.
        require_dense(key, leaf)
        try:
            return leaf.numpy(force=True)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidSchema(
                f"column {format_key(key)} ({leaf.dtype}) cannot be converted to an array: "
                f"{error}. Convert it before writing."
            ) from error
    if array.size and not leaf.data_ptr():  # NumPy would return arbitrary values
        raise InvalidSchema(
            f"column {format_key(key)} is a tensor without memory: its storage was resized, or it "
            "wraps another tensor. Write a tensor that has values."
        )
    return array


def require_rows(
    columns: Mapping[Key, np.ndarray] | Mapping[Key, torch.Tensor], count: int
) -> None:
    """Raise if a column does not have ``count`` rows, which tensordict does not always check.

    Raises:
        RowsMismatch: a column has another number of rows.
    """
    for key, column in columns.items():
        # Not len(), which nested tensors lack.
        size = column.shape[0] if isinstance(column, np.ndarray) else column.size(0)
        if size != count:
            raise RowsMismatch(
                f"column {format_key(key)} does not have the {count} rows of the batch. Nothing "
                "was written."
            )


def require_dense(key: Key, leaf: torch.Tensor) -> None:
    """Raise for sparse and nested tensors, and those on the meta device.

    Raises:
        InvalidSchema: the tensor is one of these.
    """
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta:
        raise InvalidSchema(
            f"column {format_key(key)} is not a dense tensor with values. Convert it before "
            "writing."
        )


class _Level(NamedTuple):
    """A TensorDict to make: its batch size after the rows, and the positions of its entries.

    Entries are columns or levels that are made earlier. The levels are numbered after all columns.
    """

    behind: tuple[int, ...]
    names: list[str]
    places: list[int]


class TensorDictBuilder:
    """Factory of TensorDicts from arrays, which plans the levels of the TensorDicts once.

    Args:
        columns: the key and dtype of each column; the dtype distinguishes bfloat16 from its bits.
        batch_shapes: the batch size after the rows, of levels that have one; ``()`` is the root.
    """

    def __init__(
        self,
        columns: Sequence[tuple[Key, torch.dtype]],
        batch_shapes: Mapping[Key, tuple[int, ...]] | None = None,
    ) -> None:
        self._bits = [i for i, (_, dtype) in enumerate(columns) if dtype is torch.bfloat16]
        self._levels: list[_Level] = []
        """The levels, each after the levels within it; the last is the root."""
        tree: dict[str, Any] = {}
        for index, (key, _) in enumerate(columns):
            level = tree
            for name in key[:-1]:
                level = level.setdefault(name, {})
            level[key[-1]] = index
        self._add_level((), tree, len(columns), batch_shapes or {})

    def _add_level(
        self, key: Key, tree: dict[str, Any], columns: int, shapes: Mapping[Key, tuple[int, ...]]
    ) -> int:
        """Add the level at ``key`` after those within it; return its position."""
        level = _Level(shapes.get(key, ()), [], [])
        for name, it in tree.items():
            level.names.append(name)
            if type(it) is not int:
                it = self._add_level((*key, name), it, columns, shapes)
            level.places.append(it)
        self._levels.append(level)
        return columns + len(self._levels) - 1

    def __call__(self, arrays: Sequence[np.ndarray], batch: tuple[int, ...]) -> TensorDict:
        """Return a TensorDict whose tensors share the arrays' memory.

        ``batch`` is the batch size, without the dimensions after the rows.
        """
        return self._viewed(list(map(torch.from_numpy, arrays)), batch)

    def of_mixed(
        self, values: Sequence[np.ndarray | torch.Tensor], batch: tuple[int, ...]
    ) -> TensorDict:
        """Return a TensorDict of arrays, some of which may be tensors already."""
        tensors = [
            each if isinstance(each, torch.Tensor) else torch.from_numpy(each) for each in values
        ]
        return self._viewed(tensors, batch)

    def _viewed(self, tensors: list[torch.Tensor], batch: tuple[int, ...]) -> TensorDict:
        for index in self._bits:
            tensors[index] = tensors[index].view(torch.bfloat16)
        return self.of_tensors(tensors, batch)

    def of_tensors(
        self,
        tensors: Sequence[torch.Tensor],
        batch: tuple[int, ...],
        device: torch.device | None = None,
    ) -> TensorDict:
        """Return a TensorDict of tensors, as `__call__` does of arrays.

        ``device`` is the device that the TensorDict names, on which the tensors are.
        """
        values: list[Any] = list(tensors)
        rows = torch.Size(batch)
        for behind, names, places in self._levels:
            entries = dict(zip(names, map(values.__getitem__, places), strict=True))
            size = torch.Size((*rows, *behind)) if behind else rows
            values.append(plain_tensordict(entries, size, device))
        made: TensorDict = values[-1]
        return made
