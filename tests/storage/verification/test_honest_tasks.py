"""Test that `verify` accuses no honest task and finds tasks that reset themselves.

``TALLYROLL_TASKS=2000`` plays that many tasks. The gate plays a few.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.trajectories.self_resets import (
    Ends,
    SelfResets,
    Verdict,
    surprise,
)

from plain_tasks import HONEST, TOLD, Bandit, GridFromOneStart, Home, Walk, played

COUNT = int(os.environ.get("TALLYROLL_TASKS", "38"))
FORMATS: list[tuple[Any, str]] = [(MemmapStorage, ""), (H5Storage, ".h5"), (ZarrStorage, ".zarr")]


@pytest.mark.parametrize("number", range(COUNT))
def test_an_honest_task_is_sound(number: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([34, number])
    kind, lanes = HONEST[number % len(HONEST)], int(rng.choice([1, 2, 3, 8]))
    slots = int(rng.choice([3, 20, 100, 400])) if number % 5 == 0 else int(rng.choice([60, 150]))
    rows = played(kind, number, lanes, slots)
    count = lanes * slots
    stored, suffix = FORMATS[number % 3 if number % 7 == 0 else 0]
    ring = count // 2 + 1 if stored is MemmapStorage and rng.random() < 0.2 else None
    kwargs: dict[str, Any] = {"max_size": ring} if ring else {"capacity": count}
    path = tmp_path / f"rows{suffix}"
    with stored(path, **kwargs) as storage:
        at = 0
        while at < count:
            more = min(int(rng.integers(1, 200)), ring or count)
            storage.extend({key: column[at : at + more] for key, column in rows.items()})
            at += more
        if rng.random() < 0.2:
            storage.finalize()
    report = verify(path)
    assert not [*report.findings, *report.notes], f"{kind.__name__}, {lanes} lanes, {slots} slots"
    with open_storage(path) as storage:
        assert len(storage) == (min(count, ring) if ring else count)


# --- environments that reset themselves -----------------------------------------------------------


def verdict_of(kind: Any, seed: int, resets_itself: str, lanes: int = 2) -> Verdict:
    """Return the verdict on rows of enough slots to decide, if that is possible."""
    rows = played(kind, seed, lanes, 1500 // lanes, resets_itself=resets_itself)
    resets = SelfResets(lanes)
    names = [key for key in rows if len(key) == 1]
    step, lane = rows["collector", "step"], rows["collector", "lane"].astype(np.int32)
    for at in range(0, len(step), 10):
        part = slice(at, at + 10)
        first, next = (
            [taker(rows[(*under, *name)][part]) for name in names] for under in ((), ("next",))
        )
        ended, terminated = (rows["next", key][part, 0] for key in ("done", "terminated"))
        resets.look(Ends(lane[part], step[part], ended, terminated, first, next, None, at))
        if resets.decided:
            break
    return resets.verdict


def taker(column: np.ndarray) -> Any:
    return lambda rows: column[rows], column[0].nbytes


def grid(count: int) -> tuple[list[str], list[str], int]:
    """Return accused honest tasks, missed self-resetting tasks, and the number of all tasks."""
    accused, missed = [], []
    for number in range(count):
        kind = HONEST[number % len(HONEST)]
        if verdict_of(kind, number, "", 1 + number % 4) is Verdict.SELF_RESET:
            accused.append(f"{kind.__name__} {number}")
        kind = TOLD[number % len(TOLD)]
        how = "all"
        if kind is Walk and number % 4 == 0:  # it has both kinds of ends
            how = "terminated" if number % 8 else "truncated"
        if verdict_of(kind, number, how, 1 + number % 4) is not Verdict.SELF_RESET:
            missed.append(f"{kind.__name__} {number} {how}")
    return accused, missed, 2 * count


def test_a_grid_of_environments_of_both_kinds() -> None:
    accused, missed, _ = grid(38)
    assert not accused
    assert not missed


@pytest.mark.slow
def test_the_error_rates_on_a_large_grid() -> None:
    """The page of guarantees states the error rates."""
    accused, missed, count = grid(400)
    assert count == 800
    assert not accused
    assert len(missed) <= count // 200, missed


def test_what_cannot_be_told() -> None:
    """One start, or contexts of one step, give a warning or nothing."""
    assert verdict_of(GridFromOneStart, 0, "all") is not Verdict.SELF_RESET
    assert verdict_of(Home, 0, "all") is not Verdict.SELF_RESET
    assert verdict_of(Bandit, 0, "all") is not Verdict.SELF_RESET


def test_surprise_is_of_what_could_not_be_known() -> None:
    def bits(*firsts: int, lanes: int = 1) -> float:
        own, following = (np.array(each, np.uint64) for each in (firsts[:-1], firsts[1:]))
        return surprise(np.arange(len(own)) % lanes, own, following, own != following)

    assert bits(1, 2, 3, 4, 5) == 4.0  # the last two ends lead to starts never seen before
    assert bits(1, 2, 3, 4, 5, lanes=2) == 0.0
    assert bits(*[1, 2] * 20) == 0.0  # alternating docks
    assert bits(*[1, 2, 3, 4] * 20) < 3.0  # four docks: a surprise only the first time
    assert bits(9, *[1] * 30) == 0.0  # home at every end
    assert bits(*np.random.default_rng(0).integers(2, size=200).tolist()) > 30
