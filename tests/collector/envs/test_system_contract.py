"""Toy systems of every kind pass the public contract tests, and faulty ones fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from tallyroll.collector.envs.gymnasium.system import GymnasiumSystem
from tallyroll.collector.envs.system import System
from tallyroll.collector.testing import SystemContract

from toy_systems import (
    LONGEST,
    Arrivals,
    ArrivalsWithResetSlots,
    Contexts,
    First,
    Groups,
    InParts,
    Lost,
    OfADevice,
    SeededWhenMade,
    SomeFinals,
    Toy,
    WithResetSlots,
)


class ToyContract(SystemContract):
    kind: ClassVar[type[System]]

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        return self.kind(lanes, seeds)  # type: ignore[call-arg]


def contract_of(kind: type[System], **more: Any) -> type[ToyContract]:
    """Return the contract of toys of a kind."""
    return type(f"Test{kind.__name__}", (ToyContract,), {"kind": kind, **more})


TestFinal = contract_of(Toy)
TestResetSlots = contract_of(WithResetSlots)
TestFirst = contract_of(First)
TestSomeFinals = contract_of(SomeFinals)
TestLost = contract_of(Lost)
TestSeededWhenMade = contract_of(SeededWhenMade)
TestParts = contract_of(InParts)
TestArrivals = contract_of(Arrivals, lanes=4)
TestArrivalsWithResetSlots = contract_of(ArrivalsWithResetSlots, lanes=4)
TestReadOnlyArrays = contract_of(OfADevice)
TestGroups = contract_of(Groups)


class Seeded(Toy):
    """System whose episodes are drawn from individual seeds and do not show their number."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "final", "reset_seeds": True}

    def start(self, lane: int) -> None:
        self.state[lane, 1] = -1
        if self.next_seeds is not None:
            self.rngs[lane] = np.random.default_rng(self.next_seeds[lane])
        super().start(lane)


class SeededContexts(Seeded, Contexts):
    rest: ClassVar[dict[str, Any]] = {**Contexts.rest, "reset_seeds": True}


class SeededResetSlots(Seeded, WithResetSlots):
    rest: ClassVar[dict[str, Any]] = {**WithResetSlots.rest, "reset_seeds": True}


TestSeeded = contract_of(Seeded)
TestSeededResetSlots = contract_of(SeededResetSlots)


class TestContexts(ToyContract):
    kind = Contexts

    def draw(self, rng: np.random.Generator) -> Mapping[str, Any]:
        return {"length": rng.integers(1, LONGEST + 1)}


class TestSeededContexts(TestContexts):
    kind = SeededContexts


class GymnasiumContract(SystemContract):
    mode: ClassVar[str]
    steps = 200

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        import gymnasium

        made = gymnasium.make_vec(
            "CartPole-v1", lanes, "sync", vector_kwargs={"autoreset_mode": self.mode}
        )
        return GymnasiumSystem(made)


class TestGymnasiumNextStep(GymnasiumContract):
    mode = "NextStep"


class TestGymnasiumSameStep(GymnasiumContract):
    mode = "SameStep"


class TestGymnasiumDisabled(GymnasiumContract):
    mode = "Disabled"


# --- systems that violate their declarations ------------------------------------------------------


class ResetsItself(Toy):
    """System that declares to wait for a reset, but begins the next episode within its step."""

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Any:
        for lane in np.flatnonzero(self.over):
            self.start(lane)
        return super().finished(reward, flags, skipped)

    def reset(self, lanes: Any, seeds: Any, **options: Any) -> list[Any]:
        return super().reset(None, seeds) if lanes is None else [self.state.copy()]


class SkipsUnsaid(First):
    """System that declares to reset within its step, but uses a slot for the reset."""

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Any:
        step = Toy.finished(self, reward, flags, skipped)
        return step._replace(final=step.obs)

    def advance(self, lane: int, action: int) -> Any:
        if self.over[lane]:
            self.start(lane)
            return 0.0, False, False
        return super().advance(lane, action)


class NeverSkips(WithResetSlots):
    """System that declares reset slots, but steps in them."""

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Any:
        for lane in np.flatnonzero(self.over):
            self.start(lane)
        return Toy.finished(self, reward, flags, skipped)


