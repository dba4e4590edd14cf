"""Lanes stepped in turn, compiled and in Python, are compared with the vector's own methods."""

import copy
import gc
import re
import weakref
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import (
    ClipReward,
    NormalizeReward,
    RecordEpisodeStatistics,
    TransformReward,
    VectorizeTransformReward,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tallyroll.collector.compat import ENDED, own_observations, states_of_lanes
from tallyroll.collector.envs.gymnasium.info_merge import install
from tallyroll.collector.envs.gymnasium.sequential_step import SequentialStep, traits_of
from tallyroll.collector.envs.gymnasium.system import GymnasiumSystem
from tallyroll.collector.envs.gymnasium.vector_rules import wrappers_of
from tallyroll.collector.envs.gymnasium.wrapper_step import WithinWrappers
from tallyroll.collector.envs.stepping.stepper import make_slot_writer
from tallyroll.collector.errors import EnvironmentRefused, TransitionError, ValueRefused
from tallyroll.collector.run_plan import stepping_vector
from tallyroll.collector.slab.info import Info
from tallyroll.collector.workers.worker import exception_report
from tallyroll.storage import fast_paths


class Scripted(gymnasium.Env):
    """Environment that observes (episode, step, action).

    Episodes have ``length`` steps and are truncated if their number is odd.
    """

    def __init__(self, length: Any = 3, dtype: Any = np.float32, space: Any = None) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 200, (3,), dtype)
        self.action_space = space or gymnasium.spaces.Discrete(5)
        self.length, self.episode, self.calls = length, -1, []

    def _observation(self, action: Any = 0) -> Any:
        seen = (self.episode, self.at, abs(float(np.sum(action))))
        return np.array(seen, self.observation_space.dtype)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.calls.append(("reset", seed, options))
        self.episode, self.at = self.episode + 1, 0
        return self._observation(), {"told": self.episode}

    def step(self, action: Any) -> Any:
        self.calls.append(("step", np.array(action)))
        self.at += 1
        over, odd = self.at >= self.length, bool(self.episode % 2)
        reward = np.float32(self.at + 0.1)
        return self._observation(action), reward, over and not odd, np.bool_(over and odd), {}


@pytest.fixture(params=["as installed", "in Python"], autouse=True)
def way(request: Any, monkeypatch: Any) -> None:
    """Both cases are equal if no compiler is available."""
    if request.param == "in Python":
        monkeypatch.setattr(fast_paths, "_off", frozenset({"kernel"}))


def vector(
    lengths: Any = (3,), mode: Any = AutoresetMode.DISABLED, made: Any = Scripted, **kwargs: Any
) -> Any:
    fns = [lambda n=n: made(n, **kwargs) for n in lengths]
    return SyncVectorEnv(fns, copy=False, autoreset_mode=mode)


def started(env: Any, **options: Any) -> Any:
    env.reset(seed=3)
    assert not why_not(env)
    return SequentialStep(env, **options)


def why_not(env: Any) -> str:
    """Return the reason for which the plan leaves the lanes of ``env`` to the vector."""
    return stepping_vector(traits_of(env, infos=False, many_rewards=False)).because


def step(turns: Any, action: Any) -> Any:
    out = turns.step(np.asanyarray(action))
    turns.final = None if out.final is None else out.final[0].copy()
    return [np.array(each) for each in (out.obs[0], out.reward[0], *out[2:4])]


def step_into(turns: Any, action: Any, kind: str, shared: bool) -> Any:
    """Step by way of a slot whose rewards have dtype ``kind``."""
    env = turns._env
    lanes, row = env.num_envs, np.zeros_like(env._observations)
    root = row if shared else np.ones_like(row)
    slot = row, np.zeros(lanes, kind), *np.ones((2, lanes), np.bool_)
    put = make_slot_writer([row], *slot[1:], [root])
    assert put is not None
    out = turns.step_into(np.asanyarray(action), row, put.args[0])
    turns.final = None
    if out is not None:
        assert out.obs[0] is row, "there is memory for it"
        assert put(out.obs, out.reward[0], *out[2:4], None) >= 0
        turns.final = None if out.final is None else out.final[0].copy()
    else:
        assert turns.fills_slots
    np.testing.assert_array_equal(row, root)
    return [*slot[:1], slot[1].astype(np.float64), *slot[2:]]


SPACES = [
    gymnasium.spaces.Discrete(5),
    gymnasium.spaces.Discrete(5, start=2),
    gymnasium.spaces.Box(-1, 1, (2,), np.float32),
    gymnasium.spaces.MultiDiscrete([3, 4]),
    gymnasium.spaces.MultiBinary(3),
]


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    steps=st.integers(1, 12),
    space=st.sampled_from(SPACES),
    dtype=st.sampled_from([np.float32, np.float64, np.uint8, np.int64]),
    mode=st.sampled_from(AutoresetMode),
    by_itself=st.sets(st.integers(0, 11)),
    by_mask=st.sets(st.integers(0, 11)),
    slot=st.sampled_from([None, ("f4", True), ("f4", False), ("f8", False)]),
    marks=st.booleans(),
)
def test_steps_are_those_of_the_vector(
    lengths: Any,
    steps: Any,
    space: Any,
    dtype: Any,
    mode: Any,
    by_itself: Any,
    by_mask: Any,
    slot: Any,
    marks: bool,
) -> None:
    """The vector's own methods are called in between."""
    ours, theirs = (vector(lengths, mode, dtype=dtype, space=space) for _ in range(2))
    turns = started(ours, reset_slots=marks and mode is AutoresetMode.NEXT_STEP)
    slot = slot if turns.fills_slots else None
    theirs.reset(seed=3)
    theirs.action_space.seed(0)
    for at in range(steps):
        action = theirs.action_space.sample()
        *wanted, infos = map(copy.deepcopy, theirs.step(action))
        if at in by_itself:
            *found, own = ours.step(action)
            finals = own.get("final_obs")
        else:
            found = step(turns, action) if slot is None else step_into(turns, action, *slot)
            finals = turns.final
        for want, got in zip(wanted, found, strict=True):
            assert want.dtype == got.dtype
            np.testing.assert_array_equal(want, got)
        ended = wanted[2] | wanted[3]
        assert (finals is None) == ("final_obs" not in infos)
        for lane in np.flatnonzero(ended) if finals is not None else ():
            np.testing.assert_array_equal(finals[lane], infos["final_obs"][lane])
        if at in by_mask and mode is not AutoresetMode.DISABLED:
            ended = np.arange(len(lengths)) % 2 == 0
        if ended.any() and (at in by_mask or mode is AutoresetMode.DISABLED):
            first = np.array(theirs.reset(options={"reset_mask": ended})[0])
            np.testing.assert_array_equal(first[ended], turns.reset(ended)[0][ended])
        np.testing.assert_array_equal(getattr(ours, ENDED), getattr(theirs, ENDED))
        np.testing.assert_array_equal(own_observations(ours), own_observations(theirs))
    for a, b in zip(ours.envs, theirs.envs, strict=True):
        assert repr(a.calls) == repr(b.calls)


