"""Lookup of the offset of a root attribute's value in the bytes of an HDF5 file.

h5py does not expose that offset. A program that adds its own attributes may move ours, because the
root's object header then continues elsewhere in the file. This module parses the object header
according to the HDF5 File Format Specification, sections II (superblock, version 0) and IV.A
(object header, version 1). `datasets` creates files of these versions, and no program changes the
versions of an existing file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from tallyroll.storage.formats.hdf5.user_block import USER_BLOCK_NBYTES

_SUPERBLOCK = struct.Struct("<8s8B2HI4Q2Q")
_HEADER = struct.Struct("<BxHII4x")
_MESSAGE = struct.Struct("<HHB3x")
_ATTRIBUTE = struct.Struct("<BBHHH")
_CONTINUED, _IS_ATTRIBUTE = 0x0010, 0x000C
_MOST_BLOCKS = 4096
_LARGEST_BLOCK = 2**26


def value_places(file: int) -> dict[str, int]:
    """Return the offset of the value of every attribute of the root, by name.

    Raises:
        ValueError: the layout of the file differs from that of files that we create.
    """
    found: dict[str, int] = {}
    for kind, at, message in _messages(file):
        if kind == _IS_ATTRIBUTE:
            try:
                name, start = _value_in(message)
            except (struct.error, UnicodeDecodeError) as error:
                raise ValueError(f"an attribute at byte {at} cannot be read") from error
            found[name] = at + start
    return found


def _messages(file: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the kind, the offset and the content of each message in the root's object header."""
    try:
        *_, base, _, _, _, _, root = _SUPERBLOCK.unpack(
            os.pread(file, _SUPERBLOCK.size, USER_BLOCK_NBYTES)
        )
        version, _, _, nbytes = _HEADER.unpack(os.pread(file, _HEADER.size, base + root))
    except (struct.error, OSError, OverflowError) as error:
        raise ValueError("no root object header of version 1") from error
    if version != 1:
        raise ValueError(f"expected an object header of version 1, got version {version}")
    blocks = [(base + root + _HEADER.size, nbytes)]
    for start, size in blocks:  # the list grows during the iteration
        if size > _LARGEST_BLOCK or len(blocks) > _MOST_BLOCKS:
            raise ValueError("an object header that is too large")
        try:
            block, at = os.pread(file, size, start), 0
        except (OSError, OverflowError) as error:
            raise ValueError("an object header that is not in the file") from error
        while at + _MESSAGE.size <= len(block):
            kind, length, _ = _MESSAGE.unpack_from(block, at)
            at += _MESSAGE.size
            content = block[at : at + length]
            if kind == _CONTINUED and length >= 16:
                place, more = struct.unpack_from("<QQ", content)
                blocks.append((base + place, more))
            yield kind, start + at, content
            at += length


def _value_in(message: bytes) -> tuple[str, int]:
    """Return the name of an attribute, and the offset of the value in its message."""
    version, _, *sizes = _ATTRIBUTE.unpack_from(message)
    at = _ATTRIBUTE.size + (version >= 3)
    name = message[at : at + sizes[0]].split(b"\0")[0].decode()
    if version == 1:  # each part is padded
        sizes = [-(-size // 8) * 8 for size in sizes]
    return name, at + sum(sizes)
