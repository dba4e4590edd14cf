"""The file that says how many rows of each shard count: lines are appended, and never changed.

A row counts if and only if a line names it. Each line has a checksum, so that one which a killed
process left half written is seen and passed over: the rows that it would have named do not count.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.files.paths import failed
from tallyroll.storage.files.safe_files import Inside, write_all

NAME: Final = re.compile(r"[0-9]{6}-[0-9a-f]{8}")
"""The name of a shard's folder: no path leads out of it."""

_LIMIT: Final = 2**26
_WRITTEN_AGAIN: Final = 2**20
"""Bytes after which the lines are put together into few."""
_MOST_ROWS: Final = 2**48


@dataclass(frozen=True, slots=True)
class KeptShard:
    """A shard, and which of its rows count: the first ones."""

    name: str
    host: str
    """The node that it was written on."""
    rows: int


@dataclass
class Acknowledged:
    """The rows that count, in the order of their shards, and the newest record of the run."""

    shards: list[KeptShard] = field(default_factory=list)
    record: tuple[int, bytes] | None = None
    """The rows that counted when it was written, and its payload."""
    rows: int = 0
    """All rows that count."""
    numbers: dict[str, int] = field(default_factory=dict)
    """The number of each shard, by its name."""

    def take(self, line: Any) -> None:
        """Take over what a line says; raise ValueError if it cannot be right."""
        if not isinstance(line, dict):
            raise TypeError("a line is no mapping")
        for each in line.get("shards", ()):
            shard = _shard(each)
            if self.numbers.setdefault(shard.name, len(self.shards)) != len(self.shards):
                raise ValueError(f"{shard.name} is there twice")
            self.shards.append(shard)
            self.rows += shard.rows
        for spelt, rows in line.get("rows", {}).items():
            if not 0 <= (number := int(spelt)) < len(self.shards):
                raise ValueError(f"no shard {number}")
            before = self.shards[number]
            self.shards[number] = _shard([before.name, before.host, rows])
            self.rows += rows - before.rows
        if (record := line.get("record")) is not None:
            self.record = self.rows, str(record).encode()

    def line(self) -> dict[str, Any]:
        """Return a line that says all of it."""
        shards = [[each.name, each.host, each.rows] for each in self.shards]
        said: dict[str, Any] = {"shards": shards}
        return said if self.record is None else {**said, "record": self.record[1].decode()}


def _shard(said: Any) -> KeptShard:
    name, host, rows = said
    if not (isinstance(name, str) and NAME.fullmatch(name) and isinstance(host, str)):
        raise ValueError(f"a shard called {name!r:.100}")
    if type(rows) is not int or not 0 <= rows < _MOST_ROWS:
        raise ValueError(f"{rows!r:.100} rows")
    return KeptShard(name, host, rows)


def _spelt(line: Mapping[str, Any]) -> bytes:
    content = json.dumps(line).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def read_acknowledged(inside: Inside, path: Path) -> tuple[Acknowledged, int]:
    """Return what the file says, and the bytes of its whole lines.

    Raises:
        CorruptStorage: a line before the last one is damaged, or the file is too large.
    """
    try:
        content = inside.read(path, _LIMIT)
    except FileNotFoundError:
        return Acknowledged(), 0
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise failed(path, error, 0) from error
        raise _damaged(path, error.strerror or "too large") from error
    found, good = Acknowledged(), 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1]):
        try:
            if zlib.crc32(line[9:]) != int(line[:8], 16):
                raise ValueError("its checksum does not fit")
            found.take(json.loads(line[9:]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise _damaged(path, f"line {number + 1}: {error}") from error
        good += len(line) + 1
    return found, good


def _damaged(path: Path, why: str) -> CorruptStorage:
    return CorruptStorage(
        f"{path} is damaged ({why}): it says which rows count. Restore it from a copy."
    )


class AcknowledgedFile:
    """Appends to the file; one process at a time.

    Args:
        inside: the folder.
        path: of the file in it.
    """

    def __init__(self, inside: Inside, path: Path) -> None:
        self._inside, self._path = inside, path
        self.said, self._good = read_acknowledged(inside, path)
        self._file = -1
        self._open()

    def _open(self) -> None:
        self.close()
        self._file = self._inside.open(self._path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._file, self._good)  # what a killed process left half written

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line; all of it counts afterwards, or nothing.

        Raises:
            StorageFull, DiskFailed: it could not be written.
        """
        content = _spelt(line)
        try:
            write_all(self._file, content, self._good)
        except BaseException as error:
            os.ftruncate(self._file, self._good)
            if isinstance(error, OSError):
                raise failed(self._path, error, len(content)) from error
            raise
        self._good += len(content)
        self.said.take(line)
        if self._good > _WRITTEN_AGAIN + 2 * len(_spelt(self.said.line())):
            self._write_again()

    def lose(self, numbers: Sequence[int]) -> None:
        """Let no row of these shards count any more; the record stays as it is."""
        self.append({"rows": {str(number): 0 for number in numbers}})

    def _write_again(self) -> None:
        content = _spelt(self.said.line())
        self._inside.write_aside(self._path, content)
        self._good = len(content)
        self._open()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
