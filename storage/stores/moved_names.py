"""Names that storages had before, of what only collectors call: they work still, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

from tallyroll.storage.engine.fixed_rows import FixedRows, IndexedRows, RowIndex

_MOVED: Final[Mapping[str, str]] = {
    "claim": "claim.take",
    "episodes_path": "files.episodes_path",
    "extend_fixed": "append",
    "fresh_ids": "fresh_ids",
    "has_claimed": "claim.is_of",
    "inside": "files.inside",
    "lock_path": "files.lock_path",
    "put_record": "put_record",
    "release": "claim.end",
    "require_schema": "opened.require_schema",
    "stage_record": "stage_record",
    "withdraw_run": "runs.withdraw",
}
"""The names of a storage, and where its writer has the same."""


def moved(storage: Any, name: str) -> Any:
    """Return what ``storage.name`` was, and warn of its new place.

    Raises:
        AttributeError: no storage had such a name.
    """
    if name not in _MOVED:
        raise AttributeError(f"{type(storage).__name__!r} object has no attribute {name!r}")
    place = _MOVED[name]
    warnings.warn(f"storage.{name} is storage.writer.{place} now", DeprecationWarning, stacklevel=3)
    found = attrgetter(place)(storage.writer)
    if name != "extend_fixed":
        return found

    def extend_fixed(rows: FixedRows, index: RowIndex, *, record: bytes | None = None) -> Any:
        return found(IndexedRows(rows, index), record)

    return extend_fixed
