"""Repair a Minari dataset: save the steps for which all columns can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.dataset_checks.checker import DatasetFolder, declared_count
from tallyroll.storage.ext.exchange.base import Block, Incoming
from tallyroll.storage.ext.exchange.hdf5_files import column_of, read_rows
from tallyroll.storage.ext.exchange.minari_parts.arrow_episodes import (
    KINDS,
    TableColumns,
)
from tallyroll.storage.ext.exchange.minari_parts.pictures import pictures_of
from tallyroll.storage.ext.exchange.minari_parts.spaces import (
    FLAGS,
    INFOS,
    key_of,
    known_in,
    spaces_in,
)
from tallyroll.storage.ext.exchange.numbering import numbered, numbers
from tallyroll.storage.ext.repair.hdf5 import (
    cut_after,
    lose_gaps,
    opened_damaged,
    runs,
)
from tallyroll.storage.ext.repair.losses import Losses, RowsRepair
from tallyroll.storage.ext.repair.minari_files import (
    FILE,
    EpisodeFiles,
    FilePart,
    GroupFiles,
)
from tallyroll.storage.ext.repair.minari_tables import TableFiles
from tallyroll.storage.rows.keys import NEXT, RESET_SEED, REWARD, TERMINATED, TRUNCATED, Key
from tallyroll.storage.rows.schema import Column, Schema

_METADATA: Final = "metadata.json"

_Kind = tuple[np.dtype[Any], tuple[int, ...]]
_Piece = tuple[int, int, int]
"""Consecutive steps: the number of their episode, the first step, and the end (exclusive)."""


class MinariRepair(RowsRepair):
    """Repair of a Minari dataset. Steps after a gap form a separate trajectory.

    An info is saved only if it can be read for all saved steps. No step is dropped because of an
    info.
    """

    name: ClassVar[str] = "minari"

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Find and yield the readable steps of all episodes."""
        folder, below = self.folder(place), "data/" if (place / "data").is_dir() else ""
        with contextlib.ExitStack() as stack:
            files, said = self._files(folder, below, stack)
            yield _RepairedEpisodes(files, place, self._losses, said).incoming()

    def _files(
        self, folder: DatasetFolder, below: str, stack: contextlib.ExitStack
    ) -> tuple[EpisodeFiles, int]:
        """Return the episodes, and the number of episodes in the metadata."""
        said = folder.json(f"{below}{_METADATA}")
        if not isinstance(said, dict):
            message = "the metadata cannot be read, so the shapes of values are unknown"
            self._losses.add(message, 0, file=f"{below}{_METADATA}")
            said = {}
        known = known_in(spaces_in(said))
        pictures = pictures_of(known) if said.get("jpeg_encoding") else {}
        kind = said.get("data_format") or _kind_in(folder.root / below)
        if kind in KINDS:
            columns = TableColumns(kind, known, pictures)
            files: EpisodeFiles = TableFiles(folder, below, kind, columns)
        else:
            opened = opened_damaged(folder, f"{below}{FILE}")
            files = GroupFiles(*stack.enter_context(opened), pictures)
        return files, declared_count(said.get("total_episodes")) or 0


def _kind_in(data: Path) -> str:
    """Return the first of `KINDS` that has files in a folder, or "hdf5" if none has files."""
    found = (kind for kind in KINDS if next(data.glob(f"[0-9]*/*.{kind}"), None) is not None)
    return next(found, "hdf5")


def _key(path: Key) -> Key | None:
    return (NEXT, *path) if path[0] == INFOS else key_of(path)


