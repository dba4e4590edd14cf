"""Metadata that lets zarr-python, TensorStore and xarray read packed rows. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from tallyroll.storage.ext.packed.layout import ArrayLayout, Layout
from tallyroll.storage.files.manifest import Manifest, attributes_of
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.schema import Schema

Document = dict[str, Any]

_ROOT = PurePosixPath()
_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_STATES = (
    "Row r begins in state r + (number of breaks <= r) - 1; what came next is the state after it. "
)
_FRAMES = (
    "State s is of the last start (state, frame, count, zeros) whose state <= s: its newest frame "
    "is frame + count - 1 + s - state, the n - 1 frames before that are the older ones, and in the "
    "place of those before `frame` is that one, or zeros where `zeros` is 1."
)


def documents(layout: Layout, manifest: Manifest) -> dict[PurePosixPath, Document]:
    """Return the ``zarr.json`` of each directory; a group includes all metadata below it."""
    arrays = {
        PurePosixPath(*each.path): _array(each, number in _by_row(layout))
        for number, each in enumerate(layout.arrays)
    }
    groups = {parent for place in arrays for parent in place.parents}
    attributes = dict(_attributes(layout, manifest))
    nodes = {place: {"zarr_format": 3, "node_type": "group"} for place in groups} | arrays
    for place, node in nodes.items():
        node["attributes"] = attributes.get(place, {})
    order = sorted(nodes, key=lambda place: (len(place.parts), place.parts))
    found = dict(nodes)
    for group in groups:
        below = {
            str(place.relative_to(group)): nodes[place]
            for place in order
            if place != group and place.is_relative_to(group)
        }
        inline = {"kind": "inline", "must_understand": False, "metadata": below}
        found[group] = nodes[group] | {"consolidated_metadata": inline}
    return found


def _by_row(layout: Layout) -> set[int]:
    """Return the indices of the arrays that have one entry per row."""
    return {layout.old_rows, *(each.array for each in layout.columns if each.array is not None)}


def _attributes(
    layout: Layout, manifest: Manifest
) -> Iterator[tuple[PurePosixPath, dict[str, Any]]]:
    yield _ROOT, {**attributes_of(manifest), "rows": layout.rows}
    schema = Schema.from_json(manifest["schema"])
    for column, place in zip(schema.columns, layout.columns, strict=True):
        if place.array is not None:
            told = {"dtype": column.dtype_name}
            yield PurePosixPath(*layout.arrays[place.array].path), told
    for number, states in enumerate(layout.states):
        keys = {
            each.is_next: format_key(column.key)
            for column, each in zip(schema.columns, layout.columns, strict=True)
            if each.states == number
        }
        text = (_STATES if states.breaks is not None else "Row r is state r. ") + (
            _FRAMES if states.starts is not None else "State s is frame s."
        )
        shown: dict[str, Any] = {
            "rows": text,
            "column": keys[False],
            "n": states.n,
            "axis": states.axis,
        }
        if True in keys:
            shown["next"] = keys[True]
        yield PurePosixPath(*layout.arrays[states.frames].path[:-1]), shown
    old = "the number of each row in the storage that was packed"
    yield PurePosixPath(*layout.arrays[layout.old_rows].path), {"description": old}


def _array(layout: ArrayLayout, by_row: bool) -> Document:
    # In xarray, dimensions of the same name must have the same size, and matching ones are
    # aligned. The array of row numbers becomes an index because it is named like its dimension.
    first = "row" if by_row else "_".join((*layout.path, "number"))
    sharding = {
        "chunk_shape": [layout.chunk_rows, *layout.shape],
        "codecs": layout.codec.as_zarr(layout.numpy_dtype.itemsize),
        "index_codecs": _INDEX_CODECS,
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [layout.rows, *layout.shape],
        "data_type": layout.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [layout.shard_rows, *layout.shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _zero(layout.numpy_dtype.kind),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": [first, *(f"axis{n}_{s}" for n, s in enumerate(layout.shape, 1))],
    }


def _zero(kind: str) -> Any:
    return {"b": False, "f": 0.0, "c": [0.0, 0.0]}.get(kind, 0)
