"""The user block at the start of our HDF5 files: the header, and the manifest in two slots.

HDF5 reserves the user block for the program that creates the file. Offsets in bytes::

    0               the header (see `files/commit_header.py`)
    HEADER_NBYTES   two manifest slots, each: magic, sequence, length, CRC, JSON
    2**20           HDF5 begins

A manifest is written to the slot that does not hold the newest one. A torn manifest fails its CRC,
and the older one remains.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.files.commit_header import HEADER_NBYTES, header_bytes
from tallyroll.storage.files.safe_files import open_any, write_all

USER_BLOCK_NBYTES = 2**20

_MAGIC = b"TALLYMAN"
_SLOT = struct.Struct("<8sqqI")
_PAGE = 4096
_SLOT_NBYTES = (USER_BLOCK_NBYTES - HEADER_NBYTES) // 2 // _PAGE * _PAGE
_STARTS = (HEADER_NBYTES, HEADER_NBYTES + _SLOT_NBYTES)
MANIFEST_LIMIT = _SLOT_NBYTES - _SLOT.size
"""Maximum size of a manifest in bytes."""
_MOST_MANIFESTS = 2**62
"""Upper bound of sequence numbers, so that a later manifest can always be numbered."""

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_HEADER_MAGIC = header_bytes(0)[: len(_MAGIC)]


def _descriptor(path: Path) -> int:
    return open_any(path, os.O_RDONLY | os.O_CLOEXEC)


def is_hdf5(path: Path) -> bool:
    """Return True if the file contains HDF5, after a user block of any size."""
    if not path.is_file():
        return False
    try:
        with open(_descriptor(path), "rb") as file:
            size, at = os.fstat(file.fileno()).st_size, 0
            while at + len(_SIGNATURE) <= size:
                if os.pread(file.fileno(), len(_SIGNATURE), at) == _SIGNATURE:
                    return True
                at = max(512, 2 * at)
    except OSError:
        return False
    return False


def is_ours(path: Path) -> bool:
    """Return True if the file begins with our user block, even if damaged; may raise OSError."""
    if not path.is_file():  # opening a pipe would block
        return False
    with open(_descriptor(path), "rb") as file:
        begin = file.read(len(_HEADER_MAGIC))
        return begin == _HEADER_MAGIC or has_slots(file.fileno())


def has_slots(file: int) -> bool:
    """Return True if a manifest has ever been written."""
    return any(os.pread(file, len(_MAGIC), at) == _MAGIC for at in _STARTS)


def newest_manifest(file: int) -> bytes | None:
    """Return the newest intact manifest, or None.

    Raises:
        CorruptStorage: the sequence number of the manifest is too large.
    """
    found = [each for at in _STARTS if (each := _read(file, at))]
    sequence, content = max(found, default=(0, None))
    if sequence > _MOST_MANIFESTS:
        raise CorruptStorage(
            f"the manifest in the user block has number {sequence}, but a file has at most "
            f"{_MOST_MANIFESTS} manifests. Restore the file from a copy."
        )
    return content


def _read(file: int, at: int) -> tuple[int, bytes] | None:
    head = os.pread(file, _SLOT.size, at)
    if len(head) < _SLOT.size:
        return None
    magic, sequence, length, crc = _SLOT.unpack(head)
    if magic != _MAGIC or sequence < 1 or not 0 <= length <= MANIFEST_LIMIT:
        return None
    content = os.pread(file, length, at + _SLOT.size)
    return (sequence, content) if _crc(sequence, content) == crc else None


def write_manifest(file: int, content: bytes, *, durable: bool = False) -> None:
    """Write a manifest of up to `MANIFEST_LIMIT` bytes to the slot that has the older manifest.

    If ``durable`` is True, a power cut leaves the first manifest of a file either complete or
    absent.

    Raises:
        OSError: the file system refuses.
    """
    newest = [found[0] if (found := _read(file, at)) else 0 for at in _STARTS]
    at = _STARTS[newest.index(min(newest))]
    sequence = max(newest) + 1
    head = _SLOT.pack(_MAGIC, sequence, len(content), _crc(sequence, content))
    write_all(file, content, at + len(head))
    if durable:
        os.fdatasync(file)
    write_all(file, head, at)


def _crc(sequence: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(struct.pack("<qq", sequence, len(content))))
