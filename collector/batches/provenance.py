"""Provenance of a run for the manifest: versions, seeds, and arguments of the call."""

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tallyroll.collector.counting.ledger import Ledger

MOST_SEEDS = 1024

_PACKAGES = ("tallyroll", "tensordict", "torchrl", "gymnasium", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the data depends on."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    """Looked up once: metadata are files, which take longer to read than a collector to make."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


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
