"""Repair of datasets of Minari: the steps of every episode of which all columns can be read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from tallyroll.storage.datasets.exchange.door import Block, Incoming
from tallyroll.storage.datasets.exchange.formats.hdf5_files import column_of, read_rows
from tallyroll.storage.datasets.exchange.formats.of_minari.places import key_of
from tallyroll.storage.datasets.exchange.numbering import numbered, numbers
from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.rows.keys import NEXT, RESET_SEED, REWARD, TERMINATED, TRUNCATED, Key
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.verification.soundness import hdf5
from tallyroll.storage.verification.soundness.checker import Gathered, Where
from tallyroll.storage.verification.soundness.repairing.hdf5 import (
    cut_after,
    lose_gaps,
    opened_damaged,
    readable_rows,
    runs,
)
from tallyroll.storage.verification.soundness.repairing.losses import Losses
from tallyroll.storage.verification.soundness.repairing.rows_repair import RowsRepair

_FILE: Final = "main_data.hdf5"
_FLAGS: Final = {"rewards": REWARD, "terminations": TERMINATED, "truncations": TRUNCATED}
_INFOS: Final = "infos"
_EPISODE: Final = re.compile(r"episode_([0-9]{1,18})")

_Kind = tuple[np.dtype[Any], tuple[int, ...]]


class MinariRepair(RowsRepair):
    """Reads what is readable; steps after a gap are a trajectory of their own.

    An info is there if it can be read of all these steps: no step is left out for one.
    """

    name: ClassVar[str] = "minari"

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Look at all episodes, and find the steps that can be read."""
        data = place / "data" if (place / "data").is_dir() else place
        with opened_damaged(data, _FILE) as (file, size):
            yield _Episodes(file, size, place, self._losses).incoming()


def _key(name: str) -> Key | None:
    path = tuple(name.split("/"))
    return (NEXT, *path) if path[0] == _INFOS else key_of(path)


