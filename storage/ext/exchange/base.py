"""The door behind which a format of other libraries is: rows go out by it, and come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tallyroll.storage.engine.available_memory import no_memory
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
"""Rows that follow one another, an array [rows, ...] a column, as `ColumnReader` gives them."""


@dataclass
class Incoming:
    """Rows of a source, whose sizes were checked before one of them was read."""

    schema: Schema
    rows: int
    blocks: Iterator[Block]
    """All rows in their order, a few megabytes at a time."""
    about: Mapping[str, Any] | None = None
    """The text that the export wrote beside the rows, as it was found: it may be anything."""
    version: str = ""
    """The format's version, as the source says."""
    lost: dict[str, int] = field(default_factory=dict)
    """Counts, by reason, of the things that the source has and no storage of ours gets."""
    spaces: Mapping[str, Any] = field(default_factory=dict)
    """The spaces that a source of another program says, as a run's entry has them."""


class ExchangeFormat(ABC):
    """A format of other libraries.

    A subclass is an entry point of the group ``tallyroll.exchange``, named as its ``name``.
    `tallyroll.storage.testing.ExchangeContract` tests it.
    """

    name: ClassVar[str]
    """The word before the colon, as in ``parquet:rows.parquet``."""

    extra: ClassVar[str | None] = None
    """The extra of ``pip install 'tallyroll[...]'`` that has its library."""

    sorted: ClassVar[bool] = False
    """Rows are written one trajectory after the other."""

    suffix: ClassVar[str] = ""
    """The end that the name of an export should have, of a format of one file, as ``.npz``."""

    loading: ClassVar[str] = ""
    """Lines of Python that open an export with the format's own library, in which ``PATH`` means
    its path; a card shows them."""

    data_files: ClassVar[str] = ""
    """The pattern of the files of Parquet in an export, which a hub shows as a table."""

    compressed: ClassVar[bool] = False
    """Rows may take far fewer bytes than they have."""

    options: ClassVar[type | None] = None
    """The class of the choices that an export takes, if there are any."""

    def __init__(self, chosen: Any = None) -> None:
        self.chosen = chosen
        """The choices of an export, of the class `options`; None: its defaults."""

    def check(self, schema: Schema) -> None:  # noqa: B027 - most hold all columns
        """Raise `InvalidSchema` for columns that the format cannot hold at all."""

    def names(self, schema: Schema) -> list[str]:
        """Return the names that columns have in an export."""
        return [format_key(key) for key in schema.keys]

    @abstractmethod
    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write rows to ``place``, where nothing is: a file or a folder.

        Return what was lost: how many of each.
        """

    @abstractmethod
    def read(self, place: Path) -> AbstractContextManager[Incoming]:
        """Open a source, and check its sizes; the context closes it.

        Nothing in it is executed, and no link in it is followed.

        Raises:
            InvalidDataset: it is damaged, hostile, or of another format.
        """


def opened_source(door: ExchangeFormat, whence: Path, stack: ExitStack) -> Incoming:
    """Open a source until ``stack`` ends; its blocks raise `InvalidDataset` where it is damaged.

    Raises:
        InvalidDataset: it is damaged, or has columns that no storage can have.
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
    """Raise errors that a damaged or hostile source causes in a library as errors of ours.

    Formats check what they read, and name the part that is wrong. This is the fallback for all
    that a source can say and no format expects: a column of another type, a count that is a text.

    Raises:
        InvalidDataset: the source causes an error.
        NotEnoughMemory: a library did not get the memory that it asked for.
    """
    try:
        yield
    except _CallerError as carried:
        raise carried.error from carried.error.__cause__
    except (StorageError, OSError):
        raise
    except MemoryError as error:
        raise no_memory(str(place), error) from error
    except Exception as error:
        raise refused(place, f"{type(error).__name__}: {error!s:.300}") from error


def carried(progress: Progress) -> Progress:
    """Return a function whose errors pass `source_errors` as they are."""

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
