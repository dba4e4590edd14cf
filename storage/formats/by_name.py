"""The formats by short name, and by path suffix.

``collector/cli/row_space.py`` and ``cli/plan.py`` repeat which formats have ``Format.pools``.
``storage/ext/storage_copy.py`` and ``collector/ext/report/storage_search.py`` name ``"hdf5"``, the
format that is a single file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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


def format_at(path: Path, wanted: str | None, there: str | None = None) -> str:
    """Return the short name of the format of a storage at ``path``.

    The result is the first that is known of these: the format of the existing storage (``there``),
    the ``wanted`` format, and the format of the path's suffix. The default is ``"memmap"``.

    Raises:
        ValueError: the format ``wanted`` does not exist, or the storage at ``path`` or its suffix
            has another format.
    """
    if wanted is not None and wanted not in FILES:
        raise ValueError(f"format: expected one of {', '.join(FILES)}, got {wanted!r:.80}.")
    suffix = SUFFIXES.get(path.suffix.lower())
    for found, what in ((there, "holds a storage of format"), (suffix, "has the suffix of")):
        if found is not None and wanted not in (None, found):
            raise ValueError(
                f"{path} {what} {found}, but the format {wanted} was requested. Leave the format "
                "out, or give another path."
            )
    return there or wanted or suffix or "memmap"
