"""Layout of a packed storage: its arrays, and how columns are derived from them. Pure.

The manifest stores the layout under the key ``packed``. Readers use no other source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import CorruptStorage, FormatVersionMismatch
from tallyroll.storage.ext.packed.codecs import Codec
from tallyroll.storage.ext.packed.stacks import frame_shape
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Column, Schema

VERSION: Final = 1
FORMAT: Final = "tallyroll.packed"
"""The format name of a Zarr group. `FORMAT_HDF5` is the format name of an HDF5 file."""
FORMAT_HDF5: Final = f"{FORMAT}.hdf5"

WIDE_ROWS: Final = 64
"""Rows per chunk for wide rows. Reading one random row decompresses this many rows."""
_NARROW_NBYTES, _NARROW_ROWS, _WIDE_NBYTES = 2**14, 2**11, 2**23
_SHARD_NBYTES, _SHARD_CHUNKS = 2**28, 2**10
_MOST_ROWS: Final = 2**48
_DTYPES: Final = frozenset(dtype.name for dtype in NUMPY.values())


def packed_chunk_rows(row_nbytes: int) -> int:
    """Return the number of rows per chunk.

    It is 64, but more for rows of at most 128 bytes, and fewer for rows of more than 128 KiB.
    """
    if row_nbytes * WIDE_ROWS > _WIDE_NBYTES:
        return _power_of_two(_WIDE_NBYTES // row_nbytes)
    narrow = _NARROW_NBYTES // row_nbytes
    return max(WIDE_ROWS, min(_NARROW_ROWS, _power_of_two(narrow)))


def _power_of_two(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)


def shard_rows_of(chunk_rows: int, row_nbytes: int, rows: int) -> int:
    """Return the rows per file. A file has up to 1,024 chunks and 256 MiB before compression.

    The index of a file has an entry for each chunk, so a single file gets no more chunks than
    exist.
    """
    chunks = min(_SHARD_CHUNKS, _SHARD_NBYTES // (chunk_rows * row_nbytes))
    if rows:
        chunks = min(chunks, -(-rows // chunk_rows))
    return chunk_rows * max(1, chunks)


@dataclass(frozen=True)
class ArrayLayout:
    """One array [rows, *shape] in chunks of rows."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    rows: int
    chunk_rows: int
    shard_rows: int
    codec: Codec

    @classmethod
    def of(
        cls, path: tuple[str, ...], dtype: Any, shape: tuple[int, ...], rows: int, codec: Codec
    ) -> ArrayLayout:
        """Return the layout of an array, with suitable chunk and shard sizes."""
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize * math.prod(shape)
        chunk = packed_chunk_rows(nbytes)
        codec.require(chunk * nbytes)
        shard = shard_rows_of(chunk, nbytes, rows)
        return cls(path, dtype.name, shape, rows, chunk, shard, codec)

    def with_rows(self, rows: int) -> ArrayLayout:
        """Return the layout of the same array with ``rows`` rows."""
        return self.of(self.path, self.dtype, self.shape, rows, self.codec)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return np.dtype(self.dtype)

    @cached_property
    def itemsize(self) -> int:
        """Bytes per number."""
        return self.numpy_dtype.itemsize

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes per row."""
        return self.itemsize * math.prod(self.shape)

    @cached_property
    def chunk_nbytes(self) -> int:
        """Bytes per chunk."""
        return self.row_nbytes * self.chunk_rows

    def as_chunk(self, content: np.ndarray) -> np.ndarray:
        """Convert the bytes of a chunk, uint8 [chunk_nbytes], to [chunk_rows, *shape]."""
        return content.view(self.dtype).reshape(self.chunk_rows, *self.shape)

    @property
    def chunks(self) -> int:
        """The number of chunks; the last one may be padded."""
        return -(-self.rows // self.chunk_rows)

    @property
    def shards(self) -> int:
        """The number of files."""
        return -(-self.rows // self.shard_rows)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` accepts."""
        return {**asdict(self), "codec": str(self.codec)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ArrayLayout:
        """Parse the output of `to_json`; raise ValueError, TypeError or KeyError on failure."""
        path, shape = (tuple(value[name]) for name in ("path", "shape"))
        rows, chunk, shard = (value[name] for name in ("rows", "chunk_rows", "shard_rows"))
        if value["dtype"] not in _DTYPES or not path or not all(type(p) is str for p in path):
            raise ValueError(
                f"array {path!r:.80} has an invalid path or dtype, {value['dtype']!r:.80}"
            )
        if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in path):
            raise ValueError(f"array {path!r:.80} has an invalid path")
        if any(type(n) is not int or n < 1 for n in (*shape, chunk, shard)) or len(shape) > 64:
            raise ValueError(f"array {path!r:.80} has invalid sizes")
        if type(rows) is not int or not 0 <= rows < _MOST_ROWS:
            raise ValueError(f"array {path!r:.80} has an invalid number of rows, {rows!r:.80}")
        found = cls(path, value["dtype"], shape, rows, chunk, shard, Codec.of(value["codec"]))
        if found != found.with_rows(rows):
            raise ValueError(
                f"array {path!r:.80} has chunks that are not valid in version {VERSION}"
            )
        return found


@dataclass(frozen=True)
class StatesLayout:
    """States from which columns are derived.

    States are stored in sequence: the state of a row is followed by the row's next state.

    ``breaks`` and ``starts`` are indices of arrays. The array of breaks has the ascending numbers
    of the rows that do not begin with the next state of the previous row. ``breaks`` is None if
    every row has its own state and there are no next states. The array of starts describes the
    states that are not the previous state with one new frame; see `stacks`.
    """

    frames: int
    """The index of the array of frames."""
    states: int
    """The number of states."""
    breaks: int | None = None
    starts: int | None = None
    n: int = 1
    """Frames per state."""
    axis: int = 0
    """The axis of a row's value along which the frames are stacked."""


