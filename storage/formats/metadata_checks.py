"""Compare metadata for other libraries with what should be there. Pure but for reading."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.files.safe_files import Inside


def wrong_documents(
    inside: Inside, documents: Callable[[int], Mapping[Path, Any]], head: Callable[[], int]
) -> Iterator[str]:
    """Faults that other libraries would read in JSON files, one sentence a file.

    What was added to them is nobody's business here.

    Args:
        inside: the storage's files.
        documents: what the files should hold for a number of rows.
        head: tells how many rows are committed now.
    """
    # All of them at a time are made, and most files show equally many rows.
    made = functools.lru_cache(maxsize=2)(documents)
    for file, blank in documents(0).items():
        try:
            found = _read(inside, file)
            rows = _rows_shown(found, blank, file)
            if difference := _difference(made(rows)[file], found, ""):
                raise differs(file, difference)
            require_committed(rows, head(), file)
        except CorruptStorage as error:
            yield str(error)


def require_committed(rows: int, head: int, file: Path) -> None:
    """Refuse a file that shows more rows than are committed.

    Raises:
        CorruptStorage: it does.
    """
    if rows > head:
        raise CorruptStorage(
            f"{file} shows other libraries {rows:,} rows, and {head:,} are committed."
        )


def differs(file: str | os.PathLike[str], what: str) -> CorruptStorage:
    """An error that says what of a file is not as it was written for other libraries."""
    return CorruptStorage(f"{file} is not as it was written for other libraries: {what}.")


def _read(inside: Inside, file: Path) -> Any:
    try:
        return inside.read_json(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptStorage(f"{file} cannot be read by other libraries ({error}).") from error


def _rows_shown(found: Any, blank: Mapping[str, Any], file: Path) -> int:
    """The rows that a file shows: its own shape's, or those of the arrays of a group.

    The arrays of a group were written at one moment.
    """
    if "shape" in blank:
        return _rows_in(found, file)
    metadata = blank["consolidated_metadata"]["metadata"]
    name = next(name for name, node in metadata.items() if node["node_type"] == "array")
    try:
        node = found["consolidated_metadata"]["metadata"][name]
    except (KeyError, TypeError) as error:
        raise differs(file, f"what it says of {name} is gone") from error
    return _rows_in(node, file)


def _rows_in(found: Any, file: Path) -> int:
    try:
        rows = found["shape"][0]
    except (KeyError, TypeError, IndexError) as error:
        raise differs(file, "it has no shape") from error
    if type(rows) is not int or rows < 0:
        raise differs(file, f"it has {rows!r:.100} rows")
    return rows


def _without_order(node: dict[str, Any]) -> dict[str, Any]:
    """The metadata of an array of single bytes without their order, which Zarr lets be left out."""
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    single = node.get("data_type") in ("bool", "int8", "uint8")
    if single and json.dumps(node.get("codecs"), sort_keys=True) == json.dumps(
        codecs, sort_keys=True
    ):
        return node | {"codecs": [{"name": "bytes"}]}
    return node


def _difference(wanted: Any, found: Any, where: str) -> str | None:
    """The place at which ``found`` lacks something of ``wanted``; more in it is allowed."""
    if not isinstance(wanted, dict):
        same = json.dumps(wanted) == json.dumps(found)
        return None if same else f"{where} is {found!r:.100}, expected {wanted!r:.100}"
    if not isinstance(found, dict):
        return f"{where or 'it'} is no JSON object"
    wanted, found = _without_order(wanted), _without_order(found)
    for name, value in wanted.items():
        inner = f"{where}/{name}" if where else name
        if name not in found:
            return f"{inner} is gone"
        if difference := _difference(value, found[name], inner):
            return difference
    return None
