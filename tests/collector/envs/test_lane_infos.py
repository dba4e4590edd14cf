"""Infos of lanes equal Gymnasium's vector infos, and columns are the same with and without C."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector import Info
from tallyroll.collector.envs.gymnasium.info_system import vector_info
from tallyroll.collector.envs.gymnasium.infos import InfoColumns
from tallyroll.collector.errors import TransitionError
from tallyroll.collector.native.kernel import compiled
from tallyroll.storage import fast_paths

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


# --- columns of vector infos, with and without the extension --------------------------------------

LANES = 3
marks = st.lists(st.booleans(), min_size=LANES, max_size=LANES).map(np.array)
VALUES = {
    "plain": np.array([1.5, -2.0, np.nan]),
    "narrow": np.array([1.5, 2.0, 3.0], np.float32),
    "whole": np.array([1, 2, 3]),
    "objects": np.array([1.5, None, 2.0], object),
    "strided": np.arange(6.0)[::2],
    "rows": np.arange(6.0).reshape(LANES, 2),
    "few": np.zeros(2),
    "scalar": np.float64(3),
    "list": [1.0, 2.0, 3.0],
    "none": None,
}


def columns_of(off: Any, info: Info, steps: Any) -> Any:
    """Return the columns after each step, or the error."""
    with fast_paths.switched_off(*off):
        columns = InfoColumns([info], LANES)
        rows, found = columns.new_rows(), []
        for how, infos, lanes in steps:
            try:
                getattr(columns, how)(rows, infos, lanes)
            except TransitionError as error:
                found.append(str(error))
                break
            found.append(copy.deepcopy(rows))
        return found


@given(
    fill=st.sampled_from([None, 0, -1.5]),
    shape=st.sampled_from([(), (2,)]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["write", "write_reset", "write_final"]),
            st.sampled_from([*VALUES, "absent"]),
            st.none() | marks,
            st.none() | marks,
            st.booleans(),
        ),
        max_size=6,
    ),
)
def test_columns_are_the_same_with_and_without_the_extension(
    fill: Any, shape: Any, steps: Any
) -> None:
    def infos_of(how: str, name: str, has: Any) -> Any:
        infos = {} if name == "absent" else {"x": VALUES[name]}
        if infos and has is not None:
            infos["_x"] = has
        return {"final_info": infos} if how == "write_final" else infos

    calls = []
    for how, name, has, lanes, last in steps:
        some = np.ones(LANES, np.bool_) if lanes is None and how == "write_final" else lanes
        calls.append((how, infos_of(how, name, has), some))
        if last:  # the next step is of the same kind
            calls.append(calls[-1])
    info = Info("x", dtype="float64", shape=shape, fill=fill)
    ours, theirs = (columns_of(off, info, calls) for off in ((), ("kernel",)))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, str):
            assert mine == other
            continue
        for a, b in zip(mine, other, strict=True):
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def test_the_extension_takes_what_is_as_declared_and_nothing_else() -> None:
    kernel = compiled()
    if kernel is None:
        pytest.skip("there is no extension")
    row, given = np.zeros(3), np.zeros(3, np.bool_)
    fill, value = np.float64(7).tobytes(), np.arange(3.0)
    has, lanes = np.array([True, False, True]), np.array([True, True, False])
    assert kernel.put_entry(row, given, fill, (value, has), lanes)
    assert (row.tolist(), given.tolist()) == ([0, 7, 0], [True, False, False])
    for wrong in (
        (row, None, fill, (value, None), None),
        (row, given, b"short", (value, None), None),
        (row, given, fill, (value.astype("f4"), None), None),
        (row, given, fill, (value, has[:2]), None),
        (row, given, fill, (value, None), np.zeros(3)),
        (row, None, None, (value, has), None),
        (row, None, None, None, None),
        (row, given, fill, ("text", None), None),
    ):
        assert not kernel.put_entry(*wrong)
    with pytest.raises(TypeError, match="parts"):
        kernel.put_entry(row, given, fill, (value,), None)  # type: ignore[arg-type]
