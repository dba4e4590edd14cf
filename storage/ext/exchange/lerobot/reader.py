"""Read the rows of a LeRobot folder, a few megabytes at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.arrow import ArrowColumn
from tallyroll.storage.ext.exchange.base import Block, refused
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.lerobot import tables
from tallyroll.storage.ext.exchange.lerobot.episodes import LeRobotEpisodes
from tallyroll.storage.ext.exchange.lerobot.features import LeRobotFeature, from_numbers
from tallyroll.storage.ext.exchange.lerobot.videos import Frames
from tallyroll.storage.ext.exchange.parquet import damage_of, opened_parquet
from tallyroll.storage.ext.exchange.pictures import Decoder
from tallyroll.storage.files.safe_files import Inside

_PIECE_ROWS: Final = 2**14
_EPISODE: Final = "episode_index"


class LeRobotSource:
    """The rows of a LeRobot folder.

    Args:
        inside: the files of the folder.
        features: the features to read.
        episodes: the episodes of the folder.
        fps: the number of steps per second.
        place: the folder.
        row_nbytes: the size of a row in memory, in bytes.
    """

    def __init__(
        self,
        inside: Inside,
        features: Sequence[LeRobotFeature],
        episodes: LeRobotEpisodes,
        fps: float,
        place: Path,
        row_nbytes: int,
    ) -> None:
        self._inside, self._place = inside, place
        self._episodes, self._fps = episodes, fps
        self._tables = [each for each in features if each.kind in ("numbers", "image")]
        self._decoders = {
            each.name: Decoder(each.picture, "lerobot")
            for each in features
            if each.kind == "image" and each.picture
        }
        follows = {each.source: each for each in features if each.kind == "following"}
        self._reels = [
            _Reel(inside, each, follows.get(each.column.key), episodes, fps, place)
            for each in features
            if each.kind == "video"
        ]
        self._opened = contextlib.ExitStack()
        self._size = max(1, min(_PIECE_ROWS, BLOCK_NBYTES // row_nbytes))

    def blocks(self) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
        """Yield blocks of rows, with the episode number and the step of each row.

        Raises:
            InvalidDataset: the files are damaged.
        """
        arrow, number = tables.arrow_module(), 0
        try:
            for path, group in groupby(self._episodes.data):
                count = len(list(group))
                yield from self._of_file(path, number, number + count)
                self._opened.close()
                number += count
        except damage_of(arrow) as error:
            raise refused(self._place, str(error)) from error

    def close(self) -> None:
        """Close all open files."""
        with self._opened:
            for reel in self._reels:
                self._opened.callback(reel.close)

    def _of_file(
        self, path: str, first: int, last: int
    ) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
        """Yield the rows of a file, which has the episodes ``first`` to ``last - 1``."""
        stops = np.cumsum(self._episodes.lengths[first:last])
        starts = stops - self._episodes.lengths[first:last]
        raw = os.fdopen(self._inside.open(self._place / path, os.O_RDONLY), "rb")
        file = opened_parquet(raw, path, self._place, self._opened)
        if file.metadata.num_rows != stops[-1]:
            raise InvalidDataset(
                f"{path} has {file.metadata.num_rows:,} rows, but its episodes have {stops[-1]:,}"
            )
        names = [each.name for each in self._tables] + [_EPISODE]
        at = 0
        for batch in file.iter_batches(self._size, columns=names, use_threads=False):
            rows = np.arange(at, at + batch.num_rows)
            at += batch.num_rows
            near = np.searchsorted(stops, rows, side="right")
            numbers, steps = near + first, rows - starts[near]
            said = batch.column(_EPISODE).to_numpy(zero_copy_only=False)
            if (said != numbers).any():
                wrong = int((said != numbers).argmax())
                raise InvalidDataset(
                    f"{path}: expected the episode index {numbers[wrong]} in row {rows[wrong]:,}, "
                    f"as the table of episodes lists it, got {said[wrong]!s:.40}"
                )
            block: Block = {each.column.key: self._values(batch, each) for each in self._tables}
            for reel in self._reels:
                block |= reel.frames(numbers, steps)
            yield block, numbers, steps

    def _values(self, batch: Any, feature: LeRobotFeature) -> np.ndarray:
        if feature.kind == "numbers":
            column = ArrowColumn(feature.name, feature.number_column)
            return from_numbers(column.of(tables.arrow_module(), batch), feature)
        found = batch.column(feature.name)
        decoder = self._decoders[feature.name]
        return decoder.values(_images(found, feature.name), len(found), feature.column)


def _images(found: Any, name: str) -> Iterator[bytes]:
    """Yield the encoded images in a column of a table."""
    for content in found.field(tables.IMAGE_PARTS[0]):
        if not content.is_valid:
            raise InvalidDataset(f"{name} has an image that the table does not hold")
        yield content.as_py()


class _Reel:
    """The frames of a video feature, in the order of the rows."""

    def __init__(
        self,
        inside: Inside,
        feature: LeRobotFeature,
        follows: LeRobotFeature | None,
        episodes: LeRobotEpisodes,
        fps: float,
        place: Path,
    ) -> None:
        assert feature.picture is not None
        self._inside, self._place = inside, place
        self._feature, self._follows, self._picture = feature, follows, feature.picture
        self._paths, self._begins = episodes.videos[feature.name], episodes.begins[feature.name]
        self._fps = fps
        self._path = ""
        self._file: Frames | None = None
        self._rest: Iterator[tuple[float, np.ndarray]] = iter(())
        self._time, self._frame = -1.0, np.empty(0, np.uint8)

    def frames(self, numbers: np.ndarray, steps: np.ndarray) -> Block:
        """Return the frames of rows and, if a column of next images exists, the next frames."""
        picture, count = self._picture, len(numbers)
        shape = (count, picture.height, picture.width, picture.channels)
        found = np.empty(shape, np.uint8)
        after = np.empty(shape if self._follows is not None else 0, np.uint8)
        for row, (number, step) in enumerate(zip(numbers.tolist(), steps.tolist(), strict=True)):
            found[row] = self._at(number, step)
            if self._follows is not None:
                after[row] = self._at(number, step + 1)
        block = {self._feature.column.key: picture.back(found, self._feature.column)}
        if self._follows is not None:
            block[self._follows.column.key] = picture.back(after, self._follows.column)
        return block

    def _at(self, number: int, step: int) -> np.ndarray:
        """Return the frame of a step. Successive calls must not go back within a file."""
        if (path := self._paths[number]) != self._path:
            self._open(path)
        near = 0.5 / self._fps
        wanted = float(self._begins[number]) + step / self._fps
        while self._time <= wanted - near:
            found = next(self._rest, None)
            self._time, self._frame = (np.inf, self._frame) if found is None else found
        if self._time >= wanted + near:
            raise InvalidDataset(f"{path} has no frame of episode {number} at {wanted:.4f} s")
        return self._frame

    def _open(self, path: str) -> None:
        self.close()
        descriptor = self._inside.open(self._place / path, os.O_RDONLY)
        self._file = Frames(os.fdopen(descriptor, "rb"), path, self._picture)
        self._rest, self._path, self._time = iter(self._file), path, -1.0

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()
            self._file, self._path = None, ""
