"""Open HDF5 files of other programs without reading anything outside them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.ext.exchange.base import refused
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.readme import LIMIT
from tallyroll.storage.files.safe_files import open_file
from tallyroll.storage.formats.hdf5.datasets import h5py_module
from tallyroll.storage.rows.dtypes import TORCH
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.trajectories.columns import floats_of

_DEEPEST: Final = 24
_MOST_OBJECTS: Final = 2**22
_FILTERS: Final = frozenset({1, 2, 3, 32000})
"""The filters that are part of h5py: deflate, shuffle, fletcher32 and lzf."""
DAMAGE: Final = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError)
"""Errors that h5py raises for damaged files."""


@contextmanager
def opened_hdf5(place: Path) -> Iterator[Any]:
    """Open an HDF5 file for reading. A link is rejected.

    Raises:
        MissingLibrary: h5py is not installed.
        InvalidDataset: HDF5 cannot open the file.
    """
    h5py = h5py_module()
    with open(open_file(place, os.O_RDONLY), "rb") as raw:
        try:
            file = h5py.File(raw, "r", rdcc_nbytes=2**24)
        except DAMAGE as error:
            raise refused(place, f"HDF5 cannot open it ({error})") from error
        with file:
            yield file


def datasets_in(group: Any, place: Path) -> dict[Key, Any]:
    """Return all datasets below a group, by path.

    Raises:
        InvalidDataset: an object is a link or cannot be read, or a dataset has unknown filters or
            values in other files.
        NotEnoughMemory: a chunk of a dataset does not fit into memory.
    """
    h5py = h5py_module()
    found: dict[Key, Any] = {}
    waiting: list[tuple[Key, Any]] = [((), group)]
    seen = 0
    while waiting:
        above, here = waiting.pop()
        if len(above) > _DEEPEST:
            raise refused(place, f"{'/'.join(above)!r:.200} is nested too deep")
        for name in _names(here, place):
            key = (*above, name)
            seen += 1
            if seen > _MOST_OBJECTS:
                raise refused(place, f"it has more than {_MOST_OBJECTS:,} objects")
            try:
                if not isinstance(here.get(name, getlink=True), h5py.HardLink):
                    raise ValueError("it is a link")
                each = here[name]
                if isinstance(each, h5py.Group):
                    waiting.append((key, each))
                elif isinstance(each, h5py.Dataset):
                    require_own_values(each)
                    require_chunk_memory(each)
                    found[key] = each
                else:
                    raise TypeError("it is neither a group nor a dataset")
            except DAMAGE as error:
                raise refused(place, f"{'/'.join(key)!r:.200}: {error}") from error
    return found


def _names(group: Any, place: Path) -> list[str]:
    try:
        if len(group) <= _MOST_OBJECTS:
            return list(group)
    except DAMAGE as error:
        raise refused(place, f"{group.name} cannot be listed ({error})") from error
    raise refused(place, f"it has more than {_MOST_OBJECTS:,} objects")


def require_own_values(data: Any) -> None:
    """Raise `ValueError` for a dataset with values in other files, or with unknown filters."""
    if data.is_virtual or data.external:
        raise ValueError("its values are in other files")
    plist = data.id.get_create_plist()
    filters = {plist.get_filter(each)[0] for each in range(plist.get_nfilters())}
    if filters - _FILTERS:
        raise ValueError(
            f"h5py does not include its compression filters {sorted(filters - _FILTERS)}"
        )


def require_chunk_memory(data: Any) -> None:
    """Raise `NotEnoughMemory` if memory for a chunk of a dataset is not available."""
    if data.chunks is not None:
        require_memory_for(
            2 * math.prod(data.chunks) * data.dtype.itemsize, f"a chunk of {data.name}"
        )


def require_memory_for(nbytes: int, what: str) -> None:
    """Raise `NotEnoughMemory` if memory for a large read is not available.

    Small reads are not checked, because the check takes longer than the read.
    """
    if nbytes > BLOCK_NBYTES:
        require_memory(nbytes, what, "Use a machine with more memory.")


def column_of(key: Key, data: Any) -> Column | None:
    """Return the column for a dataset [rows, ...], or None if no storage can hold it."""
    dtype = data.dtype.newbyteorder("=")
    if dtype.hasobject or dtype not in TORCH or not data.shape or 0 in data.shape[1:]:
        return None
    return Column(key, TORCH[dtype], tuple(data.shape[1:]))


def read_rows(data: Any, start: int, stop: int, column: Column, place: Path) -> np.ndarray:
    """Read rows of a dataset as values of a column [stop - start, *shape]."""
    try:
        values = np.asarray(data[start:stop])
    except DAMAGE as error:
        raise refused(place, f"{data.name}: {error}") from error
    return as_column(values, column, f"{place}: {data.name}", place)


def as_column(values: np.ndarray, column: Column, name: str, place: Path) -> np.ndarray:
    """Convert values that a file stores for a column to the column's dtype and shape."""
    count = len(values)
    if values.size != count * math.prod(column.shape):
        raise refused(
            place, f"{name} has shape {list(values.shape)}, expected {list(column.shape)} per row"
        )
    if column.dtype is torch.bfloat16:
        if values.dtype != np.float32:
            raise refused(place, f"{name} has dtype {values.dtype}, expected float32")
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    elif values.dtype.newbyteorder("=") != column.numpy_dtype:
        raise refused(place, f"{name} has dtype {values.dtype}, expected {column.numpy_dtype}")
    native = np.ascontiguousarray(values, column.numpy_dtype)
    return native.reshape(count, *column.shape)


def as_stored(values: np.ndarray, column: Column, *, flat: bool = False) -> np.ndarray:
    """Convert values of a column to the form that files store.

    bfloat16 becomes float32. With ``flat``, a column of one value per row becomes [rows].
    """
    values = floats_of(values) if column.dtype is torch.bfloat16 else values
    return values.reshape(len(values)) if flat and math.prod(column.shape) == 1 else values


def text_of(data: Any, place: Path) -> str:
    """Return the text in a dataset of bytes."""
    if data.dtype != np.uint8 or data.ndim != 1 or data.shape[0] > LIMIT:
        raise refused(place, f"{data.name} is not a text of at most {LIMIT:,} bytes")
    try:
        found: bytes = data[()].tobytes()
        return found.decode()
    except (UnicodeDecodeError, *DAMAGE) as error:
        raise refused(place, f"{data.name}: {error}") from error
