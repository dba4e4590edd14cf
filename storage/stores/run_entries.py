"""The manifest entries that record which runs wrote which rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from tallyroll.storage.errors import InvalidProvenance
from tallyroll.storage.files.copied_runs import (
    LEFT_OUT as LEFT_OUT_OF_COPIES,
)
from tallyroll.storage.files.copied_runs import (
    Entry,
    copied_span,
    copy_entry,
    has_room,
    is_collected,
    is_copied,
    makers,
    room_for_copies,
    source_of,
    without_copy,
)
from tallyroll.storage.files.manifest import run_of
from tallyroll.storage.files.paths import translates_errors
from tallyroll.storage.files.run_events import EVENTS, IN_FILE, LEFT_OUT, stored_form
from tallyroll.storage.rows.origin import Origin, RowOrigin
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.opened_files import OpenedFiles

_LITTLE_ROOM = 2**14
"""Bytes of the copies in a manifest that has no room for all runs."""


class _Copy(NamedTuple):
    """The copy that the last entry describes."""

    manifest: dict[str, Any]
    """The manifest of the source storage."""
    span: range
    """The smallest range of source rows that contains all copied rows."""
    made: range
    """The range of source rows that only the runs in the entry made."""
    in_pieces: bool = False
    """True if the entry does not record the last row."""
    known: bool = True
    """True if `span` includes the last row."""

    def has(self, origin: Origin, rows: range) -> bool:
        """Return True if the entry remains correct once ``rows`` of ``origin`` are added."""
        return (
            origin.manifest is self.manifest
            and rows.start >= self.span.start
            and rows.stop <= (self.made.stop if self.in_pieces else self.span.stop)
        )


class CopiedRows:
    """Decides whether the last manifest entry of a writer also covers the next rows."""

    def __init__(self, entries: RunEntries) -> None:
        self._room = entries.reader.format.copies_nbytes
        # A proxy avoids a cycle, so that a dropped writer releases its files at once.
        self._entries: RunEntries = weakref.proxy(entries)
        self.forget()

    def forget(self) -> None:
        """Reset the cached state, because the entries have changed."""
        self.copy: _Copy | None = None
        self._last: Entry | None = None
        self._copied = self._collected = False

    def revert(self, copy: _Copy | None) -> None:
        """Continue with an earlier ``copy``, because the write after it failed."""
        self.copy = copy

    def needs_new_entry(self, own: bool) -> bool:
        """Return True if rows of unknown origin need a new entry. See `note` for ``own``."""
        if self._last is None:
            self._look()
        return self._copied or (self._collected and not own)

    def _look(self) -> Entry:
        """Return the last entry, or an empty one if there is none."""
        if self._last is None:
            reader = self._entries.reader
            if reader.engine is None or not (runs := reader.runs):
                return {}
            self._last = runs[-1]
            self._copied, self._collected = is_copied(self._last), is_collected(self._last)
        return self._last

    def settled(self) -> list[Any]:
        """Return the manifest entries, completed with the last row of a copy in pieces."""
        runs, copy = self._entries.reader.runs, self.copy
        if copy is None or not (copy.in_pieces and copy.known):
            return runs
        return [*runs[:-1], self._entry_of(runs[-1], copy._replace(in_pieces=False), runs[:-1])]

    def goes_on(self, came_from: RowOrigin) -> bool:
        """Return True if the last entry also covers these rows."""
        return came_from is not None and self.copy is not None and self.copy.has(*came_from)

    def count(self, came_from: RowOrigin) -> None:
        """Record that the rows just written continue the copy of the last entry."""
        if came_from is not None and self.copy is not None:
            self.copy = self.copy._replace(span=_both(self.copy.span, came_from[1]))

    def note(self, came_from: RowOrigin, *, own: bool) -> bool:
        """Record the origin of the rows that are written next; return True if the entries changed.

        Args:
            came_from: the origin of the rows, or None if it is unknown.
            own: True if the rows belong to the last entry's run, where that is a collector's run.

        Raises:
            InvalidProvenance: the manifest has no room to record that the rows are not a
                collector's.
        """
        last = self._look()
        if not last or (own and is_collected(last)) or LEFT_OUT_OF_COPIES in last:
            return False
        if came_from is not None:
            for room in (self._room, min(self._room, _LITTLE_ROOM), 0):
                self._room = room
                with suppress(InvalidProvenance):  # retry with less detail
                    return self._note_copy(last, *came_from)
        if self.needs_new_entry(own):
            self._begin({"first_row": self._entries.reader.head})
            return True
        return False

    def first_entry(self, came_from: RowOrigin) -> Entry:
        """Return the first entry of a new storage that begins with rows of this origin."""
        return {} if came_from is None else self._entry_of({}, _copy_of(*came_from), [])

    def _note_copy(self, last: Entry, origin: Origin, rows: range) -> bool:
        before = self.copy
        copy, head = _copy_of(origin, rows), self._entries.reader.head
        if (
            last["first_row"] < head
            and (span := copied_span(last, copy.manifest["id"])) is not None
        ):
            known = span.stop > span.start
            if before is not None:
                span, known = before.span, before.known
            copy = _copy_of(origin, _both(span, rows), in_pieces=True, known=known)
            self._replace(last, copy)
        else:
            self._begin(self._entry_of({"first_row": head}, copy, self._entries.reader.runs), copy)
        return True

    def _replace(self, last: Entry, copy: _Copy) -> None:
        runs = self._entries.reader.runs[:-1]
        if (entry := self._entry_of(last, copy, runs)) != last:
            self._entries.write([*runs, entry])
        self.copy = copy

    def _begin(self, entry: Entry, copy: _Copy | None = None) -> None:
        """Start ``entry`` for the rows that are written from now on."""
        runs = self.settled()
        last = runs[-1]
        if last["first_row"] == entry["first_row"] and not is_collected(last):
            runs, entry = runs[:-1], {**without_copy(last), **entry}  # the last entry has no rows
        elif copy is not None and not has_room(runs):
            entry, copy = {"first_row": entry["first_row"], LEFT_OUT_OF_COPIES: True}, None
        self._entries.write([*runs, entry])
        self.copy = copy

    def _entry_of(self, entry: Entry, copy: _Copy, others: list[Any]) -> Entry:
        """Return ``entry`` extended by the copy, for a manifest that also has ``others``."""
        span, manifest = copy.span, copy.manifest
        runs, _ = makers(manifest["runs"], span)
        rows = [span.start, None if copy.in_pieces else span.stop - 1]
        source = source_of(manifest, rows)
        return copy_entry(entry, source, runs, room_for_copies(others, self._room))


def _both(one: range, other: range) -> range:
    return range(min(one.start, other.start), max(one.stop, other.stop))


def _copy_of(origin: Origin, span: range, **more: bool) -> _Copy:
    assert origin.manifest is not None
    _, made = makers(origin.manifest["runs"], span)
    return _Copy(origin.manifest, span, range(made.start, min(made.stop, origin.until)), **more)


class RunEntries:
    """Writer of the manifest entries of runs and of rows from other storages."""

    def __init__(self, opened: OpenedFiles) -> None:
        self.path, self.reader, self._opened = opened.path, opened.reader, opened
        self.require_schema = opened.require_schema
        self.provenance: Mapping[str, Any] = {}
        """Fields that are added to the entry of every run, such as the command line that started
        it."""
        self.copied = CopiedRows(self)

    @translates_errors
    def begin(
        self,
        schema: Schema,
        provenance: Mapping[str, Any] | None = None,
        *,
        declared: bool = False,
    ) -> None:
        """Implement `DiskStorage.initialise`; ``declared`` is True if a collector calls.

        The collector has taken the schema from declared spaces, and not from a first batch.
        """
        reader = self.reader
        with self._opened.turn:
            reader.require_open()
            run = run_of(reader.head, {**(provenance or {}), **self.provenance})
            if reader.engine is None:
                self.create(schema, [run], declared=declared)
                return
            self.require_schema(schema)
            self.write([*self.copied.settled(), run])

    def withdraw(self, run: Mapping[str, Any]) -> None:
        """Remove an entry that has no rows."""
        with self._opened.turn:
            runs = self.reader.runs
            if run in runs:
                at = runs.index(dict(run))
                self.write([*runs[:at], *runs[at + 1 :]])

    def add_event(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
        """Add an event to the entry ``run``; return the updated entry.

        If the entry has no room for more events, the event is left out and the entry records that.
        """
        with self._opened.turn:
            runs = self.reader.runs
            at = max(at for at, each in enumerate(runs) if each is run or each == run)
            if not runs[at].get(LEFT_OUT):
                self.reader.add_event(at, stored_form(event, runs[at]))
                self.copied.forget()
            return self.reader.runs[at]

    def note(self, run: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """Add the fields ``found`` to the entry ``run``; return the updated entry."""
        with self._opened.turn:
            runs = self.reader.runs
            at = max(at for at, each in enumerate(runs) if each is run or each == run)
            self.write([*runs[:at], {**runs[at], **found}, *runs[at + 1 :]])
            return self.reader.runs[at]

    def create(
        self, schema: Schema, runs: list[Any], id: str | None = None, *, declared: bool = False
    ) -> None:
        """Create the files of a storage with these entries; see `OpenedFiles.create`."""
        bare = [{k: v for k, v in run.items() if k not in (EVENTS, IN_FILE)} for run in runs]
        self._opened.create(schema, bare, id, declared=declared)
        if bare != runs:
            self.write(runs)
        self.copied.forget()

    def write(self, runs: list[Any]) -> None:
        """Replace all entries."""
        self.reader.write_manifest({**self.reader.manifest, "runs": runs})
        self.copied.forget()

    def settle(self) -> None:
        """Write the completed entries before the files are closed."""
        if (runs := self.copied.settled()) is not self.reader.runs:
            self.write(runs)

    @contextmanager
    def noted(self, came_from: RowOrigin, own: bool) -> Iterator[None]:
        """Record the origin of the rows that the context writes; revert it if the write fails.

        See `CopiedRows.note` for ``own``.
        """
        engine, copied, known = self.reader.engine, self.copied, self.copied.copy
        if engine is not None:
            engine.right.require()
            runs = self.reader.runs
        changed = copied.note(came_from, own=own)
        try:
            yield
        except BaseException:
            if changed:
                self.write(runs)
            if engine is not None:
                copied.revert(known)
            raise
