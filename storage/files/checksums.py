"""Checksums of blocks of rows, small enough for a manifest. Pure; independent of files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.progress import MoreDone

_MOST_BLOCKS = 4096
"""Maximum number of blocks over all columns. At eight digits per block this is 32 KiB."""
_FEWEST_ROWS = 256
_DIGITS = 8


class SlotColumn(Protocol):
    """Values of a column by slot: an array, or an object that can be sliced like one."""

    def __len__(self) -> int: ...

    def __getitem__(self, slots: slice, /) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Slots ``[start, stop)`` of a column, whose values do not match the recorded checksum."""

    key: Key
    start: int
    stop: int


def checksums(
    columns: Mapping[Key, SlotColumn], rows: int, progress: MoreDone | None = None
) -> dict[str, Any]:
    """Return a JSON value with checksums of each column's first ``rows`` rows, in slot order.

    All columns are divided into blocks with the same number of rows, about 4096 blocks in all. The
    value therefore stays below 48 KiB for up to a few hundred columns.

    Args:
        columns: values [rows or more, ...] by key.
        rows: the number of rows to include.
        progress: callback that is called with the number of bytes read since its last call.
    """
    size = _block_rows(rows, len(columns))
    return {
        "algorithm": "crc32",
        "rows": rows,
        "block_rows": size,
        "columns": {
            format_key(key): "".join(
                _of_block(each, progress) for each in _blocks(column, rows, size)
            )
            for key, column in columns.items()
        },
    }


def mismatches(
    columns: Mapping[Key, SlotColumn], recorded: Any, progress: MoreDone | None = None
) -> Iterator[Mismatch]:
    """Yield the blocks whose checksum differs from the ``recorded`` one, column by column.

    Args:
        columns: values [rows, ...] by key, as passed to `checksums`.
        recorded: the result of `checksums`.
        progress: callback that is called with the number of bytes read since its last call.

    Raises:
        CorruptStorage: ``recorded`` is invalid, or covers rows or columns that do not exist.
    """
    rows = rows_covered(recorded)
    size = recorded["block_rows"]
    _require_same_columns(columns, recorded["columns"])
    for key, column in columns.items():
        wanted = recorded["columns"][format_key(key)]
        if len(column) < rows or len(wanted) != _DIGITS * -(-rows // size):
            raise CorruptStorage(
                f"column {format_key(key)}: expected {rows} rows and a checksum for each block of "
                f"{size} rows, got {len(column)} rows and {len(wanted)} digits of checksums. The "
                "column or the manifest is damaged. Restore the storage from a copy."
            )
        for number, block in enumerate(_blocks(column, rows, size)):
            if _of_block(block, progress) != wanted[_DIGITS * number : _DIGITS * (number + 1)]:
                start = number * size
                yield Mismatch(key, start, min(start + size, rows))


def rows_covered(recorded: Any) -> int:
    """Return the number of rows that the ``recorded`` checksums cover.

    Raises:
        CorruptStorage: the value is not a result of `checksums`.
    """
    if isinstance(recorded, dict) and recorded.get("algorithm") == "crc32":
        rows, size = recorded.get("rows"), recorded.get("block_rows")
        columns = recorded.get("columns")
        counts = type(rows) is int and type(size) is int and rows >= 0 and size >= 1
        texts = isinstance(columns, dict) and all(type(each) is str for each in columns.values())
        if counts and texts:
            return int(recorded["rows"])
    raise CorruptStorage(
        "the checksums in the manifest are damaged: expected a text of CRC-32 values for each "
        "column. Restore the manifest from a copy."
    )


def _require_same_columns(columns: Iterable[Key], recorded: Mapping[str, str]) -> None:
    here = {format_key(key) for key in columns}
    if different := sorted(here ^ set(recorded)):
        raise CorruptStorage(
            "the checksums in the manifest do not match the columns of the storage: only one of "
            f"the two has {', '.join(different)}. Restore the manifest from a copy."
        )


def _block_rows(rows: int, columns: int) -> int:
    blocks = max(1, _MOST_BLOCKS // max(1, columns))
    return max(_FEWEST_ROWS, -(-rows // blocks))


def _blocks(column: SlotColumn, rows: int, size: int) -> Iterator[np.ndarray]:
    for start in range(0, rows, size):
        yield column[start : min(start + size, rows)]


def _of_block(block: np.ndarray, progress: MoreDone | None) -> str:
    if progress is not None:
        progress(block.nbytes)
    values = np.ascontiguousarray(block).reshape(-1)
    return f"{zlib.crc32(values.view(np.uint8).data):0{_DIGITS}x}"
