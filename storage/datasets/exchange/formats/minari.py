"""``minari``: a folder of Minari, an HDF5 group for each episode."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.datasets.exchange.about import LIMIT, schema_said
from tallyroll.storage.datasets.exchange.door import Block, ExchangeFormat, Incoming, refused
from tallyroll.storage.datasets.exchange.formats.hdf5_files import (
    DAMAGE,
    as_column,
    as_stored,
    column_of,
    datasets_in,
    opened_hdf5,
    require_memory_for,
    require_space,
)
from tallyroll.storage.datasets.exchange.numbering import numbered, numbers
from tallyroll.storage.datasets.exchange.outgoing import Episode, Outgoing
from tallyroll.storage.datasets.exchange.roles import Roles, under
from tallyroll.storage.datasets.exchange.successors import Successors
from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.rows.keys import (
    NEXT,
    RESET_SEED,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    spell,
)
from tallyroll.storage.rows.schema import Column, Schema

_DATA, _FILE, _METADATA, _ABOUT = "data", "main_data.hdf5", "metadata.json", "tallyroll.json"
_OBSERVATIONS, _ACTIONS, _INFOS = "observations", "actions", "infos"
_FLAGS: Final = {REWARD: "rewards", TERMINATED: "terminations", TRUNCATED: "truncations"}
_SPARE_NBYTES: Final = 2**20
_DATASET_NBYTES: Final = 2**12
_MOST_ACTIONS: Final = 2**16


class MinariFormat(ExchangeFormat):
    """Observations once, from the first to the final one; columns that it lacks are infos.

    Written by Minari's own writer, without JPEG; read by h5py alone. bfloat16 is float32 in it.
    """

    name, extra, sorted = "minari", "minari", True
    loading = 'from minari import MinariDataset\n\ndataset = MinariDataset(PATH + "/data")'

    def check(self, schema: Schema) -> None:
        """Refuse rows that are no transitions, and observations that its spaces cannot be of."""
        roles = Roles.of(schema, self.name)
        for each in (*roles.observations, *roles.actions):
            if each.dtype.is_complex:
                raise InvalidSchema(
                    f"{spell(each.key)} is complex, and Minari has no space of such numbers. "
                    "Leave it out: columns=."
                )

    def write(self, rows: Outgoing, place: Path) -> Mapping[str, int]:
        """Write one episode after the other."""
        minari = needed("minari", "minari", "an export to Minari needs")
        roles = Roles.of(rows.schema, self.name)
        data = place / _DATA
        data.mkdir(parents=True)
        datasets = rows.trajectories * (len(rows.schema.columns) + 2)
        nbytes = 2 * len(rows) * rows.schema.row_nbytes + _SPARE_NBYTES
        require_space(data, nbytes + datasets * _DATASET_NBYTES)
        storage = _new(minari, data, rows, roles)
        successors = Successors(roles)
        storage.update_episodes(_buffer(each, roles, successors) for each in rows.episodes())
        name = re.sub(r"[^A-Za-z0-9_-]+|-v[0-9]+$", "-", rows.title).strip("-") or "rows"
        storage.update_metadata(
            {"dataset_id": f"tallyroll/{name}-v0", "minari_version": minari.__version__}
        )
        (data / _ABOUT).write_text(json.dumps(rows.about))
        every = (*roles.observations, *roles.actions, *roles.others, roles.reward)
        return {**successors.lost, "dtypes": sum(each.dtype is torch.bfloat16 for each in every)}

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Open the file, and look at the shape of each dataset."""
        data = place / _DATA if (place / _DATA).is_dir() else place
        metadata = _json(data, _METADATA, place)
        about = _json(data, _ABOUT, place) if (data / _ABOUT).exists() else None
        if not isinstance(metadata, dict) or metadata.get("data_format", "hdf5") != "hdf5":
            raise refused(place, "its metadata are not those of a dataset in HDF5")
        if metadata.get("jpeg_encoding") and _has_pictures(metadata):
            raise refused(
                place, "its images are JPEG: load it with Minari, and save with jpeg_encoding=False"
            )
        with opened_hdf5(data / _FILE) as file:
            version = f"{metadata.get('minari_version', '')!s:.40}"
            yield _Episodes(file, place, schema_said(about)).incoming(about, version)


def _has_pictures(metadata: Mapping[str, Any]) -> bool:
    spaces = f"{metadata.get('observation_space')} {metadata.get('action_space')}"
    return "uint8" in spaces or "None" in spaces


