"""First page of an overlay file: its description, and words that the writer changes.

::

    byte 0      magic, version, size of the JSON in bytes, CRC-32 of the version and the JSON
    byte 24     JSON: id of the storage, ring, key, dtype, shape, fill
    byte 2048   words: entries that the file has room for, rewinds applied, 1 if dropped
    byte 4096   the entries
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.errors import DamagedOverlay, FormatVersionMismatch, InvalidSchema
from tallyroll.storage.rows.dtypes import exact_tensor
from tallyroll.storage.rows.keys import Key, as_key, format_key
from tallyroll.storage.rows.schema import Column, Schema

HEADER_NBYTES: Final = 4096
WORDS_AT: Final = 2048
ROOM, REWINDS, DROPPED = range(3)
"""Positions of the words."""
_WORDS: Final = struct.Struct("<qqq")
_MAGIC: Final = b"TALLYOVL"
_VERSION: Final = 1
_START: Final = struct.Struct("<8sqII")
_Fill = bool | int | float | complex


@dataclass(frozen=True, slots=True)
class OverlayColumn:
    """Column that an overlay stores for each row, and the fill of rows without a value."""

    column: Column
    fill: bytes
    """The bytes of one element of the column's dtype."""

    @property
    def key(self) -> Key:
        """The column's key."""
        return self.column.key

    @property
    def fill_array(self) -> np.ndarray:
        """The fill as an array [] of the column's ``numpy_dtype``."""
        return np.frombuffer(self.fill, self.column.numpy_dtype).reshape(())

    @property
    def fill_value(self) -> _Fill:
        """The fill as a Python number."""
        number: _Fill = as_tensor(self.fill_array.copy(), self.column).item()
        return number

    def differences(self, other: OverlayColumn) -> list[str]:
        """Return the differences of ``other`` from this column, one clause each."""
        mine, theirs = self._column_json(), other._column_json()
        return [
            f"{name} {theirs[name]}, expected {mine[name]}"
            for name in mine
            if mine[name] != theirs[name]
        ]

    def _column_json(self) -> dict[str, str]:
        column = self.column
        shape, fill = str(list(column.shape)), repr(self.fill_value)
        return {"dtype": column.dtype_name, "shape": shape, "fill": fill}


def checked_column(
    key: str | Key, dtype: torch.dtype, shape: Sequence[int] | int, fill: _Fill
) -> OverlayColumn:
    """Validate the description of an overlay and return it.

    Raises:
        InvalidSchema: the dtype or the shape cannot be stored.
        TypeError: ``fill`` is not a number.
        ValueError: the dtype cannot represent ``fill``.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(type(size) is int for size in sizes):
        raise InvalidSchema(
            f"overlay {format_key(key)}: expected a shape of whole numbers, got {shape!r:.80}."
        )
    column = Column(as_key(key), dtype, sizes)
    if isinstance(fill, torch.Tensor | np.ndarray | np.generic) and fill.ndim == 0:
        fill = fill.item()
    if not isinstance(fill, bool | int | float | complex):
        raise TypeError(f"fill: expected one number for all rows, got {fill!r:.80}.")
    try:
        made = exact_tensor(fill, dtype)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"overlay {format_key(key)}, fill: expected a number that {column.dtype_name} can "
            f"represent, got {fill!r:.80} ({error}). Give another fill or dtype."
        ) from error
    return OverlayColumn(column, as_array(made, column).tobytes())


def as_array(tensor: torch.Tensor, column: Column) -> np.ndarray:
    """Convert a tensor of the column's dtype to an array of its ``numpy_dtype``."""
    tensor = tensor.detach()
    if column.dtype is torch.bfloat16:
        tensor = tensor.contiguous().view(torch.uint16)
    found: np.ndarray = tensor.numpy(force=True)
    return found


