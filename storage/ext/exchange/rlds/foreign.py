"""Read RLDS datasets of other programs: map features to columns, and derive missing columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.errors import InvalidDataset, InvalidSchema
from tallyroll.storage.ext.exchange.base import Block
from tallyroll.storage.ext.exchange.numbering import flags_of_ends, numbered, numbers
from tallyroll.storage.ext.exchange.pictures import Picture
from tallyroll.storage.ext.exchange.rlds.features import (
    ACTION,
    DISCOUNT,
    FIRST,
    INFOS,
    LAST,
    OBSERVATION,
    REWARDS,
    STEPS,
    TERMINAL,
    Kind,
    RldsFeature,
)
from tallyroll.storage.ext.exchange.rlds.older import as_today
from tallyroll.storage.ext.exchange.rlds.reader import (
    Steps,
    count_of,
    transitions,
)
from tallyroll.storage.rows.dtypes import NAMES
from tallyroll.storage.rows.keys import (
    COLLECTOR,
    DONE,
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
)
from tallyroll.storage.rows.schema import Column, Schema

_DEEPEST: Final = 24
_MOST_FEATURES: Final = 2**14
_FLAGS: Final = (FIRST, LAST, TERMINAL)
_EPISODE: Final = "episode_metadata"
_RESERVED: Final = {NEXT, COLLECTOR, REWARDS, DISCOUNT, _EPISODE, *_FLAGS} | {
    key[-1] for key in (DONE, TERMINATED, TRUNCATED)
}
"""Names that have another meaning at the root of a row."""
_WHOLE: Final = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"}


def leaves_of(said: Any) -> tuple[dict[Key, Mapping[str, Any]], dict[Key, Mapping[str, Any]]]:
    """Return the features of steps and the features of episodes, by path.

    Raises:
        InvalidDataset: ``features.json`` has no steps.
    """
    top = _dictionary(as_today(said))
    steps = top.get(STEPS) if top is not None else None
    inner = steps.get("sequence") if isinstance(steps, dict) else None
    step = inner.get("feature") if isinstance(inner, dict) else None
    if top is None or _dictionary(step) is None:
        raise InvalidDataset("its features have no steps, as RLDS requires")
    rest = {name: each for name, each in top.items() if name != STEPS}
    return dict(_leaves(_dictionary(step), ())), dict(_leaves(rest, ()))


def _dictionary(said: Any) -> dict[str, Any] | None:
    inner = said.get("featuresDict") if isinstance(said, dict) else None
    found = inner.get("features", {}) if isinstance(inner, dict) else None
    return found if isinstance(found, dict) else None


def _leaves(features: Any, above: Key) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    if len(above) > _DEEPEST or len(features) > _MOST_FEATURES:
        raise InvalidDataset("its features are nested too deep, or there are too many")
    for name, each in features.items():
        below = _dictionary(each)
        if below is not None:
            yield from _leaves(below, (*above, name))
        else:
            yield (*above, name), each if isinstance(each, dict) else {}


def declared_features(said: Any) -> tuple[list[RldsFeature], int]:
    """Return the features that a storage can hold, and the number of all other features.

    Raises:
        InvalidDataset: the features do not describe an RLDS dataset.
    """
    found, groups, lost = dict[Key, RldsFeature](), set[Key](), 0
    for feature in _all_declared(said):
        key = () if feature is None else feature.column.key
        above = {key[:deep] for deep in range(1, len(key))}
        # A name belongs either to a column or to a group of columns.
        if feature is None or key in found or key in groups or above & found.keys():
            lost += 1
        else:
            found[key] = feature
            groups |= above
    if not any(each.observed for each in found.values()):
        raise InvalidDataset("it has no observation that a storage can hold")
    return [*found.values()], lost


def _all_declared(said: Any) -> Iterator[RldsFeature | None]:
    """Yield the features of steps, except the step flags, and the features of episodes.

    It yields None for a feature that no storage can hold.
    """
    of_steps, of_episodes = leaves_of(said)
    for path, each in of_steps.items():
        if path not in {(flag,) for flag in _FLAGS}:
            yield declared_feature("/".join((STEPS, *path)), key_of(path), each)
    for path, each in of_episodes.items():
        key = path if path[0] == _EPISODE else (_EPISODE, *path)
        yield declared_feature("/".join(path), key, each, of_episode=True)


def key_of(path: Key) -> Key:
    """Return the key of the column for a feature of a step."""
    if path == (REWARDS,):
        return REWARD
    if path == (DISCOUNT,):
        return (NEXT, DISCOUNT)
    return (INFOS, *path) if path[0] in _RESERVED else path


def declared_feature(
    name: str, key: Key, said: Mapping[str, Any], *, of_episode: bool = False
) -> RldsFeature | None:
    """Return a feature that ``features.json`` describes, or None if no storage can hold it."""
    observed = key[0] == OBSERVATION and not of_episode
    try:
        image, tensor, label = (said.get(each) for each in ("image", "tensor", "classLabel"))
        if isinstance(image, dict):
            return _image(name, key, image, observed=observed, of_episode=of_episode)
        if isinstance(label, dict):
            column = Column(key, torch.int64, ())
            return RldsFeature(name, column, "integers", None, observed, of_episode=of_episode)
        if not isinstance(tensor, dict):
            return None
        column = Column(key, NAMES[str(tensor.get("dtype"))], _shape(tensor))
    except (KeyError, ValueError, InvalidSchema):
        return None
    encoding = str(tensor.get("encoding", "none")).lower()
    kind: Kind = "integers" if column.dtype_name in _WHOLE else "floats"
    if encoding in ("bytes", "zlib"):
        kind = "bytes"
    if tensor.get("optional") or (kind == "floats" and column.dtype.is_complex):
        return None
    if key == REWARD and not column.shape:
        column = Column(key, column.dtype, (1,))
    zipped = encoding == "zlib"
    return RldsFeature(name, column, kind, None, observed, zipped=zipped, of_episode=of_episode)


def _image(
    name: str, key: Key, image: Mapping[str, Any], *, observed: bool, of_episode: bool
) -> RldsFeature | None:
    shape = _shape(image)
    if image.get("dtype", "uint8") != "uint8" or len(shape) != 3 or not 1 <= shape[2] <= 4:
        return None
    column, picture = Column(key, torch.uint8, shape), Picture(*shape, first=False)
    return RldsFeature(name, column, "image", picture, observed, of_episode=of_episode)


def _shape(said: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a shape.

    Raises:
        ValueError: the shape is invalid, or differs between steps.
    """
    inner = said.get("shape", {})
    sizes = inner.get("dimensions", []) if isinstance(inner, dict) else None
    if not isinstance(sizes, list):
        raise ValueError("it is not a shape")
    found = tuple(int(size) for size in sizes if type(size) in (int, str))
    if len(found) < len(sizes) or min(found, default=1) < 1:
        raise ValueError("a size is unknown")
    return found


