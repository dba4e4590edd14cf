"""``tallyroll watch``: follow a running collection from another process."""

import argparse
import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from tallyroll.collector.cli.output import as_json, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.counting.ledger import show_ledger
from tallyroll.collector.ext.report.run_reader import Run, runs_in
from tallyroll.collector.ext.report.stored_runs import part, whole_number
from tallyroll.storage import open_storage
from tallyroll.storage.files.paths import free_bytes
from tallyroll.storage.rows.pages import counted
from tallyroll.storage.storages import DiskStorage

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 40
"""Number of characters of the sparkline."""
_WINDOW = 100
"""Number of last episodes in the mean return."""
_RATE_SECONDS = 60.0
_MOST_SECONDS = 10**9
_LONGEST_SECONDS = 86_400.0


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll watch`` and return the exit status."""
    with open_storage(args.path) as storage, _output(args) as show:
        watch = Watch(storage)
        while True:
            facts = watch.look()
            over = facts["state"] not in ("running", "waiting")
            # The writer may have committed its last rows after they were counted.
            show(watch.look() if over else facts)
            if args.once or over:
                return 0
            time.sleep(min(args.interval, _LONGEST_SECONDS))


@contextlib.contextmanager
def _output(args: argparse.Namespace) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Yield a function that shows facts: in place on a terminal, one after another elsewhere."""
    if args.json:
        yield lambda facts: emit(json.dumps(as_json(facts), allow_nan=False) + "\n")
    elif args.once or not sys.stdout.isatty():
        yield lambda facts: emit(as_text(facts) + "\n")
    else:
        with Live(auto_refresh=False) as live:
            yield lambda facts: live.update(Text.from_ansi(as_text(facts)), refresh=True)


class Watch:
    """Observes the last run of a storage repeatedly, and computes its rate."""

    def __init__(self, storage: DiskStorage) -> None:
        self._storage = storage
        self._looks: deque[tuple[float, int]] = deque()

    def look(self) -> dict[str, Any]:
        """Return the current state of the run as JSON values. Unknown values are None.

        Without rows, ``state`` is "waiting" while a process writes to the storage, otherwise
        "empty". With rows, it is the state of the last run: "running", "complete", "stopped",
        "killed" or "closed". If the manifest names no run that made the rows, it is "running" or
        "closed", and ``without_run`` has the reason.
        """
        storage, problems = self._storage, list[str]()
        found: Run | None = None
        if storage.head:
            runs = runs_in(storage, str(storage.path), lambda _: None, problems.append)
            found = next(iter(deque(runs, maxlen=1)), None)
        where = {"path": str(storage.path), "free_bytes": free_bytes(storage.path)}
        if found is None and storage.head:
            state = "running" if storage.reader.is_written else "closed"
            why = "; ".join(problems) or "no run has rows yet"
            facts = {"rows": storage.head, "bytes": storage.nbytes, "without_run": why}
            return {**where, "state": state, **facts}
        if found is None:
            state = "waiting" if storage.reader.is_written else "empty"
            return {**where, "state": state, "rows": storage.head, "bytes": 0}
        counts, call = found.counts or {}, part(found.entry, "call")
        rate = self._rate(found) if found.state == "running" else None
        returns = found.returns
        workers = whole_number(call, "num_workers")
        return {
            **where,
            "state": found.state,
            "environment": found.environment,
            "rows": storage.head,
            "bytes": storage.nbytes,
            "frames": found.stored,
            "asked": found.asked,
            "asked_episodes": found.asked_episodes,
            "rate": rate,
            "seconds_left": _seconds_left(found, rate),
            "episodes": counts.get("episodes_complete", found.episodes),
            "return_mean": float(returns[-_WINDOW:].mean()) if len(returns) else None,
            "returns": [float(each.mean()) for each in _binned(returns)],
            "lanes": whole_number(found.entry, "lanes"),
            "workers": workers,
            "mode": call.get("mode") if workers else None,
            "replaced": found.replaced,
            "resumed": found.resumed,
            "ledger": found.counts,
        }

    def _rate(self, found: Run) -> float | None:
        """Return transitions per second over the last minute, or None if it is unknown.

        The first look takes the rate since the run was begun or resumed.
        """
        now, looks = time.monotonic(), self._looks
        if not looks and (seconds := _age_of(found)) is not None:
            began = found.resumed_at[-1] if found.resumed_at else 0
            looks.append((now - seconds, began))
        looks.append((now, found.stored))
        while len(looks) > 2 and looks[1][0] < now - _RATE_SECONDS:
            looks.popleft()
        (first, before), (last, after) = looks[0], looks[-1]
        return (after - before) / (last - first) if last > first else None


