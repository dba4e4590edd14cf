"""Comparison of metadata for other libraries with the expected content. Pure, except for reads."""

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
    """Yield faults in JSON files for other libraries, one sentence per file.

    Entries that other programs added to the files are ignored.

    Args:
        inside: the storage's files.
        documents: a function that returns the expected content of each file, for a number of rows.
        head: a function that returns the current number of committed rows.
    """
    # Each call of `documents` makes the content of all files. The cache saves most calls, because
    # most files show the same number of rows.
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
    """Raise if a file shows more rows than are committed.

    Raises:
        CorruptStorage: ``rows`` is above ``head``.
    """
    if rows > head:
        raise CorruptStorage(
            f"{file} shows {rows:,} rows to other libraries, but only {head:,} are committed."
        )


def differs(file: str | os.PathLike[str], what: str) -> CorruptStorage:
    """Return the error for a file for other libraries whose content has changed."""
    return CorruptStorage(
        f"{file} no longer has the metadata that was written for other libraries: {what}."
    )


def _read(inside: Inside, file: Path) -> Any:
    try:
        return inside.read_json(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptStorage(f"{file} cannot be read by other libraries ({error}).") from error


def _rows_shown(found: Any, blank: Mapping[str, Any], file: Path) -> int:
    """Return the number of rows that a file shows, in its own shape or in a group's arrays.

    The arrays of a group were written together, so that the first one is representative.
    """
    if "shape" in blank:
        return _rows_in(found, file)
    metadata = blank["consolidated_metadata"]["metadata"]
    name = next(name for name, node in metadata.items() if node["node_type"] == "array")
    try:
        node = found["consolidated_metadata"]["metadata"][name]
    except (KeyError, TypeError) as error:
        raise differs(file, f"its entry for {name} is missing") from error
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
    """Return array metadata without the byte order, which is optional for dtypes of one byte."""
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    single = node.get("data_type") in ("bool", "int8", "uint8")
    if single and json.dumps(node.get("codecs"), sort_keys=True) == json.dumps(
        codecs, sort_keys=True
    ):
        return node | {"codecs": [{"name": "bytes"}]}
    return node


def _difference(wanted: Any, found: Any, where: str) -> str | None:
    """Return a phrase that describes a difference of ``found`` from ``wanted``, or None.

    Additional entries in ``found`` are ignored.
    """
    if not isinstance(wanted, dict):
        same = json.dumps(wanted) == json.dumps(found)
        return None if same else f"{where} is {found!r:.100}, expected {wanted!r:.100}"
    if not isinstance(found, dict):
        return f"{where or 'it'} is not a JSON object"
    wanted, found = _without_order(wanted), _without_order(found)
    for name, value in wanted.items():
        inner = f"{where}/{name}" if where else name
        if name not in found:
            return f"{inner} is missing"
        if difference := _difference(value, found[name], inner):
            return difference
    return None
