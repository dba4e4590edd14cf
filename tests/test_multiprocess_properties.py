"""Any run at all, spread over any number of workers: hundreds of them, with workers in threads.

The real processes are in the other tests of the multiprocess collector; here the same workers
answer the same messages from threads, where what their environments made can be counted.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import check_rows
from test_collect_kit import joined
from worker_kit import (
    DISABLED,
    NEXT,
    RESET_SLOTS,
    SAME,
    Dawdling,
    Run,
    Telling,
    alone,
    assert_alike,
    assert_first_started,
    in_threads,
    shares,
    spread,
    steps_and_resets,
    through,
)

SOURCE = st.sampled_from([DISABLED, NEXT, SAME, "avoided", "native", "torch"])
IN_PLACE = (DISABLED, NEXT, SAME, "avoided", "native")


@st.composite
def lengths(draw: st.DrawFn) -> list[list[int]]:
    """Of each lane's episodes: short ones, and now and then one that outlasts batches."""
    length = st.one_of(st.integers(1, 6), st.integers(1, 40))
    return draw(st.lists(st.lists(length, min_size=1, max_size=4), min_size=1, max_size=7))


@st.composite
def runs(draw: st.DrawFn, mode: str) -> dict[str, Any]:
    """Arguments of a run that are allowed together."""
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


@given(kwargs=runs("sync"), policy=st.booleans())
@settings(max_examples=60)
def test_in_step_the_data_is_that_of_one_process(kwargs: dict[str, Any], policy: bool) -> None:
    source, workers = kwargs.pop("source"), kwargs.pop("workers")
    chosen = Telling() if policy or source not in IN_PLACE else None
    one = through(alone(source, chosen, **kwargs))
    with in_threads():
        many = through(spread(source, workers, chosen, **kwargs))
    assert_alike(one, many)
    assert_counted(many)


@given(kwargs=runs("async"))
@settings(max_examples=100)
def test_out_of_step_the_count_is_exact_and_each_lane_whole(kwargs: dict[str, Any]) -> None:
    source, workers = kwargs.pop("source"), kwargs.pop("workers")
    own = kwargs["oracle"]["lengths"]
    with in_threads():
        run = through(spread(source, workers, Dawdling(), mode="async", **kwargs))
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
    if "total_frames" in kwargs:
        assert len(rows) == kwargs["total_frames"]
        assert int((version == -1).sum()) == ledger.random == random
        if kwargs["surplus"] == "never_step":
            assert ledger.discarded == 0
    else:
        assert ledger.episodes_complete == kwargs["total_episodes"]
        assert ledger.episodes_cut == 0
        for first, count in shares(kwargs["lanes"], workers):
            own_lanes = range(first, first + count)
            assert_first_started(checked, own_lanes, own, resets=source in RESET_SLOTS)
    resets = steps_and_resets()[1] - kwargs["lanes"]
    assert ledger.reset_slots == (resets if source in RESET_SLOTS else 0)


def assert_counted(run: Run) -> None:
    """What the ledger calls executed the environments have made."""
    ledger = run.collector.ledger
    assert ledger.executed == steps_and_resets()[0]
    assert ledger.slots == ledger.executed + ledger.reset_slots
