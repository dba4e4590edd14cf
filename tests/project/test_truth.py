"""Tests of `benchmarks/truth.py`: it counts each kind of wrong row, and only those."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DRAWS = 1_500
OURS = ("truth", "truth_buffers", "common")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """Import the modules of the benchmark, and forget them afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in OURS})
        for name in OURS:
            del sys.modules[name]


def kinds_of(truth: ModuleType, verdict: Any) -> dict[str, set[str]]:
    """Return the kinds that were drawn at each place."""
    kinds: dict[str, set[str]] = {place: set() for place in truth.PLACES_OF_ROWS}
    for place, kind in verdict.counts:
        kinds[place].add(kind)
    return kinds


@pytest.mark.parametrize("name", ["Tallyroll", "TorchRL", "TorchRLCompressed"])
def test_a_right_buffer_has_no_wrong_rows(scripts: SimpleNamespace, name: str) -> None:
    verdict = scripts.truth.check(getattr(scripts.truth_buffers, name), DRAWS)
    assert verdict.draws >= DRAWS
    assert all(kinds == {"right"} for kinds in kinds_of(scripts.truth, verdict).values())
    assert (verdict.wrong, verdict.missing) == (0, 0)
    assert np.mean(verdict.reached) > 0.7


def at(flags: np.ndarray) -> np.ndarray:
    return flags[:, None, None, None]


OLDEST_LOST = np.array([0, 1, 1, 1], np.uint8)[:, None, None]
HALF = np.repeat([1, 0], 8).astype(np.uint8)[:, None]
"""Rows of a frame that are kept."""
ONLY_AT_LIMITS = {"mid-episode": "right", "seam": "right", "termination": "right"}
BREAKS: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "own observation at limits": (
        lambda step: replace(step, next=np.where(at(step.truncated), step.observation, step.next)),
        {**ONLY_AT_LIMITS, "time limit": "itself"},
    ),
    "limits as terminations": (
        lambda step: replace(step, terminated=step.terminated | step.truncated),
        {**ONLY_AT_LIMITS, "time limit": "no bootstrap"},
    ),
    "zeros at every end": (
        lambda step: replace(
            step, next=np.where(at(step.truncated | step.terminated), 0, step.next)
        ),
        {**ONLY_AT_LIMITS, "time limit": "missing", "termination": "unused"},
    ),
    "NaN at limits": (
        lambda step: replace(step, next=np.where(at(step.truncated), np.nan, step.next)),
        {**ONLY_AT_LIMITS, "time limit": "missing"},
    ),
    "half of a frame at limits": (
        lambda step: replace(step, next=step.next * np.where(at(step.truncated), HALF, 1)),
        {**ONLY_AT_LIMITS, "time limit": "unknown frame"},
    ),
    "terminations forgotten": (
        lambda step: replace(step, terminated=np.zeros_like(step.terminated)),
        {**ONLY_AT_LIMITS, "time limit": "right", "termination": "bootstrap"},
    ),
    "the other lane's next": (
        lambda step: replace(step, next=step.next[::-1].copy()),
        dict.fromkeys(("mid-episode", "seam", "time limit"), "other lane")
        | {"termination": "unused"},
    ),
    "the other lane's reward": (
        lambda step: replace(step, reward=step.reward[::-1].copy()),
        # The place is that of the row whose observation was drawn.
        dict.fromkeys(("mid-episode", "seam", "time limit", "termination"), "no such row"),
    ),
    "an older frame of the observation": (
        lambda step: replace(step, observation=step.observation * OLDEST_LOST),
        dict.fromkeys(("mid-episode", "seam", "time limit", "termination"), "observation"),
    ),
    "an older frame of the next observation": (
        lambda step: replace(step, next=step.next * OLDEST_LOST),
        dict.fromkeys(("mid-episode", "seam", "time limit"), "frames") | {"termination": "unused"},
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_each_fault_of_a_buffer_is_counted_by_its_kind(
    scripts: SimpleNamespace, fault: str
) -> None:
    broken, expected = BREAKS[fault]

    class Broken(scripts.truth_buffers.TorchRL):  # type: ignore[misc, name-defined]
        dtype = np.float32

        def prepare(self, steps: Any) -> Any:
            return super().prepare([broken(step) for step in steps])

    verdict = scripts.truth.check(Broken, DRAWS)
    assert kinds_of(scripts.truth, verdict) == {place: {kind} for place, kind in expected.items()}
    wrong = {
        place for place, kind in expected.items() if kind not in ("right", "unused", "missing")
    }
    counts = verdict.counts.items()
    assert verdict.wrong == sum(count for (place, _), count in counts if place in wrong)
    assert verdict.wrong + verdict.missing > 0


def test_a_next_observation_read_from_the_following_place(scripts: SimpleNamespace) -> None:
    """A ring of its own with one array of observations per lane, as several libraries have it."""

    class Following(scripts.truth_buffers.Buffer):  # type: ignore[misc, name-defined]
        def start(self) -> None:
            self.steps: list[Any] = []

        def prepare(self, steps: Any) -> Any:
            return steps

        def add(self, prepared: Any) -> None:
            self.steps = [*self.steps, *prepared][-self.size // self.lanes :]

        def sample(self) -> Any:
            return np.random.randint(len(self.steps), size=self.batch)

        def read(self, sampled: Any) -> Any:
            one = np.arange(self.batch) % self.lanes
            rows = [self.steps[number] for number in sampled]
            then = [self.steps[(number + 1) % len(self.steps)] for number in sampled]

            def column(name: str, steps: Any = rows) -> np.ndarray:
                return np.array([getattr(s, name)[i] for s, i in zip(steps, one, strict=True)])

            return scripts.truth_buffers.Draw(
                column("observation"),
                column("action"),
                column("reward"),
                column("observation", then),
                column("terminated"),
            )

    kinds = kinds_of(scripts.truth, scripts.truth.check(Following, DRAWS))
    assert kinds["mid-episode"] == {"right"}
    assert kinds["time limit"] == {"other episode"}
    assert kinds["termination"] == {"unused"}
    assert kinds["seam"] == {"right", "other episode"}  # the newest row is followed by the oldest


def test_a_peer_with_missing_next_observations(scripts: SimpleNamespace) -> None:
    verdict = scripts.truth.check(scripts.truth_buffers.TorchRLCompact, DRAWS)
    assert verdict.summary("time limit") == "100 % missing"
    assert verdict.summary("termination") == "100 % unused"
    assert verdict.missing > 0.1 * verdict.draws


def test_buffers_that_are_not_installed_are_named(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = scripts.truth_buffers
    monkeypatch.setattr(buffers.FlashbaxItem, "library", "flashbax_of_another_name")
    kinds, remarks = buffers.chosen(["torchrl", "flashbax_of_another_name"])
    assert buffers.Tallyroll in kinds
    assert buffers.TorchRL in kinds
    assert buffers.StableBaselines3 not in kinds
    missing = [each for each in remarks if "not installed" in each]
    assert [each.partition(":")[0] for each in missing] == [
        buffers.FlashbaxItem.name,
        buffers.FlashbaxFlat.name,
    ]


def test_a_share_is_exact_at_both_ends(scripts: SimpleNamespace) -> None:
    counts = [(0, 900), (1, 900), (450, 900), (899, 900), (900, 900), (0, 0)]
    assert [scripts.truth.percent(*each) for each in counts] == [
        "0 %",
        "< 1 %",
        "50 %",
        "> 99 %",
        "100 %",
        "0 %",
    ]
