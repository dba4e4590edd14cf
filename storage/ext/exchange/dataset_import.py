"""Import a dataset of another library into a new storage, completely or not at all."""

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
from tallyroll.storage.ext.atomic_create import atomic_creation, require_free
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
from tallyroll.storage.ext.exchange.readme import entry_of, recorded_schema
from tallyroll.storage.ext.exchange.registry import format_named
from tallyroll.storage.files.paths import refuse_nothing, translated, user_path
from tallyroll.storage.formats.by_name import FILES, format_at
from tallyroll.storage.formats.space import require_room
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.pages import Page, PageSource
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.opened_files import OpenedFiles
from tallyroll.storage.stores.row_writer import RowWriter
from tallyroll.storage.user_code import user_callback

_COPIES: Final = 4
"""The maximum number of copies of a block of rows in memory at once."""


@dataclass(frozen=True)
class ImportReport(PageSource):
    """The result of an import."""

    path: str
    format: str
    """The short name of the storage format: ``memmap``, ``hdf5`` or ``zarr``."""
    kind: str
    rows: int
    columns: tuple[str, ...]
    numbered: bool
    """True if the source had no trajectory numbers, and the import derived them from end flags."""
    lost: dict[str, int]
    """The number of items of the source that the storage lacks, by reason."""

    def _show_on_(self, page: Page) -> None:
        show_import(self, page)


def show_import(report: ImportReport, page: Page, source: str = "") -> None:
    """Write a report to a page; ``source`` is the path of the dataset."""
    of = f" of {source}" if source else ""
    page.print(
        f"{report.path}: {report.rows:,} rows{of} written ({report.format}, "
        f"{len(report.columns)} columns)"
    )
    if report.numbered:
        page.print("trajectories are numbered by the flags of their ends")
    for name, count in report.lost.items():
        page.print(f"lost: {name.replace('_', ' ')}: {count:,}")


def import_dataset(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    kind: str,
    *,
    format: str | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a dataset of another library into a new storage, completely or not at all.

    The import checks all sizes before it takes memory or space. It unpickles and executes nothing
    in the source and follows no link in it. If the source has no trajectory ids, the import adds
    ids and steps from the end flags, and lane 0. End flags that another program wrote as numbers, 0
    or 1, become bools. The manifest records the source.

    Args:
        source: a file or a folder.
        destination: the path of the new storage; it must not exist.
        kind: the name of the source's format; `tallyroll export --help` lists the names.
        format: ``"memmap"``, ``"hdf5"`` or ``"zarr"``. None selects by the suffix of
            ``destination``.
        progress: called after each block with the number of bytes written and the total.

    Raises:
        InvalidDataset: the source is damaged, hostile, or of another kind; or an end flag is
            neither 0 nor 1.
        MissingLibrary: a library is not installed.
        OpenError: a path cannot be opened, is taken, or is in use by a process that writes to it.
        StorageFull: the rows do not fit on the disk.
        NotEnoughMemory: a block of rows does not fit into memory.
        ValueError: an argument has a value that is not allowed.
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
    """Import a source with the given format, as `import_dataset` does.

    ``said`` overrides fields of the source's description in the manifest. It serves callers whose
    ``source`` stands in for another dataset, such as the repaired copy of a damaged one.
    """
    place, whence = user_path(destination), user_path(source)
    name = format_at(place, format)
    refuse_nothing(whence, "Give the path of a dataset.")
    require_free(place)
    with translated(whence), contextlib.ExitStack() as stack:
        incoming = opened_source(door, whence, stack)
        # Rows of Tallyroll's own exports are imported unchanged.
        of_ours = recorded_schema(incoming.about) is not None
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
            entry = entry_of(incoming.about, own | dict(said or {}), files.copies_nbytes)
            entry |= dict(incoming.spaces)
        with atomic_creation(place) as target:
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
                        found = writer.input_rows.checked(numbered)
                    except (InvalidDataset, RowsMismatch) as error:
                        raise refused(whence, str(error)) from error
                    rows += len(next(iter(block.values())))
                    if rows > total:
                        break
                    writer.append(found)
                    if progress is not None:
                        progress(rows * schema.row_nbytes, total * schema.row_nbytes)
            if rows != total:
                raise refused(whence, f"it declares {total:,} rows, but contains another number")
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
        raise refused(whence, f"it declares {incoming.rows} rows, expected 0 or more")
    block = max(schema.row_nbytes, min(BLOCK_NBYTES, incoming.rows * schema.row_nbytes))
    require_memory(
        _COPIES * block,
        f"rows of {schema.row_nbytes:,} bytes",
        "Import the dataset on a machine with more memory.",
    )


def _gathered(blocks: Iterator[Block], schema: Schema) -> Iterator[Block]:
    """Merge blocks into larger ones, because each block is a commit and waits for the disk."""
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
