"""Episodes of a damaged Minari dataset: an interface for any kind of file, and HDF5 groups."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.dataset_checks import hdf5
from tallyroll.storage.ext.dataset_checks.checker import CheckResults, Where
from tallyroll.storage.ext.exchange.hdf5_files import DAMAGE
from tallyroll.storage.ext.exchange.minari_parts.pictures import Jpegs
from tallyroll.storage.ext.repair.hdf5 import PaddedFile, readable_rows
from tallyroll.storage.rows.keys import Key

FILE: Final = "main_data.hdf5"
_EPISODE: Final = re.compile(r"episode_([0-9]{1,18})")


@dataclass(frozen=True)
class FilePart:
    """A column of an episode [rows, ...], backed by an HDF5 dataset or an array."""

    name: str
    """The path of the column in the episode."""
    values: Any
    look: Callable[[], np.ndarray]
    """A function that returns a mask of the readable rows [n]."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        found: np.dtype[Any] = self.values.dtype
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, and the shape of a row."""
        return tuple(self.values.shape)

    @cached_property
    def good(self) -> np.ndarray:
        """A mask of the readable rows [n]."""
        return self.look()

    def __getitem__(self, rows: Any) -> Any:
        """Return rows."""
        return self.values[rows]


def part_of(name: str, values: Any, look: Callable[[], np.ndarray]) -> FilePart:
    """Return a column. An image that cannot be decoded counts as unreadable."""
    if not isinstance(values, Jpegs):
        return FilePart(name, values, look)
    return FilePart(name, values, lambda: decoded(values, look()))


def decoded(images: Jpegs, good: np.ndarray) -> np.ndarray:
    """Return a mask of the ``good`` images [n] that can be decoded."""
    found = good.copy()
    for row in np.flatnonzero(good).tolist():
        try:
            images[row : row + 1]
        except (InvalidDataset, *DAMAGE):
            found[row] = False
    return found


class EpisodeFiles(ABC):
    """The episodes of a dataset."""

    numbers: list[int]
    """The numbers of the existing episodes, ascending."""

    @abstractmethod
    def file(self, number: int) -> str:
        """Return the name of an episode's file, for losses."""

    @abstractmethod
    def parts(self, number: int) -> dict[Key, FilePart]:
        """Return the readable columns of an episode, by path.

        Raises:
            InvalidDataset: the episode cannot be opened.
        """

    @abstractmethod
    def metadata(self, number: int) -> Mapping[str, Any] | None:
        """Return the metadata of an episode, such as its seed, or None if it cannot be read."""

    def lost_end(self, number: int) -> tuple[str, int | None] | None:
        """Return the reason why the end of an episode is lost, and the number of lost steps.

        The result is None if the end can be read. The number is None if it is unknown.
        """
        return None


class GroupFiles(EpisodeFiles):
    """The episodes of an HDF5 file, one group each.

    Args:
        file: the file.
        there: the padded file, which knows the missing bytes.
        pictures: the shapes of JPEG images, by their paths in a group.
    """

    def __init__(
        self, file: Any, there: PaddedFile, pictures: Mapping[Key, tuple[int, ...]]
    ) -> None:
        self._file, self._there, self._pictures = file, there, pictures
        self.numbers = sorted(int(m[1]) for name in _names(file) if (m := _EPISODE.fullmatch(name)))

    def file(self, number: int) -> str:
        """Return the name of the only file."""
        return FILE

    def parts(self, number: int) -> dict[Key, FilePart]:
        """Return the datasets of a group."""
        try:
            group = self._file[f"episode_{number}"]
        except (KeyError, OSError, RuntimeError) as error:
            raise InvalidDataset(f"{error!s:.150}") from error
        datasets = hdf5.datasets_in(group, CheckResults(room=self._there.room), Where(FILE, number))
        return {path: self._part(name, path, data) for name, data, path in _split(datasets)}

    def _part(self, name: str, path: Key, data: Any) -> FilePart:
        shape = self._pictures.get(path)
        values = Jpegs(data, shape) if shape and data.shape else data
        return part_of(name, values, lambda: readable_rows(data, self._there))

    def metadata(self, number: int) -> Mapping[str, Any] | None:
        """Return the attributes of a group."""
        try:
            return dict(self._file[f"episode_{number}"].attrs)
        except DAMAGE:
            return None


def _names(file: Any) -> list[str]:
    try:
        return list(file)
    except DAMAGE:
        return []


def _split(datasets: Mapping[str, Any]) -> Iterable[tuple[str, Any, Key]]:
    return ((name, data, tuple(name.split("/"))) for name, data in datasets.items())
