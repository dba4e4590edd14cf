"""Damaged Minari episodes in Arrow or Parquet tables.

An Arrow file stores a table column by column, uncompressed. To find the rows that depend on missing
bytes, the file is read twice, with zeros and with ones in place of these bytes. Rows that differ
between the two depend on missing bytes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.dataset_checks.checker import CheckResults, DatasetFolder, declared_count
from tallyroll.storage.ext.dataset_checks.disk import Ranges, touches
from tallyroll.storage.ext.dataset_checks.lerobot.listing import opened_parquet
from tallyroll.storage.ext.exchange.hdf5_files import require_memory_for
from tallyroll.storage.ext.exchange.minari_parts.arrow_episodes import (
    MAGIC,
    TableColumns,
    body_nbytes,
    is_compressed,
)
from tallyroll.storage.ext.exchange.minari_parts.pictures import Jpegs
from tallyroll.storage.ext.exchange.parquet import damage_of
from tallyroll.storage.ext.repair.minari_files import (
    EpisodeFiles,
    FilePart,
    part_of,
)
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.row_words import words

_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_HEAD: Final = struct.Struct("<Ii")
_GOES_ON: Final = 0xFFFFFFFF
_MOST_CUT: Final = 64
"""The maximum ratio of a batch's size to its file's size.