class _Episodes:
    def __init__(self, file: Any, size: int, place: Path, losses: Losses) -> None:
        self._file, self._size, self._place, self._losses = file, size, place, losses
        self._kinds: dict[Key, tuple[str, Column]] = {}
        """The name and the column of each, as most episodes have them."""
        self._infos: dict[Key, tuple[str, Column]] = {}
        """The same of infos."""

    def incoming(self) -> Incoming:
        episodes = dict(self._datasets())
        self._kinds = self._common([self._without_infos(each) for each in episodes.values()])
        pieces = [
            (number, start, stop)
            for number, datasets in episodes.items()
            for start, stop in self._steps(number, datasets)
        ]
        if not pieces:
            raise InvalidDataset(f"{self._place} cannot be repaired: no step can be read.")
        self._infos = self._whole_infos(pieces, episodes)
        columns = [column for _, column in (*self._kinds.values(), *self._infos.values())]
        columns += [
            Column((NEXT, *key), column.dtype, column.shape)
            for key, (name, column) in self._kinds.items()
            if name.split("/")[0] == "observations"
        ]
        columns.append(Column(RESET_SEED, torch.int64, ()))
        schema = numbered(Schema(tuple(columns)))
        rows = sum(stop - start for _, start, stop in pieces)
        return Incoming(schema, rows, self._blocks(pieces, episodes), None, "minari")

    def _datasets(self) -> Iterator[tuple[int, dict[Key, Any]]]:
        """Yield the datasets of each episode that can be opened."""
        numbers = sorted(int(m[1]) for name in self._file if (m := _EPISODE.fullmatch(name)))
        for number in range(max(numbers, default=-1) + 1 if len(numbers) < 2**22 else 0):
            name = f"episode_{number}"
            if number not in numbers:
                self._losses.add("an episode is missing", None, file=_FILE, episode=number)
                continue
            found = Gathered()
            try:
                group = self._file[name]
            except (KeyError, OSError, RuntimeError) as error:
                what = f"{error!s:.150}"
                message = "an episode cannot be opened"
                self._losses.add(message, None, file=_FILE, episode=number, what=what)
                continue
            datasets = hdf5.datasets_in(group, found, Where(_FILE, number))
            yield number, {key: data for each, data in datasets.items() if (key := _key(each))}

    def _without_infos(self, datasets: Mapping[Key, Any]) -> dict[Key, Any]:
        return {key: each for key, each in datasets.items() if key[:2] != (NEXT, _INFOS)}

    def _whole_infos(
        self, pieces: list[tuple[int, int, int]], episodes: Mapping[int, Mapping[Key, Any]]
    ) -> dict[Key, tuple[str, Column]]:
        """Return the infos that can be read of all steps of ``pieces``, and list the others."""
        keys = {key for each in episodes.values() for key in each} - {*self._kinds}
        every = [{key: each[key] for key in keys if key in each} for each in episodes.values()]
        found = self._alike(every)
        for key in sorted(keys):
            lost = sum(
                stop
                - start
                - self._readable(episodes[number].get(key), found.get(key), start, stop)
                for number, start, stop in pieces
            )
            if lost:
                found.pop(key, None)
                what = f"{lost:,} of its steps have no number that can be read"
                name = "/".join(key[1:])
                self._losses.add("an info is not saved", 0, file=_FILE, column=name, what=what)
        return found

    def _readable(self, data: Any, info: tuple[str, Column] | None, start: int, stop: int) -> int:
        """Return how many of some steps have an entry of an info that can be read."""
        if info is None or data is None or not self._is_of(data, info[1]):
            return 0
        # Those of Minari have one of the reset, too, and then one for each step.
        return int(readable_rows(data, self._size)[start + 1 : stop + 1].sum())

    def _is_of(self, data: Any, column: Column) -> bool:
        shape = () if column.key in _FLAGS.values() else column.shape
        return (data.dtype, data.shape[1:]) == (column.numpy_dtype, shape)

    def _common(self, episodes: list[dict[Key, Any]]) -> dict[Key, tuple[str, Column]]:
        """Return the columns that are alike in most episodes; refuse a dataset that lacks some."""
        found = self._alike(episodes)
        lacking = [key[-1] for key in (REWARD, TERMINATED, TRUNCATED) if key not in found]
        tops = {name.split("/")[0] for name, _ in found.values()}
        lacking += [each for each in ("observations", "actions") if each not in tops]
        if lacking:
            raise InvalidDataset(
                f"{self._place} cannot be repaired: nothing of {', '.join(lacking)} can be read."
            )
        return found

    def _alike(self, episodes: list[dict[Key, Any]]) -> dict[Key, tuple[str, Column]]:
        kinds: dict[Key, dict[_Kind, int]] = {}
        for datasets in episodes:
            for key, data in datasets.items():
                if column_of(key, data) is not None:
                    of = kinds.setdefault(key, {})
                    of[data.dtype, data.shape[1:]] = of.get((data.dtype, data.shape[1:]), 0) + 1
        found = {}
        for key, of in kinds.items():
            kind = max(of, key=lambda each: of[each])
            if 2 * of[kind] < len(episodes):
                continue
            data = next(
                d[key] for d in episodes if key in d and (d[key].dtype, d[key].shape[1:]) == kind
            )
            column = column_of(key, data)
            assert column is not None
            if key in _FLAGS.values():
                column = Column(key, column.dtype, column.shape or (1,))
            found[key] = "/".join(data.name.split("/")[2:]), column
        return found

    def _steps(self, number: int, datasets: Mapping[Key, Any]) -> list[tuple[int, int]]:
        """Return the runs of steps of an episode that can be read."""
        lacking = [
            name
            for key, (name, column) in self._kinds.items()
            if key not in datasets or not self._is_of(datasets[key], column)
        ]
        count = max((d.shape[0] for k, d in datasets.items() if k in _FLAGS.values()), default=0)
        if lacking:
            what = f"no {', '.join(lacking)}"
            message = "an episode without a column"
            self._losses.add(message, count or None, file=_FILE, episode=number, what=what)
            return []
        good = np.ones(count, bool)
        for key, (name, _) in self._kinds.items():
            each = readable_rows(datasets[key], self._size)
            if name.split("/")[0] == "observations":
                each = each[:-1] & each[1:]
            good &= np.concatenate([each, np.zeros(count, bool)])[:count]
        message = "steps cannot be read"
        lose_gaps(self._losses, good, message, _FILE, number)
        found = runs(good)
        cut = cut_after(found, self._ended(found, datasets, count))
        if len(cut) > len(found):
            message = "steps follow the end of an episode: they are a trajectory of their own"
            self._losses.add(message, 0, file=_FILE, episode=number)
        return cut

    def _ended(
        self, good: list[tuple[int, int]], datasets: Mapping[Key, Any], count: int
    ) -> np.ndarray:
        """Return which of the steps that can be read are marked as ends."""
        ended = np.zeros(count, bool)
        for key in (TERMINATED, TRUNCATED):
            column = self._kinds[key][1]
            for start, stop in good:
                values = read_rows(datasets[key], start, stop, column, self._place)
                ended[start:stop] |= values.reshape(stop - start).astype(bool)
        return ended

    def _blocks(
        self, pieces: list[tuple[int, int, int]], episodes: Mapping[int, Mapping[Key, Any]]
    ) -> Iterator[Block]:
        for id, (number, start, stop) in enumerate(pieces):
            datasets, block = episodes[number], Block()
            for key, (name, column) in self._kinds.items():
                more = name.split("/")[0] == "observations"
                values = read_rows(datasets[key], start, stop + more, column, self._place)
                block[key] = values[:-1] if more else values
                if more:
                    block[(NEXT, *key)] = values[1:]
            for key, (_, column) in self._infos.items():
                block[key] = read_rows(datasets[key], start + 1, stop + 1, column, self._place)
            seed = self._seed(number) if start == 0 else -1
            block[RESET_SEED] = np.full(stop - start, seed, np.int64)
            yield block | numbers(np.full(stop - start, id), np.arange(stop - start))

    def _seed(self, number: int) -> int:
        try:
            seed = int(self._file[f"episode_{number}"].attrs.get("seed", -1))
        except (KeyError, OSError, RuntimeError, ValueError, TypeError):
            return -1
        return seed if 0 <= seed < 2**63 else -1
