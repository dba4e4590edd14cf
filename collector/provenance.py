"""What made the data: versions, and the part of a call that is worth keeping."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tallyroll.collector.ledger import Ledger

_PACKAGES = ("tallyroll", "torch", "tensordict", "torchrl", "gymnasium", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the data depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def run_provenance(
    environment: Mapping[str, Any], ledger: Ledger, *, lanes: int, **call: Any
) -> dict[str, Any]:
    """What a manifest says of a run: JSON values."""
    return {
        "environment": environment,
        "versions": ledger.versions,
        "seed": ledger.seed,
        "incarnation": ledger.incarnation,
        "lanes": lanes,
        "call": call,
    }
