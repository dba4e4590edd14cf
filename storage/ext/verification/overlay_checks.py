"""Check the files of overlays: that each can be used, and names rows that were written."""

from __future__ import annotations

from contextlib import closing
from typing import Final

import numpy as np

from tallyroll.storage.errors import StorageError
from tallyroll.storage.ext.overlays.beside import Overlays
from tallyroll.storage.ext.overlays.overlay_file import OverlayFile
from tallyroll.storage.ext.verification.findings import PLACES, Findings, Place
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.keys import spell

_AT_ONCE: Final = 2**20
_MESSAGE: Final = "an entry names a row that was never written, or that lies elsewhere"


def check_overlays(reader: FileReader, findings: Findings) -> bool:
    """Add a finding for each overlay that cannot be used or is wrong; whether there are any."""
    with closing(Overlays(reader)) as overlays:
        keys = overlays.keys()
        for key in keys:
            try:
                _check(reader, overlays.open(key), findings)
            except StorageError as error:  # dropped meanwhile, too
                findings.add("overlays", str(error), Place(column=spell(key)))
        return bool(keys)


def _check(reader: FileReader, file: OverlayFile, findings: Findings) -> None:
    for start, stop in file.stretches(_AT_ONCE):
        rows, most = file.rows_in(start, stop), file.most_rows
        slots = np.arange(start, start + len(rows))
        lie = rows % reader.ring if reader.ring else rows
        wrong = (rows < -1) | ((rows >= 0) & ((lie != slots) | (rows >= most)))
        where = np.flatnonzero(wrong)

        for entry in where[:PLACES].tolist():
            what = f"entry {start + entry}"
            place = Place(row=int(rows[entry]), column=spell(file.key), what=what)
            findings.add("overlays", _MESSAGE, place)
        if len(where) > PLACES:
            findings.add("overlays", _MESSAGE, count=len(where) - PLACES)
