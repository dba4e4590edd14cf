"""Images of Minari in JPEG: which columns are, and their pixels, which JPEG has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.pictures import Decoder, Picture
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.spaces import Space

_LEAST_SIDE: Final = 32
"""Pixels of the smallest side of an image that Minari encodes."""
_MOST_NBYTES: Final = 2**26
"""Bytes of an image that is read."""


def pictures_of(spaces: Mapping[Key, Space]) -> dict[Key, tuple[int, ...]]:
    """Return the shapes of the values that Minari writes as JPEG, where it does, by their places.

    By its own rule: images of bytes that may be anything, of 32 pixels and more to a side.
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
    """Images [n, *shape], of which each is decoded where it is asked for.

    Args:
        stored: the JPEG of each: bytes, arrays of bytes, or a table of bytes [n, size].
        shape: of an image.
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
        """Return the pixels of images [n, *shape], of ``()`` all; raise InvalidDataset."""
        stored = self._stored[slice(None) if rows == () else rows]
        images = [self._decoder.decoded(each) for each in _contents(stored)]
        return np.asarray(images, np.uint8).reshape(len(images), *self._shape)


def _contents(stored: Any) -> Iterator[bytes]:
    for each in stored:
        content = each.as_py() if hasattr(each, "as_py") else np.asarray(each, np.uint8).tobytes()
        if not isinstance(content, bytes) or len(content) > _MOST_NBYTES:
            raise InvalidDataset("an image is missing, or too large")
        yield content
