"""Checks of Minari datasets: the data of each episode, and its agreement with the metadata."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.dataset_checks import hdf5
from tallyroll.storage.ext.dataset_checks.checker import (
    Checker,
    CheckResults,
    DatasetFolder,
    Where,
    declared_count,
    text_of,
)
from tallyroll.storage.ext.dataset_checks.values import (
    as_flags,
    check_finite,
    check_zeros,
    observations_valid,
)
from tallyroll.storage.ext.exchange.hdf5_files import DAMAGE
from tallyroll.storage.ext.exchange.minari_parts.arrow_episodes import (
    KINDS,
    ArrowEpisodes,
)
from tallyroll.storage.ext.exchange.minari_parts.pictures import Jpegs, pictures_of
from tallyroll.storage.formats.hdf5.datasets import h5py_module
from tallyroll.storage.rows.spaces import NO_SPACE, Space, leaves_of, space_of

_FILE, _METADATA = "main_data.hdf5", "metadata.json"
_OBSERVATIONS, _ACTIONS, _INFOS = "observations", "actions", "infos"
_NEXT_VALID: Final = f"{_INFOS}/collector/next_valid"
_REWARDS, _TERMINATIONS, _TRUNCATIONS = "rewards", "terminations", "truncations"
_FLAGS: Final = (_TERMINATIONS, _TRUNCATIONS)
_EPISODE: Final = re.compile(r"episode_([0-9]{1,18})")


class MinariChecker(Checker):
    """Checks the episodes of a Minari dataset in HDF5, Arrow or Parquet."""

    name = "minari"
    checks = (
        "files",
        "metadata",
        "columns",
        "rows",
        "episodes",
        "ends",
        "nan",
        "spaces",
        "zeros",
    )

    @classmethod
    def recognises(cls, place: Path) -> bool:
        """Look for Minari's data file or its metadata file."""
        data = _folder(place)
        return (data / _FILE).is_file() or (data / _METADATA).is_file()

    def check(self, place: Path, found: CheckResults) -> None:
        """Read one episode after another."""
        folder = DatasetFolder(_folder(place), found)
        said = folder.json(_METADATA)
        if said is not None and not isinstance(said, dict):
            found.add("metadata", "the metadata are not a JSON object", Where(_METADATA))
            said = None
        said = said or {}
        kind = said.get("data_format", "hdf5")
        if kind in KINDS:
            _TableEpisodes(folder, found, said).check()
            return
        if kind != "hdf5":
            raise InvalidDataset(
                f"{place} cannot be checked: expected a Minari dataset in HDF5, Arrow or Parquet, "
                f"got the format {text_of(kind)}. Load it with Minari, and save it as hdf5."
            )
        h5py_module()
        raw = folder.opened(_FILE)
        if raw is None:
            return
        where = Where(_FILE)
        with raw, hdf5.opened(raw, found, where) as file:
            if file is not None:
                _Groups(file, found, said).check()


def _folder(place: Path) -> Path:
    return place / "data" if (place / "data").is_dir() else place