@dataclass(frozen=True)
class ColumnLayout:
    """Source of a column: a separate array, or states; ``is_next`` selects the next states."""

    array: int | None = None
    states: int | None = None
    is_next: bool = False


@dataclass(frozen=True)
class Layout:
    """Complete layout of a packed storage."""

    rows: int
    arrays: tuple[ArrayLayout, ...]
    states: tuple[StatesLayout, ...]
    columns: tuple[ColumnLayout, ...]
    old_rows: int
    """The index of the array of the row numbers in the source storage."""
    first: int = 0
    """The number of the first row; for a packed ring, the number of its oldest row."""
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` accepts."""
        value = asdict(self)
        value["arrays"] = [each.to_json() for each in self.arrays]
        return value

    @classmethod
    def from_json(cls, value: Any, schema: Schema, path: Path) -> Layout:
        """Parse the output of `to_json`, and validate it against the schema.

        Raises:
            CorruptStorage: the value is damaged.
            FormatVersionMismatch: a later version of Tallyroll wrote the value.
        """
        try:
            version = value["version"]
            if type(version) is int and VERSION < version < 2**16:
                raise FormatVersionMismatch(
                    f"{path} is packed with version {version} of the layout, but this version "
                    f"of Tallyroll reads version {VERSION}. Use the version that packed the rows."
                )
            found = cls(
                value["rows"],
                tuple(map(ArrayLayout.from_json, value["arrays"])),
                tuple(StatesLayout(**each) for each in value["states"]),
                tuple(ColumnLayout(**each) for each in value["columns"]),
                value["old_rows"],
                value["first"],
                version,
            )
            found._check(schema)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise CorruptStorage(
                f"{path} has an invalid layout of packed rows ({error!s:.200}). Restore it from a "
                "copy."
            ) from error
        return found

    def _check(self, schema: Schema) -> None:
        if self.version != VERSION or type(self.rows) is not int or self.rows < 0:
            raise ValueError(
                f"expected a known version and at least 0 rows, got version {self.version!r:.80} "
                f"and {self.rows!r:.80} rows"
            )
        if type(self.first) is not int or not 0 <= self.first < _MOST_ROWS:
            raise ValueError(f"{self.first!r:.80} is not a row number")
        if len({each.path for each in self.arrays}) < len(self.arrays):
            raise ValueError("two arrays have the same path")
        require_array(self.arrays, self.old_rows, self.rows, "int64", ())
        if len(self.columns) != len(schema.columns):
            raise ValueError(
                f"there are {len(self.columns)} columns, expected {len(schema.columns)}"
            )
        for each in self.states:
            self._check_states(each)
        for place, column in zip(self.columns, schema.columns, strict=True):
            self._check_column(place, column)
        shown = sorted((p.states, p.is_next) for p in self.columns if p.states is not None)
        if len({*shown}) < len(shown) or [n for n, later in shown if not later] != [
            *range(len(self.states))
        ]:
            raise ValueError("each set of states needs one column, and at most one next column")

    def _check_states(self, each: StatesLayout) -> None:
        for number in (each.n, each.states, each.axis):
            if type(number) is not int or number < 0:
                raise ValueError(f"states: {number!r:.80} is not a count")
        if each.breaks is None:
            if each.states != self.rows:
                raise ValueError("the number of states differs from the number of rows")
        else:
            breaks = self.arrays[_place(each.breaks)]
            require_array(self.arrays, each.breaks, breaks.rows, "int64", ())
            if each.states != self.rows + breaks.rows or breaks.rows > self.rows:
                raise ValueError("the number of states differs from the sum of rows and breaks")
        frames = self.arrays[_place(each.frames)]
        if each.starts is None:
            if each.n != 1 or frames.rows != each.states:
                raise ValueError("the number of frames differs from the number of states")
            return
        starts = self.arrays[_place(each.starts)]
        require_array(self.arrays, each.starts, starts.rows, "int64", (4,))
        most = each.states * max(each.n, 1)
        if not 2 <= each.n <= 4096 or not starts.rows <= each.states <= frames.rows <= most:
            raise ValueError("the frames do not match the states")

    def _check_column(self, place: ColumnLayout, column: Column) -> None:
        if type(place.is_next) is not bool or (place.array is None) == (place.states is None):
            raise ValueError("a column has no source, or has two sources")
        if place.states is None:
            dtype, shape = column.numpy_dtype.name, column.shape
            require_array(self.arrays, place.array, self.rows, dtype, shape)
            return
        states = self.states[_place(place.states)]
        if place.is_next and states.breaks is None:
            raise ValueError("a next column has states without next states")
        shape = column.shape
        if states.starts is not None:
            if states.axis >= len(shape) or shape[states.axis] % states.n:
                raise ValueError("a stack does not match its column")
            shape = frame_shape(shape, states.n, states.axis)
        frames = self.arrays[_place(states.frames)]
        if frames.dtype != column.numpy_dtype.name or frames.shape != shape:
            raise ValueError("frames do not match their column")


def _place(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is not an index")
    return value


def require_array(
    arrays: Sequence[ArrayLayout], place: Any, rows: int, dtype: str, shape: tuple[int, ...]
) -> None:
    """Raise ValueError unless the array with index ``place`` has these rows, dtype and shape."""
    found = arrays[_place(place)]
    if (found.rows, found.dtype, found.shape) != (rows, dtype, shape):
        raise ValueError(f"array {'/'.join(found.path)} has the wrong rows, dtype or shape")


def pair_of(key: Key) -> Key:
    """Return the key of the column in ``next`` that corresponds to a column."""
    return ("next", *key)