If less of a batch remains, none of its rows is complete.
"""

_Twins = tuple[Any, ...]
"""A record batch, or two if parts of it are missing: filled with zeros and with ones."""


class TableFiles(EpisodeFiles):
    """Episodes in folders of tables, one folder each.

    Args:
        folder: the files of the dataset.
        below: the name of the folder that contains the folders of episodes, with a trailing slash;
            or an empty string.
        kind: ``"arrow"`` or ``"parquet"``.
        columns: the reader of tables.
    """

    def __init__(self, folder: DatasetFolder, below: str, kind: str, columns: TableColumns) -> None:
        self._folder, self._below, self._kind, self._columns = folder, below, kind, columns
        with os.scandir(folder.root / below) as found:
            names = [each.name for each in found if each.is_dir(follow_symlinks=False)]
        self.numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
        self._held = -1
        self._parts: dict[Key, FilePart] = {}
        self._why = ""

    def file(self, number: int) -> str:
        """Return the folder of an episode."""
        return f"{self._below}{number}"

    def metadata(self, number: int) -> Mapping[str, Any] | None:
        """Return the metadata file of an episode."""
        found = self._folder.json(f"{self.file(number)}/metadata.json")
        return found if isinstance(found, dict) else None

    def lost_end(self, number: int) -> tuple[str, int | None] | None:
        """Return the reason, and how many more steps the metadata declares than can be read."""
        parts = self.parts(number)
        if not self._why:
            return None
        steps = max(
            (len(each.values) for (top, *_), each in parts.items() if top == "rewards"), default=0
        )
        said = declared_count((self.metadata(number) or {}).get("total_steps"))
        return self._why, None if said is None else max(0, said - steps)

    def parts(self, number: int) -> dict[Key, FilePart]:
        """Return the columns of a table. Only the columns of the last episode stay in memory."""
        if number != self._held:
            self._parts, self._held = {}, -1
            try:
                self._parts = self._read(number)
            except damage_of(self._columns.arrow) as error:
                raise InvalidDataset(f"{error!s:.200}") from error
            self._held = number
        return self._parts

    def _read(self, number: int) -> dict[Key, FilePart]:
        arrow, self._why = self._columns.arrow, ""
        batches = list[_Twins]()
        of_file = self._parquet if self._kind == "parquet" else self._arrow
        for name in sorted(os.listdir(self._folder.root / self.file(number))):
            if self._why or not name.endswith(f".{self._kind}"):
                continue
            try:
                for each in of_file(f"{self.file(number)}/{name}"):
                    batches.append(each)
            except damage_of(arrow) as error:
                self._why = f"{name}: {error!s:.200}"
        if not batches:
            raise InvalidDataset(self._why or "the episode has no table")
        tables = []
        for at in range(max(map(len, batches))):
            every = arrow.Table.from_batches([each[min(at, len(each) - 1)] for each in batches])
            tables.append(every.combine_chunks())
        return dict(self._parts_of(tables))

    def _parts_of(self, tables: list[Any]) -> Iterator[tuple[Key, FilePart]]:
        """Yield the columns that can be read in all tables, which differ only in the lost bytes."""
        columns = self._columns
        first, *others = ([*columns.leaves(_batch(each))] for each in tables)
        for at, (path, array, shape) in enumerate(first):
            every = [array, *(each[at][1] for each in others)]
            try:
                for each in every:
                    each.validate(full=True)
                values = [columns.values(path, each, shape) for each in every]
            except damage_of(columns.arrow):
                continue  # the episode then lacks this column
            compared = every if isinstance(values[0], Jpegs) else values
            yield path, part_of("/".join(path), values[0], partial(_same, compared))

    def _parquet(self, name: str) -> Iterator[_Twins]:
        """Yield the row groups of a file."""
        found = CheckResults()
        with opened_parquet(self._folder, name, found) as file:
            if file is None:
                raise InvalidDataset("; ".join(each.message for each in found.findings))
            for group in range(file.metadata.num_row_groups):
                yield from (
                    (each,)
                    for each in file.read_row_group(group, use_threads=False)
                    .combine_chunks()
                    .to_batches()
                )

    def _arrow(self, name: str) -> Iterator[_Twins]:
        """Yield the record batches of a file, one message at a time; the footer may be missing."""
        raw = self._folder.opened(name)
        if raw is None:
            raise InvalidDataset("the file cannot be opened, or is a link")
        with raw:
            yield from _Messages(self._columns.arrow, raw).batches()


def _batch(table: Any) -> Any:
    batches = table.to_batches()
    if len(batches) > 1:
        raise InvalidDataset("the table is too large for one array")
    return batches[0] if batches else table


class _Messages:
    """The messages of an Arrow file with missing parts."""

    def __init__(self, arrow: Any, raw: Any) -> None:
        self._arrow, self._raw = arrow, raw
        self._size = os.fstat(raw.fileno()).st_size
        self._gaps: Ranges = [*getattr(raw, "gaps", []), (self._size, 2**63)]

    def batches(self) -> Iterator[_Twins]:
        """Yield each record batch and, if it is damaged, its twin.

        Raises:
            InvalidDataset: a message cannot be read. The messages after it are lost, too.
        """
        arrow, ipc = self._arrow, self._arrow.ipc
        if self._there(0, len(MAGIC)) != MAGIC:
            raise InvalidDataset("it is not an Arrow file")
        schema, at = None, len(MAGIC)
        while (head := self._head(at)) is not None:
            meta = head[_HEAD.size :]
            nbytes = body_nbytes(meta)
            if nbytes > _MOST_CUT * self._size:
                raise InvalidDataset(f"a batch claims {nbytes:,} bytes")
            start = at + len(head)
            require_memory_for(4 * nbytes, "a batch of rows")
            if schema is None:
                schema = ipc.read_schema(ipc.read_message(arrow.py_buffer(head)))
            elif is_compressed(meta):
                raise InvalidDataset("it is compressed, unlike Minari's files")
            else:
                damaged = touches(self._gaps, start, start + nbytes)
                contents = [self._filled(start, nbytes, fill) for fill in b"\0\xff"[: 1 + damaged]]
                messages = [ipc.read_message(arrow.py_buffer(head + each)) for each in contents]
                if messages[0].type != "record batch":
                    raise InvalidDataset("it has dictionaries, unlike Minari's files")
                yield tuple(ipc.read_record_batch(each, schema) for each in messages)
            at = start + nbytes

    def _head(self, at: int) -> bytes | None:
        """Return the header of a message with its length prefix; None at the end of the stream."""
        goes_on, nbytes = _HEAD.unpack(self._there(at, _HEAD.size))
        if goes_on != _GOES_ON or not 0 <= nbytes <= self._size:
            raise InvalidDataset(f"no message begins at byte {at:,}")
        return None if nbytes == 0 else self._there(at, _HEAD.size + nbytes)

    def _there(self, at: int, nbytes: int) -> bytes:
        """Return bytes; raise `InvalidDataset` if some of them are missing."""
        if touches(self._gaps, at, at + nbytes):
            raise InvalidDataset(
                f"the bytes at offset {at:,} cannot be read, or the file was cut short"
            )
        return self._filled(at, nbytes, 0)

    def _filled(self, at: int, nbytes: int, fill: int) -> bytes:
        """Return bytes, with ``fill`` in place of missing bytes."""
        content = bytearray([fill]) * nbytes
        for start, stop in _between(self._gaps, at, at + nbytes):
            self._raw.seek(start)
            content[start - at : stop - at] = self._raw.read(stop - start)
        return bytes(content)


def _between(gaps: Ranges, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range that are outside all gaps."""
    for begin, end in gaps:
        if start < min(begin, stop):
            yield start, min(begin, stop)
        start = max(start, end)


def _same(every: list[Any]) -> np.ndarray:
    """Return a mask of the rows [n] that are equal in all arrays."""
    first, *others = every
    same = np.ones(len(first), bool)
    for other in others:
        if isinstance(first, np.ndarray):
            same &= (words(first) == words(other)).all(1)
        else:
            same &= [one == another for one, another in zip(first, other, strict=True)]
    return same
