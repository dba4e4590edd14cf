"""Compare the table lookup of members with the binary search."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.storage.ext.joined.union import MemberOf


@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(1000, 90_000)), min_size=1, max_size=40),
    st.integers(0, 2**32),
)
def test_each_row_is_of_the_member_that_has_it(lengths: list[int], seed: int) -> None:
    ends = np.cumsum(lengths)
    starts, stop = ends - lengths, int(ends[-1])
    if not stop:
        assert len(MemberOf(starts, 0)(starts[:0])) == 0
        return
    rows = np.random.default_rng(seed).integers(0, stop, (20, 2))
    rows[0] = 0, stop - 1
    rows[1] = starts[-1] - (starts[-1] == stop), ends[0] - (ends[0] == stop)
    found = MemberOf(starts, stop)(rows)
    assert found.shape == rows.shape
    assert (starts[found] <= rows).all()
    assert (rows < ends[found]).all()


def test_a_table_is_for_members_that_are_not_many_to_a_block() -> None:
    assert MemberOf(np.arange(64) * 1000, 64_000)._by_table
    assert MemberOf(np.arange(9000), 9000)._by_table
    assert not MemberOf(np.array([0, 1, 2, 3]), 10**6)._by_table