class Lists(Scripted):
    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return [float(each) for each in obs], *rest


class Strided(Scripted):
    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return np.repeat(obs, 2)[::2], *rest


class Narrow(Scripted):
    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs.astype(np.float16), *rest


class Integers(Scripted):
    """Environment whose observations are int64, as wide as declared."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs.astype(np.int64), *rest


@pytest.mark.parametrize("kind", [Lists, Strided, Narrow, Integers])
@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("into", [False, True])
def test_other_observations_are_put_together_as_the_vector_does(
    kind: Any, mode: Any, into: bool
) -> None:
    ours, theirs = (vector((1, 3), mode, made=kind, dtype=np.float64) for _ in range(2))
    turns = started(ours)
    theirs.reset(seed=3)
    wanted = theirs.step(np.array([1, 4]))
    by_slot = into and turns.fills_slots
    found = step_into(turns, [1, 4], "f4", False) if by_slot else step(turns, [1, 4])
    np.testing.assert_array_equal(found[0], wanted[0])
    if mode is AutoresetMode.SAME_STEP:
        assert turns.final.dtype == np.float64
        np.testing.assert_array_equal(turns.final[0], wanted[4]["final_obs"][0])


@pytest.mark.parametrize("shape", [(12,), (6, 1), (3, 2), (1, 6), (2, 3, 1), ()], ids=str)
def test_observations_of_another_shape_are_refused_as_the_vector_does(shape: Any) -> None:
    class Other(Scripted):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.zeros((2, 3), np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(shape, np.float32), *super().step(action)[1:]

    def made() -> Any:
        env = Other()
        env.observation_space = gymnasium.spaces.Box(0, 200, (2, 3), np.float32)
        return env

    env = SyncVectorEnv([made] * 2, autoreset_mode=AutoresetMode.DISABLED)
    turns = started(env)
    wanted = rf"^next/observation at lane 0: expected float32 \[2, 3\] .*{re.escape(str([*shape]))}"
    with pytest.raises(ValueRefused, match=wanted):
        step(turns, [0, 0])
    with pytest.raises(ValueError, match=r"shape|dimension"):
        env.step(np.zeros(2, np.int64))


def test_memory_for_other_lanes_is_refused() -> None:
    turns = started(vector((3, 3)))
    with pytest.raises(ValueError, match="longer"):
        turns.step_into(np.array([1, 2]), np.zeros((3, 3), np.float32), None)


def test_memory_that_is_not_contiguous_is_written_to() -> None:
    turns = started(vector((3, 3)))
    wide = np.zeros((2, 6), np.float32)
    turns.step_into(np.array([1, 2]), wide[:, ::2], None)
    np.testing.assert_array_equal(wide[:, ::2], [[0, 1, 1], [0, 1, 2]])
    assert not wide[:, 1::2].any()


def test_what_a_step_returned_is_not_changed_by_a_reset() -> None:
    turns = started(vector((1, 3)))
    out = turns.step(np.array([1, 2]))
    kept = copy.deepcopy(out[:4])
    turns.reset(np.array([True, False]))
    for before, after in zip(
        (kept[0][0], kept[1][0], *kept[2:]), (out[0][0], out[1][0], *out[2:4]), strict=True
    ):
        np.testing.assert_array_equal(before, after)
    assert out.terminated.tolist() == [True, False]


def test_lanes_that_are_views_of_one_world_are_seen_after_the_last_step() -> None:
    """The result is the same as from the vector."""

    def made() -> Any:
        world = np.zeros((2, 3), np.float32)

        class View(Scripted):
            def reset(self, *, seed: Any = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                return world[self.length], {}

            def step(self, action: Any) -> Any:
                if self.length:  # the last lane advances the world
                    world[:] += 1
                return world[self.length], 0.0, False, False, {}

        return vector((0, 1), made=View)

    ours, theirs = made(), made()
    turns = started(ours)
    theirs.reset(seed=3)
    np.testing.assert_array_equal(step(turns, [0, 0])[0], theirs.step(np.array([0, 0]))[0])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda it: cloudpickle.loads(cloudpickle.dumps(it))]
)
def test_a_copy_steps_by_itself(copied: Any) -> None:
    system = GymnasiumSystem(vector((3, 5)))
    system.reset(None, [1, 2])
    out = system.step([np.array([1, 2])])
    kept = [np.array(each) for each in (out.obs[0], out.reward[0], *out[2:4])]
    other = copied(system)
    for _ in range(2):
        found = other.step([np.array([3, 4])])
    assert found.obs[0].tolist() == [[0, 3, 3], [0, 3, 4]]
    assert found.terminated.tolist() == [True, False]
    for before, after in zip(kept, (out.obs[0], out.reward[0], *out[2:4]), strict=True):
        np.testing.assert_array_equal(before, after)
    first = other.reset(np.array([True, False]), None)[0]
    assert first[0].tolist() == [1, 0, 0]
    found = other.step([np.array([1, 1])])
    assert found.obs[0].tolist() == [[1, 1, 1], [0, 4, 1]]
    assert system.step([np.array([0, 0])]).obs[0].tolist() == [[0, 2, 0], [0, 2, 0]]


def test_an_error_before_the_first_lane_names_none() -> None:
    turns = started(vector((3, 3)))
    step(turns, [0, 0])
    with pytest.raises(ValueError, match=r"lanes|argument") as caught:
        step(turns, [])
    assert exception_report(caught.value, "stepping").lane is None


def test_a_lane_that_ended_is_not_stepped_on() -> None:
    env = vector((1, 3))
    turns = started(env)
    step(turns, [1, 2])
    with pytest.raises(AssertionError, match="lane 0"):
        step(turns, [1, 2])
    assert env.envs[0].at == 1


class Failing(Scripted):
    reply = None

    def step(self, action: Any) -> Any:
        if self.length == 5:
            if isinstance(self.reply, BaseException):
                raise self.reply
            return self.reply
        return super().step(action)


OBS = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (RuntimeError("broken"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        ((OBS, 0.0, False, {}), ValueError),
        (None, TypeError),
        ((OBS, None, False, False, {}), ValueRefused),
        ((OBS, "much", False, False, {}), ValueRefused),
        ((OBS, np.zeros(2), False, False, {}), ValueRefused),
        ((OBS, 0.0, np.zeros(2, bool), False, {}), ValueRefused),
        ((OBS, 0.0, False, np.zeros(2, bool), {}), ValueRefused),
    ],
    ids=str,
)
def test_a_lane_that_fails_is_named_and_steps_go_on(reply: Any, error: Any) -> None:
    env = vector((3, 5, 4), made=Failing)
    turns = started(env)
    env.envs[1].reply = reply
    with pytest.raises(error) as caught:
        step(turns, [1, 2, 3])
    assert exception_report(caught.value, "stepping").lane == 1
    assert [each.at for each in env.envs] == [1, 0, 0]
    env.envs[1].length = 4
    assert step(turns, [1, 2, 3])[0].tolist() == [[0, 2, 1], [0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_actions_as_lanes(count: Any) -> None:
    with pytest.raises(ValueError, match=r"lanes|argument"):
        step(started(vector((3, 3))), [0] * count)


def test_references_are_given_back() -> None:
    """The results of steps are released, also after an error."""

    class Marked(np.ndarray):
        pass

    made, acted = [], []

    class Marking(Scripted):
        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            obs = obs.view(Marked)
            made.append(weakref.ref(obs))
            acted.append(weakref.ref(action))
            if len(made) > 20:
                return obs, 0.0, False
            return obs, *rest

    env = vector((50,), made=Marking, space=SPACES[2])
    turns = started(env)
    action = np.zeros((1, 2), np.float32).view(Marked)
    for _ in range(20):
        step(turns, action)
    with pytest.raises(ValueError, match="expected"):
        step(turns, action)
    gc.collect()
    assert not any(each() is not None for each in acted)
    assert [each() is None for each in made] == [True] * 19 + [False, True]


class Overwriting(Scripted):
    """Environment that returns a view of an array, the array, or every second number of it."""

    form: Any = staticmethod(lambda array: array)

    def _observation(self, action: Any = 0) -> Any:
        if not hasattr(self, "array"):
            self.array = np.zeros(6, np.float32)
        self.array[:3] = self.array[3:] = super()._observation(action)
        return self.form(self.array)


@pytest.mark.parametrize(
    "form",
    [lambda a: a[:3], lambda a: a[::2], lambda a: a[3:]],
    ids=["first half", "every second", "last half"],
)
def test_a_final_observation_that_a_reset_overwrites_is_refused(form: Any) -> None:
    class Formed(Overwriting):
        pass

    Formed.form = staticmethod(form)
    turns = started(vector((3, 2), AutoresetMode.SAME_STEP, made=Formed))
    step(turns, [1, 2])
    with pytest.raises(EnvironmentRefused, match="lane 1 returns its observations in one array"):
        step(turns, [1, 2])


def test_a_final_observation_apart_from_the_first_one_is_taken() -> None:
    """One array holds both observations, and the lane returns its halves in turn."""
    world = np.zeros((2, 3), np.float32)

    class Apart(Scripted):
        def _observation(self, action: Any = 0) -> Any:
            half = world[int(self.at == self.length)]
            half[:] = super()._observation(action)
            return half[::-1]

    turns = started(vector((1,), AutoresetMode.SAME_STEP, made=Apart))
    assert step(turns, [4])[0].tolist() == [[0, 0, 1]]
    assert turns.final.tolist() == [[4, 1, 0]]


class FailingResets(Scripted):
    reply = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if self.episode >= 0 and self.length == 2:
            if isinstance(self.reply, BaseException):
                raise self.reply
            return self.reply
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (RuntimeError("broken"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        ((OBS,), ValueError),
        (None, TypeError),
        ((np.zeros(4, np.float32), {}), ValueRefused),
    ],
    ids=str,
)
def test_a_reset_within_a_step_that_fails_names_its_lane(reply: Any, error: Any) -> None:
    env = vector((3, 2, 4), AutoresetMode.SAME_STEP, made=FailingResets)
    turns = started(env)
    env.envs[1].reply = reply
    step(turns, [1, 2, 3])
    with pytest.raises(error) as caught:
        step(turns, [1, 2, 3])
    assert exception_report(caught.value, "stepping").lane == 1
    assert [each.at for each in env.envs] == [2, 2, 2 if error is ValueRefused else 1]


def test_a_final_observation_of_another_shape_is_refused() -> None:
    class Other(Scripted):
        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return (obs[:2] if self.at == self.length else obs), *rest

    turns = started(vector((3, 1), AutoresetMode.SAME_STEP, made=Other))
    with pytest.raises(ValueRefused, match=r"^next/observation at lane 1: expected float32 \[3\]"):
        step(turns, [0, 0])


def test_which_vectors_are_stepped_so() -> None:
    assert not why_not(vector())
    assert not why_not(vector(mode=AutoresetMode.NEXT_STEP))
    assert not why_not(vector(mode=AutoresetMode.SAME_STEP))
    assert "not a bare SyncVectorEnv" in why_not(RecordEpisodeStatistics(vector()))
    assert "that is not Gymnasium's" in why_not(vector(space=gymnasium.spaces.Dict(a=SPACES[0])))

    class Own(SyncVectorEnv):
        pass

    assert "is a Own" in why_not(Own([Scripted]))

    class OwnBox(gymnasium.spaces.Box):
        pass

    class Nested(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gymnasium.spaces.Dict(a=OwnBox(0, 1, (3,)))

    own = SyncVectorEnv([Nested])
    assert "that is not Gymnasium's" in why_not(own)
    told = vector()
    merge = told._add_info
    install(told, {"told"})
    assert stepping_vector(traits_of(told, infos=True, many_rewards=False)).way == "in turn"
    told._add_info = lambda *args: merge(*args)
    assert stepping_vector(traits_of(told, infos=False, many_rewards=False)).way == "in turn"
    assert "changed" in stepping_vector(traits_of(told, infos=True, many_rewards=False)).because
    changed = vector()
    changed.envs = tuple(changed.envs)
    assert "was changed" in why_not(changed)


@pytest.mark.parametrize("name", ["step", "reset"])
def test_methods_that_somebody_put_in_are_called(name: Any) -> None:
    env = vector((1,))
    system = GymnasiumSystem(env)
    system.reset(None, [1])
    called, real = [], getattr(env, name)
    system.step([np.array([1])])
    setattr(env, name, lambda *args, **kwargs: (called.append(name), real(*args, **kwargs))[1])
    system.reset(np.array([True]), None)
    system.step([np.array([1])])
    assert called == [name]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_system_steps_its_lanes_so(mode: Any, monkeypatch: Any) -> None:
    """Resets by mask use the same path, except those with a caller's options."""
    env = vector((1, 3), mode)
    system = GymnasiumSystem(env, reset_slots="avoid" if mode.value == "NextStep" else "mask")
    system.reset(None, [1, 2])
    counted = []
    for name in ("step", "reset"):
        real = getattr(SequentialStep, name)
        monkeypatch.setattr(
            SequentialStep,
            name,
            lambda self, *args, name=name, real=real: (counted.append(name), real(self, *args))[1],
        )
    out = system.step([np.array([1, 2])])
    within = mode is AutoresetMode.SAME_STEP
    assert out.obs[0].tolist() == [[1, 0, 0] if within else [0, 1, 1], [0, 1, 2]]
    ended = np.array(out.terminated)
    assert system.reset(ended, None)[0][0].tolist() == [2 if within else 1, 0, 0]
    assert counted == ["step", "reset"]
    system.reset(ended, None, options={"at": 5})
    assert counted == ["step", "reset"]
    assert env.envs[0].calls[-1] == ("reset", None, {"at": 5})


