"""What a later Tallyroll may have left where this one finds no storage: told by what others see."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from .errors import CorruptStorage, MissingLibrary
from .hdf5_file import shown_attributes
from .hdf5_replace import opened
from .paths import read_plain
from .user_block import is_hdf5
from .versions import refuse_newer_provenance

__all__ = ["refuse_newer_file", "refuse_newer_group"]


def refuse_newer_group(path: Path) -> None:
    """Raise `FormatVersionMismatch` for a Zarr group that a later Tallyroll wrote."""
    with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        provenance = json.loads(read_plain(path / "zarr.json"))["attributes"]["provenance"]
        refuse_newer_provenance(provenance, path)


def refuse_newer_file(path: Path) -> None:
    """Raise `FormatVersionMismatch` for an HDF5 file that a later Tallyroll wrote."""
    if not is_hdf5(path):
        return
    with suppress(OSError, CorruptStorage, MissingLibrary), opened(path, os.O_RDONLY) as file:
        refuse_newer_provenance(shown_attributes(file, path).get("provenance"), path)
