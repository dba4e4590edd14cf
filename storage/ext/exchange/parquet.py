"""The ``parquet`` format: one file, with a column for each column of the storage."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.arrow import (
    ABOUT,
    ArrowColumn,
    arrow_schema,
    columns_of,
    names_of,
    to_batch,
)
from tallyroll.storage.ext.exchange.base import Block, ExchangeFormat, Incoming, refused
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES, ExportRows
from tallyroll.storage.ext.exchange.readme import LIMIT, recorded_schema
from tallyroll.storage.files.safe_files import open_file
from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.rows.schema import Schema

_FOOTER_LIMIT: Final = 2**26
_THRIFT_LIMIT: Final = 2**27
_DAMAGE: Final = (InvalidDataset, ValueError, OSError, LookupError, TypeError)


class ParquetFormat(ExchangeFormat):
    """A Parquet table with plain numbers, compressed with zstd.

    Array values are lists of fixed size, and the metadata holds their shapes. bfloat16 is stored as
    its bits, and a complex number as its two parts.
    """

    name, extra, suffix, compressed = "parquet", "arrow", ".parquet", True
    loading = "import pandas\n\nrows = pandas.read_parquet(PATH)"
    data_files = "*.parquet"

    def names(self, schema: Schema) -> list[str]:
        """Return keys joined by dots."""
        return names_of(schema)

    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write one row group per block."""
        write_parquet(rows, lambda number: place)
        return {}

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Open the file and validate its footer."""
        with contextlib.ExitStack() as stack:
            yield parquet_rows([place], place, stack)


def write_parquet(rows: ExportRows, place_of: Any, groups: int | None = None) -> int:
    """Write rows to files and return the number of files.

    Each file gets ``groups`` row groups. None writes a single file.
    """
    arrow, parquet = needed("pyarrow", "arrow", "Parquet needs"), parquet_module()
    kinds = arrow_schema(arrow, rows.schema, rows.about)
    writer: Any = None
    files = written = 0
    try:
        for block in rows.blocks():
            if writer is None or (groups is not None and written % groups == 0):
                if writer is not None:
                    writer.close()
                writer = _writer(parquet, place_of(files), kinds)
                files += 1
            batch = to_batch(arrow, kinds, rows.schema, block)
            writer.write_batch(batch, row_group_size=max(1, batch.num_rows))
            written += 1
        if writer is None:
            writer = _writer(parquet, place_of(0), kinds)
            files = 1
    finally:
        if writer is not None:
            writer.close()
    return files


def parquet_module() -> Any:
    """Return pyarrow's Parquet module."""
    import importlib

    needed("pyarrow", "arrow", "Parquet needs")
    return importlib.import_module("pyarrow.parquet")


def _writer(parquet: Any, place: Path, kinds: Any) -> Any:
    # Dictionary encoding compares values as numbers. It would replace -0.0 by 0.0 and a NaN by a
    # NaN with other bits.
    return parquet.ParquetWriter(
        place, kinds, compression="zstd", use_dictionary=False, write_statistics=False
    )


def parquet_rows(places: Sequence[Path], place: Path, stack: contextlib.ExitStack) -> Incoming:
    """Return the rows of files, one file after another.

    Raises:
        InvalidDataset: a file is damaged or not Parquet, or the files have different columns.
    """
    arrow = needed("pyarrow", "arrow", "Parquet needs")
    files = [
        opened_parquet(os.fdopen(open_file(each, os.O_RDONLY), "rb"), each.name, place, stack)
        for each in places
    ]
    if not files:
        raise refused(place, "it has no Parquet file")
    found = files[0].schema_arrow
    if any(not each.schema_arrow.equals(found) for each in files):
        raise refused(place, "its files have different columns")
    rows = sum(each.metadata.num_rows for each in files)
    try:
        about = _about(found)
        said = recorded_schema(about)
        first = None
        if said is None and rows:
            first = next(iter(next(f for f in files if f.metadata.num_rows).iter_batches(1)), None)
        columns = columns_of(arrow, found, said, first)
        batch_dims = () if said is None else said.batch_dims
        schema = Schema(tuple(each.column for each in columns), batch_dims)
    except damage_of(arrow) as error:
        raise refused(place, str(error)) from error
    version = files[0].metadata.format_version
    lost = {"columns": len(found) - len(columns)}
    blocks = _blocks(arrow, files, columns, schema, place)
    return Incoming(schema, rows, blocks, about, str(version), lost)


def damage_of(arrow: Any) -> tuple[type[Exception], ...]:
    """Return the errors that a damaged file raises."""
    return (*_DAMAGE, arrow.ArrowException)


def opened_parquet(file: IO[bytes], name: str, place: Path, stack: contextlib.ExitStack) -> Any:
    """Open a Parquet file whose row groups fit into memory. Closing ``stack`` closes the file.

    Raises:
        InvalidDataset: the file is damaged or not Parquet.
        NotEnoughMemory: a row group does not fit into memory.
    """
    arrow, parquet = needed("pyarrow", "arrow", "Parquet needs"), parquet_module()
    raw = stack.enter_context(file)
    if not has_footer(raw):
        raise refused(place, f"{name} has no Parquet footer: it is truncated, or not Parquet")
    try:
        found = limited_file(parquet, raw)
        for nbytes in row_group_sizes(found):
            require_memory(nbytes, f"a row group of {name}", "Write smaller row groups.")
    except damage_of(arrow) as error:
        raise refused(place, f"{name}: {error}") from error
    stack.callback(found.close)
    return found


def has_footer(raw: Any) -> bool:
    """Return True if an open file ends like a Parquet file. Move to its start."""
    size = os.fstat(raw.fileno()).st_size
    raw.seek(max(0, size - 8))
    tail = raw.read(8)
    raw.seek(0)
    footer = int.from_bytes(tail[:4], "little")
    return len(tail) == 8 and tail[4:] == b"PAR1" and footer <= min(size, _FOOTER_LIMIT)


def limited_file(parquet: Any, raw: Any, **options: Any) -> Any:
    """Open a Parquet file with limits for the size of its metadata."""
    return parquet.ParquetFile(
        raw,
        pre_buffer=False,
        thrift_string_size_limit=_THRIFT_LIMIT,
        thrift_container_size_limit=_THRIFT_LIMIT,
        **options,
    )


def row_group_sizes(file: Any) -> Iterator[int]:
    """Yield the size of each row group in bytes."""
    for number in range(file.metadata.num_row_groups):
        # `row_group(n).column(m)` crashes the process if its statistics are damaged.
        yield file.metadata.row_group(number).total_byte_size


def _about(found: Any) -> Any:
    text = (found.metadata or {}).get(ABOUT)
    if text is None:
        return None
    if len(text) > LIMIT:
        raise InvalidDataset(f"its metadata have {len(text):,} bytes, expected at most {LIMIT:,}")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InvalidDataset("its metadata are nested too deep") from error


def _blocks(
    arrow: Any, files: Sequence[Any], columns: Sequence[ArrowColumn], schema: Schema, place: Path
) -> Iterator[Block]:
    size = max(1, min(2**16, BLOCK_NBYTES // schema.row_nbytes))
    names = [each.name for each in columns]
    try:
        for file in files:
            for batch in file.iter_batches(size, columns=names, use_threads=False):
                yield {each.column.key: each.of(arrow, batch) for each in columns}
    except damage_of(arrow) as error:
        raise refused(place, str(error)) from error
