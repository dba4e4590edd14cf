"""The interface for the checks of a format, and the findings that they report."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

import numpy as np

from tallyroll.storage.ext.dataset_checks.disk import Ranges, filled, with_gaps
from tallyroll.storage.ext.verification.findings import PLACES, Findings, Place
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.rows.progress import Progress

CHECKS: Final[Mapping[str, str]] = {
    "files": "every named file exists and is complete, and no file is a link",
    "metadata": "versions and counts match the data",
    "columns": "every column exists and has one dtype and one shape",
    "rows": "columns that belong together have the same number of rows",
    "episodes": "each episode occurs once, with consecutive rows and its declared length",
    "ids": "no step of a trajectory occurs twice",
    "steps": "steps and indices increase by one",
    "timestamps": "the time between timestamps matches the frame rate",
    "tasks": "every row names a task that exists",
    "ends": "flags are true or false, and no row of an episode follows its end",
    "observations": "the next observation of a row equals the observation of the following row",
    "nan": "observations, actions and rewards contain no NaN and no infinity",
    "spaces": "values are within the spaces that the dataset declares",
    "zeros": "no long run of rows is zero, as if the rows were never written",
    "videos": "videos have one frame per row, at the time of the row",
    "statistics": "the saved statistics match the rows",
}
"""The rule of each check, by name, in the order of the report."""

JSON_LIMIT: Final = 2**28
"""The maximum size in bytes of a metadata file."""


@dataclass(frozen=True, slots=True)
class Where:
    """A part of a dataset, such as a file or an episode, in which findings locate rows."""

    file: str | None = None
    episode: int | None = None
    start: int = 0
    """The number of the first row of the part."""

    def place(self, row: int | None = None, what: str = "", column: str | None = None) -> Place:
        """Return the place of a row in this part, or of the whole part if ``row`` is None."""
        at = None if row is None else self.start + row
        return Place(row=at, column=column, what=what, file=self.file, episode=self.episode)


@dataclass
class CheckResults:
    """The findings, the skipped checks, and the number of rows."""

    findings: Findings = field(default_factory=Findings)
    skipped: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    room: int = 2**62
    """The number of bytes that the datasets of an HDF5 file may still claim; see `hdf5.room_of`."""
    tell: Progress = lambda done, total: None
    """Called with the amount read so far and the total."""

    def add(
        self,
        check: str,
        message: str,
        where: Where | None = None,
        what: str = "",
        column: str | None = None,
        row: int | None = None,
    ) -> None:
        """Add a finding at one place. ``what`` describes the value at this place."""
        place = (where or Where()).place(row, what, column)
        bare = place == Place()
        self.findings.add(check, message, *(() if bare else (place,)))

    def add_rows(
        self,
        check: str,
        message: str,
        wrong: np.ndarray,
        where: Where | None = None,
        column: str | None = None,
        what: Callable[[int], str] = lambda row: "",
    ) -> None:
        """If the mask ``wrong`` [n] selects any rows of a part, add a finding for them."""
        found = np.flatnonzero(wrong)
        if len(found):
            part = where or Where()
            places = [part.place(row, what(row), column) for row in found[:PLACES].tolist()]
            self.findings.add(check, message, *places, count=len(found))


class Checker(ABC):
    """The checks of a format."""

    name: ClassVar[str]
    """The prefix before the colon, as in ``minari:PATH``."""

    checks: ClassVar[tuple[str, ...]]
    """The names of the checks that this class makes. Each is a key of `CHECKS`."""

    @classmethod
    @abstractmethod
    def recognises(cls, place: Path) -> bool:
        """Return True if the files at a path look like a dataset of this format."""

    @abstractmethod
    def check(self, place: Path, found: CheckResults) -> None:
        """Check a dataset and collect findings.

        A missing library or a lack of memory raises an error. The check executes and unpickles
        nothing in the dataset, and follows no link.
        """


class DatasetFolder:
    """The files of a dataset, read without following links. Unreadable files become findings.

    Args:
        root: the folder.
        found: the object that collects the findings.
        unreadable: the byte ranges that the disk cannot read, by path below the folder. A read of
            such a range fails. None means that the ranges are not known: a read then returns zeros
            for bytes that the disk cannot read, and adds a finding.
    """

    def __init__(
        self, root: Path, found: CheckResults, unreadable: Mapping[Path, Ranges] | None = None
    ) -> None:
        self.root, self._inside, self._found = root, Inside(root), found
        self.unreadable = unreadable or {}
        self._known = unreadable is not None
        self._met: set[tuple[Where, int]] = set()

    def path(self, name: str) -> Path | None:
        """Return a path below the folder. If it leads elsewhere, add a finding and return None."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name or not pure.parts:
            self._found.add("files", "a name leads out of the dataset", what=f"{name!r:.200}")
            return None
        return self.root.joinpath(*pure.parts)

    def opened(self, name: str, check: str = "files", where: Where | None = None) -> Any:
        """Open a file for reading. If it is not a regular file, add a finding and return None."""
        path, where = self.path(name), where or Where(name)
        if path is None:
            return None
        try:
            file = self._inside.open(path, os.O_RDONLY)
            if self._known:
                return with_gaps(file, path.relative_to(self.root), self.unreadable)
            return filled(file, lambda start, stop: self._unread(where, start, stop))
        except FileNotFoundError:
            self._found.add(check, "a file is missing", where)
        except OSError as error:
            what = error.strerror or ""
            self._found.add(check, "a file cannot be opened, or is a link", where, what)
        return None

    def _unread(self, where: Where, start: int, stop: int) -> None:
        if (where, start) not in self._met:
            self._met.add((where, start))
            message = "the disk cannot read a part of a file: the other checks see zeros there"
            self._found.add("files", message, where, f"bytes {start:,} to {stop - 1:,}")

    def text(self, name: str) -> str | None:
        """Return the text of a file. If it cannot be read, add a finding and return None."""
        file = self.opened(name)
        if file is None:
            return None
        with file:
            if os.fstat(file.fileno()).st_size > JSON_LIMIT:
                self._found.add("files", "a text file is too large to be read", Where(name))
                return None
            try:
                found: str = file.read().decode()
                return found
            except (UnicodeDecodeError, OSError) as error:
                self._found.add("files", "a file cannot be read", Where(name), str(error))
                return None

    def json(self, name: str) -> Any:
        """Return the JSON value of a file. If it cannot be read, add a finding and return None."""
        text = self.text(name)
        return None if text is None else self.parsed(text, name)

    def parsed(self, text: str, name: str, row: int | None = None) -> Any:
        """Parse JSON. If the text is invalid, add a finding and return None."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self._found.add(
                "files",
                "a text is not valid JSON, or is truncated",
                Where(name),
                str(error),
                row=row,
            )
            return None

    def below(self, name: str, suffix: str) -> list[str]:
        """Return the sorted paths of the files below the folder ``name`` that end with a suffix."""
        found = []
        top = self.root / name
        for above, folders, files in os.walk(top, followlinks=False):
            for each in list(folders):
                if os.path.islink(os.path.join(above, each)):
                    folders.remove(each)
            for each in files:
                if each.endswith(suffix):
                    found.append(os.path.relpath(os.path.join(above, each), self.root))
        return sorted(found)


def declared_count(value: Any) -> int | None:
    """Return a count from metadata, or None if the value is not a count."""
    return value if type(value) is int and 0 <= value < 2**62 else None


def text_of(value: Any) -> str:
    """Format a value of a source for a message."""
    return f"{value!r:.80}"
