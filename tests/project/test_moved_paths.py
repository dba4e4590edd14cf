"""Tests of former import paths: they still work, and warn once at each place of use."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import tallyroll.collector as collector_package
import tallyroll.storage as storage_package
from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.engine.columns import FixedRows
from tallyroll.storage.errors import ReadOnlyStorage

MODULES = {
    "tallyroll.storage.base": "DiskStorage",
    "tallyroll.storage.hdf5": "H5Storage",
    "tallyroll.storage.memmap": "MemmapStorage",
    "tallyroll.storage.zarr_store": "ZarrStorage",
    "tallyroll.storage.findings": "Finding",
    "tallyroll.storage.schema": "Schema",
    "tallyroll.storage.store": "RowStore",
    "tallyroll.storage.datasets.exchange.door": "ExchangeFormat",
    "tallyroll.storage.datasets.exchange.formats.npz": "NpzFormat",
    "tallyroll.storage.datasets.packed.packed_reader": "PackedReader",
    "tallyroll.storage.overlays.overlay": "Overlay",
    "tallyroll.storage.sampling.prioritized": "PrioritizedSampler",
    "tallyroll.storage.verification.storage_checks": "verify",
    "tallyroll.collector.batches.logs.target": "LogTarget",
    "tallyroll.collector.envs.systems.gymnax": "GymnaxSystem",
    "tallyroll.collector.envs.systems.sb3": "Sb3System",
    "tallyroll.collector.evaluation": "Evaluation",
    "tallyroll.collector.evaluation.evaluating": "evaluate",
    "tallyroll.collector.workers.far.far_place": "FarPlace",
}
NAMES = {
    "tallyroll.storage.engine.Durability",
    "tallyroll.storage.formats.FORMATS",
    "tallyroll.storage.formats.open_storage",
    "tallyroll.storage.formats.storage_class",
    "tallyroll.storage.trajectories.Trajectories",
    "tallyroll.storage.ext.verification.CHECKS",
    "tallyroll.storage.ext.verification.verify",
}


@pytest.mark.parametrize(("old", "name"), MODULES.items())
def test_a_moved_module_is_found_and_says_where_it_is(
    old: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each, module in [*sys.modules.items()]:  # packages at former paths warn once, too
        if type(getattr(module, "__loader__", None)).__name__ == "_Finder":
            monkeypatch.delitem(sys.modules, each)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DeprecationWarning)
        found = getattr(import_module(old), name)
    assert re.match(rf"{old} is tallyroll\.[a-z0-9_.]+ now$", str(told[-1].message))
    new = str(told[-1].message).split()[2]
    assert getattr(import_module(new), name) is found
    package = storage_package if "storage" in old else collector_package
    assert getattr(package, name, found) is found


@pytest.mark.parametrize("path", sorted(NAMES))
def test_a_moved_name_is_found_and_says_where_it_is(path: str) -> None:
    package, _, name = path.rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"^{path} is tallyroll\.[a-z_.]+\.{name} now$"):
        found = getattr(import_module(package), name)
    assert found is not None
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        import_module(package).nonsense  # noqa: B018


def test_moved_modules_are_attributes_of_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tallyroll.storage.schema", raising=False)
    monkeypatch.delitem(vars(storage_package), "schema", raising=False)  # delattr would look it up
    with pytest.warns(DeprecationWarning, match=r"^tallyroll\.storage\.schema is tallyroll\."):
        assert storage_package.schema.Schema is storage_package.Schema
    assert storage_package.errors.StorageError is storage_package.StorageError


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("tallyroll.storage.nonsense")


@pytest.mark.slow
def test_the_warning_points_at_who_imports() -> None:
    code = "from tallyroll.storage.hdf5 import H5Storage"
    run = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning:__main__", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "<string>:1: DeprecationWarning: tallyroll.storage.hdf5 is tallyroll" in run.stderr


# --- storage names that only collectors use -------------------------------------------------------

MOVED = {
    "claim": "claim.take",
    "has_claimed": "claim.is_of",
    "release": "claim.end",
    "withdraw_run": "runs.withdraw",
    "require_schema": "runs.require_schema",
    "put_record": "put_record",
    "stage_record": "stage_record",
    "fresh_ids": "fresh_ids",
    "inside": "files.inside",
    "lock_path": "files.lock_path",
    "episodes_path": "files.episodes_path",
}


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_name_of_a_storage_is_what_its_writer_has(name: str, tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        with pytest.warns(
            DeprecationWarning, match=rf"^DiskStorage\.{name} is DiskStorage\.writer\.(.+) now$"
        ):
            found = getattr(storage, name)
        assert found == attrgetter(MOVED[name])(storage.writer)


def test_moved_methods_of_a_storage_work(tmp_path: Path) -> None:
    rows, run = {("x",): np.arange(6.0)}, Run()
    with MemmapStorage(tmp_path / "rows") as storage, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DeprecationWarning)
        storage.extend(rows)
        assert storage.claim(run)
        assert storage.has_claimed(run)
        fixed = FixedRows(storage.schema, rows)
        assert storage.extend_fixed(fixed, range(2, 4), record=b"two") == range(6, 8)
        assert storage.record == (8, b"two")
        storage.release(run)
        storage.put_record(b"three")
        assert storage.record == (8, b"three")
        assert storage.get(slice(6, 8))["x"].tolist() == [2, 3]
    assert len(told) == 5
    assert {each.filename for each in told} == {__file__}


class Run:
    """A stand-in for a collector's run."""


def test_a_storage_that_is_only_read_refuses_moved_names_too(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend({("x",): np.arange(6.0)})
    with open_storage(tmp_path / "rows") as reader:
        with pytest.warns(match="put_record"), pytest.raises(ReadOnlyStorage):
            reader.put_record(b"r")
        with pytest.raises(
            AttributeError, match="'MemmapStorage' object has no attribute 'nonsense'"
        ):
            reader.nonsense  # noqa: B018  # type: ignore[attr-defined]
