"""Zarr v3 metadata of columns, which is the content of every ``zarr.json``. Pure.

Source: the Zarr core specification, version 3: https://zarr-specs.readthedocs.io
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import torch

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.schema import Column, Schema

Document = dict[str, Any]

CHUNK_NAME = r"c\.(\d+)(?:\.0)*"
"""Regular expression for the file names of `chunk_name`; its group is the chunk number."""

_OURS = "tallyroll"
_LONGEST_NAME = 255
_ALIGNMENTS = (65536, 16384, 4096)
_ROWS_FIRST = 65536
_KIB, _MIB = 2**10, 2**20


def require_names(schema: Schema) -> None:
    """Raise for names that Zarr, or a library that reads it, does not support.

    Raises:
        InvalidSchema: a part of a key is not a valid name.
    """
    for column in schema.columns:
        if column.key[0] == _OURS:
            raise InvalidSchema(
                f"column {format_key(column.key)} would be stored at {_OURS}, which is the path of "
                "the header. Rename it."
            )
        for part in column.key:
            _require_name(column, part)


def _require_name(column: Column, part: str) -> None:
    reserved = part == "zarr.json" or part.startswith("__") or set(part) == {"."}
    if reserved or "\\" in part or part.endswith((".__lock", ".partial", ".tmp")):
        raise InvalidSchema(
            f"{part!r} in column {format_key(column.key)} cannot be a name in Zarr: it is "
            "reserved, or some library cannot open it. Rename it."
        )
    if len(part.encode()) > _LONGEST_NAME:
        raise InvalidSchema(
            f"{part!r} in column {format_key(column.key)} is too long for a file name. Give a "
            "shorter name."
        )


def chunk_rows_of(column: Column, capacity: int) -> int:
    """Return the number of rows of a chunk.

    A chunk is a whole number of pages, of 64 KiB if possible, so that chunks can be mapped
    contiguously. If ``capacity`` is known, a chunk has about a 64th of the column, between 256 KiB
    and 64 MiB. Otherwise it has about 1024 rows, but its size is between 1 and 16 MiB. Rows of an
    odd size may need larger chunks. Packed rows have smaller chunks: see `packed_chunk_rows`
    (`storage/ext/packed/layout.py`).
    """
    nbytes = column.row_nbytes
    if capacity:
        wanted = min(max(capacity * nbytes // 64, 256 * _KIB), 64 * _MIB)
    else:
        wanted = min(max(_ROWS_FIRST * nbytes // 64, _MIB), 16 * _MIB)
    for alignment in _ALIGNMENTS:
        step = alignment // math.gcd(alignment, nbytes)
        if step * nbytes <= 2 * wanted:
            break
    return max(1, round(wanted / (step * nbytes))) * step


def chunk_name(column: Column, number: int) -> str:
    """Return the file name of a column's chunk."""
    return ".".join(["c", str(number), *("0" for _ in column.shape)])


def documents(
    schema: Schema,
    chunk_rows: Sequence[int],
    rows: int,
    attributes: Mapping[PurePosixPath, Mapping[str, Any]],
) -> dict[PurePosixPath, Document]:
    """Return the ``zarr.json`` of every directory, in write order, the root last.

    Every group contains the metadata of everything below it, so that a group that is opened by its
    single file is consistent.

    Args:
        schema: the schema of the storage.
        chunk_rows: the number of rows of a chunk, for each column.
        rows: the number of visible rows.
        attributes: the attributes of arrays and groups, by directory.
    """
    row_name = _row_name(schema)
    arrays = {
        PurePosixPath(*column.key): _array(column, rows, chunk, row_name)
        for column, chunk in zip(schema.columns, chunk_rows, strict=True)
    }
    places = {parent for place in arrays for parent in place.parents}
    nodes: dict[PurePosixPath, Document] = {place: _group() for place in places} | arrays
    for place, node in nodes.items():
        node["attributes"] = dict(attributes.get(place, {}))
    # zarr-python requires siblings to be adjacent.
    order = sorted(nodes, key=lambda place: (len(place.parts), place.parts))
    below: dict[PurePosixPath, dict[str, Document]] = {group: {} for group in places}
    for place in order:
        for depth, group in enumerate(reversed(place.parents)):
            below[group]["/".join(place.parts[depth:])] = nodes[place]
    found = {place: nodes[place] for place in arrays}
    for group in reversed([place for place in order if place in places]):
        found[group] = nodes[group] | _consolidated(below[group])
    return found


def header_document(nbytes: int) -> Document:
    """Return the ``zarr.json`` that makes the header's file the one chunk of an array of bytes."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [nbytes],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [nbytes]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": ["tallyroll_byte"],
        "attributes": {"description": "the commit record of Tallyroll: leave it as it is"},
    }


def _row_name(schema: Schema) -> str:
    # xarray treats an array with the name of its dimension as an index.
    taken = {part for column in schema.columns for part in column.key}
    name = "row"
    while name in taken:
        name += "_"
    return name


def _array(column: Column, rows: int, chunk_rows: int, row_name: str) -> Document:
    # xarray requires that dimensions with the same name have the same size, and aligns them.
    inner = [f"axis{axis}_{size}" for axis, size in enumerate(column.shape, 1)]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, *column.shape],
        "data_type": column.dtype_name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [chunk_rows, *column.shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _zero(column.dtype),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": [row_name, *inner],
    }


def _zero(dtype: torch.dtype) -> Any:
    if dtype.is_complex:
        return [0.0, 0.0]
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _group() -> Document:
    return {"zarr_format": 3, "node_type": "group"}


def _consolidated(below: dict[str, Document]) -> Document:
    return {
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": below}
    }
