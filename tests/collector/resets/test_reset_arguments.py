"""Invalid options of resets: the messages of errors, and their time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from reset_kit import Weather
from torchrl.data import Unbounded
from torchrl.envs import GymEnv, ParallelEnv, SerialEnv

from tallyroll.collector import (
    ArgumentError,
    EnvironmentRefused,
    Resets,
    SyncCollector,
    choice,
    uniform,
)
from tallyroll.collector.envs import Declares, Step, System
from tallyroll.collector.envs.gymnasium.seeded_resets import SeededLane, takes_resets
from tallyroll.collector.envs.gymnasium.vector_rules import VectorRules
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.options.draws import parsed
from tallyroll.storage import StorageError, fast_paths

from collect_kit import assert_same

GRAVITY = Resets(sampler={"gravity": uniform(-15, -5)})
SEEDS = Resets(seeds=True)


def collect(create: Any, resets: Resets, frames: int = 30, **options: Any) -> Any:
    """Collect a batch."""
    given = {"frames_per_batch": frames, "total_frames": frames, "seed": 0, **options}
    with SyncCollector(create, resets=resets, **given) as collector:
        return next(iter(collector))


# --- distributions, and their spelling ------------------------------------------------------------

SPELLINGS = {
    "uniform(-15,-5)": uniform(-15, -5),
    " uniform ( 1e-3 , 2 ) ": uniform(0.001, 2),
    "choice(1, 2.5, true)": choice([1, 2.5, True]),
    'choice("sea, moon", [1, {"a": null}])': choice(["sea, moon", [1, {"a": None}]]),
}
WRONG = {
    "gauss(0,1)": r"'gauss' is not a distribution",
    "uniform(1)": "two numbers, got '1'",
    "uniform(2,1)": "lower bound first, and a finite range, got 2, 1",
    "uniform(-1e308,1e308)": "finite range",
    "uniform(NaN,1)": "expected uniform",
    "uniform(0,1e999)": "expected uniform",
    'uniform("a",1)': "two finite numbers, got 'a', 1",
    "uniform(true,1)": "two finite numbers, got True, 1",
    "uniform(0,1)**2": "expected uniform",
    "choice()": "at least one value",
    "choice(sea)": "write strings in double quotes",
    "sea": "write strings in double quotes",
    "": "expected uniform",
    "__import__('os').getcwd()": "expected uniform",
    "[" * 100_000: "expected uniform",
}


def test_a_spelling_is_read_back() -> None:
    """Every kind of draw and constants are covered."""
    for text, draw in SPELLINGS.items():
        assert parsed(text) == draw == parsed(draw.spelling)
    assert choice(np.array([1.0, 2.5])) == choice([1.0, 2.5])
    for text in ('"sea"', "-9.81", "[1, 2]", "null", "false"):
        assert parsed(text).spelling == text


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_spelling_is_refused(text: str) -> None:
    """Parsing never evaluates the text."""
    with pytest.raises(ArgumentError, match=WRONG[text].replace("(", r"\(")):
        parsed(text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: uniform(np.nan, 1), "two finite numbers, got nan, 1"),
        (lambda: choice("sea"), "a list of values, got 'sea'"),
        (lambda: choice([]), "at least one value"),
        (lambda: choice([np.inf]), "a finite number or another JSON value, got inf"),
        (lambda: choice([object]), "another JSON value, got <class 'object'>"),
        (lambda: Resets(sampler=3), "options by name, .* got int"),
        (lambda: Resets(sampler={}), "at least one option"),
        (lambda: Resets(sampler={"a/b": 1}), "a valid name of a column, .* got 'a/b'"),
        (lambda: Resets(sampler={1: 1}), "got 1"),
        (lambda: Resets(sampler={"a": float("nan")}), "reset_sampler: a: expected a finite"),
        (lambda: Resets(sampler={"a": {1, 2}}), "reset_sampler: a: expected a finite"),
        (lambda: Resets(seeds="yes"), "reset_seeds: expected True or False, got 'yes'"),
        (lambda: Resets(seed=True), "got seed="),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_once(make: Any, said: str) -> None:
    """The refusal precedes the construction of a collector."""
    with pytest.raises((ArgumentError, TypeError), match=said):
        make()


# --- functions ------------------------------------------------------------------------------------


class Draws:
    """Sampler whose results change after some calls."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)

    def __call__(self, rng: np.random.Generator) -> Any:
        """Return the next result, or the last one repeatedly."""
        return self.results.pop(0) if len(self.results) > 1 else self.results[0]


