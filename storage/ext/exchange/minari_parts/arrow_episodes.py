"""Episodes of Minari in Arrow or Parquet: a folder for each, of which the rows are one table.

A table has a row for each observation; of actions, rewards and flags the last row is padding.
Minari compresses no buffer of Arrow, and one that claims to be is refused: it may be a bomb.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.hdf5_files import require_memory_for
from tallyroll.storage.ext.exchange.minari_parts.pictures import Jpegs
from tallyroll.storage.ext.exchange.parquet import damage_of, opened_parquet
from tallyroll.storage.ext.exchange.readme import LIMIT
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.spaces import Space

KINDS: Final = ("arrow", "parquet")
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
MAGIC: Final = b"ARROW1\0\0"
PADDED: Final = ("actions", "rewards", "terminations", "truncations")
_DEEPEST: Final = 24


class ArrowEpisodes:
    """The episodes below a folder.

    Args:
        data: the folder.
        kind: one of `KINDS`.
        spaces: of which values are, by their places in a table: it has no shapes.
        pictures: shapes of the images that are JPEG.
        opened: opens a file by its path; None: as it is.
    """

    def __init__(
        self,
        data: Path,
        kind: str,
        spaces: Mapping[Key, Space],
        pictures: Mapping[Key, tuple[int, ...]],
        opened: Callable[[Path], IO[bytes]] | None = None,
    ) -> None:
        self._data, self._kind = data, kind
        self._inside = Inside(data)
        self._open = opened or self._plain
        self._columns = TableColumns(kind, spaces, pictures)
        self._arrow = self._columns.arrow
        names = [each.name for each in os.scandir(data) if each.is_dir(follow_symlinks=False)]
        self.numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
        """The numbers of episodes that have a folder."""

    def columns(self, number: int) -> dict[Key, Any]:
        """Return the arrays [rows, ...] of an episode, by their places; raise InvalidDataset."""
        try:
            return {
                path: self._columns.values(path, array, shape)
                for path, array, shape in self._columns.leaves(self._table(number))
            }
        except damage_of(self._arrow) as error:
            raise InvalidDataset(f"episode {number}: {error!s:.300}") from error

    def _plain(self, path: Path) -> IO[bytes]:
        return open(self._inside.open(path, os.O_RDONLY), "rb")

    def said(self, number: int) -> dict[str, Any]:
        """Return what is said of an episode beside it: its number, its steps, its seed."""
        path = self._data / str(number) / "metadata.json"
        if not os.path.lexists(path):
            return {}
        try:
            with self._open(path) as file:
                content = file.read(LIMIT + 1)
            if len(content) > LIMIT:
                raise ValueError(f"it has more than {LIMIT:,} bytes")
            found = json.loads(content)
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidDataset(f"{path} cannot be read ({error!s:.200})") from error
        return found if isinstance(found, dict) else {}

    def _table(self, number: int) -> Any:
        arrow, folder = self._arrow, self._data / str(number)
        batches = []
        with contextlib.ExitStack() as stack:
            for name in sorted(os.listdir(folder)):
                if not name.endswith(f".{self._kind}"):
                    continue
                file = self._open(folder / name)
                if self._kind == "parquet":
                    batches += opened_parquet(file, name, folder, stack).iter_batches(
                        use_threads=False
                    )
                else:
                    batches += self._of_arrow(file, name)
        if not batches:
            raise InvalidDataset("it has no table")
        table = arrow.Table.from_batches(batches).combine_chunks()
        return table.to_batches()[0] if len(table) else batches[0]

    def _of_arrow(self, file: IO[bytes], name: str) -> Iterator[Any]:
        """Yield the batches of a file, message by message: its end may be lacking."""
        arrow = self._arrow
        with file as raw:
            nbytes = os.fstat(raw.fileno()).st_size
            require_memory_for(2 * nbytes, name)
            content = raw.read()
        if not content.startswith(MAGIC):
            raise InvalidDataset(f"{name} is no file of Arrow")
        source = arrow.BufferReader(arrow.py_buffer(content).slice(len(MAGIC)))
        messages = arrow.ipc.MessageReader.open_stream(source)
        schema = arrow.ipc.read_schema(messages.read_next_message())
        while True:
            try:
                message = messages.read_next_message()
            except StopIteration:
                return
            if message.type != "record batch" or is_compressed(message.metadata.to_pybytes()):
                raise InvalidDataset(f"{name} is compressed, or has dictionaries: Minari's are not")
            batch = arrow.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            yield batch


class TableColumns:
    """The columns of a table of an episode.

    Args:
        kind: one of `KINDS`.
        spaces: of which values are, by their places in a table: it has no shapes.
        pictures: shapes of the images that are JPEG.
    """

    def __init__(
        self,
        kind: str,
        spaces: Mapping[Key, Space],
        pictures: Mapping[Key, tuple[int, ...]],
    ) -> None:
        self.arrow: Any = needed("pyarrow", "arrow", f"a dataset of Minari in {kind} needs")
        self._shapes = {path: each.shape for path, each in spaces.items() if each.shape}
        self._pictures = pictures

    def leaves(self, table: Any) -> Iterator[tuple[Key, Any, tuple[int, ...] | None]]:
        """Yield the arrays of a table without their padding, with places and known shapes.

        Raises:
            InvalidDataset: rows have no value.
        """
        for field in table.schema:
            if field.name != "episode_id":
                rows = max(0, len(table) - (field.name in PADDED))
                for path, array, shape in _leaves(self.arrow, field, table.column(field.name)):
                    yield path, array.slice(0, rows), shape

    def values(self, path: Key, array: Any, shape: tuple[int, ...] | None) -> Any:
        """Return the values of such an array [rows, ...]; raise `damage_of` Arrow's errors."""
        arrow = self.arrow
        if (picture := self._pictures.get(path)) is not None:
            return Jpegs(array, picture)
        if array.null_count:
            raise InvalidDataset(f"{'/'.join(path)} has rows without a value")
        size: tuple[int, ...] = ()
        if arrow.types.is_fixed_size_list(array.type):
            size, array = (array.type.list_size,), array.flatten()
        kind = array.type
        if not (arrow.types.is_primitive(kind) and not arrow.types.is_temporal(kind)):
            return np.empty(len(array), object)  # texts, and lists of any length
        values = array.to_numpy(zero_copy_only=False)
        values = values.reshape(-1, *size)
        shape = self._shapes.get(path, shape)
        return values if shape is None else values.reshape(len(values), *shape)


