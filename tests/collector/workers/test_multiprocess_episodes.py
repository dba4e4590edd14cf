"""A budget of episodes: exactly N whole episodes, those that started first, of any length."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from collect_kit import ByObservation, joined
from oracles import Rows, check_rows
from worker_kit import (
    DISABLED,
    LANES,
    NEXT,
    RESET_SLOTS,
    SAME,
    SlowPolicy,
    assert_first_started,
    collect_all,
    factories,
    in_threads,
    lanes_of_workers,
    slow_factories,
    start,
    worker_collector,
)

SHORT, LONG = 1, 40
MIXED = [[1, 1, 30, 2], [25, 1, 1], [3, 50, 1], [2], [1, 1, 1, 1, 80]]


def collected(source: str, workers: int, lengths: Any, episodes: int, **kwargs: Any) -> Any:
    """Return the collector after shutdown, and its checked rows."""
    lanes = kwargs.pop("lanes", LANES)
    run = collect_all(
        worker_collector(
            source,
            workers,
            kwargs.pop("policy", ByObservation()),
            lanes,
            mode="async",
            frames_per_batch=kwargs.pop("frames_per_batch", 17),
            total_episodes=episodes,
            oracle={"lengths": lengths},
            **kwargs,
        )
    )
    rows = joined(run.batches)
    checked = check_rows(rows, lengths, ends="mixed", from_start=True)
    assert_whole(run, checked, episodes)
    for first, own in lanes_of_workers(lanes, workers):
        of = range(first, first + own)
        assert_first_started(checked, of, lengths, resets=source in RESET_SLOTS)
    return run.collector, checked


def assert_whole(run: Any, checked: Rows, episodes: int) -> None:
    """Check for the number of ends, without open episodes."""
    ledger = run.collector.ledger
    assert ledger.episodes_complete == episodes == checked.ended.sum() == len(run.episodes)
    assert (ledger.episodes_cut, ledger.carried, ledger.lost) == (0, 0, 0)
    assert ledger.stored == len(checked.lane)
    assert {len(batch) for batch in run.batches[:-1]} <= {17}


@pytest.mark.parametrize(
    ("source", "workers", "episodes"),
    [
        *((DISABLED, 1, 23), (DISABLED, 1, 4), (NEXT, 3, 23), (NEXT, 3, 1)),
        *((SAME, 2, 23), (SAME, 2, 4), ("native", 2, 1), ("native", 2, 23), ("serial", 2, 4)),
    ],
)
def test_episodes_are_whole_and_those_that_their_worker_started_first(
    source: str, workers: int, episodes: int
) -> None:
    collected(source, workers, MIXED, episodes)


def test_environments_of_one_lane() -> None:
    collected("single", 3, MIXED, 20, lanes=3)


def test_only_the_lanes_that_are_needed_are_stepped() -> None:
    collector, _ = collected(DISABLED, 2, MIXED, 20, surplus="never_step")
    assert collector.ledger.discarded < 2 * 80 * LANES


def test_steps_beside_the_last_episodes_are_discarded() -> None:
    """Lanes start episodes without a ticket only while the last ones are running."""
    collector, _ = collected(DISABLED, 2, [[30], [29], [28], [31]], 40, lanes=4)
    assert collector.ledger.discarded <= 4 * 31


def test_a_fast_worker_completes_more() -> None:
    makes = slow_factories(2, lengths=[[4]], seconds=0.01, slow=range(3))
    options: dict[str, Any] = {"frames_per_batch": 17, "total_episodes": 60}
    run = collect_all(start(makes, ByObservation(), mode="async", **options))
    checked = check_rows(joined(run.batches), [[4]], ends="mixed", from_start=True)
    assert_whole(run, checked, 60)
    lane = checked.lane[checked.ended]
    assert (lane >= 3).sum() > (lane < 3).sum() > 0


def coin(run: int, lane: int, episode: int) -> int:
    """Return a random length: half of the lengths are short."""
    return random.Random(f"{run} {lane} {episode}").choice((SHORT, LONG))


def first_ended(run: int, lanes: int, episodes: int) -> list[int]:
    """Return the lengths of the episodes that end first, as a biased collector would."""
    ends = []
    for lane in range(lanes):
        slot = 0
        for episode in range(episodes):
            length = coin(run, lane, episode)
            slot += length
            ends.append((slot, lane, length))
    return [length for *_, length in sorted(ends)[:episodes]]


@pytest.mark.slow
def test_long_episodes_come_as_often_as_they_are_started() -> None:
    """Half of 480 episodes are long, within a tenth, which is 4.5 standard deviations.

    Among the episodes that end first, a quarter is long.
    """
    runs, lanes, episodes = 40, 8, 12
    lengths: list[int] = []
    careless: list[int] = []
    with in_threads():
        for run in range(runs):
            collector = start(
                factories(SAME, 2, lanes, lengths=partial(coin, run)),
                SlowPolicy(),
                mode="async",
                frames_per_batch=50,
                total_episodes=episodes,
            )
            lengths += [episode.length for episode in collect_all(collector).episodes]
            careless += first_ended(run, lanes, episodes)
    assert len(lengths) == runs * episodes
    assert np.mean(np.array(careless) == LONG) < 0.3
    deviation = 0.5 / np.sqrt(len(lengths))
    assert abs(np.mean(np.array(lengths) == LONG) - 0.5) < 4.5 * deviation
