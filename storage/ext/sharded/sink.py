"""Writer side of a sharded storage: it acknowledges rows that workers write elsewhere."""
# ruff: noqa: D102 - `RowReader` and `RunWriter` document the methods

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tallyroll.storage.engine.columns import StepwiseRows
from tallyroll.storage.engine.once_columns import OnceColumn, once_from_json, once_to_json
from tallyroll.storage.errors import (
    CorruptStorage,
    DirectoryNotEmpty,
    NotInitialised,
    ReadOnlyStorage,
    SchemaMismatch,
    StorageExists,
)
from tallyroll.storage.ext.sharded.acknowledged_rows import (
    AcknowledgedFile,
    AcknowledgedRows,
    ShardRows,
)
from tallyroll.storage.ext.sharded.files import (
    ShardedFiles,
    entries_in,
    entry_before,
)
from tallyroll.storage.files.lock import WriterLock
from tallyroll.storage.files.manifest import SHARDED, Manifest, new_manifest, run_of, write_manifest
from tallyroll.storage.files.paths import make_directory, translated
from tallyroll.storage.files.run_record import RunRecord, record_after, record_with_version
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.readers.row_reader import ColumnReader, RowReader
from tallyroll.storage.rows.frame_stacks import FrameStack
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.stores.opened_files import PlanOnce
from tallyroll.storage.stores.row_writer import ReadOnlyWriter
from tallyroll.storage.stores.run_claim import RunClaim


class _NoRows(ColumnReader):
    """Placeholder for a column whose rows are in shards."""

    def __init__(self, column: Column) -> None:
        self._column = column

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        assert not rows.size
        return np.empty((*rows.shape, *self._column.shape), self._column.numpy_dtype)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.take(np.arange(start, stop))


