"""Write rows to a LeRobot folder, a few megabytes at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.exchange.folders import expand_template
from tallyroll.storage.ext.exchange.lerobot import layout, statistics, tables
from tallyroll.storage.ext.exchange.lerobot.features import (
    OWN,
    LeRobotFeature,
    features_of,
    to_numbers,
)
from tallyroll.storage.ext.exchange.lerobot.options import LeRobotOptions
from tallyroll.storage.ext.exchange.lerobot.statistics import Numbers, Pixels
from tallyroll.storage.ext.exchange.lerobot.video_encoding import Films
from tallyroll.storage.ext.exchange.pictures import Pngs
from tallyroll.storage.rows.keys import NEXT, Key

_PIECE_ROWS: Final = 2**14
_WIDEST: Final = 1024
"""The maximum number of elements of a feature that gets statistics."""
_EPISODES: Final = 1024
"""The number of episodes that are written at a time."""
_NO_TASK: Final = "no task given"

Rows = Mapping[Key, np.ndarray]


class LeRobotWriter:
    """Writes a LeRobot folder, one episode after another."""

    def __init__(self, rows: ExportRows, place: Path, options: LeRobotOptions) -> None:
        self._rows, self._place, self._options = rows, place, options
        even = options.video in ("av1", "h264")
        self._features = features_of(rows.schema, video=options.video is not None, even=even)
        self._stops = np.array(rows.stops(), np.int64)
        self._starts = np.concatenate(([0], self._stops[:-1])) if len(self._stops) else self._stops
        self._task = options.task or _NO_TASK
        self._data = _DataFiles(place, self._features)
        self._films = Films(place, self._features, options)
        self._episodes = _Episodes(place, self._features, self._task, len(rows))

    def write(self) -> Mapping[str, int]:
        """Write all rows and return the number of lost items, by reason."""
        with contextlib.closing(self._data), self._films, contextlib.closing(self._episodes):
            at = 0
            for block in self._rows.blocks():
                count = len(next(iter(block.values())))
                for start in range(0, count, _PIECE_ROWS):
                    piece = {k: values[start : start + _PIECE_ROWS] for k, values in block.items()}
                    self._write(piece, at + start)
                at += count
        self._write_meta()
        return self._films.lost

    def _write(self, piece: Rows, at: int) -> None:
        count = len(next(iter(piece.values())))
        index = np.arange(at, at + count)
        episode = np.searchsorted(self._stops, index, side="right")
        frame = index - self._starts[episode]
        own = {
            "timestamp": (frame / self._options.fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": episode,
            "index": index,
            "task_index": np.zeros(count, np.int64),
        }
        begins = np.flatnonzero(frame == 0)
        places = self._data.write(piece, own, begins)
        matrix = self._episodes.matrix(piece, own)
        edges = [0, *(begins[begins > 0]).tolist(), count]
        for start, stop in pairwise(edges):
            part = {key: values[start:stop] for key, values in piece.items()}
            number = int(episode[start])
            length = int(self._stops[number] - self._starts[number])
            if frame[start] == 0:
                self._episodes.begin(number, int(self._starts[number]), length, places[start])
            self._episodes.add(matrix[start:stop], part)
            ended = at + stop == self._stops[number]
            self._films.add(part, begins=frame[start] == 0, ended=bool(ended))
            if ended:
                self._episodes.end(self._films.times(length))

    def _write_meta(self) -> None:
        fps, count = self._options.fps, len(self._stops)
        said = {each.name: each.info_entry for each in self._features if each.kind != "following"}
        for each in self._films.features:
            said[each.name]["info"] = self._films.info_entry(each)
        said |= {name: {"dtype": d, "shape": [1], "names": None} for name, d in OWN.items()}
        info = {
            "codebase_version": layout.VERSION,
            "robot_type": None,
            "total_episodes": count,
            "total_frames": len(self._rows),
            "total_tasks": 1 if count else 0,
            "chunks_size": layout.CHUNK,
            "data_files_size_in_mb": layout.DATA_MB,
            "video_files_size_in_mb": layout.VIDEO_MB,
            "fps": fps,
            "splits": {"train": f"0:{count}"},
            "data_path": layout.DATA,
            "video_path": layout.VIDEOS if self._films.features else None,
            "features": said,
        }
        about = {**self._rows.about, "lerobot": {"video": self._options.video}}
        self._put(layout.INFO, info, indent=4)
        self._put(layout.STATS, self._episodes.of_all(), indent=None)
        self._put(layout.ABOUT, about, indent=None)
        tables.write_tasks(self._place / layout.TASKS, [self._task] if count else [])

    def _put(self, name: str, value: Any, indent: int | None) -> None:
        place = self._place / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(value, indent=indent, allow_nan=False))


class _DataFiles:
    """The data files. Each episode is in a single file."""

    def __init__(self, place: Path, features: list[LeRobotFeature]) -> None:
        self._place, self._number = place, 0
        self._features = [each for each in features if each.kind in ("numbers", "image")]
        self._pngs = {
            e.name: Pngs(e.picture, "lerobot") for e in features if e.kind == "image" and e.picture
        }
        self._kinds = tables.data_kinds(features)
        self._writer = self._opened()

    def _path(self) -> Path:
        chunk, file = divmod(self._number, layout.CHUNK)
        return self._place / expand_template(layout.DATA, chunk_index=chunk, file_index=file)

    def _opened(self) -> Any:
        return tables.writer(self._path(), self._kinds)

    def write(
        self, piece: Rows, own: Mapping[str, np.ndarray], begins: np.ndarray
    ) -> dict[int, tuple[int, int]]:
        """Write rows. Return the chunk and file of each episode that begins, by its first row."""
        batch, first = self._batch(piece, own), int(begins[0]) if len(begins) else -1
        if first >= 0 and self._path().stat().st_size >= layout.DATA_MB * 2**20:
            if first:
                self._writer.write_batch(batch.slice(0, first))
            self._writer.close()
            self._number += 1
            self._writer = self._opened()
            batch = batch.slice(first)
        self._writer.write_batch(batch)
        return dict.fromkeys(begins.tolist(), divmod(self._number, layout.CHUNK))

    def _batch(self, piece: Rows, own: Mapping[str, np.ndarray]) -> Any:
        arrow, arrays, pngs = tables.arrow_module(), [], self._encoded(piece)
        for feature in self._features:
            values = piece[feature.column.key]
            if feature.kind == "numbers":
                arrays.append(tables.numbers_array(values, feature))
            else:
                arrays.append(tables.images_array(pngs[feature.name]))
        arrays += [arrow.array(own[name]) for name in OWN]
        return arrow.RecordBatch.from_arrays(arrays, schema=self._kinds)

    def _encoded(self, piece: Rows) -> dict[str, list[bytes]]:
        """Encode the images of rows, by feature.

        Next images reuse the PNGs of the following rows.
        """
        found, made = dict[str, list[bytes]](), dict[Key, tuple[np.ndarray, list[bytes]]]()
        images = [each for each in self._features if each.kind == "image"]
        for feature in sorted(images, key=lambda each: each.column.key[0] == NEXT):
            key = feature.column.key
            before = made.get(key[1:]) if key[0] == NEXT else None
            if before is not None and before[0].shape != piece[key].shape:
                before = None
            found[feature.name] = self._pngs[feature.name].encoded(piece[key], before)
            made[key] = piece[key], found[feature.name]
        return found

    def close(self) -> None:
        """Finish the last file."""
        self._writer.close()


class _Episodes:
    """The table of episodes, with the statistics of each episode and of all episodes."""

    def __init__(self, place: Path, features: list[LeRobotFeature], task: str, rows: int) -> None:
        self._path = place / expand_template(layout.EPISODES, chunk_index=0, file_index=0)
        self._task = task
        self._writer: Any = None
        self._numbers = [
            each
            for each in features
            if each.kind == "numbers" and tables.width(each.number_column.shape) <= _WIDEST
        ]
        self._pictures = [e for e in features if e.kind in ("image", "video")]
        self._shapes = {each.name: each.number_column.shape for each in self._numbers}
        self._shapes |= dict.fromkeys(OWN, (1,))
        width = sum(map(tables.width, self._shapes.values()))
        self._all = statistics.of_all(rows, width)
        self._all_pixels = {each.name: _pixels(each, 1) for each in self._pictures}
        self._current = Numbers(1)
        self._current_pixels = dict[str, Pixels]()
        self._line = dict[str, int | float]()
        self._lines = list[dict[str, int | float]]()
        self._found = list[np.ndarray]()
        self._found_pixels = list[dict[str, Pixels]]()

    def matrix(self, piece: Rows, own: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return all numbers that get statistics, float64 [rows, numbers]."""
        count = len(own["index"])
        found = np.empty((count, sum(map(tables.width, self._shapes.values()))))
        at = 0
        with np.errstate(all="ignore"):  # statistics leave out NaN and infinite values
            for values in (
                *(to_numbers(piece[each.column.key], each) for each in self._numbers),
                *(own[name] for name in OWN),
            ):
                flat = values.reshape(count, -1)
                found[:, at : at + flat.shape[1]] = flat
                at += flat.shape[1]
            self._all.add(found)
        return found

    def begin(self, number: int, first: int, length: int, place: tuple[int, int]) -> None:
        """Start an episode."""
        self._current = Numbers(length)
        self._current_pixels = {each.name: _pixels(each, length) for each in self._pictures}
        self._line = {
            "episode_index": number,
            "length": length,
            "data/chunk_index": place[0],
            "data/file_index": place[1],
            "dataset_from_index": first,
            "dataset_to_index": first + length,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }

    def add(self, matrix: np.ndarray, piece: Rows) -> None:
        """Add rows of the current episode."""
        with np.errstate(all="ignore"):
            self._current.add(matrix)
        for each in self._pictures:
            assert each.picture is not None
            images = each.picture.out(piece[each.column.key])
            if each.kind == "video" and images.shape[-1] == 1:
                images = np.repeat(images, 3, -1)
            self._current_pixels[each.name].add(images)

    def end(self, times: Mapping[str, int | float]) -> None:
        """End the current episode. ``times`` holds the place of the episode in its videos."""
        with np.errstate(all="ignore"):
            self._found.append(self._current.done())
        self._found_pixels.append(self._current_pixels)
        self._lines.append({**self._line, **times})
        if len(self._lines) == _EPISODES:
            self._flush()

    def _flush(self) -> None:
        if not self._lines:
            return
        found, said = np.stack(self._found), dict[str, Any]()
        counts = [int(line["length"]) for line in self._lines]
        for name, shape, span in self._spans():
            said[name] = (found[:, :, span], counts, shape)
        for each in self._pictures:
            pixels = [of[each.name] for of in self._found_pixels]
            values = np.stack([one.done() for one in pixels])
            said[each.name] = (values, [one.count for one in pixels], (values.shape[-1], 1, 1))
            for one in pixels:
                self._all_pixels[each.name].join(one)
        numbers: dict[str, Any] = {n: [line[n] for line in self._lines] for n in self._lines[0]}
        batch = tables.episodes_batch(numbers, [self._task], said)
        if self._writer is None:
            self._writer = tables.writer(self._path, batch.schema)
        self._writer.write_batch(batch)
        self._lines, self._found, self._found_pixels = [], [], []

    def _spans(self) -> Iterator[tuple[str, tuple[int, ...], slice]]:
        at = 0
        for name, shape in self._shapes.items():
            yield name, shape, slice(at, at := at + tables.width(shape))

    def of_all(self) -> dict[str, Any]:
        """Return the statistics of all episodes in the form of ``stats.json``."""
        if not self._all.count:
            return {}
        with np.errstate(all="ignore"):
            found = self._all.done()
        said = {
            name: statistics.as_json(found[:, span], self._all.count, shape)
            for name, shape, span in self._spans()
        }
        for name, pixels in self._all_pixels.items():
            values = pixels.done()
            said[name] = statistics.as_json(values, pixels.count, (values.shape[-1], 1, 1))
        return said

    def close(self) -> None:
        """Write the remaining episodes and finish the file."""
        self._flush()
        if self._writer is not None:
            self._writer.close()


def _pixels(feature: LeRobotFeature, frames: int) -> Pixels:
    assert feature.picture is not None
    return Pixels(frames, 3 if feature.kind == "video" else feature.picture.channels)
