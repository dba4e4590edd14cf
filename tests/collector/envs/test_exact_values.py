"""Each value of an environment is stored exactly, or an error names the reason.

The oracle is the environment, stepped by hand. Each cell of a grid (spaces, forms of values, modes)
equals it bit for bit, or is refused. The error names the key, lane, step, expected value and actual
value.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymWrapper, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import GRUModule, LSTMModule

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.envs.exact import (
    ExactRow,
    RoundedWarning,
    reward_of,
    terminated_of,
)
from tallyroll.collector.envs.stepping.arrays import as_flags, fitting
from tallyroll.collector.errors import (
    ArgumentError,
    SpaceError,
    TransitionError,
    ValueRefused,
)
from tallyroll.storage import MemmapStorage, fast_paths, open_storage, verify

import toy_systems
from collect_kit import collect, joined
from worker_kit import collect_all, in_threads, start

MODES = list(AutoresetMode)
BUDGET: dict[str, Any] = {"frames_per_batch": 6, "total_frames": 18, "seed": 0}
LENGTH = 4

Form = Callable[[Any], Any]


def same(value: Any) -> Any:
    return value


class Given(gym.Env[Any, Any]):
    """Environment that observes ``value(episode, step)`` in a ``form``.

    Rewards and flags have forms, too.
    """

    action_space = spaces.Discrete(2)

    def __init__(
        self,
        space: spaces.Space[Any] | None = None,
        form: Form = same,
        *,
        value: Callable[[int, int], Any] | None = None,
        reward: Form = same,
        flag: Form = same,
        after: int = 0,
    ) -> None:
        self.observation_space = spaces.Box(-9, 9, (2,), np.float32) if space is None else space
        self.form, self.value, self.after = form, value or self.drawn, after
        self.reward, self.flag = reward, flag
        self.episode, self.time = -1, 0

    def drawn(self, episode: int, time: int) -> Any:
        self.observation_space.seed(100 * episode + time)
        return self.observation_space.sample()

    def look(self) -> Any:
        seen = self.value(self.episode, self.time)
        return self.form(seen) if self.time >= self.after else seen

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        self.episode, self.time = self.episode + 1, 0
        return self.look(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Execute any action."""
        self.time += 1
        over = self.time == LENGTH
        if self.time < self.after:
            return self.look(), float(self.time), over, False, {}
        return self.look(), self.reward(self.time), self.flag(over), self.flag(False), {}


def vec(mode: AutoresetMode, *args: Any, lanes: int = 2, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Given, *args, **kwargs)] * lanes, autoreset_mode=mode)


