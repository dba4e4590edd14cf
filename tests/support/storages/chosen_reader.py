"""A view that another package's reader could provide, found by its path."""

from __future__ import annotations

from pathlib import Path

import torch

from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.ext.views.view_reader import ViewReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import LANE, TRAJ_IDS
from tallyroll.storage.storages import DiskStorage

OTHER = 1000
"""The view excludes trajectories from this id on."""


class ChosenReader(RowReader):
    """A reader of directories that `write_among_others` wrote."""

    @classmethod
    def at(cls, path: Path) -> ViewReader | None:
        """Return a view of the written rows."""
        if not (path / "all").is_dir():
            return None
        view = open_storage(path / "all").trajectories.where(f"id < {OTHER}")
        assert isinstance(view.reader, ViewReader)
        view.reader.path = path
        vars(view.reader)["view"] = view  # the view owns the files
        return view.reader


def write_among_others(source: DiskStorage, path: Path) -> None:
    """Write the rows of a storage, interleaved with other trajectories of other lanes."""
    path.mkdir()
    rows = source.in_order().clone()
    others = rows.clone()
    others[TRAJ_IDS] += OTHER
    others[LANE] += 3
    others["observation"] = torch.rand_like(others["observation"])
    with MemmapStorage(path / "all") as storage:
        at = 0
        for size in (30, 1, 50, len(rows)):
            storage.extend(others[at : at + size], ids="fresh")
            storage.extend(rows[at : at + size], ids="fresh")
            at += size
