"""Compare the numbers of chosen rows with a plain list."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.storage.ext.views.chosen_rows import Bits, Stretches, chosen_rows

RUNS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=8)
DENSE = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 2)), max_size=400)


@settings(max_examples=100, deadline=None)
@given(first=st.integers(0, 1000), runs=RUNS | DENSE, more=st.integers(0, 400), seed=st.integers())
def test_they_are_those_of_a_list(
    first: int, runs: list[tuple[int, int]], more: int, seed: int
) -> None:
    wanted: list[int] = []
    at = first
    for left_out, taken in runs:
        wanted += range(at + left_out, at + left_out + taken)
        at += left_out + taken
    numbers = np.array(wanted, np.int64)
    random = np.random.default_rng(abs(seed))
    parts = np.array_split(random.permutation(np.repeat(numbers, 2)), 3)
    found = chosen_rows(range(first, at + more), parts)
    assert len(found) == len(wanted)
    assert found.stop == (wanted[-1] + 1 if wanted else 0)
    places = random.integers(0, len(wanted), (5, 7)) if wanted else np.empty((0, 7), np.int64)
    assert found.numbers(places).tolist() == numbers[places].tolist()
    everywhere = np.arange(max(0, first - 5), at + more + 600)
    assert found.below(everywhere).tolist() == np.searchsorted(numbers, everywhere).tolist()
    start, stop = sorted(random.integers(0, len(wanted) + 1, 2).tolist())
    assert found.between(start, stop).tolist() == wanted[start:stop]
    again = chosen_rows(range(first, at + more + 5000), [numbers])
    assert type(again) is type(found), "however many rows came since"
    assert again.digest == found.digest
    assert pickle.loads(pickle.dumps(found)).digest == found.digest


@pytest.mark.parametrize(
    ("stays", "kind", "most"), [(1000, Stretches, 0.07), (2, Bits, 2), (1, Bits, 2)]
)
def test_they_take_little_memory(stays: int, kind: type, most: float) -> None:
    """The numbers take ``most`` bits per row of the storage."""
    rows = 400_000
    numbers = np.flatnonzero(np.arange(rows) // stays % 2)
    found = chosen_rows(range(rows), [numbers])
    assert type(found) is kind
    assert found.nbytes * 8 <= most * rows
    assert found.between(0, len(found)).tolist() == numbers.tolist()
    some = np.arange(0, len(numbers), 97)
    assert found.numbers(some).tolist() == numbers[some].tolist()


def test_other_rows_have_another_digest() -> None:
    some = np.arange(0, 5000, 3)
    digests = {chosen_rows(range(6000), [some + at]).digest for at in (0, 1, 128, 896)}
    assert len(digests) == 4