def _json(data: Path, name: str, place: Path) -> Any:
    try:
        return json.loads(Inside(data).read(data / name, LIMIT))
    except (ValueError, OSError, RecursionError) as error:
        raise refused(place, f"{name} cannot be read ({error})") from error


# --- out ------------------------------------------------------------------------------------------


def _new(minari: Any, data: Path, rows: Outgoing, roles: Roles) -> Any:
    from minari.dataset.minari_storage import MinariStorage

    observed = _space({each.key: _box(each) for each in roles.observations})
    acted = {}
    for each in roles.actions:
        span = _span(rows, each) if not each.shape and each.numpy_dtype.kind in "iu" else None
        acted[each.key] = _box(each) if span is None else _discrete(*span)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Gymnasium's, on the precision of bounds
        return MinariStorage.new(
            data, observed, _space(acted), data_format="hdf5", jpeg_encoding=False
        )


def _span(rows: Outgoing, column: Column) -> tuple[int, int] | None:
    """Return the least and the largest of whole numbers, if few lie between them."""
    least, most = 2**63, -(2**63)
    for block in rows.blocks([column.key]):
        values = block[column.key]
        least, most = min(least, int(values.min())), max(most, int(values.max()))
    return (least, most) if 0 <= most - least < _MOST_ACTIONS else None


def _discrete(least: int, most: int) -> Any:
    from gymnasium.spaces import Discrete

    start = min(least, 0) if least < _MOST_ACTIONS else least
    return Discrete(most - start + 1, start=start)


def _box(column: Column) -> Any:
    from gymnasium.spaces import Box, MultiBinary

    dtype = np.dtype(np.float32) if column.dtype is torch.bfloat16 else column.numpy_dtype
    if dtype.kind == "b":
        return MultiBinary(column.shape or 1)
    if dtype.kind == "f":
        return Box(-np.inf, np.inf, column.shape, dtype.type)
    limits: Any = np.iinfo(dtype.str)
    return Box(limits.min, limits.max, column.shape, dtype.type)


def _space(spaces: Mapping[Key, Any]) -> Any:
    from gymnasium.spaces import Dict

    if len(spaces) == 1 and len(next(iter(spaces))) == 1:
        return next(iter(spaces.values()))
    return _as_spaces(_nested(spaces), Dict)


def _as_spaces(values: Mapping[str, Any], kind: Any) -> Any:
    inner = {n: _as_spaces(v, kind) if isinstance(v, dict) else v for n, v in values.items()}
    return kind(inner)


