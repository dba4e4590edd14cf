"""A storage comes into being, or is opened: all of it, or nothing changed."""

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
        StorageMissing: nothing is there.
        NotAStorage: something else is there, another format for one.
        CorruptStorage: it is damaged.
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
    """Open a storage, ``writable`` with the right to write and space for ``capacity`` rows.

    Returns what moves its rows, and what its manifest says.

    Raises:
        CopyOfOpenStorage: it is a copy of one that was open for writing, and ``accept_copy`` is
            False.
        OpenError, CorruptStorage: it cannot be opened.
        StorageFull: no space for that many rows.
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
        # The writer before us may have changed it before we had the lock.
        manifest = manifest_of(format)
        schema = _schema_in(format, manifest)
        # Refuse a copy before `fit` may write its rows into a new file, which is no copy.
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
        # Last: what fails before has changed nothing.
        header.begin_writing()
        undo.pop_all()
    return engine, manifest


def _schema_in(format: Format, manifest: Manifest) -> Schema:
    """Return the schema that a manifest declares, checked: the format can hold it."""
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
    """Make a storage without rows, a ring of ``ring`` slots where that is not 0.

    It is a storage from the moment that its manifest is written.

    Raises:
        OpenError: it cannot be made there.
        InvalidSchema: the format cannot hold these columns.
        StorageFull: no space for ``capacity`` rows.
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
        # Another process may have created one before we had the lock.
        format.refuse_existing()
        undo.callback(format.undo, made=made)
        if format.durable:
            # By its lock file what is left of a creation is known as ours.
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