def _age_of(found: Run) -> float | None:
    """Return the seconds since the run was begun or resumed; None if they are unknown."""
    try:
        began = datetime.fromisoformat(str(part(found.entry, "made").get("at")))
        age = (datetime.now(UTC) - began).total_seconds()
    except (ValueError, TypeError):  # a damaged time, or one without a zone
        return None
    return age if age > 0 else None


def _seconds_left(found: Run, rate: float | None) -> float | None:
    if not rate or rate < 0:
        return None
    if found.asked is not None:
        left = (found.asked - found.stored) / rate
    elif found.asked_episodes and found.episodes:
        left = (found.asked_episodes / found.episodes - 1) * found.stored / rate
    else:
        return None
    return max(0.0, left)


def _binned(returns: np.ndarray) -> list[np.ndarray]:
    return np.array_split(returns, min(_COLUMNS, len(returns))) if len(returns) else []


def sparkline(values: list[float]) -> str:
    """Draw values as bars, the lowest value as the lowest bar."""
    known = [each for each in values if math.isfinite(each)]
    if not known:
        return ""
    low, high = min(known), max(known)
    step = (high - low) / (len(_BARS) - 1) or math.inf
    return "".join(
        _BARS[round((each - low) / step)] if math.isfinite(each) else " " for each in values
    )


def as_text(facts: dict[str, Any]) -> str:
    """Format the facts of a look as text."""
    page = Page()
    page.print(f"{facts['path']}: {facts['state']}", style="bold")
    disk = f"{decimal(facts['bytes'])}, {decimal(facts['free_bytes'])} free"
    if "ledger" not in facts:
        why = facts.get("without_run", "no run has rows yet")
        page.print(f"{counted(facts['rows'], 'row')}; {disk}")
        page.print(f"no counts of a run: {why}")
        return page.text
    of = "" if facts["asked"] is None else f" of {facts['asked']:,}"
    said = [f"{facts['frames']:,}{of} frames of {facts['environment']}"]
    said += [] if facts["rate"] is None else [f"{facts['rate']:,.0f}/s"]
    if (left := facts["seconds_left"]) is not None and left < _MOST_SECONDS:
        said.append(f"{timedelta(seconds=round(left))} left")
    page.print(", ".join(said))
    episodes = counted(facts["episodes"], "episode")
    if facts["asked_episodes"] is not None:
        episodes = f"{facts['episodes']:,} of {counted(facts['asked_episodes'], 'episode')}"
    mean = facts["return_mean"]
    recent = "" if mean is None else f", mean return of the last {_WINDOW}: {mean:.5g}"
    page.print(f"{episodes}{recent}")
    if line := sparkline(facts["returns"]):
        page.print(f"{line}  returns")
    workers = facts["workers"]
    workers = f" in {counted(workers, facts['mode'] + ' worker')}" if workers else ""
    replaced = f", {facts['replaced']} replaced" if facts["replaced"] else ""
    page.print(f"{counted(facts['lanes'], 'lane')}{workers}{replaced}; {disk}")
    if facts["ledger"] is not None:
        page.head("Ledger at the last commit")
        show_ledger(page, facts["ledger"])
    return page.text
