"""Provenance of a run for the manifest: versions, seeds, and arguments of the call."""

from collections.abc import Mapping, Sequence
from typing import Any

from tallyroll.collector.counting.ledger import Ledger

MOST_SEEDS = 1024


def run_provenance(
    environment: Mapping[str, Any],
    ledger: Ledger,
    lane_seeds: Sequence[int],
    *,
    lanes: int,
    call: Mapping[str, Any],
    policy_version: int,
) -> dict[str, Any]:
    """The entry of a run in a manifest: JSON values.

    ``call`` is what of the collector's call is worth keeping. ``lane_seeds`` are those of each
    lane's first reset, none where the environment chose them; they are left out beyond
    `MOST_SEEDS`, for they follow from the seed. ``policy_version`` is what the run, or what goes
    on with it, begins with, at the entry's ``first_row``.
    """
    run: dict[str, Any] = {
        "environment": environment,
        "versions": ledger.versions,
        "seed": ledger.seed,
        "incarnation": ledger.incarnation,
        "lanes": lanes,
        "policy_version": policy_version,
        "call": dict(call),
    }
    if ledger.respawned:  # of the incarnations: the others are resumptions
        run["respawned"] = ledger.respawned
    if 0 < len(lane_seeds) <= MOST_SEEDS:
        run["lane_seeds"] = list(lane_seeds)
    return run
