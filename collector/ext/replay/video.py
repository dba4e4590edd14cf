"""Videos and images of replayed trajectories."""

from __future__ import annotations

import os
import struct
import zlib
from typing import Any, Self

import numpy as np
from gymnasium.error import DependencyNotInstalled
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import SyncVectorEnv
from torchrl.envs import EnvBase

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.setup.traits import system_of
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra
from tallyroll.collector.ext.replay.comparison import Difference
from tallyroll.storage.errors import MissingLibrary
from tallyroll.storage.ext.notebook.film import Mp4

Array = np.ndarray[Any, Any]

_MODE = 'make the environment with render_mode="rgb_array"'


class EpisodeVideo:
    """Context manager that writes an MP4 file frame by frame.

    Args:
        path: path of the file. An existing file is replaced.

    Raises:
        MissingExtra: PyAV is not installed.
        ArgumentError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._av: Any = needs("av", "video", "films")
        self._path = path
        if not path.endswith(".mp4"):
            raise ArgumentError(f"video: expected a file that ends in .mp4, got {path!r}")

    def __enter__(self) -> Self:
        try:
            self._file = open(self._path, "wb")
        except OSError as error:
            raise ArgumentError(
                f"video: {self._path} cannot be written: {error.strerror}"
            ) from error
        self._encoder = Mp4(self._av, self._file)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._encoder.close()
        finally:
            self._file.close()
            if not self.frames:
                os.unlink(self._path)

    def show(self, env: EnvBase, lane: int) -> None:
        """Render a lane and add the image as a frame."""
        self.add(rendered(env, lane))

    def add(self, image: Array) -> None:
        """Add an image, uint8 ``[height, width, 3]``."""
        try:
            self._encoder.add(image)
        except (ValueError, MissingLibrary) as error:
            raise EnvironmentRefused(str(error)) from error

    @property
    def frames(self) -> int:
        """Number of frames written."""
        return self._encoder.frames


def rendered(env: EnvBase, lane: int) -> Array:
    """Render a lane as an image, uint8 ``[height, width, 3]``.

    Raises:
        EnvironmentRefused: the environment does not render images.
        MissingExtra: a package for rendering is not installed.
    """
    base = system_of(env)
    kind = type(env).__name__ if base is None else base.kind
    inner = None if base is None else getattr(base.system, "env", None)
    vector = getattr(inner, "unwrapped", None)
    if not isinstance(vector, SyncVectorEnv):
        raise EnvironmentRefused(
            f"{kind} cannot be filmed: expected a Gymnasium environment, given by its id or by a "
            "factory"
        )
    try:
        image = vector.envs[lane].render()
    except DependencyNotInstalled as error:
        raise MissingExtra(f"{kind} cannot be filmed: {error}") from error
    except GymnasiumError as error:
        raise EnvironmentRefused(f"{kind} cannot be filmed: {error}; {_MODE}") from error
    found = np.asarray(image)
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[-1] != 3:
        raise EnvironmentRefused(
            f"render(): expected an image, uint8 [height, width, 3], got {type(image).__name__}; "
            f"{_MODE}"
        )
    return found


def write_picture(difference: Difference, path: str) -> None:
    """Write a PNG file with the stored image, the replayed image and their differences.

    Raises:
        ArgumentError: the value is not an image, or the file cannot be written.
    """
    if not difference.is_image:
        raise ArgumentError(
            f"{difference.column} is not an image (uint8, height and width), so no picture can be "
            "drawn"
        )
    images = [_coloured(each) for each in (difference.stored, difference.replayed)]
    apart = np.abs(images[0].astype(np.int16) - images[1].astype(np.int16)).max(axis=-1)
    marked = np.where(apart > 0, np.maximum(apart, 64), 0).astype(np.uint8)
    images.append(np.stack([marked, np.zeros_like(marked), np.zeros_like(marked)], axis=-1))
    line = np.full((images[0].shape[0], 2, 3), 255, np.uint8)
    whole = np.concatenate([images[0], line, images[1], line, images[2]], axis=1)
    try:
        with open(path, "wb") as file:
            file.write(png(whole))
    except OSError as error:
        raise ArgumentError(f"the picture {path} cannot be written: {error.strerror}") from error


def _coloured(image: Array) -> Array:
    """Convert an image to ``[height, width, 3]``."""
    image = image[..., None] if image.ndim == 2 else image[..., :3]
    return np.broadcast_to(image, (*image.shape[:2], 3))


def png(image: Array) -> bytes:
    """Encode an image, uint8 ``[height, width, 3]``, as a PNG file."""
    height, width, _ = image.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
