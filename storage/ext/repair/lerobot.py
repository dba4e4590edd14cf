"""Repair a LeRobot dataset: save its readable part as a valid dataset of version 3.

A killed recorder leaves Parquet files without a footer, and has not listed its last episodes. The
pages of each saved episode are on the disk, so the repair rebuilds the footer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset, MissingLibrary
from tallyroll.storage.ext.dataset_checks.checker import CheckResults, DatasetFolder, declared_count
from tallyroll.storage.ext.dataset_checks.disk import Ranges, ReadOnlyFile
from tallyroll.storage.ext.dataset_checks.lerobot.listing import (
    ListedVideo,
    Listing,
    damage,
    listing_of,
    opened_parquet,
)
from tallyroll.storage.ext.dataset_checks.lerobot.videos import frames_of
from tallyroll.storage.ext.repair.losses import Losses
from tallyroll.storage.ext.repair.parquet_footer import rebuilt
from tallyroll.storage.files.safe_files import data_ranges
from tallyroll.storage.formats.optional_libraries import needed

_INFO: Final = "meta/info.json"
_OWN: Final = ("frame_index", "episode_index", "index", "timestamp", "task_index")
_DATA: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_CODEC: Final = "snappy"
_COPIED_NBYTES: Final = 2**20


@dataclass
class _Piece:
    """Consecutive rows of an episode."""

    number: int
    """The number of the episode in the source."""
    first: int
    """The number of the first frame."""
    table: Any

    def __len__(self) -> int:
        return len(self.table)


class LerobotRepair:
    """Repair of a LeRobot dataset. It writes the readable part to a new folder.

    Args:
        source: the damaged dataset.
        losses: the list to which losses are added.
        unreadable: the ranges of files that the disk cannot read, by path.
    """

    def __init__(self, source: Path, losses: Losses, unreadable: Mapping[Path, Ranges]) -> None:
        self._source, self._losses, self._unreadable = source, losses, unreadable
        self._folder = DatasetFolder(source, CheckResults(), unreadable)
        info = self._folder.json(_INFO)
        features = info.get("features") if isinstance(info, dict) else None
        rate = info.get("fps") if isinstance(info, dict) else None
        if not isinstance(features, dict) or not isinstance(rate, int | float) or not rate > 0:
            raise InvalidDataset(
                f"{source} cannot be repaired: {_INFO} is missing or damaged, so the columns have "
                "no names. Restore this file from another dataset of the same robot."
            )
        assert isinstance(info, dict)
        self._info: dict[str, Any] = info
        self._features: dict[str, Any] = features
        self._rate = float(rate)

    def write(self, target: Path) -> int:
        """Write the readable rows and return their number."""
        listing = listing_of(self._folder, self._info, CheckResults())
        pieces = [piece for name in self._files(listing) for piece in self._pieces(name)]
        self._missing_files(listing)
        kept, films = self._with_films(pieces, listing)
        if not kept:
            raise InvalidDataset(f"{self._source} cannot be repaired: no row can be read.")
        self._write_rows(kept, target)
        self._write_lists(kept, films, target)
        return sum(map(len, kept))

    # --- rows -------------------------------------------------------------------------------------

    def _files(self, listing: Listing | None) -> list[str]:
        """Return the data files that exist, in the order of episodes."""
        listed = [] if listing is None else listing.files
        there = self._there()
        return [*(name for name in listed if name in there), *sorted({*there} - {*listed})]

    def _there(self) -> list[str]:
        """Return the data files that are not links."""
        every = self._folder.below("data", ".parquet")
        return [name for name in every if not os.path.islink(self._source / name)]

    def _missing_files(self, listing: Listing | None) -> None:
        there, every = {*self._there()}, self._folder.below("data", ".parquet")
        for name in dict.fromkeys([*([] if listing is None else listing.files), *every]):
            if name not in there:
                episodes = [] if listing is None else listing.episodes
                rows = sum(each.length for each in episodes if each.data == name)
                self._losses.add("a file of rows is missing, or a link", rows or None, file=name)

    def _pieces(self, name: str) -> Iterator[_Piece]:
        """Yield the readable rows of a file, split at gaps."""
        arrow = needed("pyarrow", "arrow", "Parquet needs")
        with opened_parquet(self._folder, name, CheckResults()) as file:
            if file is not None:
                yield from self._groups(arrow, file, name)
                return
        raw = self._folder.opened(name)
        if raw is None:
            return
        with raw:
            size = os.fstat(raw.fileno()).st_size
            found = rebuilt(raw, size, self._kinds(arrow), self._counts(), _CODEC)
            if found is None:
                message = "a file of rows was not finished, and has no complete episode"
                self._losses.add(message, None, file=name, what=f"{size:,} bytes")
                return
            if found.stop < size and not self._is_footer(raw, found.stop, size):
                message = "the end of a file of rows that was not finished"
                what = f"{size - found.stop:,} bytes after {sum(found.rows):,} rows"
                self._losses.add(message, None, file=name, what=what)
            parquet = needed("pyarrow.parquet", "arrow", "Parquet needs")
            view = arrow.PythonFile(_WithFooter(raw, found.stop, found.footer), mode="r")
            yield from self._groups(arrow, parquet.ParquetFile(view, pre_buffer=False), name)

    def _is_footer(self, raw: Any, start: int, size: int) -> bool:
        """Return True if a footer starts at ``start``. The end of the footer may be missing."""
        raw.seek(start)
        try:
            return bool(raw.read(min(64, size - start)).startswith(b"\x15\x04\x19"))
        except OSError:
            return False

    def _groups(self, arrow: Any, file: Any, name: str) -> Iterator[_Piece]:
        row = 0
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group, use_threads=False)
                table = self._fitting(arrow, table)
            except damage(arrow) as error:
                message = "rows are damaged"
                self._losses.add(message, rows, file=name, row=row, what=f"{error!s:.150}")
            else:
                yield from self._cut(table)
            row += rows

    def _fitting(self, arrow: Any, table: Any) -> Any:
        """Return the columns that the metadata declare, with their declared types.

        Raises:
            ValueError: a column is missing, or has rows without a value.
        """
        kinds = self._kinds(arrow)
        if lacking := [each for each in (*kinds.names, *_OWN) if each not in table.column_names]:
            raise ValueError(f"the columns {', '.join(lacking)} are missing")
        columns = []
        for kind in kinds:
            column = table.column(kind.name)
            if column.null_count:
                raise ValueError(f"{kind.name} has rows without a value")
            columns.append(column if arrow.types.is_struct(kind.type) else column.cast(kind.type))
        return arrow.table(columns, names=kinds.names)

    def _cut(self, table: Any) -> Iterator[_Piece]:
        """Yield the episodes of a table, split at gaps."""
        episodes = table.column("episode_index").to_numpy()
        frames = table.column("frame_index").to_numpy()
        breaks = (np.diff(episodes) != 0) | (np.diff(frames) != 1)
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(table)]
        for at, start in enumerate(edges[:-1]):
            if edges[at + 1] > start:
                part = table.slice(start, edges[at + 1] - start)
                yield _Piece(int(episodes[start]), int(frames[start]), part)

    def _kinds(self, arrow: Any) -> Any:
        """Return the Arrow schema of a data file as LeRobot writes it."""
        fields = []
        for name, said in self._features.items():
            dtype, size = said.get("dtype"), self._size(said)
            if dtype == "video":
                continue
            if dtype == "image":
                kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
            elif dtype == "string":
                kind = arrow.string()
            else:
                kind = arrow.from_numpy_dtype(np.dtype(str(dtype)))
                for length in reversed(said["shape"] if size != 1 else []):
                    kind = (
                        arrow.list_(kind, length) if len(said["shape"]) == 1 else arrow.list_(kind)
                    )
            fields.append(arrow.field(name, kind))
        return arrow.schema(fields)

    def _counts(self) -> list[int]:
        """Return the number of values per row in each Parquet column."""
        counts: list[int] = []
        for said in self._features.values():
            if said.get("dtype") == "image":
                counts += [1, 1]
            elif said.get("dtype") != "video":
                counts.append(1 if said.get("dtype") == "string" else self._size(said))
        return counts

    def _size(self, said: Mapping[str, Any]) -> int:
        shape = said.get("shape")
        if not isinstance(shape, list) or not all(declared_count(each) for each in shape):
            raise InvalidDataset(f"{self._source} cannot be repaired: {_INFO} lacks a shape.")
        return math.prod(shape)

    # --- films ------------------------------------------------------------------------------------

    def _with_films(
        self, pieces: list[_Piece], listing: Listing | None
    ) -> tuple[list[_Piece], dict[str, list[ListedVideo]]]:
        """Return the pieces that have frames of all cameras, and their videos.

        A camera that has frames for fewer than half of the rows is left out instead.
        """
        films: dict[str, list[ListedVideo | None]] = {}
        for camera in [n for n, said in self._features.items() if said.get("dtype") == "video"]:
            films[camera] = self._films(camera, pieces, listing)
            rows = sum(len(p) for p, f in zip(pieces, films[camera], strict=True) if f is not None)
            if 2 * rows < sum(map(len, pieces)) or not rows:
                message = "frames of a camera cannot be read or placed, so the camera is left out"
                self._losses.add(message, 0, column=camera)
                del films[camera], self._features[camera]
        kept, places = list[_Piece](), list[int]()
        for at, piece in enumerate(pieces):
            without = [camera for camera, each in films.items() if each[at] is None]
            if without:
                message = "rows without the frames of a camera"
                self._losses.add(
                    message, len(piece), episode=piece.number, row=piece.first, column=without[0]
                )
            else:
                kept.append(piece)
                places.append(at)
        found = {
            camera: [film for at in places if (film := each[at]) is not None]
            for camera, each in films.items()
        }
        return kept, found

    def _films(
        self, camera: str, pieces: list[_Piece], listing: Listing | None
    ) -> list[ListedVideo | None]:
        try:
            av = needed("av", "video", "films need")
        except MissingLibrary:
            return [None] * len(pieces)
        lengths: dict[str, float] = {}

        def seconds(name: str) -> float:
            if Path(name) in self._unreadable:
                return 0.0  # such a file is not searched for intact frames
            if name not in lengths:
                frames = frames_of(av, self._folder, name, CheckResults())
                lengths[name] = 0.0 if frames is None else len(frames.times) / self._rate
            return lengths[name]

        known = (
            {each.number: each.films.get(camera) for each in listing.episodes} if listing else {}
        )
        files = [n for n in self._folder.below("videos", ".mp4") if f"/{camera}/" in f"/{n}"]
        found: list[ListedVideo | None] = []
        at, half = 0.0, 0.5 / self._rate
        for piece in pieces:
            film, offset = known.get(piece.number), piece.first / self._rate
            length = len(piece) / self._rate
            if film is not None:
                begin = (film.begin or 0.0) + offset
                name: str | None = film.file
            else:  # a single video of the whole recording, in order
                begin, name = at, files[0] if len(files) == 1 and not known else None
            at += length
            whole = name is not None and seconds(name) + half >= begin + length
            found.append(
                ListedVideo(name, begin, begin + length) if name is not None and whole else None
            )
        return found

    # --- writing ----------------------------------------------------------------------------------

    def _write_rows(self, pieces: list[_Piece], target: Path) -> None:
        arrow = needed("pyarrow", "arrow", "Parquet needs")
        parquet = needed("pyarrow.parquet", "arrow", "Parquet needs")
        path = target / _DATA.format(chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True)
        writer, index = None, 0
        try:
            for number, piece in enumerate(pieces):
                frames = np.arange(len(piece))
                table = self._renumbered(arrow, piece.table, frames, number, index)
                writer = writer or parquet.ParquetWriter(path, table.schema)
                writer.write_table(table)
                index += len(piece)
        finally:
            if writer is not None:
                writer.close()

    def _renumbered(
        self, arrow: Any, table: Any, frames: np.ndarray, number: int, index: int
    ) -> Any:
        numbers = {
            "frame_index": frames,
            "episode_index": np.full(len(frames), number),
            "index": index + frames,
            "timestamp": (frames / self._rate).astype(np.float32),
        }
        names = [name for name in self._features if name in table.column_names]
        columns = {
            name: arrow.array(numbers[name]) if name in numbers else table.column(name)
            for name in names
        }
        return arrow.table(columns)

    def _write_lists(
        self, pieces: list[_Piece], films: Mapping[str, list[ListedVideo]], target: Path
    ) -> None:
        arrow = needed("pyarrow", "arrow", "Parquet needs")
        parquet = needed("pyarrow.parquet", "arrow", "Parquet needs")
        tasks = self._tasks(pieces)
        places = self._copied(films, target)
        entries, index = [], 0
        for number, piece in enumerate(pieces):
            own = np.unique(piece.table.column("task_index").to_numpy()).tolist()
            entry: dict[str, Any] = {
                "episode_index": number,
                "tasks": [tasks[task] for task in own],
                "length": len(piece),
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": index,
                "dataset_to_index": index + len(piece),
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
            for camera, each in films.items():
                film, top = each[number], f"videos/{camera}"
                entry[f"{top}/chunk_index"] = 0
                entry[f"{top}/file_index"] = places[film.file]
                entry[f"{top}/from_timestamp"] = film.begin
                entry[f"{top}/to_timestamp"] = film.end
            entries.append(entry)
            index += len(piece)
        listed = target / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
        listed.parent.mkdir(parents=True)
        parquet.write_table(arrow.Table.from_pylist(entries), listed)
        columns = {"task_index": [*tasks], "__index_level_0__": [*tasks.values()]}
        parquet.write_table(arrow.table(columns), target / "meta" / "tasks.parquet")
        info = self._info | {
            "codebase_version": "v3.0",
            "features": self._features,
            "total_episodes": len(pieces),
            "total_frames": index,
            "total_tasks": len(tasks),
            "splits": {"train": f"0:{len(pieces)}"},
            "data_path": _DATA,
            "video_path": _VIDEO if films else None,
        }
        (target / _INFO).write_text(json.dumps(info))

    def _tasks(self, pieces: list[_Piece]) -> dict[int, str]:
        listing = listing_of(self._folder, self._info, CheckResults())
        known = dict(self._known_tasks(listing))
        used = {int(n) for p in pieces for n in np.unique(p.table.column("task_index").to_numpy())}
        for number in sorted(used - {*known}):
            self._losses.add("the text of a task is missing", 0, what=f"task {number}")
            known[number] = f"task {number}"
        return known

    def _known_tasks(self, listing: Listing | None) -> Mapping[int, str]:
        if listing is not None:
            return listing.tasks
        with opened_parquet(self._folder, "meta/tasks.parquet", CheckResults()) as file:
            if file is None:
                return {}
            columns = file.read(use_threads=False).to_pydict()
        numbers = columns.pop("task_index", [])
        return dict(zip(numbers, map(str, next(iter(columns.values()), [])), strict=False))

    def _copied(self, films: Mapping[str, list[ListedVideo]], target: Path) -> dict[str, int]:
        """Copy the required videos and return their numbers."""
        places: dict[str, int] = {}
        for camera, each in films.items():
            for number, name in enumerate(dict.fromkeys(film.file for film in each)):
                places[name] = number
                path = target / _VIDEO.format(video_key=camera, chunk_index=0, file_index=number)
                path.parent.mkdir(parents=True, exist_ok=True)
                raw = self._folder.opened(name)
                with raw, path.open("xb") as out:
                    _copy(raw, out)
        return places


def _copy(raw: Any, out: Any) -> None:
    """Copy an open file, and preserve its holes."""
    for begin, stop in data_ranges(raw.fileno()):
        raw.seek(begin)
        out.seek(begin)
        while begin < stop:
            part = raw.read(min(_COPIED_NBYTES, stop - begin))
            if not part:
                break
            out.write(part)
            begin += len(part)
    out.truncate(os.fstat(raw.fileno()).st_size)


class _WithFooter(ReadOnlyFile):
    """A file whose end is replaced by a rebuilt footer. Its owner closes the file itself."""

    def __init__(self, raw: Any, stop: int, footer: bytes) -> None:
        super().__init__(stop + len(footer))
        self._raw, self._stop, self._footer = raw, stop, footer

    def _content(self, nbytes: int, at: int) -> bytes:
        self._raw.seek(min(at, self._stop))
        wanted = max(0, min(at + nbytes, self._stop) - at)
        found: bytes = self._raw.read(wanted)
        if len(found) < wanted:  # the disk cannot read the bytes that follow
            return found
        return found + self._footer[max(0, at - self._stop) : max(0, at + nbytes - self._stop)]
