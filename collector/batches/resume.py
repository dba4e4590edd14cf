"""The run to be continued: read from a manifest, with every value checked."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.storage.errors import NotAStorage, StorageExists, StorageMissing
from tallyroll.storage.storages import DiskStorage

Resume: TypeAlias = bool | Literal["auto"]
"""Whether a run is continued; ``"auto"``: if there is one, or else a run begins."""


def checked_resume(resume: Resume) -> Resume:
    """Return ``resume`` if it is an allowed value."""
    if type(resume) is bool or resume == "auto":
        return resume
    raise ArgumentError(f'resume: expected True, False or "auto", got {resume!r}')


def opened_or_created(open: Callable[[Literal["append", "create"]], DiskStorage]) -> DiskStorage:
    """Return the existing storage, to append to it, or a new one; ``open`` takes the mode."""
    try:
        return open("append")
    except (StorageMissing, NotAStorage):
        # "create" accepts the files of a process that was killed before it wrote the manifest.
        # If it refuses, the manifest is another program's: the first message says that best.
        with suppress(StorageExists):
            return open("create")
        raise


def has_begun(storage: DiskStorage) -> bool:
    """Return whether ``storage`` holds rows or a run."""
    if storage.head:
        return True
    return storage.mode != "create" and bool(storage.manifest["runs"])


@dataclass(frozen=True)
class LastRun:
    """A run's entry in a manifest."""

    first_row: int
    """The first row of the run, however often it was resumed since."""
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
