"""Test `n_step` with some of the keys, into given tensors, and with and without the extension."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import H5Storage, MemmapStorage, fast_paths, n_step
from tallyroll.storage.errors import ColumnsMissing, SumTooLarge
from tallyroll.storage.readers.file_reader import FileReader

from lane_model import Model

N, GAMMA = 9, 0.97
KEYS: list[Any] = [
    "observation",
    ("next", "observation"),
    ("next", "reward"),
    ("next", "terminated"),
    "gamma",
]
ADDED: list[Any] = ["steps_to_next_obs", "gamma", ("next", "original_reward"), ("next", "reward")]


def model_of(count: int, seed: int = 0) -> Model:
    return Model.random(np.random.default_rng(seed), rows=count, lanes=5, mean_length=15.0)


def rows_of(model: Model, dtype: torch.dtype = torch.float32) -> TensorDict:
    rows = model.rows()
    random = np.random.default_rng(1).standard_normal((len(model), 1))
    random[::50] = -0.0
    rows["next", "reward"] = torch.from_numpy(random).to(dtype)
    return rows


@pytest.fixture(params=["memmap", "ring", "hdf5"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemmapStorage | H5Storage]:
    rows, path = rows_of(model_of(600)), tmp_path / "rows.h5"
    kinds: dict[str, Any] = {
        "memmap": lambda: MemmapStorage(path),
        "ring": lambda: MemmapStorage(path, max_size=400),
        "hdf5": lambda: H5Storage(path, capacity=600),
    }
    with kinds[request.param]() as made:
        for start in range(0, 600, 100):
            made.extend(rows[start : start + 100])
        yield made


def wanted_sums(model: Model, rows: TensorDict, first: int) -> tuple[list[float], list[int]]:
    """Return the sum, in the order of the steps, and the last row, of each row from ``first``."""
    sums, last = [], []
    rewards = rows["next", "reward"][:, 0].tolist()
    for row in range(first, len(model)):
        at, total, steps = row, 0.0, 0
        while True:
            total += rewards[at] * np.float64(GAMMA) ** steps
            steps += 1
            after = model.next_of(at)
            if steps == N or after < 0 or model.ended(at):
                break
            at = after
        sums.append(total)
        last.append(at)
    return sums, last


@pytest.mark.parametrize("way", ["compiled", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_those_of_a_plain_loop(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    whole, random = model_of(600), np.random.default_rng(2)
    assert whole.terminated is not None
    assert whole.truncated is not None
    # Flags end a sum even if the trajectory goes on, as in rows of TorchRL's trainers.
    terminated, truncated = random.random((2, 600)) < 0.03
    flags = whole.terminated | terminated, whole.truncated | truncated
    model = Model(whole.ids, whole.steps, whole.lane, *flags)
    rows = rows_of(model, dtype)
    switched = fast_paths.switched_off(*(["kernel"] if way == "plain" else []))
    with switched, MemmapStorage(tmp_path / "rows", max_size=400) as storage:
        for start in range(0, 600, 100):
            storage.extend(rows[start : start + 100], ids="fresh")
        order = torch.arange(200, 600)
        found = n_step(storage, order % 400, N, GAMMA)
        single = n_step(storage, order[:1] % 400, N, GAMMA)
    sums, last = wanted_sums(model, rows, 200)
    assert torch.equal(found["next", "reward"][:, 0], torch.tensor(sums).to(dtype))
    assert torch.equal(found["next", "observation"], rows["next", "observation"][last])
    assert found["steps_to_next_obs"].float().std() > 1
    assert single[0]["next", "reward"] == found[0]["next", "reward"]


@pytest.mark.parametrize("keys", [KEYS, ADDED, ["gamma"], "action", [("next", "reward")]])
@pytest.mark.parametrize("shape", [(40,), (8, 5)])
def test_keys_select_from_the_whole_result(
    storage: MemmapStorage, keys: Any, shape: tuple[int, ...]
) -> None:
    index = torch.randint(len(storage), shape)
    whole = n_step(storage, index, N, GAMMA)
    names = [keys] if isinstance(keys, str) else keys
    assert_same(n_step(storage, index, N, GAMMA, keys=keys), whole.select(*names))


@pytest.mark.parametrize("shape", [(40,), (8, 5)])
def test_out_is_overwritten(storage: MemmapStorage, shape: tuple[int, ...]) -> None:
    out = n_step(storage, torch.zeros(shape, dtype=torch.int64), N, GAMMA, keys=KEYS)
    tensors = [out[key] for key in KEYS]
    for seed in range(3):
        index = torch.randint(len(storage), shape, generator=torch.Generator().manual_seed(seed))
        assert n_step(storage, index, N, GAMMA, out=out) is out
        assert_same(out, n_step(storage, index, N, GAMMA).select(*KEYS))
    for key, tensor in zip(KEYS, tensors, strict=True):
        assert out[key] is tensor


def test_other_columns_are_not_read(
    storage: MemmapStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[Any] = set()
    for name in ("copies", "mapped"):
        real = getattr(FileReader, name)

        def spied(self: FileReader, *given: Any, real: Any = real) -> Any:
            read.update(self.keys if given[-1] is None else given[-1])
            return real(self, *given)

        monkeypatch.setattr(FileReader, name, spied)
    monkeypatch.delattr(FileReader, "gather")
    n_step(storage, [1, 2, 3], N, GAMMA, keys=["observation", ("next", "reward")])
    flags = {("next", "terminated"), ("next", "truncated")}
    assert read == {("observation",), ("next", "reward"), *flags}


def test_keys_keep_other_entries_of_a_batch(storage: MemmapStorage) -> None:
    batch = storage.get([5, 6, 7])
    batch["index"], batch["weight"] = torch.tensor([5, 6, 7]), torch.rand(3)
    found = n_step(storage, batch, N, GAMMA, keys=[("next", "reward")])
    assert set(found.keys(True, True)) == {("next", "reward"), "index", "weight"}
    assert torch.equal(found["weight"], batch["weight"])


def test_overlays_may_be_keys(storage: MemmapStorage) -> None:
    overlay = storage.overlay("mark", torch.float32, (1,))
    overlay[:] = torch.rand(len(storage), 1)
    found = n_step(storage, [3, 4], N, GAMMA, keys=["mark", "gamma"])
    assert torch.equal(found["mark"], storage.get([3, 4], ["mark"])["mark"])
    assert set(found.keys()) == {"mark", "gamma"}


def test_bad_arguments(storage: MemmapStorage) -> None:
    out = n_step(storage, [1, 2], N, GAMMA, keys=KEYS)
    with pytest.raises(ColumnsMissing, match=r"keys: expected some of .*, got color"):
        n_step(storage, [1], N, GAMMA, keys=["color"])
    with pytest.raises(ColumnsMissing, match="got none"):
        n_step(storage, [1], N, GAMMA, keys=[])
    with pytest.raises(ValueError, match="out: expected out alone"):
        n_step(storage, [1, 2], N, GAMMA, keys=KEYS, out=out)
    with pytest.raises(ValueError, match=r"out: expected torch.float64 \[3, 1\] .* observation"):
        n_step(storage, [1, 2, 3], N, GAMMA, out=out)
    with pytest.raises(ValueError, match=r"as gamma, got torch\.float16"):
        n_step(storage, [1, 2], N, GAMMA, out=out.set("gamma", out["gamma"].half()))


def test_a_sum_that_is_too_large(tmp_path: Path) -> None:
    rows = rows_of(model_of(100))
    rows["next", "reward"][:] = 3e38
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        with pytest.raises(SumTooLarge):
            n_step(storage, np.arange(100), N, GAMMA, keys=[("next", "reward")])
        n_step(storage, np.arange(100), N, GAMMA, keys=["gamma"])


def assert_same(found: TensorDict, wanted: TensorDict) -> None:
    assert found.batch_size == wanted.batch_size
    assert set(found.keys(True, True)) == set(wanted.keys(True, True))
    for key, leaf in wanted.items(True, True):
        assert found[key].dtype == leaf.dtype, key
        assert torch.equal(found[key], leaf), key
