"""Read and write structs of Thrift's compact protocol without a schema. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
_DEEPEST: Final = 32
_MOST: Final = 2**22
_LONG: Final = 15

Fields = dict[int, tuple[int, Any]]
"""The fields of a struct by number, each with its type and value.

The value of a list is the type of its elements and the elements.
"""


@dataclass
class Reader:
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


def written(fields: Fields) -> bytes:
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
    return written(value)


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