# --- infos and nested observations ----------------------------------------------------------------

TEXT = gymnasium.spaces.Text(4, charset="0123456789")
FORMS: dict[str, tuple[Any, Any]] = {
    "array": (gymnasium.spaces.Box(0, 200, (3,), np.float32), lambda v: v),
    "number": (gymnasium.spaces.Discrete(200), lambda v: int(v[1])),
    "of NumPy": (gymnasium.spaces.Discrete(200), lambda v: np.int64(v[1])),
    "text": (TEXT, lambda v: str(int(v[0]))),
    "dict": (
        gymnasium.spaces.Dict(
            a=gymnasium.spaces.Box(0, 200, (2,), np.float64),
            b=gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(200), TEXT]),
            c=gymnasium.spaces.MultiBinary(2),
        ),
        lambda v: {
            "c": np.array([v[0] % 2, v[1] % 2], np.int8),
            "a": np.array(v[:2], np.float64),
            "b": (np.int64(v[0]), str(int(v[1]))),
            "more": 5,
        },
    ),
    "tuple": (
        gymnasium.spaces.Tuple([gymnasium.spaces.Box(0, 200, (3,), np.float32)] * 2),
        lambda v: (v, [float(each) for each in v]),
    ),
}
INFOS: dict[str, tuple[Info, Any]] = {
    "float": (Info("x", dtype="float64"), lambda v: {"x": float(v[1]) / 2}),
    "int": (Info("x", dtype="int64"), lambda v: {"x": int(v[0]) - 3, "_x": 7}),
    "bool": (Info("x", dtype="bool"), lambda v: {"x": bool(v[1] % 2)}),
    "of NumPy": (Info("x", dtype="float32"), lambda v: {"x": np.float32(v[1]) / 4}),
    "other": (Info("x", dtype="float64"), lambda v: {"x": int(v[1]) if v[1] % 2 else 0.5}),
    "array": (Info("x", dtype="int32", shape=(2,)), lambda v: {"x": np.int32([v[1], v[0]])}),
    "list": (Info("x", dtype="float64", shape=(2,)), lambda v: {"x": [v[1], 0.25]}),
    "nested": (Info("p/x", dtype="float64"), lambda v: {"p": {"x": float(v[1]), "y": None}}),
    "sometimes": (
        Info("p/x", dtype="int64", fill=-1),
        lambda v: {"p": {"x": int(v[0])}} if v[1] % 2 else {},
    ),
    "none": (
        Info("x", dtype="float64", fill=2),
        lambda v: {"x": None if v[1] % 2 else 1.5},
    ),
    "at ends": (
        Info("x", dtype="float64", fill=0),
        lambda v: {"x": 3.5} if v[1] == 2 else {"p": 1},
    ),
}
SOME_INFOS = (
    st.lists(st.sampled_from([*INFOS]), max_size=1)
    | st.just(["float", "sometimes"])
    | st.just(["at ends", "nested"])
)


