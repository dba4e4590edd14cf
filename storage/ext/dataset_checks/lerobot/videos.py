"""Checks of LeRobot videos: one frame for each row, at its time. No frame is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import MissingLibrary
from tallyroll.storage.ext.dataset_checks.checker import CheckResults, DatasetFolder, Where
from tallyroll.storage.ext.dataset_checks.lerobot.listing import ListedEpisode, Listing
from tallyroll.storage.formats.optional_libraries import needed

_MOST_PACKETS: Final = 2**26


@dataclass(frozen=True)
class Frames:
    """The times and size of the frames of a video, according to its container."""

    times: np.ndarray
    """The times of the frames in seconds, sorted."""
    height: int
    width: int


def check_videos(
    folder: DatasetFolder, info: Mapping[str, Any], listing: Listing, found: CheckResults
) -> None:
    """Compare the videos of all cameras with the lists of episodes."""
    if not listing.cameras:
        found.skipped["videos"] = "there are no videos"
        return
    try:
        av = needed("av", "video", "videos need")
    except MissingLibrary as error:
        found.skipped["videos"] = str(error)
        return
    for camera in listing.cameras:
        by_file: dict[str, list[ListedEpisode]] = {}
        for episode in listing.episodes:
            if camera in episode.films:
                by_file.setdefault(episode.films[camera].file, []).append(episode)
        for name in folder.below("videos", ".mp4"):
            if f"/{camera}/" in f"/{name}" and name not in by_file:
                found.add("files", "a video belongs to no episode", Where(name))
        for name, episodes in by_file.items():
            frames = frames_of(av, folder, name, found)
            if frames is not None:
                _Film(name, camera, frames, info, found).check(episodes)


def frames_of(av: Any, folder: DatasetFolder, name: str, found: CheckResults) -> Frames | None:
    """Return the frames of a video. If it cannot be read, add a finding and return None."""
    raw = folder.opened(name, "videos")
    if raw is None:
        return None
    times = []
    with raw:
        try:
            # A fixed format keeps FFmpeg from opening other files to which the content refers.
            with av.open(raw, format="mp4") as container:
                stream = container.streams.video[0]
                for packet in container.demux(stream):
                    if packet.size and packet.pts is not None:
                        times.append(float(packet.pts * packet.time_base))
                    if packet.is_corrupt or len(times) > _MOST_PACKETS:
                        raise ValueError("a frame is damaged, or there are too many frames")
                size = int(stream.height), int(stream.width)
        except (av.error.FFmpegError, ValueError, IndexError, OSError, EOFError) as error:
            message = "a video cannot be read"
            found.add("videos", message, Where(name), f"{error!s:.200}")
            return None
    return Frames(np.sort(np.asarray(times)), *size)


class _Film:
    """A video and the episodes in it."""

    def __init__(
        self, name: str, camera: str, frames: Frames, info: Mapping[str, Any], found: CheckResults
    ) -> None:
        self._where, self._frames, self._found = Where(name), frames, found
        self._name, self._rate = name, info["fps"]
        self._said = info["features"][camera].get("shape")

    def check(self, episodes: list[ListedEpisode]) -> None:
        found, frames = self._found, self._frames
        wanted = sum(each.length for each in episodes)
        alone = len(episodes) == 1
        where = Where(self._name, episodes[0].number) if alone else self._where
        if len(frames.times) != wanted:
            what = f"{len(frames.times):,} frames, but its episodes have {wanted:,} rows"
            found.add("videos", "a video does not have one frame per row", where, what)
        if isinstance(self._said, list) and sorted([frames.height, frames.width]) != sorted(
            _sizes(self._said)
        ):
            what = f"{frames.height} x {frames.width}, expected {self._said!r:.60}"
            found.add("videos", "frames have the wrong size", where, what)
        if self._rate is None or len(frames.times) < 2:
            return
        steps = np.diff(frames.times)
        wrong = np.abs(steps - 1 / self._rate) > 0.5 / self._rate
        if wrong.any():
            at = int(np.argmax(wrong))
            what = f"frame {at + 1} is {steps[at]:.4g} s after the previous one"
            found.add(
                "videos", "the time between frames does not match the frame rate", where, what
            )
        self._parts(episodes)

    def _parts(self, episodes: list[ListedEpisode]) -> None:
        """Compare the times of episodes with one another, and with the end of the video."""
        found, half = self._found, 0.5 / self._rate
        end = float(self._frames.times[-1]) + 1 / self._rate
        before = 0.0
        for episode in episodes:
            film = next(each for each in episode.films.values() if each.file == self._name)
            if film.begin is None and film.end is None:
                continue
            where = Where(self._name, episode.number)
            if not isinstance(film.begin, float) or not isinstance(film.end, float):
                found.add("videos", "an episode does not declare its part of the video", where)
                continue
            what = f"from {film.begin:.4g} to {film.end:.4g} s"
            if abs(film.end - film.begin - episode.length / self._rate) > half:
                message = "the length of an episode's part of the video does not match its rows"
                found.add("videos", message, where, what)
            if film.begin < before - half:
                message = "an episode's part of the video overlaps that of another episode"
                found.add("videos", message, where, what)
            if film.end > end + half:
                message = "an episode's part of the video extends beyond the end of the video"
                found.add("videos", message, where, what)
            before = max(before, film.end)


def _sizes(shape: list[Any]) -> list[int]:
    """Return the height and width of a shape with channels first or last."""
    whole = [each for each in shape if type(each) is int]
    if len(whole) == 3:
        return whole[:2] if whole[2] in (1, 3, 4) else whole[1:]
    return whole
