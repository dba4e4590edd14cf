"""Encode the images of episodes as videos, one series of files per video feature."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage.ext.exchange.folders import expand_template
from tallyroll.storage.ext.exchange.lerobot import layout, videos
from tallyroll.storage.ext.exchange.lerobot.features import LeRobotFeature
from tallyroll.storage.ext.exchange.lerobot.options import LeRobotOptions
from tallyroll.storage.ext.exchange.lerobot.videos import VideoWriter
from tallyroll.storage.rows.keys import NEXT, Key

Rows = Mapping[Key, np.ndarray]


class Films:
    """Writes the videos of a folder.

    After the frames of an episode, the next image of its last row is written, so that no final
    observation is lost. LeRobot does not read this frame.
    """

    def __init__(
        self, place: Path, features: list[LeRobotFeature], options: LeRobotOptions
    ) -> None:
        self.features = [each for each in features if each.kind == "video"]
        self._options, self.lost = options, {"lossy_frames": 0, "next_observations": 0}
        followed = {each.source for each in features if each.kind == "following"}
        self._each = [
            _FilmOf(place, each, options, followed=each.column.key in followed)
            for each in self.features
        ]

    def __enter__(self) -> Films:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for each in self._each:
                stack.callback(each.close)
        lossy = self._options.video not in videos.LOSSLESS
        self.lost["lossy_frames"] = sum(each.written for each in self._each) if lossy else 0
        self.lost["next_observations"] = sum(each.wrong for each in self._each)

    def add(self, piece: Rows, *, begins: bool, ended: bool) -> None:
        """Append rows of one episode.

        Args:
            piece: the rows.
            begins: True if the rows start the episode.
            ended: True if the rows end the episode.
        """
        for each in self._each:
            each.add(piece, begins=begins, ended=ended)

    def times(self, length: int) -> dict[str, int | float]:
        """Return the place of the finished episode in each video, for the table of episodes."""
        found: dict[str, int | float] = {}
        for each in self._each:
            begin = f"videos/{each.feature.name}/"
            chunk, file = divmod(each.number, layout.CHUNK)
            found |= {f"{begin}chunk_index": chunk, f"{begin}file_index": file}
            found[f"{begin}from_timestamp"] = each.first / self._options.fps
            found[f"{begin}to_timestamp"] = (each.first + length) / self._options.fps
        return found

    def info_entry(self, feature: LeRobotFeature) -> dict[str, Any]:
        """Return the entry of a video in ``info.json``."""
        assert feature.picture is not None
        assert self._options.video is not None
        codec, form = videos.codec_of(self._options.video)
        return {
            "video.height": feature.picture.height,
            "video.width": feature.picture.width,
            "video.codec": codec,
            "video.pix_fmt": form,
            "video.is_depth_map": False,
            "video.fps": self._options.fps,
            "video.channels": 3,
            "has_audio": False,
        }


class _FilmOf:
    """Writes the videos of one feature."""

    def __init__(
        self, place: Path, feature: LeRobotFeature, options: LeRobotOptions, *, followed: bool
    ) -> None:
        assert feature.picture is not None
        self.feature, self._place, self._options = feature, place, options
        self._picture, self._followed = feature.picture, followed
        self.number = self.first = self.wrong = self.written = 0
        self._film: VideoWriter | None = None
        self._after: np.ndarray | None = None
        """The next image of the last row that was added, while the episode continues."""

    def _path(self) -> Path:
        chunk, file = divmod(self.number, layout.CHUNK)
        path = expand_template(
            layout.VIDEOS, video_key=self.feature.name, chunk_index=chunk, file_index=file
        )
        return self._place / path

    def _opened(self) -> VideoWriter:
        place = self._path()
        place.parent.mkdir(parents=True, exist_ok=True)
        return VideoWriter(place, self._picture, self._options)

    def add(self, piece: Rows, *, begins: bool, ended: bool) -> None:
        if begins:
            if self._film is None:
                self._film = self._opened()
            elif self._film.nbytes >= layout.VIDEO_MB * 2**20:
                self._film.close()
                self.number += 1
                self._film = self._opened()
            self.first, self._after = self._film.frames, None
        assert self._film is not None
        key = self.feature.column.key
        images = self._picture.out(piece[key])
        self._film.write(images)
        self.written += len(images)
        if not self._followed:
            return
        after = self._picture.out(piece[NEXT, *key])
        if self._after is not None:
            self.wrong += bool((self._after != images[:1]).any())
        differ = after[:-1] != images[1:]
        self.wrong += int(differ.reshape(len(differ), -1).any(1).sum()) if len(differ) else 0
        self._after = after[-1:]
        if ended:
            self._film.write(after[-1:])
            self.written += 1

    def close(self) -> None:
        if self._film is not None:
            self._film.close()
