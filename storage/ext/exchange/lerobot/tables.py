"""Arrow tables of LeRobot: rows, episodes and tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage.ext.exchange.lerobot.features import (
    OWN,
    LeRobotFeature,
    to_numbers,
)
from tallyroll.storage.ext.exchange.lerobot.statistics import NAMES
from tallyroll.storage.ext.exchange.parquet import parquet_module
from tallyroll.storage.formats.optional_libraries import needed

IMAGE_PARTS = ("bytes", "path")


def arrow_module() -> Any:
    """Return pyarrow."""
    return needed("pyarrow", "lerobot", "LeRobot needs")


def writer(place: Path, kinds: Any) -> Any:
    """Return a writer for a Parquet file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    # Dictionary encoding compares values as numbers. It would replace -0.0 by 0.0 and a NaN by a
    # NaN with other bits.
    return parquet_module().ParquetWriter(
        place, kinds, compression="zstd", use_dictionary=False, write_statistics=False
    )


def data_kinds(features: Sequence[LeRobotFeature]) -> Any:
    """Return the schema of the table of rows."""
    arrow, fields = arrow_module(), []
    for feature in features:
        if feature.kind == "numbers":
            fields.append((feature.name, _kind(feature)))
        elif feature.kind == "image":
            parts = [(IMAGE_PARTS[0], arrow.binary()), (IMAGE_PARTS[1], arrow.string())]
            fields.append((feature.name, arrow.struct(parts)))
    fields += [(name, arrow.from_numpy_dtype(np.dtype(kind))) for name, kind in OWN.items()]
    return arrow.schema(fields)


def _kind(feature: LeRobotFeature) -> Any:
    arrow, column = arrow_module(), feature.number_column
    kind = arrow.from_numpy_dtype(column.numpy_dtype)
    if column.shape == (1,):
        return kind
    if len(column.shape) == 1:
        return arrow.list_(kind, column.shape[0])
    for _ in column.shape:
        kind = arrow.list_(kind)
    return kind


def numbers_array(values: np.ndarray, feature: LeRobotFeature) -> Any:
    """Convert a column's values to an Arrow array."""
    arrow, shape = arrow_module(), feature.number_column.shape
    flat = arrow.array(to_numbers(values, feature).reshape(-1))
    if shape == (1,):
        return flat
    if len(shape) == 1:
        return arrow.FixedSizeListArray.from_arrays(flat, shape[0])
    return lists(flat, shape)


def lists(flat: Any, shape: Sequence[int]) -> Any:
    """Convert numbers to nested lists, one level per dimension of the shape."""
    arrow = arrow_module()
    for size in reversed(shape):
        offsets = np.arange(0, len(flat) + 1, size, dtype=np.int32)
        flat = arrow.ListArray.from_arrays(offsets, flat)
    return flat


def images_array(pngs: Sequence[bytes]) -> Any:
    """Convert PNGs to an Arrow array of images."""
    arrow = arrow_module()
    parts = [arrow.array(pngs, arrow.binary()), arrow.nulls(len(pngs), arrow.string())]
    return arrow.StructArray.from_arrays(parts, names=IMAGE_PARTS)


def episodes_batch(
    numbers: Mapping[str, Sequence[int] | Sequence[float]],
    tasks: Sequence[str],
    statistics: Mapping[str, tuple[np.ndarray, Sequence[int], tuple[int, ...]]],
) -> Any:
    """Return a record batch for the table of episodes, one row per episode.

    Args:
        numbers: the columns with one number per episode.
        tasks: the tasks of each episode.
        statistics: for each feature, the statistics [episodes, `NAMES`, numbers], the number of
            rows that they cover, and the shape of a value.
    """
    arrow = arrow_module()
    found = {name: arrow.array(values) for name, values in numbers.items()}
    found["tasks"] = arrow.array([[*tasks]] * len(found["length"]), arrow.list_(arrow.string()))
    for name, (values, counts, shape) in statistics.items():
        for number, each in enumerate(NAMES):
            flat = arrow.array(np.ascontiguousarray(values[:, number]).reshape(-1))
            found[f"stats/{name}/{each}"] = lists(flat, shape)
        found[f"stats/{name}/count"] = lists(arrow.array(counts, arrow.int64()), (1,))
    return arrow.RecordBatch.from_arrays([*found.values()], names=[*found])


def write_tasks(place: Path, tasks: Sequence[str]) -> None:
    """Write the table of tasks. pandas uses the task texts as its index, as LeRobot expects."""
    arrow = arrow_module()
    column = {"field_name": "task", "metadata": None, "name": "task"}
    column |= {"numpy_type": "object", "pandas_type": "unicode"}
    number = {"field_name": "task_index", "metadata": None, "name": "task_index"}
    number |= {"numpy_type": "int64", "pandas_type": "int64"}
    said = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [number, column],
        "pandas_version": "2.2.0",
    }
    table = arrow.table({"task_index": np.arange(len(tasks)), "task": arrow.array(tasks, "string")})
    table = table.replace_schema_metadata({"pandas": json.dumps(said)})
    with writer(place, table.schema) as file:
        file.write_table(table)


def width(shape: Sequence[int]) -> int:
    """Return the number of elements in a value."""
    return math.prod(shape)
