"""`ReplayBuffer.dumps` and `loads` for storages on disk: a checkpoint is a storage of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from tallyroll.storage.errors import NotInitialised, StateMismatch

if TYPE_CHECKING:
    from tallyroll.storage.storages import DiskStorage


_CHUNK_NBYTES = 2**26


class DiskStorageCheckpointer(StorageCheckpointerBase):
    """Copies committed rows into a folder, and back into a new storage.

    The copy is a storage with the same id. Dumping again into the same folder
    adds the rows that came since.
    """

    def dumps(self, storage: DiskStorage, path: Any) -> None:
        """Copy the committed rows, the record and the runs to ``path``.

        Raises:
            NotInitialised: there is nothing to copy yet.
            StateMismatch: ``path`` holds a copy of another storage, or a newer one.
        """
        if storage._engine is None:
            raise NotInitialised(f"{storage.path} has no rows to dump yet. Write some first.")
        copy_class, path = type(storage), Path(path)
        exists = storage._format_class(path).stands()
        room: dict[str, Any] = {"capacity": max(1, len(storage))}
        if storage.ring and not exists:
            room["max_size"] = storage.ring
        with copy_class(path, mode="append" if exists else "create", **room) as copy:
            _bring_up(copy, storage)

    def loads(self, storage: DiskStorage, path: Any) -> None:
        """Bring ``storage`` to the rows in ``path``: a new one gets them all.

        Rows that came after the dump stay.

        Raises:
            StateMismatch: ``storage`` holds other rows.
            RunUnderWay: a collector is writing to ``storage``.
        """
        storage._require_no_run()
        with type(storage)(path, mode="read") as copy:
            if storage._engine is not None:
                _require_same(storage, copy)
            with storage._turn:
                if storage._engine is None or _behind(storage, copy):
                    _bring_up(storage, copy)


def _bring_up(target: DiskStorage, source: DiskStorage) -> None:
    manifest = source.manifest
    target.reserve(max(1, len(source)))
    if target._engine is None:
        target._create(source.schema, manifest["runs"], id=manifest["id"])
    else:
        _require_same(target, source)
    if target.head > source.head:
        raise StateMismatch(
            f"{target.path} has {target.head} rows and {source.path} {source.head}: the target is "
            "newer. Dump to another folder."
        )
    _copy_rows(target, source)
    if (record := source.record) is not None and record[0] <= target.head:
        target.put_record(record[1])
    target._write_runs(manifest["runs"])


def _copy_rows(target: DiskStorage, source: DiskStorage) -> None:
    engine, head = source._running(), source.head
    if target.ring != source.ring:
        raise StateMismatch(
            f"{target.path} has max_size={target.ring or None} and {source.path} "
            f"max_size={source.ring or None}. Make it with the same max_size."
        )
    if source.ring:
        if _behind(target, source):
            target._running().replace(engine)
            target.__dict__.pop("_id_checks", None)  # it knew other rows
        return
    keys, columns = engine.schema.keys, engine.committed()
    step = max(1, _CHUNK_NBYTES // engine.schema.row_nbytes)
    for start in range(target.head, head, step):
        stop = min(start + step, head)
        target._running().append({k: c[start:stop] for k, c in zip(keys, columns, strict=True)})


def _behind(target: DiskStorage, source: DiskStorage) -> bool:
    """Whether rows of the source are missing, in a ring for a copy that was interrupted too."""
    return target.head < source.head or (
        target.head == source.head and target.span.start > source.span.start
    )


def _require_same(one: DiskStorage, other: DiskStorage) -> None:
    if one.manifest["id"] != other.manifest["id"]:
        raise StateMismatch(
            f"{one.path} and {other.path} hold rows of different storages. Use a new path."
        )
