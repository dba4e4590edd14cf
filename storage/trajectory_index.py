"""What is known of a storage's trajectories, brought up to its rows whenever somebody asks."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from .engine import Engine
from .episode_file import read_table, write_table
from .episodes import EpisodeRows, Episodes, runs_of
from .errors import ColumnsMissing, CorruptStorage, DamagedTable
from .keys import LANE, POLICY_VERSION, REWARD, STEP, TERMINATED, TRAJ_IDS, TRUNCATED
from .lane_order import Chunk
from .links import Links
from .lock import is_held
from .ring import pieces
from .rows import Key, spell

if TYPE_CHECKING:
    from .store import RowStore

__all__ = ["TrajectoryIndex"]

_CHUNK_ROWS = 2**18


class TrajectoryIndex:
    """Links between rows and the table of episodes: each once somebody needs it, none before.

    A storage owns it, and it holds no storage, so that both go when nobody uses them.
    Hold `lock` while using what it returns.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._links: Links | None = None
        self._episodes: Episodes | None = None
        self._in_file = -1

    def links(self, store: RowStore) -> Links:
        """The links of all rows that are committed.

        Raises:
            ColumnsMissing: the rows do not say which trajectory they belong to.
            CorruptStorage: a lane that cannot be.
        """
        with self.lock:
            engine = store._running()
            if self._links is None:
                _require(store, (TRAJ_IDS, STEP, LANE))
                self._links = Links(engine.ring)
            for start, stop in _unseen(engine, self._links.seen):
                chunk, _ = _chunk(engine, start, stop)
                self._links.extend(chunk)
            return self._links

    def episodes(self, store: RowStore) -> Episodes:
        """The table of all rows that are committed; raises as `links`."""
        with self.lock:
            engine = store._running()
            if self._episodes is None:
                self._episodes = self._load(store, engine)
            episodes, runs = self._episodes, None
            for start, stop in _unseen(engine, episodes.seen):
                runs = runs_of(store.manifest["runs"]) if runs is None else runs
                episodes.extend(_episode_rows(engine, start, stop), runs)
            return episodes

    def _load(self, store: RowStore, engine: Engine) -> Episodes:
        _require(store, (TRAJ_IDS, STEP, LANE, TERMINATED))
        episodes = Episodes(engine.ring, _reward_shape(engine))
        try:
            lines = read_table(store._format.episodes_path, episodes.dtype, engine.head)
        except DamagedTable:
            return episodes  # what is in it follows from the rows; `verify` tells
        if lines is not None and _belongs(lines, engine):
            episodes.resume(lines)
            self._in_file = episodes.seen
        return episodes

    def make_way(self, store: RowStore, rows: Any) -> None:
        """Count what a batch of rows will overwrite in a ring, if anybody wants to know."""
        episodes = self._episodes
        if episodes is not None and store.head + _length(rows) - episodes.seen > store.ring:
            self.episodes(store)

    def save(self, store: RowStore) -> None:
        """Write the table of a storage that its writer is about to leave, if it can have one.

        Raises:
            StorageFull: no space; what was there stays.
            NotWritable: the file system does not let us write there.
        """
        with self.lock:
            if store._engine is None or not store.head or _missing(store, (*_WHOSE, TERMINATED)):
                return
            try:
                episodes = self.episodes(store)
            except CorruptStorage:
                return  # there is no such table; whoever asks for it, and `verify`, are told why
            if episodes.seen != self._in_file:
                write_table(store._format.episodes_path, episodes.table(store.span.start))
                self._in_file = episodes.seen

    def table(self, store: RowStore) -> np.ndarray:
        """The lines of the trajectories that have rows left; raises as `links`."""
        with self.lock:
            return self.episodes(store).table(store.span.start, _active_from(store))


_WHOSE = (TRAJ_IDS, STEP, LANE)


def _active_from(store: RowStore) -> int | None:
    """The first row of the run that is being written, None where nobody writes."""
    if not store._running().owns_lock and not is_held(store._format.lock_path):
        return None
    runs = store.manifest["runs"]
    return runs[-1]["first_row"] if runs else 0


def _missing(store: RowStore, keys: tuple[Key, ...]) -> list[str]:
    columns = {column.key: column for column in store.schema.columns}
    return [
        spell(key)
        for key in keys
        if key not in columns
        or (key in _WHOSE and math.prod(columns[key].shape) != 1)
        or columns[key].numpy_dtype.kind not in ("iu" if key in _WHOSE else "b")
    ]