class WrongDtype(Toy):
    def finished(self, reward: Any, flags: Any, skipped: Any) -> Any:
        step = super().finished(reward, flags, skipped)
        return step._replace(obs=[step.obs[0].astype(np.int32)])


class Unseeded(Toy):
    def reset(self, lanes: Any, seeds: Any, **options: Any) -> list[Any]:
        return super().reset(lanes, None if seeds is None else np.random.randint(99, size=3))


class ResetsAll(Toy):
    def reset(self, lanes: Any, seeds: Any, **options: Any) -> list[Any]:
        return super().reset(None, seeds)


class ReadsContextsLate(Contexts):
    def advance(self, lane: int, action: int) -> Any:
        self.length[lane] = self.next_context["length"][lane]
        return super().advance(lane, action)


class Undead(Groups):
    def alive(self, group: str) -> Any:
        return (self.toy.state[:, 2:3] + np.arange(self.sizes[group])) % 2 == 0


class ForgetsResets(WithResetSlots):
    """System that resets an ended lane again, although it was reset in the meantime."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "reset_slot", "resets": "mask"}

    def reset(self, lanes: Any, seeds: Any, **options: Any) -> list[Any]:
        over = self.over.copy()
        seen = super().reset(lanes, seeds)
        self.over |= over
        return seen


class ForgetsWholeResets(ForgetsResets):
    rest: ClassVar[dict[str, Any]] = {"at_end": "reset_slot", "resets": "all"}


class ForgetsResetsOfEnds(ForgetsResets):
    """System that forgets resets by mask right after ends, like Gymnasium."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "final"}

    def advance(self, lane: int, action: int) -> Any:
        if self.over[lane]:
            self.start(lane)
            return 0.0, False, False
        return super().advance(lane, action)

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Any:
        return Toy.finished(self, reward, flags, skipped)


class TakesNoSeeds(Seeded):
    """System that declares seeds for resets, but continues its generators."""

    def start(self, lane: int) -> None:
        self.state[lane, 1] = -1
        Toy.start(self, lane)


class TakesSeedsLate(Seeded):
    """System that uses the seed of the previous reset."""

    def start(self, lane: int) -> None:
        late, self.late = getattr(self, "late", self.next_seeds.copy()), self.next_seeds.copy()
        self.state[lane, 1] = -1
        self.rngs[lane] = np.random.default_rng(late[lane])
        Toy.start(self, lane)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (ForgetsResets, "test_a_lane_that_was_reset_executes_its_next_action"),
        (ForgetsResets, "test_lanes_that_were_all_reset_execute_their_next_actions"),
        (ForgetsWholeResets, "test_lanes_that_were_all_reset_execute_their_next_actions"),
        (ForgetsResetsOfEnds, "test_a_lane_that_was_reset_executes_its_next_action"),
        (ForgetsResetsOfEnds, "test_only_a_reset_slot_ignores_its_action"),
        (TakesNoSeeds, "test_an_episode_is_repeated_by_what_its_reset_was_given"),
        (TakesSeedsLate, "test_an_episode_is_repeated_by_what_its_reset_was_given"),
        (ResetsItself, "test_a_final_observation_is_not_the_next_first_one"),
        (SkipsUnsaid, "test_only_a_reset_slot_ignores_its_action"),
        (NeverSkips, "test_only_a_reset_slot_ignores_its_action"),
        (WrongDtype, "test_values_are_as_declared"),
        (Unseeded, "test_seeds_repeat_a_run"),
        (ResetsAll, "test_a_reset_by_mask_leaves_other_lanes_alone"),
        (ReadsContextsLate, "test_a_context_is_copied_when_it_is_used"),
        (Undead, "test_agents_that_are_dead_stay_dead"),
    ],
)
def test_a_system_that_lies_fails(kind: type[System], test: str) -> None:
    contract = TestContexts() if issubclass(kind, Contexts) else TestFinal()
    contract.kind = kind  # type: ignore[misc]
    with pytest.raises(AssertionError):
        getattr(contract, test)()
