"""The spaces of columns, as recorded by the runs that made the rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tallyroll.storage.files.copied_runs import all_makers
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.rows.spaces import NO_SPACE, SPACES, agreed, space_of


def agreed_spaces(runs: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the spaces on which all runs agree, each as JSON, by column name."""
    return agreed(_own(run.get(SPACES)) for run in runs)


def _own(said: Any) -> dict[str, Any]:
    known = said.items() if isinstance(said, dict) else ()
    return {name: each for name, each in known if isinstance(each, dict)}


def spaces_of(entries: Iterable[Mapping[str, Any]], schema: Schema) -> dict[Key, dict[str, Any]]:
    """Return the spaces of the columns, as JSON, for rows that the runs in ``entries`` made.

    A column is left out if a run records no space for it, if the runs record different spaces, or
    if the space does not fit the column.
    """
    runs = list[Mapping[str, Any]]()
    for entry in entries:
        if not (made := all_makers(entry, unchanged=True)):
            return {}
        runs += made
    by_all, found = agreed_spaces(runs), dict[Key, dict[str, Any]]()
    for column in schema.columns:
        said = by_all.get(format_key(column.key))
        if said is not None and column.dtype is not torch.bfloat16:
            try:
                fits = space_of(said).differs(column.numpy_dtype, column.shape) is None
            except NO_SPACE:
                continue
            if fits:
                found[column.key] = dict(said)
    return found