LATER = [
    ({"b": 1.0}, r"the options \['gravity'\] in every draw, got \['b'\]"),
    ({"gravity": 1.0, "b": 2}, r"got \['b', 'gravity'\]"),
    ({"gravity": "low"}, "a finite number of float64 for 'gravity' in every draw, got 'low'"),
    ({"gravity": np.nan}, "a finite number of float64 for 'gravity' in every draw, got nan"),
    ({"gravity": True}, "in every draw, got True"),
    ({"gravity": 10**400}, "in every draw, got 1000"),
    ([1], "a function that returns options by name, got list"),
]


@pytest.mark.parametrize(("later", "said"), LATER)
def test_a_function_that_returns_something_else_later_ends_the_run(later: Any, said: str) -> None:
    """The error shows the first result and the later one."""
    sampler = Draws(*[{"gravity": 1.0}] * 9, later)
    with pytest.raises(ArgumentError, match=said):
        collect(Weather, Resets(sampler=sampler, seeds=True), 100)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (lambda _: {"gravity": object()}, "gravity: expected a finite number or another JSON"),
        (lambda _: {"": 1}, "expected a valid name of a column"),
        (lambda _: None, "returns options by name, got NoneType"),
        (lambda _: {"level": "sea"}, r"the options \['level'\]. Add seeds=True"),
        ({"level": choice(["sea", "moon"])}, r"the options \['level'\]. Add seeds=True"),
        ({"reset_mask": 1.0}, r"names of options other than \['reset_mask'\]"),
    ],
)
def test_a_sampler_that_cannot_be_recorded_is_refused(sampler: Any, said: str) -> None:
    """The constructor of the collector refuses it."""
    with pytest.raises(ArgumentError, match=said):
        collect(Weather, Resets(sampler=sampler))


def test_options_are_drawn_again_as_documented_by_numpy() -> None:
    """The generator is Philox with the seed as its key, independent of earlier draws."""
    resets = Resets(sampler={"a": uniform(2, 6), "b": choice([5, 7])}, seeds=True)
    for seed in (0, 12, 2**63 - 1):
        rng = np.random.Generator(np.random.Philox(key=np.array([seed, 1], np.uint64)))
        wanted = {"a": 2 + 4 * rng.random(), "b": (5, 7)[rng.random() > 0.5]}
        assert resets.options_of(seed) == wanted
    for wrong in (-1, 2**63):
        with pytest.raises(ArgumentError, match=f"expected a reset_seed from rows, got {wrong}"):
            resets.options_of(wrong)


def test_a_constant_needs_no_seed() -> None:
    """The constant does not depend on draws."""
    rows = collect(Weather, Resets(sampler={"gravity": 2, "level": "moon"}))
    assert set(rows["observation"][:, 1].tolist()) == {1.0}
    assert set(rows["collector", "context", "gravity"].tolist()) == {2}


# --- environments without support for resets ------------------------------------------------------