class _CheckedEpisodes(ABC):
    """The episodes of a dataset in any kind of file."""

    def __init__(self, found: CheckResults, said: Mapping[str, Any]) -> None:
        self._found, self._said = found, said
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        """The dtype and shape of each column in the first episode."""
        self._spaces = {
            _OBSERVATIONS: self._space("observation_space"),
            _ACTIONS: self._space("action_space"),
        }
        self._places = {
            (top, *path.split("/")[1:]): leaf
            for top, space in self._spaces.items()
            for path, leaf in (space or {}).items()
        }
        self._pictures = pictures_of(self._places) if said.get("jpeg_encoding") else {}
        """The shapes of JPEG images, by their paths in an episode."""

    @abstractmethod
    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of the existing episodes."""

    @abstractmethod
    def _datasets(self, number: int, where: Where) -> dict[str, Any]:
        """Return the arrays of an episode, by name."""

    @abstractmethod
    def _attributes_of(self, number: int) -> Mapping[str, Any]:
        """Return the metadata of an episode. Raises `InvalidDataset` or an error in `DAMAGE`."""

    @abstractmethod
    def _where(self, number: int) -> Where:
        """Return the place of an episode."""

    def _space(self, name: str) -> dict[str, Space] | None:
        text = self._said.get(name)
        if text is None:
            return None  # the dataset's environment declares the space
        try:
            value = json.loads(text) if isinstance(text, str) else text
            return {path: space_of(leaf) for path, leaf in leaves_of(value).items()}
        except NO_SPACE as error:
            message = "a space is not one of Minari's"
            self._found.add("metadata", message, Where(_METADATA), f"{name}: {error!s:.100}")
            return None

    def check(self) -> None:
        found, counts = self._found, list[int]()
        numbers = [*self._numbers()]
        for number in numbers:
            where = self._where(number)
            counts.append(self._episode(number, self._datasets(number, where), where))
            found.tell(len(counts), len(numbers))
        found.rows = sum(counts)
        for key, count in (("total_episodes", len(counts)), ("total_steps", sum(counts))):
            if self._said and declared_count(self._said.get(key)) != count:
                what = f"{key} is {text_of(self._said.get(key))}, expected {count:,}"
                found.add("metadata", "a count does not match the data", Where(_METADATA), what)

    def _missing_among(self, numbers: Collection[int]) -> None:
        """Add a finding for each missing episode."""
        for number in range(len(numbers)):
            if number not in numbers:
                self._found.add("episodes", "an episode is missing", self._where(number))

    def _episode(self, number: int, datasets: dict[str, Any], where: Where) -> int:
        """Check an episode and return the number of its steps."""
        found = self._found
        for name in (_REWARDS, *_FLAGS):
            if name not in datasets:
                self._missing(name, where)
        for top, space in self._spaces.items():
            wanted = [top + below for below in space] if space is not None else []
            there = [name for name in datasets if name.split("/")[0] == top]
            for name in wanted or ([] if there else [top]):
                if name not in datasets:
                    self._missing(name, where)
        counts = [
            len(datasets[name])
            for name in (_REWARDS, *_FLAGS, _ACTIONS)
            if name in datasets and datasets[name].shape
        ]
        count = max({*counts}, key=counts.count) if counts else 0
        if count == 0:
            found.add("episodes", "an episode has no steps", where)
        self._attributes(number, count, where)
        values = {
            name: each
            for name, data in datasets.items()
            if (each := self._column(name, data, count, where)) is not None
        }
        self._values(values, count, where)
        return count

    def _missing(self, name: str, where: Where) -> None:
        damaged = any(
            place.column == name and place.episode == where.episode
            for each in self._found.findings
            for place in each.places
        )
        if not damaged:
            self._found.add("columns", "a column is missing", where, column=name)

    def _attributes(self, number: int, count: int, where: Where) -> None:
        found = self._found
        try:
            said = self._attributes_of(number)
            steps, id = said.get("total_steps"), said.get("id")
        except (InvalidDataset, *DAMAGE) as error:
            found.add("files", "an episode cannot be read", where, f"{error!s:.200}")
            return
        if steps is not None and not np.array_equal(steps, count):
            what = f"total_steps is {text_of(steps)}, expected {count:,}"
            found.add("metadata", "an episode declares the wrong number of steps", where, what)
        if id is not None and not np.array_equal(id, number):
            what = f"id is {text_of(id)}"
            found.add("episodes", "an episode declares the wrong id", where, what)

    def _column(self, name: str, data: Any, count: int, where: Where) -> np.ndarray | None:
        """Check a column, and return its values if they are numbers."""
        found, top = self._found, name.split("/")[0]
        leaf = (self._spaces.get(top) or {}).get(name[len(top) :])
        jpeg = tuple(name.split("/")) in self._pictures
        if not data.shape:
            if top != _INFOS:
                found.add("columns", "a column has no rows", where, column=name)
            return None
        rows = data.shape[0]
        wanted = (count, count + 1) if top == _INFOS else (count + (top == _OBSERVATIONS),)
        if rows not in wanted:
            what = f"it has {rows:,} rows for {count:,} steps"
            found.add("rows", "a column has the wrong number of rows", where, what, name)
        if leaf is not None and leaf.is_text:
            return None
        if jpeg:
            self._decode(name, data, where)
            return None
        if self._said.get("jpeg_encoding") and top == _OBSERVATIONS and self._spaces[top] is None:
            return None  # the column may hold JPEGs of any size
        if not hdf5.is_numbers(data):
            if top != _INFOS:
                found.add("columns", "a column does not hold numbers", where, str(data.dtype), name)
            return None
        kind = data.dtype, data.shape[1:]
        first = self._kinds.setdefault(name, kind)
        if kind != first:
            what = f"{list(kind[1])} of {kind[0]}, but {list(first[1])} of {first[0]} before"
            found.add("columns", "a column differs between episodes", where, what, name)
            return None
        if leaf is not None and (why := leaf.differs(*kind)):
            found.add("columns", "a column does not match its space", where, why, name)
            return None
        return hdf5.values_of(data, 0, rows, found, where, name)

    def _decode(self, name: str, data: Any, where: Where) -> None:
        """Decode images one by one, and report the images that cannot be decoded.

        Pixels are not compared, because JPEG compression changes them.
        """
        for row in range(len(data)):
            try:
                data[row : row + 1]
            except (InvalidDataset, *DAMAGE) as error:
                message = "an image cannot be decoded"
                self._found.add("files", message, where, f"{error!s:.150}", name, row)

    def _values(self, values: Mapping[str, np.ndarray], count: int, where: Where) -> None:
        found, alike = self._found, []
        observed = [name for name in values if name.split("/")[0] == _OBSERVATIONS]
        acted = [name for name in values if name.split("/")[0] == _ACTIONS]
        valid = observations_valid(values.get(_NEXT_VALID))
        for name in (*observed, *acted, *([_REWARDS] if _REWARDS in values else [])):
            known = valid if name in observed else None
            check_finite(found, values[name], where, name, valid=known)
            top = name.split("/")[0]
            leaf = (self._spaces.get(top) or {}).get(name[len(top) :])
            if leaf is not None:
                outside = leaf.outside(values[name])
                found.add_rows("spaces", "a value is outside its space", outside, where, name)
            if len(values[name]) >= count:
                alike.append(values[name][:count])
        for name in _FLAGS:
            if name in values and (flags := as_flags(found, values[name], where, name)) is not None:
                message = "steps follow the end of an episode"
                early = flags & (np.arange(len(flags)) < count - 1)
                found.add_rows("ends", message, early, where, name)
        if count and any(values[name].dtype.kind == "f" for name in observed):
            check_zeros(found, alike, where)


class _Groups(_CheckedEpisodes):
    """Episodes of an HDF5 file, one group each."""

    def __init__(self, file: Any, found: CheckResults, said: Mapping[str, Any]) -> None:
        super().__init__(found, said)
        self._file = file

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of the groups that are episodes."""
        found, numbers = self._found, dict[int, str]()
        try:
            names = list(self._file)
        except DAMAGE as error:
            found.add("files", "a group cannot be read", Where(_FILE), f"{error!s:.200}")
            return
        for name in names:
            match = _EPISODE.fullmatch(name)
            if match is None:
                found.add("episodes", "a group is not an episode", Where(_FILE), text_of(name))
            else:
                numbers[int(match[1])] = name
        for number in sorted(numbers):
            if number >= len(numbers):
                message = "the number of an episode is not below the number of episodes"
                found.add("episodes", message, Where(_FILE, number))
            try:
                is_group = isinstance(self._file[numbers[number]], h5py_module().Group)
            except DAMAGE as error:
                message = "an episode cannot be read"
                found.add("files", message, Where(_FILE, number), f"{error!s:.200}")
                continue
            if is_group:
                yield number
            else:
                found.add("episodes", "an episode is not a group", Where(_FILE, number))
        self._missing_among(numbers)

    def _where(self, number: int) -> Where:
        return Where(_FILE, number)

    def _datasets(self, number: int, where: Where) -> dict[str, Any]:
        datasets = hdf5.datasets_in(self._file[f"episode_{number}"], self._found, where)
        for path, shape in self._pictures.items():
            if (data := datasets.get("/".join(path))) is not None and data.shape:
                datasets["/".join(path)] = Jpegs(data, shape)
        return datasets

    def _attributes_of(self, number: int) -> Mapping[str, Any]:
        return dict(self._file[f"episode_{number}"].attrs)


