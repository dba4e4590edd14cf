"""Atomic creation and opening of storages, which succeed completely or change nothing."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from tallyroll.storage.engine.commit_engine import Durability, Engine
from tallyroll.storage.engine.writer_check import LOOK_SECONDS
from tallyroll.storage.errors import CorruptStorage, InvalidSchema, NotAStorage
from tallyroll.storage.files.commit_header import Header, header_bytes
from tallyroll.storage.files.lock import WriterLock
from tallyroll.storage.files.manifest import Manifest, new_manifest, schema_crc
from tallyroll.storage.files.paths import sync_above
from tallyroll.storage.formats.base import Format
from tallyroll.storage.formats.space import require_room
from tallyroll.storage.rows.schema import Schema


def manifest_of(format: Format) -> Manifest:
    """Return the manifest at the format's path.

    Raises:
        StorageMissing: nothing exists at the path.
        NotAStorage: something else is at the path, for example a storage of another format.
        CorruptStorage: the manifest is damaged.
    """
    format.refuse_missing()
    manifest = format.read_manifest()
    if manifest["format"] != format.name:
        raise NotAStorage(
            f"{format.path} is of format {manifest['format']}, not {format.name}. "
            "tallyroll.storage.open_storage(path) opens any format."
        )
    return manifest


def open_existing(
    format: Format,
    *,
    writable: bool,
    capacity: int = 0,
    durability: Durability = "process",
    accept_copy: bool = False,
) -> tuple[Engine, Manifest]:
    """Open a storage; with ``writable``, lock it and reserve space for ``capacity`` rows.

    Returns:
        The engine that copies the rows, and the manifest.

    Raises:
        CopyOfOpenStorage: the storage is a copy of one that was open for writing, and
            ``accept_copy`` is False.
        OpenError, CorruptStorage: the storage cannot be opened.
        StorageFull: the disk has no space for that many rows.
    """
    manifest = manifest_of(format)
    format.durable = durability == "power"
    if not writable:
        schema = _schema_in(format, manifest)
        header = _header_of(format, manifest, schema, writable=False, accept_copy=accept_copy)
        return _start(format, schema, header, None, durability), manifest
    with ExitStack() as undo:
        lock = WriterLock(format.inside, format.lock_path)
        undo.callback(lock.release)
        if lock.made:
            time.sleep(2 * LOOK_SECONDS)
        # The previous writer may have changed it before the lock was acquired.
        manifest = manifest_of(format)
        schema = _schema_in(format, manifest)
        # Refuse a copy before `fit`, which may write its rows to a new file, which is not a copy.
        _header_of(format, manifest, schema, writable=False, accept_copy=accept_copy).close()
        format.fit(schema, capacity)
        header = _header_of(format, manifest, schema, writable=True, accept_copy=accept_copy)
        engine = _start(format, schema, header, lock, durability)
        undo.callback(engine.abandon)
        engine.space.reserve(capacity)
        if format.durable:
            # Earlier writers may not have waited for the disk.
            engine.settle()
            sync_above(format.lock_path)
        # Last, so that an earlier failure has changed nothing.
        header.begin_writing()
        undo.pop_all()
    return engine, manifest


def _schema_in(format: Format, manifest: Manifest) -> Schema:
    """Return the schema that a manifest declares, after checking it against the format."""
    try:
        schema = Schema.from_json(manifest.get("schema"))
        format.check(schema)
    except InvalidSchema as error:
        raise CorruptStorage(
            f"the schema in {format.manifest_path} is damaged: {error} Restore it."
        ) from error
    return schema


def _header_of(
    format: Format, manifest: Manifest, schema: Schema, *, writable: bool, accept_copy: bool = False
) -> Header:
    header = Header(
        format.open_header,
        format.header_path,
        schema_crc=schema_crc(schema),
        writable=writable,
        version=manifest["format_version"],
        accept_copy=accept_copy,
    )
    if header.ring and not format.rings:
        header.close()
        raise CorruptStorage(
            f"{format.header_path} says that it is of a ring of {header.ring} rows, which no "
            f"storage of format {format.name} is. Restore it from a copy."
        )
    return header


def create_new(
    format: Format,
    schema: Schema,
    runs: list[Any],
    *,
    id: str | None = None,
    ring: int = 0,
    capacity: int = 0,
    durability: Durability = "process",
) -> tuple[Engine, Manifest]:
    """Create a storage without rows, as a ring of ``ring`` slots unless that is 0.

    The storage exists from the moment that its manifest is written.

    Raises:
        OpenError: the storage cannot be created at the path.
        InvalidSchema: the format cannot hold these columns.
        StorageFull: the disk has no space for ``capacity`` rows.
    """
    format.check(schema)
    format.refuse_existing()
    if rows := min(capacity, ring) if ring else capacity:
        require_room(format, schema, rows)
    made = not format.path.exists()
    format.durable = durability == "power"
    format.prepare()
    manifest = new_manifest(format.name, schema, runs, id)
    with ExitStack() as undo:
        lock = WriterLock(format.inside, format.lock_path)
        undo.callback(lock.release)
        # Another process may have created a storage before the lock was acquired.
        format.refuse_existing()
        undo.callback(format.undo, made=made)
        if format.durable:
            # The lock file identifies the remains of an interrupted creation as ours.
            sync_above(format.lock_path)
        format.create(schema, header_bytes(schema_crc(schema), ring=ring), capacity=rows)
        header = _header_of(format, manifest, schema, writable=True)
        engine = _start(format, schema, header, lock, durability)
        undo.callback(engine.abandon)
        engine.space.reserve(capacity)
        header.begin_writing()
        if format.durable:
            engine.settle()
        format.write_manifest(manifest)
        undo.pop_all()
    return engine, manifest


def _start(
    format: Format,
    schema: Schema,
    header: Header,
    lock: WriterLock | None,
    durability: Durability,
) -> Engine:
    with ExitStack() as undo:
        undo.callback(header.close)
        format.open(schema, writable=lock is not None)
        undo.callback(format.close)
        engine = Engine(format, header, schema, lock=lock, durability=durability)
        undo.pop_all()
    return engine
