"""JPEG images of Minari: find their columns, and decode them. Their compression is lossy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.pictures import Decoder, Picture
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.spaces import Space

_LEAST_SIDE: Final = 32
"""The smallest height and width, in pixels, of an image that Minari encodes."""
_MOST_NBYTES: Final = 2**26
"""The maximum size in bytes of an encoded image."""


def pictures_of(spaces: Mapping[Key, Space]) -> dict[Key, tuple[int, ...]]:
    """Return the shapes of the values that Minari stores as JPEG, by path.

    By Minari's rule, these are images of unbounded uint8 values with at least 32 pixels per side.
    """
    found = dict[Key, tuple[int, ...]]()
    for path, space in spaces.items():
        shape = space.shape or ()
        image = len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)
        large = image and min(shape[:2]) >= _LEAST_SIDE
        if large and space.dtype == np.uint8 and space.takes_all:
            found[path] = shape
    return found


class Jpegs:
    """Images [n, *shape] that are decoded on access.

    Args:
        stored: the JPEGs: bytes, arrays of bytes, or a table of bytes [n, size].
        shape: the shape of an image.
    """

    dtype: Final = np.dtype(np.uint8)

    def __init__(self, stored: Any, shape: tuple[int, ...]) -> None:
        self._stored, self._shape = stored, shape
        channels = shape[2] if len(shape) == 3 else 1
        self._decoder = Decoder(Picture(shape[0], shape[1], channels, False), extra="minari")
        self.shape = (len(stored), *shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Decode images to pixels [n, *shape]; ``()`` selects all. Raises `InvalidDataset`."""
        stored = self._stored[slice(None) if rows == () else rows]
        images = [self._decoder.decoded(each) for each in _contents(stored)]
        return np.asarray(images, np.uint8).reshape(len(images), *self._shape)


def _contents(stored: Any) -> Iterator[bytes]:
    for each in stored:
        content = each.as_py() if hasattr(each, "as_py") else np.asarray(each, np.uint8).tobytes()
        if not isinstance(content, bytes) or len(content) > _MOST_NBYTES:
            raise InvalidDataset("an image is missing, or too large")
        yield content