def is_compressed(message: bytes) -> bool:
    """Return whether a batch's message, a table of flatbuffers, says so in its fourth field."""
    header = _field(message, _number(message, 0, 4), 2)
    return _field(message, header + _number(message, header, 4), 3) != 0


def body_nbytes(message: bytes) -> int:
    """Return how many bytes follow a message, as it says in its fourth field."""
    at = _field(message, _number(message, 0, 4), 3)
    return _number(message, at, 8) if at else 0


def _number(message: bytes, at: int, nbytes: int, *, signed: bool = False) -> int:
    return int.from_bytes(message[at : at + nbytes], "little", signed=signed)


def _field(message: bytes, table: int, place: int) -> int:
    """Return where a field of a table of flatbuffers is; 0: it is not there."""
    offsets = table - _number(message, table, 4, signed=True)
    at = 4 + 2 * place
    offset = _number(message, offsets + at, 2) if at < _number(message, offsets, 2) else 0
    return table + offset if offset else 0


def _leaves(
    arrow: Any, field: Any, array: Any, above: Key = ()
) -> Iterator[tuple[Key, Any, tuple[int, ...] | None]]:
    """Yield the arrays below a field, with their places, and shapes that the field says."""
    if len(above) > _DEEPEST:
        raise InvalidDataset("it is nested too deep")
    path = (*above, field.name)
    if not arrow.types.is_struct(field.type):
        said = (field.metadata or {}).get(b"shape")
        shape = None if said is None else tuple(int(each) for each in said.split(b",") if each)
        yield path, array, shape
        return
    if array.null_count:
        raise InvalidDataset(f"{'/'.join(path)} has rows without a value")
    fields = [field.type.field(at) for at in range(field.type.num_fields)]
    # As Minari has them in HDF5: the parts of a tuple.
    tuples = [each.name for each in fields] == [str(at) for at in range(len(fields))]
    for at, each in enumerate(fields):
        named = each.with_name(f"_index_{at}") if tuples else each
        yield from _leaves(arrow, named, array.field(at), path)
