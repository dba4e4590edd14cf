"""Checks of tables of rows: NumPy archives, Parquet files, and folders for a hub."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tallyroll.storage.errors import InvalidDataset, InvalidSchema
from tallyroll.storage.ext.dataset_checks.checker import Checker, CheckResults, Where
from tallyroll.storage.ext.dataset_checks.disk import unread
from tallyroll.storage.ext.dataset_checks.transitions import Names, TransitionChecks
from tallyroll.storage.ext.exchange.base import Incoming
from tallyroll.storage.ext.exchange.registry import format_named
from tallyroll.storage.rows.keys import (
    COUNTERS,
    DONE,
    NEXT,
    NEXT_VALID,
    REWARD,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    format_key,
)


class _Tables(Checker):
    """Checks tables of rows whose columns have the names that TorchRL uses."""

    checks = ("files", "ids", "steps", "ends", "observations", "nan", "zeros")
    suffix: ClassVar[str]

    @classmethod
    def recognises(cls, place: Path) -> bool:
        """Check the suffix of the name."""
        return place.is_file() and place.suffix == cls.suffix

    def check(self, place: Path, found: CheckResults) -> None:
        """Read all rows, one block at a time."""
        try:
            with format_named(self.name).read(place) as incoming:
                _check(incoming, found)
        except OSError as error:
            if not unread(error):
                raise
            found.add("files", "the disk cannot read a part of a file", what=str(error))
        except (InvalidDataset, InvalidSchema) as error:
            why = str(error).replace("Nothing was written.", "").strip()
            found.add("files", "the rows cannot be read", what=why)


class NpzChecker(_Tables):
    """Checks a NumPy archive with one array per column."""

    name, suffix = "npz", ".npz"


class ParquetChecker(_Tables):
    """Checks a Parquet file with one column per column of the storage."""

    name, suffix = "parquet", ".parquet"


class HfChecker(_Tables):
    """Checks a folder of Parquet files. The card in the folder is not read."""

    name, suffix = "hf", ""

    @classmethod
    def recognises(cls, place: Path) -> bool:
        """Look for a card and for Parquet files in ``data``."""
        return (place / "README.md").is_file() and any((place / "data").glob("*.parquet"))


def _check(incoming: Incoming, found: CheckResults) -> None:
    schema = incoming.schema
    shapes = {each.key: (each.dtype, each.shape) for each in schema.columns}
    names = _names(shapes, found)
    checks, row = TransitionChecks(found, names), 0
    total = incoming.rows * schema.row_nbytes
    for block in incoming.blocks:
        values: dict[str, np.ndarray] = {format_key(key): each for key, each in block.items()}
        checks.advance(values, Where(start=row))
        row += len(next(iter(values.values())))
        found.tell(row * schema.row_nbytes, total)
    checks.finish()
    found.rows = row


def _names(shapes: dict[Key, Any], found: CheckResults) -> Names:
    seen = {
        format_key(key): format_key((NEXT, *key))
        for key in shapes
        if (NEXT, *key) in shapes
        and key[-1] not in COUNTERS
        and shapes[key] == shapes[NEXT, *key]
        and key[-1] not in ("done", "terminated", "truncated", "reward")
    }

    def there(key: Key) -> str:
        one = key in shapes and math.prod(shapes[key][1]) == 1
        return format_key(key) if one else ""

    if not there(TRAJ_IDS) or not there(STEP):
        for check in ("ids", "steps", "observations"):
            found.skipped[check] = "rows have no trajectory ids, or no steps"
    return Names(
        seen,
        (),
        tuple(format_key(key) for key in shapes if key == ("action",)),
        format_key(REWARD) if REWARD in shapes else "",
        there(TERMINATED),
        there(TRUNCATED),
        there(DONE),
        "",
        there(TRAJ_IDS),
        there(STEP),
        "",
        there(NEXT_VALID),
    )
