"""The record with the counts of a run, which a collector commits with its rows. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Counts of a run when ``at`` rows were committed. Missing numbers are -1."""

    at: int
    """The number of rows committed when the record was written."""
    first_row: int
    """The first row of the run."""
    stored_before: int
    """Rows of the run in another storage, if the run continued from a loaded state."""
    seed: int
    incarnation: int
    ledger: dict[str, int]
    open: int
    """The number of trajectories that continue after these rows."""
    next_id: int
    """A number above every trajectory id so far; arbitrary in a damaged record."""
    policy_version: int = -1
    """The largest policy version so far, in records after a rewind and in sharded storages."""

    @classmethod
    def parse(cls, record: tuple[int, bytes] | None) -> Self | None:
        """Parse a storage's record; return None if there is none, or if no collector wrote it."""
        if record is None:
            return None
        at, payload = record
        try:
            value = json.loads(payload)
            first_row, before = value["first_row_of_run"], value["stored_before"]
            ledger = dict(value["ledger"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not all(map(is_count, [first_row, before, *ledger.values()])):
            return None
        numbers = [value.get(name) for name in ("seed", "incarnation", "open")]
        seed, incarnation, open_ = (n if is_count(n) else -1 for n in numbers)
        next_id = value.get("next_id")
        next_id = next_id if type(next_id) is int else -1
        version = value.get("policy_version")
        version = version if is_count(version) else -1
        return cls(at, first_row, before, seed, incarnation, ledger, open_, next_id, version)

    @property
    def is_whole(self) -> bool:
        """True if all numbers that are required to continue a run are present and valid."""
        numbers = (self.first_row, self.stored_before, self.seed, self.incarnation, self.open)
        return all(0 <= number < 2**62 for number in (*numbers, *self.ledger.values()))


def record_after(payload: bytes, *, next_id: int, incarnation: int, policy_version: int) -> bytes:
    """Return the payload of an earlier record, updated for a rewind to that record.

    Ids, incarnations and versions only grow, so the current values replace smaller ones. A payload
    that no collector wrote is returned unchanged.
    """
    record = RunRecord.parse((0, payload))
    if record is None:
        return payload
    value = json.loads(payload)
    value["next_id"] = max(record.next_id, next_id)
    value["incarnation"] = max(record.incarnation, incarnation)
    value["policy_version"] = max(record.policy_version, policy_version)
    return json.dumps(value).encode()


def record_with_version(payload: bytes, policy_version: int) -> bytes:
    """Return the payload of a record from `record_bytes`, extended by a policy version."""
    return b'%b, "policy_version": %d}' % (payload[:-1], policy_version)


def record_without(payload: bytes, counts: Mapping[str, int]) -> bytes:
    """Return the payload of a record with ``counts`` subtracted from its ledger.

    A payload that no collector wrote is returned unchanged.
    """
    if RunRecord.parse((0, payload)) is None:
        return payload
    value = json.loads(payload)
    for name, count in counts.items():
        value["ledger"][name] = max(0, value["ledger"].get(name, 0) - count)
    return json.dumps(value).encode()


@lru_cache
def record_bytes(counts: tuple[str, ...]) -> bytes:
    """Return the bytes of a record with ``%d`` for each of its numbers, in this order.

    ``counts`` are the names of the ledger's counts. The caller fills in the numbers with ``%``.
    This is fast, which matters because a single environment step may be a commit with a record.
    """
    record = {
        "first_row_of_run": 0,
        "stored_before": 0,
        "seed": 0,
        "incarnation": 0,
        "ledger": dict.fromkeys(counts, 0),
        "open": 0,
        "next_id": 0,
    }
    return json.dumps(record).replace("%", "%%").replace(": 0", ": %d").encode()


def record_template(
    counts: tuple[str, ...], first_row: int, stored_before: int, seed: int | None
) -> bytes:
    """Return the bytes of one run's record, with ``%d`` for each number that changes."""
    fixed = first_row, stored_before, -1 if seed is None else seed
    spelt = record_bytes(counts).replace(b"%d", b"%b")
    return spelt % (*(b"%d" % number for number in fixed), *[b"%d"] * (len(counts) + 3))


def is_count(value: Any) -> bool:
    """Return True if a value is a 64-bit integer. `verify` reports negative ones."""
    return type(value) is int and -(2**63) <= value < 2**63
