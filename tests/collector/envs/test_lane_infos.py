"""Infos of single lanes beside what Gymnasium's own vector makes of them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector import Info
from tallyroll.collector.envs.gymnasium.infos import InfoColumns
from tallyroll.collector.envs.gymnasium.lane_infos import vector_info

INFOS = st.fixed_dictionaries(
    {},
    optional={
        "x": st.integers(-9, 9),
        "deep": st.fixed_dictionaries({}, optional={"y": st.integers(-9, 9)}),
        "other": st.text(max_size=2),
    },
)
WANTED = [Info("x", "int64", fill=-99), Info("deep/y", "int64", fill=-99)]


class Bare(gymnasium.Env[Any, Any]):
    observation_space = action_space = gymnasium.spaces.Discrete(2)


def written(info: Any, lanes: int) -> list[Any]:
    columns = InfoColumns(WANTED, lanes)
    rows = columns.new_rows()
    columns.write(rows, info)
    return [row.tolist() for row in rows]


@given(st.lists(INFOS, min_size=1, max_size=4))
def test_columns_are_those_of_a_vector(infos: list[dict[str, Any]]) -> None:
    vector, merged = SyncVectorEnv([Bare] * len(infos)), {}
    for lane, info in enumerate(infos):
        merged = vector._add_info(merged, info, lane)
    found = vector_info(infos, WANTED)
    assert written(found, len(infos)) == written(merged, len(infos))


def test_what_is_wanted_and_in_no_lane_is_absent() -> None:
    infos = [{"deep": {"z": 1}, "score": np.zeros(2)}, {"score": None}]
    found = vector_info(infos, [Info("deep/y"), Info("score"), Info("score/inner")])
    assert found["deep"] is None, "a name alone"
    assert found["score"][0].tolist() == [0, 0]
    assert found["score"][1] is None
    assert sorted(vector_info(infos, [Info("missing")])) == ["deep", "score"]
