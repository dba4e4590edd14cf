"""The ``npz`` format: an archive of NumPy arrays, one per column."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.ext.exchange.base import Block, ExchangeFormat, Incoming, refused
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES, ExportRows
from tallyroll.storage.ext.exchange.readme import LIMIT, recorded_schema
from tallyroll.storage.files.safe_files import open_file
from tallyroll.storage.rows.dtypes import TORCH
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Column, Schema

_ABOUT, _END = "tallyroll", ".npy"
_HEADER_LIMIT: Final = 2**14
_DAMAGE = (ValueError, EOFError, RuntimeError, NotImplementedError, KeyError, OverflowError)
_BAD_ZIP = (zipfile.BadZipFile, zlib.error)


class NpzFormat(ExchangeFormat):
    """Arrays named by column, such as ``next/reward``, which `numpy.load` reads without Tallyroll.

    bfloat16 is stored as its bits, in ``uint16``. The array ``tallyroll`` is a text that records
    the columns and their origin.
    """

    name, suffix = "npz", ".npz"
    loading = "import numpy\n\nrows = numpy.load(PATH)"

    def check(self, schema: Schema) -> None:
        """Raise `InvalidSchema` for a column that has the name of the metadata array."""
        if (_ABOUT,) in schema.keys:
            raise InvalidSchema(
                f"the column {_ABOUT} has the name of the archive's metadata. Rename the column."
            )

    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write one column after another, one block of rows at a time."""
        with zipfile.ZipFile(place, "x", allowZip64=True) as archive:
            for column in rows.schema.columns:
                with archive.open(format_key(column.key) + _END, "w", force_zip64=True) as file:
                    header = {
                        "descr": np.lib.format.dtype_to_descr(column.numpy_dtype),
                        "fortran_order": False,
                        "shape": (len(rows), *column.shape),
                    }
                    np.lib.format.write_array_header_2_0(file, header)
                    for block in rows.blocks([column.key]):
                        file.write(np.ascontiguousarray(block[column.key]).data.cast("B"))
            with archive.open(_ABOUT + _END, "w") as file:
                np.lib.format.write_array(file, np.array(json.dumps(rows.about)))
        return {}

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Open the archive and check the header of each array."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(open_file(place, os.O_RDONLY), "rb"))
                archive = stack.enter_context(zipfile.ZipFile(file))
                incoming = _Members(archive, place, stack).incoming()
            except _BAD_ZIP as error:
                raise refused(place, f"it is not a valid archive ({error})") from error
            yield incoming


class _Members:
    """The arrays of an archive, with validated headers and sizes."""

    def __init__(self, archive: zipfile.ZipFile, place: Path, stack: contextlib.ExitStack) -> None:
        self._archive, self._place, self._stack = archive, place, stack
        self._files: dict[Key, IO[bytes]] = {}
        self._dtypes: dict[Key, np.dtype[Any]] = {}

    def incoming(self) -> Incoming:
        archive, place = self._archive, self._place
        infos = {each.filename: each for each in archive.infolist()}
        if len(infos) < len(archive.infolist()):
            raise refused(place, "it has two arrays with the same name")
        about = self._about(infos.pop(_ABOUT + _END, None))
        found, rows = dict[Key, Column](), set[int]()
        for name, info in infos.items():
            key = tuple(name.removesuffix(_END).split("/"))
            shape, dtype = self._opened(key, info)
            found[key] = Column(key, TORCH[dtype.newbyteorder("=")], shape[1:])
            rows.add(shape[0])
        if len(rows) != 1:
            raise refused(
                place,
                f"expected arrays with the same number of rows, got {sorted(rows)}"
                if rows
                else "it is empty",
            )
        schema = recorded_schema(about)
        if schema is None:
            schema = Schema(tuple(found.values()))
        for each in schema.columns:
            there = found.get(each.key)
            wanted = (each.numpy_dtype, each.shape)
            if there is None or (there.numpy_dtype, there.shape) != wanted:
                raise refused(
                    place, f"{format_key(each.key)} is missing, or differs from the metadata"
                )
        total = rows.pop()
        lost = {"columns": len({*found} - {*schema.keys})}
        return Incoming(schema, total, self._blocks(schema, total), about, "npy", lost)

    def _about(self, info: zipfile.ZipInfo | None) -> Any:
        if info is None:
            return None
        if info.file_size > 4 * LIMIT:
            raise refused(
                self._place,
                f"its metadata have {info.file_size:,} bytes, expected at most {4 * LIMIT:,}",
            )
        try:
            with self._archive.open(info) as file:
                text = np.lib.format.read_array(file, allow_pickle=False)
            return json.loads(str(text[()])) if text.ndim == 0 else None
        except (*_DAMAGE, RecursionError) as error:
            raise refused(self._place, f"its metadata cannot be read ({error})") from error

    def _opened(self, key: Key, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Open an array and validate its header."""
        name = info.filename
        try:
            if not name.endswith(_END):
                raise ValueError("it is not an array")
            file = self._stack.enter_context(self._archive.open(info))
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, dtype = read(file, max_header_size=_HEADER_LIMIT)
            if dtype.hasobject or dtype.newbyteorder("=") not in TORCH:
                raise ValueError(
                    f"expected an array of numbers, got {dtype}. Pickled objects are not read"
                )
            if not shape or min(shape) < 0 or any(type(size) is not int for size in shape):
                raise ValueError(f"its shape is {shape}, expected rows in the first dimension")
            if fortran and len(shape) > 1:
                raise ValueError(
                    "it is in Fortran order. Save it in C order, with numpy.ascontiguousarray"
                )
            nbytes = dtype.itemsize * int(np.prod(np.array(shape, object)))
            if nbytes != info.file_size - file.tell():
                raise ValueError(
                    f"expected for shape {shape} and dtype {dtype} a size of {nbytes:,} bytes, got "
                    "another size"
                )
        except _DAMAGE as error:
            raise refused(self._place, f"{name!r:.200}: {error}") from error
        self._files[key], self._dtypes[key] = file, dtype
        return shape, dtype

    def _blocks(self, schema: Schema, total: int) -> Iterator[Block]:
        size = max(1, BLOCK_NBYTES // schema.row_nbytes)
        for start in range(0, total, size):
            count = min(size, total - start)
            yield {each.key: self._read(each, count) for each in schema.columns}

    def _read(self, column: Column, count: int) -> np.ndarray:
        wanted = count * column.row_nbytes
        try:
            content = self._files[column.key].read(wanted)
        except (*_BAD_ZIP, *_DAMAGE) as error:
            raise refused(self._place, f"{format_key(column.key)}: {error}") from error
        if len(content) != wanted:
            raise refused(self._place, f"{format_key(column.key)} ends before its last row")
        array = np.frombuffer(content, self._dtypes[column.key])
        return array.reshape(count, *column.shape).astype(column.numpy_dtype, copy=False)
