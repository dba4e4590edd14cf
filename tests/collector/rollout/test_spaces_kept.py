"""The entry of a run holds the spaces as JSON, which agree with Gymnasium's own spaces."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiOneHot, OneHot, Unbounded
from torchrl.envs import EnvBase

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.envs.gymnasium.spaces import observation_leaves
from tallyroll.collector.envs.setup import spaces as of_env
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.rows.spaces import NO_SPACE, fitting, space_of, spelled

DTYPES = (np.float32, np.float64, np.uint8, np.int16, np.int64)


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=2)))
    whole = dtype.kind != "f"
    some = st.integers(0, 100) if whole else st.sampled_from([-np.inf, -1.5, 0.1, 7.0, np.inf])
    count = int(np.prod(shape))
    alike = draw(st.booleans())
    lows, highs = (
        [draw(some)] * count if alike else [draw(some) for _ in range(count)] for _ in range(2)
    )
    low, high = (np.array(each, dtype).reshape(shape) for each in (lows, highs))
    return spaces.Box(np.minimum(low, high), np.maximum(low, high), dtype=dtype.type)


LEAVES = st.one_of(
    boxes(),
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-3, 3)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 9), min_size=1, max_size=4)),
    st.builds(spaces.MultiBinary, st.integers(1, 6)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=4,
)


def leaf_at(space: Any, path: tuple[str | int, ...]) -> Any:
    for name in path:
        space = space[name]
    return space


@settings(max_examples=60, deadline=None)
@given(TREES, st.integers(0, 2**16))
def test_a_value_is_inside_where_gymnasium_says_so(space: spaces.Space[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for leaf in observation_leaves(space, 3):
        theirs = leaf_at(space, leaf.path)
        said = json.loads(json.dumps(of_env._spec_as_json(leaf.spec, 1), allow_nan=False))
        ours, dtype = space_of(said), np.dtype(theirs.dtype)
        assert ours.differs(dtype, theirs.shape) is None, said
        theirs.seed(seed)
        for shift in (0, 1, -1, 90, -90):
            value = np.asarray(theirs.sample())
            # Beyond a bound by more than a rounding error.
            moved = (value + rng.integers(0, 2, value.shape) * shift).astype(dtype)
            inside = bool(np.all((moved >= ours.low) & (moved <= ours.high)))
            assert theirs.contains(moved if moved.shape else dtype.type(moved)) is inside, said
            assert bool(ours.outside(moved[None])[0]) is not inside, (said, moved)
            assert ours.holds(moved[None]) <= inside


def test_many_bounds_are_bytes_and_too_many_are_left_out() -> None:
    low = np.arange(200, dtype=np.float32) / 3
    spec = Bounded(torch.from_numpy(low), torch.from_numpy(low + 1), (200,), dtype=torch.float32)
    said = of_env._spec_as_json(spec, 0)
    assert len(json.dumps(said)) < 2500
    np.testing.assert_array_equal(space_of(said).low, low)
    large = {"type": "Box", "dtype": "float32", "shape": [4000], "low": [0] * 4000, "high": 1}
    kept = fitting({"x": large, "y": {"type": "Discrete", "n": 2}})["spaces"]
    left = {"type": "Box", "dtype": "float32", "shape": [4000], "left_out": len(json.dumps(large))}
    assert kept == {"x": left, "y": {"type": "Discrete", "n": 2}}
    assert not space_of(left).outside(np.full((1, 4000), 9.0)).any()
    many = {f"column {n}": {"type": "Discrete", "n": n + 1} for n in range(1000)}
    found = fitting(many)
    assert len(json.dumps(found)) < 2**13 + 100
    assert len(found["spaces"]) + found["spaces_left_out"] == 1000


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"type": "Box"},
        {"type": "Box", "dtype": "O", "shape": [1], "low": 0, "high": 1},
        {"type": "Box", "dtype": "float32", "shape": [2], "low": [0, 1, 2], "high": 1},
        {"type": "Box", "dtype": "float32", "shape": [2], "low": {"base64": "?"}, "high": 1},
        {"type": "Box", "dtype": "float32", "shape": ["x"], "low": 0, "high": 1},
        {"type": "Discrete", "n": "many"},
        {"type": "Discrete", "n": 10**400},
        {"type": "OneHot", "n": 5, "shape": [4]},
        {"type": "MultiOneHot", "nvec": [2, -1], "shape": [1]},
        {"type": "MultiDiscrete", "nvec": {"a": 1}},
    ],
)
def test_json_that_is_no_space(said: dict[str, Any]) -> None:
    with pytest.raises(NO_SPACE):
        space_of(said)
    assert spelled(said) == ""


def test_a_claim_takes_no_memory() -> None:
    wide = {"type": "MultiBinary", "n": [2**40]}
    assert space_of(wide).shape == (2**40,)
    box = {"type": "Box", "dtype": "uint8", "shape": [2**20, 2**20], "low": 0, "high": 255}
    assert space_of(box).takes_all
    assert space_of(box).holds(np.zeros(3, np.uint8))
    assert spelled(box) == "in 0..255"
    assert space_of({"type": "Text", "max_length": 3}).is_text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0, 255, "in 0..255"),
        ([-4.8, "-Infinity"], [4.8, "Infinity"], "in -4.8..4.8, -inf..inf"),
        ([-2, -2], [2, 2], "in -2..2"),
        (0, [1, 2.5], "in 0..1, 0..2.5"),
        ([0] * 6, [1] * 5 + [2], f"in {'0..1, ' * 5}0..2"),
        ([0] * 7, [1] * 6 + [2], "in 0..2, some narrower"),
        ([[0, -3]], [[1, 1]], "in -3..1, some narrower"),
    ],
)
def test_bounds_are_spelled_in_pairs(low: Any, high: Any, text: str) -> None:
    shape = np.broadcast_shapes(*(np.array(each, object).shape for each in (low, high)))
    said = {
        "type": "Box",
        "dtype": "float32",
        "shape": list(shape or (9,)),
        "low": low,
        "high": high,
    }
    assert spelled(said) == text


class Marks(EnvBase):
    """Environment of two lanes with one-hot actions, and a nested MultiOneHot and bits."""

    def __init__(self) -> None:
        super().__init__(batch_size=torch.Size([2]))
        self.observation_spec = Composite(
            {
                "observation": Bounded(-1, torch.tensor([[1.0, 2, 3]] * 2), (2, 3)),
                "seen": Composite(
                    {
                        "pair": MultiOneHot([2, 3], (2, 5), dtype=torch.bool),
                        "bits": Binary(4, (2, 4), dtype=torch.int8),
                        "mode": Categorical(7, (2,)),
                        "free": Unbounded((2, 1), dtype=torch.float64),
                    },
                    shape=(2,),
                ),
            },
            shape=(2,),
        )
        self.action_spec = OneHot(4, (2, 4), dtype=torch.bool)
        self.reward_spec = Unbounded((2, 1))

    def _see(self, td: Any) -> Any:
        for key, spec in self.observation_spec.items(True, True):
            td.set(key, spec.rand())
        return td.set("terminated", torch.zeros(2, 1, dtype=torch.bool)).set(
            "done", torch.zeros(2, 1, dtype=torch.bool)
        )

    def _reset(self, tensordict: Any = None, **_: Any) -> Any:
        return self._see(self.full_done_spec.zero())

    def _step(self, tensordict: Any) -> Any:
        out = self._see(tensordict.empty())
        return out.set("reward", torch.zeros(2, 1))

    def _set_seed(self, seed: int | None) -> None: ...


def test_specs_of_torchrl(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 10, "seed": 0}
    with SyncCollector(Marks(), storage=tmp_path / "rows", **arguments) as collector:
        collector.collect(10)
    with open_storage(tmp_path / "rows") as storage:
        said = storage.runs[0]["spaces"]
    free = {"dtype": "float64", "shape": [1], "low": "-inf", "high": "inf"}
    assert said == {
        "observation": {
            "type": "Box", "dtype": "float32", "shape": [3], "low": -1.0, "high": [1.0, 2.0, 3.0],
        },
        "seen/pair": {"type": "MultiOneHot", "nvec": [2, 3], "dtype": "bool", "shape": [5]},
        "seen/bits": {"type": "MultiBinary", "n": [4], "dtype": "int8"},
        "seen/mode": {"type": "Discrete", "n": 7, "start": 0, "dtype": "int64"},
        "seen/free": {"type": "Box", **free},
        "action": {"type": "OneHot", "n": 4, "dtype": "bool", "shape": [4]},
    }  # fmt: skip
    report = verify(tmp_path / "rows")
    assert report.sound
    assert "spaces" in report.checked
    for key in (("action",), ("seen", "pair"), ("next", "seen", "mode")):
        wrong = tmp_path / key[-1]
        with open_storage(tmp_path / "rows") as storage:
            storage.copy_to(wrong)
        with open_storage(wrong, mode="append") as storage:
            row = storage.reader.column(key).array[3:4]
            row.flags.writeable = True
            row[...] = True if key[-1] != "mode" else 7
        (found,) = (each for each in verify(wrong).findings if each.check == "spaces")
        assert (found.places[0].row, found.places[0].column) == (3, "/".join(key))


def pendulum(high: float) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("Pendulum-v1")
    space = env.observation_space
    low, top = np.full(3, -9, np.float32), np.array([9, 9, high], np.float32)
    return gymnasium.wrappers.TransformObservation(env, lambda x: x, type(space)(low, top))


@pytest.mark.parametrize("alike", [True, False])
def test_workers_say_what_all_of_them_have(tmp_path: Path, alike: bool) -> None:
    makers = [partial(pendulum, 9.0), partial(pendulum, 9.0 if alike else 10.0)]
    with MultiprocessCollector(
        makers, frames_per_batch=20, total_frames=20, transport="thread", storage=tmp_path / "rows"
    ) as collector:
        collector.collect(20)
    with open_storage(tmp_path / "rows") as storage:
        said = storage.runs[0]["spaces"]
    action = {"type": "Box", "dtype": "float32", "shape": [1], "low": -2.0, "high": 2.0}
    box = {"type": "Box", "dtype": "float32", "shape": [3], "low": -9.0, "high": 9.0}
    assert said == {"action": action, **({"observation": box} if alike else {})}


def test_rows_that_need_not_keep_to_them_say_so(tmp_path: Path) -> None:
    """A postproc changes rows, and ``validate="off"`` accepts all values."""
    arguments: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 10, "seed": 0}

    def changed(rows: Any) -> Any:
        for key in ("observation", ("next", "observation")):
            rows[key] = rows[key] * 1e6
        return rows

    for name, more in (("post", {"postproc": changed}), ("off", {"validate": "off"})):
        with SyncCollector(
            "Pendulum-v1", storage=tmp_path / name, **arguments, **more
        ) as collector:
            list(collector)
        report = verify(tmp_path / name)
        assert report.sound
        assert "no run records the spaces" in report.skipped["spaces"]
        with open_storage(tmp_path / name) as storage:
            reason = storage.runs[0]["spaces_unchecked"]
        assert reason == {"post": "postproc", "off": "validate='off'"}[name]


def test_a_row_of_another_origin_has_no_known_space(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 10, "seed": 0}
    with MemmapStorage(tmp_path / "rows") as storage:
        with SyncCollector("CartPole-v1", storage=storage, **arguments) as collector:
            collector.collect(10)
        rows = storage.get(slice(0, 5)).clone()
        rows["observation"][2] = 100
        storage.extend(rows, ids="fresh")
        with SyncCollector("CartPole-v1", storage=storage, **arguments) as collector:
            collector.collect(10)
        assert [run.get("spaces") is not None for run in storage.runs] == [True, False, True]
        with MemmapStorage(tmp_path / "others") as others:
            # these rows name their origin, however they were changed
            handed = storage.get(slice(0, 10))
            handed["observation"][2] = 100
            others.extend(handed)
            assert others.runs[0]["runs"][0]["spaces"]
    assert "no run records the spaces" in verify(tmp_path / "others").skipped["spaces"]
    assert not [each for each in verify(tmp_path / "rows").findings if each.check == "spaces"]
