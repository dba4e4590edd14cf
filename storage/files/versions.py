"""Format versions that this Tallyroll writes and reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tallyroll.storage.errors import CorruptStorage, FormatVersionMismatch

FORMAT_VERSION = 3
"""The version of new storages. Appending to an older storage does not change its version."""

READABLE = (2, 3)
"""The versions that can be read and appended to.

Version 3 records three facts in the header: the mark of a storage that is open for writing, the
identity of the header's file, and the number of rows at the last clean close (see `header_words`).
Version 2 has zeros there.
"""

_MOST = 2**16


def is_newer(version: object) -> bool:
    """Return True if ``version`` may be that of a later Tallyroll's format."""
    return type(version) is int and FORMAT_VERSION < version < _MOST


def require_readable(version: object, path: Path) -> int:
    """Return the version in ``path``, if this Tallyroll can read it.

    Raises:
        FormatVersionMismatch: another Tallyroll wrote the file.
        CorruptStorage: the value is not a version.
    """
    if type(version) is not int or not 1 <= version < _MOST:
        raise CorruptStorage(
            f"{path} says that it is of format version {version!r:.80}, which is no version: it is "
            "damaged. Restore it from a copy."
        )
    if version not in READABLE:
        raise mismatch(version, path)
    return version


def mismatch(version: object, path: Path) -> FormatVersionMismatch:
    """Return the error for a version that another Tallyroll wrote."""
    known = " and ".join(map(str, READABLE))
    return FormatVersionMismatch(
        f"{path} is of format version {version}, and this Tallyroll reads versions {known}. Use "
        "the Tallyroll that wrote it."
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
