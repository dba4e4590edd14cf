"""Convert the values of a feature from and to the lists of a record."""

from __future__ import annotations

import math
import zlib
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.pictures import Decoder, Pngs
from tallyroll.storage.ext.exchange.rlds.features import Kind, RldsFeature

_EXTRA: Final = "rlds"
_LISTS: Final[dict[Kind, str]] = {"floats": "float_list", "integers": "int64_list"}
_BYTES: Final = "bytes_list"


class RldsValues:
    """Reads and writes the values of one feature."""

    def __init__(self, feature: RldsFeature) -> None:
        self.feature = feature
        self._list = _LISTS.get(feature.kind, _BYTES)
        # The number of list entries per step: one per number, or one for all bytes of a step.
        self._size = 1 if self._list == _BYTES else math.prod(feature.column.shape)
        picture = feature.picture
        self._pngs = None if picture is None else Pngs(picture, _EXTRA)
        self._decoder = None if picture is None else Decoder(picture, _EXTRA)

    def put(self, found: Any, values: np.ndarray) -> None:
        """Append values [steps, *shape] to a feature of a record."""
        flat, entries = np.ascontiguousarray(values).reshape(-1), self.entries(found)
        match self.feature.kind:
            case "floats":
                entries.extend(flat.view(np.uint32).tolist())
            case "integers":
                entries.extend(flat.astype(np.int64).tolist())
            case "bytes":
                content, size = flat.tobytes(), self.feature.column.row_nbytes
                entries.extend(content[at : at + size] for at in range(0, len(content), size))
            case "image":
                assert self._pngs is not None
                entries.extend(self._pngs.encoded(values))

    def count(self, found: Any) -> int:
        """Return the number of steps in a feature of a record.

        Raises:
            InvalidDataset: the number of entries is not a multiple of the entries per step.
        """
        entries = len(self.entries(found))
        count, rest = divmod(entries, self._size)
        if rest:
            raise InvalidDataset(
                f"{self.feature.name} has {entries:,} numbers, expected {self._size} for each step"
            )
        return count

    def entries(self, found: Any) -> Any:
        """Return the list that holds the values; it is empty if they are of another kind."""
        return getattr(found, self._list).value

    def get(self, found: Any) -> np.ndarray:
        """Return the values [steps, *shape] of a feature of a record.

        Raises:
            InvalidDataset: the values are damaged, or of another dtype or size.
            NotEnoughMemory: the values do not fit into memory.
        """
        count, column, entries = self.count(found), self.feature.column, self.entries(found)
        if 2 * count * column.row_nbytes > BLOCK_NBYTES:
            require_memory(
                2 * count * column.row_nbytes,
                f"{count:,} steps of an episode",
                "Use a machine with more memory.",
            )
        match self.feature.kind:
            case "floats":
                bits = np.fromiter(entries, np.uint32, len(entries))
                flat = bits.view(np.float32).astype(column.numpy_dtype, copy=False)
            case "integers":
                flat = self._integers(np.fromiter(entries, np.int64, len(entries)))
            case "bytes":
                flat = np.frombuffer(b"".join(map(self._content, entries)), column.numpy_dtype)
            case "image":
                assert self._decoder is not None
                return self._decoder.values(entries, count, column)
        return flat.reshape(count, *column.shape)

    def _integers(self, values: np.ndarray) -> np.ndarray:
        dtype = self.feature.column.numpy_dtype
        found = values.astype(dtype)
        if (found.astype(np.int64) != values).any():
            raise InvalidDataset(f"{self.feature.name} has numbers that do not fit {dtype}")
        return found

    def _content(self, content: bytes) -> bytes:
        """Return the bytes of one value, decompressed."""
        size = self.feature.column.row_nbytes
        if self.feature.zipped:
            unpacking = zlib.decompressobj()
            try:
                content = unpacking.decompress(content, size + 1)
            except zlib.error as error:
                raise InvalidDataset(f"{self.feature.name} cannot be unpacked ({error})") from error
        if len(content) != size:
            raise InvalidDataset(
                f"{self.feature.name} has a value of {len(content):,} bytes, expected {size:,}"
            )
        if self.feature.column.dtype is torch.bool and max(content) > 1:
            raise InvalidDataset(f"{self.feature.name} has a byte that is not a bool")
        return content

    def image(self, content: bytes) -> np.ndarray:
        """Decode an image to an array [height, width, channels].

        Raises:
            InvalidDataset: the image is damaged, or of another size.
        """
        assert self._decoder is not None
        return self._decoder.decoded(content)
