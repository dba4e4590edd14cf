"""The ``d4rl`` format: one HDF5 file in D4RL's layout, with one dataset per column."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import Block, ExchangeFormat, Incoming, refused
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES, ExportRows
from tallyroll.storage.ext.exchange.hdf5_files import (
    as_stored,
    column_of,
    datasets_in,
    opened_hdf5,
    read_rows,
    text_of,
)
from tallyroll.storage.ext.exchange.readme import recorded_schema
from tallyroll.storage.ext.exchange.roles import Roles, under
from tallyroll.storage.formats.hdf5.guarded_file import new_hdf5
from tallyroll.storage.rows.keys import NEXT, NEXT_VALID, REWARD, TERMINATED, TRUNCATED, Key
from tallyroll.storage.rows.schema import Column, Schema

_OBSERVATIONS, _NEXT, _ACTIONS = "observations", "next_observations", "actions"
_REWARDS, _TERMINALS, _TIMEOUTS, _INFOS = "rewards", "terminals", "timeouts", "infos"
_ABOUT = ("metadata", "tallyroll")


def _places(schema: Schema) -> dict[Key, Key]:
    """Map the key of each column to the path of its dataset."""
    roles = Roles.of(schema, D4rlFormat.name)
    found = under(_OBSERVATIONS, roles.observations) | under(_ACTIONS, roles.actions)
    after = {(NEXT, *each.key): each for each in roles.observations}
    for key, each in after.items():
        found[key] = (_NEXT, *found[each.key][1:])
    found |= {REWARD: (_REWARDS,), TERMINATED: (_TERMINALS,)}
    if roles.truncated is not None:
        found[TRUNCATED] = (_TIMEOUTS,)
    return found | {each.key: (_INFOS, *each.key) for each in roles.others}


class D4rlFormat(ExchangeFormat):
    """An HDF5 file of ``observations``, ``actions``, ``rewards``, ``terminals`` and ``timeouts``.

    Next observations are in ``next_observations`` and all other columns below ``infos``. In the
    last row of a cut trajectory, neither ``terminals`` nor ``timeouts`` is True. A program that
    looks only at these flags joins the trajectory with the next one.
    """

    name, extra, suffix, sorted = "d4rl", "hdf5", ".hdf5", True
    loading = 'import h5py\n\nwith h5py.File(PATH) as file:\n    seen = file["observations"][...]'

    def check(self, schema: Schema) -> None:
        """Raise `InvalidSchema` for rows that are not transitions."""
        Roles.of(schema, self.name)

    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write all columns, one block of rows at a time."""
        places, count = _places(rows.schema), len(rows)
        with new_hdf5(place) as (file, guard):
            made = {}
            for column in rows.schema.columns:
                first = np.empty((0, *column.shape), column.numpy_dtype)
                like = as_stored(first, column, flat=_is_flat(column.key))
                shape = (count, *like.shape[1:])
                name = "/".join(places[column.key])
                made[column.key] = file.create_dataset(name, shape, like.dtype)
            if TRUNCATED not in places:  # programs that read D4RL files require timeouts
                file.create_dataset(_TIMEOUTS, data=np.zeros(count, bool))
            text = json.dumps(rows.about).encode()
            file.create_dataset("/".join(_ABOUT), data=np.frombuffer(text, np.uint8))
            at = 0
            for block in rows.blocks():
                more = len(next(iter(block.values())))
                for column in rows.schema.columns:
                    values = as_stored(block[column.key], column, flat=_is_flat(column.key))
                    made[column.key][at : at + more] = values
                guard.check()
                at += more
        return {}

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Open the file and check the shape of each dataset."""
        with opened_hdf5(place) as file:
            datasets = datasets_in(file, place)
            text = datasets.pop(_ABOUT, None)
            about = _parsed(text_of(text, place), place) if text is not None else None
            said = recorded_schema(about)
            yield _of_ours(datasets, said, about, place) if said else _foreign(datasets, place)


def _is_flat(key: Key) -> bool:
    return key in (REWARD, TERMINATED, TRUNCATED)


def _parsed(text: str, place: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(place, f"its metadata cannot be read ({error})") from error


def _of_ours(datasets: dict[Key, Any], schema: Schema, about: Any, place: Path) -> Incoming:
    places = _places(schema)
    found = {key: datasets.get(path) for key, path in places.items()}
    if lacking := ["/".join(places[key]) for key, each in found.items() if each is None]:
        raise refused(place, f"it has no dataset {', '.join(lacking)}")
    rows = _rows(found, place)
    size = max(1, BLOCK_NBYTES // schema.row_nbytes)

    def blocks() -> Iterator[Block]:
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            yield {
                each.key: read_rows(found[each.key], start, stop, each, place)
                for each in schema.columns
            }

    return Incoming(schema, rows, blocks(), about, "d4rl")


def _rows(found: Mapping[Key, Any], place: Path) -> int:
    counts = {each.shape[0] if each.shape else -1 for each in found.values()}
    if len(counts) != 1 or min(counts) < 0:
        raise refused(
            place, f"expected datasets with the same number of rows, got {sorted(counts)}"
        )
    return int(counts.pop())


def _foreign(datasets: dict[Key, Any], place: Path) -> Incoming:
    """Return the rows of a file that another program wrote."""
    columns, sources, lost = dict[Key, Column](), dict[Key, Any](), 0
    for path, data in datasets.items():
        key = key_of(path)
        column = None if key is None or path[0] == _NEXT else column_of(key, data)
        if column is not None:
            columns[column.key], sources[column.key] = column, data
        elif path[0] not in (_NEXT, "metadata"):
            lost += 1
    if lacking := [k for k in ("observation", "action") if not any(key[0] == k for key in columns)]:
        raise InvalidDataset(f"{place} is not a D4RL dataset: it has no {'s, no '.join(lacking)}s.")
    for key in (REWARD, TERMINATED):
        if key not in columns:
            raise refused(place, f"it has no dataset for {key[-1]}")
    rows = _rows(sources, place)
    for key in (TERMINATED, TRUNCATED):
        if key in columns:
            columns[key] = Column(key, columns[key].dtype, (1,))
    columns[REWARD] = Column(REWARD, columns[REWARD].dtype, columns[REWARD].shape or (1,))
    return _Foreign(datasets, columns, sources, rows, place).incoming(lost)


def key_of(path: Key) -> Key | None:
    """Return the key of the column for a dataset, or None if no column corresponds to it."""
    match path:
        case ("observations", *rest):
            return ("observation", *rest)
        case ("actions", *rest):
            return ("action", *rest)
        case ("rewards",):
            return REWARD
        case ("terminals",):
            return TERMINATED
        case ("timeouts",):
            return TRUNCATED
        case ("infos", *_):
            return path
    return None


class _Foreign:
    """The rows of a file that another program wrote.

    If the file has no next observations, the next observation of a row is the observation of the
    following row. A row at the end of an episode then has no valid next observation. The last row
    of the file is left out unless it ends an episode.
    """

    def __init__(
        self,
        datasets: Mapping[Key, Any],
        columns: dict[Key, Column],
        sources: dict[Key, Any],
        rows: int,
        place: Path,
    ) -> None:
        self._columns, self._sources, self._rows, self._place = columns, sources, rows, place
        self._observed = [key for key in columns if key[0] == "observation"]
        self._after = {key: datasets.get((_NEXT, *key[1:])) for key in self._observed}
        given = [data for data in self._after.values() if data is not None]
        self._shifted = not given
        if given and (None in self._after.values() or _rows(self._after, place) != rows):
            raise refused(
                place, f"its {_NEXT} need the same datasets and rows as its {_OBSERVATIONS}"
            )
        for key, data in self._after.items():
            if data is not None and data.shape != sources[key].shape:
                raise refused(place, f"its {_NEXT} and its {_OBSERVATIONS} have different shapes")
        self._last = rows
        """The number of rows in the file, including a last row that is left out."""
        self._left_out = 0
        if self._shifted and rows and not self._flags(rows - 1, rows)[0]:
            self._rows, self._left_out = rows - 1, 1

    def incoming(self, lost: int) -> Incoming:
        columns = [*self._columns.values()]
        columns += [
            Column((NEXT, *k), self._columns[k].dtype, self._columns[k].shape)
            for k in self._observed
        ]
        if self._shifted:
            columns += Schema.of({NEXT_VALID: np.empty(0, bool)}).columns
        schema = Schema(tuple(columns))
        missing = {"columns": lost, "rows_without_next_observation": self._left_out}
        return Incoming(schema, self._rows, self._blocks(schema, missing), None, "d4rl", missing)

    def _flags(self, start: int, stop: int) -> np.ndarray:
        """Return a mask [stop - start] of the rows at which an episode ends."""
        found = np.zeros(stop - start, bool)
        for key in (TERMINATED, TRUNCATED):
            if key in self._columns:
                column = self._columns[key]
                values = read_rows(self._sources[key], start, stop, column, self._place)
                found |= values.reshape(stop - start).astype(bool)
        return found

    def _blocks(self, schema: Schema, lost: dict[str, int]) -> Iterator[Block]:
        lost["final_observations"] = 0
        size, place = max(1, BLOCK_NBYTES // schema.row_nbytes), self._place
        for start in range(0, self._rows, size):
            stop = min(start + size, self._rows)
            block = {
                key: read_rows(self._sources[key], start, stop, column, place)
                for key, column in self._columns.items()
            }
            for key in self._observed:
                column, after = self._columns[key], self._after[key]
                if after is not None:
                    values = read_rows(after, start, stop, column, place)
                else:
                    rest = read_rows(
                        self._sources[key], start + 1, min(stop + 1, self._last), column, place
                    )
                    values = np.concatenate([rest, block[key][-1:]])[: stop - start]
                block[(NEXT, *key)] = values
            if self._shifted:
                ends = self._flags(start, stop)
                lost["final_observations"] += int(ends.sum())
                block[NEXT_VALID] = ~ends
            yield block