class Telling(Scripted):
    def __init__(self, length: Any = 3, *, form: str = "array", infos: Any = ()) -> None:
        super().__init__(length)
        self.observation_space, self.take = FORMS[form]
        self.infos = infos

    def _seen(self, v: Any) -> Any:
        info: dict[str, Any] = {}
        for name in self.infos:
            info |= INFOS[name][1](v)
        return self.take(v), info

    def _observation(self, action: Any = 0) -> Any:
        return np.float32([self.episode, self.at, abs(float(np.sum(action)))])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._seen(super().reset(seed=seed)[0])

    def step(self, action: Any) -> Any:
        v, *rest, _ = super().step(action)
        obs, info = self._seen(v)
        return obs, *rest, info


def without(*off: str, call: Any) -> Any:
    with fast_paths.switched_off(*off):
        return call()


def same_rows(wanted: Any, found: Any, lanes: Any = slice(None)) -> None:
    for want, got in zip(wanted, found, strict=True):
        assert want.dtype == got.dtype
        np.testing.assert_array_equal(want[lanes], got[lanes])


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.integers(1, 9),
    mode=st.sampled_from(AutoresetMode),
    form=st.sampled_from([*FORMS]),
    infos=SOME_INFOS,
)
def test_infos_and_nested_observations_are_those_of_the_vector(
    lengths: Any, steps: Any, mode: Any, form: Any, infos: Any
) -> None:
    def system() -> Any:
        env = vector(lengths, mode, made=Telling, form=form, infos=infos)
        return GymnasiumSystem(env, infos=[INFOS[name][0] for name in infos])

    ours, theirs = system(), system()
    seeds = [*range(len(lengths))]
    same_rows(
        without("sequential", call=lambda: theirs.reset(None, seeds)), ours.reset(None, seeds)
    )
    assert (ours.stepped_by.way, theirs.stepped_by.way) == ("in turn", "vector")
    for _ in range(steps):
        action = ours.env.action_space.sample()
        wanted, found = theirs.step([action]), ours.step([action])
        ended = wanted.terminated | wanted.truncated
        same_rows(
            (*wanted.obs, *wanted.reward, *wanted[2:4]), (*found.obs, *found.reward, *found[2:4])
        )
        assert (wanted.final is None) == (found.final is None)
        if wanted.final is not None:
            same_rows(wanted.final, found.final, ended)
        if mode is AutoresetMode.DISABLED and ended.any():
            same_rows(theirs.reset(ended, None), ours.reset(ended, None), ended)
        if infos:
            np.testing.assert_array_equal(ours.infos.steps, theirs.infos.steps)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({}, "got none at lane 1, step 0"),
        ({"x": "much"}, "expected a number or an array of numbers, got .* at lane 1, step 0"),
        ({"x": 0.5}, "int64 holds without loss, got .* at lane 1, step 0"),
        ({"x": 2**70}, "at lane 1, step 0"),
        ({"x": [1, 2]}, "expected a value of shape .* at lane 1, step 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_an_info_that_does_not_fit_names_its_lane(value: Any, wanted: Any, mode: Any) -> None:
    class Wrong(Telling):
        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            return *rest, info if self.length == 3 else value

    env = vector((3, 1), mode, made=Wrong, infos=["int"])
    system = GymnasiumSystem(env, infos=[INFOS["int"][0]])
    system.reset(None, [0, 1])
    assert system.stepped_by.way == "in turn"
    with pytest.raises(TransitionError, match=wanted) as caught:
        system.step([np.array([0, 0])])
    assert exception_report(caught.value, "stepping").lane == 1


def test_a_part_of_an_observation_that_is_missing_names_its_lane() -> None:
    class Lacking(Telling):
        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return ({"a": obs["a"], "c": obs["c"]} if self.length == 5 else obs), *rest

    env = vector((3, 5), made=Lacking, form="dict")
    system = GymnasiumSystem(env)
    system.reset(None, [0, 1])
    with pytest.raises(ValueRefused, match=r"^next/b/0 at lane 1: .*, got none in dict"):
        system.step([np.array([0, 0])])


# --- within wrappers ------------------------------------------------------------------------------


class Keeping(VectorWrapper):
    """Wrapper that keeps the returned values of its vector, and copies of them."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.given: list[Any] = []

    def step(self, actions: Any) -> Any:
        returned = self.env.step(actions)
        self.given.append((returned, copy.deepcopy(returned)))
        return returned


def same(wanted: Any, found: Any) -> None:
    """Check for equal types, dtypes, order of keys, and bits."""
    assert type(wanted) is type(found)
    if isinstance(wanted, dict):
        assert [*wanted] == [*found]
        wanted, found = [*wanted.values()], [*found.values()]
    if isinstance(wanted, (tuple, list)) or getattr(wanted, "dtype", "") == "O":
        assert len(wanted) == len(found)
        for want, got in zip(wanted, found, strict=True):
            same(want, got)
    elif isinstance(wanted, np.ndarray):
        assert (wanted.dtype, wanted.shape) == (found.dtype, found.shape)
        assert wanted.tobytes() == found.tobytes()
    else:
        assert wanted == found


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.integers(1, 9),
    mode=st.sampled_from(AutoresetMode),
    form=st.sampled_from([*FORMS]),
    infos=SOME_INFOS,
    are_columns=st.booleans(),
    copies=st.booleans(),
    by_itself=st.sets(st.integers(0, 8)),
)
def test_within_wrappers_the_vector_returns_what_its_own_step_does(
    lengths: Any,
    steps: Any,
    mode: Any,
    form: Any,
    infos: Any,
    are_columns: Any,
    copies: Any,
    by_itself: Any,
) -> None:
    """The vector is also stepped by hand in between."""
    ours, theirs = (
        Keeping(vector(lengths, mode, made=Telling, form=form, infos=infos)) for _ in range(2)
    )
    for env in (ours, theirs):
        env.unwrapped.copy = copies
        if are_columns:
            install(env, {"x"})
        env.reset(seed=3)
    within, kept = WithinWrappers(ours, None), []
    theirs.action_space.seed(0)
    for at in range(steps):
        action = theirs.action_space.sample()
        theirs.step(action)
        now = theirs.given[-1][1]
        if at in by_itself:
            ours.step(action)
        else:
            within.call(action)
            assert within.checked == (form not in ("text", "dict", "tuple"))
        same(now, ours.given[-1][1])
        assert "step" not in vars(ours.unwrapped)
        ended = now[2] | now[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            asked, others = {"reset_mask": ended}, {"reset_mask": ended.copy()}
            by_hand = at in by_itself
            first = ours.reset(options=asked) if by_hand else within.call_reset(ended, asked)
            same(theirs.reset(options=others), first)
            assert asked == others == {}
            kept.append((first, copy.deepcopy(first)))
            assert "reset" not in vars(ours.unwrapped)
        same(getattr(theirs.unwrapped, ENDED), getattr(ours.unwrapped, ENDED))
        same(own_observations(theirs), own_observations(ours))
        same(theirs.unwrapped._observations, ours.unwrapped._observations)
    for returned, then in (*ours.given, *kept) if copies else ():
        same(then, returned)  # no returned value was overwritten
    for a, b in zip(ours.unwrapped.envs, theirs.unwrapped.envs, strict=True):
        assert repr(a.calls) == repr(b.calls)


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.integers(1, 9),
    mode=st.sampled_from(AutoresetMode),
    infos=st.lists(st.sampled_from(["float", "sometimes", "at ends", "array"]), max_size=1),
    way=st.sampled_from(["through", "within"]),
)
@settings(max_examples=50)
def test_statistics_are_the_same_whichever_way_lanes_are_stepped(
    lengths: Any, steps: Any, mode: Any, infos: Any, way: str
) -> None:
    wanted = [Info("episode/r", dtype="float64", fill=-1), Info("episode/l", dtype=int, fill=0)]
    wanted += [INFOS[name][0] for name in infos]

    def system() -> Any:
        env = RecordEpisodeStatistics(vector(lengths, mode, made=Telling, infos=infos))
        return GymnasiumSystem(env, infos=wanted)

    ours, theirs = system(), system()
    seeds = [*range(len(lengths))]
    first = without("sequential", call=lambda: theirs.reset(None, seeds))
    slower = ["wrappers"] if way == "within" else []
    same_rows(first, without(*slower, call=lambda: ours.reset(None, seeds)))
    assert (ours.stepped_by.way, theirs.stepped_by.way) == (way, "vector")
    told = 0
    for _ in range(steps):
        action = ours.env.action_space.sample()
        one, other = theirs.step([action]), ours.step([action])
        ended = one.terminated | one.truncated
        same_rows((*one.obs, *one.reward, *one[2:4]), (*other.obs, *other.reward, *other[2:4]))
        none = mode is not AutoresetMode.SAME_STEP or not ended.any()
        assert [one.final is None, other.final is None] == [none, none]
        shown, last = other.obs[1:5], (other.final or other.obs)[1:5]
        lengths_of = last[2][ended].tolist()
        given = ended if none else np.zeros_like(ended)  # a reset in the same step gives none
        assert [last[1][ended].all(), *(shown[i].tolist() == given.tolist() for i in (1, 3))] == (
            [True] * 3
        )
        assert last[0][ended] == pytest.approx([sum(range(1, n + 1)) + n / 10 for n in lengths_of])
        assert (shown[0][~given] == -1).all()
        told += int(ended.sum())
        if one.final is not None:
            same_rows(one.final, other.final, ended)
        if mode is AutoresetMode.DISABLED and ended.any():
            same_rows(theirs.reset(ended, None), ours.reset(ended, None), ended)
        np.testing.assert_array_equal(ours.infos.steps, theirs.infos.steps)
    assert told == ours.env.episode_count


WRAPPERS = {
    "statistics": RecordEpisodeStatistics,
    "normal": NormalizeReward,
    "clip": partial(ClipReward, min_reward=0.5, max_reward=2.2),
    "half": partial(TransformReward, func=lambda reward: np.divide(reward, 2, out=reward)),
    "each": partial(
        VectorizeTransformReward,
        wrapper=gymnasium.wrappers.TransformReward,
        func=lambda reward: reward * 3,
    ),
}
"""Wrappers that only read rewards and ends; "half" also writes to the rewards."""


def remembered(env: Any) -> list[Any]:
    """Return the state of the wrappers around a vector, except for times."""
    found = []
    for each in wrappers_of(env):
        names = [name for name in states_of_lanes(each) if name != "episode_start_times"]
        found += [getattr(each, name) for name in names]
        if isinstance(each, RecordEpisodeStatistics):
            queues = each.return_queue, each.length_queue
            found += [each.episode_count, [*map(list, queues)], len(each.time_queue)]
        if isinstance(each, NormalizeReward):
            found += [each.return_rms.mean, each.return_rms.var, each.return_rms.count]
    return found


def began(env: Any) -> Any:
    """Return the times at which the statistics of lanes began."""
    found = [each for each in wrappers_of(env) if isinstance(each, RecordEpisodeStatistics)]
    return found[0].episode_start_times.copy() if found else np.zeros(env.num_envs)


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.integers(1, 12),
    mode=st.sampled_from(AutoresetMode),
    form=st.sampled_from([*FORMS]),
    infos=SOME_INFOS,
    chain=st.lists(st.sampled_from([*WRAPPERS]), min_size=1, max_size=3, unique=True),
    by_itself=st.sets(st.integers(0, 11)),
    by_mask=st.sets(st.integers(0, 11)),
)
@example([4, 3], 6, AutoresetMode.DISABLED, "array", [], ["half", "statistics"], {2}, set())
@settings(max_examples=50)
def test_through_wrappers_all_is_as_by_their_own_steps(
    lengths: Any,
    steps: Any,
    mode: Any,
    form: Any,
    infos: Any,
    chain: Any,
    by_itself: Any,
    by_mask: Any,
) -> None:
    """The wrappers' state is compared too, also after manual steps in between."""
    columns = [Info("episode/r", dtype="float64", fill=-1), Info("episode/l", dtype=int, fill=0)]
    columns = [*(columns if "statistics" in chain else ()), *(INFOS[each][0] for each in infos)]

    def system() -> Any:
        env = vector(lengths, mode, made=Telling, form=form, infos=infos)
        for name in chain:
            env = WRAPPERS[name](env)
        return GymnasiumSystem(env, infos=columns)

    ours, theirs = system(), system()
    seeds = [*range(len(lengths))]
    same_rows(
        without("sequential", call=lambda: theirs.reset(None, seeds)), ours.reset(None, seeds)
    )
    assert (ours.stepped_by.way, theirs.stepped_by.way) == ("through", "vector")
    for at in range(steps):
        action = ours.env.action_space.sample()
        since = began(ours.env), began(theirs.env)
        if at in by_itself:
            wanted, found = theirs.env.step(action), ours.env.step(action)
            for index in (1, 2, 3):
                same(wanted[index], found[index])
            ended = wanted[2] | wanted[3]
        else:
            one, other = theirs.step([action]), ours.step([action])
            ended = one.terminated | one.truncated
            same_rows((*one.obs, *one.reward, *one[2:4]), (*other.obs, *other.reward, *other[2:4]))
            assert (one.final is None) == (other.final is None)
            if one.final is not None:
                same_rows(one.final, other.final, ended)
        if at in by_mask and mode is not AutoresetMode.DISABLED:
            ended = np.arange(len(lengths)) % 2 == 0
        if ended.any() and (at in by_mask or mode is AutoresetMode.DISABLED):
            same_rows(theirs.reset(ended, None), ours.reset(ended, None), ended)
        for want, got in zip(remembered(theirs.env), remembered(ours.env), strict=True):
            same(want, got)
        later = [began(each.env) > then for each, then in zip((ours, theirs), since, strict=True)]
        same(*later)
        for get in (own_observations, lambda env: np.asarray(getattr(env.unwrapped, ENDED))):
            same(get(theirs.env), get(ours.env))
        np.testing.assert_array_equal(ours.infos.steps, theirs.infos.steps)
    for a, b in zip(ours.env.unwrapped.envs, theirs.env.unwrapped.envs, strict=True):
        assert repr(a.calls) == repr(b.calls)


def test_infos_of_a_step_are_not_changed_by_a_reset_through_wrappers() -> None:
    system = GymnasiumSystem(RecordEpisodeStatistics(vector((1, 3))))
    system.reset(None, [1, 2])
    info = system.env.step(np.array([0, 0]))[-1]
    system.reset(np.array([True, False]), None)
    assert info["_episode"].tolist() == [True, False]
    assert system.env.prev_dones.tolist() == [False, False]


def test_an_info_of_a_lane_that_is_named_as_the_statistics_is_refused_by_their_wrapper() -> None:
    class NamedColumn(Scripted):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"episode": 1} if self.length == 3 else {}

    system = GymnasiumSystem(RecordEpisodeStatistics(vector((1, 3), made=NamedColumn)))
    system.reset(None, [1, 2])
    assert system.stepped_by.way == "through"
    with pytest.raises(ValueError, match=r"this key already exists in info: .*'episode'"):
        system.step([np.array([0, 0])])


