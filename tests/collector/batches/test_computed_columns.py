"""A computed column needs only its declaration, on every path from a slot to a stored row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.batches.rows import computed_columns
from tallyroll.collector.batches.rows.computed_columns import ComputedColumn
from tallyroll.storage import fast_paths, open_storage, verify
from tallyroll.storage.storages import DiskStorage, H5Storage, MemmapStorage, ZarrStorage

KEY = ("collector", "steps_and_ends")
FRAMES = 97


def steps_and_ends(column: Any) -> np.ndarray:
    """Compute a number from columns of the environment, the policy and the collector."""
    ends = column(("next", "terminated")).reshape(-1)  # batches mark cuts as done
    return column(("collector", "step")) + 0.5 * ends + 1000.0 * column(("collector", "traj_ids"))


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    column = ComputedColumn(KEY, torch.float32, steps_and_ends)
    monkeypatch.setattr(
        computed_columns, "COMPUTED_COLUMNS", [*computed_columns.COMPUTED_COLUMNS, column]
    )


def require_computed(rows: Any) -> None:
    expected = steps_and_ends(lambda key: rows[key].numpy()).astype(np.float32)
    assert rows[KEY].dtype is torch.float32
    assert rows[KEY].numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("off", ["", "kernel", "fast-collect"])
@pytest.mark.parametrize("kind", [MemmapStorage, H5Storage, ZarrStorage])
def test_it_is_stored_in_each_format_and_by_each_path(
    kind: type[DiskStorage], off: str, tmp_path: Path
) -> None:
    off_too = {off} & {*fast_paths.FAST_PATHS}
    ring = {"max_size": FRAMES} if kind is MemmapStorage else {}
    with fast_paths.switched_off(*off_too), kind(tmp_path / "data", **ring) as storage:
        collector = SyncCollector(
            "CartPole-v1",
            num_envs=3,
            frames_per_batch=30,
            total_frames=FRAMES,
            storage=storage,
            seed=0,
        )
        collector.collect(3)
        collector.collect(5)
        for batch in collector:
            require_computed(batch)
        collector.shutdown()
    assert verify(tmp_path / "data").sound
    with open_storage(tmp_path / "data") as storage:
        require_computed(storage[:])
        assert len(storage[KEY].unique()) > 9


@pytest.mark.parametrize("layout", ["rows", "lanes", "torchrl"])
def test_it_is_yielded_in_each_layout(layout: Any) -> None:
    with SyncCollector(
        "CartPole-v1",
        num_envs=3,
        frames_per_batch=30,
        total_frames=90,
        seed=0,
        layout=layout,
    ) as collector:
        for batch in collector:
            assert KEY in batch.keys(True, True)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_rows_have_it(mode: Any, tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "data") as storage:
        collector = MultiprocessCollector(
            "CartPole-v1",
            num_envs=4,
            num_workers=2,
            frames_per_batch=20,
            total_frames=FRAMES,
            storage=storage,
            mode=mode,
            seed=0,
        )
        for batch in collector:
            require_computed(batch)
        collector.shutdown()
        require_computed(storage[:])
