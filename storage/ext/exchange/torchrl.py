"""The ``torchrl`` format: a folder for `TensorDict.load_memmap`, with one file per column."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.ext.exchange.base import Block, ExchangeFormat, Incoming, refused
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES, ExportRows
from tallyroll.storage.ext.exchange.readme import LIMIT, recorded_schema
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.memmap import META_FIELDS, MemmapFormat, meta_of, place_of
from tallyroll.storage.rows.batch_dims import fitting
from tallyroll.storage.rows.dtypes import NAMES
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Column, Schema

_META, _ABOUT = "meta.json", "tallyroll.json"
_DEEPEST: Final = 32
_MOST_COLUMNS: Final = 2**14


class TorchrlFormat(ExchangeFormat):
    """A folder that holds every column bit for bit. Nested keys become folders.

    Reading uses only the ``meta.json`` files. It ignores objects that tensordict pickles.
    """

    name = "torchrl"
    loading = "from tensordict import TensorDict\n\nrows = TensorDict.load_memmap(PATH)"

    def check(self, schema: Schema) -> None:
        """Raise `InvalidSchema` for names that tensordict cannot store."""
        MemmapFormat(Path("rows")).check(schema)

    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write all columns, one block of rows at a time."""
        for folder, meta in meta_of(rows.schema, len(rows)).items():
            (place / folder).mkdir(parents=True, exist_ok=True)
            (place / folder / _META).write_text(json.dumps(meta))
        (place / _ABOUT).write_text(json.dumps(rows.about))
        with contextlib.ExitStack() as stack:
            files = {
                key: stack.enter_context(open(place / place_of(key, leaf=True), "xb"))
                for key in rows.schema.keys
            }
            for block in rows.blocks():
                for key, values in block.items():
                    files[key].write(np.ascontiguousarray(values).data.cast("B"))
        return {}

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Read all ``meta.json`` files and compare them with the sizes of the data files."""
        inside = Inside(place)
        columns, dims, rows, lost = _Tree(inside).read()
        about = None
        if (place / _ABOUT).exists():
            about = _json(inside, place / _ABOUT)
        schema = Schema(columns, tuple(fitting(dims, {c.key: c.shape for c in columns}).items()))
        said = recorded_schema(about)
        if said is not None:
            if differences := said.differences(schema):
                raise refused(place, "; ".join(differences))
            schema = said
        with contextlib.ExitStack() as stack:
            files = {}
            for each in schema.columns:
                path = place / place_of(each.key, leaf=True)
                try:
                    file = stack.enter_context(open(inside.open(path, os.O_RDONLY), "rb"))
                except OSError as error:
                    raise refused(place, f"{path}: {error.strerror}") from error
                size = os.fstat(file.fileno()).st_size
                if size < rows * each.row_nbytes:
                    raise refused(
                        place, f"{path} has {size:,} bytes, expected {rows * each.row_nbytes:,}"
                    )
                files[each.key] = file
            blocks = _blocks(files, schema, rows, place)
            yield Incoming(schema, rows, blocks, about, "memmap", {"columns": lost})


def _json(inside: Inside, path: Path) -> Any:
    try:
        return json.loads(inside.read(path, LIMIT))
    except (OSError, ValueError, RecursionError) as error:
        raise refused(inside.root, f"{path} cannot be read ({error})") from error


class _Tree:
    """The columns that the ``meta.json`` files of all folders describe."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self._columns: list[Column] = []
        self._dims: dict[Key, int] = {}
        self._rows: int | None = None
        self._lost = 0

    def read(self) -> tuple[tuple[Column, ...], dict[Key, int], int, int]:
        self._folder((), 0)
        if not self._columns or self._rows is None:
            raise refused(self._inside.root, "it has no columns")
        return tuple(self._columns), self._dims, self._rows, self._lost

    def _folder(self, key: Key, depth: int) -> None:
        root = self._inside.root
        if depth > _DEEPEST or len(self._columns) > _MOST_COLUMNS:
            raise refused(root, "it is nested too deep, or has too many columns")
        folder = root / place_of(key, leaf=False) if key else root
        meta = _json(self._inside, folder / _META)
        shape = meta.get("shape") if isinstance(meta, dict) else None
        if not isinstance(shape, list) or not shape or any(type(n) is not int for n in shape):
            raise refused(root, f"{folder / _META} declares no shape of the rows")
        self._count(shape[0])
        if len(shape) > 1:
            self._dims[key] = len(shape) - 1
        for name, said in meta.items():
            if name in META_FIELDS:
                continue
            below = (*key, name)
            try:
                Column(below, NAMES["bool"], ())  # reject names that lead out of the folder
            except InvalidSchema as error:
                raise refused(root, str(error)) from error
            self._leaf(below, said, depth)

    def _leaf(self, key: Key, said: Any, depth: int) -> None:
        root = self._inside.root
        if isinstance(said, dict) and said.get("type") == "TensorDict":
            self._folder(key, depth + 1)
            return
        dtype = said.get("dtype") if isinstance(said, dict) else None
        shape = said.get("shape") if isinstance(said, dict) else None
        found = NAMES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
        plain = isinstance(shape, list) and shape and all(type(n) is int for n in shape)
        if found is None or not plain or said.get("is_nested"):
            self._lost += 1  # an entry that is not a tensor of rows
            return
        assert isinstance(shape, list)
        self._count(shape[0])
        try:
            self._columns.append(Column(key, found, tuple(shape[1:])))
        except InvalidSchema as error:
            raise refused(root, f"{format_key(key)}: {error}") from error

    def _count(self, rows: int) -> None:
        if rows < 0 or (self._rows is not None and rows != self._rows):
            raise refused(
                self._inside.root,
                f"expected columns with the same number of rows, got {self._rows} and {rows}",
            )
        self._rows = rows


def _blocks(files: Mapping[Key, Any], schema: Schema, rows: int, place: Path) -> Iterator[Block]:
    size = max(1, BLOCK_NBYTES // schema.row_nbytes)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        block: Block = {}
        for each in schema.columns:
            content = files[each.key].read(count * each.row_nbytes)
            if len(content) != count * each.row_nbytes:
                raise refused(place, f"{format_key(each.key)} ends before its last row")
            array = np.frombuffer(content, each.numpy_dtype)
            block[each.key] = array.reshape(count, *each.shape)
        yield block
