"""A thread that reads a random run's ledger: each snapshot balances, and no count decreases."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tallyroll.collector.base import Collector
from tallyroll.collector.counting.ledger import Ledger

GROWING = ("slots", "executed", "reset_slots", "stored", "discarded", "lost", "episodes_complete")


def wrong_after(before: Ledger, ledger: Ledger) -> list[str]:
    """Return the faults of a snapshot of the ledger that was taken after ``before``."""
    found = []
    parts = ledger.stored + ledger.discarded + ledger.carried + ledger.lost
    balanced = ledger.slots == ledger.executed + ledger.reset_slots and ledger.executed == parts
    if not balanced or min(ledger.values) < 0:
        found.append(f"a look at the ledger does not balance: {ledger.counts()}")
    for name in GROWING:
        if getattr(ledger, name) < getattr(before, name):
            found.append(f"{name} of the ledger went back from {getattr(before, name)}")
    return found


@contextmanager
def looked_at(collector: Collector, found: list[str]) -> Iterator[None]:
    """Read the ledger in another thread within this context, and add faults to ``found``."""
    ended = threading.Event()

    def look() -> None:
        last = collector.ledger
        while not ended.wait(0.0002) and len(found) < 3:
            now = collector.ledger
            found.extend(wrong_after(last, now))
            last = now

    before, thread = sys.getswitchinterval(), threading.Thread(target=look, daemon=True)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
