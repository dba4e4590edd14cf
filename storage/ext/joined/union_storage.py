"""Read-only storage that presents several storages as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tallyroll.storage.ext.joined.members import PathLike, expand_paths
from tallyroll.storage.ext.joined.union import MemberIds, UnionReader
from tallyroll.storage.ext.remote.address import reopened_as
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.rows.keys import Keys
from tallyroll.storage.storages import ReaderStorage, open_storage, require_reading


class UnionStorage(ReaderStorage):
    """Several storages as one read-only storage; see `open_storage`."""

    reader: UnionReader

    def reopen_by(self, places: Sequence[Path], **options: Any) -> None:
        """Make pickles reopen these paths, with the rows that exist now."""
        spans = [each.span for each in self.reader.members]
        paths = [reopened_as(each) for each in places]
        self._reopening = {"path": paths, "spans": spans, **options}


def open_at(
    path: PathLike | Sequence[PathLike],
    mode: Mode,
    *,
    columns: Keys | None = None,
    ids: MemberIds = "offset",
    spans: Sequence[range] | None = None,
    **options: Any,
) -> UnionStorage:
    """Open several storages as one; see `open_storage`."""
    places = expand_paths(path)
    given = [path] if isinstance(path, str | os.PathLike) else path
    require_reading(", ".join(map(str, given)), mode)
    with ExitStack() as stack:
        members = [stack.enter_context(open_storage(place, **options)) for place in places]
        reader = UnionReader(
            [each.reader for each in members],
            Path(", ".join(str(each) for each in given)),
            columns=columns,
            ids=ids,
            spans=spans,
            owners=members,
        )
        found = UnionStorage(reader, mode)
        if ids == "keep":
            _ = reader.ids_moved_by
        stack.pop_all()
    found.reopen_by(places, columns=columns, ids=ids, **options)
    return found
