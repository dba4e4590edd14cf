"""Compare updates in one call of the extension, and their powers, with NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, PrioritizedSampler, fast_paths
from tallyroll.storage.engine import kernel
from tallyroll.storage.ext.sampling.powers import LARGEST, Powers
from tallyroll.storage.ext.sampling.priorities import leaves_of

Call = Callable[[PrioritizedSampler], Any]
ROWS = 400
pytestmark = pytest.mark.skipif(not kernel.is_built(), reason="not built")


@pytest.mark.parametrize("exponent", [0.0, 1e-3, 0.6, 1.0, 1.7, LARGEST])
def test_powers_are_those_of_longer_numbers(exponent: float) -> None:
    """Powers have at least nine more bits than leaves.

    Of two million, one may be rounded otherwise.
    """
    priorities = 10.0 ** np.random.default_rng(1).uniform(-18, 18, 20_000)
    exact = (priorities.astype(np.longdouble) + 1e-8) ** np.longdouble(exponent)
    found = Powers(exponent, 1e-8)
    assert np.abs(found._looked_up(priorities + 1e-8) / exact - 1).max() < 2**-48
    assert (found.of(priorities) != exact.astype(np.float32)).sum() <= 1
    whole = 2.0 ** np.arange(-60, 60)
    assert np.array_equal(Powers(1.0, 0.0).of(whole), whole)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 2.0, 3.0])
def test_powers_at_the_ends_of_numbers(exponent: float) -> None:
    ends = np.array([0, 5e-324, 1e-310, 2.3e-308, 1.7e308, np.inf, np.nan])
    with np.errstate(all="ignore"):
        expected = np.power(ends, exponent).astype(np.float32)
    assert np.array_equal(Powers(exponent, 0.0).of(ends), expected, equal_nan=True)


def sampler_of(off: tuple[str, ...], ring: int | None, eps: float, alpha: float) -> Any:
    """Return a sampler. A ring is in its second lap, with a sample of an overwritten row."""
    storage = MemmapStorage(max_size=ring)
    storage.extend(TensorDict({"x": torch.arange(ROWS)}, [ROWS]))
    with fast_paths.switched_off(*off):
        sampler = PrioritizedSampler(
            storage, alpha, eps=eps, generator=torch.Generator().manual_seed(1)
        )
    sampler.draw(20 * ROWS)  # each row is drawn
    if ring:
        storage.extend(TensorDict({"x": torch.arange(150)}, [150]))
        sampler.draw(20)
    return sampler


def outcome(call: Call, sampler: PrioritizedSampler) -> tuple[str, int, bytes]:
    try:
        call(sampler)
        said = ""
    except (ValueError, IndexError) as error:
        said = f"{type(error).__name__}: {error}".replace(str(sampler.storage.path), "")
    return said, sampler.gone, sampler._priorities.leaves().tobytes()


RANDOM = np.random.default_rng(2)
AT = RANDOM.integers(150, 300, 256)  # of 150 rows, so that many occur twice
P32 = (RANDOM.pareto(1.0, 256) * 10.0 ** RANDOM.integers(-6, 6, 256)).astype(np.float32)
P64 = P32.astype(np.float64) * 1.1


def changed(at: int, priority: float) -> np.ndarray:
    found = P32.copy()
    found[at] = priority
    return found


AT_ONCE: dict[str, tuple[Any, Any]] = {
    "arrays": (AT, P32),
    "float64": (AT, P64),
    "tensors": (torch.from_numpy(AT), torch.from_numpy(P32)),
    "tensors of float64": (torch.from_numpy(AT), torch.from_numpy(P64)),
    "with gradients": (torch.from_numpy(AT), torch.from_numpy(P64).requires_grad_()),
    "strides": (np.repeat(AT, 2)[::2], np.repeat(P32, 3)[::3]),
    "backwards": (AT[::-1], P64[::-1]),
    "tensors with gaps": (torch.from_numpy(AT)[::2], torch.from_numpy(P64)[::2]),
    "two dimensions": (AT.reshape(16, 16), P32.reshape(256, 1)),
    "read only": (np.frombuffer(AT.tobytes(), np.int64), np.frombuffer(P32.tobytes(), "f4")),
    "rows that are gone": (np.arange(256), P32),
    "none": (AT[:0], P32[:0]),
    "one": (AT[:1], P32[:1]),
    "the largest count": (np.resize(AT, 1024), np.resize(P64, 1024)),
    "zeros": (AT, np.zeros(256, np.float32)),
}
OTHERWISE: dict[str, tuple[Any, Any]] = {
    "not a number": (AT, changed(7, np.nan)),
    "negative": (AT, changed(255, -1e-3)),
    "infinite": (AT, changed(0, np.inf)),
    "too large": (AT, changed(9, 3e38).astype(np.float64) ** 2),
    "tiny": (AT, changed(9, 1e-30)),
    "a row that never was": (np.append(AT[1:], 10_000), P32),
    "a row below 0": (np.append(AT[1:], -1), P32),
    "fewer": (AT, P32[1:]),
    "a single one": (AT, P32[:1]),
    "a number": (AT, 0.5),
    "lists": (AT.tolist(), P32.tolist()),
    "int32": (AT.astype(np.int32), P32),
    "other bytes": (AT.astype(">i8"), P64.astype(">f8")),
    "unsigned": (AT.astype(np.uint64), P32),
    "whole priorities": (AT, np.arange(256)),
    "half": (torch.from_numpy(AT), torch.rand(256).to(torch.bfloat16)),
    "objects": (AT.astype(object), P32.astype(object)),
    "columns of a table": (np.tile(AT, (2, 1))[:, ::2], np.tile(P64, (2, 1))[:, ::2]),
    "more than at once": (np.resize(AT, 1025), np.resize(P64, 1025)),
    "a float index": (AT.astype(np.float64), P32),
}


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "index"])
@pytest.mark.parametrize("ring", [None, ROWS])
def test_both_ways_do_the_same(
    by_rows: bool, ring: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways set equal bits in leaves, count the same rows as gone, and raise equal errors."""
    for alpha, eps in ((0.6, 1e-8), (1.0, 0.0), (3.0, 1e-8)):
        ours, plain = (sampler_of(off, ring, eps, alpha) for off in ((), ("kernel",)))
        otherwise: list[int] = []
        update = ours._update
        monkeypatch.setattr(ours, "_update", lambda *a, **o: (otherwise.append(1), update(*a, **o)))  # noqa: B023
        for name, (index, priority) in (AT_ONCE | OTHERWISE).items():

            def call(
                sampler: PrioritizedSampler, index: Any = index, given: Any = priority
            ) -> None:
                (sampler.update_rows if by_rows else sampler.update_priority)(index, given)

            otherwise.clear()
            assert outcome(call, ours) == outcome(call, plain), name
            if name in AT_ONCE and eps and alpha <= LARGEST:
                assert not otherwise, f"{name} took the long way"
        assert by_rows or ring is None or plain.gone > 0
        for sampler in (ours, plain):
            sampler.storage.close()


