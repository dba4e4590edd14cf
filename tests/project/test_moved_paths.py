"""Import paths that users may have: they work, and warn once where they are used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import tallyroll.collector as collector_package
import tallyroll.storage as storage_package

MODULES = {
    "tallyroll.storage.base": "DiskStorage",
    "tallyroll.storage.hdf5": "H5Storage",
    "tallyroll.storage.memmap": "MemmapStorage",
    "tallyroll.storage.zarr_store": "ZarrStorage",
    "tallyroll.storage.findings": "Finding",
    "tallyroll.storage.schema": "Schema",
    "tallyroll.storage.store": "RowStore",
    "tallyroll.collector.episodes": "Episode",
    "tallyroll.collector.ledger": "Ledger",
    "tallyroll.collector.trajectories": "split_trajectories",
    "tallyroll.collector.envs.gymnasium_vector": "GymnasiumVectorEnv",
    "tallyroll.collector.envs.info": "Info",
}
NAMES = {
    "tallyroll.storage.engine.Durability",
    "tallyroll.storage.formats.FORMATS",
    "tallyroll.storage.formats.open_storage",
    "tallyroll.storage.formats.storage_class",
    "tallyroll.storage.trajectories.Trajectories",
    "tallyroll.storage.verification.CHECKS",
    "tallyroll.storage.verification.verify",
}


@pytest.mark.parametrize(("old", "name"), MODULES.items())
def test_a_moved_module_is_found_and_says_where_it_is(
    old: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"^{old} is (tallyroll\.[a-z_.]+) now$") as told:
        found = getattr(import_module(old), name)
    new = str(told[0].message).split()[2]
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
    monkeypatch.delattr(storage_package, "schema", raising=False)
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