class _RepairedEpisodes:
    def __init__(self, files: EpisodeFiles, place: Path, losses: Losses, count: int) -> None:
        self._files, self._place, self._losses, self._count = files, place, losses, count
        self._kinds: dict[Key, tuple[str, Column]] = {}
        """The name and column of each key, as in most episodes."""
        self._infos: dict[Key, tuple[str, Column]] = {}
        """The name and column of each info."""
        self._found: dict[int, dict[Key, tuple[str, _Kind]]] = {}
        """The columns of each episode."""

    def incoming(self) -> Incoming:
        self._found = dict(self._opened())
        every = [*self._found.values()]
        own = [{key: e for key, e in each.items() if not _is_info(key)} for each in every]
        self._kinds = self._common(own)
        infos = [{key: e for key, e in each.items() if _is_info(key)} for each in every]
        self._infos = self._alike(infos)
        pieces, lost = list[_Piece](), dict.fromkeys({key for each in infos for key in each}, 0)
        for number in self._found:
            parts = self._parts(number)
            for start, stop in self._steps(number, parts):
                pieces.append((number, start, stop))
                for key in lost:
                    lost[key] += stop - start - self._readable(parts.get(key), key, start, stop)
        if not pieces:
            raise InvalidDataset(f"{self._place} cannot be repaired: no step can be read.")
        self._lose_infos(lost)
        columns = [column for _, column in (*self._kinds.values(), *self._infos.values())]
        columns += [
            Column((NEXT, *key), column.dtype, column.shape)
            for key, (name, column) in self._kinds.items()
            if name.split("/")[0] == "observations"
        ]
        columns.append(Column(RESET_SEED, torch.int64, ()))
        schema = numbered(Schema(tuple(columns)))
        rows = sum(stop - start for _, start, stop in pieces)
        return Incoming(schema, rows, self._blocks(pieces), None, "minari")

    def _opened(self) -> Iterator[tuple[int, dict[Key, tuple[str, _Kind]]]]:
        """Yield the columns of each episode that can be opened, and report the others."""
        before = -1
        for number in self._files.numbers:
            self._lose_missing(before + 1, number)
            before = number
            file, said = self._files.file(number), self._files.metadata(number)
            if said is None:
                message = "the metadata of an episode, such as its seed, cannot be read"
                self._losses.add(message, 0, file=file, episode=number)
            try:
                parts = self._parts(number)
            except InvalidDataset as error:
                message, what = "an episode cannot be opened", f"{error!s:.150}"
                count = declared_count((said or {}).get("total_steps"))
                self._losses.add(message, count, file=file, episode=number, what=what)
                continue
            yield (
                number,
                {key: (p.name, (p.dtype, p.shape[1:])) for key, p in parts.items() if p.shape},
            )
        self._lose_missing(before + 1, self._count)

    def _lose_missing(self, start: int, stop: int) -> None:
        if start < stop:
            what = f"and {stop - start - 1:,} after it" if stop - start > 1 else ""
            message, file = "an episode is missing", self._files.file(start)
            self._losses.add(message, None, file=file, episode=start, what=what)

    def _parts(self, number: int) -> dict[Key, FilePart]:
        found = dict[Key, FilePart]()
        for path, part in self._files.parts(number).items():
            key = _key(path)
            if key is not None and found.setdefault(key, part) is not part:
                name = "/".join(path)
                raise InvalidDataset(f"{name} and {found[key].name} map to the same column")
        return found

    def _lose_infos(self, lost: Mapping[Key, int]) -> None:
        """Report the infos that cannot be read for all steps, and leave them out."""
        for key, count in sorted(lost.items()):
            if count:
                self._infos.pop(key, None)
                what = f"{count:,} steps have no readable value"
                name = "/".join(key[1:])
                self._losses.add("an info is not saved", 0, column=name, what=what)

    def _readable(self, part: FilePart | None, key: Key, start: int, stop: int) -> int:
        """Return the number of steps in ``[start, stop)`` whose info can be read."""
        info = self._infos.get(key)
        if info is None or part is None or not self._is_of(part, info[1]):
            return 0
        # An info of Minari has an entry for the reset before the entries of the steps.
        return int(part.good[start + 1 : stop + 1].sum())

    def _is_of(self, part: FilePart, column: Column) -> bool:
        shape = () if column.key in FLAGS else column.shape
        return (part.dtype, part.shape[1:]) == (column.numpy_dtype, shape)

    def _common(self, episodes: list[dict[Key, Any]]) -> dict[Key, tuple[str, Column]]:
        """Return the columns that are alike in most episodes.

        Raises:
            InvalidDataset: a required column is missing.
        """
        found = self._alike(episodes)
        lacking = [key[-1] for key in (REWARD, TERMINATED, TRUNCATED) if key not in found]
        tops = {name.split("/")[0] for name, _ in found.values()}
        lacking += [each for each in ("observations", "actions") if each not in tops]
        if lacking:
            raise InvalidDataset(
                f"{self._place} cannot be repaired: it has no readable {', '.join(lacking)}."
            )
        return found

    def _alike(self, episodes: list[dict[Key, tuple[str, _Kind]]]) -> dict[Key, tuple[str, Column]]:
        kinds: dict[Key, dict[_Kind, int]] = {}
        names = dict[Key, str]()
        for columns in episodes:
            for key, (name, kind) in columns.items():
                of, names[key] = kinds.setdefault(key, {}), name
                of[kind] = of.get(kind, 0) + 1
        found = {}
        for key, of in kinds.items():
            kind = max(of, key=lambda each: of[each])
            column = column_of(key, _Empty(kind))
            if 2 * of[kind] < len(episodes) or column is None:
                continue
            if key in FLAGS:
                column = Column(key, column.dtype, column.shape or (1,))
            found[key] = names[key], column
        return found

    def _steps(self, number: int, parts: Mapping[Key, FilePart]) -> list[tuple[int, int]]:
        """Return the runs of readable steps in an episode."""
        file = self._files.file(number)
        lacking = [
            name
            for key, (name, column) in self._kinds.items()
            if key not in parts or not self._is_of(parts[key], column)
        ]
        count = max((d.shape[0] for k, d in parts.items() if k in FLAGS and d.shape), default=0)
        if lacking:
            what = f"no {', '.join(lacking)}"
            message = "an episode without a column"
            self._losses.add(message, count or None, file=file, episode=number, what=what)
            return []
        good = np.ones(count, bool)
        for key, (name, _) in self._kinds.items():
            each = parts[key].good
            if name.split("/")[0] == "observations":
                each = each[:-1] & each[1:]
            good &= np.concatenate([each, np.zeros(count, bool)])[:count]
        lose_gaps(self._losses, good, "steps cannot be read", file, number)
        if (end := self._files.lost_end(number)) is not None:
            why, lost = end
            message = "the end of an episode cannot be read"
            self._losses.add(message, lost, file=file, episode=number, row=count, what=why)
        found = runs(good)
        cut = cut_after(found, self._ended(found, parts, count))
        if len(cut) > len(found):
            message = "steps follow the end of an episode: they are a trajectory of their own"
            self._losses.add(message, 0, file=file, episode=number)
        return cut

    def _ended(
        self, good: list[tuple[int, int]], parts: Mapping[Key, FilePart], count: int
    ) -> np.ndarray:
        """Return a mask of the readable steps that are marked as ends."""
        ended = np.zeros(count, bool)
        for key in (TERMINATED, TRUNCATED):
            column = self._kinds[key][1]
            for start, stop in good:
                values = read_rows(parts[key], start, stop, column, self._place)
                ended[start:stop] |= values.reshape(stop - start).astype(bool)
        return ended

    def _blocks(self, pieces: list[_Piece]) -> Iterator[Block]:
        for id, (number, start, stop) in enumerate(pieces):
            parts, block = self._parts(number), Block()
            for key, (name, column) in self._kinds.items():
                more = name.split("/")[0] == "observations"
                values = read_rows(parts[key], start, stop + more, column, self._place)
                block[key] = values[:-1] if more else values
                if more:
                    block[(NEXT, *key)] = values[1:]
            for key, (_, column) in self._infos.items():
                block[key] = read_rows(parts[key], start + 1, stop + 1, column, self._place)
            seed = self._seed(number) if start == 0 else -1
            block[RESET_SEED] = np.full(stop - start, seed, np.int64)
            yield block | numbers(np.full(stop - start, id), np.arange(stop - start))

    def _seed(self, number: int) -> int:
        try:
            seed = int((self._files.metadata(number) or {}).get("seed", -1))
        except (ValueError, TypeError, OverflowError):
            return -1
        return seed if 0 <= seed < 2**63 else -1


class _Empty:
    """A column without rows, with the given dtype and shape of a row."""

    def __init__(self, kind: _Kind) -> None:
        self.dtype, self.shape = kind[0], (0, *kind[1])


def _is_info(key: Key) -> bool:
    return key[:2] == (NEXT, INFOS)
