"""Read datasets of LeRobot: map features to columns, and derive missing columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.ext.exchange.base import Block
from tallyroll.storage.ext.exchange.lerobot.features import LeRobotFeature
from tallyroll.storage.ext.exchange.numbering import flags_of_ends, numbered, numbers
from tallyroll.storage.ext.exchange.pictures import Picture
from tallyroll.storage.rows.dtypes import NAMES
from tallyroll.storage.rows.keys import (
    COLLECTOR,
    DONE,
    NEXT,
    NEXT_VALID,
    TERMINATED,
    TRUNCATED,
    Key,
    format_key,
)
from tallyroll.storage.rows.schema import Column, Schema

_NUMBERED: Final = ("frame_index", "episode_index", "index")
_OBSERVATION: Final = "observation"


def declared_features(said: dict[str, dict[str, Any]]) -> tuple[list[LeRobotFeature], int]:
    """Return the features that a storage can hold, and the number of all other features."""
    found, lost = list[LeRobotFeature](), 0
    names = [name for name in said if name not in _NUMBERED]
    keys = _keys(names)
    for name in names:
        feature = _feature(name, keys[name], said[name])
        if feature is None:
            lost += 1
        else:
            found.append(feature)
    return found, lost


def _keys(names: list[str]) -> dict[str, Key]:
    """Return the key of each name, which is the name split at dots.

    A name that would be nested below another column stays whole.
    """
    split = {name: tuple(name.split(".")) for name in names}
    columns = {*split.values()}

    def clear(key: Key) -> bool:
        return not any(key[:depth] in columns for depth in range(1, len(key)))

    return {name: key if clear(key) else (name,) for name, key in split.items()}


def _feature(name: str, key: Key, said: dict[str, Any]) -> LeRobotFeature | None:
    shape, dtype = said.get("shape"), said.get("dtype")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        return None
    if key[0] == COLLECTOR or min(shape, default=1) < 1:
        return None
    try:
        if dtype in ("image", "video"):
            return _picture(name, key, shape, said)
        column = Column(key, NAMES[str(dtype)], tuple(shape))
    except (KeyError, InvalidSchema):
        return None
    return None if column.dtype in (torch.bfloat16,) else LeRobotFeature(name, column, "numbers")


def _picture(name: str, key: Key, shape: list[int], said: dict[str, Any]) -> LeRobotFeature | None:
    info = [each for each in (said.get("info"), said.get("video_info")) if isinstance(each, dict)]
    depth = any(each.get("is_depth_map") or each.get("video.is_depth_map") for each in info)
    if depth or len(shape) != 3:
        return None
    first = said.get("names") in (["channels", "height", "width"], ["channel", "height", "width"])
    channels, height, width = shape if first else (shape[2], *shape[:2])
    if channels > 4 or (said["dtype"] == "video" and channels != 3):
        return None
    column = Column(key, torch.uint8, tuple(shape))
    picture = Picture(height, width, channels, first)
    return LeRobotFeature(name, column, "video" if said["dtype"] == "video" else "image", picture)


class DerivedColumns:
    """Derives columns: next observations, ends, and trajectory numbers.

    The next observation of a row is the observation of the episode's next row. The last row of an
    episode has lost its next observation.
    """

    def __init__(self, features: list[LeRobotFeature]) -> None:
        columns = {each.column.key: each.column for each in features}
        self._observed = [
            key for key in columns if key[0] == _OBSERVATION and (NEXT, *key) not in columns
        ]
        more = [
            Column((NEXT, *key), columns[key].dtype, columns[key].shape) for key in self._observed
        ]
        if self._observed:
            more.append(Column(NEXT_VALID, torch.bool, ()))
        flag = {key: Column(key, torch.bool, (1,)) for key in (TERMINATED, TRUNCATED, DONE)}
        self._sources = {
            key: columns[key] for key in flag if key in columns and columns[key].shape in ((), (1,))
        }
        """The end flags of the source, as bools or numbers."""
        columns |= {key: flag[key] for key in self._sources}
        self._rows = 0
        self._said = [key for key in flag if columns.get(key) == flag[key]]
        """The end flags that the source has, one bool per row."""
        more += [flag[key] for key in flag if key not in columns]
        self._flags = [key for key in flag if key in self._said or key not in columns]
        self.schema = numbered(Schema((*columns.values(), *more)))
        self.lost = {"final_observations": 0, "dones_within_episodes": 0}

    def blocks(self, rows: Iterator[tuple[Block, np.ndarray, np.ndarray]]) -> Iterator[Block]:
        """Yield rows with the derived columns.

        The last row of a block is held back until the next block arrives.
        """
        held: tuple[Block, np.ndarray, np.ndarray] | None = None
        for block, episodes, steps in rows:
            if held is not None:
                block = {key: np.concatenate([held[0][key], block[key]]) for key in block}
                episodes = np.concatenate([held[1], episodes])
                steps = np.concatenate([held[2], steps])
            count = len(episodes) - 1
            if count:
                yield self._whole(block, episodes, steps, count)
            last = {key: values[count:].copy() for key, values in block.items()}
            held = last, episodes[count:], steps[count:]
        if held is not None:
            yield self._whole(*held, 1)

    def _whole(self, block: Block, episodes: np.ndarray, steps: np.ndarray, count: int) -> Block:
        """Return the first ``count`` rows with all columns."""
        found = {key: values[:count] for key, values in block.items()}
        for key, column in self._sources.items():
            flags = flags_of_ends(found[key], column, format_key(key), self._rows)
            found[key] = flags.reshape(count, 1)
        self._rows += count
        ends = np.ones(count, bool)
        ends[: len(episodes) - 1] = np.diff(episodes)[:count] != 0
        for key in self._observed:
            after = np.concatenate([block[key][1 : count + 1], block[key][-1:]])[:count]
            after[ends] = found[key][ends]
            found[(NEXT, *key)] = after
        if self._observed:
            found[NEXT_VALID] = ~ends
            self.lost["final_observations"] += int(ends.sum())
        found |= self._ends(found, ends[:, None])
        return found | numbers(episodes[:count], steps[:count])

    def _ends(self, found: Block, last: np.ndarray) -> Block:
        """Return the end flags, bool [rows, 1]; ``last`` marks the last rows of episodes.

        LeRobot's own flag is ``next.done``. An episode that ends without it counts as truncated.
        """
        said = {key: found[key] for key in self._said}
        none = np.zeros_like(last)
        done = said.get(DONE, none)
        self.lost["dones_within_episodes"] += int((done & ~last).sum())
        terminated = said.get(TERMINATED, done & last & ~said.get(TRUNCATED, none))
        truncated = said.get(TRUNCATED, last & ~terminated)
        flags = {TERMINATED: terminated, TRUNCATED: truncated, DONE: terminated | truncated}
        return {key: flags[key] for key in self._flags}
