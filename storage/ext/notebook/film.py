"""Videos of stored episodes, made from the images in their rows."""

from __future__ import annotations

import io
import os
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from tallyroll.storage.errors import ColumnsMissing, MissingLibrary
from tallyroll.storage.ext.exchange.pictures import Picture
from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import NEXT, Key, as_key, format_key

RATE: Final = 30
"""Frames per second."""
_CODECS = ("libx264", "mpeg4")
_AT_ONCE: Final = 256
_MOST_NBYTES: Final = 8_000_000
"""Largest size of a video that a notebook stores in its file."""
_LEAST_WIDTH: Final = 320
_LEAST_SIDE: Final = 256


class Mp4:
    """Encoder that writes frames to an MP4 file one by one.

    Pixels of small images are repeated, by the smallest whole number with which the longer side has
    at least 256 pixels.

    Args:
        av: PyAV.
        file: the file.
        rate: frames per second.
    """

    def __init__(self, av: Any, file: IO[bytes], rate: int = RATE) -> None:
        self._av, self._rate = av, rate
        self._container: Any = av.open(file, "w", format="mp4")
        self._stream: Any = None
        self._shape: tuple[int, ...] = ()
        self.frames = self.width = 0
        """Number of frames written, and their width in pixels."""

    def add(self, image: np.ndarray) -> None:
        """Add an image, uint8 ``[height, width, 3]``.

        Raises:
            ValueError: the image has another size than the earlier ones.
            MissingLibrary: PyAV lacks the encoders.
        """
        if self._shape not in ((), image.shape):
            raise ValueError(
                f"video: expected frames of one size, {[*self._shape[:2]]}, got "
                f"{[*image.shape[:2]]}"
            )
        scale = max(1, -(-_LEAST_SIDE // max(image.shape[:2])))
        scaled = image.repeat(scale, axis=0).repeat(scale, axis=1)
        padded = np.pad(scaled, [(0, scaled.shape[0] % 2), (0, scaled.shape[1] % 2), (0, 0)])
        if self._stream is None:
            self._stream, self._shape = self._begun(padded.shape[1], padded.shape[0]), image.shape
            self.width = scaled.shape[1]
        frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(padded), format="rgb24")
        self._container.mux(self._stream.encode(frame))
        self.frames += 1

    def _begun(self, width: int, height: int) -> Any:
        codec = next((name for name in _CODECS if name in self._av.codecs_available), None)
        if codec is None:
            raise MissingLibrary(
                f"video: expected PyAV with one of the encoders {', '.join(_CODECS)}, got a build "
                "without them"
            )
        stream = self._container.add_stream(codec, rate=self._rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        return stream

    def close(self) -> None:
        """Encode the remaining frames and finish the video. Does not close ``file``."""
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))
        self._container.close()


@dataclass(frozen=True)
class Video:
    """A video of an episode, which a notebook shows."""

    data: bytes = field(repr=False)
    """The MP4 file."""
    frames: int
    """The number of frames: one per row, and the final observation."""
    width: int
    """The width in pixels."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the video to a file, and replace an existing file."""
        Path(path).write_bytes(self.data)

    def _repr_html_(self) -> str:
        if len(self.data) > _MOST_NBYTES:
            size = f"{len(self.data) / 1e6:,.1f} MB"
            return f"<div>a video of {self.frames:,} frames, {size}: use save(path)</div>"
        text = b64encode(self.data).decode()
        return (
            f'<video controls loop width="{max(self.width, _LEAST_WIDTH)}" '
            f'style="image-rendering: pixelated" src="data:video/mp4;base64,{text}"></video>'
        )


def film(reader: RowReader, rows: np.ndarray, column: str | Key | None, rate: int) -> Video:
    """Return a video of the images in ``rows`` [n]; see `StoredTrajectories.video`."""
    key, picture = _images_of(reader, column)
    av, file = needed("av", "video", "a video needs"), io.BytesIO()
    encoder = Mp4(av, file, rate)
    for start in range(0, len(rows), _AT_ONCE):
        for image in _coloured(picture, reader.column(key).take(rows[start : start + _AT_ONCE])):
            encoder.add(image)
    if (final := (NEXT, *key)) in reader.schema:
        for image in _coloured(picture, reader.column(final).take(rows[-1:])):
            encoder.add(image)
    encoder.close()
    return Video(file.getvalue(), encoder.frames, encoder.width)


def _images_of(reader: RowReader, column: str | Key | None) -> tuple[Key, Picture]:
    found = {each.key: Picture.of(each) for each in reader.schema.columns if each.key[0] != NEXT}
    images = {key: picture for key, picture in found.items() if picture is not None}
    wanted = next(iter(images), None) if column is None else as_key(column)
    if isinstance(column, str) and wanted not in found:
        wanted = tuple(column.split("/"))
    if wanted is None or wanted not in images:
        got = "no column of images" if column is None else format_key(as_key(column))
        names = ", ".join(map(format_key, images)) or "uint8 images of 8 x 8 pixels or more"
        raise ColumnsMissing(
            f"video: expected one of {names}, got {got}. `tallyroll replay --render` films what "
            "the environment draws."
        )
    return wanted, images[wanted]


def _coloured(picture: Picture, values: np.ndarray) -> np.ndarray:
    """Return images [n, height, width, 3]. Of a stack of frames, take the last one."""
    images = picture.out(values)
    if picture.channels != 3:
        images = images[..., -1:]
    return np.broadcast_to(images, (*images.shape[:3], 3))
