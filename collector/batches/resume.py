"""Read the run to be continued from a manifest, and check every value of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tallyroll.collector.errors import StateError


@dataclass(frozen=True)
class LastRun:
    """A run's entry in a manifest."""

    first_row: int
    """Of the run, whatever resumed it since."""
    seed: int
    incarnation: int
    environment: Mapping[str, Any]


def last_run_of(entries: Sequence[Mapping[str, Any]], path: Path, rows: int) -> LastRun:
    """The last of ``entries``, the runs in the manifest of the storage at ``path``.

    Raises:
        StateError: there is none, a collector did not write it, or it is damaged.
    """
    if not entries:
        raise StateError(f"{path} holds no run of a collector: append to it instead")
    last = entries[-1]
    if last.get("seed") is None or "first_row_of_run" not in last:
        raise StateError(
            f"{path} was not written by a collector: its last run has no seed; append to it instead"
        )
    for name, most in (("seed", 2**63), ("incarnation", 2**63), ("first_row_of_run", rows + 1)):
        value = last.get(name)
        if type(value) is not int or not 0 <= value < most:
            raise _damaged(path, name, value)
    environment = last.get("environment", {})
    if not isinstance(environment, dict):
        raise _damaged(path, "environment", environment)
    return LastRun(last["first_row_of_run"], last["seed"], last["incarnation"], environment)


def _damaged(path: Path, name: str, value: Any) -> StateError:
    return StateError(
        f"the last run in the manifest of {path} is damaged: {name} is {value!r}; restore it, or "
        "append a new run instead"
    )
