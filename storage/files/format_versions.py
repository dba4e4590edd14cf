"""Format versions that this version of Tallyroll writes and reads.

`create_new` writes the version to the header, and `new_manifest` to the manifest. Readers check it
with `require_readable` and `refuse_newer`. Packed copies (``VERSION`` in ``ext/packed/layout.py``)
and overlays (``_VERSION`` in ``ext/overlays/header.py``) have their own versions. So do checkpoints
(``collector/ext/checkpoints/folder.py``), exports (``ext/exchange/readme.py``), and the files that
may be lost: index, leaf hashes, events and priorities.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tallyroll.storage.errors import CorruptStorage, FormatVersionMismatch

FORMAT_VERSION = 3
"""The version of new storages. Appending to an older storage does not change its version."""

ONCE_VERSION = 4
"""The version of new storages that have columns stored once."""

READABLE = (2, 3, 4)
"""The versions that can be read and appended to.

Version 4 stores each frame of some columns once, in pools beside the rows (see `once_columns`).
Version 3 records three facts in the header: the mark of a storage that is open for writing, the
identity of the header's file, and the number of rows at the last clean close (see `header_words`).
Version 2 has zeros there.
"""

_MOST = 2**16


def is_newer(version: object) -> bool:
    """Return True if ``version`` may be a format version of a later version of Tallyroll."""
    return type(version) is int and max(READABLE) < version < _MOST


def require_readable(version: object, path: Path) -> int:
    """Return ``version``, which the file ``path`` declares, if this version of Tallyroll reads it.

    Raises:
        FormatVersionMismatch: another version of Tallyroll wrote the file.
        CorruptStorage: the value is not a version.
    """
    if type(version) is not int or not 1 <= version < _MOST:
        raise CorruptStorage(
            f"{path} has the impossible format version {version!r:.80}: the file is damaged. "
            "Restore it from a copy."
        )
    if version not in READABLE:
        raise mismatch(version, path)
    return version


def mismatch(version: object, path: Path) -> FormatVersionMismatch:
    """Return the error for a file of another version of Tallyroll."""
    known = ", ".join(map(str, READABLE))
    return FormatVersionMismatch(
        f"{path} has format version {version}, but this Tallyroll reads versions {known}. Use the "
        "Tallyroll that wrote it."
    )


def refuse_newer_provenance(provenance: Any, path: Path) -> None:
    """Raise `FormatVersionMismatch` if the metadata for other libraries is of a later version.

    Args:
        provenance: the value of the attribute ``provenance``, or None.
        path: the file that has it.
    """
    try:
        found = json.loads(provenance)
    except (ValueError, TypeError, RecursionError):
        return
    if not isinstance(found, dict) or not str(found.get("format")).startswith("tallyroll."):
        return
    if is_newer(version := found.get("format_version")):
        raise mismatch(version, path)
