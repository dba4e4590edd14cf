"""Checks of RLDS datasets in order: metadata, record files, episodes."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.dataset_checks.checker import Checker, CheckResults, DatasetFolder, Where
from tallyroll.storage.ext.dataset_checks.values import (
    as_flags,
    check_finite,
    check_zeros,
    observations_valid,
)
from tallyroll.storage.ext.exchange.rlds.examples import LISTS, features_in
from tallyroll.storage.ext.exchange.rlds.features import (
    ACTION,
    DISCOUNT,
    FIRST,
    LAST,
    REWARDS,
    STEPS,
    TERMINAL,
    RldsFeature,
)
from tallyroll.storage.ext.exchange.rlds.foreign import declared_feature, leaves_of
from tallyroll.storage.ext.exchange.rlds.layout import (
    FEATURES,
    INFO,
    SHARD,
    RldsInfo,
    Split,
)
from tallyroll.storage.ext.exchange.rlds.records import (
    Damage,
    records,
    require_libraries,
)
from tallyroll.storage.ext.exchange.rlds.values import RldsValues

_MOST_KEPT: Final = 2**24
"""The maximum number of episodes whose digests are kept to find duplicates."""
_CLOCKS: Final = ("timestamp", "timestamps")
_NEXT_VALID: Final = f"{STEPS}/infos/collector/next_valid"
_FLAGS: Final = tuple(f"{STEPS}/{name}" for name in (FIRST, LAST, TERMINAL))
_DISCOUNT, _ACTION, _REWARD = (f"{STEPS}/{name}" for name in (DISCOUNT, ACTION, REWARDS))


class RldsEpisodeChecks:
    """Checks records against ``features.json``.

    Raises:
        InvalidDataset: ``features.json`` has no steps.
    """

    def __init__(self, said: Any, found: CheckResults) -> None:
        self._found = found
        of_steps, of_episodes = leaves_of(said)
        self._values, self._texts, self._other = dict[str, RldsValues](), set[str](), list[str]()
        for path, each in of_steps.items():
            self._learn("/".join((STEPS, *path)), path, each, of_episode=False)
        for path, each in of_episodes.items():
            self._learn("/".join(path), path, each, of_episode=True)
        for name in _FLAGS[:2]:  # the flag of terminal steps is optional
            if name not in self._values:
                message = "a flag that RLDS requires is not among the features"
                found.add("columns", message, Where(FEATURES), column=name)
        # Observations from a finite set may repeat a whole episode legitimately.
        seen = [each.feature for each in self._values.values() if each.feature.observed]
        self._distinct = any(each.column.dtype.is_floating_point or each.picture for each in seen)
        self._seen: dict[bytes, str] = {}

    def _learn(
        self, name: str, path: tuple[str, ...], said: Mapping[str, Any], *, of_episode: bool
    ) -> None:
        feature = declared_feature(name, path, said, of_episode=of_episode)
        if feature is not None:
            self._values[name] = RldsValues(feature)
        elif "text" in said and not of_episode:
            self._texts.add(name)
        else:
            self._other.append(name)

    def check(self, content: bytes, where: Where) -> None:
        """Check a record."""
        if self._distinct:
            self._double(content, where)
        try:
            lists = features_in(content)
        except InvalidDataset as error:
            self._found.add("files", "a record cannot be read", where, f"{error!s:.200}")
            return
        self._names(lists, where)
        counts = self._counts(lists, where)
        steps = Counter(counts.values()).most_common(1)[0][0] if counts else 0
        for name, count in counts.items():
            if count != steps:
                what = f"it has {count:,} rows for {steps:,} steps"
                message = "a column has the wrong number of rows"
                self._found.add("rows", message, where, what, name)
        if steps == 0:
            self._found.add("episodes", "an episode has no steps", where)
            return
        self._found.rows += steps - 1
        self._steps({name: lists[name] for name, count in counts.items() if count == steps}, where)

    def _double(self, content: bytes, where: Where) -> None:
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if (before := self._seen.get(digest)) is not None:
            what = f"it has the same content as {before}"
            self._found.add("episodes", "an episode occurs twice", where, what)
        elif len(self._seen) < _MOST_KEPT:
            self._seen[digest] = f"{where.file}, episode {where.episode}"

    def _names(self, lists: Mapping[str, Any], where: Where) -> None:
        """Compare the names in a record with those in ``features.json``."""
        wanted = {*self._values, *self._texts}
        for name in lists:
            if name not in wanted and not any(
                name == each or name.startswith(f"{each}/") for each in self._other
            ):
                message = "a column is not among the features"
                self._found.add("columns", message, where, column=f"{name:.200}")
        for name in wanted:
            if name not in lists:
                self._found.add("columns", "a column is missing", where, column=name)

    def _counts(self, lists: Mapping[str, Any], where: Where) -> dict[str, int]:
        """Return the step count of each column whose values divide into whole steps."""
        counts = {name: len(lists[name].bytes_list.value) for name in self._texts if name in lists}
        for name, each in self._values.items():
            if name not in lists:
                continue
            try:
                count = each.count(lists[name])
            except InvalidDataset as error:
                self._wrong("a column has the wrong shape", where, error, name)
                continue
            if count == 0 and any(len(getattr(lists[name], kind).value) for kind in LISTS):
                message = "a column does not hold the declared kind of numbers"
                self._found.add("columns", message, where, column=name)
            elif not each.feature.of_episode:
                counts[name] = count
            elif count != 1:
                what = f"it has {count:,} values"
                message = "a column of the episode does not have exactly one value"
                self._found.add("columns", message, where, what, name)
        return counts

    def _wrong(self, message: str, where: Where, error: InvalidDataset, name: str) -> None:
        self._found.add("columns", message, where, f"{error!s:.200}", name)

    # --- values -----------------------------------------------------------------------------------

    def _steps(self, lists: Mapping[str, Any], where: Where) -> None:
        values = dict[str, np.ndarray]()
        for name, found in lists.items():
            if name in self._texts:
                continue
            each = self._values[name]
            if each.feature.kind == "image":
                values[name] = self._lit(each, found, where)
            elif name in _FLAGS:
                raw = np.fromiter(found.int64_list.value, np.int64, len(found.int64_list.value))
                flags = as_flags(self._found, raw, where, name)
                if flags is not None:
                    values[name] = flags
            else:
                try:
                    values[name] = each.get(found)
                except InvalidDataset as error:
                    self._wrong("values do not fit the dtype of the column", where, error, name)
        self._borders(values, where)
        self._discounts(values, where)
        self._finite(values, where)
        for name, clock in values.items():
            if name.split("/")[-1] in _CLOCKS and clock.ndim == 1 and clock.dtype.kind in "iuf":
                late = np.append(False, clock[1:] < clock[:-1])
                self._found.add_rows("timestamps", "timestamps decrease", late, where, name)

    def _lit(self, values: RldsValues, found: Any, where: Where) -> np.ndarray:
        """Check all images, and return a mask [steps, 1] of the images that are not black."""
        entries, name = found.bytes_list.value, values.feature.name
        lit = np.ones((len(entries), 1), bool)
        for row, content in enumerate(entries):
            try:
                lit[row] = values.image(content).any()
            except InvalidDataset as error:
                # An image that no library can decode is damaged. Any other error is a wrong size.
                damaged = error.__cause__ is not None
                message = "an image is damaged" if damaged else "an image has the wrong size"
                check = "files" if damaged else "columns"
                self._found.add(check, message, where, f"{error!s:.200}", name, row)
        return lit

    def _borders(self, values: Mapping[str, np.ndarray], where: Where) -> None:
        first, last, terminal = (values.get(name) for name in _FLAGS)
        if first is not None:
            step = np.arange(len(first))
            message = "the first step is not marked as first, or another step is"
            self._found.add_rows("episodes", message, first != (step == 0), where, _FLAGS[0])
        if last is not None:
            end = np.arange(len(last)) == len(last) - 1
            message = "the last step is not marked as last, or another step is"
            self._found.add_rows("episodes", message, last != end, where, _FLAGS[1])
        if terminal is not None:
            early = terminal & (np.arange(len(terminal)) < len(terminal) - 1)
            message = "steps follow a terminal step"
            self._found.add_rows("ends", message, early, where, _FLAGS[2])

    def _discounts(self, values: Mapping[str, np.ndarray], where: Where) -> None:
        discount = values.get(_DISCOUNT)
        if discount is None or discount.ndim != 1 or discount.dtype.kind != "f":
            return
        outside = ~((discount >= 0) & (discount <= 1))
        message = "a discount is not between 0 and 1"
        self._found.add_rows("ends", message, outside, where, _DISCOUNT)
        # One of the last two steps ends the episode. A writer may also have left all discounts 0.
        early = (discount == 0) & (np.arange(len(discount)) < len(discount) - 2)
        if discount.any():
            message = "a discount is 0, but the episode continues"
            self._found.add_rows("ends", message, early, where, _DISCOUNT)

    def _finite(self, values: Mapping[str, np.ndarray], where: Where) -> None:
        """Report NaN, infinity and rows of zeros.

        The action and reward of the last step belong to no transition, and are not checked.
        """
        acted, observed = list[np.ndarray](), list[np.ndarray]()
        seen = False
        valid = observations_valid(values.get(_NEXT_VALID))
        for name, each in values.items():
            feature = self._values[name].feature
            if feature.observed:
                check_finite(self._found, each, where, name, valid=valid)
                observed.append(each[:-1])
                seen |= each.dtype.kind == "f" or feature.kind == "image"
            elif _acts(feature):
                check_finite(self._found, each[:-1], where, name)
                acted.append(each[:-1])
        if seen and acted and len(acted[0]):
            check_zeros(self._found, [*observed, *acted], where)


def _acts(feature: RldsFeature) -> bool:
    name = feature.name
    return name in (_REWARD, _ACTION) or name.startswith(f"{_ACTION}/")


class RldsChecker(Checker):
    """Checks episodes in TFRecord files against the metadata of TensorFlow Datasets."""

    name = "rlds"
    checks = (
        "files",
        "metadata",
        "columns",
        "rows",
        "episodes",
        "timestamps",
        "ends",
        "nan",
        "zeros",
    )

    @classmethod
    def recognises(cls, place: Path) -> bool:
        """Look for the list of features."""
        return (place / FEATURES).is_file()

    def check(self, place: Path, found: CheckResults) -> None:
        """Read the metadata, and then one record after another."""
        require_libraries()
        folder = DatasetFolder(place, found)
        info, episodes = _info(folder, found), _episodes(folder, found)
        if info is None:
            return
        wanted = {name for each in info.splits for name in each.files}
        for name in sorted(os.listdir(place)):
            if SHARD.fullmatch(name) and name not in wanted:
                found.add("files", "a file of records belongs to no split", Where(name))
        shards = _ShardList(folder, episodes, found, len(wanted))
        for split in info.splits:
            shards.check(split)


def _info(folder: DatasetFolder, found: CheckResults) -> RldsInfo | None:
    said = folder.json(INFO)
    if said is None:
        return None
    try:
        return RldsInfo.of(said)
    except InvalidDataset as error:
        message = "the metadata are not valid for TensorFlow Datasets"
        found.add("metadata", message, Where(INFO), f"{error!s:.300}")
        return None


def _episodes(folder: DatasetFolder, found: CheckResults) -> RldsEpisodeChecks | None:
    said = folder.json(FEATURES)
    if said is None:
        return None
    try:
        return RldsEpisodeChecks(said, found)
    except InvalidDataset as error:
        message = "the features are not valid for RLDS"
        found.add("metadata", message, Where(FEATURES), f"{error!s:.300}")
        return None


class _ShardList:
    """Checks the record files of the splits."""

    def __init__(
        self,
        folder: DatasetFolder,
        episodes: RldsEpisodeChecks | None,
        found: CheckResults,
        count: int,
    ) -> None:
        self._folder, self._episodes, self._found = folder, episodes, found
        self._done, self._count = 0, count

    def check(self, split: Split) -> None:
        """Check all records of a split."""
        nbytes, whole = 0, True
        for name, length in zip(split.files, split.lengths, strict=True):
            file = self._folder.opened(name)
            if file is None:
                whole = False
                continue
            with file:
                count, size = self._records(name, file)
            self._done += 1
            self._found.tell(self._done, self._count)
            if size is None:
                whole = False
                continue
            nbytes += size
            if count != length:
                what = f"{name} has {count:,} episodes, expected {length:,}"
                self._add("a shard has the wrong number of episodes", what)
        if whole and split.nbytes not in (None, nbytes):
            what = f"the records of {split.name} have {nbytes:,} bytes, expected {split.nbytes:,}"
            self._add("a split has the wrong number of bytes", what)

    def _add(self, message: str, what: str) -> None:
        self._found.add("metadata", message, Where(INFO), what)

    def _records(self, name: str, file: Any) -> tuple[int, int | None]:
        """Return the number of records in a file and their size in bytes.

        The size is None if a record cannot be read.
        """
        count, nbytes, whole = 0, 0, True
        for content in records(file):
            where = Where(name, count)
            count += 1
            if isinstance(content, Damage):
                what = f"{content.why}, at byte {content.at:,}"
                self._found.add("files", "a record cannot be read", where, what)
                whole = False
                continue
            nbytes += len(content)
            if self._episodes is not None:
                self._episodes.check(content, where)
        return count, nbytes if whole else None
