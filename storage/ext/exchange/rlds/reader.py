"""Read the episodes of an RLDS folder, one record after another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import Block
from tallyroll.storage.ext.exchange.rlds.examples import features_in
from tallyroll.storage.ext.exchange.rlds.features import RldsFeature
from tallyroll.storage.ext.exchange.rlds.records import Damage, records
from tallyroll.storage.ext.exchange.rlds.values import RldsValues
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.rows.keys import NEXT

Steps = dict[str, np.ndarray]
"""The values of an episode by feature name, [steps, ...] each."""


class RldsSource:
    """The episodes of an RLDS folder.

    Args:
        inside: the files of the folder.
        files: the names of the shards, and the number of episodes in each.
        features: the features to read.
    """

    def __init__(
        self, inside: Inside, files: Sequence[tuple[str, int]], features: Sequence[RldsFeature]
    ) -> None:
        self._inside, self._files = inside, files
        self._values = [RldsValues(each) for each in features]

    def lengths(self) -> Iterator[int]:
        """Yield the number of steps of each episode. All checksums are verified.

        Raises:
            InvalidDataset: the files are damaged.
        """
        for found in self._records():
            yield steps_in(found, self._values)

    def episodes(self) -> Iterator[Steps]:
        """Yield the values of each episode.

        Raises:
            InvalidDataset: the files are damaged.
        """
        for found in self._records():
            yield episode_in(found, self._values)

    def _records(self) -> Iterator[Mapping[str, Any]]:
        for name, wanted in self._files:
            path, count = self._inside.root / name, 0
            with open(self._inside.open(path, os.O_RDONLY), "rb") as file:
                for content in records(file):
                    if isinstance(content, Damage):
                        raise InvalidDataset(f"{name}, byte {content.at:,}: {content.why}")
                    try:
                        yield features_in(content)
                    except InvalidDataset as error:
                        raise InvalidDataset(f"{name}, episode {count}: {error}") from error
                    count += 1
            if count != wanted:
                raise InvalidDataset(f"{name} has {count:,} episodes, expected {wanted:,}")


def steps_in(found: Mapping[str, Any], values: Iterable[RldsValues]) -> int:
    """Return the number of steps in a record.

    Raises:
        InvalidDataset: a feature is missing, or features have different numbers of steps.
    """
    steps, first = -1, ""
    for each in values:
        name = each.feature.name
        if name not in found:
            raise InvalidDataset(f"the feature {name} is missing")
        count = each.count(found[name])
        if each.feature.of_episode:
            if count != 1:
                raise InvalidDataset(f"{name} has {count:,} values, expected one")
        elif steps < 0:
            steps, first = count, name
        elif count != steps:
            raise InvalidDataset(f"{name} has {count:,} steps, but {first} has {steps:,}")
    return steps


def episode_in(found: Mapping[str, Any], values: Iterable[RldsValues]) -> Steps:
    """Return the values of a record.

    Raises:
        InvalidDataset: a value is damaged or missing.
        NotEnoughMemory: the values do not fit into memory.
    """
    steps_in(found, values)
    return {each.feature.name: each.get(found[each.feature.name]) for each in values}


def count_of(steps: Steps, features: Iterable[RldsFeature]) -> int:
    """Return the number of transitions in an episode: one less than the number of observations."""
    return len(steps[next(each.name for each in features if each.observed)]) - 1


def transitions(steps: Steps, features: Iterable[RldsFeature], count: int) -> Block:
    """Return the rows of an episode with ``count`` transitions and ``count + 1`` steps."""
    block: Block = {}
    for each in features:
        key, values = each.column.key, steps[each.name]
        if each.of_episode:
            block[key] = np.repeat(values, count, 0)
        else:
            block[key] = values[:count]
        if each.observed:
            block[(NEXT, *key)] = values[1 : count + 1]
    return block