def test_the_last_of_several_priorities_of_a_row_counts() -> None:
    sampler = sampler_of((), None, 1e-8, 0.6)
    sampler.update_rows(np.array([5, 6, 5, 5]), np.array([9.0, 2.0, 8.0, 3.0]))
    expected = leaves_of(np.array([3.0, 2.0]), 0.6, 1e-8)
    assert np.array_equal(sampler._priorities.leaves()[5:7], expected)
    sampler.storage.close()


def test_an_index_that_a_buffer_just_wrote_is_not_taken_at_once() -> None:
    """In a ring, the index means the newly written rows, not those that were drawn before."""
    sampler = sampler_of((), ROWS, 1e-8, 1.0)
    index = torch.arange(150, 160)
    sampler.draw(ROWS)
    sampler.storage.extend(TensorDict({"x": torch.arange(10)}, [10]))
    rows = torch.arange(550, 560)
    assert sampler.storage.index_of(rows.numpy()).tolist() == index.tolist()
    sampler.extend(index)
    sampler.update_priority(index, torch.full((10,), 7.0))
    assert sampler.gone == 0
    sampler.update_priority(torch.arange(150, 160), torch.full((10,), 5.0))
    assert sampler._priorities.leaves()[-10:] == pytest.approx(7.0)
    sampler.storage.close()


def test_the_extension_refuses_what_is_no_call() -> None:
    compiled = kernel.compiled()
    assert compiled is not None
    sampler = sampler_of((), None, 1e-8, 0.6)
    tree, powers = sampler._priorities._tree, Powers(0.6, 1e-8)
    where = (*sampler._priorities.there, ROWS)
    before = tree.leaves.tobytes()
    far = (0, 0, 0, 10**6, ROWS)
    for index, priority, numbering in (
        ((1, 2), P32, where),
        (AT, ("a", 1, 8), where),
        (object(), P32, where),
        (AT, object(), where),
        (AT, P32, far),
        (AT, P32, (10**6, 0, 0, ROWS, ROWS)),
    ):
        call: Any = (tree._table, powers.address, None, index, priority, *numbering)
        assert compiled.put_priorities(*call) == -1
    with pytest.raises(TypeError, match="expected 10 arguments"):
        compiled.put_priorities(tree._table)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="too short"):
        compiled.put_priorities(b"", 0, None, AT, P32, *where)
    assert tree.leaves.tobytes() == before
    sampler.storage.close()