def test_an_interrupt_between_two_lines_leaves_a_vector_that_steps_itself() -> None:
    """The first line of the step through wrappers sets an attribute that its last line removes."""
    system = GymnasiumSystem(RecordEpisodeStatistics(vector((9, 9))))
    system.reset(None, [1, 2])
    system.step([np.array([1, 2])])
    vars(system.env.unwrapped)["step"] = system._in_turn._as_returned
    assert system._in_turn.are_alone
    assert system.env.step(np.array([3, 4]))[0].tolist() == [[0, 2, 3], [0, 2, 4]]
    assert "step" not in vars(system.env.unwrapped)


def subclassed(env: Any) -> Any:
    class Own(ClipReward):
        pass

    return Own(env, 0, 1)


@pytest.mark.parametrize(
    ("wrap", "others"),
    [
        (subclassed, "Own"),
        (lambda env: ClipReward(Keeping(RecordEpisodeStatistics(env)), 0, 1), "Keeping"),
        (lambda env: RecordEpisodeStatistics(env, stats_key="final_info"), "RecordEpisodeStati"),
    ],
)
def test_wrappers_that_may_look_at_more_are_handed_all(wrap: Any, others: str) -> None:
    system = GymnasiumSystem(wrap(vector((9, 9))))
    system.reset(None, [1, 2])
    assert system.stepped_by.way == "within"
    assert f"a wrapper may look at more than rewards: {others}" in system.stepped_by.because


