"""Conversion of callers' rows: derive a new schema, or check rows against a schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage import fast_paths
from tallyroll.storage.engine.columns import ArrayRows, TensorRows
from tallyroll.storage.errors import ColumnsMissing, InvalidSchema, RowsMismatch
from tallyroll.storage.files.run_record import RunRecord, is_count
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.batch_check import BatchCheck, require_flat
from tallyroll.storage.rows.batch_dims import batch_dims_of
from tallyroll.storage.rows.keys import TRAJ_IDS, Key, format_key
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.rows.tensordict_builder import array_of, leaves, require_rows
from tallyroll.storage.trajectories.id_checks import IdChecks, renumbered


def is_tensordict(rows: Any) -> bool:
    """Return True if the rows are a TensorDict of any class."""
    kind = type(rows)
    return kind is TensorDict or (kind is not dict and isinstance(rows, TensorDictBase))


def schema_of(rows: Any, without: Key | None = None, *, items: bool = False) -> Schema:
    """Return the schema of a storage that starts with these rows.

    Args:
        rows: a TensorDict, or arrays by key.
        without: a column to leave out if the rows have it.
        items: True if each row may consist of several transitions.

    Raises:
        InvalidSchema: a storage cannot hold the columns.
        RowsMismatch: ``rows`` is neither a TensorDict nor a mapping, or its columns differ in
            length.
    """
    if not is_tensordict(rows):
        _require_mapping(rows)
        schema = Schema.of(rows)
        require_rows(rows, len(next(iter(rows.values()))))
        require_flat(rows)
        return schema
    found = _leaves_of(rows, without)
    if not items:
        require_flat(found)
    return Schema.of_leaves(found, batch_dims_of(rows))


class InputRows:
    """Converter of TensorDicts and mappings of arrays to `NewRows`, for one storage."""

    def __init__(self, reader: FileReader, schema: Schema) -> None:
        self._path, self._schema = reader.path, schema
        self._check = BatchCheck(schema, reader.format.path)
        self._by_address = fast_paths.is_on("address")

    def checked(self, rows: Any, without: Key | None = None) -> ArrayRows | TensorRows:
        """Return the rows in a writable form, after checking that they fit the storage.

        Args:
            rows: a TensorDict, or arrays by key.
            without: a column to leave out.

        Raises:
            RowsMismatch: the rows do not fit.
        """
        check, kind = self._check, type(rows)
        if kind is not TensorDict and (kind is dict or not isinstance(rows, TensorDictBase)):
            _require_mapping(rows)
            return ArrayRows(check.arrays(rows))
        tensors = check.leaves(rows, without)
        if tensors is not None:
            addresses = check.seen.addresses(tensors) if self._by_address else None
            if addresses is not None:
                return TensorRows(tensors, addresses, check.count, check)
            arrays = check.tensors(tensors)
            if arrays is not None:
                return ArrayRows(arrays)
        return ArrayRows(check.arrays(self._converted(rows, without)))

    def _converted(self, rows: TensorDictBase, without: Key | None) -> dict[Key, np.ndarray]:
        try:
            found = _leaves_of(rows, without)
            arrays = {key: array_of(key, leaf) for key, leaf in found.items()}
        except InvalidSchema as error:
            raise RowsMismatch(f"these rows do not fit {self._path}: {error}") from error
        # As arrays, bfloat16 and uint16 are the same. Compare the dtypes of the tensors.
        for column in self._sixteen_bits:
            if column.key in found and (got := found[column.key].dtype) != column.dtype:
                raise RowsMismatch(
                    f"these rows do not fit {self._path}: {format_key(column.key)} has {got}, "
                    f"expected {column.dtype}. Nothing was written."
                )
        return arrays

    @cached_property
    def _sixteen_bits(self) -> list[Column]:
        return [column for column in self._schema.columns if column.numpy_dtype == np.uint16]


def _require_mapping(rows: Any) -> None:
    if not isinstance(rows, Mapping):
        raise RowsMismatch(
            f"rows: expected a TensorDict or arrays by key, got {type(rows).__name__}."
        )


def _leaves_of(rows: TensorDictBase, without: Key | None) -> dict[Key, torch.Tensor]:
    if not rows.batch_dims:
        raise RowsMismatch("rows: expected a batch size [N], got []. Use unsqueeze(0) for one row.")
    found = leaves(rows)
    if without is not None:
        found.pop(without, None)
    require_rows(found, rows.batch_size[0])
    return found


def with_new_ids(rows: Any, reader: FileReader, checks: IdChecks | None) -> Any:
    """Return the rows with ids above all stored ids and all ids that a collector reserved.

    Raises:
        ColumnsMissing: the rows or the storage have no ids.
    """
    tensors = is_tensordict(rows)
    found = rows.get(TRAJ_IDS, None) if tensors or isinstance(rows, Mapping) else None
    if found is None or not _whole(found) or (reader.engine is not None and checks is None):
        raise ColumnsMissing(
            f'ids="renumber" changes whole numbers in the column {format_key(TRAJ_IDS)}, but these '
            f"rows or {reader.path} do not have that column. Leave ids out."
        )
    record = RunRecord.parse(reader.record)
    base = max(0, record.next_id) if record is not None and is_count(record.next_id) else 0
    if checks is not None:
        base = max(base, checks.largest() + 1)
    ids = renumbered(found.numpy(force=True) if tensors else np.asarray(found), base)
    if not tensors:
        return {**rows, TRAJ_IDS: ids}
    return rows.copy().set(TRAJ_IDS, torch.from_numpy(ids))


def _whole(numbers: Any) -> bool:
    if isinstance(numbers, torch.Tensor):
        return not (numbers.is_floating_point() or numbers.is_complex())
    return np.asarray(numbers).dtype.kind in "iu"
