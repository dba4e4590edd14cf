"""Hundreds of random runs with any number of workers in threads.

Other tests of the multiprocess collector use real processes. Here the same workers answer the same
messages from threads, which can count the steps of their environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.collector import Ledger
from tallyroll.collector.base import Collector

from collect_kit import Batches, assert_same, joined
from oracles import check_rows
from worker_kit import (
    DISABLED,
    NEXT,
    RESET_SLOTS,
    SAME,
    RecordingPolicy,
    Run,
    SlowPolicy,
    Versioned,
    assert_alike,
    assert_first_started,
    chosen_by,
    collect_all,
    in_threads,
    kept_sums,
    lanes_of_workers,
    steps_and_resets,
    sync_collector,
    worker_collector,
)

__all__ = ["kept_sums"]

SOURCE = st.sampled_from([DISABLED, NEXT, SAME, "avoided", "native", "torch"])
IN_PLACE = (DISABLED, NEXT, SAME, "avoided", "native")


@st.composite
def lengths(draw: st.DrawFn) -> list[list[int]]:
    """Draw lengths of each lane's episodes, most of them short, some longer than batches."""
    length = st.one_of(st.integers(1, 6), st.integers(1, 40))
    return draw(st.lists(st.lists(length, min_size=1, max_size=4), min_size=1, max_size=7))


@st.composite
def runs(draw: st.DrawFn, mode: str) -> dict[str, Any]:
    """Draw a valid combination of a run's arguments."""
    workers = draw(st.integers(1, 4))
    source = draw(SOURCE)
    kwargs: dict[str, Any] = {
        "source": source,
        "workers": workers,
        "lanes": draw(st.integers(workers, 8)),
        "frames_per_batch": draw(st.one_of(st.integers(1, 9), st.integers(10, 70))),
        "seed": draw(st.integers(0, 2**31 - 1)),
        "oracle": {"lengths": draw(lengths())},
    }
    surplus = ["carry"]
    if draw(st.integers(0, 3)):
        kwargs["total_frames"] = draw(st.integers(1, 150))
        surplus += ["discard"] if mode == "sync" else []
        if mode == "sync":
            kwargs["reset_at_each_iter"] = draw(st.booleans())
    else:
        kwargs["total_episodes"] = draw(st.integers(1, 25))
    if source == DISABLED:
        surplus.append("never_step")
    kwargs["surplus"] = draw(st.sampled_from(surplus))
    if source in IN_PLACE:
        kwargs["init_random_frames"] = draw(st.one_of(st.just(0), st.integers(0, 100)))
    return kwargs


@pytest.mark.slow
@given(kwargs=runs("sync"), policy=st.booleans())
@settings(max_examples=35)
def test_in_step_the_data_is_that_of_one_process(kwargs: dict[str, Any], policy: bool) -> None:
    source, workers = kwargs.pop("source"), kwargs.pop("workers")
    chosen = RecordingPolicy() if policy or source not in IN_PLACE else None
    one = collect_all(sync_collector(source, chosen, **kwargs))
    with in_threads():
        many = collect_all(worker_collector(source, workers, chosen, **kwargs))
    assert_alike(one, many)
    assert_counted(many)


@pytest.mark.slow
@given(kwargs=runs("async"))
@settings(max_examples=60)
def test_out_of_step_the_count_is_exact_and_each_lane_whole(kwargs: dict[str, Any]) -> None:
    source, workers = kwargs.pop("source"), kwargs.pop("workers")
    own = kwargs["oracle"]["lengths"]
    with in_threads():
        run = collect_all(worker_collector(source, workers, SlowPolicy(), mode="async", **kwargs))
    ledger, size = run.collector.ledger, kwargs["frames_per_batch"]
    rows = joined(run.batches)
    checked = check_rows(rows, own, ends="mixed", from_start=True)
    sizes = [len(batch) for batch in run.batches]
    assert set(sizes[:-1]) <= {size}
    assert 0 < sizes[-1] <= size
    assert ledger.stored == len(rows)
    assert (ledger.carried, ledger.lost) == (0, 0)
    assert ledger.episodes_complete == len(run.episodes) == checked.ended.sum()
    assert_counted(run)
    version = rows["collector", "policy_version"]
    random = min(kwargs.get("init_random_frames", 0), len(rows))
    for lane in range(kwargs["lanes"]):
        assert (version[checked.lane == lane].diff() >= 0).all(), "random again, after the policy"
    if "total_frames" in kwargs:
        assert len(rows) == kwargs["total_frames"]
        assert int((version == -1).sum()) == ledger.random == random
        # Only the last step may give surplus rows.
        most = max(own for _, own in lanes_of_workers(kwargs["lanes"], workers)) - 1
        assert ledger.discarded <= (0 if kwargs["surplus"] == "never_step" else most)
    else:
        assert ledger.episodes_complete == kwargs["total_episodes"]
        assert ledger.episodes_cut == 0
        for first, count in lanes_of_workers(kwargs["lanes"], workers):
            own_lanes = range(first, first + count)
            assert_first_started(checked, own_lanes, own, resets=source in RESET_SLOTS)
    resets = steps_and_resets()[1] - kwargs["lanes"]
    assert ledger.reset_slots == (resets if source in RESET_SLOTS else 0)