class _TableEpisodes(_CheckedEpisodes):
    """Episodes in Arrow or Parquet, one folder each."""

    def __init__(self, folder: DatasetFolder, found: CheckResults, said: Mapping[str, Any]) -> None:
        super().__init__(found, said)
        self._folder, kind = folder, str(said["data_format"])
        self._episodes = ArrowEpisodes(
            folder.root, kind, self._places, self._pictures, opened=self._opened
        )

    def _opened(self, path: Path) -> Any:
        name = str(path.relative_to(self._folder.root))
        where = Where(name, int(path.parent.name))
        file = self._folder.opened(name, where=where)
        if file is None:
            raise InvalidDataset(f"{path.name} cannot be opened")
        return file

    def _numbers(self) -> Iterator[int]:
        numbers = self._episodes.numbers
        for number in numbers:
            if number >= len(numbers):
                message = "the number of an episode is not below the number of episodes"
                self._found.add("episodes", message, self._where(number))
        self._missing_among(numbers)
        yield from numbers

    def _where(self, number: int) -> Where:
        return Where(str(number), number)

    def _datasets(self, number: int, where: Where) -> dict[str, Any]:
        try:
            found = self._episodes.columns(number)
        except InvalidDataset as error:
            self._found.add("files", "an episode cannot be read", where, f"{error!s:.200}")
            return {}
        return {"/".join(path): each for path, each in found.items()}

    def _attributes_of(self, number: int) -> Mapping[str, Any]:
        return self._episodes.metadata(number)