def _nested(values: Mapping[Key, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        here = found
        for part in key[:-1]:
            here = here.setdefault(part, {})
        here[key[-1]] = value
    return found


def _buffer(episode: Episode, roles: Roles, successors: Successors) -> Any:
    from minari.data_collector import EpisodeBuffer

    rows = episode.rows
    successors.count(rows)

    def all_of(each: Column) -> np.ndarray:
        last = rows[(NEXT, *each.key)][-1:]
        return as_stored(np.concatenate([rows[each.key], last]), each)

    count = len(rows[TERMINATED])
    ended = np.zeros(count, bool)
    return EpisodeBuffer(
        seed=episode.seed if episode.seed >= 0 else None,
        observations=_whole({each.key: all_of(each) for each in roles.observations}),
        actions=_whole({each.key: as_stored(rows[each.key], each) for each in roles.actions}),
        rewards=as_stored(rows[REWARD], roles.reward, flat=True),
        terminations=rows[TERMINATED].reshape(count),
        truncations=rows.get(TRUNCATED, ended).reshape(count),
        infos=_nested({each.key: as_stored(rows[each.key], each) for each in roles.others}),
    )


def _whole(values: Mapping[Key, Any]) -> Any:
    """Return values by names; of one, itself."""
    if len(values) == 1 and len(next(iter(values))) == 1:
        return next(iter(values.values()))
    return _nested(values)


# --- in -------------------------------------------------------------------------------------------


class _Episodes:
    """The episodes of a file."""

    def __init__(self, file: Any, place: Path, said: Schema | None) -> None:
        self._file, self._place, self._said = file, place, said
        self._groups = self._found()
        self._at: dict[Key, tuple[Key, Column]] = {}
        """Where each column is in a group, and what it is."""

    def _found(self) -> list[dict[Key, Any]]:
        groups = dict[int, dict[Key, Any]]()
        for path, data in datasets_in(self._file, self._place).items():
            number = re.fullmatch(r"episode_([0-9]{1,18})", path[0])
            if number is None:
                raise refused(self._place, f"{path[0]!r:.80} is no episode")
            groups.setdefault(int(number[1]), {})[path[1:]] = data
        return [groups[number] for number in sorted(groups)]

    def incoming(self, about: Any, version: str) -> Incoming:
        if not self._groups and self._said is None:
            raise refused(self._place, "it has no episode")
        roles, schema, lost = self._ours() if self._said is not None else self._theirs()
        counts = [self._count(group) for group in self._groups]
        numbers = schema if self._said is not None else numbered(schema)
        blocks = self._blocks(roles, counts)
        return Incoming(numbers, sum(counts), blocks, about, version, {"columns": lost})

    def _ours(self) -> tuple[Roles, Schema, int]:
        assert self._said is not None
        roles = Roles.of(self._said, MinariFormat.name)
        places = under(_OBSERVATIONS, roles.observations) | under(_ACTIONS, roles.actions)
        places |= {each.key: (_INFOS, *each.key) for each in roles.others}
        places |= {key: (name,) for key, name in _FLAGS.items() if key in self._said.keys}
        columns = {each.key: each for each in self._said.columns}
        self._at = {key: (path, columns[key]) for key, path in places.items()}
        return roles, self._said, 0

    def _theirs(self) -> tuple[Roles, Schema, int]:
        first, lost = self._groups[0], 0
        steps = self._count(first)
        for path, data in first.items():
            match path:
                case ("observations", *rest):
                    key: Key | None = tuple(rest) or ("observation",)
                case ("actions", *rest):
                    key = ("action", *rest) if not rest else (*rest, "action")
                case ("infos", *_):  # of a reset, and of each step: the step's
                    key = (NEXT, *path) if data.shape and data.shape[0] == steps + 1 else None
                case (name,) if name in _FLAGS.values():
                    key = next(each for each, other in _FLAGS.items() if other == name)
                case _:
                    key = None
            column = None if key is None else column_of(key, data)
            if column is None or any(column.key == other for other in self._at):
                lost += 1
                continue
            if key in _FLAGS:
                column = Column(column.key, column.dtype, column.shape or (1,))
            self._at[column.key] = (path, column)
        columns = [column for _, column in self._at.values()]
        columns += [
            Column((NEXT, *column.key), column.dtype, column.shape)
            for path, column in self._at.values()
            if path[0] == _OBSERVATIONS
        ]
        if any("seed" in self._attributes(group) for group in self._groups[:1]):
            columns.append(Column(RESET_SEED, torch.int64, ()))
        schema = Schema(tuple(columns))
        return Roles.of(schema, MinariFormat.name), schema, lost

    def _attributes(self, group: Mapping[Key, Any]) -> Any:
        try:
            return group[("rewards",)].parent.attrs
        except DAMAGE as error:
            raise refused(self._place, f"an episode has no rewards ({error})") from error

    def _count(self, group: Mapping[Key, Any]) -> int:
        shape = group[("rewards",)].shape if ("rewards",) in group else ()
        if not shape or shape[0] < 1:
            raise refused(self._place, "an episode has no rewards, or no step")
        return int(shape[0])

    def _blocks(self, roles: Roles, counts: list[int]) -> Iterator[Block]:
        seeded = self._said is None and RESET_SEED in {each.key for each in roles.others}
        for number, (group, count) in enumerate(zip(self._groups, counts, strict=True)):
            block: Block = {}
            for key, (path, column) in self._at.items():
                more = path[0] == _OBSERVATIONS or (self._said is None and path[0] == _INFOS)
                values = self._read(group, path, column, count + more)
                if path[0] == _OBSERVATIONS:
                    block[key], block[(NEXT, *key)] = values[:-1], values[1:]
                else:
                    block[key] = values[1:] if more else values
            if self._said is None:
                block |= numbers(np.full(count, number), np.arange(count))
            if seeded:
                block[RESET_SEED] = np.full(count, self._seed(group), np.int64)
            yield block

    def _seed(self, group: Mapping[Key, Any]) -> int:
        try:
            seed = int(self._attributes(group).get("seed", -1))
        except DAMAGE:
            return -1
        return seed if 0 <= seed < 2**63 else -1

    def _read(self, group: Mapping[Key, Any], path: Key, column: Column, count: int) -> np.ndarray:
        data, name = group.get(path), "/".join(path)
        if data is None or not data.shape or data.shape[0] != count:
            raise refused(self._place, f"an episode has not {count} {name}")
        require_memory_for(2 * data.size * data.dtype.itemsize, f"an episode's {name}")
        try:
            values = np.asarray(data[()])
        except DAMAGE as error:
            raise refused(self._place, f"{data.name}: {error}") from error
        return as_column(values, column, data.name, self._place)