class CountedRows(RowReader):
    """Reader of the counts of a sharded storage that is being written; it returns no rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acknowledged = AcknowledgedRows()
        self.made: Manifest | None = None
        self._schema: Schema | None = None
        self.once: tuple[OnceColumn, ...] = ()
        """The columns that the shards store once."""

    def use(self, manifest: Manifest, said: AcknowledgedRows) -> None:
        """Adopt the manifest and the acknowledged rows that were read from the files."""
        self.made, self.acknowledged = manifest, said
        self._schema = Schema.from_json(manifest.get("schema"))
        self.once = once_from_json(manifest.get("once", []), self._schema)

    @property
    def schema(self) -> Schema:
        if self._schema is None:
            raise NotInitialised(f"{self.path} has no rows and no schema yet. Collect some first.")
        return self._schema

    @property
    def span(self) -> range:
        return range(self.acknowledged.rows, self.acknowledged.rows)

    @property
    def manifest(self) -> Manifest:
        if self.made is None:
            raise NotInitialised(f"{self.path} has no rows and no schema yet. Collect some first.")
        return {**self.made, "runs": list(entries_in(self.made, self.acknowledged))}

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [] if self.made is None else list(self.manifest["runs"])

    @property
    def initialised(self) -> bool:
        return self.made is not None

    @property
    def record(self) -> tuple[int, bytes] | None:
        return self.acknowledged.record

    def column(self, key: Key) -> ColumnReader:
        return _NoRows(next(each for each in self.schema.columns if each.key == key))


class ShardedWriter(ReadOnlyWriter):
    """Writer that acknowledges rows of shards and stores the run's entries; one run per storage.

    Args:
        path: the path of the folder.
        mode: ``"create"`` or ``"append"``.
        plan_once: function that chooses the columns that new shards store once; None: none.

    Raises:
        StorageExists, DirectoryNotEmpty: with ``"create"``, the folder is in use.
        StorageLocked: another process writes to the storage.
    """

    grows, in_one_call = True, False

    reader: CountedRows

    def __init__(self, path: Path, mode: Mode, plan_once: PlanOnce | None = None) -> None:
        self.path, self.reader = path, CountedRows(path)
        self._plan_once = plan_once
        super().__init__(self.reader)
        self.files, self.claim, self.runs = ShardedFiles(path), RunClaim(self), self
        self.provenance: Mapping[str, Any] = {}
        """Fields that are added to a run's entry: the command that writes the run."""
        self._newest = -1
        """The newest policy version in rows that are, or were, acknowledged."""
        self._named = 0
        self._lock: WriterLock | None = None
        self._lines: AcknowledgedFile | None = None
        if mode == "create":
            self._refuse_existing()
            return
        self.files.manifest()
        with translated(path):
            self._lock = WriterLock(self.files.inside, self.files.lock_path)
        try:
            self._open(self.files.manifest())
        except BaseException:
            self.close()
            raise

    def _refuse_existing(self) -> None:
        files = self.files
        if files.manifest_path.exists():
            raise StorageExists(
                f"{self.path} holds a storage already. Give its path and resume=True to the "
                "collector to continue its run, or give another path."
            )
        ours = {files.lines_path, files.lock_path, files.shards_path}
        if files.root.exists() and (others := {*files.root.iterdir()} - ours):
            raise DirectoryNotEmpty(
                f"{self.path} is not empty: {min(others).name} is in it. Give another path."
            )

    def _open(self, manifest: Manifest) -> None:
        self._lines = AcknowledgedFile(self.files.inside, self.files.lines_path)
        self.reader.use(manifest, self._lines.acknowledged)
        record = RunRecord.parse(self.reader.record)
        self._newest = -1 if record is None else record.policy_version
        self._named = len(self._lines.acknowledged.shards)

    # --- shards -----------------------------------------------------------------------------------

    @property
    def stores_once(self) -> bool:
        """True if the shards store some columns once; before the first row, if ``once`` is True."""
        return bool(self.reader.once) if self.reader.initialised else self._plan_once is not None

    @property
    def stacks(self) -> tuple[FrameStack, ...]:
        """The columns that the shards store once and whose values are stacks of frames."""
        once = self.reader.once
        return tuple(
            FrameStack(each.key, each.layout.stack) for each in once if each.layout.stack > 1
        )

    def lose_missing(self, seen: Iterable[tuple[str, str, int]]) -> list[str]:
        """Revoke the rows of shards that are missing or damaged, and return the reasons.

        Any other error that prevents opening a shard is raised. Otherwise a limit of open files,
        for example, would lose rows.

        Args:
            seen: the shards that other nodes have found on their disks: name, id and rows of each.
        """
        lost, most = [], dict[tuple[str, str], int]()
        for name, id, rows in seen:
            most[name, id] = max(rows, most.get((name, id), 0))
        for number, shard in enumerate(self.reader.acknowledged.shards):
            if shard.rows and most.get((shard.name, shard.id), 0) < shard.rows:
                try:
                    self.files.open_shard(shard, accept_copy=True).close()
                except CorruptStorage as error:
                    lost.append((number, str(error)))
        if lost:
            assert self._lines is not None
            self._lines.lose([number for number, _ in lost])
        return [why for _, why in lost]

    def new_shard(self) -> str:
        """Return a new shard name that is unique across nodes."""
        self._named += 1
        return f"{self._named:06d}-{secrets.token_hex(4)}"

    def acknowledge(self, kept: Iterable[ShardRows], record: bytes, newest: int) -> None:
        """Record how many rows of each shard are acknowledged.

        Args:
            kept: the shards, each with its number of acknowledged rows.
            record: the record of the run.
            newest: the newest policy version in these rows.

        Raises:
            StorageFull, DiskFailed: the acknowledgement could not be written.
        """
        assert self._lines is not None
        numbers = self.reader.acknowledged.numbers
        fresh, rows = [], {}
        for each in kept:
            if each.name in numbers:
                rows[str(numbers[each.name])] = each.numbers
            else:
                fresh.append([each.name, each.host, each.id, *each.numbers])
        self._newest = max(self._newest, newest)
        payload = record_with_version(record, self._newest).decode()
        self._lines.append({"shards": fresh, "rows": rows, "record": payload})

    def _with_newest(self, payload: bytes) -> bytes:
        return record_after(payload, next_id=-1, incarnation=-1, policy_version=self._newest)

    # --- the collector's run ----------------------------------------------------------------------

    def append(self, rows: StepwiseRows, record: bytes | None = None) -> range:
        self._refuse("workers write the rows, each to its own shard")

    def put_record(self, payload: bytes) -> None:
        assert self._lines is not None
        self._lines.append({"record": self._with_newest(payload).decode()})

    def require_schema(self, schema: Schema) -> None:
        if found := self.reader.schema.differences(schema):
            raise SchemaMismatch(
                f"{self.path} has other columns: {'; '.join(found)}. Give another path."
            )

    def begin(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        run = run_of(self.reader.head, {**(provenance or {}), **self.provenance})
        if self.reader.initialised:
            self.require_schema(schema)
            assert self.reader.made is not None
            if run.get("first_row_of_run"):
                raise StorageExists(
                    f"{self.path} already has a run, and a sharded storage can have only one. "
                    "Pass resume=True (--resume) to continue it, or give another path."
                )
            runs = [
                *self.reader.made["runs"],
                entry_before(run, len(self.reader.acknowledged.shards)),
            ]
            self._write({**self.reader.made, "runs": runs})
            return
        once = () if self._plan_once is None else self._plan_once(schema)
        with translated(self.path):
            make_directory(self.files.root)
            self._lock = WriterLock(self.files.inside, self.files.lock_path)
            self._refuse_existing()
            self.files.inside.remove(self.files.lines_path)
        runs = [entry_before(run, 0)]
        manifest = new_manifest(SHARDED, schema, runs, once=once_to_json(once))
        self._write(manifest)
        self._open(manifest)

    def _write(self, manifest: Manifest) -> None:
        write_manifest(self.files.inside, self.files.manifest_path, manifest)
        if self.reader.initialised:
            self.reader.made = manifest

    def withdraw(self, run: Mapping[str, Any]) -> None:
        made = self.reader.made
        if made is not None and run in (shown := self.reader.runs):
            at = shown.index(dict(run))
            runs = made["runs"]
            self._write({**made, "runs": [*runs[:at], *runs[at + 1 :]]})

    def add_event(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> Mapping[str, Any]:
        self._refuse("it does not record calls to environments")

    def _refuse(self, why: str) -> NoReturn:
        raise ReadOnlyStorage(f"{self.path} is a sharded storage: {why}.")

    def flush(self) -> None:
        """Do nothing: there are no rows to flush."""

    def close(self) -> None:
        """Close the files and release the writer lock."""
        self.reader.close()
        if self._lines is not None:
            self._lines.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
