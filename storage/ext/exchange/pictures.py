"""Encode images as PNG and decode them. The decoder compares sizes before it decodes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.rows.schema import Column

_MODES: Final = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_READ: Final = ("PNG", "JPEG")
_LEVEL: Final = 1
"""The zlib level. Higher levels take several times as long and save a tenth of the bytes."""
_LEAST_SIDE, _MOST_CHANNELS = 8, 4


@dataclass(frozen=True)
class Picture:
    """The layout of an image column: height, width, channels, and whether channels come first."""

    height: int
    width: int
    channels: int
    first: bool

    @classmethod
    def of(cls, column: Column) -> Picture | None:
        """Return the layout of a column's values, or None if they are not images."""
        if column.dtype is not torch.uint8:
            return None
        match column.shape:
            case (height, width):
                found = cls(height, width, 1, False)
            case (height, width, channels) if channels <= _MOST_CHANNELS:
                found = cls(height, width, channels, False)
            case (channels, height, width) if channels <= _MOST_CHANNELS:
                found = cls(height, width, channels, True)
            case _:
                return None
        return found if min(found.height, found.width) >= _LEAST_SIDE else None

    def out(self, values: np.ndarray) -> np.ndarray:
        """Convert a column's values to images [n, height, width, channels]."""
        shape = (len(values), self.height, self.width, self.channels)
        return np.moveaxis(values, 1, -1) if self.first else values.reshape(shape)

    def back(self, images: np.ndarray, column: Column) -> np.ndarray:
        """Convert images [n, height, width, channels] to a column's values."""
        values = np.moveaxis(images, -1, 1) if self.first else images
        return np.ascontiguousarray(values).reshape(len(images), *column.shape)


class Pngs:
    """Encodes images as PNG. ``extra`` names the extra that installs Pillow."""

    def __init__(self, picture: Picture, extra: str) -> None:
        self._pillow: Any = needed("PIL.Image", extra, "an image needs")
        self._picture = picture

    def encoded(
        self, values: np.ndarray, before: tuple[np.ndarray, list[bytes]] | None = None
    ) -> list[bytes]:
        """Return a PNG for each value of a column.

        Args:
            values: the values to encode.
            before: if ``values`` are the next values of another column, the values of that column
                and their PNGs. A next value that equals the value of the following row reuses its
                PNG.
        """
        known = np.zeros(len(values), bool)
        if before is not None:
            differ = values[:-1] != before[0][1:]
            known[:-1] = ~differ.reshape(len(differ), -1).any(1) if len(differ) else False
        new = iter(self._encoded(values[~known]))
        return [
            before[1][row + 1] if before is not None and there else next(new)
            for row, there in enumerate(known)
        ]

    def _encoded(self, values: np.ndarray) -> list[bytes]:
        images = np.ascontiguousarray(self._picture.out(values))
        if self._picture.channels == 1:
            images = images[..., 0]
        found = []
        for image in images:
            file = io.BytesIO()
            picture = self._pillow.fromarray(image)
            picture.save(file, format="PNG", compress_level=_LEVEL)
            found.append(file.getvalue())
        return found


class Decoder:
    """Decodes images of one size. It rejects other sizes before it allocates memory for them."""

    def __init__(self, picture: Picture, extra: str) -> None:
        self._pillow: Any = needed("PIL.Image", extra, "an image needs")
        self._picture = picture

    def values(self, contents: Iterable[bytes], count: int, column: Column) -> np.ndarray:
        """Return ``count`` values of a column, one per image. Raises as `decoded` does."""
        picture = self._picture
        images = np.empty((count, picture.height, picture.width, picture.channels), np.uint8)
        for number, content in enumerate(contents):
            images[number] = self.decoded(content)
        return picture.back(images, column)

    def decoded(self, content: bytes) -> np.ndarray:
        """Decode an image to an array [height, width, channels].

        Raises:
            InvalidDataset: the image is damaged, or of another size or mode.
        """
        wanted = (self._picture.width, self._picture.height)
        mode = _MODES[self._picture.channels]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the size is compared below
                with self._pillow.open(io.BytesIO(content), formats=_READ) as image:
                    if image.size != wanted or image.mode != mode:
                        raise InvalidDataset(
                            f"an image has {image.size} pixels of {image.mode}, expected {wanted} "
                            f"of {mode}"
                        )
                    found = np.asarray(image)
        except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError) as error:
            raise InvalidDataset(f"an image cannot be decoded ({error})") from error
        except self._pillow.DecompressionBombError as error:
            raise InvalidDataset(f"an image is too large ({error})") from error
        return found.reshape(self._picture.height, self._picture.width, self._picture.channels)
