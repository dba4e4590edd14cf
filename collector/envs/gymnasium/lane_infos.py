"""Conversion of one info dictionary per lane to the vector info of Gymnasium."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.collector.envs.gymnasium.info_entries import entry_of
from tallyroll.collector.slab.info import Info


def vector_info(infos: Sequence[Mapping[str, Any]], wanted: Sequence[Info]) -> dict[str, Any]:
    """Return the entries ``wanted`` of all lanes ``[lane]``, with None for lanes that lack one.

    Entries that no lane has are absent. Names that are not wanted map to None, so that messages can
    list them.
    """
    keys = [info.key for info in wanted]
    found: dict[str, Any] = dict.fromkeys(
        name for each in infos for name in each if (name,) not in keys
    )
    for key in keys:
        values = np.empty(len(infos), object)
        for lane, info in enumerate(infos):
            values[lane] = entry_of(info, key)
        if all(value is None for value in values):
            continue
        level = found
        for name in key[:-1]:
            if not isinstance(level.get(name), dict):
                level[name] = {}
            level = level[name]
        level[key[-1]] = values
    return found
