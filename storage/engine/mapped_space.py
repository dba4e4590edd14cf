"""The space for a storage's rows: mapped columns over growing files."""

from __future__ import annotations

import sys
import threading

import numpy as np

from tallyroll.storage.engine.columns import Columns
from tallyroll.storage.engine.ring import in_use, require_slots
from tallyroll.storage.errors import StorageFull
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.mapping import Access
from tallyroll.storage.formats.base import Format
from tallyroll.storage.formats.space import require_room
from tallyroll.storage.rows.schema import Schema

_FIRST_ROOM_NBYTES = 2**20
_LARGEST_STEP_NBYTES = 2**28


class MappedSpace:
    """The memory-mapped columns of a storage, which grow with its files.

    Args:
        format: the open files of the storage.
        schema: the schema of the storage.
        header: the header of the storage.
        access: the access mode of the maps.
        one_call: permit commits in one call of the extension; see `Columns`.
    """

    columns: Columns

    def __init__(
        self, format: Format, schema: Schema, header: Header, access: Access, *, one_call: bool
    ) -> None:
        self.ring = ring = header.ring
        self.mutex = threading.RLock()
        """Lock that is held while rows are appended, and while they are read from a ring."""
        self._format, self._schema, self._header = format, schema, header
        self._access, self._one_call = access, one_call
        self.warm_at = header.head + ring if ring else sys.maxsize
        """The number of committed rows at which this process has written every slot of the ring."""
        self._remap(in_use(header.head, ring), warm=False)

    def follow(self) -> None:
        """Expect the parent process to write from now on, in a forked child.

        The lock is replaced, because a thread of the parent may have held it during the fork.
        """
        self._access, self.mutex = "read", threading.RLock()
        self.close()

    def arrays(self, head: int | None = None) -> list[np.ndarray]:
        """Return one array [room, ...] per column, indexed by slot.

        The arrays have room for the first ``head`` rows, or for all committed rows if ``head`` is
        None.
        """
        slots = in_use(self._header.head if head is None else head, self.ring)
        if slots > self.columns.room:
            with self.mutex:  # only one thread remaps
                if slots > self.columns.room:
                    self._remap(slots, warm=self.columns.warm)
        return self.columns.arrays

    def committed(self) -> list[np.ndarray]:
        """Return the slots in use, as one read-only view [slots, ...] per column."""
        slots = in_use(self._header.head, self.ring)
        arrays = [column[:slots] for column in self.arrays()]
        for array in arrays:
            array.flags.writeable = False
        return arrays

    def make_for(self, count: int, stop: int) -> None:
        """Make room for the rows ``[stop - count, stop)``, and some more.

        Raises:
            BatchTooLong: the ring has fewer than ``count`` slots.
            StorageFull: the disk has no space.
        """
        require_slots(self._format.path, self.ring, count)
        rows, room = in_use(stop, self.ring), self.columns.room
        if rows <= room:
            return
        row_nbytes = self._schema.row_nbytes
        largest = max(1, _LARGEST_STEP_NBYTES // row_nbytes)
        step = min(max(room, _FIRST_ROOM_NBYTES // row_nbytes), largest)
        comfortable = in_use(max(rows, room + step), self.ring)
        try:
            self._format.grow(comfortable)
        except StorageFull:
            if comfortable == rows:
                raise
            self._format.grow(rows)
        self._remap(rows, warm=self.columns.warm)

    def reserve(self, rows: int) -> None:
        """Reserve space for ``rows`` rows in total, or for all slots of a smaller ring.

        Raises:
            StorageFull: the disk has no space.
        """
        rows = in_use(rows, self.ring)
        with self.mutex:
            if rows > (room := self.columns.room):
                require_room(self._format, self._schema, rows, there=room)
                self._format.grow(rows)
                self._remap(rows, warm=self.columns.warm)

    def close(self) -> None:
        """Prevent further commits in one call. A commit that has begun is not affected."""
        self._one_call = False
        self.columns.refuse_one_call()

    def _remap(self, rows: int, *, warm: bool) -> None:
        arrays = self._format.arrays(rows, self._access)
        self.columns = Columns(
            self._format, self._schema, arrays, warm=warm, one_call=self._one_call
        )
