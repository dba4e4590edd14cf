"""Exclude columns of a random run, whose other rows, batches and counts must stay the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDictBase

from tallyroll.storage import verify

if TYPE_CHECKING:
    from random_runs import Outcome

Key = tuple[str, ...]
_REQUIRED = ("action", "reward", "done", "terminated", "truncated", "mask")


def drawn_exclusion(number: int, outcome: Outcome) -> tuple[Key, ...]:
    """Draw some of the stored columns at the root that rows can lack; () in most runs."""
    rng = np.random.default_rng([53, number])
    there = [rows for rows in (*outcome.stored, outcome.buffer) if rows is not None and len(rows)]
    if outcome.error is not None or not there or rng.random() > 0.4:
        return ()
    keys = sorted(key for key in _leaves(there[0]) if key[0] not in ("next", "collector"))
    can = [key for key in keys if key[-1] not in _REQUIRED]
    count = int(rng.integers(1, len(can) + 1)) if can else 0
    return tuple(can[at] for at in rng.permutation(len(can))[:count])


def wrong_in_excluding(
    whole: Outcome, other: Outcome, excluded: tuple[Key, ...], *, collects: bool
) -> list[str]:
    """Return the faults of the run ``other``, which excluded columns that ``whole`` stored.

    ``collects``: the batches of the first collector were read from its storage.
    """
    if other.error is not None:
        return [f"without {excluded}: {other.error!r}"]
    found = []
    mine = [run.counts for run in whole.runs]
    if mine != (theirs := [run.counts for run in other.runs]):
        found.append(f"without {excluded}: counts {theirs}, not {mine}")
    stored = [*zip(whole.stored, other.stored, strict=True)]
    if whole.buffer is not None and other.buffer is not None:
        stored.append((whole.buffer, other.buffer))
    out = {*excluded, *(("next", *key) for key in excluded)}
    for rows, fewer in stored:
        found += _unequal(rows, fewer, out, "stored")
    for run, again in zip(whole.runs, other.runs, strict=True):
        from_storage = collects and not run.number
        if len(run.copies) != len(again.copies):
            found.append(f"without {excluded}: {len(again.copies)} batches")
            continue
        for batch, twin in zip(run.copies, again.copies, strict=True):
            found += _unequal(batch, twin, out if from_storage else set(), "yielded")
    for path in other.paths:
        if path.exists() and not (report := verify(path)).sound:
            found.append(f"verify without {excluded}: {[str(each) for each in report.findings]}")
    return found


def _unequal(rows: TensorDictBase, fewer: TensorDictBase, out: set[Key], what: str) -> list[str]:
    """Return the differences of ``fewer`` from ``rows`` without the columns ``out``."""
    left, right = _leaves(rows), _leaves(fewer)
    if right.keys() != left.keys() - out:
        return [f"{what} without {sorted(out)}: {sorted(left.keys() ^ right.keys())} differ"]
    return [
        f"{what} without {sorted(out)}: another {key}"
        for key in right
        if left[key].numpy().tobytes() != right[key].numpy().tobytes()
    ]


def _leaves(rows: TensorDictBase) -> dict[Key, Any]:
    items = rows.items(True, True)
    return {(key,) if isinstance(key, str) else tuple(key): leaf for key, leaf in items}
