"""TorchRL's own replay-buffer tests, with our storages in the place of its lazy ones.

The test modules come from a checkout of TorchRL, of the version that is installed; before they are
imported `LazyMemmapStorage` and `LazyTensorStorage` are ours. By hand, five minutes a storage::

    cd CHECKOUT && PYTHONPATH=TALLYROLL/tests/torchrl_suite \
        pytest -q -p storages_plugin -p no:cacheprovider --tallyroll-storage memmap test/rb
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from suite import Suite

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage
from tallyroll.storage.storages import DiskStorage

KINDS: dict[str, type[DiskStorage]] = {
    "memmap": MemmapStorage,
    "hdf5": H5Storage,
    "zarr": ZarrStorage,
}
REPLACED = ("LazyMemmapStorage", "LazyTensorStorage")
WHERE = (
    "torchrl.data",
    "torchrl.data.replay_buffers",
    "torchrl.data.replay_buffers.storages",
    "torchrl.data.replay_buffers.storages.tensor",
)
"""The modules that tests, and checkpointers while they run, take these names from."""
MOST = 2**20
"""Rows of space for storages that are made for more, where the format reserves it at once."""


class _Refused(ValueError):
    """An argument of TorchRL's storages that ours do not have."""


def stand_in(kind: type[DiskStorage], name: str, made: list[str]) -> type[DiskStorage]:
    """A class of the name and signature of one of TorchRL's lazy storages, which makes ours."""

    class StandIn(kind):  # type: ignore[misc,valid-type]
        """Takes what a script gives to TorchRL's storages."""

        def __init__(
            self,
            max_size: int,
            *,
            scratch_dir: Any = None,
            device: Any = "cpu",
            ndim: int = 1,
            shared_init: bool = False,
            **others: Any,
        ) -> None:
            made.append(name)
            if ndim != 1:
                raise _Refused(f"ndim={ndim}: a row is a transition")
            if shared_init:
                raise _Refused("shared_init: a storage has one writer")
            if "cuda" in str(device):
                raise _Refused(f"device={device}: rows are on disk")
            size = int(max_size)
            room = {"max_size": size} if kind is MemmapStorage else {"capacity": min(size, MOST)}
            super().__init__(scratch_dir, **room)

    StandIn.__name__ = StandIn.__qualname__ = name  # by which tests are named, too
    return StandIn


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the run."""
    group = parser.getgroup("tallyroll")
    group.addoption("--tallyroll-storage", choices=sorted(KINDS), default="memmap")
    group.addoption("--differences", default=str(Path(__file__).parent / "storages.toml"))
    group.addoption("--torchrl-log", help="a file for what failed, and how")


def pytest_configure(config: pytest.Config) -> None:
    """Put ours in their place, before a test module is imported."""
    import torchrl.data  # noqa: F401 - and with it all of the modules above

    name, made = config.getoption("--tallyroll-storage"), []
    ours = {each: stand_in(KINDS[name], each, made) for each in REPLACED}
    for module in WHERE:
        for each in REPLACED:
            if hasattr(sys.modules[module], each):
                setattr(sys.modules[module], each, ours[each])
    listed, log = Path(config.getoption("--differences")), config.getoption("--torchrl-log")
    suite = Suite(listed, made, KINDS[name].__name__, log, name)
    config.pluginmanager.register(suite, "tallyroll-storages")
