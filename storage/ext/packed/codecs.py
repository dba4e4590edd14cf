"""Codecs of chunks, with the names of Zarr v3. Libraries are imported on first use.

A stored chunk consists of its compressed bytes and their CRC-32C, which is checked before
decompression. The decompressed size that a chunk declares is also checked before decompression.
"""

from __future__ import annotations

import struct
import threading
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.formats.optional_libraries import needed

LEVELS: Final = {"zstd": (1, 22), "shuffle": (1, 9), "gzip": (1, 9)}
"""Codecs with levels, and the minimum and maximum level of each."""
NAMES: Final = ("zstd", "shuffle", "none")
"""Codecs for Zarr: ``zstd``; ``shuffle``, which is Blosc with byte shuffle and zstd; ``none``."""
_USUAL_LEVEL: Final = {"zstd": 3, "shuffle": 5, "gzip": 4}

_SUM: Final = struct.Struct("<I")
# Header of a Blosc chunk with one block and one zstd stream, up to and including its length.
_BLOSC_HEAD: Final = struct.Struct("<BBBBIIIII")
_BLOSC_FLAGS: Final = 4 << 5 | 1 << 4 | 1
"""Flags for zstd compression in a single stream after a byte shuffle."""
_BLOSC_MOST: Final = 2**31 - 1 - 16


class BadChunk(CorruptStorage):
    """The bytes of a chunk are damaged."""


@lru_cache
def library(name: str) -> Any:
    """Import zstandard or google_crc32c.

    Raises:
        MissingLibrary: the library is not installed.
    """
    return needed(name, "pack", "packed rows need")


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of ``content``."""
    found: int = library("google_crc32c").value(content)
    return found


_OF_THREAD: Final = threading.local()


def _decompressor() -> Any:
    """Return this thread's decompressor; creating one takes as long as decompressing a chunk."""
    try:
        return _OF_THREAD.zstd
    except AttributeError:
        _OF_THREAD.zstd = library("zstandard").ZstdDecompressor()
        return _OF_THREAD.zstd


def _unzstd(frame: bytes, nbytes: int) -> bytes:
    """Decompress a zstd frame; raise BadChunk unless it declares and contains ``nbytes`` bytes."""
    zstd = library("zstandard")
    try:
        if (found := zstd.frame_content_size(frame)) != nbytes:
            raise BadChunk(f"it declares {found} bytes, expected {nbytes}")
        body: bytes = _decompressor().decompress(frame, allow_extra_data=False)
    except zstd.ZstdError as error:
        raise BadChunk(f"it cannot be decompressed ({error})") from error
    return body


