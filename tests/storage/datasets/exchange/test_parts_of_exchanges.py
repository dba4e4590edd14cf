"""Numbers of trajectories by the flags of their ends, whatever the blocks are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.storage.datasets.exchange.numbering import Numbering
from tallyroll.storage.rows.keys import STEP, TERMINATED, TRAJ_IDS, TRUNCATED
from tallyroll.storage.rows.schema import Schema


@given(st.lists(st.lists(st.sampled_from(["", "terminated", "truncated"]), max_size=5)))
def test_blocks_are_numbered_as_a_plain_loop_does(blocks: list[list[str]]) -> None:
    empty = {key: np.empty((0, 1), bool) for key in (TERMINATED, TRUNCATED)}
    numbering = Numbering(Schema.of(empty))
    trajectory = step = 0
    for ends in blocks:
        flags = {key: np.array([[end == key[-1]] for end in ends], bool) for key in empty}
        found = numbering.of({key: each.reshape(-1, 1) for key, each in flags.items()})
        wanted = []
        for end in ends:
            wanted.append((trajectory, step))
            trajectory, step = (trajectory + 1, 0) if end else (trajectory, step + 1)
        pairs = zip(found[TRAJ_IDS].tolist(), found[STEP].tolist(), strict=True)
        assert list(pairs) == wanted


def test_rows_with_numbers_or_without_flags_are_left_alone() -> None:
    for rows in ({TRAJ_IDS: np.zeros(2, np.int64)}, {("x",): np.zeros(2)}):
        numbering = Numbering(Schema.of(rows))
        assert not numbering.needed
        assert numbering.of(rows) is rows
