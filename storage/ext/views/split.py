"""Random but reproducible split of trajectories into parts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage.errors import StorageFull
from tallyroll.storage.ext.atomic_create import atomic_creation, require_free
from tallyroll.storage.ext.joined.shards import recorded_shard
from tallyroll.storage.ext.storage_copy import CopyReport, copy
from tallyroll.storage.ext.views.trajectories import StoredTrajectories
from tallyroll.storage.ext.views.trajectory_columns import run_of
from tallyroll.storage.ext.views.view_reader import ViewReader
from tallyroll.storage.files.copied_runs import (
    SOURCES,
    bounded,
    copied_runs,
    is_copied,
)
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.formats.by_name import FILES, SUFFIXES
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import can_be_stored
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.user_code import user_callback

_LEEWAY = 1e-9
_MOST_SEED = 2**64


def split(
    trajectories: StoredTrajectories[Any],
    reader: RowReader,
    shares: Mapping[str, float],
    seed: int,
    by: str,
) -> dict[str, ViewReader]:
    """Return a reader for each part of the trajectories of a reader; see `DiskStorage.split`."""
    _check(shares, seed)
    if by not in ("trajectory", "run"):
        raise ValueError(f"split: expected by to be 'trajectory' or 'run', got {by!r:.80}.")

    def masks(table: np.ndarray) -> dict[str, np.ndarray]:
        units = table["id"] if by == "trajectory" else _runs_of(reader.runs, table["first_row"])
        known = np.unique(units)
        of_known = divided(known, shares, seed)
        if by == "run" and (empty := [name for name, mine in of_known.items() if not mine.any()]):
            raise ValueError(
                f"split: expected runs for each part, got none for {', '.join(empty)}, of "
                f"{len(known):,} in all. Give larger shares or fewer parts."
            )
        parts = {name: np.isin(units, known[mine]) for name, mine in of_known.items()}
        if empty := [name for name, mine in parts.items() if not mine.any()]:
            raise ValueError(
                f"split: expected trajectories for each part, got none for {', '.join(empty)}, of "
                f"{len(table):,} in all. Give larger shares, fewer parts, or more trajectories."
            )
        return parts

    return trajectories.parts(masks)


def _runs_of(entries: Sequence[Mapping[str, Any]], rows: np.ndarray) -> np.ndarray:
    """Return a number of the run of each of ``rows`` [n], or -1; int64 [n].

    The numbers are those of `run_of`, but entries with a common maker have the lowest of their
    numbers.
    """
    numbers = run_of(entries, np.array([entry["first_row"] for entry in entries], np.int64))
    merged = np.arange(-1, numbers.max(initial=-1) + 1)  # a union-find forest, shifted by 1

    def lowest(number: int) -> int:
        while (other := int(merged[number + 1])) != number:
            number = other
        return number

    first_of: dict[str, int] = {}
    for number, entry in zip(numbers.tolist(), entries, strict=True):
        for maker in _makers(entry):
            pair = lowest(number), lowest(first_of.setdefault(maker, number))
            merged[max(pair) + 1] = min(pair)
    of_numbers = np.array([lowest(number) for number in merged.tolist()], np.int64)
    found: np.ndarray = of_numbers[run_of(entries, rows) + 1]
    return found


def _makers(entry: Mapping[str, Any], *, in_copy: bool = False) -> Iterator[str]:
    """Yield what identifies the makers of an entry's rows: storages copied from, and shared runs.

    The entry of a shard that a worker wrote has no id of the run, so its environment, seed and
    lanes identify the run.
    """
    if is_copied(entry):
        source = bounded(entry)
        yield from (each["id"] for each in (source, *(source.get(SOURCES) or ())))
        for run in copied_runs(entry):
            yield from _makers(run, in_copy=True)
    elif (shard := recorded_shard([entry])) is not None:
        yield f"shard of {shard[0]}"
    elif in_copy and isinstance(call := entry.get("call"), Mapping) and call.get("sharded") is True:
        yield json.dumps([entry.get(name) for name in ("environment", "seed", "lanes")])


def _check(shares: Mapping[str, float], seed: int) -> None:
    """Validate the seed and the shares.

    Raises:
        ValueError: the seed or a share is out of range, or the sum of the shares exceeds 1.
        TypeError: there are no shares, or a share is not a number.
    """
    if type(seed) is not int or not 0 <= seed < _MOST_SEED:
        raise ValueError(f"split: expected a seed from 0 to 2**64 - 1, got {seed!r}.")
    if not shares:
        raise TypeError("split: expected parts and their shares, such as train=0.9, val=0.1.")
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"split: expected {name} to be a number, got {share!r}.")
        if not 0 < share <= 1:
            raise ValueError(f"split: expected {name} above 0 and at most 1, got {share!r}.")
    if (total := math.fsum(shares.values())) > 1 + _LEEWAY:
        raise ValueError(
            "split: expected shares that add up to at most 1, got "
            f"{' + '.join(map(repr, shares.values()))} = {total:g}."
        )


def divided(ids: np.ndarray, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """Divide trajectories into parts; return a mask of each part, bool [trajectories].

    Parts are disjoint, and cover all trajectories if the shares add up to 1. The result depends on
    the ids and the seed only, not on the order of the ids: trajectories are sorted by a hash of id
    and seed, and each part gets the next stretch of this order. Most trajectories therefore stay in
    their part when others are added or removed.

    Args:
        ids: trajectory ids, int64 [trajectories].
        shares: the share of each part, above 0; at most 1 in total.
        seed: the seed of the order, an unsigned 64-bit integer.
    """
    order = np.lexsort((ids, hashed(ids.astype(np.uint64) ^ hashed(np.array([seed], np.uint64)))))
    found, total, start = {}, 0.0, 0
    for name, share in shares.items():
        total += share
        stop = min(len(ids), math.floor(total * len(ids) + 0.5))
        mine = np.zeros(len(ids), np.bool_)
        mine[order[start:stop]] = True
        found[name], start = mine, stop
    return found


def hashed(numbers: np.ndarray) -> np.ndarray:
    """Hash each number with the finalizer of SplitMix64; return uint64."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray = numbers ^ (numbers >> np.uint64(31))
    return found


