"""Read the rows of Minari's episodes from any kind of file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import Block, Incoming, refused
from tallyroll.storage.ext.exchange.hdf5_files import (
    DAMAGE,
    as_column,
    column_of,
    datasets_in,
    require_memory_for,
)
from tallyroll.storage.ext.exchange.minari_parts.pictures import Jpegs
from tallyroll.storage.ext.exchange.minari_parts.spaces import (
    ACTIONS,
    FLAGS,
    INFOS,
    OBSERVATIONS,
    key_of,
)
from tallyroll.storage.ext.exchange.numbering import EndFlags, numbered, numbers
from tallyroll.storage.ext.exchange.roles import Roles, under
from tallyroll.storage.rows.keys import NEXT, RESET_SEED, Key
from tallyroll.storage.rows.schema import Column, Schema

_NAME: Final = "minari"
_REWARDS: Final = ("rewards",)


class MinariEpisodes(Protocol):
    """The episodes of a dataset, read one after another."""

    numbers: list[int]

    def columns(self, number: int) -> Mapping[Key, Any]:
        """Return the arrays [rows, ...] of an episode, by path. Raises `InvalidDataset`."""

    def metadata(self, number: int) -> Mapping[str, Any]:
        """Return the metadata of an episode, such as its seed. Raises `InvalidDataset`."""


class Hdf5Episodes:
    """The episodes of an HDF5 file, one group each.

    Args:
        file: the open HDF5 file.
        place: the dataset, for messages.
        pictures: the shapes of JPEG images, by their paths in a group.
    """

    def __init__(self, file: Any, place: Path, pictures: Mapping[Key, tuple[int, ...]]) -> None:
        self._file, self._place = file, place
        self._groups: dict[int, dict[Key, Any]] = {}
        for path, data in datasets_in(file, place).items():
            number = re.fullmatch(r"episode_([0-9]{1,18})", path[0])
            if number is None:
                raise refused(place, f"{path[0]!r:.80} is not an episode")
            shape = pictures.get(path[1:])
            found = Jpegs(data, shape) if shape and data.shape else data
            self._groups.setdefault(int(number[1]), {})[path[1:]] = found
        self.numbers = sorted(self._groups)

    def columns(self, number: int) -> Mapping[Key, Any]:
        """Return the datasets of an episode."""
        return self._groups[number]

    def metadata(self, number: int) -> Mapping[str, Any]:
        """Return the attributes of an episode's group."""
        try:
            found: Mapping[str, Any] = self._groups[number][_REWARDS].parent.attrs
        except DAMAGE as error:
            raise refused(self._place, f"episode {number} has no rewards ({error})") from error
        return found


class EpisodesIn:
    """The rows of episodes.

    Args:
        episodes: the episodes of the dataset.
        place: the dataset, for messages.
        said: the columns that the export recorded, or None for a dataset of another program.
    """

    def __init__(self, episodes: MinariEpisodes, place: Path, said: Schema | None) -> None:
        self._episodes, self._place, self._said = episodes, place, said
        self._at: dict[Key, tuple[Key, Column]] = {}
        """For each key, the path of the dataset in an episode, and the column."""

    def incoming(self, about: Any, version: str) -> Incoming:
        """Check the columns and count the rows of all episodes."""
        if not self._episodes.numbers and self._said is None:
            raise refused(self._place, "it has no episodes")
        roles, schema, lost = self._ours() if self._said is not None else self._theirs()
        counts = [self._count(self._group(number)) for number in self._episodes.numbers]
        numbers = schema if self._said is not None else numbered(schema)
        blocks = self._blocks(roles, counts)
        return Incoming(numbers, sum(counts), blocks, about, version, {"columns": lost})

    def _group(self, number: int) -> Mapping[Key, Any]:
        try:
            return self._episodes.columns(number)
        except InvalidDataset as error:
            raise refused(self._place, str(error)) from error

    def _ours(self) -> tuple[Roles, Schema, int]:
        assert self._said is not None
        roles = Roles.of(self._said, _NAME)
        places = under(OBSERVATIONS, roles.observations) | under(ACTIONS, roles.actions)
        places |= {each.key: (INFOS, *each.key) for each in roles.others}
        places |= {key: (name,) for key, name in FLAGS.items() if key in self._said.keys}
        columns = {each.key: each for each in self._said.columns}
        self._at = {key: (path, columns[key]) for key, path in places.items()}
        return roles, self._said, 0

    def _theirs(self) -> tuple[Roles, Schema, int]:
        first, lost = self._group(self._episodes.numbers[0]), 0
        steps = self._count(first)
        for path, data in first.items():
            key = key_of(path)
            if path[0] == INFOS and data.shape and data.shape[0] == steps + 1:
                key = (NEXT, *path)  # the first entry, of the reset, is dropped
            column = None if key is None else column_of(key, data)
            if column is None or any(column.key == other for other in self._at):
                lost += 1
                continue
            if key in FLAGS:
                column = Column(column.key, column.dtype, column.shape or (1,))
            self._at[column.key] = (path, column)
        columns = [column for _, column in self._at.values()]
        columns += [
            Column((NEXT, *column.key), column.dtype, column.shape)
            for path, column in self._at.values()
            if path[0] == OBSERVATIONS
        ]
        if "seed" in self._attributes(self._episodes.numbers[0]):
            columns.append(Column(RESET_SEED, torch.int64, ()))
        schema = Schema(tuple(columns))
        return Roles.of(EndFlags(schema).schema, _NAME), schema, lost

    def _attributes(self, number: int) -> Mapping[str, Any]:
        try:
            return self._episodes.metadata(number)
        except InvalidDataset as error:
            raise refused(self._place, str(error)) from error

    def _count(self, group: Mapping[Key, Any]) -> int:
        shape = group[_REWARDS].shape if _REWARDS in group else ()
        if not shape or shape[0] < 1:
            raise refused(self._place, "an episode has no rewards or no steps")
        return int(shape[0])

    def _blocks(self, roles: Roles, counts: list[int]) -> Iterator[Block]:
        seeded = self._said is None and RESET_SEED in {each.key for each in roles.others}
        for id, (number, count) in enumerate(zip(self._episodes.numbers, counts, strict=True)):
            group, block = self._group(number), Block()
            for key, (path, column) in self._at.items():
                more = path[0] == OBSERVATIONS or (self._said is None and path[0] == INFOS)
                values = self._read(group, path, column, count + more)
                if path[0] == OBSERVATIONS:
                    block[key], block[(NEXT, *key)] = values[:-1], values[1:]
                else:
                    block[key] = values[1:] if more else values
            if self._said is None:
                block |= numbers(np.full(count, id), np.arange(count))
            if seeded:
                block[RESET_SEED] = np.full(count, self._seed(number), np.int64)
            yield block

    def _seed(self, number: int) -> int:
        try:
            seed = int(self._attributes(number).get("seed", -1))
        except DAMAGE:
            return -1
        return seed if 0 <= seed < 2**63 else -1

    def _read(self, group: Mapping[Key, Any], path: Key, column: Column, count: int) -> np.ndarray:
        data, name = group.get(path), "/".join(path)
        if data is None or not data.shape or data.shape[0] != count:
            raise refused(self._place, f"an episode does not have {count} values of {name}")
        require_memory_for(2 * data.size * data.dtype.itemsize, f"an episode's {name}")
        try:
            values = np.asarray(data[()])
        except (InvalidDataset, *DAMAGE) as error:
            raise refused(self._place, f"{name}: {error}") from error
        return as_column(values, column, name, self._place)
