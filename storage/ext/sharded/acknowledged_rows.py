"""Append-only file that records how many rows of each shard are acknowledged.

A row counts if and only if a line acknowledges it. Each line has a checksum, which detects damage.
A killed process may leave an incomplete last line without a newline. Readers skip it, so the rows
that it would have acknowledged do not count.
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
from tallyroll.storage.files.run_record import record_without
from tallyroll.storage.files.safe_files import Inside, write_all

NAME: Final = re.compile(r"[0-9]{6}-[0-9a-f]{8}")
"""Pattern of shard folder names, which cannot lead out of the storage's folder."""

_LIMIT: Final = 2**26
_WRITTEN_AGAIN: Final = 2**20
"""Size in bytes above which the lines are compacted."""
_MOST: Final = 2**48
SUMS: Final = ("random", "ticks", "reset_ticks", "episodes_complete", "agent_transitions")
"""Counts of a ledger that are sums over the run's rows. A lost shard reduces them by its part."""


@dataclass(frozen=True, slots=True)
class ShardRows:
    """A shard and the number of its acknowledged rows, which are its first rows."""

    name: str
    host: str
    """The node on which the shard was written."""
    id: str
    """The id in the shard's manifest. A different id means that another storage is in its place."""
    rows: int
    sums: tuple[int, ...] = (0,) * len(SUMS)
    """The shard's part of the counts in :data:`SUMS`."""

    @classmethod
    def of(cls, said: Any) -> ShardRows:
        """Parse a shard's entry in a line; raise ValueError or TypeError if it is invalid."""
        name, host, id, rows, *sums = said
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise ValueError(f"invalid shard name {name!r:.100}")
        if not (isinstance(host, str) and isinstance(id, str)):
            raise TypeError(f"host and id: expected strings, got {host!r:.100} and {id!r:.100}")
        if len(sums) != len(SUMS):
            raise ValueError(f"expected a number for each count, got {len(sums)} counts")
        for count in (rows, *sums):
            if type(count) is not int or not 0 <= count < _MOST:
                raise ValueError(f"invalid number of rows, or invalid count: {count!r:.100}")
        return cls(name, host, id, rows, tuple(sums))

    @property
    def numbers(self) -> list[int]:
        """The number of rows and the counts, in the order in which a line lists them."""
        return [self.rows, *self.sums]


@dataclass
class AcknowledgedRows:
    """The acknowledged rows by shard, and the latest record of the run."""

    shards: list[ShardRows] = field(default_factory=list)
    record: tuple[int, bytes] | None = None
    """The number of acknowledged rows when the record was written, and the record's payload."""
    rows: int = 0
    """The total number of acknowledged rows."""
    numbers: dict[str, int] = field(default_factory=dict)
    """The index of each shard by name."""

    def take(self, line: Any) -> None:
        """Apply a line; raise ValueError or TypeError if it is invalid."""
        if not isinstance(line, dict):
            raise TypeError("the line is not a JSON object")
        for each in line.get("shards", ()):
            shard = ShardRows.of(each)
            if self.numbers.setdefault(shard.name, len(self.shards)) != len(self.shards):
                raise ValueError(f"shard {shard.name} occurs twice")
            self.shards.append(shard)
            self.rows += shard.rows
        for spelt, numbers in line.get("rows", {}).items():
            if not 0 <= (number := int(spelt)) < len(self.shards):
                raise ValueError(f"unknown shard number {number}")
            before = self.shards[number]
            now = ShardRows.of([before.name, before.host, before.id, *numbers])
            self.shards[number] = now
            self.rows += now.rows - before.rows
        if (record := line.get("record")) is not None:
            self.record = self.rows, str(record).encode()

    def line(self) -> dict[str, Any]:
        """Return one line that contains the complete state."""
        shards = [[each.name, each.host, each.id, *each.numbers] for each in self.shards]
        said: dict[str, Any] = {"shards": shards}
        return said if self.record is None else {**said, "record": self.record[1].decode()}


def _spelt(line: Mapping[str, Any]) -> bytes:
    content = json.dumps(line).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def read_acknowledged(inside: Inside, path: Path) -> tuple[AcknowledgedRows, int]:
    """Parse the file; return its state and the size in bytes of its complete lines.

    Raises:
        CorruptStorage: a complete line is damaged, or the file is too large.
    """
    try:
        content = inside.read(path, _LIMIT)
    except FileNotFoundError:
        return AcknowledgedRows(), 0
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise failed(path, error, 0) from error
        raise _damaged(path, error.strerror or "too large") from error
    found, good = AcknowledgedRows(), 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1]):
        try:
            if zlib.crc32(line[9:]) != int(line[:8], 16):
                raise ValueError("the checksum does not match")
            found.take(json.loads(line[9:]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise _damaged(path, f"line {number + 1}: {error}") from error
        good += len(line) + 1
    return found, good


def _damaged(path: Path, why: str) -> CorruptStorage:
    return CorruptStorage(
        f"{path} is damaged ({why}). This file records which rows are acknowledged. Restore the "
        "file from a copy."
    )


class AcknowledgedFile:
    """Writer that appends lines to the file; only one process may use it at a time.

    Args:
        inside: the folder.
        path: the path of the file in the folder.
    """

    def __init__(self, inside: Inside, path: Path) -> None:
        self._inside, self._path = inside, path
        self.acknowledged, self._good = read_acknowledged(inside, path)
        self._again_at = _WRITTEN_AGAIN
        self._file = -1
        self._open()

    def _open(self) -> None:
        self.close()
        self._file = self._inside.open(self._path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._file, self._good)  # remove the incomplete line of a killed process

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line atomically.

        Raises:
            StorageFull, DiskFailed: the line could not be written.
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
        self.acknowledged.take(line)
        if self._good > self._again_at:
            self._write_again()

    def lose(self, numbers: Sequence[int]) -> None:
        """Revoke all rows of some shards, and subtract their part from the sums of the record.

        The number of stored rows in the record is unchanged, so the difference counts as lost.
        """
        shards = [self.acknowledged.shards[number] for number in numbers]
        line: dict[str, Any] = {"rows": {str(number): [0] * (1 + len(SUMS)) for number in numbers}}
        if self.acknowledged.record is not None:
            gone = [sum(sums) for sums in zip(*(each.sums for each in shards), strict=True)]
            payload = record_without(
                self.acknowledged.record[1], dict(zip(SUMS, gone, strict=True))
            )
            line["record"] = payload.decode()
        self.append(line)

    def _write_again(self) -> None:
        content = _spelt(self.acknowledged.line())
        self._inside.write_atomically(self._path, content, durable=True)
        self._good = len(content)
        self._again_at = _WRITTEN_AGAIN + 2 * self._good
        self._open()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
