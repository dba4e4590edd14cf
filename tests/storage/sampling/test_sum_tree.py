"""Compare the tree of sums, in C and in NumPy, with a plain array of numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.storage import fast_paths
from tallyroll.storage.engine import kernel
from tallyroll.storage.ext.sampling.sum_tree import FAN_OUT, LeafNumbering, SumTree, tree_nbytes

DRAWS = int(os.environ.get("TALLYROLL_DRAWS", "100000"))
UPDATES = int(os.environ.get("TALLYROLL_UPDATES", "20000"))
WAYS = [
    pytest.param("C", marks=pytest.mark.skipif(not kernel.is_built(), reason="not built")),
    "NumPy",
]


def tree_of(way: str, slots: int) -> SumTree:
    with fast_paths.switched_off(*(() if way == "C" else ("kernel",))):
        return SumTree(slots)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


def memory(tree: SumTree) -> list[bytes]:
    return [each.tobytes() for each in (tree.leaves, *tree._blocks)]


def require_sums(tree: SumTree) -> None:
    """Check that every node is the sum of its children, bit for bit, and the root is the total."""
    again = SumTree(len(tree.leaves))
    again.fill(0, len(tree.leaves), tree.leaves)
    assert memory(again) == memory(tree)
    alive = tree.leaves[tree.leaves > 0]
    assert tree.total == pytest.approx(float(tree.leaves.sum(dtype=np.longdouble)), rel=1e-12)
    assert tree.largest == tree.leaves.max()
    assert tree.least == (alive.min() if len(alive) else np.inf)


@pytest.mark.skipif(not kernel.is_built(), reason="not built")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_both_ways_are_alike_to_the_last_bit(data: Any) -> None:
    slots = data.draw(st.sampled_from([1, 15, 16, 17, 255, 256, 257, 5000]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    trees = [tree_of(way, slots) for way in ("C", "NumPy")]
    ring = data.draw(st.sampled_from([0, slots]))
    there = LeafNumbering(ring, 0, slots // 3, slots + (slots // 3 if ring else 0))
    assert memory(trees[0]) == memory(trees[1])
    for step in data.draw(st.lists(st.sampled_from(["set", "put", "fill", "grow"]), max_size=6)):
        count = int(rng.integers(0, 300))
        leaves = (rng.random(count) ** 8 * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
        leaves[rng.random(count) < 0.2] = 0
        at = rng.integers(0, slots, count)
        first, stop = sorted(rng.integers(0, slots + 1, 2).tolist())
        found = []
        for tree in trees:
            match step:
                case "set":
                    tree.set(at.copy(), leaves.copy())
                case "put":
                    found.append(tree.put(at.copy(), leaves.copy(), there, there.stop))
                case "fill":
                    tree.fill(first, stop, 0.25)
                case "grow":
                    tree.grow(slots + 300)
        assert len(set(found)) < 2
        assert memory(trees[0]) == memory(trees[1])
        require_sums(trees[0])
        if trees[0].total > 0:
            uniform = np.concatenate([rng.random(50), [0, 0.5, 1 - 2**-53]])
            (rows, drawn), others = (tree.draw(uniform.copy(), there) for tree in trees)
            assert np.array_equal(rows, others[0])
            assert np.array_equal(drawn, others[1])
            assert (drawn > 0).all()
            assert np.array_equal(drawn, trees[0].leaves[rows % ring if ring else rows])


@pytest.mark.parametrize("slots", [7, 300])
def test_draws_are_in_proportion(way: str, slots: int) -> None:
    """Test all draws with a chi-square test. TALLYROLL_DRAWS=10000000 draws that many."""
    rng, tree = np.random.default_rng(1), tree_of(way, slots)
    leaves = rng.pareto(1.0, slots).astype(np.float32)
    leaves[::3] = 0
    tree.set(np.arange(slots), leaves)
    there, counts = LeafNumbering(0, 0, 0, slots), np.zeros(slots, np.int64)
    for _ in range(0, DRAWS, 50_000):
        rows, _ = tree.draw(rng.random(50_000), there)
        counts += np.bincount(rows, minlength=slots)
    alive = leaves > 0
    assert not counts[~alive].any()
    expected = counts.sum() * leaves[alive].astype(np.float64) / leaves.sum(dtype=np.float64)
    freedom = int(alive.sum()) - 1
    squares = float(((counts[alive] - expected) ** 2 / expected).sum())
    # Wilson and Hilferty: approximately normal. At 4 deviations, one run in 30,000 fails.
    normal = ((squares / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert normal < 4, (squares, freedom)


def test_nothing_drifts(way: str) -> None:
    """After TALLYROLL_UPDATES updates, the sums match the leaves bit for bit."""
    rng, slots, size = np.random.default_rng(2), 10_000, 1000
    tree, plain = tree_of(way, slots), np.ones(slots, np.float32)
    tree.fill(0, slots, 1.0)
    for _ in range(0, UPDATES, size):
        at = rng.integers(0, slots, size)
        leaves = (10.0 ** rng.uniform(-20, 20, size)).astype(np.float32)
        plain[at] = leaves
        assert tree.put(at, leaves.copy(), LeafNumbering(0, 0, 0, slots), slots) == 0
    assert np.array_equal(tree.leaves[:slots], plain)
    require_sums(tree)


def test_rows_without_leaves_are_counted_and_never_set(way: str) -> None:
    tree = tree_of(way, 8)
    tree.fill(0, 8, 1.0)
    tree.fill(2, 3, 0.0)
    there = LeafNumbering(8, 0, 5, 13)  # of a ring: slot 2 has row 10
    rows = np.array([4, 5, 10, 12, 13, 5])
    assert tree.put(rows, np.arange(2, 8, dtype=np.float32), there, 14) == 3
    assert tree.leaves[:8].tolist() == [1, 1, 0, 1, 5, 7, 1, 1]
    for row in (-1, 14):
        with pytest.raises(IndexError, match="not in the tree"):
            tree.put(np.array([5, row]), np.ones(2, np.float32), there, 14)
    with pytest.raises(IndexError, match="not in the tree"):
        tree.set(np.array([16]), np.ones(1, np.float32))
    assert tree.leaves[:8].tolist() == [1, 1, 0, 1, 5, 7, 1, 1]


def test_an_empty_tree_has_nothing_to_draw(way: str) -> None:
    tree = tree_of(way, 100)
    with pytest.raises(ValueError, match="got only leaves of 0"):
        tree.draw(np.zeros(3), LeafNumbering(0, 0, 0, 100))


@pytest.mark.parametrize("slots", [0, 1, 16, 17, 4096, 70_000])
def test_memory_is_known_beforehand(slots: int) -> None:
    tree = SumTree(slots)
    assert tree_nbytes(slots) == sum(each.nbytes for each in (tree.leaves, *tree._blocks))
    assert tree.leaves.ctypes.data % 64 == 0, "16 leaves are a cache line"
    assert len(tree.leaves) % FAN_OUT == 0


@pytest.mark.skipif(not kernel.is_built(), reason="not built")
def test_the_extension_refuses_what_does_not_fit() -> None:
    tree = tree_of("C", 20)
    compiled = kernel.compiled()
    assert compiled is not None
    tree.fill(0, 20, 1.0)
    table, before = tree._table, memory(tree)
    row, leaf = np.zeros(1, np.int64), np.zeros(1, np.float32)
    far, short = (99, 0, 0, 9, 9), (0, 0, 0, 99, 9)
    wrong: list[tuple[Any, ...]] = [
        (compiled.set_leaves, table, np.zeros(2, np.int64), np.zeros(3, np.float32)),
        (compiled.set_leaves, table[:24], np.zeros(2, np.int64), np.zeros(2, np.float32)),
        (compiled.put_leaves, table, row, leaf, *far),
        (compiled.put_leaves, table, row, leaf, *short),
        (compiled.renew_sums, table, 0, 33),
        (compiled.renew_sums, table, -1, 3),
        (compiled.draw_rows, table, np.zeros(2), np.zeros(1, np.int64), np.zeros(2), 0, 0, 20),
    ]
    for function, *arguments in wrong:
        with pytest.raises((ValueError, IndexError)):
            function(*arguments)
    assert memory(tree) == before
