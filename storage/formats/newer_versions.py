"""Detect storages of a later Tallyroll by the metadata that other libraries read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tallyroll.storage.errors import CorruptStorage, MissingLibrary
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.files.versions import refuse_newer_provenance
from tallyroll.storage.formats.hdf5.datasets import shown_attributes
from tallyroll.storage.formats.hdf5.replace import opened
from tallyroll.storage.formats.hdf5.user_block import is_hdf5

__all__ = ["refuse_newer_file", "refuse_newer_group"]


def refuse_newer_group(path: Path) -> None:
    """Raise `FormatVersionMismatch` for a Zarr group that a later Tallyroll wrote."""
    with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        provenance = Inside(path).read_json(path / "zarr.json")["attributes"]["provenance"]
        refuse_newer_provenance(provenance, path)


def refuse_newer_file(path: Path) -> None:
    """Raise `FormatVersionMismatch` for an HDF5 file that a later Tallyroll wrote."""
    if not is_hdf5(path):
        return
    real = Path(os.path.realpath(path))
    with suppress(OSError, CorruptStorage, MissingLibrary), opened(real, os.O_RDONLY) as file:
        refuse_newer_provenance(shown_attributes(file, path).get("provenance"), path)