class ForeignRows:
    """Reads the rows of a dataset of another program, and adds the columns that it derives.

    The derived columns are next observations, ends, and trajectory numbers. An episode of
    n + 1 steps has n transitions. Its last step holds the final observation.

    Raises:
        InvalidDataset: ``features.json`` does not describe an RLDS dataset.
    """

    def __init__(self, said: Any) -> None:
        self.features, columns_lost = declared_features(said)
        self.read = [*self.features, *_declared_flags(said)]
        columns = [each.column for each in self.features]
        columns += [
            Column((NEXT, *each.column.key), each.column.dtype, each.column.shape)
            for each in self.features
            if each.observed
        ]
        columns += [Column(key, torch.bool, (1,)) for key in (TERMINATED, TRUNCATED, DONE)]
        self.schema = numbered(Schema(tuple(columns)))
        self.lost = {"columns": columns_lost}
        self.lost |= dict.fromkeys(("last_actions", "ends_within_episodes", "single_steps"), 0)
        self._number = self._rows = 0

    def of(self, steps: Steps) -> Block | None:
        """Return the rows of an episode, or None if it has no transition."""
        count = count_of(steps, self.features)
        if count < 1:
            self.lost["single_steps"] += 1
            return None
        last, terminal = (self._flags(steps, f"{STEPS}/{name}") for name in (LAST, TERMINAL))
        self._rows += count
        for flag in (last, terminal):
            if flag is not None:
                self.lost["ends_within_episodes"] += int(flag[:-1].sum())
        acted = [e for e in self.features if e.column.key[0] == ACTION or e.column.key == REWARD]
        self.lost["last_actions"] += any(bool(steps[each.name][-1].any()) for each in acted)
        end = np.arange(count) == count - 1
        terminated = end & (terminal is not None and bool(terminal[-1]))
        truncated = end & ~terminated & (last is None or bool(last[-1]))
        block = transitions(steps, self.features, count)
        block[TERMINATED], block[TRUNCATED] = terminated[:, None], truncated[:, None]
        block[DONE] = block[TERMINATED] | block[TRUNCATED]
        block |= numbers(np.full(count, self._number), np.arange(count))
        self._number += 1
        return block

    def _flags(self, steps: Steps, name: str) -> np.ndarray | None:
        """Return a step flag of an episode, bool [steps], or None if the flag is missing."""
        column = next((each.column for each in self.read if each.name == name), None)
        if column is None or (values := steps.get(name)) is None:
            return None
        return flags_of_ends(values, column, name, self._rows).reshape(-1)


def _declared_flags(said: Any) -> list[RldsFeature]:
    """Return the step flags of a dataset."""
    of_steps, _ = leaves_of(said)
    found = []
    for name in _FLAGS:
        each = declared_feature(f"{STEPS}/{name}", (name,), of_steps.get((name,), {}))
        if each is not None and each.column.shape in ((), (1,)):
            found.append(each)
    return found