def test_a_patched_class_of_wrappers_is_handed_all(monkeypatch: Any) -> None:
    real = RecordEpisodeStatistics.step
    monkeypatch.setattr(RecordEpisodeStatistics, "step", lambda self, action: real(self, action))
    system = GymnasiumSystem(RecordEpisodeStatistics(vector((9, 9))))
    system.reset(None, [1, 2])
    assert system.stepped_by.way == "within"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_through_wrappers_a_step_that_somebody_put_in_is_called(depth: int) -> None:
    env = vector((9, 9))
    chain = [env, RecordEpisodeStatistics(env), ClipReward(RecordEpisodeStatistics(env), 0, 1)]
    chain[2].env = chain[1]
    system = GymnasiumSystem(chain[2])
    system.reset(None, [1, 2])
    assert system.stepped_by.way == "through"
    at, seen = chain[depth], []
    real = at.step

    def looking(action: Any) -> Any:
        out = real(action)
        seen.append(out[0].tolist())
        return out

    at.step = looking
    out = system.step([np.array([1, 2])])
    assert seen == [out.obs[0].tolist()] == [[[0, 1, 1], [0, 1, 2]]]
    assert out.reward[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("wrap", "way"), [(Keeping, "within"), (RecordEpisodeStatistics, "through")]
)
def test_a_lane_that_fails_within_wrappers_is_named_and_the_vector_left_as_it_was(
    wrap: Any, way: str
) -> None:
    class Failing(Scripted):
        def step(self, action: Any) -> Any:
            if action == 4:
                raise RuntimeError("no")
            obs, *rest = super().step(action)
            return (obs[:2] if action == 3 else obs), *rest

    system = GymnasiumSystem(wrap(vector((9, 9), made=Failing)))
    system.reset(None, [1, 2])
    assert system.stepped_by.way == way
    with pytest.raises(ValueRefused, match=r"at lane 1: .*got float32 \[2\]"):
        system.step([np.array([1, 3])])
    with pytest.raises(RuntimeError, match="no") as caught:
        system.step([np.array([1, 4])])
    assert exception_report(caught.value, "stepping").lane == 1
    assert "step" not in vars(system.env.unwrapped)
    assert system.step([np.array([1, 1])]).obs[0][:, 1].tolist() == [3, 2]


