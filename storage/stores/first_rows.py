"""The first rows of a new storage: refused before its files are made, or not at all."""

from __future__ import annotations

from typing import Any

from tallyroll.storage.engine.ring import require_slots
from tallyroll.storage.files.record_slots import check_record_size
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.stores.given_rows import GivenRows, schema_of
from tallyroll.storage.stores.opened_files import OpenedFiles
from tallyroll.storage.trajectories.id_checks import IdChecks, Ids


class FirstRows:
    """Rows that decide the schema of a storage, and all that checks them and the rows to come.

    Args:
        opened: of the storage, which has no files yet.
        rows: a TensorDict, or arrays by key.
        without: a column that is left out.
        ids: as `DiskStorage.extend`.
        items: they come from a replay buffer, and each may be several transitions.

    Raises:
        InvalidSchema: the storage cannot hold them.
        WriteError: they cannot be written so, not even one by one.
        StorageFull: there is no space for them.
    """

    def __init__(
        self, opened: OpenedFiles, rows: Any, without: Key | None, ids: Ids, *, items: bool
    ) -> None:
        self._reader = reader = opened.reader
        reader.require_open()
        self.schema = schema = schema_of(rows, without, items=items)
        reader.format.check(schema)
        self.given, self.id_checks = GivenRows(reader, schema), IdChecks.of(reader, schema)
        self.checked = self.given.checked(rows, without)
        if ids != "fresh" and self.id_checks is not None:
            self.id_checks.admit(self.checked.values)
        opened.require_room(schema, self.checked.count)

    def require_at_once(self, record: bytes | None) -> None:
        """Refuse a ring of fewer slots, and a ``record`` that is too large.

        Raises:
            BatchTooLong, RecordTooLarge: says how large it may be.
        """
        require_slots(self._reader.format.path, self._reader.ring, self.checked.count)
        if record is not None:
            check_record_size(record)
