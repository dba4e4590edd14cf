"""The index of a storage's trajectories, brought up to its rows at every question."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDictBase

from tallyroll.storage.engine.ring import slots_of
from tallyroll.storage.errors import ColumnsMissing, CorruptStorage, DamagedTable
from tallyroll.storage.files.lock import is_held
from tallyroll.storage.rows.keys import REWARD, TERMINATED, Key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.columns import WHOSE, RowOrder, missing, unread
from tallyroll.storage.trajectories.episode_file import read_table, write_table
from tallyroll.storage.trajectories.episodes import Episodes, runs_of
from tallyroll.storage.trajectories.row_links import RowLinks

if TYPE_CHECKING:
    from tallyroll.storage.engine.engine import Engine
    from tallyroll.storage.row_store import RowStore


_COUNTED = (*WHOSE, TERMINATED)


class TrajectoryIndex:
    """Links between rows and the table of episodes: each once somebody needs it, none before.

    A storage owns it, and it holds no storage, so that both go when nobody uses them.
    Hold `lock` while using what it returns.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._order: RowOrder | None = None
        self._links: RowLinks | None = None
        self._episodes: Episodes | None = None
        self._in_file = -1

    def links(self, store: RowStore) -> RowLinks:
        """The links of all rows that are committed.

        Raises:
            ColumnsMissing: the rows do not say which trajectory they belong to.
            CorruptStorage: a lane that cannot be.
        """
        with self.lock:
            engine = store._running()
            if self._links is None:
                _require(store, WHOSE)
                self._links = RowLinks(engine.ring)
            links = self._links
            if engine.head > links.seen:
                order = self._order_of(engine)
                for start, stop in unread(engine, links):
                    links.extend(order.chunk(engine, start, stop))
            return links

    def episodes(self, store: RowStore) -> Episodes:
        """The table of all rows that are committed; raises as `links`."""
        with self.lock:
            engine = store._running()
            if self._episodes is None:
                _require(store, _COUNTED)
                self._episodes = self.load(store)
            episodes = self._episodes
            if engine.head > episodes.seen:
                order, runs = self._order_of(engine), runs_of(store.manifest["runs"])
                for start, stop in unread(engine, episodes):
                    episodes.extend(order.episode_rows(engine, start, stop), runs)
            return episodes

    def table(self, store: RowStore) -> np.ndarray:
        """The lines of the trajectories that have rows left; raises as `links`."""
        with self.lock:
            return self.episodes(store).table(store.span.start, _active_from(store))

    def _order_of(self, engine: Engine) -> RowOrder:
        if self._order is None:
            self._order = RowOrder(engine.schema)
        return self._order

    def load(self, store: RowStore) -> Episodes:
        """A table as far as its file goes, for anyone who counts from there on."""
        engine = store._running()
        shapes = {column.key: column.shape for column in engine.schema.columns}
        episodes = Episodes(engine.ring, shapes.get(REWARD, ()))
        try:
            lines = read_table(store.inside, store.episodes_path, episodes.dtype, engine.head)
        except DamagedTable:
            return episodes  # what is in it follows from the rows; `verify` tells
        with self.lock:
            if lines is not None and self._belongs(lines, engine):
                episodes.resume(lines)
                self._in_file = episodes.seen
        return episodes

    def _belongs(self, lines: np.ndarray, engine: Engine) -> bool:
        """Whether the last trajectory of every lane in a table is where the table says."""
        last = np.full(int(lines["lane"].max(initial=-1)) + 1, -1)
        last[lines["lane"]] = np.arange(len(lines))
        line = lines[last[last >= 0]]
        line = line[line["last_row"] >= engine.span.start]
        slots = slots_of(line["last_row"], engine.ring)
        return bool((self._order_of(engine).ids_at(engine, slots) == line["id"]).all())

    def make_way(self, store: RowStore, rows: Any) -> None:
        """Count what a batch of rows will overwrite in a ring, if anybody wants to know."""
        episodes = self._episodes
        if episodes is not None and store.head + _length(rows) - episodes.seen > store.ring:
            with contextlib.suppress(CorruptStorage):  # whoever asks for the table is told
                self.episodes(store)

    def save(self, store: RowStore) -> None:
        """Write the table of a storage that its writer is about to leave, if it can have one.

        Raises:
            StorageFull: no space; what was there stays.
            NotWritable: the file system does not let us write there.
        """
        with self.lock:
            if store._engine is None or not store.head or missing(store.schema, _COUNTED):
                return
            with contextlib.suppress(CorruptStorage):  # as above
                episodes = self.episodes(store)
                if episodes.seen != self._in_file:
                    table = episodes.table(store.span.start)
                    synced = store._durability == "power"
                    write_table(store.inside, store.episodes_path, table, synced=synced)
                    self._in_file = episodes.seen


def _active_from(store: RowStore) -> int | None:
    """The first row of the run that is being written, None where nobody writes."""
    if not store._running().owns_lock and not is_held(store.inside, store.lock_path):
        return None
    runs = store.manifest["runs"]
    return runs[-1]["first_row"] if runs else 0


def says_whose(schema: Schema) -> bool:
    """Whether rows of these columns say to which trajectory they belong."""
    return not missing(schema, WHOSE)


def _require(store: RowStore, keys: tuple[Key, ...]) -> None:
    if lacking := missing(store.schema, keys):
        raise ColumnsMissing(
            f"{store.path} has no {', no '.join(lacking)} (whole numbers, one a row; flags for "
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
