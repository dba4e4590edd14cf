"""The first bytes of a header: magic, format version, slots of the ring, CRC of the schema."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.files.format_versions import (
    FORMAT_VERSION,
    READABLE,
    is_newer,
    mismatch,
    require_readable,
)
from tallyroll.storage.files.header_words import COUNT_BITS

_MAGIC = b"TALLYROL"
_IDENTITY = struct.Struct("<8sqqq")
_CHECKSUM = struct.Struct("<I")
_MOST_SLOTS = 2 ** (COUNT_BITS - 2)


def identity_bytes(schema_crc: int, ring: int, version: int = FORMAT_VERSION) -> bytes:
    """Return the first bytes of a header for a ring of ``ring`` slots (0: no ring)."""
    identity = _IDENTITY.pack(_MAGIC, version, ring, schema_crc)
    return identity + _CHECKSUM.pack(zlib.crc32(identity))


def refuse_newer(header: bytes, path: Path) -> None:
    """Raise `FormatVersionMismatch` if the header is of a later version.

    A later header may have another layout. A damaged version number of a known header does not
    raise this error, because the checksum still matches the header with a known version.
    """
    content = header[: _IDENTITY.size + _CHECKSUM.size].ljust(_IDENTITY.size + _CHECKSUM.size)
    magic, version, *rest = _IDENTITY.unpack_from(content)
    if magic != _MAGIC or not is_newer(version):
        return
    (checksum,) = _CHECKSUM.unpack_from(content, _IDENTITY.size)
    ours = (_IDENTITY.pack(magic, known, *rest) for known in READABLE)
    if checksum not in map(zlib.crc32, ours):
        raise mismatch(version, path)


def ring_of(header: bytes, path: Path, *, schema_crc: int, version: int) -> int:
    """Check the first bytes of a header and return the number of slots of the ring.

    Raises:
        CorruptStorage: the bytes are damaged, or their version or schema differs from the manifest.
        FormatVersionMismatch: the version is not supported.
    """
    identity = header[: _IDENTITY.size]
    magic, found, ring, crc = _IDENTITY.unpack(identity)
    (checksum,) = _CHECKSUM.unpack_from(header, _IDENTITY.size)
    if magic != _MAGIC or checksum != zlib.crc32(identity):
        raise CorruptStorage(
            f"{path} does not begin with a valid header: its first bytes are damaged. Restore it "
            "from a copy."
        )
    if not 0 <= ring <= _MOST_SLOTS:
        raise CorruptStorage(
            f"{path} reports a ring of {ring} rows, which is not a possible size. Restore it from "
            "a copy."
        )
    if require_readable(found, path) != version:
        raise CorruptStorage(
            f"{path} has format version {found}, but its manifest has version {version}. Restore "
            "both from one copy."
        )
    if crc != schema_crc:
        raise CorruptStorage(
            f"{path} was made for a different schema than its manifest declares. Restore both from "
            "one copy."
        )
    return int(ring)
