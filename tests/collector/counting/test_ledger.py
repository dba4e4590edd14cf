"""The ledger is a value: it can be read, set, compared, copied and added to like a dataclass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tallyroll.collector
from tallyroll.collector import Ledger
from tallyroll.collector.counting.ledger import COUNTS, LedgerEntry, post
from tallyroll.collector.errors import LedgerError

from traced_code import Interruption, traced

INSIDE = str(Path(tallyroll.collector.__file__).parent)
COPIES: list[Callable[[Ledger], Ledger]] = [
    copy.copy,
    copy.deepcopy,
    replace,
    lambda ledger: pickle.loads(pickle.dumps(ledger)),
    lambda ledger: Ledger(**asdict(ledger)),
]


def some(first: int = 1) -> Ledger:
    counts = {name: first + at for at, name in enumerate(COUNTS)}
    return Ledger(**counts, seed=2**70, versions={"torch": "2"})


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_is_equal_and_has_counts_of_its_own(copied: Callable[[Ledger], Ledger]) -> None:
    ledger = some()
    other = copied(ledger)
    assert other == ledger
    assert repr(other) == repr(ledger)
    assert other.versions == ledger.versions
    other.stored += 1
    post(other, LedgerEntry(slots=5))
    assert other != ledger
    assert ledger == some()
    assert other == replace(some(), stored=ledger.stored + 1, slots=ledger.slots + 5)


def test_every_count_is_read_and_set_by_its_name() -> None:
    ledger = some(10)
    assert ledger.values == tuple(range(10, 10 + len(COUNTS)))
    for name in COUNTS:
        setattr(ledger, name, np.int64(getattr(ledger, name) - 10))
    assert ledger.counts() == {name: at for at, name in enumerate(COUNTS)}
    assert all(type(count) is int for count in ledger.values)
    assert repr(Ledger(slots=3)).startswith("Ledger(slots=3, executed=0, reset_slots=0, stored=0,")


@pytest.mark.parametrize("count", [2**63, -(2**63) - 1, 2**200])
def test_a_count_that_no_word_holds_is_refused(count: int) -> None:
    ledger = some()
    with pytest.raises(LedgerError, match=f"lost: expected a count of 64 bits, got {count}"):
        ledger.lost = count
    with pytest.raises(LedgerError, match="stored: expected"):
        ledger.load({"stored": count})
    with pytest.raises(LedgerError, match="ticks: expected"):
        Ledger(ticks=count)
    with pytest.raises(TypeError):
        ledger.lost = 1.5  # type: ignore[assignment]
    assert ledger == some()


entries = st.builds(LedgerEntry, *[st.integers(-(2**40), 2**40)] * len(LedgerEntry._fields))


@given(posted=st.lists(entries))
def test_entries_add_up_by_name(posted: list[LedgerEntry]) -> None:
    ledger = some()
    for entry in posted:
        post(ledger, entry)
    for name in COUNTS:
        added = sum(getattr(entry, name, 0) for entry in posted)
        assert getattr(ledger, name) == getattr(some(), name) + added


def test_an_entry_is_posted_whole_or_not_at_all() -> None:
    """The test raises an exception at each instruction in turn."""
    entry = LedgerEntry(*range(1, 1 + len(LedgerEntry._fields)))
    whole = some()
    post(whole, entry)
    outcomes = []
    with traced(INSIDE, lambda _: None):
        # Python 3.13 traces the instructions of a code object from its next call on
        post(some(), entry)
    for number in range(1, 1000):
        ledger, count = some(), 0

        def look(_: Any) -> None:
            nonlocal count
            count += 1
            if count == number:  # noqa: B023  called before the next one begins
                raise Interruption

        try:
            with traced(INSIDE, look):
                post(ledger, entry)
        except Interruption:
            outcomes.append(ledger == whole)
            assert ledger in (some(), whole)
        else:
            break
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {False, True}