@user_callback("split")
def write_parts(
    parts: Mapping[str, RowReader],
    folder: str | os.PathLike[str],
    format: str = "memmap",
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, CopyReport]:
    """Write each part as a storage, named like the part, in a folder that is created atomically.

    Args:
        parts: readers of the rows, by name.
        folder: the folder for the storages; it must not exist.
        format: the format of the storages: ``"memmap"``, ``"hdf5"`` or ``"zarr"``.
        dry_run: return the reports, and write nothing.
        progress: a callback that is called periodically with the number of bytes copied and the
            total number of bytes.

    Returns:
        A report for each part, with its path.

    Raises:
        StorageFull: the parts do not fit on the disk together.
        ValueError: a name is not a valid folder name, or the format is unknown.
        OpenError, Overrun, StateMismatch: as for `DiskStorage.copy_to`.
    """
    if format not in FILES:
        raise ValueError(f"format: expected one of {', '.join(FILES)}, got {format!r:.80}.")
    for name in parts:
        if not can_be_stored(name):
            raise ValueError(f"parts: expected a name that a folder can have, got {name!r:.80}.")
    place = user_path(folder)
    require_free(place)
    suffix = next((each for each, name in SUFFIXES.items() if name == format), "")
    reports = {
        name: copy(reader, place / f"{name}{suffix}", format=format, dry_run=True)
        for name, reader in parts.items()
    }
    needed = sum(each.nbytes for each in reports.values())
    if needed > (free := min(each.free for each in reports.values())):
        raise StorageFull(
            f"{place} needs {needed} bytes for {len(parts)} parts, but only {free} bytes are "
            "free. Free disk space, or give another path."
        )
    if dry_run:
        return reports
    total = sum(each.rows * each.row_nbytes for each in reports.values())
    with atomic_creation(place) as target:
        done = 0
        target.mkdir()
        for name, reader in parts.items():

            def tell(nbytes: int, _: int, before: int = done) -> None:
                if progress is not None:
                    progress(before + nbytes, total)

            path = target / Path(reports[name].path).name
            copy(reader, path, format=format, progress=tell)
            done += reports[name].rows * reports[name].row_nbytes
    return reports
