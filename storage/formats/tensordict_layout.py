"""Paths of columns as tensordict has them on disk, and the metadata that it reads. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Schema

__all__ = ["META_FIELDS", "encode", "meta_of", "place_of"]

META_FIELDS = frozenset({"shape", "device", "_type"})
"""Fields of ``meta.json`` that stand beside the names of columns."""

# Characters that tensordict writes as %XX in file names.
_ENCODED = {*map(chr, range(32)), *'/<>:"|?*\\ %', chr(127)}


def encode(name: str) -> str:
    """A name as tensordict spells it in file names."""
    return "".join(f"%{ord(char):02X}" if char in _ENCODED else char for char in name)


def place_of(key: Key, *, leaf: bool) -> Path:
    """The path of a column (``leaf``) or a group of columns, from the root."""
    *groups, name = map(encode, key)
    return Path(*groups, name + ".memmap" if leaf else name)


def meta_of(schema: Schema, rows: int) -> dict[Path, dict[str, Any]]:
    """The content of every directory's ``meta.json`` for ``rows`` rows."""
    levels: dict[Path, dict[str, Any]] = {}
    for column in schema.columns:
        for depth, name in enumerate(column.key):
            level = levels.setdefault(Path(*map(encode, column.key[:depth])), {})
            level[name] = {"type": "TensorDict"}
        level[column.key[-1]] = {
            "device": "cpu",
            "shape": [rows, *column.shape],
            "dtype": str(column.dtype),
            "is_nested": False,
        }
    behind = {Path(*map(encode, key)): shape for key, shape in schema.batch_shapes.items()}
    end = {"device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    return {
        directory: level | {"shape": [rows, *behind.get(directory, ())]} | end
        for directory, level in levels.items()
    }
