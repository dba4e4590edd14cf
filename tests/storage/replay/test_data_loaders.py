"""Test storages as datasets of torch's `DataLoader` with each way to start its workers."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset
from torchrl.data import ReplayBuffer

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage
from tallyroll.storage.storages import DiskStorage

from fork_server import warm_fork_server

ROWS = 40


class Trajectories(Dataset[Any]):
    """Dataset with one item per trajectory."""

    def __init__(self, storage: DiskStorage) -> None:
        self.storage, self.ids = storage, list(storage.trajectories)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> Any:
        return self.storage.trajectories[self.ids[at]]


def write(kind: type[DiskStorage], path: Path) -> Path:
    """Write trajectories of 4 rows."""
    rows = torch.arange(ROWS)
    marks = {"traj_ids": rows // 4, "step": rows % 4, "lane": torch.zeros(ROWS, dtype=torch.int32)}
    done = (rows % 4 == 3)[:, None]
    following = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    columns = {"x": rows * 10, "collector": marks, "next": following}
    with kind(path, capacity=ROWS) as storage:
        storage.extend(TensorDict(columns, [ROWS]))
    return path


def same(item: Any) -> Any:
    return item


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (MemmapStorage, "fork"),
        pytest.param(MemmapStorage, "spawn", marks=pytest.mark.slow),
        (H5Storage, "fork"),
        pytest.param(H5Storage, "forkserver", marks=pytest.mark.slow),
        (ZarrStorage, "fork"),
    ],
)
def test_workers_read_rows_and_trajectories(kind: Any, start: str, tmp_path: Path) -> None:
    if start == "forkserver":
        warm_fork_server()
    with open_storage(write(kind, tmp_path / "rows")) as storage:
        # A worker that imports torch takes seconds.
        options: dict[str, Any] = {"num_workers": 2 if start == "fork" else 1}
        options["multiprocessing_context"] = start
        rows: Any = DataLoader(
            storage,  # type: ignore[arg-type]
            batch_size=8,
            collate_fn=torch.stack,
            **options,
        )
        found = torch.cat([batch["x"] for batch in rows])
        assert found.tolist() == list(range(0, 10 * ROWS, 10))
        whole: Any = DataLoader(Trajectories(storage), batch_size=None, collate_fn=same, **options)
        parts = [each["x"].tolist() for each in whole]
        assert parts == [list(range(at, at + 40, 10)) for at in range(0, 10 * ROWS, 40)]
        assert storage[:]["x"].tolist() == found.tolist(), "the workers' end closes nothing here"


def test_a_buffer_over_a_reader_travels_with_it(tmp_path: Path) -> None:
    with open_storage(write(MemmapStorage, tmp_path / "rows")) as storage:
        sent = pickle.dumps(ReplayBuffer(storage=storage, batch_size=16))
    buffer = pickle.loads(sent)
    assert set(buffer.sample()["x"].tolist()) <= set(range(0, 10 * ROWS, 10))
    assert len(buffer) == ROWS
    buffer._storage.close()
