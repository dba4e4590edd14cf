"""Open HDF5 files that may be damaged or hostile. Unreadable datasets become findings."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import numpy as np

from tallyroll.storage.ext.dataset_checks.checker import CheckResults, Where
from tallyroll.storage.ext.dataset_checks.superblock import superblock_of
from tallyroll.storage.ext.exchange.hdf5_files import (
    DAMAGE,
    require_chunk_memory,
    require_memory_for,
    require_own_values,
)
from tallyroll.storage.files.safe_files import data_ranges
from tallyroll.storage.formats.hdf5.datasets import h5py_module

_DEEPEST: Final = 24
_MOST_OBJECTS: Final = 2**22
_MOST_PACKED: Final = 1032
"""The maximum compression ratio of deflate, the filter with the highest ratio."""
_SMALL: Final = 2**28
"""The number of bytes that the datasets of any file may claim, however small the file is.

Reading this many bytes takes seconds.
"""
_MOST_HOLES: Final = 2**16


@contextmanager
def opened(raw: Any, found: CheckResults, where: Where) -> Iterator[Any]:
    """Yield the HDF5 file in an open file. If HDF5 cannot open it, add a finding and yield None."""
    h5py = h5py_module()
    block = superblock_of(raw)
    if block is not None and block.open:
        message = "a writer has the file open, or was killed before it closed the file"
        found.add("files", message, where)
    try:
        file = h5py.File(raw, "r", rdcc_nbytes=2**24)
    except DAMAGE as error:
        found.add("files", "HDF5 cannot open the file", where, f"{error!s:.200}")
        yield None
        return
    found.room = room_of(raw)
    with file:
        yield file


def bytes_there(raw: Any) -> int:
    """Return the size of an open file without its holes, or the full size if it has many holes."""
    ranges = [*islice(data_ranges(raw.fileno()), _MOST_HOLES)]
    many = len(ranges) == _MOST_HOLES
    return os.fstat(raw.fileno()).st_size if many else sum(stop - begin for begin, stop in ranges)


def room_of(raw: Any) -> int:
    """Return the number of bytes that the datasets of an open file may claim."""
    return max(_SMALL, _MOST_PACKED * bytes_there(raw))


def datasets_in(
    group: Any, found: CheckResults, where: Where, above: str = "", deep: int = 0
) -> dict[str, Any]:
    """Return the datasets below a group, by name. Add a finding for each unreadable dataset."""
    h5py = h5py_module()
    datasets: dict[str, Any] = {}
    try:
        if len(group) > _MOST_OBJECTS:
            raise ValueError(f"it has {len(group):,} entries, expected at most {_MOST_OBJECTS:,}")
        names = list(group)
    except DAMAGE as error:
        found.add("files", "a group cannot be read", where, f"{error!s:.200}", above or None)
        return {}
    for name in names:
        path = f"{above}{name}"
        try:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise ValueError("it is a link")
            each = group[name]
            if isinstance(each, h5py.Group):
                if deep >= _DEEPEST:
                    raise ValueError("it is nested too deep")
                datasets |= datasets_in(each, found, where, f"{path}/", deep + 1)
            elif isinstance(each, h5py.Dataset):
                datasets[path] = _readable(each, found)
        except DAMAGE as error:
            found.add("files", "a dataset cannot be read", where, f"{error!s:.200}", path)
    return datasets


def _readable(data: Any, found: CheckResults) -> Any:
    """Validate a dataset and return it.

    A small file can claim a terabyte of values that were never written. Such a dataset is rejected.

    Raises:
        NotEnoughMemory: a chunk of the dataset does not fit into memory.
        ValueError: the dataset has values in other files or unknown filters, or claims more bytes
            than the file holds.
    """
    require_own_values(data)
    shape = data.shape or ()
    claimed = math.prod(shape[:1]) * max(1, math.prod(shape[1:]) * data.dtype.itemsize)
    room = found.room
    if claimed > _SMALL:
        room = min(room, max(_SMALL, _MOST_PACKED * data.id.get_storage_size()))
    if claimed > room:
        raise ValueError(f"it claims {claimed:,} bytes, more than the file holds")
    found.room -= claimed
    require_chunk_memory(data)
    return data


def is_numbers(data: Any) -> bool:
    """Return True if a dataset holds numbers [rows, ...]."""
    return data.dtype.kind in "biufc" and not data.dtype.hasobject and len(data.shape) > 0


def values_of(
    data: Any, start: int, stop: int, found: CheckResults, where: Where, column: str
) -> np.ndarray | None:
    """Return rows of a dataset. If they cannot be read, add a finding and return None."""
    nbytes = (stop - start) * math.prod(data.shape[1:]) * data.dtype.itemsize
    require_memory_for(2 * nbytes, f"rows of {column}")
    try:
        return np.asarray(data[start:stop])
    except DAMAGE as error:
        what = f"rows {start:,} to {stop - 1:,}: {error!s:.150}"
        found.add("files", "values are damaged: HDF5 cannot read them", where, what, column)
        return None
