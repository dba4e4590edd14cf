"""Options of resets that are drawn ahead equal those of their seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reset_kit import Weather

from tallyroll.collector import Resets, SyncCollector, choice, uniform
from tallyroll.collector.envs.setup.traits import system_of
from tallyroll.collector.envs.stepping import reset_draws
from tallyroll.collector.envs.stepping.reset_draws import ResetDraws
from tallyroll.collector.options.resets import Streams

SAMPLER = {
    "gravity": uniform(-15, -5),
    "scale": choice([1, 2.5, 3]),
    "wet": choice([True, False]),
    "name": choice(["a", "b"]),
    "same": 7,
}
RESETS = Resets(sampler=SAMPLER, seeds=True)


def draws_of(run: SyncCollector) -> ResetDraws:
    base = system_of(run.env)
    assert base is not None
    draws = base.stepper.contexts.resets
    assert draws is not None
    return draws


def test_each_has_the_options_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run spans several blocks of seeds and options, and its lanes end at different times."""
    drawn: list[int] = []

    class Counted(Streams):
        def of(self, reset_seed: int) -> np.random.Generator:
            drawn.append(reset_seed)
            return super().of(reset_seed)

    monkeypatch.setattr(reset_draws, "Streams", Counted)
    with SyncCollector(
        Weather, num_envs=3, frames_per_batch=9, total_frames=9, seed=3, resets=RESETS
    ) as run:
        draws, rng = draws_of(run), np.random.default_rng(0)
        begun: list[int] = []
        calls = 0
        for count in range(300):
            ahead, options = ahead_of(draws)
            before = len(drawn)
            ended = rng.random(3) < 0.7
            draws.begun(ended if count % 2 else np.flatnonzero(ended))
            calls += len(drawn) > before
            now = draws.now
            for lane in np.flatnonzero(ended).tolist():
                assert now["collector", "reset_seed"][lane] == ahead[lane]
                for name in ("gravity", "scale", "wet", "same"):
                    value = now["collector", "context", name][lane].item()
                    assert value == options[lane][name]
                begun.append(ahead[lane])
        assert len({*begun}) == len(begun) > 500
        assert calls < 60  # most resets draw nothing
        run.set_seed(4)
        ahead_of(draws)


def ahead_of(draws: ResetDraws) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the seeds and options of the next resets, and check that they belong together."""
    assert draws.seeds is not None
    seeds, options = draws.seeds.tolist(), [dict(each) for each in draws._options]
    for seed, given in zip(seeds, options, strict=True):
        assert given == RESETS.options_of(seed)
    return seeds, options