class Cloud(System):
    """System that declares contexts, resets within its step, and observes its context."""

    def __init__(self, lanes: int = 2, **declared: Any) -> None:
        context = {"wind": Unbounded((2,)), "rain": Unbounded(())}
        self.declares = Declares(
            lanes=lanes,
            observation={("seen",): Unbounded((4,))},
            action={("action",): Unbounded((1,))},
            **{"at_end": "first", "finals": "extra", "context": context, **declared},
        )
        self._seen = np.zeros((lanes, 4), np.float32)

    def _begin(self, lanes: Any) -> None:
        if self.declares.context:
            self._seen[lanes, :2] = self.next_context["wind"][lanes]
            self._seen[lanes, 2] = self.next_context["rain"][lanes]
        self._seen[lanes, 3] = 0
        if self.next_seeds is not None:
            self._seen[lanes, 3] = self.next_seeds[lanes] % 1000 * 1000

    def reset(self, lanes: Any, seeds: Any, **options: Any) -> list[Any]:
        """Begin with the drawn contexts."""
        self._begin(slice(None) if lanes is None else lanes)
        return [self._seen]

    def step(self, action: Any, lanes: Any = None) -> Step:
        """Step, and end episodes after three steps.

        With reset slots, the next step begins the next episode.
        """
        if self.declares.at_end == "reset_slot":
            return self._step_or_begin()
        self._seen[:, 3] += 1
        final, over = self._seen.copy(), self._seen[:, 3] % 1000 == 3
        if over.any():
            self._begin(over)
        cut = np.zeros_like(over)
        return Step([self._seen], [cut * 1.0], over, cut, final=[final])

    def _step_or_begin(self) -> Step:
        begins = self._seen[:, 3] % 1000 == 3
        self._seen[~begins, 3] += 1
        if begins.any():
            self._begin(begins)
        over = self._seen[:, 3] % 1000 == 3
        cut = np.zeros_like(over)
        return Step([self._seen], [cut * 1.0], over, cut)


class Own(SyncVectorEnv):
    """Subclass with its own step."""

    def step(self, actions: Any) -> Any:
        """Step like the base class."""
        return super().step(actions)


WIND: Mapping[str, Any] = {"wind": [1, 0.1], "rain": uniform(0, 1)}
TORCHRL = partial(GymEnv, "CartPole-v1")


@pytest.mark.parametrize(
    ("create", "resets", "said"),
    [
        (TORCHRL, SEEDS, "GymEnv is a TorchRL environment, whose set_seed .* Pass the id"),
        (
            partial(SerialEnv, 2, TORCHRL),
            GRAVITY,
            "a TorchRL environment, whose reset accepts one seed and the",
        ),
        (partial(ParallelEnv, 2, TORCHRL), SEEDS, "ParallelEnv is .* whose processes reset their"),
        (partial(Own, [Weather]), SEEDS, "Own accepts no seed .* overrides step or reset of"),
        (partial(Own, [Weather]), GRAVITY, "Own accepts no options .* overrides step or reset of"),
        (
            partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="vector_entry_point"),
            SEEDS,
            "CartPoleVectorEnv accepts no seed at the reset of a lane",
        ),
        (
            partial(Cloud, context={}),
            SEEDS,
            "Cloud accepts no seed .* neither reset_seeds nor options",
        ),
        (partial(Cloud, context={}), GRAVITY, "accepts no options .* declares no context"),
    ],
)
def test_an_environment_that_cannot_is_refused(create: Any, resets: Resets, said: str) -> None:
    """The constructor refuses it with the reason and a remedy."""
    with pytest.raises(EnvironmentRefused, match=said):
        collect(create, resets)


def test_a_lane_without_its_environment_has_nothing() -> None:
    """Copying accesses an unfinished object. The attribute lookup must not recurse forever."""
    with pytest.raises(AttributeError, match="_env"):
        _ = SeededLane.__new__(SeededLane).seen


def test_an_async_vector_is_refused_what_its_processes_do_not_take() -> None:
    """All lanes would have the same options. The check starts no process."""
    by_mask = VectorRules(AutoresetMode.DISABLED, "final", True, True, False, False, [])
    within = replace(by_mask, autoreset=AutoresetMode.SAME_STEP, at_end="first")
    vector: AsyncVectorEnv = object.__new__(AsyncVectorEnv)
    vector.closed = True  # for its finalizer
    for rules, said in (by_mask, "passes the same options to all lanes"), (within, "within a step"):
        seeds, options, why = takes_resets(vector, rules)
        assert (seeds, options) == (rules is by_mask, False)
        assert said in why
        assert "MultiprocessCollector" in why


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ({"wind": [1, 2]}, r"the contexts \['rain', 'wind'\] that Cloud declares, got \['wind'\]"),
        (
            {**WIND, "rain": "much"},
            r"finite float32 \[\] for 'rain', as the system declares .* got 'much'",
        ),
        ({**WIND, "wind": [1]}, r"finite float32 \[2\] for 'wind', as .* context, got \[1\]"),
        ({**WIND, "rain": 1e300}, "finite float32 .* context, got 1e"),
    ],
)
def test_other_contexts_than_those_declared_are_refused(sampler: Any, said: str) -> None:
    """The name, the shape and the size must match."""
    with pytest.raises(ArgumentError, match=said):
        collect(Cloud, Resets(sampler=sampler))


