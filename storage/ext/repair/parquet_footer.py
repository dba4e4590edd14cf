"""Rebuild the footer of a Parquet file whose writer was killed, from the file's pages.

The pages of a row group are stored one column after another, each page after a header. The caller
knows the columns. A small file with the same columns supplies a template of the footer, which is
filled with the offsets of the pages.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tallyroll.storage.formats.optional_libraries import needed

_MAGIC: Final = b"PAR1"
_HEADER_NBYTES: Final = 2**16
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_ENCODINGS: Final = (0, 3, 8)
"""The encodings of a writer with default options: plain, run lengths, and dictionary indices."""


@dataclass(frozen=True)
class _Page:
    """The location of a page, and the number of its values."""

    kind: int
    start: int
    stop: int
    unpacked: int
    """The size in bytes of the header and the uncompressed page."""
    values: int


@dataclass(frozen=True)
class Rebuilt:
    """A rebuilt footer, and the extent of the row groups that it describes."""

    stop: int
    """The offset of the first byte after the last complete row group."""
    footer: bytes
    rows: tuple[int, ...]
    """The number of rows in each row group."""


def rebuilt(raw: Any, size: int, kinds: Any, values: Sequence[int], codec: str) -> Rebuilt | None:
    """Rebuild the footer of a file without one. Return None if no row group is complete.

    Args:
        raw: the file, open for reading.
        size: the size of the file in bytes.
        kinds: the Arrow schema of the rows.
        values: the number of values per row in each Parquet column.
        codec: the compression of the pages.
    """
    pages = _pages(raw, size)
    groups, at = [], 0
    while (found := _group(pages, at, values)) is not None:
        groups.append(found)
        at += sum(len(chunk) for chunk in found[1])
    if not groups:
        return None
    meta = _template(kinds, codec)
    (group,) = meta[4][1][1]
    made = [_row_group(group, rows, chunks, n) for n, (rows, chunks) in enumerate(groups)]
    counts = tuple(rows for rows, _ in groups)
    meta[3] = I64, sum(counts)
    meta[4] = LIST, (STRUCT, made)
    stop = groups[-1][1][-1][-1].stop
    text = serialize(meta)
    return Rebuilt(stop, text + len(text).to_bytes(4, "little") + _MAGIC, counts)


def _pages(raw: Any, size: int) -> list[_Page]:
    """Return all complete pages from the start of a file."""
    found, at = list[_Page](), len(_MAGIC)
    while at < size:
        raw.seek(at)
        try:
            reader = ThriftReader(raw.read(min(_HEADER_NBYTES, size - at)))
            page = _page(reader.struct(), at, reader.at)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            break
        if page is None or page.stop > size:
            break
        found.append(page)
        at = page.stop
    return found


def _page(fields: Fields, at: int, header: int) -> _Page | None:
    kind, unpacked, packed = (fields[number][1] for number in (1, 2, 3))
    inner = {_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}.get(kind)
    if inner is None or unpacked < 0 or packed < 0:
        return None
    values = fields[inner][1][1][1]
    if not isinstance(values, int) or values < 0:
        return None
    return _Page(kind, at, at + header + packed, header + unpacked, values)


def _group(
    pages: list[_Page], at: int, values: Sequence[int]
) -> tuple[int, list[list[_Page]]] | None:
    """Return the row count and pages of the row group that starts at a page, if it is complete."""
    total, end = 0, at
    while end < len(pages):
        page = pages[end]
        if page.kind == _DICTIONARY and end > at:
            break
        total += page.values if page.kind != _DICTIONARY else 0
        end += 1
        if total and total % values[0] == 0:
            rows = total // values[0]
            chunks = [pages[at:end]]
            if _rest(pages, end, rows, values[1:], chunks):
                return rows, chunks
    return None


def _rest(
    pages: list[_Page], at: int, rows: int, values: Sequence[int], chunks: list[list[_Page]]
) -> bool:
    """Append the pages of a row group's other columns. Return True if all are present."""
    for each in values:
        left, start = rows * each, at
        while left > 0 and at < len(pages):
            page = pages[at]
            if page.kind == _DICTIONARY and at > start:
                return False
            left -= page.values if page.kind != _DICTIONARY else 0
            at += 1
        if left:
            return False
        chunks.append(pages[start:at])
    return True


def _template(kinds: Any, codec: str) -> Fields:
    """Return the footer of a file with the same columns and one row group."""
    arrow = needed("pyarrow", "arrow", "Parquet needs")
    parquet = needed("pyarrow.parquet", "arrow", "Parquet needs")
    file = io.BytesIO()
    with parquet.ParquetWriter(file, kinds, compression=codec, write_statistics=False) as writer:
        arrays = [arrow.nulls(1, each.type) for each in kinds]
        writer.write_table(arrow.Table.from_arrays(arrays, schema=kinds))
    content = file.getvalue()
    size = int.from_bytes(content[-8:-4], "little")
    return ThriftReader(content[-8 - size : -8]).struct()


