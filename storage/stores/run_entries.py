"""The entries in a manifest that say which runs wrote which rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tallyroll.storage.files.manifest import run_of
from tallyroll.storage.files.paths import told
from tallyroll.storage.files.run_events import EVENTS, IN_FILE, LEFT_OUT, kept
from tallyroll.storage.rows.origin import Told
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.copied_rows import CopiedRows
from tallyroll.storage.stores.opened_files import OpenedFiles


class RunEntries:
    """Writes the entries of runs, and of rows that came from other storages."""

    def __init__(self, opened: OpenedFiles) -> None:
        self.path, self.reader, self._opened = opened.path, opened.reader, opened
        self.require_schema = opened.require_schema
        self.provenance: Mapping[str, Any] = {}
        """Entries that are added to every run's entry: the command that writes it."""
        self.copied = CopiedRows(self)

    @told
    def begin(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """Implement `DiskStorage.initialise`."""
        reader = self.reader
        with self._opened.turn:
            reader.require_open()
            run = run_of(reader.head, {**(provenance or {}), **self.provenance})
            if reader.engine is None:
                self.create(schema, [run])
                return
            self.require_schema(schema)
            self.write([*self.copied.settled(), run])

    def withdraw(self, run: Mapping[str, Any]) -> None:
        """Remove an entry without rows."""
        with self._opened.turn:
            runs = self.reader.runs
            if run in runs:
                at = runs.index(dict(run))
                self.write([*runs[:at], *runs[at + 1 :]])

    def add_event(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
        """Add an event to the entry ``run``, and return the entry as it is then.

        It is left out, and the entry says so, once as many are kept as there is room for.
        """
        with self._opened.turn:
            runs = self.reader.runs
            at = max(at for at, each in enumerate(runs) if each is run or each == run)
            if not runs[at].get(LEFT_OUT):
                self.reader.add_event(at, kept(event, runs[at]))
                self.copied.forget()
            return self.reader.runs[at]

    def note(self, run: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """Add the fields ``found`` to the entry ``run``, and return the entry as it is then."""
        with self._opened.turn:
            runs = self.reader.runs
            at = max(at for at, each in enumerate(runs) if each is run or each == run)
            self.write([*runs[:at], {**runs[at], **found}, *runs[at + 1 :]])
            return self.reader.runs[at]

    def create(self, schema: Schema, runs: list[Any], id: str | None = None) -> None:
        """Make the files of a storage with these entries, as `OpenedFiles.create` does."""
        bare = [{k: v for k, v in run.items() if k not in (EVENTS, IN_FILE)} for run in runs]
        self._opened.create(schema, bare, id)
        if bare != runs:
            self.write(runs)
        self.copied.forget()

    def write(self, runs: list[Any]) -> None:
        """Replace all entries."""
        self.reader.write_manifest({**self.reader.manifest, "runs": runs})
        self.copied.forget()

    def settle(self) -> None:
        """Write the entries for good, before the files are closed."""
        if (runs := self.copied.settled()) is not self.reader.runs:
            self.write(runs)

    @contextmanager
    def noted(self, came_from: Told, own: bool) -> Iterator[None]:
        """Record where the rows come from that the context writes; undo it if they are refused.

        ``own`` as `CopiedRows.note`.
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
                copied.copy = known
            raise
