"""Build the cards of storages and of exports."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.ext.card.page import UNKNOWN, Card
from tallyroll.storage.ext.exchange.base import ExchangeFormat, opened_source, refused
from tallyroll.storage.ext.exchange.readme import (
    flat_runs,
    recorded_counts,
    recorded_omissions,
    recorded_runs,
    recorded_spaces,
)
from tallyroll.storage.ext.exchange.registry import format_named
from tallyroll.storage.ext.exchange.sidecar import saved_statistics
from tallyroll.storage.files.copied_runs import is_deep, runs_left_out
from tallyroll.storage.files.paths import refuse_nothing, translated, user_path
from tallyroll.storage.files.safe_files import Inside, open_file
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.readers.spaces import spaces_of
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import TERMINATED, format_key
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.columns import WHOSE, missing
from tallyroll.storage.trajectories.episodes import END_NAMES
from tallyroll.storage.trajectories.leaves import hash_of

_LOADING = """\
from tallyroll.storage import open_storage

with open_storage({path!r}) as storage:
    rows = storage.get(slice(0, 10))"""


def card_of(reader: RowReader, licence: str | None, progress: Progress | None) -> Card:
    """Return the card of the current rows; see `DiskStorage.card`."""
    total, done = len(reader) * reader.schema.row_nbytes, 0

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total)

    def made() -> Card:
        schema = reader.schema
        whose = not missing(schema, (*WHOSE, TERMINATED))
        ends: Counter[str] = Counter()
        if whose:
            ends.update(END_NAMES[end] for end in reader.trajectories.table["end"].tolist())
        spaces = spaces_of(reader.runs, schema)
        kept, _ = saved_statistics(reader, schema, len(reader), ())
        return Card(
            name=reader.path.name,
            kind=str(reader.manifest["format"]).removeprefix("tallyroll."),
            rows=len(reader),
            columns=[
                {
                    "name": format_key(c.key),
                    "dtype": c.dtype_name,
                    "shape": list(c.shape),
                    "space": spaces.get(c.key),
                }
                for c in schema.columns
            ],
            trajectories=ends.total() if whose else None,
            ends=dict(ends),
            runs=flat_runs(reader.runs),
            runs_omitted=sum(map(runs_left_out, reader.runs)),
            statistics=kept,
            hashes={"content": hash_of(reader, progress=tell)} if whose else {},
            licence=licence or UNKNOWN,
            loading=_LOADING.format(path=reader.path.name),
        )

    return read_consistently(reader, made)


PAGE: Final = "README.md"
"""The file name of a card in a folder. The hash of a folder excludes this file."""
_IMPORTED = """\
from tallyroll.storage import import_dataset

import_dataset(PATH, "rows", KIND)"""


def export_card(path: str | os.PathLike[str], kind: str, *, licence: str | None = None) -> Card:
    """Return the card of a dataset in a format of another library.

    The card is built from the columns, and from the metadata if the dataset is a Tallyroll export.
    All files are read to compute their hash. Reading unpickles and executes nothing and follows no
    link.

    Args:
        path: the path of the dataset, a file or a folder.
        kind: the format, as `import_dataset` takes it.
        licence: a licence such as ``"apache-2.0"``. None means that the licence is unknown.

    Raises:
        InvalidDataset: the dataset is damaged, hostile, or of another kind.
        MissingLibrary: a library is not installed.
        OpenError: the path cannot be opened.
        ValueError: the kind is unknown.
    """
    door, place = format_named(kind), user_path(path)
    refuse_nothing(place, "Give the path of a dataset.")
    with translated(place), contextlib.ExitStack() as stack:
        found = opened_source(door, place, stack)
        if is_deep(found.about):
            raise refused(place, "its metadata are nested too deep")
        return card_of_export(
            door,
            Path(os.path.abspath(place)).name,
            found.schema,
            found.rows,
            found.about,
            place,
            licence,
        )


def card_of_export(
    door: ExchangeFormat,
    name: str,
    schema: Schema,
    rows: int,
    about: Mapping[str, Any] | None,
    place: Path,
    licence: str | None = None,
) -> Card:
    """Return the card of an export whose files at ``place`` are complete."""
    counts, statistics = recorded_counts(about), about.get("statistics") if about else None
    spaces = recorded_spaces(about, schema)
    loading = (door.loading or _IMPORTED).replace("PATH", repr(name))
    return Card(
        name=name,
        kind=door.name,
        rows=rows,
        columns=[
            {
                "name": shown,
                "said": format_key(column.key),
                "dtype": column.dtype_name,
                "shape": list(column.shape),
                "space": spaces.get(column.key),
            }
            for shown, column in zip(door.names(schema), schema.columns, strict=True)
        ],
        trajectories=sum(counts.values()) if counts else None,
        ends=counts,
        runs=recorded_runs(about),
        runs_omitted=recorded_omissions(about),
        statistics=statistics if isinstance(statistics, dict) else {},
        hashes={"files": hash_of_files(place)},
        licence=licence or UNKNOWN,
        loading=loading.replace("KIND", repr(door.name)),
        data_files=door.data_files,
    )


def hash_of_files(place: Path) -> str:
    """Return the SHA-256 of a file, or of the list of files in a folder.

    The list has one line per file, sorted by path, in the format of ``sha256sum``. It excludes the
    card.

    Raises:
        InvalidDataset: a file is a link, or not a regular file.
    """
    if not place.is_dir():
        return _hash(place, None)
    paths = sorted(_files_in(place), key=os.fsencode)
    lines = [f"{_hash(place / path, Inside(place))}  {path}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _files_in(place: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(place):
        links = [each for each in folders if Path(folder, each).is_symlink()]
        for name in [*names, *links]:
            if (path := str(Path(folder, name).relative_to(place))) != PAGE:
                yield path


def _hash(path: Path, inside: Inside | None) -> str:
    try:
        file = open_file(path, os.O_RDONLY) if inside is None else inside.open(path, os.O_RDONLY)
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise refused(path, f"it cannot be hashed ({error.strerror})") from error
