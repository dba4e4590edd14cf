"""Test TorchRL's ``ReplayBuffer.export`` over our storages, in releases that have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import ReplayBuffer

from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows, collected
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.storages import DiskStorage

pytestmark = pytest.mark.skipif(
    not hasattr(ReplayBuffer, "export"), reason="this TorchRL exports no replay buffers"
)
ORDER = {"trajectory_key": ("collector", "traj_ids"), "step_key": ("collector", "step")}


class Stacked:
    """Exporter that follows the protocol: a function of a dataset of rows."""

    def to_external(self, dataset: Any) -> Any:
        assert isinstance(len(dataset), int)
        return torch.stack([dataset[number].clone() for number in range(len(dataset))])


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DiskStorage]:
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(collected())
    with open_storage(tmp_path / "source") as storage:
        yield storage


def exported(storage: DiskStorage, **order: Any) -> Any:
    buffer: Any = ReplayBuffer(storage=storage)
    found = buffer.export(Stacked(), **order)
    storage._attached_entities_list.clear()  # it would hold the semaphores of its buffers
    return found


def test_all_rows_go_out(source: DiskStorage) -> None:
    assert_same_rows(exported(source), source.get(slice(None)))


def test_by_trajectory(source: DiskStorage) -> None:
    """TorchRL's order of episodes is the order of our trajectories."""
    found = exported(source, **ORDER)
    wanted = torch.cat([source.trajectories[id] for id in sorted(source.trajectories.ids)])
    assert_same_rows(found, wanted)


def test_chosen_rows_and_a_ring(source: DiskStorage, tmp_path: Path) -> None:
    chosen = source.trajectories.where("length > 3")
    assert_same_rows(exported(chosen), chosen.get(slice(None)))
    with MemmapStorage(tmp_path / "ring", max_size=10) as ring:
        for start in range(0, 28, 7):
            ring.extend(trajectory_rows(start, 7, steps=7))
        found = exported(ring, **ORDER)
        assert_same_rows(found, trajectory_rows(18, 10, steps=7))
