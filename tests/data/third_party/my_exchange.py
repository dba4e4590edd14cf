"""An exchange format as a user writes one by docs/exchange.md: a header in JSON, then columns."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tallyroll.storage import Schema
from tallyroll.storage.datasets.exchange.door import Block, ExchangeFormat, Incoming, refused

MAGIC = b"MINE 1\n"
BLOCK = 1000
"""Rows that are read at a time."""


class MineFormat(ExchangeFormat):
    """A file with every column, bit for bit."""

    name, suffix = "mine", ".mine"
    loading = "from my_exchange import MineFormat"

    def write(self, rows: Any, place: Path) -> Mapping[str, int]:
        """Write one column after the other."""
        columns = rows.schema.to_json()
        header = json.dumps({"rows": len(rows), "columns": columns, "about": rows.about}).encode()
        with open(place, "xb") as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + header)
            for key in rows.schema.keys:
                for block in rows.blocks([key]):
                    file.write(np.ascontiguousarray(block[key]).data.cast("B"))
        return {}

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Read the header, and compare the size of the file with it."""
        try:
            source = open(place, "rb", opener=open_file)  # noqa: SIM115 - closed below
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise refused(place, "it is a link") from error
            raise
        with source as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or file.read(len(MAGIC)) != MAGIC:
                raise refused(place, "it is no file of mine")
            size = int.from_bytes(file.read(8), "little")
            if size > found.st_size:
                raise refused(place, "its header is cut short")
            header = json.loads(file.read(size))
            schema, rows, first = Schema.from_json(header["columns"]), header["rows"], file.tell()
            if type(rows) is not int or rows < 0:
                raise refused(place, f"it says {rows!r:.20} rows")
            wanted = first + rows * schema.row_nbytes
            if found.st_size != wanted:
                raise refused(place, f"it has {found.st_size} bytes, expected {wanted}")
            blocks = read_blocks(file, schema, rows, first)
            yield Incoming(schema, rows, blocks, header["about"], "1")


def open_file(path: str, flags: int) -> int:
    """Open a file that is no link, without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_blocks(file: BinaryIO, schema: Schema, rows: int, first: int) -> Iterator[Block]:
    """Yield all rows, some at a time."""
    places = {}
    for each in schema.columns:
        places[each.key] = first
        first += rows * each.row_nbytes
    for start in range(0, rows, BLOCK):
        count, block = min(BLOCK, rows - start), {}
        for each in schema.columns:
            file.seek(places[each.key] + start * each.row_nbytes)
            content = file.read(count * each.row_nbytes)
            array = np.frombuffer(content, each.numpy_dtype)
            block[each.key] = array.reshape(count, *each.shape)
        yield block
