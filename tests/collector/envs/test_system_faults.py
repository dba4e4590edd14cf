"""Systems that return invalid values are refused, or their rows are correct all the same."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torchrl.envs import Compose, TransformedEnv

from tallyroll.collector import SyncCollector
from tallyroll.collector.envs.system import Step, System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, TransitionError

from toy_systems import (
    Arrivals,
    ArrivalsWithResetSlots,
    Contexts,
    First,
    SomeFinals,
    Toy,
    WithResetSlots,
)


def collect(make: Any, frames: int = 60, **kwargs: Any) -> Any:
    with SyncCollector(make, None, frames_per_batch=17, total_frames=frames, **kwargs) as collector:
        return torch.cat([batch.clone() for batch in collector])


def with_step(kind: type[Any], change: Any) -> Any:
    class Changed(kind):  # type: ignore[misc]
        def finished(self, reward: Any, flags: Any, skipped: Any) -> Step:
            return change(super().finished(reward, flags, skipped))

        def recv(self) -> Step:
            return change(super().recv())

    return Changed


@pytest.mark.parametrize("kind", [Toy, Arrivals])
@pytest.mark.parametrize(
    "change",
    [
        lambda step: step._replace(reward=step.reward[0]),
        lambda step: step._replace(reward=[step.reward[0][:1]]),
        lambda step: step._replace(reward=[1.5]),
        lambda step: step._replace(reward=[None]),
        lambda step: step._replace(reward=[*step.reward, *step.reward]),
        lambda step: step._replace(terminated=np.False_),
        lambda step: step._replace(truncated=None),
    ],
)
def test_values_that_numpy_would_spread_over_lanes_are_refused(kind: Any, change: Any) -> None:
    with pytest.raises(TransitionError, match="expected reward, terminated and truncated of shape"):
        collect(lambda: with_step(kind, change)(4))


def test_a_reset_that_returns_too_little_is_refused() -> None:
    class Short(Toy):
        def reset(self, lanes: Any, seeds: Any, **options: Any) -> Any:
            found = super().reset(lanes, seeds)
            return found if lanes is None else []

    with pytest.raises(ValueError, match="zip"):
        collect(lambda: Short(3))


@pytest.mark.parametrize("lanes", [[3, 3], [-1, 0], [0, 9], [0]])
def test_arrivals_that_were_not_sent_are_refused(lanes: list[int]) -> None:
    def change(step: Step) -> Step:
        return step._replace(lanes=np.array(lanes, np.int32))

    with pytest.raises(
        TransitionError, match="expected 2 different lanes among those that were sent"
    ):
        collect(lambda: with_step(Arrivals, change)(4))


@pytest.mark.parametrize("lanes", [4, 7])
def test_lanes_that_arrive_begin_anew_before_each_batch(lanes: int) -> None:
    rows = collect(lambda: Arrivals(lanes), 101, reset_at_each_iter=True)
    before, after = rows["observation"], rows["next", "observation"]
    assert torch.equal(after[:, 3], before[:, 3] + rows["action"])
    assert torch.equal(after[:, 1], before[:, 1])


def test_lanes_that_arrive_are_stepped_together_as_multiples() -> None:
    with pytest.raises(EnvironmentRefused, match="expected a multiple of 2 lanes"):
        collect(lambda: Arrivals(3), max_frames_per_traj=3)
    assert len(collect(lambda: Arrivals(4), max_frames_per_traj=3)) == 60


def test_contexts_are_drawn_anew_for_lanes_that_arrive_at_reset_slots() -> None:
    class OfContexts:
        def start(self: Any, lane: int) -> None:
            super().start(lane)  # type: ignore[misc]
            self.length[lane] = self.state[lane, 4] = self.next_context["length"][lane]

    class Both(OfContexts, ArrivalsWithResetSlots):
        rest: ClassVar[dict[str, Any]] = {**ArrivalsWithResetSlots.rest, "context": CONTEXT}

    class OneByOne(OfContexts, WithResetSlots):
        rest: ClassVar[dict[str, Any]] = {**WithResetSlots.rest, "context": CONTEXT}

    def lengths(kind: Any) -> list[list[int]]:
        rows = collect(lambda: SystemEnv(kind(4), draw=draw), 300, seed=3)
        seen = rows["observation"]
        return [
            seen[(seen[:, 0] == lane) & (seen[:, 2] == 0)][:, 4][:8].tolist() for lane in range(4)
        ]

    assert lengths(Both) == lengths(OneByOne)
    assert len(set(lengths(Both)[1])) > 1


CONTEXT = Contexts.rest["context"]


def draw(rng: np.random.Generator) -> dict[str, Any]:
    return {"length": rng.integers(1, 5)}


def test_finals_that_are_lost_behind_a_transform_are_no_finals() -> None:
    def wrapped(kind: Any, **lost: Any) -> Any:
        made = with_step(kind, lambda step: step._replace(**lost))
        return lambda: TransformedEnv(SystemEnv(made(3)), Compose())

    with pytest.raises(TransitionError, match="so the observation is lost"):
        collect(wrapped(First, final=None))
    rows = collect(wrapped(SomeFinals, final=None, final_valid=None))
    ended = (rows["next", "terminated"] | rows["next", "truncated"])[:, 0]
    assert torch.equal(rows["collector", "next_valid"].reshape(-1), ~ended)


def test_a_system_that_speaks_of_skips_only_where_there_are_some() -> None:
    def change(step: Step) -> Step:
        return step._replace(skipped=step.skipped if step.skipped.any() else None)

    assert len(collect(lambda: with_step(WithResetSlots, change)(3), 200)) == 200


@pytest.mark.parametrize("early", [True, False])
def test_a_wrong_skip_is_found_however_late(early: bool) -> None:
    steps = 0

    def change(step: Step) -> Step:
        nonlocal steps
        steps += 1
        is_time = steps > 50 and step.skipped.any() != early
        return step._replace(skipped=~step.skipped) if is_time else step

    with pytest.raises(TransitionError, match=r'at_end="reset_slot", but it (ignored|executed)'):
        collect(lambda: with_step(WithResetSlots, change)(3), 400)
    assert steps > 50


def test_skips_in_any_form_make_the_same_rows() -> None:
    def rows_with(change: Any) -> Any:
        made = with_step(WithResetSlots, lambda step: step._replace(skipped=change(step.skipped)))
        return collect(lambda: made(3), 200, seed=1)

    plain = rows_with(lambda skipped: skipped)
    for form in (lambda skipped: skipped.astype(np.uint8), torch.from_numpy, np.ndarray.tolist):
        assert (rows_with(form) == plain).all()


def test_parts_of_lanes_with_reset_slots() -> None:
    class InParts(WithResetSlots):
        rest: ClassVar[dict[str, Any]] = {**WithResetSlots.rest, "parts": True}

        def finished(self, reward: Any, flags: Any, skipped: Any) -> Step:
            return Step([self.state.copy()], [reward], *flags, skipped=skipped)

    rows = collect(lambda: InParts(3), 300, surplus="never_step")
    assert torch.equal(rows["observation"][:, 2], rows["collector", "step"])


def test_a_system_that_is_made_again_for_each_batch_is_repeatable() -> None:
    def make(seeds: Any = None) -> System:
        return First(2, seeds or np.random.SeedSequence().generate_state(2).tolist())

    one, two = (collect(make, 85, seed=5, reset_at_each_iter=True) for _ in range(2))
    assert torch.equal(one["observation"], two["observation"])


@pytest.mark.parametrize(
    ("rest", "match"),
    [
        ({"at_end": "finale"}, "at_end: expected one of 'final', 'reset_slot', 'first', got 'fina"),
        ({"at_end": "first", "finals": "none"}, "finals: expected one of .* got 'none'"),
        ({"at_end": "first"}, 'at_end="first": expected finals="extra".* "lost"$'),
        ({"at_end": "final", "finals": "lost"}, 'finals="lost": expected at_end="first", got'),
    ],
)
def test_what_a_system_declares_of_ends_has_to_be_one_of_three_ways(
    rest: dict[str, Any], match: str
) -> None:
    kind = type("Other", (Toy,), {"rest": rest})
    with pytest.raises(ArgumentError, match=match):
        collect(lambda: kind(3))
