"""The door behind which the checks of a format are, and what all of them report by."""

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
    "files": "every file that is named is there, whole, and no link",
    "metadata": "versions and counts are those of the data",
    "columns": "every column is there, of one dtype and one shape",
    "rows": "columns that belong together have equally many rows",
    "episodes": "episodes are there once each, next to one another, as long as they say",
    "ids": "no step of a trajectory is there twice",
    "steps": "steps and indices count by one",
    "timestamps": "timestamps follow one another by the rate of frames",
    "tasks": "every row names a task that there is",
    "ends": "flags are true or false, and nothing follows an end",
    "observations": "each row begins with what the one before says came next",
    "nan": "no NaN, and no infinity, in observations, actions and rewards",
    "spaces": "values are within the spaces that the dataset names",
    "zeros": "no rows that look as if they were never written",
    "videos": "films have a frame for each row, at its time",
    "statistics": "the statistics that are kept are those of the rows",
}
"""The checks by name, with the rule of each, in the order of the report."""

JSON_LIMIT: Final = 2**28
"""Bytes of a text of metadata that is read."""


@dataclass(frozen=True, slots=True)
class Where:
    """A part of a dataset: how its rows are named in findings."""

    file: str | None = None
    episode: int | None = None
    start: int = 0
    """The number of its first row."""

    def place(self, row: int | None = None, what: str = "", column: str | None = None) -> Place:
        """Return the place of a row of the part, or of all of it."""
        at = None if row is None else self.start + row
        return Place(row=at, column=column, what=what, file=self.file, episode=self.episode)


@dataclass
class CheckResults:
    """Findings, the checks that were not made, and the count of rows."""

    findings: Findings = field(default_factory=Findings)
    skipped: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    room: int = 2**62
    """Bytes that further datasets of a file may have, by the bytes that the file has."""
    tell: Progress = lambda done, total: None
    """Called with the bytes that were read, and with all."""

    def add(
        self,
        check: str,
        message: str,
        where: Where | None = None,
        what: str = "",
        column: str | None = None,
        row: int | None = None,
    ) -> None:
        """Add a finding at one place; ``what`` is the value there."""
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
        """Add a finding for the rows of a part that are ``wrong`` [n]."""
        found = np.flatnonzero(wrong)
        if len(found):
            part = where or Where()
            places = [part.place(row, what(row), column) for row in found[:PLACES].tolist()]
            self.findings.add(check, message, *places, count=len(found))


class Checker(ABC):
    """The checks of a format."""

    name: ClassVar[str]
    """The word before the colon, as in ``minari:PATH``."""

    checks: ClassVar[tuple[str, ...]]
    """The names in `CHECKS` of those that it makes."""

    @classmethod
    @abstractmethod
    def recognises(cls, place: Path) -> bool:
        """Return whether the names of files say that a dataset is of this format."""

    @abstractmethod
    def check(self, place: Path, found: CheckResults) -> None:
        """Look at a dataset, and gather what is wrong with it.

        What the caller's machine lacks is raised: a library, memory. Nothing in the dataset is
        executed or unpickled, no link in it is followed.
        """


class DatasetFolder:
    """The files of a dataset, read through no link; a finding says which cannot be read.

    Args:
        root: the folder.
        found: gets the findings.
        unreadable: the ranges that a disk cannot read, by the paths of files below it: reads of
            them fail. None: they are not known, are zeros where they are met, and findings.
    """

    def __init__(
        self, root: Path, found: CheckResults, unreadable: Mapping[Path, Ranges] | None = None
    ) -> None:
        self.root, self._inside, self._found = root, Inside(root), found
        self.unreadable = unreadable or {}
        self._known = unreadable is not None
        self._met: set[tuple[Where, int]] = set()

    def path(self, name: str) -> Path | None:
        """Return a path below the folder; None, and a finding, of one that leads elsewhere."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name or not pure.parts:
            self._found.add("files", "a name leads out of the dataset", what=f"{name!r:.200}")
            return None
        return self.root.joinpath(*pure.parts)

    def opened(self, name: str, check: str = "files", where: Where | None = None) -> Any:
        """Return a file, open to read; None, and a finding, if it is no plain file of its own."""
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
            message = "the disk cannot read a part of a file: it is zeros for what follows"
            self._found.add("files", message, where, f"bytes {start:,} to {stop - 1:,}")

    def text(self, name: str) -> str | None:
        """Return the text of a file; None, and a finding, if it cannot be read."""
        file = self.opened(name)
        if file is None:
            return None
        with file:
            if os.fstat(file.fileno()).st_size > JSON_LIMIT:
                self._found.add("files", "a text is too large to be read", Where(name))
                return None
            try:
                found: str = file.read().decode()
                return found
            except (UnicodeDecodeError, OSError) as error:
                self._found.add("files", "a file cannot be read", Where(name), str(error))
                return None

    def json(self, name: str) -> Any:
        """Return the value of a file; None, and a finding, if it cannot be read."""
        text = self.text(name)
        return None if text is None else self.parsed(text, name)

    def parsed(self, text: str, name: str, row: int | None = None) -> Any:
        """Return the value of a text; None, and a finding, if it is no JSON."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self._found.add(
                "files", "a text is no JSON, or is torn", Where(name), str(error), row=row
            )
            return None

    def below(self, name: str, suffix: str) -> list[str]:
        """Return the names of files with an ending, below a folder, sorted."""
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


def count_said(value: Any) -> int | None:
    """Return a count that metadata say; None if it is none."""
    return value if type(value) is int and 0 <= value < 2**62 else None


def text_of(value: Any) -> str:
    """Return a value of a source as it is shown."""
    return f"{value!r:.80}"