def _require(store: RowStore, keys: tuple[Key, ...]) -> None:
    if missing := _missing(store, keys):
        raise ColumnsMissing(
            f"{store.path} has no {', no '.join(missing)} (whole numbers, one a row; flags for "
            "ends), so that nobody knows which rows make a trajectory. Tallyroll's collectors "
            "write these columns; rows from elsewhere need them, too."
        )


def _length(rows: Any) -> int:
    """Rows of a batch; 0 of what is none, which will be refused."""
    if not isinstance(rows, TensorDictBase):
        rows = next(iter(rows.values()), ()) if isinstance(rows, Mapping) else ()
    try:
        return len(rows)
    except TypeError:
        return 0


def _unseen(engine: Engine, seen: int) -> Iterator[tuple[int, int]]:
    """Rows that are committed now, from ``seen`` on, in pieces that a ring holds at once."""
    head = engine.head
    size = min(_CHUNK_ROWS, engine.ring or _CHUNK_ROWS)
    while seen < head:
        start = max(seen, engine.span.start)
        seen = min(start + size, head)
        if start < seen:
            yield start, seen
        else:
            seen = head


def _chunk(engine: Engine, start: int, stop: int) -> tuple[Chunk, int]:
    """Whose the rows are, and how many of the first ones are gone."""
    numbers = [_column(engine, key, start, stop).reshape(stop - start, -1)[:, 0] for key in _WHOSE]
    # A writer may have overwritten the oldest while they were copied.
    gone = min(max(0, engine.span.start - start), stop - start)
    ids, steps, lane = (np.asarray(column[gone:], np.int64) for column in numbers)
    return Chunk(start + gone, ids, steps, lane), gone


def _episode_rows(engine: Engine, start: int, stop: int) -> EpisodeRows:
    count, keys = stop - start, engine.schema.keys
    terminated = _flags(engine, TERMINATED, start, stop)
    truncated = np.zeros(count, np.bool_)
    if TRUNCATED in keys:
        truncated = _flags(engine, TRUNCATED, start, stop)
    reward = np.full(count, np.nan)
    if REWARD in keys:
        reward = _column(engine, REWARD, start, stop)
        reward = reward.reshape(count) if reward.size == count else reward
    version = np.full(count, -1)
    if POLICY_VERSION in keys:
        version = _column(engine, POLICY_VERSION, start, stop).reshape(count, -1)[:, 0]
    # Last, for what is overwritten until then is told by it.
    chunk, gone = _chunk(engine, start, stop)
    return EpisodeRows(chunk, terminated[gone:], truncated[gone:], reward[gone:], version[gone:])


def _column(engine: Engine, key: Key, start: int, stop: int) -> np.ndarray:
    """Rows of one column in the order of their numbers, [stop - start, ...]."""
    place = engine.schema.keys.index(key)
    column = engine.columns()[place]
    parts = [column[slot : slot + count] for slot, _, count in pieces(start, stop, engine.ring)]
    found = np.concatenate(parts) if engine.ring else parts[0]
    if engine.schema.columns[place].dtype is torch.bfloat16:
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found


def _flags(engine: Engine, key: Key, start: int, stop: int) -> np.ndarray:
    flags = _column(engine, key, start, stop).reshape(stop - start, -1)
    found: np.ndarray = flags[:, 0] if flags.shape[1] == 1 else np.any(flags, axis=1)
    return found


def _reward_shape(engine: Engine) -> tuple[int, ...]:
    shapes = {column.key: column.shape for column in engine.schema.columns}
    return shapes.get(REWARD, ())


def _belongs(lines: np.ndarray, engine: Engine) -> bool:
    """Whether the last trajectory of every lane in a table is where the table says."""
    last = np.full(int(lines["lane"].max(initial=-1)) + 1, -1)
    last[lines["lane"]] = np.arange(len(lines))
    line = lines[last[last >= 0]]
    line = line[line["last_row"] >= engine.span.start]
    slots = line["last_row"] % engine.ring if engine.ring else line["last_row"]
    ids = engine.columns()[engine.schema.keys.index(TRAJ_IDS)]
    return bool((ids.reshape(len(ids), -1)[slots, 0] == line["id"]).all())
