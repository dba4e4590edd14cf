"""`import_dataset`: a dataset of another library becomes a storage, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.errors import InvalidDataset, RowsMismatch
from tallyroll.storage.ext.atomic_create import require_free, written_aside
from tallyroll.storage.ext.exchange.base import (
    Block,
    ExchangeFormat,
    Incoming,
    opened_source,
    refused,
    source_errors,
)
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.numbering import EndFlags, TrajectoryNumbering
from tallyroll.storage.ext.exchange.readme import entry_of, schema_said
from tallyroll.storage.ext.exchange.registry import format_named
from tallyroll.storage.files.paths import refuse_nothing, translated, user_path
from tallyroll.storage.formats.by_name import FILES, format_at
from tallyroll.storage.formats.space import require_room
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.opened_files import OpenedFiles
from tallyroll.storage.stores.row_writer import RowWriter
from tallyroll.storage.user_code import user_callback

_COPIES: Final = 4
"""Times that a block of rows is in memory at once, at most."""


@dataclass(frozen=True)
class ImportReport:
    """Rows that were imported."""

    path: str
    format: str
    """The short name: ``memmap``, ``hdf5`` or ``zarr``."""
    kind: str
    rows: int
    columns: tuple[str, ...]
    numbered: bool
    """Trajectories were numbered by the flags of their ends: the source has no numbers."""
    lost: dict[str, int]
    """Counts, by reason, of the things that the source has and the storage has not."""


def import_dataset(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    kind: str,
    *,
    format: str | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Write a dataset of another library to a new storage, which is there whole or not at all.

    Sizes are checked before memory or space is taken. Nothing in the source is unpickled or
    executed, and no link in it is followed. Rows get trajectory ids, steps and lane 0 where the
    source has none, by the flags of their ends. Flags of ends that another program wrote as
    numbers, 0 or 1, become bools. The manifest says from which source they came.

    Args:
        source: a file or a folder.
        destination: where the storage will be; nothing may be there.
        kind: the format of the source: a name that `tallyroll export --help` lists.
        format: ``"memmap"``, ``"hdf5"`` or ``"zarr"``; None: by the suffix of ``destination``.
        progress: called now and then with the bytes that were written, and with all.

    Raises:
        InvalidDataset: the source is damaged, hostile, or of another kind; or a flag of an end is
            neither 0 nor 1.
        MissingLibrary: a library is not installed.
        OpenError: a path cannot be opened, or is taken; or another process writes to it.
        StorageFull: the rows do not fit on the disk.
        NotEnoughMemory: a few rows do not fit into memory.
        ValueError: an argument is none of its values.
    """
    return imported(format_named(kind), source, destination, format=format, progress=progress)


@user_callback("import_dataset")
def imported(
    door: ExchangeFormat,
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,
    progress: Progress | None = None,
    said: Mapping[str, str] | None = None,
) -> ImportReport:
    """Write what a door reads of a source to a new storage, as `import_dataset` does.

    ``said`` is what the manifest says of the source where it is another one than ``source``.
    """
    place, whence = user_path(destination), user_path(source)
    name = format_at(place, format)
    refuse_nothing(whence, "Give the path of a dataset.")
    require_free(place)
    with translated(whence), contextlib.ExitStack() as stack:
        incoming = opened_source(door, whence, stack)
        # Rows of our own exports come back as they were.
        of_ours = schema_said(incoming.about) is not None
        with source_errors(whence):
            flags = None if of_ours else EndFlags(incoming.schema)
            numbering = TrajectoryNumbering(incoming.schema if flags is None else flags.schema)
            schema, total = numbering.schema, incoming.rows
            _require_size(whence, incoming, schema)
        files = FILES[name](place.absolute())
        files.check(schema)
        require_room(files, schema, total)
        own = {"kind": door.name, "path": str(whence.absolute()), "version": incoming.version}
        with source_errors(whence):
            entry = entry_of(incoming.about, own | dict(said or {})) | dict(incoming.spaces)
        with written_aside(place) as target:
            opened = OpenedFiles(
                FileReader(FILES[name](target), target, "create"),
                capacity=max(1, total),
                durability="power",
            )
            with contextlib.closing(RowWriter(opened)) as writer:
                writer.runs.create(schema, [entry])
                rows = 0
                for block in _gathered(incoming.blocks, schema):
                    try:
                        with source_errors(whence):
                            block = block if flags is None else flags.of(block)
                            numbered = numbering.of(block)
                        found = writer.given.checked(numbered)
                    except (InvalidDataset, RowsMismatch) as error:
                        raise refused(whence, str(error)) from error
                    rows += len(next(iter(block.values())))
                    if rows > total:
                        break
                    writer.append(found)
                    if progress is not None:
                        progress(rows * schema.row_nbytes, total * schema.row_nbytes)
            if rows != total:
                raise refused(whence, f"it says that it has {total:,} rows, and has others")
    return ImportReport(
        str(place),
        name,
        door.name,
        total,
        tuple(map(format_key, schema.keys)),
        numbering.needed,
        {name: count for name, count in incoming.lost.items() if count},
    )


def _require_size(whence: Path, incoming: Incoming, schema: Schema) -> None:
    if incoming.rows < 0:
        raise refused(whence, f"it says that it has {incoming.rows} rows")
    block = max(schema.row_nbytes, min(BLOCK_NBYTES, incoming.rows * schema.row_nbytes))
    require_memory(
        _COPIES * block, f"rows of {schema.row_nbytes:,} bytes", "Import it on another machine."
    )


def _gathered(blocks: Iterator[Block], schema: Schema) -> Iterator[Block]:
    """Yield larger blocks: each is a commit, which waits for the disk."""
    held: list[Block] = []
    nbytes = 0
    for block in chain(blocks, [None]):
        if block is not None:
            held.append(block)
            nbytes += sum(values.nbytes for values in block.values())
        if held and (block is None or nbytes >= BLOCK_NBYTES):
            first, *others = held
            keys = [key for key in schema.keys if key in first]
            yield (
                first
                if not others
                else {key: np.concatenate([each[key] for each in held]) for key in keys}
            )
            held, nbytes = [], 0