def leaves(value: Any, key: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Flatten an observation by the keys of its columns."""
    if isinstance(value, dict):
        return {k: v for name, part in value.items() for k, v in leaves(part, (*key, name)).items()}
    if isinstance(value, tuple):
        parts = enumerate(value)
        key = key or ("observation",)
        return {k: v for at, part in parts for k, v in leaves(part, (*key, str(at))).items()}
    return {key or ("observation",): value}


def require_equal(rows: Any, env: Given) -> None:
    """Check that the rows equal those of the environment, stepped by hand."""
    first = rows["collector", "traj_ids"].numpy() // 2
    for row, episode, time in zip(rows, first, rows["collector", "step"].tolist(), strict=True):
        for prefix, at in ((), time), (("next",), time + 1):
            env.episode, env.time = int(episode), at
            for key, wanted in leaves(env.look()).items():
                got = row[(*prefix, *key)].numpy()
                exact = np.asarray(wanted).astype(got.dtype)
                assert got.shape == np.shape(wanted), key
                assert got.tobytes() == exact.tobytes(), (key, got, wanted)


PLAIN: dict[str, spaces.Space[Any]] = {
    **{
        np.dtype(kind).name: spaces.Box(0, 100, (2, 3), kind)
        for kind in (np.float16, np.float32, np.float64, np.uint8, np.int8, np.int16, np.int64)
    },
    "bool": spaces.Box(0, 1, (3,), bool),
    "uint16": spaces.Box(0, 65535, (3,), np.uint16),
    "uint32": spaces.Box(0, 2**32 - 1, (3,), np.uint32),
    "uint64": spaces.Box(0, 2**64 - 1, (3,), np.uint64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "one": spaces.Discrete(1, start=3),
    "discrete": spaces.Discrete(5, start=-2),
    "several": spaces.MultiDiscrete([3, 4], start=[1, -1]),
    "bits": spaces.MultiBinary(3),
    "dict": spaces.Dict(a=spaces.Box(0, 9, (2,), np.int16), b=spaces.Dict(c=spaces.Discrete(3))),
    "tuple": spaces.Tuple((spaces.Box(0, 9, (2,), np.uint16), spaces.MultiBinary(2))),
}


def each(form: Form) -> Form:
    """Apply ``form`` to every leaf."""

    def deep(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: deep(part) for name, part in value.items()}
        return tuple(map(deep, value)) if isinstance(value, tuple) else form(value)

    return deep


def shifted(value: Any) -> Any:
    return np.asarray(value, np.float64) + 0.25


def ragged(value: Any) -> Any:
    return [[1, 2], [3]]


FORMS: dict[str, Form] = {
    "as it is": same,
    "float32": each(lambda v: np.asarray(v, np.float32)),
    "float64": each(lambda v: np.asarray(v, np.float64)),
    "int64": each(lambda v: np.asarray(v).astype(np.int64)),
    "a list": each(lambda v: np.asarray(v).tolist()),
    "torch": each(lambda v: torch.from_numpy(np.array(v))),
    "big endian": each(lambda v: np.asarray(v).astype(np.asarray(v).dtype.newbyteorder(">"))),
    "strided": each(lambda v: np.repeat(np.asarray(v)[..., None], 2, -1)[..., 0]),
    "fractions": each(shifted),
    "far": each(lambda v: np.asarray(v).astype(np.int64) + 2**40 + 1),
    "below": each(lambda v: np.asarray(v).astype(np.int64) - 2**40),
    "infinite": each(lambda v: np.asarray(v, np.float64) + 1e300),
    "an axis more": each(lambda v: np.asarray(v)[None]),
    "an axis behind": each(lambda v: np.asarray(v)[..., None]),
    "another way round": each(lambda v: np.ascontiguousarray(np.transpose(v))),
    "one number": each(lambda v: np.ravel(v)[0]),
    "text": each(str),
    "none": each(lambda v: None),
    "ragged": each(ragged),
    "complex": each(lambda v: np.asarray(v) + 1j),
}


@pytest.mark.parametrize("space", PLAIN)
def test_an_observation_is_in_its_row_as_it_is_or_refused(space: str) -> None:
    """Forms and modes rotate, so that each space and each form meets all modes."""
    refused = set()
    for number, (name, form) in enumerate(FORMS.items()):
        mode = MODES[(number + list(PLAIN).index(space)) % len(MODES)]
        for after in (0, 2) if space in ("float32", "dict") else (number % 2 * 2,):
            args = PLAIN[space], form
            rounded = False
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    rows = joined(collect(vec(mode, *args, after=after), **BUDGET)[0])
                rounded = any(issubclass(each.category, RoundedWarning) for each in caught)
                require_equal(rows, Given(*args, after=after))
            except TransitionError as error:
                said = str(error)
                assert re.match(r"(next/)?(a|b/c|observation(/\d)?)\b", said), said
                assert re.search(r"at lane 0, step \d of its trajectory.*expected|got", said), said
                if isinstance(error, ValueRefused):
                    assert said.startswith("next/") == (after > 0), said
                    assert f"at lane 0, step {max(0, after - 1)} of its trajectory: " in said
                refused.add(name)
            if PLAIN[space].dtype is not None and PLAIN[space].dtype.kind in "iub":
                assert not rounded
    assert {"text", "none", "ragged", "an axis more", "an axis behind", "infinite"} <= refused
    assert "as it is" not in refused
    assert "torch" not in refused or space in ("dict", "tuple")


REWARDS: dict[str, tuple[Form, bool]] = {
    "float": (float, True),
    "int": (int, True),
    "bool": (lambda t: t > 2, True),
    "numpy bool": (lambda t: np.bool_(t > 2), True),
    "float16": (np.float16, True),
    "float32": (np.float32, True),
    "float64": (np.float64, True),
    "uint8": (np.uint8, True),
    "int64": (np.int64, True),
    "0-d": (np.array, True),
    "0-d of torch": (torch.tensor, True),
    "largest": (lambda t: 2**24 * t, True),
    "even": (lambda t: np.int64(2**25 + 4), True),
    "longdouble": (lambda t: np.longdouble(t), True),
    "rounded": (lambda t: 0.1 * t, True),
    "beyond float32, integer": (lambda t: 2**24 + 1, False),
    "beyond float32, int64": (lambda t: np.int64(2**24 + 1), False),
    "beyond float64": (lambda t: 2**53 + 1, False),
    "huge integer": (lambda t: 10**400, False),
    "overflowing": (lambda t: 1e39, False),
    "overflowing, float64": (lambda t: np.float64(-1e300), False),
    "(1,)": (lambda t: np.array([float(t)]), False),
    "(2,)": (lambda t: np.array([1.0, 2.0]), False),
    "(0,)": (lambda t: np.array([]), False),
    "torch (1,)": (lambda t: torch.tensor([1.0]), False),
    "list": (lambda t: [1.0], False),
    "ragged": (lambda t: [[1.0, 2.0], [3.0]], False),
    "none": (lambda t: None, False),
    "text": (str, False),
    "complex": (lambda t: 1j, False),
}
FLAGS: dict[str, tuple[Form, bool]] = {
    "bool": (bool, True),
    "numpy bool": (np.bool_, True),
    "int": (int, True),
    "float": (float, True),
    "0-d": (np.array, True),
    "torch": (torch.tensor, True),
    "uint8": (np.uint8, True),
    "(1,)": (lambda f: np.array([f]), False),
    "list": (lambda f: [f], False),
    "none": (lambda f: True if f else None, False),
    "text": (str, False),
    "two": (lambda f: 2 * f, False),
    "half": (lambda f: 0.5 * f, False),
    "nan": (lambda f: float("nan") if f else 0.0, False),
}


MODES_AND_TWIN = [*MODES, None]
"""None stands for the mode with reset slots, without the extension."""


def by_turns(names: Iterable[str]) -> list[tuple[str, AutoresetMode | None]]:
    """Pair each name with a mode in rotation, and with None, which disables the extension."""
    return [
        pair
        for turn, name in enumerate(names)
        for pair in ((name, MODES[turn % len(MODES)]), (name, None))
    ]


def without_extension(monkeypatch: pytest.MonkeyPatch) -> AutoresetMode:
    monkeypatch.setattr(fast_paths, "_off", frozenset({"kernel"}))
    return AutoresetMode.NEXT_STEP


def single_slots(mode: AutoresetMode, **kwargs: Any) -> Any:
    storage = MemmapStorage(max_size=40)
    with SyncCollector(vec(mode, **kwargs), storage=storage, **BUDGET) as collector:
        while collector.ledger.stored < 18:
            collector.collect(2)
    return storage[:]


def outcomes(mode: AutoresetMode, check: Callable[[Any], None], **kwargs: Any) -> list[str]:
    """Return the error of each way to collect, or "" if the rows are right.

    The ways are batches, single slots, an observation in a Dict, and partial steps.
    """
    deep = spaces.Dict(observation=spaces.Box(-9, 9, (2,), np.float32))
    ways = [
        lambda: joined(collect(vec(mode, **kwargs), **BUDGET)[0]),
        partial(single_slots, mode, **kwargs),
        lambda: joined(collect(vec(mode, deep, **kwargs), **BUDGET)[0]),
    ]
    if mode is AutoresetMode.DISABLED:
        parts = {**BUDGET, "frames_per_batch": 3, "surplus": "never_step"}
        ways.append(lambda: joined(collect(vec(mode, **kwargs), **parts)[0]))
    found = []
    for way in ways:
        try:
            check(way())
            found.append("")
        except ValueRefused as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(("name", "mode"), by_turns(REWARDS))
def test_a_reward_is_in_its_row_as_it_is_or_refused(
    name: str, mode: AutoresetMode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, is_right = REWARDS[name]
    mode = mode or without_extension(monkeypatch)

    def check(rows: Any) -> None:
        steps = rows["collector", "step"].tolist()
        wanted = [[np.float32(float(form(step + 1)) if step else 1)] for step in steps]
        assert rows["next", "reward"].tolist() == wanted

    for found in outcomes(mode, check, reward=form, after=2):
        assert (found == "") is is_right, found
        if found:
            place = "next/reward at lane 0, step 1 of its trajectory: expected "
            assert found.startswith(place), found
            assert ", got " in found
            assert ("or .item() of an array with one element" in found) is ("(1,)" in name)


@pytest.mark.parametrize(("name", "mode"), by_turns(FLAGS))
def test_a_flag_is_in_its_row_as_it_is_or_refused(
    name: str, mode: AutoresetMode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, is_right = FLAGS[name]
    mode = mode or without_extension(monkeypatch)

    def check(rows: Any) -> None:
        wanted = rows["collector", "step"] == LENGTH - 1
        assert torch.equal(rows["next", "terminated"][:, 0], wanted)
        assert not rows["next", "truncated"].any()

    for found in outcomes(mode, check, flag=form, after=2):
        assert (found == "") is is_right, found
        if found:
            assert found.startswith("next/terminated at lane 0, step "), found
            assert ": expected one bool, or 0 or 1, got " in found


@pytest.mark.parametrize("mode", MODES_AND_TWIN)
def test_a_flag_is_refused_by_its_name(
    mode: AutoresetMode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(Given):
        def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
            """Execute any action."""
            return *super().step(action)[:3], 2 * (self.time == 3), {}

    mode = mode or without_extension(monkeypatch)
    wanted = "^next/truncated at lane 0, step 2 of its trajectory: .* got 2 "
    with pytest.raises(ValueRefused, match=wanted):
        collect(SyncVectorEnv([Cut] * 2, autoreset_mode=mode), **BUDGET)


@pytest.mark.parametrize("mode", MODES)
def test_the_first_end_is_looked_at_however_late_it_comes(mode: AutoresetMode) -> None:
    class Long(Given):
        def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
            """Execute any action."""
            self.time += 1
            return self.look(), 1.0, 2 * (self.time == 50), False, {}

    env = SyncVectorEnv([Long] * 2, autoreset_mode=mode)
    with pytest.raises(ValueRefused, match=r"^next/terminated at lane 0, step 49 of .* got 2 "):
        collect(env, frames_per_batch=60, total_frames=120)


def test_what_a_later_reset_returns_is_looked_at() -> None:
    class RunSetup(Given):
        def look(self) -> Any:
            return ragged(0) if self.episode == 1 and self.time == 0 else super().look()

    env = SyncVectorEnv([RunSetup] * 2, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueRefused, match=r"^observation at lane 0, step 0 of its trajectory: "):
        collect(env, **BUDGET)


@pytest.mark.parametrize("run", ["sync", "async"])
def test_workers_say_lane_and_step(run: str) -> None:
    make = partial(vec, MODES[0], lanes=1, reward=lambda time: [time], after=3)
    # Leases do not count steps, and the step is unknown for a worker that is ahead of others.
    step = "(, step 2 of its trajectory)?" if run == "sync" else ""
    wanted = rf"^next/reward at lane [01]{step}: expected one number, got \[3\] \(list\)"
    with in_threads(), pytest.raises(ValueRefused, match=wanted):
        collect_all(start([make] * 2, **BUDGET, mode=run))


@pytest.mark.parametrize(
    "form", [shifted, lambda v: v[:1], lambda v: np.asarray(v, np.int64) + 300]
)
def test_a_final_observation_is_looked_at(form: Form) -> None:
    def last(time: int) -> Form:
        return form if time == LENGTH else same

    class EndContext(Given):
        def look(self) -> Any:
            return last(self.time)(super().look())

    env = SyncVectorEnv(
        [partial(EndContext, PLAIN["uint8"])] * 2, autoreset_mode=AutoresetMode.SAME_STEP
    )
    with pytest.raises(
        ValueRefused, match=r"^next/observation at lane 0, step 3 of .*uint8 \[2, 3"
    ):
        collect(env, **BUDGET)


@given(st.data())
def test_a_value_is_the_same_or_refused(data: st.DataObject) -> None:
    kinds = [np.float16, np.float32, np.float64, *map(np.dtype, "bBhHiIlL?")]
    source, target = (np.dtype(data.draw(st.sampled_from(kinds))) for _ in range(2))
    numbers = st.one_of(
        st.integers(-(2**70), 2**70), st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e30, 65504.0, -129])
    )
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = np.array(data.draw(st.lists(numbers, min_size=3, max_size=3)), np.float64)
        values = drawn.astype(source)
        row = ExactRow(("x",), (3,), target)
        try:
            found = row.array(values)
        except ValueRefused:
            return
    assert found.dtype == target
    for got, wanted in zip(found.tolist(), values.tolist(), strict=True):
        rounded = source.kind == target.kind == "f" and np.isfinite(got) == np.isfinite(wanted)
        assert got == wanted or rounded, (values, found)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_what_rounding_would_make_infinite_is_refused(kind: Any) -> None:
    row = ExactRow(("x",), (2,), np.dtype(kind))
    assert row.array(np.array([1.0, -np.inf])).tolist() == [1.0, -np.inf]
    with pytest.raises(ValueRefused, match=r"got 1e\+300 of float64 at \[1\]"):
        row.array(np.array([1.0, 1e300]))


def test_digits_are_rounded_and_said_once() -> None:
    seen = [np.full(2, 0.1), np.full(2, 0.2)]
    row = ExactRow(("observation",), (2,), np.dtype(np.float32))
    with pytest.warns(RoundedWarning, match="declares float32, but .* returns float64") as caught:
        assert [row.array(each).dtype for each in seen] == [np.float32] * 2
    assert len(caught) == 1
    assert reward_of(0.1) == 0.1
    assert terminated_of(np.bool_(True)) is True


# --- systems --------------------------------------------------------------------------------------


class Odd(toy_systems.Toy):
    """System that returns rewards and flags in other arrays."""

    def __init__(self, reward: Form = same, flag: Form = same) -> None:
        super().__init__(2)
        self.reward, self.flag = reward, flag

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Any:
        out = super().finished(reward, flags, skipped)
        return out._replace(
            reward=[self.reward(out.reward[0])], terminated=self.flag(out.terminated)
        )


@pytest.mark.parametrize("way", ["batches", "single slots"])
@pytest.mark.parametrize(
    ("kwargs", "wanted"),
    [
        ({"reward": lambda r: r + 1e39}, r"next/reward at lane 0, step 0 .* float32 holds, got 1e"),
        ({"reward": lambda r: np.full(2, 2**24 + 1)}, "next/reward at lane 0, .* got 16777217 of"),
        (
            {"flag": lambda f: f + 2},
            r"next/terminated at lane 0, step 0 .* 0 or 1, got [23] of int64",
        ),
        ({"flag": lambda f: f * 0.5 + 0.25}, "next/terminated at lane 0, step 0 .* got 0.25 of"),
        ({"reward": lambda r: r.astype(np.int64)}, None),
        ({"reward": lambda r: torch.from_numpy(r)}, None),
        ({"flag": lambda f: f.astype(np.float32)}, None),
        ({"flag": lambda f: f.astype(np.int8)}, None),
    ],
)
def test_values_of_systems(kwargs: Any, wanted: str | None, way: str) -> None:
    def run() -> Any:
        if way == "batches":
            return joined(collect(Odd(**kwargs), **BUDGET)[0])
        storage = MemmapStorage(max_size=40)
        with SyncCollector(Odd(**kwargs), storage=storage, **BUDGET) as collector:
            while collector.ledger.stored < 18:
                collector.collect(2)
        return storage[:]

    if wanted is not None:
        with pytest.raises(ValueRefused, match=wanted):
            run()
        return
    rows, plain = run(), joined(collect(Odd(), **BUDGET)[0])
    if way == "batches":
        assert torch.equal(rows["next", "terminated"], plain["next", "terminated"])
        paid = kwargs.get("reward", same)(plain["next", "reward"].numpy())
        assert np.array_equal(rows["next", "reward"].numpy(), np.asarray(paid))
    assert len(rows) == 18


def test_arrays_of_all_lanes() -> None:
    row = np.zeros(3, np.float32)
    assert fitting(np.arange(3), row, ("next", "reward")).dtype == np.float32
    with pytest.raises(ValueRefused, match=r"next/reward at lane 2: .* got 1e"):
        fitting(np.array([1.0, np.inf, 1e200]), row, ("next", "reward"))
    assert as_flags(np.array([0, 1])).tolist() == [False, True]
    with pytest.raises(ValueRefused, match="one bool, or 0 or 1, got 2 of int64"):
        as_flags(np.array([0, 2]))


# --- the sign of zero -----------------------------------------------------------------------------


def below_zero(episode: int, time: int) -> Any:
    return np.array([-0.0, time], np.float32)


def two_lengths(mode: AutoresetMode) -> SyncVectorEnv:
    """Return lanes that end, and reset, at different times."""
    make = partial(Given, value=below_zero)
    lanes: list[Any] = [make, lambda: gym.wrappers.TimeLimit(make(), LENGTH - 1)]
    return SyncVectorEnv(lanes, autoreset_mode=mode)


def on_a_device() -> SerialEnv:
    make = partial(Given, value=below_zero)
    kwargs: dict[str, Any] = {"device": "cpu", "categorical_action_encoding": True}
    return SerialEnv(2, lambda: GymWrapper(make(), **kwargs))


ZEROS: dict[str, Callable[[], Any]] = {
    **{mode.name: lambda mode=mode: GymnasiumVectorEnv(two_lengths(mode)) for mode in MODES},
    "serial": on_a_device,
}


@pytest.mark.parametrize("run", ["policy", "opening", "threads"])
@pytest.mark.parametrize("kind", ZEROS)
def test_the_sign_of_zero_is_kept_under_transforms(kind: str, run: str) -> None:
    """TensorDict clones tensors by adding 0 if it has a device."""
    policy = TensorDictModule(
        lambda seen: (torch.zeros(seen.shape[:-1], dtype=torch.int64), seen * 1),
        in_keys=["observation"],
        out_keys=["action", "seen"],
    )

    def make() -> TransformedEnv:
        return TransformedEnv(ZEROS[kind](), StepCounter())

    budget = BUDGET | {"total_frames": 42, "init_random_frames": 5 * (run == "opening")}
    if run == "threads":
        with in_threads():
            rows = joined(collect_all(start([make], policy, **budget)).batches)
    else:
        rows = joined(collect(make, policy, **budget)[0])
    require_equal(rows, Given(value=below_zero))
    acted = rows["collector", "policy_version"] >= 0
    assert torch.signbit(rows["seen"][acted, 0]).all(), "the policy saw others"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
def test_a_state_goes_on_as_it_was_written(kind: Any, mode: AutoresetMode, tmp_path: Any) -> None:
    states = ["state", "cell"][: 1 if kind is GRUModule else 2]
    after = [("next", name) for name in states]
    torch.manual_seed(0)
    policy = TensorDictSequential(
        kind(input_size=2, hidden_size=4, in_keys=["observation", *states], out_keys=["x", *after]),
        TensorDictModule(lambda *given: tuple(-each.relu() for each in given), after, after),
        TensorDictModule(lambda x: x[..., :2].argmax(-1), ["x"], ["action"]),
    )
    budget = BUDGET | {"total_frames": 42, "init_random_frames": 5}
    collect(two_lengths(mode), policy, storage=tmp_path / "data", **budget)
    assert not verify(tmp_path / "data").findings
    with open_storage(tmp_path / "data") as storage:
        written = storage[:]["next", "state"]
    assert bool((torch.signbit(written) & (written == 0)).any())


# --- wide unsigned integers, and None -------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".h5", ".zarr"])
@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64"])
def test_wide_images_are_carried(kind: str, suffix: str, tmp_path: Any) -> None:
    space, path = PLAIN[kind], tmp_path / f"data{suffix}"

    def bright(td: Any) -> Any:
        return td.set("action", (td["observation"].float().mean(-1) % 2).long().clamp(0, 1))

    with SyncCollector(vec(MODES[0], space), bright, storage=path, **BUDGET) as collector:
        batches = [batch.clone() for batch in collector]
    require_equal(joined(batches), Given(space))
    with open_storage(path) as storage:
        require_equal(storage[:], Given(space))
        require_equal(storage.get(torch.arange(18).flip(0)), Given(space))
        assert storage.trajectories.sample_slices(2, 3)["observation"].dtype == getattr(torch, kind)
    assert not verify(path).findings


@pytest.mark.parametrize("layout", ["lanes", "trajectories", "torchrl"])
def test_wide_images_in_layouts(layout: Any) -> None:
    whole = joined(collect(vec(MODES[0], PLAIN["uint16"]), **BUDGET)[0])
    batches, _ = collect(vec(MODES[0], PLAIN["uint16"]), layout=layout, **BUDGET)
    mask = [batch.get(("collector", "mask"), None) for batch in batches]
    rows = [
        batch["observation"].numpy()[slice(None) if held is None else held.numpy()]
        for batch, held in zip(batches, mask, strict=True)
    ]
    flat = np.concatenate([each.reshape(-1, 3) for each in rows])
    assert sorted(flat.tolist()) == sorted(whole["observation"].tolist())


def test_where_torch_lacks_what_it_would_take() -> None:
    env = vec(MODES[0], PLAIN["uint16"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(40))
    with pytest.raises(ArgumentError, match="LazyTensorStorage can write, got observation of uint"):
        collect(env, replay_buffer=buffer, **BUDGET)
    ours = ReplayBuffer(storage=MemmapStorage(max_size=40), batch_size=4)
    collect(vec(MODES[0], PLAIN["uint16"]), replay_buffer=ours, **BUDGET)
    assert ours.sample()["observation"].dtype == torch.uint16


@pytest.mark.parametrize(
    ("space", "wanted"),
    [
        (
            spaces.Box(-1, 1, (0,)),
            r"^observation: expected at least one value, got the shape \[0\]",
        ),
        (spaces.Dict(a=spaces.Box(-1, 1, (2, 0))), r"^a: expected at least one value, .*\[2, 0\]"),
        (spaces.Dict({}), r"^observation: .* at least one value, got Dict\(\)"),
        (spaces.Tuple(()), r"^observation: .* at least one value, got Tuple\(\)"),
    ],
)
def test_spaces_without_values_are_refused(space: Any, wanted: str) -> None:
    with pytest.raises(SpaceError, match=wanted):
        collect(vec(MODES[0], space), **BUDGET)


def test_what_a_reset_raises_is_not_taken_for_a_missing_observation() -> None:
    class Refuses(gym.Env[Any, Any]):
        observation_space = spaces.Dict({"seen": spaces.Box(-1.0, 1.0, (2,))})
        action_space = spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            raise TypeError("a fault of its own")

    with pytest.raises(TypeError, match="a fault of its own"):
        SyncCollector(SyncVectorEnv([Refuses] * 2), frames_per_batch=4, total_frames=8)


@given(
    numbers=st.lists(st.integers(0, 1) | st.integers(-128, 127), min_size=3, max_size=3),
    kind=st.sampled_from([np.int8, np.uint8, np.int16, np.bool_, np.float32]),
    every=st.sampled_from([1, 2, -1]),
)
def test_bytes_are_bools_if_they_are_0_and_1(numbers: list[int], kind: Any, every: int) -> None:
    value = np.repeat(np.array(numbers).astype(kind), abs(every))[::every]
    assert value.shape == (3,)
    row, exact = np.zeros(3, np.bool_), ExactRow(("mask",), (3,), np.dtype(bool), any_bools=True)
    bits = all(each in (0, 1) for each in value.tolist())
    assert exact.puts_bits(value, row) == (bits and kind in (np.int8, np.uint8))
    if exact.puts_bits(value, row):
        assert row.tolist() == [each == 1 for each in value.tolist()]
    assert not exact.puts_bits(value[:2], row)
    assert not ExactRow(("mask",), (3,), np.dtype(np.bool_)).puts_bits(value, row)
