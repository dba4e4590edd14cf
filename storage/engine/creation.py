"""Atomic creation and opening of storages, which succeed completely or change nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tallyroll.storage.engine.commit_engine import Durability, Engine
from tallyroll.storage.engine.once_columns import (
    OnceColumn,
    once_from_json,
    once_to_json,
    stored_schema,
)
from tallyroll.storage.engine.writer_check import LOOK_SECONDS
from tallyroll.storage.errors import CorruptStorage, InvalidSchema, NotAStorage
from tallyroll.storage.files.commit_header import Header, header_bytes
from tallyroll.storage.files.format_versions import FORMAT_VERSION, ONCE_VERSION
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
    format.sync_metadata(durability == "power")
    if not writable:
        schema, once = _schema_in(format, manifest)
        header = _header_of(format, manifest, schema, once, writable=False, accept_copy=accept_copy)
        return _start(format, schema, header, None, durability, once), manifest
    with ExitStack() as undo:
        lock = WriterLock(format.inside, format.lock_path)
        undo.callback(lock.release)
        if lock.made:
            time.sleep(2 * LOOK_SECONDS)
        # The previous writer may have changed the manifest before the lock was acquired.
        manifest = manifest_of(format)
        schema, once = _schema_in(format, manifest)
        # Refuse a copy before `fit` is called: it may move the rows to a new file, which would no
        # longer be recognised as a copy.
        _header_of(format, manifest, schema, once, writable=False, accept_copy=accept_copy).close()
        format.fit(stored_schema(schema, once), capacity)
        header = _header_of(format, manifest, schema, once, writable=True, accept_copy=accept_copy)
        engine = _start(format, schema, header, lock, durability, once)
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


def _schema_in(format: Format, manifest: Manifest) -> tuple[Schema, tuple[OnceColumn, ...]]:
    """Read the schema and the columns stored once from a manifest, and check the format."""
    try:
        schema = Schema.from_json(manifest.get("schema"))
        once = once_from_json(manifest.get("once", []), schema)
        if once and not format.pools:
            raise InvalidSchema(f"once: expected no columns for {format.name}, got {len(once)}.")
        format.check(stored_schema(schema, once))
    except InvalidSchema as error:
        raise CorruptStorage(
            f"the schema in {format.manifest_path} is damaged: {error} Restore the file from a "
            "copy."
        ) from error
    return schema, once


def _header_of(
    format: Format,
    manifest: Manifest,
    schema: Schema,
    once: Sequence[OnceColumn],
    *,
    writable: bool,
    accept_copy: bool = False,
) -> Header:
    header = Header(
        format.open_header,
        format.header_path,
        schema_crc=schema_crc(schema, once_to_json(once)),
        writable=writable,
        version=manifest["format_version"],
        accept_copy=accept_copy,
    )
    if header.ring and not format.rings:
        header.close()
        raise CorruptStorage(
            f"{format.header_path} has a ring of {header.ring} rows, but a storage of format "
            f"{format.name} keeps every row. Restore the file from a copy."
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
    once: Sequence[OnceColumn] = (),
) -> tuple[Engine, Manifest]:
    """Create a storage without rows, as a ring of ``ring`` slots if that is not 0.

    The storage exists as soon as its manifest is written. ``once`` lists the columns that are
    stored once.

    Raises:
        OpenError: the storage cannot be created at the path.
        InvalidSchema: the format cannot hold these columns.
        StorageFull: the disk has no space for ``capacity`` rows.
    """
    stored, kept_once = stored_schema(schema, once), once_to_json(once)
    format.check(stored)
    format.refuse_existing()
    if rows := min(capacity, ring) if ring else capacity:
        require_room(format, stored, rows)
    made = not format.path.exists()
    format.sync_metadata(durability == "power")
    format.prepare()
    manifest = new_manifest(format.name, schema, runs, id, kept_once)
    with ExitStack() as undo:
        lock = WriterLock(format.inside, format.lock_path)
        undo.callback(lock.release)
        # Another process may have created a storage before the lock was acquired.
        format.refuse_existing()
        undo.callback(format.undo, made=made)
        if format.durable:
            # The lock file identifies the remains of an interrupted creation as ours.
            sync_above(format.lock_path)
        version = ONCE_VERSION if once else FORMAT_VERSION
        header_content = header_bytes(schema_crc(schema, kept_once), ring=ring, version=version)
        format.create(stored, header_content, capacity=rows)
        for each in once:
            format.make_pool(each.key)
        header = _header_of(format, manifest, schema, once, writable=True)
        engine = _start(format, schema, header, lock, durability, once)
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
    once: Sequence[OnceColumn],
) -> Engine:
    with ExitStack() as undo:
        undo.callback(header.close)
        format.open(stored_schema(schema, once), writable=lock is not None)
        undo.callback(format.close)
        engine = Engine(format, header, schema, lock=lock, durability=durability, once=once)
        undo.pop_all()
    return engine
