"""Test torchdata's ``StatefulDataLoader``.

Another process continues an epoch, and each row occurs once.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tallyroll.storage import EpochBatches, MemmapStorage, open_storage
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

from fork_server import warm_fork_server

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

ROWS, SIZE = 100, 8
BATCHES = -(-ROWS // SIZE)


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessPoolExecutor]:
    """Yield an executor with another process."""
    warm_fork_server()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield pool


def loader_of(path: Path, workers: int, kind: str) -> Any:
    data = open_storage(path).dataset(["observation"])
    more: dict[str, Any] = {"collate_fn": data.collate, "num_workers": workers}
    if workers:
        more["multiprocessing_context"] = "forkserver"
    if kind == "batches":
        more["batch_sampler"] = EpochBatches(len(data), SIZE, seed=3)
    else:
        generator = torch.Generator().manual_seed(1)
        more |= {"batch_size": SIZE, "shuffle": True, "generator": generator}
    return stateful_dataloader.StatefulDataLoader(data, **more)


def numbers(batch: Any) -> list[int]:
    return [int(each) for each in batch["observation"].reshape(-1)]


def taken(path: Path, workers: int, kind: str, epochs: int, count: int) -> tuple[Any, Any]:
    """Return the state after some batches, with the rows before, after, and of the next epoch."""
    loader = loader_of(path, workers, kind)
    for _ in range(epochs):
        assert sum(len(batch) for batch in loader) == ROWS
    batches = iter(loader)
    first = [row for _ in range(count) for row in numbers(next(batches))]
    state = loader.state_dict()
    rest = [row for batch in batches for row in numbers(batch)]
    return state, (first, rest, [row for batch in loader for row in numbers(batch)])


def gone_on(path: Path, workers: int, kind: str, state: Any) -> tuple[list[int], list[int]]:
    """Return the remaining rows of the epoch and those of the next one, in another process."""
    loader = loader_of(path, workers, kind)
    loader.load_state_dict(state)
    rest = [row for batch in loader for row in numbers(batch)]
    return rest, [row for batch in loader for row in numbers(batch)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "epochs", "count"),
    [("batches", 0, 1), ("batches", 1, 7), ("batches", 0, BATCHES - 1), ("shuffle", 0, 7)],
)
def test_another_process_has_the_rest(
    kind: str,
    epochs: int,
    count: int,
    workers: int,
    tmp_path: Path,
    other: ProcessPoolExecutor,
) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(trajectory_rows(0, ROWS, steps=7))
    path = tmp_path / "rows"
    state, (first, rest, after) = taken(path, workers, kind, epochs, count)
    found, then = other.submit(gone_on, path, workers, kind, state).result(60)
    assert len(first) == count * SIZE
    assert found == rest
    assert sorted(first + found) == list(range(ROWS))
    assert sorted(then) == list(range(ROWS))
    if kind == "batches":  # otherwise torch's generator is in another state by the next epoch
        assert then == after


def test_at_the_end_of_an_epoch_the_next_one_comes(
    tmp_path: Path, other: ProcessPoolExecutor
) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(trajectory_rows(0, ROWS, steps=7))
    given = (tmp_path / "rows", 0, "batches")
    state, (first, rest, after) = taken(*given, 0, BATCHES)
    assert sorted(first) == list(range(ROWS))
    assert rest == []
    assert other.submit(gone_on, *given, state).result(60)[0] == after
