"""Verify that a dataset of another library follows its format and that its data is valid."""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import import_module
from typing import Final

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.dataset_checks.checker import CHECKS, Checker, CheckResults
from tallyroll.storage.ext.exchange.base import carried, source_errors
from tallyroll.storage.ext.verification.findings import Report
from tallyroll.storage.files.paths import refuse_nothing, translated, user_path
from tallyroll.storage.rows.progress import Progress

_MODULES: Final = {
    "lerobot": ("lerobot.checks", "LerobotChecker"),
    "minari": ("minari", "MinariChecker"),
    "rlds": ("rlds.checks", "RldsChecker"),
    "torchrl": ("torchrl", "TorchrlChecker"),
    "d4rl": ("d4rl", "D4rlChecker"),
    "npz": ("tables", "NpzChecker"),
    "parquet": ("tables", "ParquetChecker"),
    "hf": ("tables", "HfChecker"),
}
"""The module and class of each kind, in the order in which `kind_at` tries them."""


def kinds() -> list[str]:
    """Return the names of all kinds that can be checked."""
    return sorted(_MODULES)


def checker_of(kind: str) -> Checker:
    """Return the checker of a kind. Raises ValueError for an unknown kind."""
    if kind not in _MODULES:
        raise ValueError(f"kind: expected one of {', '.join(kinds())}, got {kind!r:.80}.")
    module, name = _MODULES[kind]
    found: type[Checker] = getattr(import_module(f"{__package__}.{module}"), name)
    return found()


def kind_at(source: str | os.PathLike[str]) -> str | None:
    """Detect the kind of a dataset by its files. Return None if it is unknown."""
    place = user_path(source)
    return next((kind for kind in _MODULES if checker_of(kind).recognises(place)), None)


def verify_dataset(
    source: str | os.PathLike[str],
    kind: str | None = None,
    *,
    skip: Collection[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Read a whole dataset of another library, and report the errors in it.

    The checks compare counts with metadata, episodes with their boundaries, next observations with
    the rows that follow, videos with rows, and statistics with data. They execute and unpickle
    nothing in the dataset, follow no link, and do not change it. Each finding names the file,
    episode and row where possible.

    Args:
        source: a file or a folder.
        kind: the name of the format; `tallyroll verify --help` lists the names. None detects the
            format by the files.
        skip: the names of the checks to leave out, which are keys of `CHECKS`.
        progress: called during the checks with the amount read so far and the total.

    Raises:
        InvalidDataset: the kind is unknown, or the dataset cannot be checked.
        MissingLibrary: a library is not installed.
        NotEnoughMemory: a part that must be read as a whole does not fit into memory.
        OpenError: ``source`` does not exist.
        ValueError: an argument has a value that is not allowed.
    """
    if unknown := sorted({*skip} - {*CHECKS}):
        raise ValueError(
            f"skip: expected names of checks, got {', '.join(unknown)}. The checks are "
            f"{', '.join(CHECKS)}."
        )
    place = user_path(source)
    refuse_nothing(place, "Give the path of a dataset.")
    with translated(place):
        with source_errors(place):
            wanted = kind_at(place) if kind is None else kind
        if wanted is None:
            raise InvalidDataset(
                f"{place} cannot be checked: its files do not identify its format. Give its kind, "
                f"one of {', '.join(kinds())}."
            )
        checker, found = checker_of(wanted), CheckResults()
        if progress is not None:
            found.tell = carried(progress)
        try:
            with source_errors(place):
                checker.check(place, found)
        except InvalidDataset as error:
            if not isinstance(error.__cause__, Exception) or "files" in skip:
                raise
            what = f"{type(error.__cause__).__name__}: {error.__cause__!s:.200}"
            found.add("files", "the content causes an error, so the rest is not checked", what=what)
    skipped = dict.fromkeys(skip, "not wanted") | found.skipped
    made = [name for name in CHECKS if name in checker.checks]
    return Report(
        str(place),
        wanted,
        found.rows,
        tuple(
            each
            for name in made
            for each in found.findings
            if each.check == name and name not in skip
        ),
        tuple(name for name in made if name not in skipped),
        {name: skipped[name] for name in made if name in skipped},
    )
