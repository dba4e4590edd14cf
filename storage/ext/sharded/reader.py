"""The rows of a sharded storage that count, read as one."""
# ruff: noqa: D102 - what a reader does is said once, in `RowReader`

from __future__ import annotations

from pathlib import Path
from typing import Any

from tallyroll.storage.errors import NotInitialised
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.ext.sharded.files import ShardedFiles, entries_in
from tallyroll.storage.files.manifest import Manifest


class ShardedReader(UnionReader):
    """The rows that counted when it was opened: those of one shard after the other.

    Their trajectories have different ids, for workers number them so.

    Args:
        files: the folder.
        path: for messages.
        accept_copy: open shards that were copied while a writer had them open.
    """

    def __init__(self, files: ShardedFiles, path: Path, *, accept_copy: bool = False) -> None:
        manifest, said = files.manifest(), files.acknowledged()
        kept = [each for each in said.shards if each.rows]
        if not kept:
            raise NotInitialised(f"{path} has no rows yet. Collect some first.")
        self._own_manifest = manifest
        self._own_runs = list(entries_in(manifest, said))
        self._record = said.record
        members = files.open_all(said, accept_copy=accept_copy)
        try:
            super().__init__(members, path, spans=[range(each.rows) for each in kept])
        except BaseException:
            for member in members:
                member.close()
            raise

    @property
    def manifest(self) -> Manifest:
        self.require_open()
        return {
            **super().manifest,
            "format": self._own_manifest["format"],
            "created": self._own_manifest["created"],
            "runs": self._own_runs,
        }

    @property
    def runs(self) -> list[dict[str, Any]]:
        return self._own_runs

    @property
    def record(self) -> tuple[int, bytes] | None:
        return self._record

    @property
    def ids_moved_by(self) -> tuple[int, ...]:
        return (0,) * len(self.members)

    def _known_moves(self) -> tuple[int, ...]:
        return self.ids_moved_by