@dataclass(frozen=True)
class Codec:
    """Codec with a level, spelled ``zstd:3``, ``shuffle`` or ``none``; the level has a default.

    Raises:
        ValueError: the codec or the level does not exist.
    """

    name: str
    level: int = 0

    def __post_init__(self) -> None:
        if self.name == "none" and not self.level:
            return
        if self.name not in LEVELS:
            raise ValueError(f"codec: expected one of {', '.join(NAMES)}, got {self.name!r:.80}.")
        least, most = LEVELS[self.name]
        if type(self.level) is not int or not least <= self.level <= most:
            raise ValueError(
                f"codec {self.name}: expected a level from {least} to {most}, got "
                f"{self.level!r:.80}."
            )

    @classmethod
    def of(cls, text: str | Codec) -> Codec:
        """Parse the spelling of a codec."""
        if isinstance(text, Codec):
            return text
        name, colon, level = str(text).partition(":")
        if name == "none" and colon:
            raise ValueError(f'codec: expected "none" without a level, got {text!r:.80}.')
        if not colon:
            return cls(name, _USUAL_LEVEL.get(name, 0))
        if not level.isdecimal() or len(level) > 2:
            raise ValueError(f"codec: expected a name, or NAME:LEVEL, got {text!r:.80}.")
        return cls(name, int(level))

    def __str__(self) -> str:
        return f"{self.name}:{self.level}" if self.level else self.name

    def require(self, nbytes: int) -> None:
        """Raise ValueError if the codec cannot compress chunks of ``nbytes`` bytes."""
        if self.name == "shuffle" and nbytes > _BLOSC_MOST:
            raise ValueError(
                f"codec {self.name}: expected chunks of less than 2 GiB, got chunks of {nbytes:,} "
                "bytes. Use zstd."
            )

    def as_zarr(self, itemsize: int) -> list[dict[str, Any]]:
        """Return the codecs of a chunk for the metadata of a Zarr array."""
        found: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.name == "zstd":
            settings: dict[str, Any] = {"level": self.level, "checksum": False}
            found.append({"name": "zstd", "configuration": settings})
        elif self.name != "none":
            settings = {"typesize": itemsize, "cname": "zstd", "clevel": self.level}
            settings |= {"shuffle": self.name, "blocksize": 0}
            found.append({"name": "blosc", "configuration": settings})
        return [*found, {"name": "crc32c"}]

    @cached_property
    def _zstd(self) -> Any:
        return library("zstandard").ZstdCompressor(level=self.level)

    def most_stored(self, nbytes: int) -> int:
        """Return an upper bound of the stored size of a chunk of ``nbytes`` bytes."""
        return nbytes + nbytes // 128 + 4096

    def encode(self, chunk: np.ndarray) -> bytes:
        """Encode a C-contiguous chunk for storage. One thread at a time may call this."""
        if self.name == "none":
            body = chunk.tobytes()
        elif self.name == "zstd":
            body = self._zstd.compress(chunk)
        else:
            body = self._blosc(chunk)
        return body + _SUM.pack(crc32c(body))

    # Blosc libraries share a semaphore with all forked processes, so this class does not use them.

    def _blosc(self, chunk: np.ndarray) -> bytes:
        size, nbytes = chunk.itemsize, chunk.nbytes
        values = chunk.reshape(-1).view(np.uint8).reshape(-1, size)
        shuffled = np.ascontiguousarray(values.T)
        stream: bytes = self._zstd.compress(shuffled)
        if len(stream) >= nbytes:
            stream = shuffled.tobytes()
        head = (2, 1, _BLOSC_FLAGS, size, nbytes, nbytes, _BLOSC_HEAD.size + len(stream))
        return _BLOSC_HEAD.pack(*head, _BLOSC_HEAD.size - 4, len(stream)) + stream

    def _unblosc(self, body: bytes, nbytes: int, size: int) -> np.ndarray:
        if body[: _BLOSC_HEAD.size] != _BLOSC_HEAD.pack(
            *(2, 1, _BLOSC_FLAGS, size, nbytes, nbytes, len(body), _BLOSC_HEAD.size - 4),
            max(0, len(body) - _BLOSC_HEAD.size),
        ):
            raise BadChunk("its header does not match its content")
        stream = body[_BLOSC_HEAD.size :]
        if len(stream) != nbytes:
            stream = _unzstd(stream, nbytes)
        shuffled = np.frombuffer(stream, np.uint8).reshape(size, nbytes // size)
        return np.ascontiguousarray(shuffled.T).reshape(-1)

    def decode(self, stored: bytes, nbytes: int, itemsize: int) -> np.ndarray:
        """Decompress a chunk to ``nbytes`` bytes, uint8 [nbytes].

        ``itemsize`` is the number of bytes per item of the array.

        Raises:
            BadChunk: the bytes are not such a chunk.
        """
        body = stored[: -_SUM.size]
        if len(stored) < _SUM.size or _SUM.pack(crc32c(body)) != stored[-_SUM.size :]:
            raise BadChunk("its checksum does not match")
        if self.name == "shuffle":
            return self._unblosc(body, nbytes, itemsize)
        if self.name == "zstd":
            return np.frombuffer(_unzstd(body, nbytes), np.uint8)
        if len(body) != nbytes:
            raise BadChunk(f"it has {len(body)} bytes, expected {nbytes}")
        return np.frombuffer(body, np.uint8)


def stored_nbytes(codec: Codec, content: bytes, nbytes: int) -> int:
    """Return the stored size in bytes of the chunk at the start of ``content``.

    The chunk declares this size, except with the codec ``none``. ``nbytes`` is the size of the
    chunk after decompression.

    Raises:
        ValueError, IndexError, struct.error: ``content`` does not start with a valid chunk.
    """
    if codec.name == "shuffle":
        found = int(_BLOSC_HEAD.unpack_from(content)[6])
        if found < _BLOSC_HEAD.size:
            raise ValueError("its header declares too few bytes")
        return found + _SUM.size
    return (_zstd_nbytes(content) if codec.name == "zstd" else nbytes) + _SUM.size


def _zstd_nbytes(content: bytes) -> int:
    """Return the size of the zstd frame at the start of ``content`` (RFC 8878, 3.1.1)."""
    if content[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("it is not a zstd frame")
    about = content[4]
    alone, summed = about >> 5 & 1, about >> 2 & 1
    at = 5 + (1 - alone) + (0, 1, 2, 4)[about & 3] + (alone, 2, 4, 8)[about >> 6]
    last = 0
    while not last:
        head = int.from_bytes(content[at : at + 3], "little")
        if at + 3 > len(content):
            raise ValueError("it was cut short")
        last, kind, size = head & 1, head >> 1 & 3, head >> 3
        at += 3 + (1 if kind == 1 else size)  # kind 1 is a run of a single byte
    return at + 4 * summed


def inflate(stored: bytes, mask: int, shuffled: bool, nbytes: int, itemsize: int) -> np.ndarray:
    """Decompress a gzip chunk of an HDF5 dataset to uint8 [nbytes].

    ``mask`` has a bit for each filter that HDF5 skipped. ``shuffled`` is True if the dataset also
    has the shuffle filter.

    Raises:
        BadChunk: the bytes are not such a chunk.
    """
    if mask:
        raise BadChunk("it was written without some of its filters")
    tool = zlib.decompressobj()
    try:
        body = tool.decompress(stored, nbytes + 1)
    except zlib.error as error:
        raise BadChunk(f"it cannot be decompressed ({error})") from error
    if len(body) != nbytes or not tool.eof:
        raise BadChunk(f"its decompressed size is not {nbytes} bytes")
    found = np.frombuffer(body, np.uint8)
    return np.ascontiguousarray(found.reshape(itemsize, -1).T).reshape(-1) if shuffled else found
