"""Is what other libraries read of a storage what was written for them?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .commit import HEADER_NBYTES
from .errors import CorruptStorage
from .format import Format
from .hdf5 import H5Format
from .hdf5_file import shown_attributes
from .layout import meta_of
from .memmap import MemmapFormat
from .schema import Schema
from .zarr_metadata import documents, header_document
from .zarr_store import ZarrFormat

__all__ = ["what_is_wrong"]


def what_is_wrong(format: Format, schema: Schema, head: Callable[[], int]) -> Iterator[str]:
    """What other libraries would read wrongly, one sentence a file.

    What was added to the metadata is nobody's business here.

    Args:
        format: the files, open.
        schema: the columns.
        head: tells how many rows are committed now.

    Raises:
        MissingLibrary: HDF5 cannot be read without h5py.
    """
    if isinstance(format, MemmapFormat):
        yield from _of_memmap(format.path, schema, head)
    elif isinstance(format, ZarrFormat):
        yield from _of_zarr(format, schema, head)
        yield from _of_header(format)
    elif isinstance(format, H5Format):
        yield from _of_hdf5(format, schema, head)


def _of_memmap(path: Path, schema: Schema, head: Callable[[], int]) -> Iterator[str]:
    for place in meta_of(schema.columns, 0):
        file = path / place / "meta.json"
        try:
            found = _read(file)
            rows = _rows_in(found, file)
            wanted = meta_of(schema.columns, rows)[place]
            _require(wanted, found, file)
            _require_committed(rows, head(), file)
        except CorruptStorage as error:
            yield str(error)


def _of_zarr(format: ZarrFormat, schema: Schema, head: Callable[[], int]) -> Iterator[str]:
    chunks = format._chunk_rows
    for place, blank in documents(schema, chunks, 0, {}).items():
        file = format.path / place / "zarr.json"
        try:
            found = _read(file)
            if blank["node_type"] == "array":
                rows = _rows_in(found, file)
            else:
                rows = _rows_below(found, blank, file)
            wanted = documents(schema, chunks, rows, {})[place]
            _require(wanted, found, file)
            _require_committed(rows, head(), file)
        except CorruptStorage as error:
            yield str(error)


def _of_header(format: ZarrFormat) -> Iterator[str]:
    file = format.header_path.parent / "zarr.json"
    try:
        _require(header_document(HEADER_NBYTES), _read(file), file)
    except CorruptStorage as error:
        yield str(error)


def _rows_below(found: Any, blank: Mapping[str, Any], file: Path) -> int:
    """The rows of the arrays of a group: they were written at one moment."""
    metadata = blank["consolidated_metadata"]["metadata"]
    name = next(name for name, node in metadata.items() if node["node_type"] == "array")
    try:
        node = found["consolidated_metadata"]["metadata"][name]
    except (KeyError, TypeError) as error:
        raise _differs(file, f"what it says of {name} is gone") from error
    return _rows_in(node, file)


def _of_hdf5(format: H5Format, schema: Schema, head: Callable[[], int]) -> Iterator[str]:
    path = format.path  # that its datasets are in their places was seen when it was opened
    try:
        with open(path, "rb") as file:
            attributes = shown_attributes(file.fileno(), path)
        rows = attributes.get("rows")
        if type(rows) is not int:
            raise _differs(path, f"its attribute rows is {rows!r:.100}")
        _require_committed(rows, head(), path)
        wanted = {"capacity": format._layout.capacity, "schema": json.dumps(schema.to_json())}
        for name, value in wanted.items():
            if name in attributes and attributes[name] != value:
                raise _differs(path, f"its attribute {name} is {attributes[name]!r:.100}")
    except CorruptStorage as error:
        yield str(error)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptStorage(f"{file} cannot be read by other libraries ({error}).") from error


def _rows_in(found: Any, file: Path) -> int:
    try:
        rows = found["shape"][0]
    except (KeyError, TypeError, IndexError) as error:
        raise _differs(file, "it has no shape") from error
    if type(rows) is not int or rows < 0:
        raise _differs(file, f"it has {rows!r:.100} rows")
    return rows


def _require_committed(rows: int, head: int, file: Path) -> None:
    if rows > head:
        raise CorruptStorage(
            f"{file} shows other libraries {rows:,} rows, and {head:,} are committed."
        )


def _require(wanted: Any, found: Any, file: Path) -> None:
    if difference := _difference(wanted, found, ""):
        raise _differs(file, difference)


def _difference(wanted: Any, found: Any, where: str) -> str | None:
    """Where ``found`` lacks something of ``wanted``; what it has beyond that is let be."""
    if not isinstance(wanted, dict):
        same = json.dumps(wanted) == json.dumps(found)
        return None if same else f"{where} is {found!r:.100}, wanted {wanted!r:.100}"
    if not isinstance(found, dict):
        return f"{where or 'it'} is no JSON object"
    for name, value in wanted.items():
        inner = f"{where}/{name}" if where else name
        if name not in found:
            return f"{inner} is gone"
        if difference := _difference(value, found[name], inner):
            return difference
    return None


def _differs(file: str | os.PathLike[str], what: str) -> CorruptStorage:
    return CorruptStorage(f"{file} is not as it was written for other libraries: {what}.")
