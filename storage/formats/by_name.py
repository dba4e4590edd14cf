"""The formats by their short names, and by the suffixes of paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tallyroll.storage.formats.base import Format
from tallyroll.storage.formats.hdf5.format import H5Format
from tallyroll.storage.formats.memmap import MemmapFormat
from tallyroll.storage.formats.zarr.format import ZarrFormat

FILES: Final[Mapping[str, type[Format]]] = {
    "memmap": MemmapFormat,
    "hdf5": H5Format,
    "zarr": ZarrFormat,
}
SUFFIXES: Final[Mapping[str, str]] = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