OPERATION = st.one_of(
    st.tuples(st.just("seed"), st.integers(0, 10**6)),
    st.tuples(st.just("update"), st.just(0)),
    st.tuples(st.just("leave"), st.just(0)),
    st.tuples(st.just("state"), st.integers(1, 3)),
)


@dataclass
class Play:
    """Run of several collectors, each continuing the state of the previous one."""

    lives: list[Batches] = field(default_factory=lambda: [[]])
    counts: list[dict[str, int]] = field(default_factory=list)
    ledger: Ledger | None = None


def play(begin: Callable[[int], Collector], steps: list[Any]) -> Play:
    """Alternate between batches and operations, and finally collect the remaining batches."""
    found, version = Play(), 0
    collector = begin(1)
    try:
        for batches, (operation, number) in [*steps, (10**6, ("leave", 0))]:
            for _, batch in zip(range(batches), collector, strict=False):
                found.lives[-1].append(batch)
                collector.ledger.check()
            if operation == "seed":
                collector.set_seed(number)
            elif operation == "update":
                version += 1
                collector.update_policy_weights_(Versioned().set_to(version))
            elif operation == "state":
                state = collector.state_dict()
                collector.shutdown()
                collector = begin(number)
                collector.load_state_dict(state)
                found.lives.append([])
            collector.ledger.check()
            found.counts.append(collector.ledger.counts())
    finally:
        collector.shutdown()
    found.ledger = collector.ledger
    return found


@pytest.mark.slow
@given(
    steps=st.lists(st.tuples(st.integers(0, 4), OPERATION), max_size=5),
    source=SOURCE,
    lanes=st.integers(3, 5),
    own=lengths(),
    size=st.integers(1, 20),
    total=st.integers(1, 150),
    episodes=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40)
def test_the_count_is_exact_through_any_calls_in_between(
    steps: list[Any],
    source: str,
    lanes: int,
    own: list[list[int]],
    size: int,
    total: int,
    episodes: bool,
    seed: int,
) -> None:
    budget = {"total_episodes": total // 5 + 1} if episodes else {"total_frames": total}
    options: dict[str, Any] = {"frames_per_batch": size, "seed": seed, **budget}
    options |= {"oracle": {"lengths": own}, "lanes": lanes}

    def begin(workers: int, mode: str) -> Collector:
        return worker_collector(source, workers, Versioned(), mode=mode, **options)

    one = play(lambda _: sync_collector(source, Versioned(), **options), steps)
    with in_threads():
        many = play(partial(begin, mode="sync"), steps)
        wild = play(partial(begin, mode="async"), steps)
    assert one.counts == many.counts
    for mine, theirs in zip(one.lives, many.lives, strict=True):
        for batch, again in zip(mine, theirs, strict=True):
            assert_same(batch, again)
    ended, seen = 0, set()
    for batches in filter(None, wild.lives):
        rows = joined(batches)
        checked = check_rows(rows, own, ends="mixed", contiguous=False)
        ended += int(checked.ended.sum())
        ids = set(rows["collector", "traj_ids"].tolist())
        assert not ids & seen
        seen |= ids
        version = rows["collector", "policy_version"]
        assert torch.equal(rows["low"], version.float())
        assert torch.equal(rows["high"], version.float())
        assert torch.equal(rows["action"], chosen_by(rows, version))
    assert wild.ledger is not None
    assert wild.ledger.episodes_complete == ended
    if episodes:
        assert ended == total // 5 + 1
    else:
        assert sum(len(batch) for batches in wild.lives for batch in batches) == total


def assert_counted(run: Run) -> None:
    """Check that the environments made as many steps as the ledger counts."""
    ledger = run.collector.ledger
    assert ledger.executed == steps_and_resets()[0]
    assert ledger.slots == ledger.executed + ledger.reset_slots
