"""Checkpoints of storages on disk for `ReplayBuffer.dumps` and `ReplayBuffer.loads`."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from tallyroll.storage.errors import NotInitialised, StateMismatch
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.files.rewind_history import with_history_of
from tallyroll.storage.formats.base import Format
from tallyroll.storage.readers.file_reader import FileReader, Mode
from tallyroll.storage.readers.row_reader import RowReader, values_in_slots
from tallyroll.storage.stores.opened_files import OpenedFiles, plan_once_like
from tallyroll.storage.stores.rewinds import remove_sidecars, require_not_rewound
from tallyroll.storage.stores.row_store import RowStore
from tallyroll.storage.stores.row_writer import ReadOnlyWriter, RowWriter

_CHUNK_NBYTES = 2**26


class DiskStorageCheckpointer(StorageCheckpointerBase):
    """Checkpointer that copies committed rows into a folder, and from there into a storage.

    The copy is itself a storage, with the same id. A second dump into the same folder appends the
    rows that were added since.
    """

    def register_save_hook(self, hook: Any) -> None:
        """Raise, because the copy would not be a readable storage if a hook changed the rows.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "DiskStorageCheckpointer does not support hooks. Give the buffer a checkpointer of "
            "TorchRL, such as checkpointer=TensorStorageCheckpointer(), and register the hooks "
            "with that one."
        )

    register_load_hook = register_save_hook

    def dumps(self, storage: RowStore, path: Any) -> None:
        """Copy the committed rows, the record, the runs and the overlays to ``path``.

        Raises:
            NotInitialised: the storage has no schema yet.
            StateMismatch: ``path`` holds a copy of another storage, or a newer copy.
        """
        source = storage.reader
        if not source.initialised:
            raise NotInitialised(f"{source.path} has no rows to dump yet. Write some first.")
        exists = _format_of(source, path).exists()
        target = _copy_at(source, path, "append" if exists else "create")
        ring = None if exists else source.ring or None
        once = plan_once_like(source) if target.format.pools else None
        opened = OpenedFiles(target, capacity=max(1, len(source)), max_size=ring, once=once)
        with closing(RowWriter(opened)) as copy:
            _bring_up(copy, source)
            if isinstance(source, FileReader):
                from tallyroll.storage.ext.overlays.overlay_copies import copy_overlays
                from tallyroll.storage.ext.overlays.overlay_set import Overlays

                with closing(Overlays(target)) as overlays:
                    copy_overlays(source, overlays, exactly=True)

    def loads(self, storage: RowStore, path: Any) -> None:
        """Copy the rows in ``path`` that ``storage`` lacks; a new storage receives all of them.

        Rows that were added after the dump stay. Overlays of the dumped rows get the values of the
        dump, unless the storage was opened with mode="read".

        Raises:
            StateMismatch: ``storage`` holds other rows.
            RunUnderWay: a collector is writing to ``storage``.
        """
        writer, target = storage.writer, storage.reader
        if isinstance(writer, RowWriter):
            writer.claim.require_none()
        with _copy_at(target, path, "read").open() as copy:
            if target.initialised:
                _require_same(target, copy)
                _require_not_rewound(target, copy)
            with writer.turn:
                if not target.initialised or _lacks_rows(target, copy):
                    _bring_up(writer, copy)
                if storage.mode != "read":
                    from tallyroll.storage.ext.overlays.overlay_copies import copy_overlays

                    copy_overlays(copy, storage.overlay_files, exactly=False)


def _format_of(reader: RowReader, path: Any) -> Format:
    return reader.copied_as(user_path(path).absolute())


def _copy_at(reader: RowReader, path: Any, mode: Mode) -> FileReader:
    return FileReader(_format_of(reader, path), user_path(path), mode)


def _bring_up(writer: RowWriter | ReadOnlyWriter, source: RowReader) -> None:
    if isinstance(writer, ReadOnlyWriter):
        writer.refuse()
    manifest, target = source.manifest, writer.reader
    if target.ring != source.ring:
        raise StateMismatch(
            f"{target.path} has max_size={target.ring or None}, but {source.path} has "
            f"max_size={source.ring or None}. Use the same max_size for both."
        )
    writer.opened.reserve(max(1, len(source)))
    if not target.initialised:
        once = isinstance(source, FileReader) and bool(source.once)
        writer.runs.create(source.schema, manifest["runs"], id=manifest["id"], declared=once)
    else:
        _require_same(target, source)
    if target.head > source.head:
        raise StateMismatch(
            f"{target.path} has {target.head} rows and {source.path} has {source.head} rows: the "
            "target is newer. Dump to another folder."
        )
    rewound = target.rewinds != source.rewinds
    if rewound:
        if not source.ring:  # all rows of a ring are copied
            _require_not_rewound(target, source)
        _take_history(writer, source)
    _copy_rows(writer, source, all_of_ring=rewound)
    if (record := source.record) is not None and record[0] <= target.head:
        writer.put_record(record[1])
    writer.runs.write(manifest["runs"])


def _copy_rows(writer: RowWriter, source: RowReader, *, all_of_ring: bool = False) -> None:
    target, span = writer.reader, source.span
    if source.ring:
        if all_of_ring or _lacks_rows(target, source):
            _replace(writer, source)
        return
    if target.head < span.start:
        raise StateMismatch(
            f"{source.path} starts with row {span.start}, but a copy would start with row "
            f"{target.head}. Copy the rows to a separate storage."
        )
    columns = {key: source.column(key) for key in source.keys}
    step = max(1, _CHUNK_NBYTES // source.schema.row_nbytes)
    for start in range(target.head, span.stop, step):
        stop = min(start + step, span.stop)
        rows = {key: each.slice(start, stop) for key, each in columns.items()}
        writer.append(writer.input_rows.checked(rows))


def _replace(writer: RowWriter, source: RowReader) -> None:
    """Replace the rows of a ring, and their numbers, with the rows of a ring of equal size."""
    span, ring = source.span, source.ring
    reserve = span.start + ring if span.start else span.stop
    remove_sidecars(writer)  # the row numbers now belong to other rows

    def read(start: int, stop: int) -> list[np.ndarray]:
        return [values_in_slots(source, key, start, stop) for key in source.keys]

    writer.reader.running().replace(read, span.stop, reserve, source.floor)
    writer.rows_changed()


def _take_history(writer: RowWriter, source: RowReader) -> None:
    """Record the rewinds of the storage whose rows are copied."""
    reader = writer.reader
    engine = reader.running()
    reader.write_manifest(with_history_of(reader.manifest, source.manifest))
    engine.set_rewinds(source.rewinds)
    writer.rows_changed()


def _lacks_rows(target: RowReader, source: RowReader) -> bool:
    """Return True if the target lacks rows of the source, or both are rings with different rows.

    The second case arises if a copy was interrupted or one of the rings was emptied.
    """
    return target.head < source.head or (
        target.head == source.head and target.span.start != source.span.start
    )


def _require_not_rewound(one: RowReader, other: RowReader) -> None:
    """Raise if one of the storages has rows that were rewound in the other."""
    older, newer = sorted((one, other), key=lambda reader: reader.rewinds)
    require_not_rewound(newer, older.head, older.rewinds, f"the storage at {older.path}")


def _require_same(one: RowReader, other: RowReader) -> None:
    if one.manifest["id"] != other.manifest["id"]:
        raise StateMismatch(
            f"{one.path} and {other.path} hold rows of different storages. Use a new path."
        )