def test_contexts_that_are_drawn_otherwise_already_are_refused() -> None:
    """A `SystemEnv` with ``draw=`` draws its own contexts."""
    env = partial(SystemEnv, Cloud(), draw=lambda _: {"wind": [0, 0], "rain": 0})
    with pytest.raises(ArgumentError, match="made without draw, got one whose draw"):
        collect(env, Resets(sampler=WIND))


@pytest.mark.parametrize("how", [{}, {"max_frames_per_traj": 2}])
def test_a_system_that_resets_itself_gets_what_was_drawn_ahead(how: dict[str, Any]) -> None:
    """The rows record the contexts with their rounding, and the seeds if they are accepted."""
    rows = collect(partial(Cloud, reset_seeds=True), Resets(sampler=WIND, seeds=True), **how)
    own, seen = rows["collector"], rows["seen"]
    assert (own["context", "wind"] == seen[:, :2]).all()
    assert (own["context", "rain"] == seen[:, 2]).all()
    assert own["context", "wind"].shape == (30, 2)
    steps = 3 if not how else 2
    assert (own["reset_seed"] % 1000 * 1000 + own["step"] == seen[:, 3]).all()
    assert own["step"].max() == steps - 1
    assert len(own["context", "rain"].unique()) == len(own["traj_ids"].unique()) > 9


@pytest.mark.parametrize(
    "ends", [{}, {"at_end": "reset_slot", "finals": "returned"}], ids=["first", "reset_slot"]
)
@pytest.mark.parametrize("context", [{}, None], ids=["seeds", "contexts"])
def test_each_end_of_a_system_takes_what_was_drawn(ends: Any, context: Any) -> None:
    """With seeds alone, nothing else needs checking after a step."""
    more: dict[str, Any] = {} if context is None else {"context": context}
    create = partial(Cloud, reset_seeds=True, **ends, **more)
    resets = SEEDS if more else Resets(sampler=WIND, seeds=True)
    rows = collect(create, resets)
    own, seen = rows["collector"], rows["seen"]
    assert (own["reset_seed"] % 1000 * 1000 + own["step"] == seen[:, 3]).all()
    assert len(own["reset_seed"].unique()) == len(own["traj_ids"].unique()) == 10
    with fast_paths.switched_off(*fast_paths.FAST_PATHS):
        assert_same(collect(create, resets), rows)


def test_a_later_collector_draws_nothing_of_an_earlier_one() -> None:
    """Both collectors use the same environment, which belongs to the caller."""
    env = SystemEnv(Cloud(context={}, reset_seeds=True))
    assert ("collector", "reset_seed") in collect(env, SEEDS).keys(True)
    rows = collect(env, Resets())
    assert ("collector", "reset_seed") not in rows.keys(True)
    assert rows["seen"][:, 3].max() == 2
    env.close()


# --- storages, and keywords -----------------------------------------------------------------------


def test_a_run_goes_on_with_the_same_columns_only(tmp_path: Any) -> None:
    """Other resets do not match the schema of the storage."""
    given: dict[str, Any] = {"storage": tmp_path / "s", "num_envs": 2}
    collect(Weather, GRAVITY, **given)
    with pytest.raises(StorageError, match="gravity"):
        collect(Weather, SEEDS, 60, resume=True, **given)


def test_fields_are_keywords_of_a_collector_too() -> None:
    """A field may be given in one place only."""
    rows = collect("CartPole-v1", None, reset_seeds=True)  # type: ignore[arg-type]
    assert ("collector", "reset_seed") in rows.keys(True)
    with pytest.raises(ArgumentError, match="reset_seeds: expected only once, got both"):
        collect("CartPole-v1", SEEDS, reset_seeds=True)
    with pytest.raises(ArgumentError, match=r"resets: expected Resets\(...\), got bool"):
        collect("CartPole-v1", True)  # type: ignore[arg-type]
