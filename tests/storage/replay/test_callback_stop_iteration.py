"""Test that `StopIteration` in a transform or a callback is an error and never ends a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tallyroll import storage as package
from tallyroll.storage import (
    CallbackStopIteration,
    MemmapStorage,
    StorageError,
    content_hash,
    diff,
    import_dataset,
    verify,
)

ROWS = 100


def used_up(*_: Any, **__: Any) -> Any:
    """Raise like ``next`` of an exhausted iterator."""
    return next(iter(()))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[MemmapStorage]:
    ids = np.repeat(np.arange(ROWS // 10), 10)
    over = np.arange(ROWS) % 10 == 9
    flags = {("next", name): over[:, None] for name in ("done", "terminated")}
    with MemmapStorage(tmp_path / "rows") as made:
        made.extend(
            {
                ("observation",): np.arange(ROWS, dtype=np.float32)[:, None],
                ("next", "observation"): np.arange(1, ROWS + 1, dtype=np.float32)[:, None],
                ("action",): np.zeros((ROWS, 1), np.float32),
                ("next", "reward"): np.ones((ROWS, 1), np.float32),
                ("next", "truncated"): np.zeros((ROWS, 1), np.bool_),
                ("collector", "traj_ids"): ids,
                ("collector", "step"): np.arange(ROWS) % 10,
                ("collector", "lane"): np.zeros(ROWS, np.int32),
                **flags,
            }
        )
        yield made


def loaded(storage: MemmapStorage, folder: Path) -> None:
    for _ in storage.loader(8, transform=used_up, workers=0, batches=5):
        pass


def loaded_by_threads(storage: MemmapStorage, folder: Path) -> None:
    for _ in storage.loader(8, transform=used_up, workers=2, batches=5):
        pass


def dataset(storage: MemmapStorage, folder: Path) -> None:
    data = storage.dataset(transform=used_up)
    for _ in DataLoader(data, batch_size=8, collate_fn=data.collate):
        pass


def imported(storage: MemmapStorage, folder: Path) -> None:
    storage.export(folder / "rows.npz", "npz")
    import_dataset(folder / "rows.npz", folder / "back", "npz", progress=used_up)


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "loader": loaded,
    "loader, threads": loaded_by_threads,
    "dataset": dataset,
    "pack": lambda storage, folder: storage.pack(folder / "packed", progress=used_up),
    "copy": lambda storage, folder: storage.copy_to(folder / "copy", progress=used_up),
    "verify": lambda storage, folder: verify(storage.path, progress=used_up),
    "hash": lambda storage, folder: content_hash(storage, progress=used_up),
    "diff": lambda storage, folder: diff(storage.path, storage.path, progress=used_up),
    "export": lambda storage, folder: storage.export(folder / "rows.npz", "npz", progress=used_up),
    "import": imported,
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_an_error_of_ours(name: str, storage: MemmapStorage, tmp_path: Path) -> None:
    with pytest.raises(
        CallbackStopIteration, match=r"\w+: expected a result or another exception"
    ) as raised:
        CALLS[name](storage, tmp_path)
    assert type(raised.value.__cause__) is StopIteration
    assert isinstance(raised.value, StorageError)
    assert package.CallbackStopIteration is CallbackStopIteration


def test_other_batches_come_as_before(storage: MemmapStorage) -> None:
    batches = list(storage.loader(8, transform=lambda rows: rows + 0, workers=0, batches=5))
    assert [len(each) for each in batches] == [8] * 5
    assert all(isinstance(each["observation"], torch.Tensor) for each in batches)
