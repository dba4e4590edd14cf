"""Copy of the metadata at the front of a packed HDF5 file.

HDF5 stores the manifest and the state tables after all rows, and chunk positions throughout the
file. The HDF5 library therefore cannot read anything of a truncated file. The user block before
HDF5's own bytes contains a copy of this metadata, which `repair` uses to read the remaining chunks.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tallyroll.storage.ext.packed.layout import ArrayLayout
from tallyroll.storage.files.manifest import MANIFEST_LIMIT, Manifest

MAGIC: Final = b"tallyroll packed rows\n"
LEAST: Final = 512
"""The size of the smallest user block that HDF5 supports, in bytes."""
_HEAD: Final = struct.Struct("<QI")
_SPARE: Final = 2**12
_LIMIT: Final = 2 * MANIFEST_LIMIT


@dataclass(frozen=True)
class Front:
    """The manifest, and the positions of the chunks of each array."""

    manifest: bytes
    places: tuple[tuple[np.ndarray, np.ndarray], ...]
    """The offsets [chunks] and the sizes [chunks] in bytes of the chunks of each array."""
    tables: dict[int, list[bytes]]
    """The stored chunks of the arrays that are written last, by array index."""


def room_for(manifest: Manifest, layouts: Sequence[ArrayLayout], rows: int) -> int:
    """Return a user block size in bytes that is most likely sufficient for the copy.

    The size allows for one trajectory start per eight rows.
    """
    chunks = sum(each.chunks for each in layouts)
    wanted = _SPARE + len(json.dumps(manifest)) + 8 * chunks + rows // 4
    return int(max(LEAST, 1 << (wanted - 1).bit_length()))


def serialize(manifest: bytes, places: Sequence[tuple[list[int], list[int]]], tables: Any) -> bytes:
    """Serialize the copy from the fields of a `Front`; ``tables`` may be any mapping."""
    arrays = []
    for starts, sizes in places:
        ends = [0, *(start + size for start, size in zip(starts, sizes, strict=True))]
        # Most chunks begin where the previous one ends, so the differences compress well.
        steps = [start - end for start, end in zip(starts, ends, strict=False)]
        arrays.append([steps, sizes])
    packed = {
        number: [base64.b64encode(each).decode() for each in chunks]
        for number, chunks in tables.items()
    }
    value = {"manifest": manifest.decode(), "arrays": arrays, "tables": packed}
    content = zlib.compress(json.dumps(value).encode())
    return MAGIC + _HEAD.pack(len(content), zlib.crc32(content)) + content


def front_in(file: Any) -> Front | None:
    """Read the copy from an open file; return None if it is missing or damaged.

    Raises:
        OSError: the disk failed to read the file.
    """
    file.seek(0)
    head = file.read(len(MAGIC) + _HEAD.size)
    if len(head) < len(MAGIC) + _HEAD.size or not head.startswith(MAGIC):
        return None
    nbytes, checksum = _HEAD.unpack_from(head, len(MAGIC))
    if not 0 < nbytes <= min(_LIMIT, os.fstat(file.fileno()).st_size):
        return None
    content = file.read(nbytes)
    if len(content) < nbytes or zlib.crc32(content) != checksum:
        return None
    try:
        tool = zlib.decompressobj()
        value = json.loads(tool.decompress(content, _LIMIT))
        places = tuple(_places(*each) for each in value["arrays"])
        tables = {
            int(number): [base64.b64decode(each) for each in chunks]
            for number, chunks in value["tables"].items()
        }
        return Front(value["manifest"].encode(), places, tables)
    except (zlib.error, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        return None
    except RecursionError:
        return None


def _places(steps: Any, sizes: Any) -> tuple[np.ndarray, np.ndarray]:
    nbytes, between = (np.asarray(each, np.int64).reshape(-1) for each in (sizes, steps))
    starts = np.cumsum(between)
    starts[1:] += np.cumsum(nbytes)[:-1]
    return starts, nbytes
