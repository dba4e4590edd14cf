"""The reader of Tallyroll's own files in every format, through memory maps."""
# ruff: noqa: D102 - `RowReader` documents the methods

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
from tensordict import TensorDict

from tallyroll.storage.engine.columns import Places
from tallyroll.storage.engine.commit_engine import Engine
from tallyroll.storage.engine.committed_counts import HeaderCounts
from tallyroll.storage.engine.creation import manifest_of, open_existing
from tallyroll.storage.engine.frame_pools import PoolFile, PoolUsage, StoredSize
from tallyroll.storage.engine.once_columns import OnceColumn, row_nbytes_once, stored_schema
from tallyroll.storage.engine.pool import ColumnMemory
from tallyroll.storage.engine.ring import pieces
from tallyroll.storage.errors import CorruptStorage, IndexOutOfRange, NotInitialised
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.files.lock import is_held
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.paths import translates_errors
from tallyroll.storage.files.rewind_history import rewind_fault
from tallyroll.storage.files.run_events import EVENTS, LEFT_OUT, Event
from tallyroll.storage.formats.base import Format
from tallyroll.storage.readers.event_file import EventFile, on_disk
from tallyroll.storage.readers.row_reader import ColumnReader, ReusedRows, RowReader, columns_of
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.indexing import resolve
from tallyroll.storage.rows.keys import Key, Keys, format_key
from tallyroll.storage.rows.origin import Numbers, Origin, came_from
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.rows.slot_order import in_all_slots
from tallyroll.storage.rows.tensordict_builder import TensorDictBuilder
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks
from tallyroll.storage.trajectories.episode_file import read_table
from tallyroll.storage.trajectories.index import TrajectoryIndex
from tallyroll.storage.trajectories.index_file import IndexOwner, read_index

Mode: TypeAlias = Literal["create", "append", "read"]

_MOST_ROWS: Final = 2**62
"""A bound above all row numbers, for the origin of a writer, whose manifest has the run of every
row."""


