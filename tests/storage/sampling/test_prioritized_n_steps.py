"""Compare `PrioritizedSampler.sample(n, n_step=...)` with a draw and `n_step` by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, PrioritizedSampler, n_step
from tallyroll.storage.errors import ColumnsMissing

from lane_model import Model

KEYS: list[Any] = ["observation", ("next", "reward"), "gamma"]


def sampler_of(storage: MemmapStorage, **options: Any) -> PrioritizedSampler:
    sampler = PrioritizedSampler(
        storage, beta=0.7, generator=torch.Generator().manual_seed(5), **options
    )
    span = storage.span
    priorities = np.random.default_rng(1).random(len(span))
    if "slice_len" not in options:
        sampler.update_rows(np.arange(span.start, span.stop), priorities)
    return sampler


@pytest.mark.parametrize("max_size", [None, 500])
@pytest.mark.parametrize("options", [{}, {"slice_len": 4}])
@pytest.mark.parametrize("keys", [None, KEYS])
def test_rows_are_those_of_two_calls(
    tmp_path: Path, max_size: int | None, options: dict[str, Any], keys: Any
) -> None:
    model = Model.random(np.random.default_rng(0), rows=800, lanes=6)
    with MemmapStorage(tmp_path / "rows", max_size=max_size) as storage:
        for start in range(0, 800, 100):
            storage.extend(model.rows(start, start + 100))
        found = sampler_of(storage, **options).sample(256, n_step=3, gamma=0.9, keys=keys)
        rows, weights = sampler_of(storage, **options).draw(256)
        index = storage.index_of(rows)
        wanted = n_step(storage, index, 3, 0.9, keys=keys)
    own = {"priority_weight", "index", ("collector", "row")}
    assert set(found.keys(True, True)) == {*wanted.keys(True, True), *own}
    for key, leaf in wanted.items(True, True):
        assert torch.equal(found[key], leaf), key
    assert np.array_equal(found["collector", "row"].numpy(), rows)
    assert np.array_equal(found["index"].numpy(), index)
    assert found.batch_size == rows.shape
    repeated = np.repeat(weights, rows.size // 256).reshape(rows.shape)
    assert np.array_equal(found["priority_weight"].numpy(), repeated)
    assert len(np.unique(weights)) > 1 or options


@pytest.mark.parametrize("options", [{}, {"slice_len": 4}])
def test_keys_of_stored_rows(options: dict[str, Any]) -> None:
    keys: list[Any] = ["observation", ("next", "done")]
    with MemmapStorage() as storage:
        storage.extend(Model.random(np.random.default_rng(0), rows=300, lanes=6).rows())
        whole = sampler_of(storage, **options).sample(64)
        found = sampler_of(storage, **options).sample(64, keys=keys)
    own = ["priority_weight", ("collector", "row")]
    assert set(found.keys(True, True)) == {*keys, *own}
    for key in [*keys, *own]:
        assert torch.equal(found[key], whole[key]), key


def test_updates_by_the_batch_reach_the_rows() -> None:
    with MemmapStorage() as storage:
        storage.extend(Model.random(np.random.default_rng(0), rows=300, lanes=6).rows())
        sampler = PrioritizedSampler(storage, alpha=1.0)
        batch = sampler.sample(64, n_step=3, gamma=0.9)
        sampler.update_priority(batch, torch.full((64,), 1e9))
        drawn = set(batch["collector", "row"].tolist())
        assert set(sampler.draw(500)[0].tolist()) <= drawn


def test_rows_that_are_overwritten_meanwhile_are_drawn_again() -> None:
    """The observation of each row is its number, so a row from another lap would show."""
    model = Model.random(np.random.default_rng(0), rows=40_000, lanes=6)
    done = threading.Event()
    with MemmapStorage(max_size=200) as storage:
        storage.extend(model.rows(0, 200))
        sampler = PrioritizedSampler(storage)

        def write() -> None:
            for start in range(200, 40_000, 50):
                storage.extend(model.rows(start, start + 50))
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        batches = []
        while not done.is_set():
            batches.append(sampler.sample(64, n_step=3, gamma=0.9))
        writer.join()
    rows = torch.cat([batch["collector", "row"] for batch in batches])
    numbers = torch.cat([batch["observation"][:, 0] for batch in batches])
    assert torch.equal(rows.double(), numbers)
    assert rows.max() > 1000


def test_bad_arguments() -> None:
    with MemmapStorage() as storage:
        storage.extend(Model.random(np.random.default_rng(0), rows=100, lanes=6).rows())
        sampler = PrioritizedSampler(storage)
        with pytest.raises(ValueError, match="expected n_step and gamma together"):
            sampler.sample(8, n_step=3)
        with pytest.raises(ValueError, match="Leave out the storage"):
            sampler.sample(storage, 8, n_step=3, gamma=0.9)
        with pytest.raises(ValueError, match="n: expected a whole number"):
            sampler.sample(8, n_step=0, gamma=0.9)
        with pytest.raises(ColumnsMissing, match="color"):
            sampler.sample(8, n_step=3, gamma=0.9, keys=["color"])
        assert isinstance(sampler.sample(8, n_step=3, gamma=0.9), TensorDict)
