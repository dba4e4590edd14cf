"""Plans of replays without seeds, from tables made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tallyroll.collector.ext.replay.makers import Maker
from tallyroll.collector.ext.replay.replay_plan import History, plan_of
from tallyroll.storage.trajectories.episodes import END_OPEN, END_TERMINATED

_LINE = [(name, np.int64) for name in ("id", "lane", "first_row", "first_step", "end")]


def planned(*lines: tuple[int, int, int, int]) -> tuple[list[tuple[int, ...]], dict[int, str]]:
    """Return the stepped and the refused trajectories of a run of two lanes.

    Each of ``lines`` is an id, a lane, its first step and its end, in the order of rows.
    """
    rows = [(id, lane, row, step, end) for row, (id, lane, step, end) in enumerate(lines)]
    entry = {"first_row": 0, "first_row_of_run": 0, "seed": 1, "incarnation": 0, "lanes": 2}
    history = History(np.array(rows, _LINE), range(len(rows)), [Maker(0, entry)], False, {})
    plan = plan_of(history, [id for id, *_ in lines])
    stepped = [line.trajectories for group in plan.groups for line in group.lines]
    return stepped, plan.refused


@pytest.mark.parametrize("first", [3, 5])
def test_a_lane_is_stepped_from_its_first_trajectory_alone(first: int) -> None:
    whole = [(10, 0, 0, END_TERMINATED), (12, 0, 0, END_TERMINATED), (14, 0, 0, END_OPEN)]
    stepped, refused = planned(*whole, (10 + first, 1, 0, END_TERMINATED))
    assert stepped == [(10, 12, 14)]
    assert list(refused) == [10 + first]
    assert "the lane's first trajectory of the run is not stored" in refused[10 + first]


def test_a_lane_is_stepped_until_something_is_missing() -> None:
    lines = [(10, 0, 0, END_TERMINATED), (11, 1, 0, END_TERMINATED), (12, 0, 0, END_OPEN)]
    stepped, refused = planned(*lines, (15, 1, 0, END_TERMINATED), (14, 0, 0, END_TERMINATED))
    assert stepped == [(10, 12), (11,)]
    gap = "the stored rows of the lane have a gap during or after trajectory"
    assert {id: why.split(", because")[0] for id, why in refused.items()} == {
        15: f"{gap} 11",
        14: f"{gap} 12",
    }
