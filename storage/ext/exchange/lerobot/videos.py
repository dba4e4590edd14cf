"""Encode frames as videos with PyAV, and decode them, one file and one frame at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.lerobot.options import LeRobotOptions
from tallyroll.storage.ext.exchange.pictures import Picture
from tallyroll.storage.formats.optional_libraries import needed

LOSSLESS: Final = ("h264-lossless", "ffv1")
ENDS: Final = {".mp4": "mov", ".mkv": "matroska"}
"""File suffixes and their container formats. PyAV does not probe for other formats."""

_KEY_FRAMES: Final = "2"
"""The key frame interval. Two, as in LeRobot, makes random access to frames fast."""
_SVT_LOG, _ERRORS = "SVT_LOG", "1"
"""The environment variable that makes the AV1 encoder print errors only."""
_BORDER: Final = 256
_STREAMS: Final = 16
"""The number of streams whose frame size is bounded while a file is opened."""
_CODECS: Final = {"av1", "h264", "hevc", "vp9", "mpeg4", "ffv1", "libdav1d", "libaom-av1"}


def av_module() -> Any:
    """Return PyAV."""
    return needed("av", "lerobot", "videos of LeRobot need")


class VideoWriter:
    """Writes a video file, one frame after another."""

    def __init__(self, place: Path, picture: Picture, options: LeRobotOptions) -> None:
        self._av = av_module()
        assert options.video is not None
        encoder, form, settings = _encoder(options, picture)
        os.environ.setdefault(_SVT_LOG, _ERRORS)
        self._file = self._av.open(str(place), "w")
        try:
            stream = self._file.add_stream(encoder, rate=options.fps, options=settings)
            stream.width, stream.height, stream.pix_fmt = picture.width, picture.height, form
            stream.codec_context.thread_count = 1
            stream.codec_context.time_base = Fraction(1, options.fps)
        except BaseException:
            self._file.close()
            raise
        self._stream, self._options = stream, options
        self._gray = form == "gray"
        self.frames = self.nbytes = 0

    def write(self, images: np.ndarray) -> None:
        """Append images [n, height, width, 1 or 3]."""
        form = "gray" if self._gray else "rgb24"
        if images.shape[-1] == 1:
            images = images[..., 0] if self._gray else np.repeat(images, 3, -1)
        for image in np.ascontiguousarray(images):
            frame = self._av.VideoFrame.from_ndarray(image, format=form)
            frame.pts, frame.time_base = self.frames, Fraction(1, self._options.fps)
            self._mux(frame)
            self.frames += 1

    def _mux(self, frame: Any) -> None:
        packets = self._stream.encode(frame)
        self.nbytes += sum(each.size for each in packets)
        self._file.mux(packets)

    def close(self) -> None:
        """Flush the encoder and write the index of the file."""
        try:
            self._mux(None)
        finally:
            self._file.close()


def _encoder(options: LeRobotOptions, picture: Picture) -> tuple[str, str, dict[str, str]]:
    """Return the name of an encoder, its pixel format, and its settings."""
    crf = {"crf": str(options.crf), "g": _KEY_FRAMES}
    match options.video:
        case "av1":
            return "libsvtav1", "yuv420p", {**crf, "preset": "12", "svtav1-params": "lp=1"}
        case "h264":
            return "libx264", "yuv420p", {**crf, "preset": "superfast"}
        case "h264-lossless":
            return "libx264rgb", "rgb24", {"qp": "0", "g": _KEY_FRAMES, "preset": "ultrafast"}
    return (
        "ffv1",
        "gray" if picture.channels == 1 else "bgr0",
        {
            "level": "3",
            "coder": "0",
            "slices": "1",
            "g": _KEY_FRAMES,
        },
    )


def codec_of(video: str) -> tuple[str, str]:
    """Return the codec and the pixel format that ``info.json`` records for a `Video` option."""
    return {
        "av1": ("av1", "yuv420p"),
        "h264": ("h264", "yuv420p"),
        "h264-lossless": ("h264", "gbrp"),
        "ffv1": ("ffv1", "bgr0"),
    }[video]


class Frames:
    """The frames of a video file in order, all of the expected size."""

    def __init__(self, file: IO[bytes], name: str, picture: Picture) -> None:
        self._av = av_module()
        self._raw, self._name, self._picture = file, name, picture
        # Frames may be larger than the header says. The bound keeps decoders from allocating
        # memory for such frames.
        self._bound = {"max_pixels": str(_padded(picture.width, picture.height))}
        container = ENDS.get(Path(name).suffix, "mov")
        try:
            self._file = self._av.open(
                file, "r", format=container, stream_options=[self._bound] * _STREAMS
            )
        except self._errors as error:
            file.close()
            raise InvalidDataset(f"{name} cannot be opened ({error})") from error

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._av.error.FFmpegError, ValueError, OSError, LookupError, MemoryError)

    def __iter__(self) -> Iterator[tuple[float, np.ndarray]]:
        """Yield the time of each frame in seconds, and the frame [height, width, channels].

        Raises:
            InvalidDataset: a frame is damaged, or of another size.
        """
        picture, size = self._picture, (self._picture.width, self._picture.height)
        try:
            if not self._file.streams.video:
                raise InvalidDataset(f"{self._name} has no video")
            stream = self._file.streams.video[0]
            context = stream.codec_context
            if context.name not in _CODECS or (context.width, context.height) != size:
                raise InvalidDataset(
                    f"{self._name}: expected {size[0]} x {size[1]} pixels in a known codec, got "
                    f"{context.width} x {context.height} pixels in {context.name!s:.40}"
                )
            context.options = self._bound
            context.thread_count = 1
            for frame in self._file.decode(stream):
                if frame.pts is None:
                    continue
                if (frame.width, frame.height) != size:
                    raise InvalidDataset(f"{self._name} has frames of different sizes")
                form = "gray" if picture.channels == 1 else "rgb24"
                if picture.channels == 1 and frame.format.name != "gray":
                    image = frame.to_ndarray(format="rgb24")[..., :1]
                else:
                    image = frame.to_ndarray(format=form)
                yield float(frame.pts * stream.time_base), image.reshape(*image.shape[:2], -1)
        except self._errors as error:
            raise InvalidDataset(f"{self._name} cannot be decoded ({error})") from error

    def close(self) -> None:
        """Close the video, and the file below it, which PyAV leaves open."""
        with contextlib.closing(self._raw):
            self._file.close()


def _padded(width: int, height: int) -> int:
    """Return the number of pixels of a frame with the borders that decoders add."""
    return (width + _BORDER) * (height + _BORDER)
