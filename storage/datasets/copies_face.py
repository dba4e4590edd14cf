"""The method of a storage that copies its rows to a new one."""

from __future__ import annotations

import os
from collections.abc import Callable

from tallyroll.storage.datasets.copying import CopyReport, copy
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Keys
from tallyroll.storage.rows.progress import Progress


class HasCopies:
    """A storage whose rows can be copied."""

    reader: RowReader

    def copy_to(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Keys | None = None,
        drop: Keys = (),
        sort: bool = False,
        format: str | None = None,
        follow: bool = False,
        stop: Callable[[], bool] | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> CopyReport:
        """Write the committed rows to a new storage of any format, which is there whole or not.

        Rows get numbers from 0, in their order. Its manifest says from which rows of which
        storages they are, and which runs made them. Overlays go along, with the values that they
        have when their rows are copied; of several storages, one that keeps something else than
        the first of its name is left out, and the report names it. Another process may write to
        this storage meanwhile: the rows that are committed now are copied.

        Args:
            path: where it will be; nothing may be there.
            columns: those that are wanted, overlays too; None: all.
            drop: those that are not.
            sort: one trajectory after the other, in the order of their first rows.
            format: ``"memmap"``, ``"hdf5"`` or ``"zarr"``; None: by the suffix of ``path``.
            follow: go on with the rows that a process adds, until it closes the storage or
                ``stop`` returns True. Batches are copied whole.
            stop: asked now and then with ``follow``.
            dry_run: return what would be done, and write nothing.
            progress: called now and then with the bytes that were copied, and with all.

        Raises:
            OpenError: ``path`` is taken, or cannot be written; or another process copies to it.
            StorageFull: the rows do not fit on the disk.
            ColumnsMissing: there is no such column.
            Overrun: a ring's writer overwrites rows before they are copied.
            StateMismatch: rows are taken back meanwhile.
            DamagedOverlay: an overlay cannot be used; ``drop`` leaves it out.
            ValueError: an argument is none of its values.
        """
        self.reader.require_open()
        return copy(
            self.reader,
            path,
            columns=columns,
            drop=drop,
            sort=sort,
            format=format,
            follow=follow,
            stop=stop,
            dry_run=dry_run,
            progress=progress,
        )