def test_within_wrappers_a_step_that_somebody_put_in_is_called() -> None:
    system = GymnasiumSystem(Keeping(vector((9, 9))))
    system.reset(None, [1, 2])
    inner = system.env.unwrapped
    called, real = [], inner.step
    mine = inner.step = lambda *args: (called.append(1), real(*args))[1]
    system.step([np.array([1, 1])])
    assert called == [1]
    assert inner.step is mine


@pytest.mark.parametrize("change", ["a subclass", "a merge of its own", "lanes", "a patched class"])
def test_a_changed_vector_within_wrappers_steps_itself(change: str, monkeypatch: Any) -> None:
    class Own(SyncVectorEnv):
        pass

    inner = (Own if change == "a subclass" else SyncVectorEnv)([Scripted] * 2, copy=False)
    if change == "a merge of its own":
        merge = inner._add_info
        inner._add_info = lambda *args: merge(*args)
    elif change == "lanes":
        inner.envs = tuple(inner.envs)
    elif change == "a patched class":
        real = SyncVectorEnv.step
        monkeypatch.setattr(SyncVectorEnv, "step", lambda self, action: real(self, action))
    system = GymnasiumSystem(Keeping(inner))
    system.reset(None, [1, 2])
    assert system.stepped_by.way == "vector"
    assert "the environment is a Keeping, not a bare SyncVectorEnv" in system.stepped_by.because
    assert system.step([np.array([1, 1])]).obs[0][:, 1].tolist() == [1, 1]


def test_copies_of_a_system_step_their_own_vector_within_wrappers() -> None:
    system = GymnasiumSystem(Keeping(vector((9, 9))))
    system.reset(None, [1, 2])
    other = cloudpickle.loads(cloudpickle.dumps(system))
    system.step([np.array([1, 1])])
    assert other.step([np.array([2, 2])]).obs[0].tolist() == [[0, 1, 2]] * 2
    assert [len(each.env.given) for each in (system, other)] == [1, 1]


def test_copies_of_a_system_step_their_own_vector_through_wrappers() -> None:
    infos = [Info("episode/r", dtype="float64", fill=-1)]
    system = GymnasiumSystem(RecordEpisodeStatistics(vector((3, 2))), infos=infos)
    system.reset(None, [1, 2])
    system.step([np.array([1, 1])])
    other = cloudpickle.loads(cloudpickle.dumps(system))
    found = [each.step([np.array([2, 2])]).obs[1].tolist() for each in (system, other)]
    assert found[0] == found[1] == pytest.approx([-1, 3.2])
    assert [each.env.episode_count for each in (system, other)] == [1, 1]
    assert system.infos is not other.infos
