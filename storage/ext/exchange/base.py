"""The interface for formats of other libraries: export rows to a format and import them from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tallyroll.storage.engine.available_memory import out_of_memory_error
from tallyroll.storage.errors import (
    InvalidDataset,
    InvalidSchema,
    StorageError,
)
from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Schema

Block = dict[Key, np.ndarray]
"""Consecutive rows: one array [rows, ...] per column, as `ColumnReader` returns them."""


@dataclass
class Incoming:
    """Rows of a source. The format checks the source's sizes before it reads any row."""

    schema: Schema
    rows: int
    blocks: Iterator[Block]
    """All rows in order, a few megabytes per block."""
    about: Mapping[str, Any] | None = None
    """The metadata that the export wrote with the rows, unvalidated: it may hold anything."""
    version: str = ""
    """The version of the format, as the source declares it."""
    lost: dict[str, int] = field(default_factory=dict)
    """The number of items in the source that a storage cannot hold, by reason."""
    spaces: Mapping[str, Any] = field(default_factory=dict)
    """The spaces that a source of another program declares, as fields of a run's manifest entry."""


class ExchangeFormat(ABC):
    """A file format of other libraries.

    A subclass is registered as an entry point of the group ``tallyroll.exchange`` under its
    ``name``. `tallyroll.storage.testing.ExchangeContract` tests it.
    """

    name: ClassVar[str]
    """The prefix before the colon, as in ``parquet:rows.parquet``."""

    extra: ClassVar[str | None] = None
    """The extra of ``pip install "tallyroll[...]"`` that installs the format's library."""

    sorted: ClassVar[bool] = False
    """True if rows are written one trajectory after another."""

    suffix: ClassVar[str] = ""
    """The suffix that the name of a single-file export should have, such as ``.npz``."""

    loading: ClassVar[str] = ""
    """Lines of Python that open an export with the format's own library.

    ``PATH`` stands for the path of the export. A card shows these lines.
    """

    data_files: ClassVar[str] = ""
    """The glob pattern of the Parquet files in an export, which a hub shows as a table."""

    compressed: ClassVar[bool] = False
    """True if the format may store rows in far fewer bytes than they take in memory."""

    options: ClassVar[type | None] = None
    """The class of the format's export options, or None if it has none."""

    def __init__(self, chosen: Any = None) -> None:
        self.chosen = chosen
        """The options of an export, an instance of `options`. None selects the defaults."""

    def check(self, schema: Schema) -> None:  # noqa: B027 - most formats hold all
        """Raise `InvalidSchema` for columns that the format cannot hold at all."""

    def names(self, schema: Schema) -> list[str]:
        """Return the names of the columns in an export."""
        return [format_key(key) for key in schema.keys]

    @abstractmethod
    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write rows to ``place``, a file or folder that does not exist yet.

        Returns:
            The number of items that the export lost, by reason.
        """

    @abstractmethod
    def read(self, place: Path) -> AbstractContextManager[Incoming]:
        """Open a source and check its sizes. Leaving the context closes the source.

        Reading executes nothing in the source and follows no link in it.

        Raises:
            InvalidDataset: the source is damaged, hostile, or of another format.
        """


def opened_source(door: ExchangeFormat, whence: Path, stack: ExitStack) -> Incoming:
    """Open a source and keep it open until ``stack`` closes.

    Reading a block raises `InvalidDataset` if that part of the source is damaged.

    Raises:
        InvalidDataset: the source is damaged, or has columns that no storage can have.
    """
    with source_errors(whence):
        try:
            found = stack.enter_context(door.read(whence))
        except InvalidSchema as error:
            raise refused(whence, str(error)) from error
        except FileNotFoundError as error:
            raise refused(whence, f"{error.filename} is missing") from error
    found.blocks = _guarded(found.blocks, whence)
    return found


def _guarded(blocks: Iterator[Block], whence: Path) -> Iterator[Block]:
    while True:
        with source_errors(whence):
            block = next(blocks, None)
        if block is None:
            return
        yield block


class _CallerError(BaseException):
    """Carries an error of the caller's own function past `source_errors`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def source_errors(place: Path) -> Iterator[None]:
    """Convert errors that a damaged or hostile source causes in a library to Tallyroll's errors.

    Formats check the data that they read and name the part that is wrong. This function is the
    fallback for content that no format expects, such as a column of another type or a count that is
    a string.

    Raises:
        InvalidDataset: the source causes an error.
        NotEnoughMemory: a library could not allocate memory.
    """
    try:
        yield
    except _CallerError as carried:
        raise carried.error from carried.error.__cause__
    except (StorageError, OSError):
        raise
    except MemoryError as error:
        raise out_of_memory_error(str(place), error) from error
    except Exception as error:
        raise refused(place, f"{type(error).__name__}: {error!s:.300}") from error


def carried(progress: Progress) -> Progress:
    """Wrap ``progress`` so that `source_errors` does not convert its errors."""

    def call(done: int, total: int) -> object:
        try:
            return progress(done, total)
        except Exception as error:
            raise _CallerError(error) from error

    return call


def refused(place: Path, why: str) -> InvalidDataset:
    """Return the error for a source that cannot be imported."""
    begin = f"{place} cannot be imported: "
    return InvalidDataset(
        why if why.startswith(begin) else f"{begin}{why:.600}. Nothing was written."
    )
