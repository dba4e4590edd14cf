"""The overlays of one storage, copied to another one that has the same rows."""

from __future__ import annotations

from typing import Final

import numpy as np

from tallyroll.storage.errors import SchemaMismatch
from tallyroll.storage.overlays.beside import Overlays
from tallyroll.storage.overlays.overlay_file import OverlayFile
from tallyroll.storage.readers.file_reader import FileReader

_CHUNK_NBYTES: Final = 2**24


def copy_overlays(source: FileReader, target: Overlays, *, exactly: bool) -> None:
    """Give rows that both storages have the values that they have in ``source``.

    With ``exactly`` the target gets the overlays of the source, and no others; without it those
    that only the target has stay, and so do values of rows that only the target has.

    Raises:
        DamagedOverlay: an overlay of the source cannot be used.
        SchemaMismatch: without ``exactly``, if the target has one that keeps something else.
    """
    given = Overlays(source)
    try:
        keys = given.keys()
        for key in keys:
            file = given.open(key)
            try:
                into = target.made(file.kept, writable=True)
            except SchemaMismatch:
                if not exactly:
                    raise
                target.drop(key)
                into = target.made(file.kept, writable=True)
            _copy(source, file, target.reader, into)
        if exactly:
            for key in set(target.keys()).difference(keys):
                target.drop(key)
    finally:
        given.close()


def _copy(source: FileReader, file: OverlayFile, target: FileReader, into: OverlayFile) -> None:
    into.put(np.empty(0, np.int64), np.empty(0))  # it forgets rows that were taken back
    step = max(1, _CHUNK_NBYTES // max(1, file.kept.column.row_nbytes))
    for start in range(0, max(file.room, into.room), step):
        found = [each.rows_in(start, start + step) for each in (file, into)]
        rows = np.unique(np.concatenate(found))
        first = max(source.span.start, target.span.start)
        stop = min(source.head, target.head)
        rows = rows[(rows >= first) & (rows < stop)]
        if len(rows):
            into.put(rows, file.take(rows))