def _row_group(template: Fields, rows: int, chunks: list[list[_Page]], number: int) -> Fields:
    columns = []
    total = packed = 0
    for each, pages in zip(template[1][1][1], chunks, strict=True):
        old: Fields = each[3][1]
        unpacked = sum(page.unpacked for page in pages)
        nbytes = pages[-1].stop - pages[0].start
        data = next(page for page in pages if page.kind != _DICTIONARY)
        meta: Fields = {key: old[key] for key in (1, 3, 4)}
        meta[2] = LIST, (I32, list(_ENCODINGS))
        meta[5] = I64, sum(page.values for page in pages if page.kind != _DICTIONARY)
        meta[6], meta[7] = (I64, unpacked), (I64, nbytes)
        meta[9] = I64, data.start
        if pages[0].kind == _DICTIONARY:
            meta[11] = I64, pages[0].start
        columns.append({2: (I64, 0), 3: (STRUCT, meta)})
        total, packed = total + unpacked, packed + nbytes
    return {
        1: (LIST, (STRUCT, columns)),
        2: (I64, total),
        3: (I64, rows),
        5: (I64, chunks[0][0].start),
        6: (I64, packed),
        7: (4, number),
    }


# --- Thrift's compact protocol --------------------------------------------------------------------

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
_DEEPEST: Final = 32
_MOST: Final = 2**22
_LONG: Final = 15

Fields = dict[int, tuple[int, Any]]
"""The fields of a struct by number, each with its type and value.

The value of a list is the type of its elements and the elements.
"""


@dataclass
class ThriftReader:
    """Reader of structs in bytes.

    Raises:
        ValueError: the bytes are not a valid struct.
    """

    content: bytes | memoryview
    at: int = 0

    def struct(self, deep: int = 0) -> Fields:
        """Return the struct at the current offset."""
        fields: Fields = {}
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                return fields
            kind, step = head & 15, head >> 4
            number = number + step if step else _unfolded(self._varint())
            fields[number] = kind, self._value(kind, deep)

    def _value(self, kind: int, deep: int) -> Any:
        if deep > _DEEPEST:
            raise ValueError("it is nested too deep")
        match kind:
            case 1 | 2:
                return kind == TRUE
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return _unfolded(self._varint())
            case 7:
                return struct.unpack("<d", self._take(8))[0]
            case 8:
                return self._take(self._varint())
            case 9 | 10:
                return self._list(deep)
            case 12:
                return self.struct(deep + 1)
        raise ValueError(f"it has a value of the unknown type {kind}")

    def _list(self, deep: int) -> tuple[int, list[Any]]:
        head = self._byte()
        kind, count = head & 15, head >> 4
        if count == _LONG:
            count = self._varint()
        if count > _MOST:
            raise ValueError("a list is too long")
        if kind in (TRUE, FALSE):
            return kind, [self._byte() == TRUE for _ in range(count)]
        return kind, [self._value(kind, deep + 1) for _ in range(count)]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.content):
            raise ValueError("it ends too early")
        found = bytes(self.content[self.at : end])
        self.at = end
        return found

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")


def serialize(fields: Fields) -> bytes:
    """Serialize a struct."""
    out, before = bytearray(), 0
    for number in sorted(fields):
        kind, value = fields[number]
        if kind in (TRUE, FALSE):
            kind = TRUE if value else FALSE
        step = number - before
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _folded(number)
        if kind not in (TRUE, FALSE):
            out += _value_written(kind, value)
        before = number
    return bytes(out + b"\0")


def _value_written(kind: int, value: Any) -> bytes:
    match kind:
        case 1 | 2:
            return bytes([TRUE if value else FALSE])
        case 3:
            return bytes([value])
        case 4 | 5 | 6:
            return _folded(value)
        case 7:
            return struct.pack("<d", value)
        case 8:
            return _varint(len(value)) + bytes(value)
        case 9 | 10:
            inner, values = value
            count = len(values)
            head = bytes([count << 4 | inner]) if count < _LONG else bytes([0xF0 | inner])
            head += b"" if count < _LONG else _varint(count)
            return head + b"".join(_value_written(inner, each) for each in values)
    return serialize(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _folded(value: int) -> bytes:
    return _varint((value << 1) ^ (value >> 63))


def _unfolded(value: int) -> int:
    return (value >> 1) ^ -(value & 1)