class _FileColumn(ColumnReader):
    """Column that is one array, indexed by slot."""

    __slots__ = ("_engine", "_place")

    def __init__(self, engine: Engine, place: int) -> None:
        self._engine, self._place = engine, place

    @property
    def array(self) -> np.ndarray:
        return self._engine.space.committed()[self._place]

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        engine = self._engine
        slots = rows % engine.ring if engine.ring else rows
        # The rows exist. With mode "clip", NumPy writes directly to `out`.
        return engine.space.arrays()[self._place].take(slots, axis=0, out=out, mode="clip")

    def slice(self, start: int, stop: int) -> np.ndarray:
        engine = self._engine
        column, ring = engine.space.arrays()[self._place], engine.ring
        if not ring:
            return column[start:stop]
        parts = [column[slot : slot + n] for slot, _, n in pieces(start, stop, ring)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _OnceColumn(ColumnReader):
    """Column whose frames are stored once."""

    __slots__ = ("_engine", "_place")

    def __init__(self, engine: Engine, place: int) -> None:
        self._engine, self._place = engine, place

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        engine, place = self._engine, self._place
        assert engine.pools is not None
        if out is None:
            (flat,) = engine.pools.empty_for(rows.size, [place])
            out = flat.reshape(*rows.shape, *flat.shape[1:])
        slots = rows % engine.ring if engine.ring else rows
        positions = engine.space.arrays()[place].take(slots, axis=0, mode="clip")
        # The writer of a ring may overwrite the rows meanwhile. Their values are then undefined.
        engine.pools.of_place[place].read(positions, out, defined=not engine.ring)
        return out

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.take(np.arange(start, stop))

    @property
    def stack(self) -> int:
        return self._pool.layout.stack

    def take_windows(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        engine, pool = self._engine, self._pool
        slots = rows % engine.ring if engine.ring else rows
        columns, after = engine.space.arrays(), engine.keys.index(pool.once.next_key)
        begins, ends = (columns[at].take(slots, axis=0, mode="clip") for at in (self._place, after))
        positions = np.concatenate([begins, ends[:, -1:]], axis=1)
        pool.read(positions, out, defined=not engine.ring)
        shifts: np.ndarray = (begins[:, 1:] == ends[:, :-1]).all(axis=1)
        return shifts

    @property
    def _pool(self) -> PoolFile:
        assert self._engine.pools is not None
        return self._engine.pools.of_place[self._place]


class FileReader(RowReader):
    """Reader of rows in Tallyroll's own files, to which this or another process may write.

    Args:
        format: the files.
        path: the path of the storage, for messages.
        mode: the mode of the storage, ``"read"``, ``"append"`` or ``"create"``.
    """

    engine: Engine | None = None
    """The engine that copies rows in and out; None before the files exist and after `close`."""

    def __init__(self, format: Format, path: Path, mode: Mode) -> None:
        self.format, self.path, self.mode = format, path, mode
        self.copied_as = type(format)
        self._manifest: Manifest | None = None
        self._events = EventFile(format, writable=mode != "read")
        self._origin = Origin(self)
        self._last_head = 0
        self.trajectory_index = TrajectoryIndex()  # not lazily, since threads of a writer share it

    # --- opening and closing ----------------------------------------------------------------------

    @translates_errors
    def open(self, /, *, writable: bool = False, **options: Any) -> FileReader:
        """Open the files; ``options`` are passed to `open_existing`."""
        self.engine, manifest = open_existing(self.format, writable=writable, **options)
        self._manifest = self._events.merged(manifest)
        self.ring = self.engine.ring
        return self

    def plan_ring(self, max_size: int) -> None:
        """Set the size of the ring for files that do not exist yet; 0 keeps every row."""
        self.ring = max_size

    def use(self, engine: Engine, manifest: Manifest) -> None:
        """Start reading the files that were just created."""
        self.engine, self._manifest = engine, manifest

    def detach_engine(self) -> Engine | None:
        """Mark the reader as closed and return the engine, which the caller must close."""
        engine, self.engine, self.closed = self.engine, None, True
        if engine is not None and engine.right.may_write:
            self._last_head = engine.counts.head
        return engine

    def lose(self, head: int) -> None:
        """Mark the reader as closed with ``head`` rows, after its engine has been closed."""
        self.engine, self.closed, self._last_head = None, True, head

    def close(self) -> None:
        """Close the files."""
        if (engine := self.detach_engine()) is not None:
            engine.close()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def running(self) -> Engine:
        """Return the engine that copies the rows.

        Raises:
            StorageClosed: this reader was closed.
            NotInitialised: the storage has no rows and no schema yet.
        """
        engine = self.engine
        if engine is None:
            self.require_open()
            raise NotInitialised(
                f"{self.path} has no rows and no schema yet. Call initialise(schema), or write "
                "rows first."
            )
        return engine

    # --- state ------------------------------------------------------------------------------------

    @property
    def initialised(self) -> bool:
        return self.engine is not None

    @property
    def schema(self) -> Schema:
        return self.running().schema

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.running().keys

    @property
    def once(self) -> tuple[OnceColumn, ...]:
        """The columns whose frames are stored once."""
        return self.running().once

    def pool_usage(self) -> list[PoolUsage]:
        engine, span = self.running(), self.span
        if engine.pools is None:
            return []
        return engine.pools.usage(engine.space.arrays(), span, self.ring)

    def stored_size(self) -> StoredSize:
        engine, span = self.running(), self.span
        row_nbytes, measured, rows = engine.schema.row_nbytes, True, len(span)
        if engine.pools is not None and rows:
            frames = engine.pools.used_nbytes(engine.space.arrays(), span, self.ring)
            row_nbytes = stored_schema(engine.schema, engine.once).row_nbytes + -(-frames // rows)
        elif engine.once:
            row_nbytes, measured = row_nbytes_once(engine.schema, engine.once), False
        keys = tuple(each.key for each in engine.once)
        return StoredSize(keys, row_nbytes, measured, self.ring * row_nbytes or None)

    @property
    def span(self) -> range:
        if self.engine is None:
            self.require_open()
            return range(0)
        return self.engine.counts.span

    @property
    def head(self) -> int:
        if self.engine is None:
            self.require_open()
            return 0
        return self.engine.counts.head

    @property
    def floor(self) -> int:
        return 0 if self.engine is None else self.engine.counts.floor

    @property
    def last_head(self) -> int:
        engine = self.engine
        return self._last_head if engine is None else engine.counts.head

    @property
    def revision(self) -> int:
        # A writer counts its commits. Other processes know only the numbers of rows and rewinds.
        engine = self.engine
        if engine is None:
            return 0
        counts = engine.counts
        return (
            engine.known.commits if engine.right.may_write else counts.head + (counts.rewinds << 48)
        )

    @property
    def rewinding(self) -> bool:
        return self.engine is not None and self.engine.counts.undone is not None

    @property
    def rewinds(self) -> int:
        return 0 if self.engine is None else self.engine.counts.rewinds

    @property
    @translates_errors
    def manifest(self) -> Manifest:
        self.running()
        if self._manifest is None or self.mode == "read":
            self._manifest = self._events.merged(manifest_of(self.format))
        return self._manifest

    @translates_errors
    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, and the events of its runs if they changed."""
        manifest, after = self._events.keep(manifest)
        self.format.write_manifest(on_disk(manifest))
        self._manifest = manifest
        after()

    @translates_errors
    def add_event(self, at: int, event: Event) -> None:
        """Add an event to the run with the index ``at``, or `LEFT_OUT` if there is no room."""
        manifest = self.manifest
        runs: list[dict[str, Any]] = manifest["runs"]
        run = runs[at]
        if self._events.full:
            self.write_manifest(_with_run(manifest, at, {**run, LEFT_OUT: True}))
        elif self._events.add(manifest["id"], run, event):
            self._manifest = _with_run(manifest, at, dict(run))
        else:
            events = [*run.get(EVENTS, ()), event]
            self.write_manifest(_with_run(manifest, at, {**run, EVENTS: events}))

    @property
    def id(self) -> str | None:
        return self._manifest["id"] if self._manifest is not None else None

    @property
    def origin(self) -> Origin:
        origin = self._origin
        if self.mode != "read":
            origin.show(self._manifest, _MOST_ROWS)
        elif origin.manifest is None:
            origin.look()
        return origin

    @property
    def record(self) -> tuple[int, bytes] | None:
        self.require_open()
        return None if self.engine is None else self.engine.counts.record

    @property
    def record_damaged(self) -> bool:
        return self.running().counts.record_damaged

    @property
    def left_open(self) -> bool:
        return self.running().counts.left_open

    @property
    def is_written(self) -> bool:
        files = self.format
        return self.running().right.may_write or is_held(files.inside, files.lock_path)

    def episode_lines(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        files = self.format
        return read_table(files.inside, files.episodes_path, dtype, self.running().counts.head)

    def kept_index(self, *, whole: bool = False) -> SavedBlocks | None:
        owner = IndexOwner(self.id, self.ring, self.rewinds)
        files, counts = self.format, self.running().counts
        return read_index(files.inside, files.index_path, owner, lambda: counts.head, whole=whole)

    def event_faults(self) -> Iterator[str]:
        _ = self.manifest
        return self._events.faults()

    @property
    def events_torn(self) -> bool:
        return self._events.torn

    def shown_wrongly(self) -> Iterator[str]:
        return self.format.shown_wrongly(lambda: self.head)

    def made_wrongly(self) -> Iterator[str]:
        yield from self.format.made_wrongly(lambda: self.head)
        try:
            self.require_numbered_rewinds()
        except CorruptStorage as error:
            yield str(error)

    def require_numbered_rewinds(self) -> None:
        """Raise `CorruptStorage` if the header counts rewinds that the manifest lacks."""
        # Check twice, because a writer may finish a rewind in between.
        fault = self._rewind_fault() and self._rewind_fault()
        if fault is not None:
            raise CorruptStorage(f"{self.path} is damaged: {fault}. Restore it from a copy.")

    def _rewind_fault(self) -> str | None:
        counts = self.running().counts
        done, undone = counts.rewinds, counts.undone  # read before the manifest, which grows first
        return rewind_fault(self.manifest, done, undone)

    # --- rows -------------------------------------------------------------------------------------

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        return rows % self.ring if self.ring else rows

    def shown(self, key: Key) -> np.ndarray:
        engine, place = self._place_of(key)
        (array,) = engine.copies.private(slice(None), (place,))
        return cast(np.ndarray, array)

    def column(self, key: Key) -> ColumnReader:
        engine, place = self._place_of(key)
        once = engine.pools is not None and place in engine.pools.of_place
        return _OnceColumn(engine, place) if once else _FileColumn(engine, place)

    def _place_of(self, key: Key) -> tuple[Engine, int]:
        engine = self.running()
        if key not in engine.keys:
            names = ", ".join(map(format_key, engine.keys))
            note = excluded_note(self.runs, [key])
            raise KeyError(f"{self.path} has no column {key!r}; it has {names}.{note}")
        return engine, engine.keys.index(key)

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        engine, slots = self.running(), self.slots_of(rows)
        if engine.pools is not None:
            return super().copies(rows, keys)
        columns = engine.space.arrays()
        if keys is not None:
            columns = [columns[engine.keys.index(key)] for key in keys]
        return [column.take(slots, axis=0) for column in columns]

    def mapped(self, keys: Sequence[Key]) -> list[np.ndarray] | None:
        engine = self.running()
        if engine.pools is not None:
            return None
        columns, own = engine.space.arrays(), engine.keys
        return [columns[own.index(key)] for key in keys]

    def gather(self, rows: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        # The arrays come from the pool, and return to it when nothing refers to them.
        if isinstance(rows, np.ndarray):
            return self.running().copies.gather(self.slots_of(rows))
        return self.running().copies.gather(self._all_slots_of(rows))

    def copy_into(
        self, outs: Sequence[np.ndarray], rows: Sequence[np.ndarray], keys: Sequence[Key]
    ) -> None:
        engine = self.running()
        places = tuple(engine.keys.index(key) for key in keys)
        if places:
            engine.copies.gather(self._all_slots_of(rows), places, room=ColumnMemory(list(outs)))

    def _all_slots_of(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        slots: dict[int, np.ndarray] = {}  # many of the arrays are the same object
        for each in rows:
            if id(each) not in slots:
                slots[id(each)] = self.slots_of(each)
        return [slots[id(each)] for each in rows]

    def get(self, index: Any, keys: Keys | None = None) -> TensorDict:
        return read_consistently(self, lambda: self._get(index, keys))

    def get_into(self, index: Any, out: ReusedRows) -> TensorDict:
        engine = self.running()
        rewinds = engine.counts.rewinds
        if (
            out.schema is engine.schema
            and engine.copies.take_into(index, out.room, out.places)
            and engine.counts.rewinds == rewinds
        ):
            return out.rows
        if out.schema is engine.schema and read_consistently(self, lambda: self._copy(index, out)):
            return out.rows
        return super().get_into(index, out)

    def _copy(self, index: Any, out: ReusedRows) -> bool:
        """Copy the rows ``index`` to ``out``. Return False if it has another shape."""
        engine = self.running()
        with engine.copies.append_lock():
            seen = engine.counts.read()
            where = self._resolved(index, seen)
            if isinstance(where, slice):
                where = np.arange(where.start, where.stop, where.step)
            if isinstance(where, int) or where.shape != (len(out),):
                return False
            engine.copies.take(where, seen, out.places, out.room)
        return True

    def _resolved(self, index: Any, seen: HeaderCounts) -> int | slice | np.ndarray:
        """Resolve an index of the valid rows."""
        rows = len(seen.span(self.ring))
        try:
            return resolve(index, rows)
        except IndexOutOfRange:
            # Another process is overwriting the row. It is valid again after the commit, for which
            # `take` waits.
            if (most := self.running().copies.most_rows(seen)) == rows:
                raise
            return resolve(index, most)

    def _get(self, index: Any, keys: Keys | None) -> TensorDict:
        engine = self.running()
        only, nest = columns_of(self, keys)
        copies = engine.copies
        with copies.append_lock():
            seen = engine.counts.read()
            where = self._resolved(index, seen)
            if isinstance(where, slice):
                return self._slice(where, seen, only, nest)
            if isinstance(where, int):
                return nest(copies.take(np.array([where]), seen, only), (1,))[0]
            return nest(copies.take(where, seen, only), where.shape)

    def _slice(
        self, where: slice, seen: HeaderCounts, only: Places | None, nest: TensorDictBuilder
    ) -> TensorDict:
        copies, ring = self.running().copies, self.ring
        numbers: Numbers
        if (first := copies.first_shown(seen)) is not None:
            slots = slice(first + where.start, first + where.stop, where.step)
            arrays = copies.private(slots, only, seen.head, defers=True)
            span = seen.span(ring)
            if span.start > seen.floor:  # the ring has wrapped
                numbers = partial(in_all_slots, slots, span.start, ring)
            else:
                numbers = range(span.start + where.start, span.start + where.stop, where.step)
        else:
            index = np.arange(where.start, where.stop, where.step)
            arrays, rows = copies.take_numbered(index, seen, only)
            numbers = partial(np.asarray, rows)
        found = nest.of_mixed(arrays, (len(arrays[0]),))
        came_from(found, self.origin, numbers)
        return found


def _with_run(manifest: Manifest, at: int, run: dict[str, Any]) -> Manifest:
    runs = manifest["runs"]
    return {**manifest, "runs": [*runs[:at], run, *runs[at + 1 :]]}
