"""The episodes of a folder of RLDS, one record after the other."""

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
"""The values of an episode by the names of features, [steps, ...] each."""


class RldsSource:
    """The episodes of a folder, by its features.

    Args:
        inside: the files of the folder.
        files: the names of shards, and the number of episodes in each.
        features: what is read.
    """

    def __init__(
        self, inside: Inside, files: Sequence[tuple[str, int]], features: Sequence[RldsFeature]
    ) -> None:
        self._inside, self._files = inside, files
        self._values = [RldsValues(each) for each in features]

    def lengths(self) -> Iterator[int]:
        """Yield how many steps each episode has; all checksums are compared.

        Raises:
            InvalidDataset: something is damaged.
        """
        for found in self._records():
            yield steps_in(found, self._values)

    def episodes(self) -> Iterator[Steps]:
        """Yield the values of each episode.

        Raises:
            InvalidDataset: something is damaged.
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
                raise InvalidDataset(f"{name} has {count:,} episodes, and should have {wanted:,}")


def steps_in(found: Mapping[str, Any], values: Iterable[RldsValues]) -> int:
    """Return how many steps a record has.

    Raises:
        InvalidDataset: a feature is missing, or they have different numbers of them.
    """
    steps, first = -1, ""
    for each in values:
        name = each.feature.name
        if name not in found:
            raise InvalidDataset(f"there is no {name}")
        count = each.count(found[name])
        if each.feature.of_episode:
            if count != 1:
                raise InvalidDataset(f"{name} has {count:,} values, expected one")
        elif steps < 0:
            steps, first = count, name
        elif count != steps:
            raise InvalidDataset(f"{name} has {count:,} steps, and {first} has {steps:,}")
    return steps


def episode_in(found: Mapping[str, Any], values: Iterable[RldsValues]) -> Steps:
    """Return the values of a record.

    Raises:
        InvalidDataset: something is damaged, or missing.
        NotEnoughMemory: they do not fit into memory.
    """
    steps_in(found, values)
    return {each.feature.name: each.get(found[each.feature.name]) for each in values}


def count_of(steps: Steps, features: Iterable[RldsFeature]) -> int:
    """Return how many transitions an episode has: one fewer than observations."""
    return len(steps[next(each.name for each in features if each.observed)]) - 1


def transitions(steps: Steps, features: Iterable[RldsFeature], count: int) -> Block:
    """Return the rows of an episode of ``count`` transitions, and one step more."""
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