def as_tensor(array: np.ndarray, column: Column) -> torch.Tensor:
    """Convert an array of the column's ``numpy_dtype`` to a tensor of its dtype."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if column.dtype is torch.bfloat16 else tensor


@dataclass(frozen=True, slots=True)
class OverlayOwner:
    """The storage that an overlay belongs to."""

    id: str | None
    ring: int


def header_bytes(kept: OverlayColumn, owner: OverlayOwner, rewinds: int) -> bytes:
    """Return the first page of a new file without entries.

    The page records that the file accounts for the first ``rewinds`` rewinds of the storage.

    Raises:
        InvalidSchema: the key and the shape do not fit in the page.
    """
    (column,) = Schema((kept.column,)).to_json()
    said = {"id": owner.id, "ring": owner.ring, **column, "fill": kept.fill.hex()}
    content = json.dumps(said).encode()
    if _START.size + len(content) > WORDS_AT:
        raise InvalidSchema(
            f"overlay {format_key(kept.key)}: expected at most {WORDS_AT - _START.size} bytes for "
            f"its key and shape, got {len(content)}. Use a shorter key or shape."
        )
    start = _START.pack(_MAGIC, _VERSION, len(content), _crc(_VERSION, content))
    words = _WORDS.pack(0, rewinds, 0)
    return ((start + content).ljust(WORDS_AT, b"\0") + words).ljust(HEADER_NBYTES, b"\0")


def read_header(page: bytes, path: Path, key: Key, owner: OverlayOwner) -> OverlayColumn:
    """Parse the first page of the file of overlay ``key`` and return its column.

    Raises:
        DamagedOverlay: the page is damaged, or belongs to another overlay or storage.
        FormatVersionMismatch: a later version of Tallyroll wrote the page.
    """
    said = _header_json(page, path)
    try:
        column = Schema.from_json([said]).columns[0]
        fill = bytes.fromhex(said["fill"])
        whose = OverlayOwner(said["id"], said["ring"])
    except (InvalidSchema, KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"its header does not describe an overlay ({error!r:.200})") from error
    if len(fill) != column.numpy_dtype.itemsize or column.key != key:
        raise damaged(
            path,
            f"its header is for overlay {format_key(column.key)}, but its file name is for "
            f"{format_key(key)}",
        )
    if whose != owner:
        raise damaged(path, f"it belongs to another storage ({whose.id}, ring {whose.ring})")
    return OverlayColumn(column, fill)


def is_of_another(page: bytes, path: Path, owner: OverlayOwner) -> bool:
    """Return True if a first page is intact and names a storage other than ``owner``."""
    try:
        said = _header_json(page, path)
    except (DamagedOverlay, FormatVersionMismatch):
        return False
    return isinstance(said.get("id"), str) and said["id"] != owner.id


def _header_json(page: bytes, path: Path) -> Mapping[str, Any]:
    if len(page) < HEADER_NBYTES:
        raise damaged(
            path, f"expected at least a first page of {HEADER_NBYTES} bytes, got {len(page)} bytes"
        )
    magic, version, nbytes, crc = _START.unpack_from(page)
    if magic != _MAGIC:
        raise damaged(path, "Tallyroll did not write this file as an overlay")
    content = page[_START.size : min(_START.size + nbytes, WORDS_AT)]
    if version > _VERSION and crc != _crc(_VERSION, content):
        raise FormatVersionMismatch(
            f"{path} is an overlay of version {version}, but this Tallyroll reads version "
            f"{_VERSION}. Use a newer Tallyroll, or drop the overlay: storage.drop_overlay(...)."
        )
    if version != _VERSION or crc != _crc(version, content):
        raise damaged(path, "the checksum of its header does not match")
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(said, dict):
        raise damaged(path, "its header is not a JSON object")
    return said


def _crc(version: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(struct.pack("<q", version)))


def damaged(path: Path, why: str) -> DamagedOverlay:
    """Return the error for an unusable file; its message says how to recover."""
    return DamagedOverlay(
        f"{path} cannot be used: {why}. The rows are intact. Restore the file from a copy, or "
        'drop the overlay: open_storage(path, mode="append").drop_overlay(name).'
    )
