"""Rows that a storage hands out: every caller gets memory of its own, to which it may write.

A slice of many rows is made of private maps of the files: changes are seen in that slice alone,
and nothing is read until the caller uses it. An area of maps is lent to one slice. When the last
array on it is gone, one call of the system makes it as new, and it is lent again: new maps would
take one call a file, and a storage of chunks has many files.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np

from tallyroll.storage.engine.columns import Places
from tallyroll.storage.files.mapping import Area
from tallyroll.storage.files.paths import failed
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.row_refs import RowRefs
from tallyroll.storage.rows.schema import Schema

_COPIED_NBYTES: Final = 2**16
"""The largest slice in bytes that is copied: a copy takes no longer there, and no maps."""
_MOST_MAPS: Final = 2**14
"""The most maps that slices hold in a process, which may have some 65,000, see `maps_left`.
While they hold so many, further slices are copied."""
_KEPT_AREAS: Final = 2

_lent: dict[int, int] = {}
"""The number of maps that each living lease holds."""


class _Lease:
    """An area as one array of bytes, for as long as anything refers to it."""

    def __init__(self, area: Area, lender: PrivateRows) -> None:
        region = area.region
        self._area, self._lender = area, lender
        self.begin, self.end = region.address, region.address + region.mapped
        self.__array_interface__ = {
            "version": 3,
            "shape": (region.mapped,),
            "typestr": "|u1",
            "data": (region.address, False),
        }
        _lent[id(self)] = region.maps

    def __del__(self) -> None:
        _lent.pop(id(self), None)
        self._lender.take_back(self._area)


class PrivateRows:
    """Lends the rows of a storage.

    Args:
        format: its files.
        schema: its columns.
    """

    def __init__(self, format: Format, schema: Schema) -> None:
        self._format = format
        self._columns = [(c.numpy_dtype, c.shape, c.row_nbytes) for c in schema.columns]
        self._free: list[Area] = []
        self._leases: list[weakref.ref[_Lease]] = []
        self._begin = self._end = np.empty(0, np.uintp)
        self._closed = False
        self.watches = False
        """True if `hold` may find an address in a lent area."""

    def rows(
        self, columns: Sequence[np.ndarray], slots: slice, only: Places | None, *, watched: bool
    ) -> list[np.ndarray]:
        """Return slots of all ``columns``, or of ``only`` some, as arrays of the caller's own.

        ``watched``: `hold` must recognise their memory.
        """
        places = range(len(columns)) if only is None else only
        start, _, step = slots.indices(len(columns[0]))
        count = len(range(len(columns[0]))[slots])
        chosen = [self._columns[place] for place in places]
        nbytes = count * sum(row_nbytes for _, _, row_nbytes in chosen)
        if nbytes <= _COPIED_NBYTES or sum(list(_lent.values())) >= _MOST_MAPS:
            return [columns[place][slots].copy() for place in places]
        area = self._area(start + (count - 1) * step + 1)
        if area is None:
            return [columns[place][slots].copy() for place in places]
        lease = _Lease(area, self)
        if watched:
            self._watch(lease)
        memory = np.asarray(lease)
        found = []
        for place, (dtype, shape, row_nbytes) in zip(places, chosen, strict=True):
            at = area.starts[place] + start * row_nbytes
            if step == 1:
                found.append(np.ndarray((count, *shape), dtype, memory, at))
            else:
                rows = np.ndarray(((count - 1) * step + 1, *shape), dtype, memory, at)
                found.append(rows[::step])
        return found

    def _area(self, rows: int) -> Area | None:
        """Return an area of ``rows`` rows; None if the files were deleted meanwhile."""
        try:
            free = self._free.pop()
        except IndexError:
            free = None
        if free is not None and free.room >= rows:
            return free
        try:
            return self._format.private(rows, free)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed(self._format.path, error, 0) from error

    def take_back(self, area: Area) -> None:
        """Undo the changes to an area that nothing refers to, and keep it or drop it."""
        if not self._closed and len(self._free) < _KEPT_AREAS and area.region.renew():
            self._free.append(area)

    def close(self) -> None:
        """Stop lending. Areas that are lent stay valid."""
        self._closed = True
        self._free.clear()

    # --- of a ring: rows that lie in slots which are about to be overwritten ----------------------

    def _watch(self, lease: _Lease) -> None:
        living = [one for ref in self._leases if (one := ref()) is not None] + [lease]
        self._leases = [weakref.ref(one) for one in living]
        self.watches = True
        # Leases that end later stay in the list: that costs a needless copy, no more.
        self._begin = np.array([one.begin for one in living], np.uintp)
        self._end = np.array([one.end for one in living], np.uintp)

    def hold(self, addresses: Sequence[int]) -> np.ndarray:
        """Return whether each of ``addresses`` lies in a lent area, bool [addresses]."""
        at = np.array(addresses, np.uintp)[:, None]
        within: np.ndarray = np.any((at >= self._begin) & (at < self._end), axis=1)
        return within

    def copied(self, arrays: Sequence[np.ndarray | RowRefs]) -> list[np.ndarray | RowRefs]:
        """Return ``arrays``, with copies in the place of those that lie in a lent area."""
        # Rows that are still to be gathered come from elsewhere.
        addresses = [a.ctypes.data if isinstance(a, np.ndarray) else 0 for a in arrays]
        held = self.hold(addresses)
        return [np.array(a, order="C") if own else a for a, own in zip(arrays, held, strict=True)]
