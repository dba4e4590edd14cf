"""Checks of HDF5 files in D4RL's layout, with one dataset per column."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.ext.dataset_checks import hdf5
from tallyroll.storage.ext.dataset_checks.checker import Checker, CheckResults, DatasetFolder, Where
from tallyroll.storage.ext.dataset_checks.transitions import Names, TransitionChecks
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.hdf5_files import DAMAGE
from tallyroll.storage.formats.hdf5.datasets import h5py_module

_OBSERVATIONS, _NEXT, _ACTIONS = "observations", "next_observations", "actions"
_REWARDS, _TERMINALS, _TIMEOUTS = "rewards", "terminals", "timeouts"
_NEEDED: Final = (_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINALS)
_TOPS: Final = (*_NEEDED, _NEXT, _TIMEOUTS, "infos")
_OURS = "infos/collector"
_SUFFIXES = (".hdf5", ".h5")


class D4rlChecker(Checker):
    """Checks rows of consecutive episodes, each ended by a terminal or a timeout."""

    name = "d4rl"
    checks = ("files", "columns", "rows", "ids", "steps", "ends", "observations", "nan", "zeros")

    @classmethod
    def recognises(cls, place: Path) -> bool:
        """Look for actions and rewards at the top of an HDF5 file."""
        if not place.is_file() or place.suffix not in _SUFFIXES:
            return False
        with contextlib.ExitStack() as stack:
            raw = DatasetFolder(place.parent, CheckResults()).opened(place.name)
            if raw is None:
                return False
            file = stack.enter_context(
                hdf5.opened(stack.enter_context(raw), CheckResults(), Where())
            )
            try:
                return file is not None and _ACTIONS in file and _REWARDS in file
            except DAMAGE:
                return False

    def check(self, place: Path, found: CheckResults) -> None:
        """Read all rows, one block at a time."""
        h5py_module()
        where = Where()
        raw = DatasetFolder(place.parent, found).opened(place.name)
        if raw is None:
            return
        with raw, hdf5.opened(raw, found, where) as file:
            if file is None:
                return
            datasets = hdf5.datasets_in(file, found, where)
            _Rows(datasets, found, ours="metadata/tallyroll" in datasets).check()


class _Rows:
    def __init__(self, datasets: dict[str, Any], found: CheckResults, *, ours: bool) -> None:
        self._found, self._ours = found, ours
        self._data = {
            name: data for name, data in datasets.items() if name.partition("/")[0] in _TOPS
        }
        self._named = {name.partition("/")[0] for name in self._data}

    def check(self) -> None:
        found = self._found
        damaged = {
            (place.column or "").partition("/")[0]
            for each in found.findings
            for place in each.places
        }
        for name in _NEEDED:
            if name not in self._named and name not in damaged:
                found.add("columns", "a column is missing", column=name)
        for name in [*self._data]:
            if not hdf5.is_numbers(self._data[name]):
                if name.partition("/")[0] != "infos":
                    dtype = str(self._data[name].dtype)
                    found.add("columns", "a column does not hold numbers", None, dtype, name)
                del self._data[name]
        self._check_shapes()
        rows = self._check_counts()
        found.rows = rows
        self._read(rows)

    def _check_shapes(self) -> None:
        for name, data in [*self._data.items()]:
            size = math.prod(data.shape[1:])
            if name == _REWARDS and size != 1 and not self._ours:
                what = f"a row has the shape {list(data.shape[1:])}"
                self._found.add("columns", "a row has more than one reward", None, what, name)
            if name.partition("/")[0] == _NEXT:
                here = self._data.get(_OBSERVATIONS + name[len(_NEXT) :])
                if here is None or (here.shape[1:], here.dtype) != (data.shape[1:], data.dtype):
                    what = f"{list(data.shape[1:])} of {data.dtype}"
                    message = "next observations and observations differ in shape or dtype"
                    self._found.add("columns", message, None, what, name)

    def _check_counts(self) -> int:
        """Return the most common row count. Report and drop the columns with another row count."""
        counts = [data.shape[0] for data in self._data.values()]
        if not counts or not max(counts):
            self._found.add("rows", "there are no rows")
            return 0
        rows = max({*counts}, key=counts.count)
        for name, data in [*self._data.items()]:
            if data.shape[0] != rows:
                what = f"it has {data.shape[0]:,} rows, others have {rows:,}"
                self._found.add("rows", "columns have different numbers of rows", None, what, name)
                del self._data[name]
        return int(rows)

    def _read(self, rows: int) -> None:
        found = self._found
        checks = TransitionChecks(found, self._names())
        row = sum(d.dtype.itemsize * math.prod(d.shape[1:]) for d in self._data.values())
        size, total = max(1, BLOCK_NBYTES // max(1, row)), rows * row
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            block = {}
            for name, data in [*self._data.items()]:
                values = hdf5.values_of(data, start, stop, found, Where(), name)
                if values is None:
                    del self._data[name]  # avoid a second finding
                else:
                    block[name] = values
            checks.advance(block, Where(start=start))
            found.tell(stop * row, total)
        checks.finish()

    def _names(self) -> Names:
        names = [name for name in self._data if name.partition("/")[0] == _OBSERVATIONS]
        after = {name: _NEXT + name[len(_OBSERVATIONS) :] for name in names}
        known = {name: there for name, there in after.items() if there in self._data}
        if not known:
            self._found.skipped["observations"] = f"there are no {_NEXT}"
        trajectory, step, lost = (f"{_OURS}/{name}" for name in ("traj_ids", "step", "next_valid"))
        ours = trajectory in self._data
        if not ours:
            for check in ("ids", "steps"):
                self._found.skipped[check] = "rows have no trajectory ids and steps"
        return Names(
            known,
            tuple(name for name in names if name not in known),
            tuple(name for name in self._data if name.partition("/")[0] == _ACTIONS),
            _REWARDS,
            _TERMINALS,
            _TIMEOUTS,
            trajectory=trajectory if ours else "",
            step=step if ours else "",
            lost=lost if lost in self._data else "",
            in_order=True,
        )
