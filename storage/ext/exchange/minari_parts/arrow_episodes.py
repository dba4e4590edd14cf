"""Episodes of Minari in Arrow or Parquet files: one folder with one table per episode.

A table has one row per observation. For actions, rewards and flags, the last row is padding. Minari
does not compress Arrow buffers. A buffer that claims to be compressed is rejected, because it may
be a decompression bomb.
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
        kind: the file format, one of `KINDS`.
        spaces: the spaces of values, by path in a table. They declare the shapes, which tables
            lack.
        pictures: the shapes of JPEG images.
        opened: a function that opens a file by its path. None opens files without a wrapper.
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
        """The numbers of the episodes that have a folder."""

    def columns(self, number: int) -> dict[Key, Any]:
        """Return the arrays [rows, ...] of an episode, by path. Raises `InvalidDataset`."""
        try:
            return {
                path: self._columns.values(path, array, shape)
                for path, array, shape in self._columns.leaves(self._table(number))
            }
        except damage_of(self._arrow) as error:
            raise InvalidDataset(f"episode {number}: {error!s:.300}") from error

    def _plain(self, path: Path) -> IO[bytes]:
        return open(self._inside.open(path, os.O_RDONLY), "rb")

    def metadata(self, number: int) -> dict[str, Any]:
        """Return the metadata of an episode, such as its number, steps and seed."""
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
        """Yield the record batches of a file, one message at a time. The footer may be missing."""
        arrow = self._arrow
        with file as raw:
            nbytes = os.fstat(raw.fileno()).st_size
            require_memory_for(2 * nbytes, name)
            content = raw.read()
        if not content.startswith(MAGIC):
            raise InvalidDataset(f"{name} is not an Arrow file")
        source = arrow.BufferReader(arrow.py_buffer(content).slice(len(MAGIC)))
        messages = arrow.ipc.MessageReader.open_stream(source)
        schema = arrow.ipc.read_schema(messages.read_next_message())
        while True:
            try:
                message = messages.read_next_message()
            except StopIteration:
                return
            if message.type != "record batch" or is_compressed(message.metadata.to_pybytes()):
                raise InvalidDataset(
                    f"{name}: expected plain record batches, as Minari writes them, got compressed "
                    "ones or dictionaries"
                )
            batch = arrow.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            yield batch


class TableColumns:
    """The columns in the table of an episode.

    Args:
        kind: the file format, one of `KINDS`.
        spaces: the spaces of values, by path in a table. They declare the shapes, which tables
            lack.
        pictures: the shapes of JPEG images.
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
        """Yield the arrays of a table without padding, with their paths and known shapes.

        Raises:
            InvalidDataset: rows have no value.
        """
        for field in table.schema:
            if field.name != "episode_id":
                rows = max(0, len(table) - (field.name in PADDED))
                for path, array, shape in _leaves(self.arrow, field, table.column(field.name)):
                    yield path, array.slice(0, rows), shape

    def values(self, path: Key, array: Any, shape: tuple[int, ...] | None) -> Any:
        """Return the values [rows, ...] of an array that `leaves` yields.

        Damaged values raise one of the errors of `damage_of`.
        """
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
            return np.empty(len(array), object)  # strings, and lists of variable length
        values = array.to_numpy(zero_copy_only=False)
        values = values.reshape(-1, *size)
        shape = self._shapes.get(path, shape)
        return values if shape is None else values.reshape(len(values), *shape)


def is_compressed(message: bytes) -> bool:
    """Return True if a record batch message is compressed.

    The fourth field of a record batch's flatbuffer declares the compression.
    """
    header = _field(message, _number(message, 0, 4), 2)
    return _field(message, header + _number(message, header, 4), 3) != 0


def body_nbytes(message: bytes) -> int:
    """Return the size in bytes of a message's body, which the message's fourth field holds."""
    at = _field(message, _number(message, 0, 4), 3)
    return _number(message, at, 8) if at else 0


def _number(message: bytes, at: int, nbytes: int, *, signed: bool = False) -> int:
    return int.from_bytes(message[at : at + nbytes], "little", signed=signed)


def _field(message: bytes, table: int, place: int) -> int:
    """Return the offset of a field of a flatbuffer table; 0 if the field is absent."""
    offsets = table - _number(message, table, 4, signed=True)
    at = 4 + 2 * place
    offset = _number(message, offsets + at, 2) if at < _number(message, offsets, 2) else 0
    return table + offset if offset else 0


def _leaves(
    arrow: Any, field: Any, array: Any, above: Key = ()
) -> Iterator[tuple[Key, Any, tuple[int, ...] | None]]:
    """Yield the arrays below a field, with their paths and the shapes in the field's metadata."""
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
    # Name the parts of a tuple as Minari names them in HDF5.
    tuples = [each.name for each in fields] == [str(at) for at in range(len(fields))]
    for at, each in enumerate(fields):
        named = each.with_name(f"_index_{at}") if tuples else each
        yield from _leaves(arrow, named, array.field(at), path)
